"""What ``zico top`` shows of brokers' statuses, and what its keys do. Pure: no terminal, no clock, no broker."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from zico.base.errors import ConfigError
from zico.base.units import format_bytes
from zico.broker.protocol.messages import Change, Share
from zico.broker.shares import parse_weight
from zico.cli.display import colour_of
from zico.cli.options import compute_text, share_text
from zico.launch.brokers import size_bytes_of
from zico.report.model import state_of, waits_for
from zico.report.table import outside_lines, shared_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from zico.broker.protocol.messages import JobReport, Status

# -- how fast jobs are -----------------------------------------------------------------------------

RECENT_S = 10.0
_FEW = 2  # iterations in that time: below, the mean since the job's first one says more

Process = tuple[int, int]
"""A job's place in the pool and its process: a place may be another job's later."""


def process_of(job: JobReport) -> Process:
    """Return what tells a job from one that has its place later."""
    return job.job, job.pid


class Rates:
    """Iterations per second in the last ``RECENT_S``, from the statuses that were seen."""

    def __init__(self) -> None:
        self._seen: dict[Process, collections.deque[tuple[float, int]]] = {}

    def noted(self, status: Status) -> Mapping[Process, float]:
        """Take a status in and return the rates of its jobs; the mean since its start for one that is slow or new."""
        seen = {process_of(job): self._seen.get(process_of(job), collections.deque()) for job in status.jobs}
        self._seen = seen
        rates = {}
        for job in status.jobs:
            points = seen[process_of(job)]
            points.append((status.uptime_s, job.iterations))
            while len(points) > 1 and points[1][0] <= status.uptime_s - RECENT_S:
                points.popleft()
            (first_s, first), (last_s, last) = points[0], points[-1]
            is_known = last_s > first_s and last - first >= _FEW
            rates[process_of(job)] = (last - first) / (last_s - first_s) if is_known else job.iterations_per_s
        return rates


# -- the keys --------------------------------------------------------------------------------------


Pools: TypeAlias = "Sequence[tuple[Path, Status]]"
"""Each pool with its broker's socket, in the order in which they are shown."""
Wanted: TypeAlias = "tuple[Path, Change]"
"""A change comes with the socket of the broker that is to make it."""


class Asks(enum.Enum):
    """What a person is asked to type."""

    BUDGET = "budget of {device} (such as 20GiB, 50%, none)"
    LIMIT = "limit of {job} (such as 2GiB, none)"
    WEIGHT = "weight of {job} (such as 2)"


@dataclasses.dataclass(frozen=True)
class Row:
    """What a person may choose: a job, or a pool without one."""

    path: Path
    """The socket of the pool's broker."""
    job: str = ""
    """Empty: the pool has none."""


def rows_of(pools: Pools) -> list[Row]:
    """Return what may be chosen, from the top of the screen to its bottom."""
    return [Row(path, name) for path, status in pools for name in [job.name for job in status.jobs] or [""]]


@dataclasses.dataclass(frozen=True)
class Screen:
    """What keys have done so far."""

    selected: int = 0
    """Among the rows of all pools."""
    asks: Asks | None = None
    about: Row | None = None
    """What it is that is asked about, whatever comes and goes meanwhile."""
    typed: str = ""
    message: str = ""
    """What the last key came to; empty: nothing to say."""
    ends: bool = False

    def index(self, pools: Pools) -> int:
        """Return which row is selected now: jobs may have gone."""
        return max(0, min(self.selected, len(rows_of(pools)) - 1))


