"""``zico broker``: a broker in the foreground, for programs that import the adapters themselves."""

from __future__ import annotations

from pathlib import Path

import click

from zico.cli.options import described, pool_options, settings_from
from zico.config import DEFAULT_EXPECTED_JOBS, SOCKET_VARIABLE, Flags
from zico.launch.rundir import default_socket


@click.command()
@pool_options
@click.option(
    "--jobs", metavar="N", help=f"How many jobs to keep the --reserve for (default: {DEFAULT_EXPECTED_JOBS})."
)
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Where to listen (default: in the user's runtime directory).",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="At the end, write what happened to this .npz file.",
)
def broker(  # noqa: PLR0913 - one parameter per option
    *,
    budget: str | None,
    reserve: str | None,
    jobs: str | None,
    device: str | None,
    policy: str | None,
    region: str | None,
    isolate: str | None,
    most: str | None,
    log_level: str | None,
    socket: Path | None,
    record: Path | None,
) -> int:
    """Run a broker without jobs; they join it later.

    It prints "ready" when jobs can join, and runs until Ctrl-C. A job joins when ZICO_SOCKET names the broker's socket.
    """
    flags = Flags(
        budget=budget,
        reserve=reserve,
        jobs=jobs,
        device=device,
        policy=policy,
        region=region,
        log_level=log_level,
        isolate=isolate,
        most=most,
    )
    settings = settings_from(flags)
    path = socket or default_socket()
    click.echo(f"zico: {described(settings)}", err=True)
    if settings.warning:
        click.echo(f"zico: {settings.warning}", err=True)
    click.echo(f"zico: jobs join with {SOCKET_VARIABLE}={path}", err=True)

    from zico.broker.__main__ import main

    arguments = ["--socket", str(path)]
    arguments += ["--budget-bytes", str(settings.budget_bytes.value)]
    arguments += ["--most-bytes", str(settings.most_bytes.value)]
    arguments += ["--region-bytes", str(settings.region_bytes.value)]
    arguments += ["--device", settings.device.value, *(["--isolate"] if settings.isolate.value else [])]
    arguments += ["--policy", settings.policy.value, "--log-level", settings.log_level.value]
    if record is not None:
        arguments += ["--record", str(record)]
    return main(arguments)
