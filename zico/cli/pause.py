"""``zico pause`` and ``zico resume``: a job stops at its next iteration boundary, and goes on from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from zico.broker.protocol.messages import Change
from zico.cli.brokers import broker_options, jobs_begun
from zico.launch.brokers import Brokers, Meant

if TYPE_CHECKING:
    from pathlib import Path

    from zico.broker.protocol.messages import Status


@click.command()
@click.argument("job", metavar="NAME[/PID]", shell_complete=jobs_begun)
@click.option("--move", is_flag=True, help="Move what the job keeps between iterations out of the budget.")
@broker_options
def pause(*, job: str, move: bool, socket: Path | None, device: str | None) -> int:
    """Let a job begin no further iteration until zico resume.

    The job ends its iteration first, and nothing in it is killed. What it keeps between iterations
    stays, or, with --move, leaves the budget until the job goes on.

    NAME means every process of that name, such as the ranks of one job. NAME/PID means one of them,
    with the ranks that begin iterations together with it.
    """
    return _change(socket, device, job, paused=True, move=move)


@click.command()
@click.argument("job", metavar="NAME[/PID]", shell_complete=jobs_begun)
@broker_options
def resume(*, job: str, socket: Path | None, device: str | None) -> int:
    """Let a paused job go on; NAME and NAME/PID mean the same as for zico pause."""
    return _change(socket, device, job, paused=False)


def told(job: Meant, processes: int, after: Status) -> str:
    """Return what has come to be of so many processes of a job that was paused or resumed, as a sentence."""
    states = {one.state for one in job.among(after.jobs)}
    if not states:
        return f"{job} has ended"
    name = job.as_changed(processes)
    if "pausing" in states:
        return f"{name} pauses when its iteration ends"
    return f"{name} is paused" if "paused" in states else f"{name} goes on"


def _change(socket: Path | None, device: str | None, job: str, *, paused: bool, move: bool = False) -> int:
    with Brokers(socket, device) as brokers:
        path, _, meant = brokers.having(job)
        after, processes = brokers.change(path, Change(job=meant.name, pid=meant.only_pid, paused=paused, move=move))
    click.echo(f"zico: {told(meant, processes, after)}", err=True)
    return 0
