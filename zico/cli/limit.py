"""``zico limit``: another budget for a running broker's pool, or other figures for one of its jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from zico.base.units import format_bytes
from zico.cli.brokers import JOB_HELP, broker_options, jobs_begun
from zico.cli.options import share_text
from zico.launch.brokers import Brokers, Meant, change_of

if TYPE_CHECKING:
    from pathlib import Path

    from zico.broker.protocol.messages import Status


@click.command()
@click.argument("size", required=False)
@click.option(
    "--job", metavar="NAME[/PID]", shell_complete=jobs_begun, help=f"Change this job instead of the budget. {JOB_HELP}"
)
@click.option("--weight", metavar="W", help="How much the job's throughput counts.")
@click.option("--priority", metavar="N", help="Jobs of a higher priority start first.")
@click.option("--slo", metavar="10%", help="By how much the job may be slower than alone; none removes the promise.")
@broker_options
def limit(
    *,
    size: str | None,
    job: str | None,
    weight: str | None,
    priority: str | None,
    slo: str | None,
    socket: Path | None,
    device: str | None,
) -> int:
    """Change the budget of a running broker to SIZE, or change one of its jobs.

    SIZE is 20GiB, 512M, or a share of the first budget, such as 50%. none means all memory there
    is, or no limit for the job. No job is stopped. A larger budget takes effect at once, a smaller
    one as jobs return memory. A job's limit is for each of its processes.
    """
    with Brokers(socket, device) as brokers:
        path, before, meant = (*brokers.only(), None) if job is None else brokers.having(job)
        after, processes = brokers.change(path, change_of(size, meant, weight, priority, slo, before))
    click.echo(f"zico: {told(meant, processes, before, after)}", err=True)
    return 0


def told(job: Meant | None, processes: int, before: Status, after: Status) -> str:
    """Return what has come to be of the budget, or of so many processes of a job, as a sentence."""
    if job is not None:
        now = next(iter(job.among(after.jobs)), None)
        if now is None:
            return f"{job} has ended"
        each = " each" if processes > 1 else ""
        may_hold = f"may hold {format_bytes(now.limit_bytes)}{each}" if now.limit_bytes else "has no limit of its own"
        return f"{job.as_changed(processes)} {may_hold}, {share_text(now.share)}"
    text = f"the budget was {format_bytes(before.budget_bytes)} and is {format_bytes(after.budget_bytes)}"
    held_bytes = after.granted_bytes + after.shared_bytes
    if held_bytes > after.budget_bytes:
        return f"{text}; jobs hold {format_bytes(held_bytes)}, and get no more until enough of it is returned"
    return text