KEYS = "up/down choose   l limit   w weight   p pause   m pause and move   r resume   b budget   q quit"
UP, DOWN, ENTER, ESCAPE, BACKSPACE = "up", "down", "enter", "escape", "backspace"
_ARROWS = {b"\x1b[A": UP, b"\x1bOA": UP, b"\x1b[B": DOWN, b"\x1bOB": DOWN}
_SEQUENCES = _ARROWS | {b"\r": ENTER, b"\n": ENTER, b"\x7f": BACKSPACE, b"\x08": BACKSPACE}
_LONGEST = 3
_STEPS = {UP: -1, "k": -1, DOWN: 1, "j": 1}
_ASKS = {"l": Asks.LIMIT, "w": Asks.WEIGHT}
_PAUSES = {"p": (True, False), "m": (True, True), "r": (False, False)}
MOST_TYPED = 40
NO_JOB = "no job has joined yet"


def keys_in(data: bytes) -> list[str]:
    """Return the keys in what a terminal has sent: names of special ones, else characters; unknown ones are dropped."""
    keys = []
    at = 0
    while at < len(data):
        length = next((n for n in range(_LONGEST, 0, -1) if data[at : at + n] in _SEQUENCES), 0)
        if length:
            keys.append(_SEQUENCES[data[at : at + length]])
        elif data[at : at + 1] == b"\x1b":
            if data[at + 1 : at + 2] in {b"[", b"O"}:  # another special key, up to its last letter
                end = at + 2
                while end < len(data) and not data[end : end + 1].isalpha() and data[end : end + 1] != b"~":
                    end += 1
                length = end + 1 - at
            else:
                keys.append(ESCAPE)
        elif 0x20 <= data[at] < 0x7F:  # noqa: PLR2004 - what ASCII prints
            keys.append(chr(data[at]))
        at += max(1, length)
    return keys


def pressed(screen: Screen, key: str, pools: Pools) -> tuple[Screen, Wanted | None]:
    """Return the screen after a key, and the change of a pool that it asks for, if any; there is a pool."""
    if screen.asks is not None and screen.about is not None:
        return _typed(screen, screen.asks, screen.about, key, pools)
    screen = dataclasses.replace(screen, selected=screen.index(pools), message="", typed="")
    row = rows_of(pools)[screen.selected]
    if key in _STEPS:
        moved = dataclasses.replace(screen, selected=screen.selected + _STEPS[key])
        return dataclasses.replace(screen, selected=moved.index(pools)), None
    if key == "b":
        return dataclasses.replace(screen, asks=Asks.BUDGET, about=row), None
    if key in _ASKS or key in _PAUSES:
        return _of_job(screen, key, row)
    return dataclasses.replace(screen, ends=key == "q"), None


def _of_job(screen: Screen, key: str, row: Row) -> tuple[Screen, Wanted | None]:
    """Return the screen after a key that is about the job of a row, and the change."""
    if not row.job:
        return dataclasses.replace(screen, message=NO_JOB), None
    if key in _ASKS:
        return dataclasses.replace(screen, asks=_ASKS[key], about=row), None
    paused, move = _PAUSES[key]
    return screen, (row.path, Change(job=row.job, paused=paused, move=move))


def _typed(screen: Screen, asks: Asks, about: Row, key: str, pools: Pools) -> tuple[Screen, Wanted | None]:
    """Return the screen after a key while something is asked for."""
    if len(key) == 1 or key == BACKSPACE:
        typed = screen.typed[:-1] if key == BACKSPACE else (screen.typed + key)[:MOST_TYPED]
        return dataclasses.replace(screen, typed=typed), None
    if key not in {ENTER, ESCAPE}:
        return screen, None
    closed = dataclasses.replace(screen, asks=None, about=None, typed="")
    if key == ESCAPE or not screen.typed.strip():
        return closed, None
    try:
        return closed, (about.path, _change(screen.typed, asks, about, pools))
    except ConfigError as error:
        return dataclasses.replace(closed, message=str(error)), None


def _change(typed: str, asks: Asks, about: Row, pools: Pools) -> Change:
    status = dict(pools).get(about.path)
    if status is None:
        raise ConfigError("the broker has ended")
    if asks is Asks.BUDGET:
        return Change(budget_bytes=size_bytes_of(typed, status, of_job=False))
    if about not in rows_of(pools):
        raise ConfigError("the job has ended")
    if asks is Asks.LIMIT:
        return Change(job=about.job, limit_bytes=size_bytes_of(typed, status, of_job=True))
    return Change(job=about.job, weight=parse_weight(typed))


