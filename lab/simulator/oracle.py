"""What is possible at all for a few jobs: the best of all schedules, by looking at every one. Offline only.

It may keep a job waiting anywhere, knows all profiles exactly, and needs no state to be safe. So no
scheduler that gives each job what it is owed gets further. Where the best cycle starves a job, that
one's work counts more until it does not. The answer is the mixture of the last two cycles, one for
a while and then the other, that just gives it its floor.

Cells of iterations hold the most that is held in them. Where the steps of all jobs are multiples of
one length, and few enough, the figure is exact. Else it is lower than the truth by up to a cell an
iteration.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.base.errors import ProblemError
from zico.scheduler.best_schedule import best_run, cell_length_ns, cells_for, graph
from zico.scheduler.cycles import NO_ARC
from zico.scheduler.shares import floors, worths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from zico.scheduler.best_schedule import Cells
    from zico.scheduler.simulate import Load

    Floats = NDArray[np.float64]

MOST_JOBS = 4
MOST_NODES = 200_000
_MOST_DOUBLINGS = 6


@dataclasses.dataclass(frozen=True)
class Possible:
    """The best schedule for ever."""

    normalised: tuple[float, ...]
    """Each job's throughput over alone's."""
    mean: float
    peak: int
    """The most regions held at once."""


def possible(
    loads: Sequence[Load], budget: int, slowdown: Sequence[float] = (1.0,), most_nodes: int = MOST_NODES
) -> Possible | None:
    """Return what the jobs reach under the best schedule for their mean throughput, by weight; ``None`` if they stall.

    Takes seconds.

    Raises:
        ProblemError: The jobs are too many, or too unequal in length, to look at all of their
            states.
    """
    if not 0 < len(loads) <= MOST_JOBS:
        message = f"the best of all schedules is found for 1 to {MOST_JOBS} jobs, not {len(loads)}"
        raise ProblemError(message)
    cell_ns = cell_length_ns(loads, most_nodes)
    if cell_ns == 0:
        longest, shortest = (pick(loads, key=lambda load: load.profile.duration_ns) for pick in (max, min))
        times = longest.profile.duration_ns / shortest.profile.duration_ns
        message = f"{longest.name}'s iteration is {times:.0f} times as long as {shortest.name}'s: too many states"
        raise ProblemError(message)
    cells = cells_for(loads, cell_ns)
    worth, owed = np.array(worths(loads)), np.array(floors(loads))
    found = _best(cells, budget, worth, slowdown)
    for _ in range(_MOST_DOUBLINGS):
        if found is None or np.all(np.array(found.normalised) >= owed):
            break
        worth = np.where(np.array(found.normalised) < owed, 2 * worth, worth)
        fairer = _best(cells, budget, worth, slowdown)
        found = found if fairer is None else _mixed(found, fairer, owed)
    return found


def _mixed(one: Possible, fairer: Possible, owed: Floats) -> Possible:
    """Return as much of one as leaves each job what the fairer one gives it of what it is owed."""
    a, b = np.array(one.normalised), np.array(fairer.normalised)
    least = np.minimum(owed, b)
    lacks = a < least
    share = float(np.min((b - least)[lacks] / (b - a)[lacks], initial=1.0))
    got = tuple((share * a + (1 - share) * b).tolist())
    return Possible(got, sum(got) / len(got), max(one.peak, fairer.peak))


def _best(cells: Cells, budget: int, worth: Floats, slowdown: Sequence[float]) -> Possible | None:
    """Return the best cycle when each job's work counts that much."""
    arcs = graph(cells, budget, any_wait=True)
    chosen, _ratio = best_run(arcs, worth, slowdown)
    return None if chosen[0] == NO_ARC else _along(cells, arcs, chosen, slowdown)


def _along(cells: Cells, arcs: NDArray[np.int64], chosen: NDArray[np.int8], slowdown: Sequence[float]) -> Possible:
    """Follow the chosen arcs from the boundaries of all into their cycle, and once round it."""
    n, full = len(cells.n), (1 << len(cells.n)) - 1
    level, before = cells.rows[:2]
    seen: dict[int, int] = {}
    steps: list[tuple[NDArray[np.int64], int]] = []
    node = 0
    while node not in seen:
        seen[node] = len(steps)
        goes = full - int(chosen[node]) >> np.arange(n)[::-1] & 1
        at = np.array(np.unravel_index(node, tuple(cells.n)))
        held = np.where(goes, level[np.arange(n), at], before[np.arange(n), at])
        steps.append((goes, int(held.sum())))
        node = int(arcs[node, chosen[node]])
    cycle = steps[seen[node] :]
    time = sum(slowdown[min(int(goes.sum()), len(slowdown) - 1)] for goes, _held in cycle)
    normalised = tuple(float(x) for x in np.sum([goes for goes, _held in cycle], axis=0) / time)
    return Possible(normalised, sum(normalised) / n, max(held for _goes, held in cycle))
