"""What a run shows: the jobs' output line by line, and Zico's own words and progress on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Self, TextIO, cast

from rich.live import Live
from rich.table import Table
from rich.text import Text

from zico.base.units import format_bytes
from zico.cli.options import STDOUT
from zico.launch.jobs import Listener, Stream
from zico.report.console import TextConsole
from zico.report.model import state_of, waits_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from zico.broker.protocol.messages import JobReport
    from zico.report.model import JobProgress, PoolProgress, Snapshot


# -- how far a run is: a live table on a terminal, plain lines elsewhere ---------------------------

BAR_CELLS = 20
_FULL, _EMPTY = "█", "·"


def live_table(snapshot: Snapshot) -> Table:
    """Return the jobs' states as a table for a terminal."""
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for column, justify in (("job", "left"), ("state", "left"), ("iterations", "right"), ("it/s", "right")):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    if snapshot.has_several_devices:
        table.add_column("device", no_wrap=True)
        table.add_column("memory", no_wrap=True)
    else:
        table.add_column(f"memory of {format_bytes(snapshot.pools[0].budget_bytes)}", no_wrap=True)
    table.add_column("waiting for", overflow="ellipsis", no_wrap=True)
    for number, job in enumerate(snapshot.jobs):
        for row in _live_rows(snapshot, job, colour_of(number)):
            table.add_row(*row)
    return table


def plain_lines(snapshot: Snapshot) -> Iterator[str]:
    """Yield one line per job for a log."""
    for job in snapshot.jobs:
        members, pool = snapshot.processes_of(job), snapshot.pool_of(job)
        where = f" on {pool.device}" if snapshot.has_several_devices else ""
        if not members:
            yield f"{job.name}{where}: {_state_outside(job, pool)}"
        for member in members:
            whom = waits_for(member, pool.members)
            waits = f", waiting {member.waiting_s:.1f} s for {whom}" if member.waiting_s else ""
            saves = f", saves by {member.saving.planner}" if member.saving.planner else ""
            yield (
                f"{member.name}{where}: {_state(job, member)}, {member.iterations} iterations, "
                f"{member.iterations_per_s:.2f} it/s, holds {format_bytes(member.held_bytes)} "
                f"of {format_bytes(pool.budget_bytes)}{saves}{waits}"
            )


# Colours of the terminal's own palette, so that they suit its background.
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def colour_of(number: int) -> str:
    """Return the terminal colour of the job with that place in the order of commands."""
    return _COLOURS[number % len(_COLOURS)]


def _live_rows(snapshot: Snapshot, job: JobProgress, colour: str) -> Iterator[tuple[Text, ...]]:
    members, pool = snapshot.processes_of(job), snapshot.pool_of(job)
    where = (Text(pool.device),) if snapshot.has_several_devices else ()
    if not members:
        state = Text(_state_outside(job, pool))
        yield (Text(job.name, style=colour), state, Text(""), Text(""), *where, Text(""), Text(""))
    for member in members:
        bar = memory_bar(member.held_bytes, pool.budget_bytes)
        yield (
            Text(member.name, style=colour),
            Text(_state(job, member)),
            Text(str(member.iterations)),
            Text(f"{member.iterations_per_s:.2f}"),
            *where,
            Text.assemble((bar, colour), " ", format_bytes(member.held_bytes)),
            Text(waits_for(member, pool.members) if member.waiting_s else ""),
        )


def memory_bar(held_bytes: int, budget_bytes: int) -> str:
    """Return a bar whose filled part is the share of the budget that is held."""
    share = min(1.0, held_bytes / budget_bytes)
    filled = round(share * BAR_CELLS)
    return _FULL * filled + _EMPTY * (BAR_CELLS - filled)


def _state(job: JobProgress, member: JobReport) -> str:
    return state_of(member) if job.exit_code is None else _end(job)


