"""``zico pause`` and ``zico resume``: a job stops at its next iteration boundary, and goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zico.broker.client import BrokerClient
from zico.broker.protocol.messages import Change
from zico.cli.options import ANSWER_S, candidates, only_broker

if TYPE_CHECKING:
    from zico.broker.protocol.messages import Status

_socket_option = click.option(
    "--socket",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The broker's socket (default: $ZICO_SOCKET, else the only broker that runs).",
)


@click.command()
@click.argument("job")
@click.option("--move", is_flag=True, help="Move what the job keeps between iterations out of the budget.")
@_socket_option
def pause(*, job: str, move: bool, socket: Path | None) -> int:
    """Let JOB begin no further iteration until zico resume.

    The job ends its iteration first, and nothing in it is killed. What it keeps between iterations
    stays, or, with --move, leaves the budget until the job goes on.
    """
    after = _changed(socket, Change(job=job, paused=True, move=move))
    click.echo(f"zico: {told(job, after)}", err=True)
    return 0


@click.command()
@click.argument("job")
@_socket_option
def resume(*, job: str, socket: Path | None) -> int:
    """Let the paused JOB go on."""
    after = _changed(socket, Change(job=job, paused=False))
    click.echo(f"zico: {told(job, after)}", err=True)
    return 0


def told(job: str, after: Status) -> str:
    """Return what has come to be of a job that was paused or resumed, as a sentence."""
    states = {one.state for one in after.jobs if one.name == job}
    if not states:
        return f"{job} has ended"
    if "pausing" in states:
        return f"{job} pauses when its iteration ends"
    return f"{job} is paused" if "paused" in states else f"{job} goes on"


def _changed(socket: Path | None, wanted: Change) -> Status:
    """Return the pool after a change."""
    path, _ = only_broker(candidates(socket))
    with BrokerClient(path, ANSWER_S) as client:
        client.change(wanted)
        return client.status()
