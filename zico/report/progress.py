"""How far a run is: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from zico.report.model import waits_for
from zico.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.broker.messages import JobReport
    from zico.report.model import JobProgress, Snapshot

BAR_CELLS = 20
_FULL, _EMPTY = "█", "·"


def live_table(snapshot: Snapshot) -> Table:
    """Return the jobs' states as a table for a terminal."""
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for column, justify in (("job", "left"), ("state", "left"), ("iterations", "right"), ("it/s", "right")):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column(f"memory of {format_bytes(snapshot.budget_bytes)}", no_wrap=True)
    table.add_column("waiting for", overflow="ellipsis", no_wrap=True)
    for number, job in enumerate(snapshot.jobs):
        for row in _live_rows(snapshot, job, _COLOURS[number % len(_COLOURS)]):
            table.add_row(*row)
    return table


def plain_lines(snapshot: Snapshot) -> Iterator[str]:
    """Yield one line per job for a log."""
    for job in snapshot.jobs:
        members = snapshot.processes_of(job.name)
        if not members:
            yield f"{job.name}: {_state(job, None)}"
        for member in members:
            whom = waits_for(member, snapshot.members)
            waits = f", waiting {member.waiting_s:.1f} s for {whom}" if _is_waiting(member) else ""
            yield (
                f"{member.name}: {_state(job, member)}, {member.iterations} iterations, "
                f"{member.iterations_per_s:.2f} it/s, holds {format_bytes(member.held_bytes)} "
                f"of {format_bytes(snapshot.budget_bytes)}{waits}"
            )


# Colours of the terminal's own palette, so that they suit its background.
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def colour_of(number: int) -> str:
    """Return the terminal colour of the job with that place in the order of commands."""
    return _COLOURS[number % len(_COLOURS)]


def _live_rows(snapshot: Snapshot, job: JobProgress, colour: str) -> Iterator[tuple[Text, ...]]:
    members = snapshot.processes_of(job.name)
    if not members:
        yield (Text(job.name, style=colour), Text(_state(job, None)), Text(""), Text(""), Text(""), Text(""))
    for member in members:
        bar = memory_bar(member.held_bytes, snapshot.budget_bytes)
        yield (
            Text(member.name, style=colour),
            Text(_state(job, member)),
            Text(str(member.iterations)),
            Text(f"{member.iterations_per_s:.2f}"),
            Text.assemble((bar, colour), " ", format_bytes(member.held_bytes)),
            Text(waits_for(member, snapshot.members) if _is_waiting(member) else ""),
        )


def memory_bar(held_bytes: int, budget_bytes: int) -> str:
    """Return a bar whose filled part is the share of the budget that is held."""
    share = min(1.0, held_bytes / budget_bytes)
    filled = round(share * BAR_CELLS)
    return _FULL * filled + _EMPTY * (BAR_CELLS - filled)


def _state(job: JobProgress, member: JobReport | None) -> str:
    if job.exit_code is not None:
        return "ended" if job.exit_code == 0 else f"failed ({job.exit_code})"
    if member is None:
        return "no framework imported yet"
    if _is_waiting(member):
        return "waits for memory" if member.need_bytes else "waits to start"
    return member.state


def _is_waiting(member: JobReport) -> bool:
    return member.waiting_s > 0
