"""The best that a few jobs can do beside each other: the pair's theory for any number, with coarser cells the more.

Theory of operation
    A node is a cell of each job's iteration; an action is the set of those that do their next cell
    while the others wait. An action exists if what is held during it fits; for a plan, too, if the
    state stays safe, and if of those inside their iterations only such wait as could not go on as
    well. The best cycle (``zico.scheduler.pair_schedule``) is the best schedule for ever.

Known limitations
    * Nodes are the product of the cells: 24 cells each for three jobs, 12 for four.
    * Of two that rise in the same cell, the one waits that the best cycle wants to; in truth it is
      the later one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from numba import types

from zico.base.compiled import compiled, entry
from zico.base.records import I8, Numbers, Record
from zico.pool.rules import is_safe
from zico.scheduler.packed import packed
from zico.scheduler.pair_schedule import NO_ARC, best_arcs, cells_of, prune

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from zico.scheduler.simulate import Load

    Int64s = NDArray[np.int64]
    Int8s = NDArray[np.int8]
    Floats = NDArray[np.float64]

MOST_JOBS = 4
MOST_NODES = 24_000
"""Of a plan, so that it takes a tenth of a second."""
_LEAST_CELLS = 4  # of the shortest iteration
_MOST_ROUNDS = 300


class TorusRecord(Record):
    """What a few jobs do best, at each node."""

    cell_ns: I8
    n_cells: Annotated[Numbers, "i8", (MOST_JOBS,)]
    actions: Annotated[Numbers, "i1", (MOST_NODES,)]  # the set of those that go on, as bits; 0: nothing is known


class Cells(NamedTuple):
    """What jobs hold in the cells of their iterations, a row a job."""

    cell_ns: int
    n: Int64s
    """Of each job."""
    level: Int64s
    """The most held in each cell."""
    before: Int64s
    """What is held while waiting to begin it."""
    claim: Int64s
    keeps: Int64s


def cells_for(loads: Sequence[Load], cell_ns: int) -> Cells:
    """Cut iterations into cells."""
    each = [cells_of(packed(load.profile)[0], cell_ns, load.persistent) for load in loads]
    n = np.array([len(cells[0]) for cells in each], np.int64)
    rows = np.zeros((3, len(loads), int(n.max())), np.int64)
    for i, cells in enumerate(each):
        for row in range(3):
            rows[row, i, : n[i]] = cells[row]
    return Cells(cell_ns, n, rows[0], rows[1], rows[2], np.array([load.persistent for load in loads], np.int64))


def cell_length_ns(loads: Sequence[Load], most_nodes: int) -> int:
    """Return the shortest length with which there are so many nodes at most; 0 if a short job had too few cells.

    Where a length divides all steps of all jobs, nothing is lost: that one is taken if it is not
    too short.
    """
    ends = [t_ns for load in loads for t_ns in (*load.profile.t_ns, load.profile.duration_ns)]
    durations_ns = [load.profile.duration_ns for load in loads]
    exact = max(1, math.gcd(*ends))
    coarse = int((math.prod(durations_ns) / most_nodes) ** (1 / len(loads)))
    cell_ns = exact
    while math.prod(_n_cells(each, cell_ns) for each in durations_ns) > most_nodes:
        cell_ns = max(coarse, cell_ns + cell_ns // 64 + 1)
    return cell_ns if min(durations_ns) >= _LEAST_CELLS * cell_ns or cell_ns == exact else 0


def _n_cells(duration_ns: int, cell_ns: int) -> int:
    return max(1, (duration_ns + cell_ns // 2) // cell_ns)


@entry([np.int64], types.int64[:, ::1], types.int64[:, ::1], types.int64[:, ::1], [np.int64], int, bool)
def arcs_of(
    n_cells: Int64s,
    level: Int64s,
    before: Int64s,
    claim: Int64s,
    keeps: Int64s,
    budget: int,
    any_wait: bool,  # noqa: FBT001 - compiled
) -> Int64s:
    """Return for each node and action the node that it leads to. Action ``a`` is the set of jobs ``2**n - 1 - a``."""
    n = len(n_cells)
    n_actions = (1 << n) - 1
    stride = np.ones(n, np.int64)
    for i in range(n - 1, 0, -1):
        stride[i - 1] = stride[i] * n_cells[i]
    arcs = np.full((stride[0] * n_cells[0], n_actions), NO_ARC, np.int64)
    at, held, now_claim = np.zeros(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    running, done = np.empty(n, np.uint8), np.empty(n, np.uint8)
    for node in range(len(arcs)):
        for i in range(n):
            at[i] = node // stride[i] % n_cells[i]
            now_claim[i] = claim[i, at[i]]
        for action in range(n_actions):
            those = n_actions - action
            free, to = budget, node
            for i in range(n):
                goes = those >> i & 1
                held[i] = level[i, at[i]] if goes else before[i, at[i]]
                free -= held[i]
                running[i] = at[i] > 0 or goes
                if goes:
                    to += stride[i] if at[i] + 1 < n_cells[i] else -stride[i] * at[i]
            if free >= 0 and (any_wait or is_safe(free, held, now_claim, keeps, running, done, n)):
                arcs[node, action] = to
        if not any_wait:
            _only_for_memory(arcs[node], at, level, before)
    return arcs


@compiled
def _only_for_memory(arcs: Int64s, at: Int64s, level: Int64s, before: Int64s) -> None:
    """Take out the actions by which somebody inside waits although it could go on."""
    n_actions = len(arcs)
    for action in range(n_actions - 1, -1, -1):  # the smallest sets first: each looks at larger ones
        those = n_actions - action
        for i in range(len(at)):
            if at[i] > 0 and not those >> i & 1:
                more = n_actions - (those | 1 << i)
                if level[i, at[i]] <= before[i, at[i]] or arcs[more] != NO_ARC:
                    arcs[action] = NO_ARC


def best(
    cells: Cells, budget: int, worth: Floats, slowdown: Sequence[float], *, any_wait: bool
) -> tuple[Int64s, Int8s]:
    """Return all arcs, and the one that each node follows in a best run."""
    n = len(cells.n)
    arcs = arcs_of(cells.n, cells.level, cells.before, cells.claim, cells.keeps, budget, any_wait)
    prune(arcs)
    those = np.arange((1 << n) - 1, 0, -1)
    goes = those[:, None] >> np.arange(n) & 1
    length = np.array([slowdown[min(int(k), len(slowdown) - 1)] for k in goes.sum(axis=1)])
    chosen, _ratio = best_arcs(arcs, goes @ worth, length, _MOST_ROUNDS)
    return arcs, chosen


def solve(loads: Sequence[Load], budget: int, worth: Floats, slowdown: Sequence[float], torus: TorusRecord) -> bool:
    """Find the best schedule that Zico can follow; false if there is none, or the jobs are too many or too unequal."""
    if len(loads) > MOST_JOBS:
        return False
    cell_ns = cell_length_ns(loads, MOST_NODES)
    if cell_ns == 0:
        return False
    cells = cells_for(loads, cell_ns)
    _arcs, chosen = best(cells, budget, worth, slowdown, any_wait=False)
    if chosen[0] == NO_ARC:
        return False
    torus["cell_ns"], torus["n_cells"][: len(loads)] = cell_ns, cells.n
    torus["actions"][: len(chosen)] = np.where(chosen == NO_ARC, 0, (1 << len(loads)) - 1 - chosen)
    return True
