"""Lifetimes on the circle of one iteration, cut open where the fewest bytes cross.

What an iteration allocates may die in the next one: gradients, freed when the next one begins. Iterations repeat, so
time is a circle, and a planner wants a line::

    iteration    |0 1 2 3 4 5 6 7|8 9 . .       cut at 2: |2 3 4 5 6 7 0 1|
    gradient     |              #|# #                     |          # # #|
    feature map  |    # # # # # #|                        |# # # # # #    |
    across       |  # # #        |                        |# # # # # # # #|  crosses the cut: lives at every tick
    weight       |# # # # # # # #|# # # #                 |# # # # # # # #|  outlives an iteration: persists
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]


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
