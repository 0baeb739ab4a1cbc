"""``zico pause`` and ``zico resume``: a job stops at its next iteration boundary, and goes on from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from zico.broker.protocol.messages import Change
from zico.cli.brokers import Brokers, broker_options

if TYPE_CHECKING:
    from pathlib import Path

    from zico.broker.protocol.messages import Status


@click.command()
@click.argument("job")
@click.option("--move", is_flag=True, help="Move what the job keeps between iterations out of the budget.")
@broker_options
def pause(*, job: str, move: bool, socket: Path | None, device: str | None) -> int:
    """Let JOB begin no further iteration until zico resume.

    The job ends its iteration first, and nothing in it is killed. What it keeps between iterations
    stays, or, with --move, leaves the budget until the job goes on.
    """
    after = _changed(socket, device, job, Change(job=job, paused=True, move=move))
    click.echo(f"zico: {told(job, after)}", err=True)
    return 0


@click.command()
@click.argument("job")
@broker_options
def resume(*, job: str, socket: Path | None, device: str | None) -> int:
    """Let the paused JOB go on."""
    after = _changed(socket, device, job, Change(job=job, paused=False))
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


def _changed(socket: Path | None, device: str | None, job: str, wanted: Change) -> Status:
    """Return the pool after a change."""
    with Brokers(socket, device) as brokers:
        path, _ = brokers.having(job)
        return brokers.change(path, wanted)
