"""``zico broker``: a broker in the foreground, for programs that import the adapters themselves."""

from __future__ import annotations

from pathlib import Path

import click

from zico.base.settings import DEFAULT_EXPECTED_JOBS, SOCKET_VARIABLE
from zico.cli.options import PoolCommand, described, pool_options, setting, settings_from
from zico.launch.rundir import default_socket


@click.command(cls=PoolCommand)
@pool_options
@setting("--jobs", metavar="N", help=f"How many jobs to keep the --reserve for (default: {DEFAULT_EXPECTED_JOBS}).")
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
@click.pass_context
def broker(ctx: click.Context, /, *, socket: Path | None, record: Path | None, **_settings: object) -> int:
    """Run a broker without jobs; they join it later.

    It prints "ready" when jobs can join, and runs until Ctrl-C. A job joins when ZICO_SOCKET names
    the broker's socket.
    """
    settings = settings_from(ctx)
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