# -- the frame -------------------------------------------------------------------------------------

BAR_CELLS = 60
_FILLS = "█▓▒"
_FREE = "·"
_SHARED = "="
_MINUTE_S, _HOUR_S = 60, 3600


def frame(
    pools: Pools,
    width: int,
    screen: Screen | None = None,
    rates: Mapping[Path, Mapping[Process, float]] | None = None,
) -> RenderableType:
    """Return what a terminal shows: each pool and its jobs, one below another, and what keys do.

    Args:
        pools: At least one, as they are now.
        width: Of the terminal, in columns.
        screen: ``None``: nobody can press a key.
        rates: Iterations per second in each pool; of jobs that are not in it, the status's.
    """
    chosen = None if screen is None else screen.index(pools)
    parts: list[RenderableType] = []
    first = 0
    for path, status in pools:
        parts += [Text()] if parts else []
        parts += _pool(status, width, None if chosen is None else chosen - first, (rates or {}).get(path, {}))
        first += max(1, len(status.jobs))
    if screen is not None:
        parts += [Text(), Text(KEYS, style="dim", no_wrap=True, overflow="ellipsis"), _line(screen, pools)]
    return Group(*parts)


def _pool(status: Status, width: int, chosen: int | None, rates: Mapping[Process, float]) -> list[RenderableType]:
    """Return one pool's part of the frame; ``chosen`` counts from its first row and may be in another pool."""
    parts: list[RenderableType] = [_head(status), pool_bar(status.jobs, status.budget_bytes, status.shared_bytes)]
    lines = [*filter(None, [status.fault]), *outside_lines(status.context_bytes, status.foreign_bytes)]
    parts += [Text(line) for line in lines]
    parts.append(Text())
    if status.jobs:
        return [*parts, _table(status, chosen, rates, width)]
    return [*parts, Text(f"{'>' if chosen == 0 else ''}{NO_JOB}", style="dim")]


def _head(status: Status) -> Text:
    up_s = int(status.uptime_s)
    clock = f"{up_s // _HOUR_S}:{up_s % _HOUR_S // _MINUTE_S:02}:{up_s % _MINUTE_S:02}"
    text = (
        f"{status.device}, policy {status.policy}, up {clock}: jobs hold {format_bytes(status.granted_bytes)} "
        f"of {format_bytes(status.budget_bytes)} (peak {format_bytes(status.peak_granted_bytes)})"
        f"{shared_text(status.shared_bytes)}"
    )
    return Text(text, no_wrap=True, overflow="ellipsis")


def pool_bar(jobs: Sequence[JobReport], budget_bytes: int, shared_bytes: int = 0) -> Text:
    """Return a bar as long as the budget, or as what jobs hold while that is more; each job fills its share.

    What jobs have in common comes first.
    """
    whole_bytes = max(1, budget_bytes, shared_bytes + sum(job.held_bytes for job in jobs))
    held_bytes, filled = shared_bytes, round(BAR_CELLS * shared_bytes / whole_bytes)
    bar = Text("[").append(_SHARED * filled)
    for number, job in enumerate(jobs):
        held_bytes += job.held_bytes
        until = round(BAR_CELLS * held_bytes / whole_bytes)
        bar.append(_fill(number) * (until - filled), colour_of(number))
        filled = until
    bar.append(_FREE * (BAR_CELLS - filled), "dim")
    return bar.append("]")


def _fill(number: int) -> str:
    return _FILLS[number % len(_FILLS)]


