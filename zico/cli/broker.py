"""``zico broker``: a broker in the foreground, for programs that import the adapters themselves."""

from __future__ import annotations

from pathlib import Path

import click

from zico.base.rundir import socket_for
from zico.base.settings import DEFAULT_EXPECTED_JOBS, SOCKET_VARIABLE
from zico.cli.options import PoolCommand, described, pool_options, setting, settings_from


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
@click.option("--until", type=int, metavar="PID", help="End when process PID and the last job have ended.")
@click.pass_context
def broker(
    ctx: click.Context, /, *, socket: Path | None, record: Path | None, until: int | None, **_settings: object
) -> int:
    """Run a broker without jobs; they join it later.

    It prints "ready" when jobs can join, and runs until Ctrl-C. Scripts join it that import an
    adapter (import zico.adapters.torch); with --socket, those for which ZICO_SOCKET names it.
    """
    settings = settings_from(ctx)
    path = socket or socket_for(settings.device.value)
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
    if until is not None:
        arguments += ["--parent-pid", str(until)]
    if record is not None:
        arguments += ["--record", str(record)]
    if not settings.metrics.value:
        return main(arguments)
    from zico.broker.metrics import Address

    with Address(settings.metrics) as address:
        click.echo(f"zico: metrics: {address.url}", err=True)
        return main([*arguments, "--metrics-fd", str(address.socket.detach())])
