"""From events to lifetimes: when each tensor of a trace was allocated and freed, or why the trace cannot be."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.base.errors import TraceError
from zico.trace.events import Kind
from zico.trace.lines import FIRST_EVENT_LINE, LARGEST

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.trace.events import Trace

    Int64s = NDArray[np.int64]

NEVER = 1 << 61
"""Where a tensor ends that the trace does not see end."""


@dataclasses.dataclass(frozen=True, eq=False)
class Lifetimes:
    """A trace's tensors in the order of their allocation, as parallel arrays.

    A *step* is an allocation or a free: steps count what happens to memory, and nothing else. A
    tensor lives from the step that allocates it to the one that frees it, ``[begin, end)``.
    """

    tensor: Int64s
    size_bytes: Int64s
    name: NDArray[np.int32]
    """The operation that asked for it, as an index into the trace's names, or ``NO_NAME``."""
    begin: Int64s
    """The step that allocates it."""
    end: Int64s
    """The step that frees it, or ``NEVER``."""
    step_event: Int64s
    """The event that each step is."""

    def __len__(self) -> int:
        return len(self.tensor)

    def step_of_event(self, event: int) -> int:
        """Return the first step at or after an event."""
        return int(np.searchsorted(self.step_event, event))


def lifetimes(trace: Trace) -> Lifetimes:
    """Return the lifetimes of a trace's tensors.

    Where the recorder could not keep up, a free whose allocation is missing is left out.

    Raises:
        TraceError: There are no allocations; a tensor is allocated twice, freed twice or before it
            is allocated, or has no positive size.
    """
    events = trace.events
    kind, tensor = events["kind"], events["tensor"]
    allocations, frees = np.flatnonzero(kind == Kind.ALLOC), np.flatnonzero(kind == Kind.FREE)
    if not len(allocations):
        raise TraceError(trace.path or "trace", 0, "has no allocations: trace a program that trains, and for longer")
    order = np.argsort(tensor[allocations], kind="stable")
    numbers = tensor[allocations][order]
    _refuse(trace, allocations[order][1:][np.diff(numbers) == 0], "allocates tensor {tensor} for the second time")
    size_bytes = events["size_bytes"][allocations]
    _refuse(trace, allocations[size_bytes <= 0], "allocates {size} bytes")
    too_much = np.cumsum(size_bytes, dtype=np.float64) >= LARGEST
    _refuse(trace, allocations[too_much], "brings all to 2**60 bytes")
    place = np.minimum(np.searchsorted(numbers, tensor[frees]), len(numbers) - 1)
    row = order[place]
    known = (numbers[place] == tensor[frees]) & (allocations[row] < frees)
    dropped = np.flatnonzero(kind == Kind.DROPPED)
    first_dropped = dropped[0] if len(dropped) else len(events)
    _refuse(trace, frees[~known & (frees < first_dropped)], "frees tensor {tensor}, which is not allocated before")
    row, frees = row[known], frees[known]
    by_row = np.argsort(row, kind="stable")
    _refuse(trace, frees[by_row][1:][np.diff(row[by_row]) == 0], "frees tensor {tensor} for the second time")
    steps = np.sort(np.concatenate([allocations, frees]))
    end = np.full(len(allocations), NEVER)
    end[row] = np.searchsorted(steps, frees)
    return Lifetimes(
        tensor=tensor[allocations],
        size_bytes=size_bytes,
        name=events["name"][allocations],
        begin=np.searchsorted(steps, allocations),
        end=end,
        step_event=steps,
    )


def live_after_steps(life: Lifetimes) -> Int64s:
    """Return the bytes alive after each step."""
    change = np.zeros(len(life.step_event), np.int64)
    change[life.begin] = life.size_bytes
    ended = life.end < NEVER
    change[life.end[ended]] = -life.size_bytes[ended]
    return np.cumsum(change)


def _refuse(trace: Trace, wrong: Int64s, what: str) -> None:
    """Raise an error for the first of the events that are wrong."""
    if len(wrong):
        index = int(wrong.min())
        event = trace.events[index]
        said = what.format(tensor=event["tensor"], size=event["size_bytes"])
        raise TraceError(
            trace.path or "trace", index + FIRST_EVENT_LINE, f"{said}: the file was changed, record it again"
        )


# -- lifetimes on the circle of one iteration, cut open where the fewest bytes cross ---------------
#
# What an iteration allocates may die in the next one: gradients, freed when the next one begins.
# Iterations repeat, so time is a circle, and a planner wants a line::
#
#     iteration    |0 1 2 3 4 5 6 7|8 9 . .       cut at 2: |2 3 4 5 6 7 0 1|
#     gradient     |              #|# #                     |          # # #|
#     feature map  |    # # # # # #|                        |# # # # # #    |
#     across       |  # # #        |                        |# # # # # # # #|  crosses the cut: lives at every tick
#     weight       |# # # # # # # #|# # # #                 |# # # # # # # #|  outlives an iteration: persists


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """Lifetimes on a line of ``n_ticks`` ticks."""

    cut: int
    """The tick of the iteration that is tick 0 of the line."""
    lower: Int64s
    upper: Int64s
    persists: NDArray[np.bool_]
    """Tensors that outlive an iteration; they live at every tick."""


def cut_open(lower: Int64s, upper: Int64s, size_bytes: Int64s, n_ticks: int) -> Line:
    """Return the lifetimes of one iteration on a line.

    Args:
        lower: Tick of each birth; negative if before the iteration.
        upper: Tick of each death, beyond ``n_ticks`` if in the next iteration, far beyond if never.
        size_bytes: What a tensor that crosses the cut costs.
        n_ticks: Length of the iteration.
    """
    length = upper - lower
    persists = length > n_ticks
    cut = _cheapest_cut(lower[~persists] % n_ticks, length[~persists], size_bytes[~persists], n_ticks)
    moved = (lower - cut) % n_ticks
    end = moved + length
    whole = persists | (end > n_ticks)
    return Line(cut, np.where(whole, 0, moved), np.where(whole, n_ticks, end), persists)


def _cheapest_cut(lower: Int64s, length: Int64s, size_bytes: Int64s, n_ticks: int) -> int:
    """Return the tick before which the fewest bytes are alive that still are at it; the first of equals."""
    crossing = np.zeros(2 * n_ticks + 1, np.int64)
    np.add.at(crossing, lower + 1, size_bytes)
    np.add.at(crossing, lower + length, -size_bytes)
    alive = np.cumsum(crossing)
    return int(np.argmin(alive[:n_ticks] + alive[n_ticks : 2 * n_ticks]))