_COLUMNS = (
    *("", "job", "it/s", "iterations", "now", "peak", "shared", "grows", "claim", "limit", "compute", "share"),
    *("moved", "state"),
)
_LEFT = ("", "job", "share", "moved", "state")
_IF_ANY = ("shared", "grows", "limit", "compute", "share", "moved")
_DISPENSABLE = ("share", "iterations", "limit", "compute", "claim", "moved", "shared", "peak", "grows")
"""Columns go in this order where the terminal is narrow."""
_MARK_CELLS, _GAP_CELLS = 2, 2
_STATE_CELLS = 24  # what a state needs at least: its end may be cut


def _table(status: Status, chosen: int | None, rates: Mapping[Process, float], width: int) -> Table:
    """Return a row for each job; columns that would be empty, or for which there is no room, are left out."""
    rows = [_row(job, status.jobs, rates.get(process_of(job), job.iterations_per_s)) for job in status.jobs]
    table = Table(box=None, pad_edge=False, header_style="dim")
    shown, state_cells = _shown(rows, width)
    for name in shown:
        justify: Literal["left", "right"] = "left" if name in _LEFT else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for number, row in enumerate(rows):
        mark = Text.assemble(">" if number == chosen else " ", (_fill(number), colour_of(number)))
        cells = dict(zip(_COLUMNS, (mark, *map(Text, row[1:])), strict=True))
        cells["state"].truncate(state_cells, overflow="ellipsis")
        table.add_row(*(cells[name] for name in shown), style="bold" if number == chosen else "")
    return table


def _shown(rows: Sequence[tuple[str, ...]], width: int) -> tuple[list[str], int]:
    """Return the columns for which there is something to say and room, and the room for states, which come last."""
    cells = dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True))
    shown = [name for name in _COLUMNS if name not in _IF_ANY or any(cells[name])]
    needed = {name: _GAP_CELLS + max(map(len, (name, *cells[name]))) for name in _COLUMNS}
    needed |= {"": _MARK_CELLS + _GAP_CELLS, "state": 0}
    for name in _DISPENSABLE:
        if name in shown and sum(needed[column] for column in shown) + _STATE_CELLS > width:
            shown.remove(name)
    return shown, max(1, width - sum(needed[column] for column in shown))


def _row(job: JobReport, jobs: tuple[JobReport, ...], rate: float) -> tuple[str, ...]:
    beside = msgspec.structs.replace(job.share, compute=1.0)  # what it gets but for processors
    return (
        "",
        job.name,
        "" if job.state == "paused" else f"{rate:.2f}",
        str(job.iterations),
        format_bytes(job.held_bytes),
        format_bytes(job.peak_bytes),
        format_bytes(job.shared_bytes) if job.shared_bytes else "",
        f"+{format_bytes(job.growth_bytes)}/it" if job.growth_bytes else "",
        format_bytes(job.claim_bytes),
        format_bytes(job.limit_bytes) if job.limit_bytes else "",
        compute_text(job.share),
        share_text(beside) if beside != Share() else "",
        _moved(job),
        _state(job, jobs),
    )


def _state(job: JobReport, jobs: tuple[JobReport, ...]) -> str:
    if not job.waiting_s:
        return state_of(job)
    whom = f", for {waits_for(job, jobs)}" if job.waits_for else ""
    return f"{state_of(job)} {job.waiting_s:.1f} s{whom}"


def _moved(job: JobReport) -> str:
    """Return what has left the budget for tiers, ever, and what of it is there now."""
    moved_bytes = job.saving.out_bytes + job.evicted_bytes + job.spilled_bytes
    away_bytes = job.saving.out_now_bytes + job.away_bytes
    if not moved_bytes and not away_bytes:
        return ""
    return f"{format_bytes(moved_bytes)}, {format_bytes(away_bytes)} away"


def _line(screen: Screen, pools: Pools) -> Text:
    """Return what is asked for and has been typed, or what the last key came to."""
    if screen.asks is None or screen.about is None:
        return Text(screen.message, style="yellow")
    status = dict(pools).get(screen.about.path)
    asked = screen.asks.value.format(
        job=screen.about.job, device=status.device if status else "a broker that has ended"
    )
    return Text(f"{asked}: {screen.typed}_", style="yellow")
