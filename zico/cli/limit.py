"""``zico limit``: another budget for a running broker's pool, or other figures for one of its jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from zico.base.errors import ConfigError
from zico.base.units import format_bytes, parse_size
from zico.broker.protocol.messages import MAX_SIZE_BYTES, Change
from zico.broker.shares import parse_priority, parse_slo, parse_weight
from zico.cli.brokers import JOB_HELP, Brokers, Meant, broker_options
from zico.cli.options import share_text

if TYPE_CHECKING:
    from pathlib import Path

    from zico.broker.protocol.messages import Status

NO_LIMIT = "none"


@click.command()
@click.argument("size", required=False)
@click.option("--job", metavar="NAME[/PID]", help=f"Change this job instead of the budget. {JOB_HELP}")
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
        after, processes = brokers.change(path, _wanted(size, meant, weight, priority, slo, before))
    click.echo(f"zico: {told(meant, processes, before, after)}", err=True)
    return 0


def _wanted(
    size: str | None, job: Meant | None, weight: str | None, priority: str | None, slo: str | None, pool: Status
) -> Change:
    """Return the change that the options ask for.

    Raises:
        ConfigError: They ask for none, or a figure cannot be.
    """
    of_job = [option for option in (weight, priority, slo) if option is not None]
    if size is None and not of_job:
        raise ConfigError("nothing to change: give a SIZE, or --job with a SIZE, --weight, --priority or --slo")
    if job is None and of_job:
        raise ConfigError("--weight, --priority and --slo change one job: name it with --job")
    size_bytes = msgspec.UNSET if size is None else size_bytes_of(size, pool, of_job=job is not None)
    return Change(
        job=msgspec.UNSET if job is None else job.name,
        pid=msgspec.UNSET if job is None else job.only_pid,
        budget_bytes=size_bytes if job is None else msgspec.UNSET,
        limit_bytes=size_bytes if job is not None else msgspec.UNSET,
        weight=msgspec.UNSET if weight is None else parse_weight(weight),
        priority=msgspec.UNSET if priority is None else parse_priority(priority),
        slo=msgspec.UNSET if slo is None else parse_slo(slo),
    )


def size_bytes_of(text: str, pool: Status, *, of_job: bool) -> int:
    """Return what a SIZE means to a pool, or to a job of it; 0: no limit of the job's own."""
    cleaned = text.strip()
    if cleaned.lower() == NO_LIMIT:
        return 0 if of_job else pool.most_bytes
    whole_bytes = pool.first_budget_bytes if cleaned.endswith("%") else MAX_SIZE_BYTES
    return parse_size(cleaned, whole_bytes=whole_bytes)


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
    if after.granted_bytes > after.budget_bytes:
        return f"{text}; jobs hold {format_bytes(after.granted_bytes)}, and get no more until enough of it is returned"
    return text