def _state_outside(job: JobProgress, pool: PoolProgress) -> str:
    if job.exit_code is not None:
        return _end(job)
    if pool.status is None:
        return "not known, as the broker does not answer"
    return "outside the budget" if job.is_outside else "no framework imported yet"


def _end(job: JobProgress) -> str:
    return "ended" if job.exit_code == 0 else f"failed ({job.exit_code})"


# --------------------------------------------------------------------------------------------------

LIVE_INTERVAL_S = 0.5
PLAIN_INTERVAL_S = 10.0


class Display(Listener):
    """Writes what happens to this process's streams. Enter it before the run, leave it afterwards.

    The jobs' bytes are passed on as they are, with the job's name before each line. On a terminal a
    live table stands below them: it is taken away while lines are written and drawn again after
    them.
    """

    def __init__(self, names: Sequence[str], *, quiet: bool, json_path: Path | None = None) -> None:
        """Show the jobs called ``names``.

        Args:
            names: Of the jobs.
            quiet: Leave messages and progress out.
            json_path: Where the figures go: if to stdout, nothing else does.
        """
        self._quiet = quiet
        self._console = TextConsole(sys.stderr)
        self._live: Live | None = None
        self._table = Table()
        self._is_live = self._console.is_terminal and not quiet
        self.interval_s = LIVE_INTERVAL_S if self._is_live else PLAIN_INTERVAL_S
        self._shown_s = time.monotonic()
        self._files = {stream: cast("TextIO", getattr(sys, stream.value)) for stream in Stream}
        if json_path == STDOUT:
            self._files[Stream.STDOUT] = sys.stderr
        self._numbers = {name: number for number, name in enumerate(names)}
        self._width = max(map(len, names))
        self._prefixes: dict[tuple[str, Stream], bytes] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hide()

    def output(self, name: str, stream: Stream, lines: list[bytes]) -> None:
        """Write a job's lines to the same stream of ours, or to stderr where stdout is for figures."""
        prefix = self._prefix_of(name, stream)
        with self._above_the_table():
            file = self._files[stream]
            file.flush()
            file.buffer.write(b"".join(prefix + line + b"\n" for line in lines))
            file.buffer.flush()

    def message(self, text: str) -> None:
        """Write a line of our own unless quiet."""
        if not self._quiet:
            self.problem(text)

    def problem(self, text: str) -> None:
        """Write a line of our own."""
        # Without a reader of our words the jobs go on.
        with contextlib.suppress(BrokenPipeError), self._above_the_table():
            self._console.say(f"zico: {text}")

    def progress(self, snapshot: Snapshot) -> None:
        """Draw the table again on a terminal; elsewhere write a line per job every ``PLAIN_INTERVAL_S``."""
        if self._is_live:
            self._table = live_table(snapshot)
            if self._live is None:
                self._show()
            else:
                self._live.update(self._table, refresh=True)
        elif time.monotonic() - self._shown_s >= PLAIN_INTERVAL_S:
            self._shown_s = time.monotonic()
            for line in plain_lines(snapshot):
                self.message(line)

    def _prefix_of(self, name: str, stream: Stream) -> bytes:
        """Return what stands before a job's lines; a second try of a sweep's job has a name that was not known."""
        if (name, stream) not in self._prefixes:
            colour = colour_of(self._numbers.setdefault(name, len(self._numbers)))
            console = TextConsole(self._files[stream])
            with console.capture() as captured:
                console.print(Text.assemble((f"{name:{self._width}}", colour), " | "), end="", soft_wrap=True)
            self._prefixes[name, stream] = captured.get().encode()
        return self._prefixes[name, stream]

    @contextlib.contextmanager
    def _above_the_table(self) -> Iterator[None]:
        """Take the table away for as long as something else is written."""
        shown = self._live is not None
        self._hide()
        try:
            yield
        finally:
            if shown:
                self._show()

    def _show(self) -> None:
        # A new one each time: a stopped one would erase as many lines as it once had, whatever
        # stands there now.
        self._live = Live(
            self._table,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
