"""The best that two to four jobs can do beside each other, and how: by looking at all their progresses together.

Theory of operation
    A node is a cell of each job's iteration, that is, how many cells it has behind it; 0 is its
    boundary. An action is the set of jobs that do their next cell while the others wait. An action
    exists if what is held during it fits. For a plan the state has to stay safe by the banker's
    rule, too, and inside its iteration a job waits for memory alone. So who could go on as well
    goes on, and of two that rise in the same cell the later one waits. Of two jobs::

        q |  . . . . . . .     . both go on, diagonally
          |  . . # # # . .     # both peaks together do not fit: to go around, one has to wait
          |  . . # # # . .
          |  . . . . . . .     over the edge on the right or above, the next iteration begins
          +---------------- p

    The best cycle (``zico.scheduler.cycles``) is the best schedule there is. The actions at nodes
    with a job at its boundary say when it starts.

Guarantees
    * No job of a pair starves: besides the actions that get the most out of both together, there
      are those that favour each. Three and four jobs have only the former, so that their floors
      depend on the search, which compares schedules with shift and claims.

Known limitations
    * Nodes are the product of the cells: 128 cells each for two equal jobs, 25 for three, 11 for
      four.
    * A cell's level is the most held in it, and times are whole cells. So figures are lower than
      the truth by about a cell an iteration.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from numba import types

from zico.base.compiled import compiled, entry, inlined
from zico.base.records import I8, Numbers, Record
from zico.pool.rules import is_safe
from zico.scheduler.cycles import NO_ARC, best_arcs, prune
from zico.scheduler.layout import PROFILE
from zico.scheduler.shares import RANK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from zico.scheduler.layout import ProfileRecord
    from zico.scheduler.simulate import Load

    Int64s = NDArray[np.int64]
    Int8s = NDArray[np.int8]
    Floats = NDArray[np.float64]

MOST_JOBS = 4
MOST_NODES = 1 << 14
"""A schedule has at most so many nodes. With so many a plan of a pair takes a tenth of a second."""
_LEAST_CELLS = 4  # of the shortest iteration
_FAVOURED = 2
"""So many jobs have schedules that favour one: with more, a large one starved where times vary by a tenth."""
_MOST_ROUNDS = 300


class ScheduleRecord(Record):
    """What a few jobs do best at each node: where none is favoured, then where each is; of more than two the same."""

    cell_ns: I8
    n_cells: Annotated[Numbers, "i8", (MOST_JOBS,)]
    actions: Annotated[Numbers, "i1", (1 + MOST_JOBS, MOST_NODES)]  # who goes on, as bits; 0: nothing is known


class Cells(NamedTuple):
    """What jobs hold in the cells of their iterations."""

    cell_ns: int
    n: Int64s
    """Of each job."""
    rows: Int64s
    """Four tables, each with a row a job: what ``cells_of`` returns."""
    keeps: Int64s
    """Of each job, between iterations."""


@entry(PROFILE, int, int)
def cells_of(profile: ProfileRecord, cell_ns: int, keeps: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Return, per cell: the most held in it; what is held while waiting to begin it; the claim; when it first rises."""
    n = max(1, (profile.duration_ns + cell_ns // 2) // cell_ns)
    level, before, claim = np.zeros(n, np.int64), np.full(n, keeps, np.int64), np.zeros(n, np.int64)
    rises_ns = np.full(n, cell_ns, np.int64)
    step = 0
    for c in range(n):
        end_ns = profile.duration_ns if c + 1 == n else (c + 1) * cell_ns
        while step + 1 < profile.n_steps and profile.step_ns[step + 1] <= c * cell_ns:
            step += 1
        level[c] = profile.level[step]
        if level[c] > before[c]:
            rises_ns[c] = 0
        while step + 1 < profile.n_steps and profile.step_ns[step + 1] < end_ns:
            step += 1
            level[c] = max(level[c], profile.level[step])
            if level[c] > before[c]:
                rises_ns[c] = min(rises_ns[c], profile.step_ns[step] - c * cell_ns)
        if c + 1 < n:
            before[c + 1] = profile.level[step]
    most = 0
    for c in range(n - 1, -1, -1):
        most = max(most, level[c])
        claim[c] = most
    return level, before, claim, rises_ns


def cells_for(loads: Sequence[Load], cell_ns: int) -> Cells:
    """Cut iterations into cells."""
    each = [cells_of(load.profile.record[0], cell_ns, load.persistent) for load in loads]
    n = np.array([len(cells[0]) for cells in each], np.int64)
    rows = np.zeros((4, len(loads), int(n.max())), np.int64)
    for i, cells in enumerate(each):
        rows[:, i, : n[i]] = cells
    return Cells(cell_ns, n, rows, np.array([load.persistent for load in loads], np.int64))


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


@inlined
def bit_of(index: int, n: int) -> int:
    """Return the bit of a job in a set of ``n``. The first has the highest, so that it goes on in a tie."""
    return 1 << n - 1 - index


@entry([np.int64], types.int64[:, :, ::1], [np.int64], int, bool)
def arcs_of(n_cells: Int64s, rows: Int64s, keeps: Int64s, budget: int, any_wait: bool) -> Int64s:  # noqa: FBT001 - compiled
    """Return for each node and action the node that it leads to. Action ``a`` is the set of jobs ``2**n - 1 - a``."""
    n = len(n_cells)
    level, before, claim, rises_ns = rows[0], rows[1], rows[2], rows[3]
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
                goes = those & bit_of(i, n)
                held[i] = level[i, at[i]] if goes else before[i, at[i]]
                free -= held[i]
                running[i] = at[i] > 0 or goes > 0
                if goes:
                    to += stride[i] if at[i] + 1 < n_cells[i] else -stride[i] * at[i]
            if free >= 0 and (any_wait or is_safe(free, held, now_claim, keeps, running, done, n)):
                arcs[node, action] = to
        if not any_wait:
            _only_for_memory(arcs[node], at, level, before)
            _first_come(arcs[node], at, rises_ns)
    prune(arcs)
    return arcs


@compiled
def _only_for_memory(arcs: Int64s, at: Int64s, level: Int64s, before: Int64s) -> None:
    """Take out the actions by which somebody inside waits although it could go on."""
    n, n_actions = len(at), len(arcs)
    for action in range(n_actions - 1, -1, -1):  # the smallest sets first: each looks at larger ones
        those = n_actions - action
        for i in range(n):
            if at[i] > 0 and not those & bit_of(i, n):
                more = n_actions - (those | bit_of(i, n))
                if level[i, at[i]] <= before[i, at[i]] or arcs[more] != NO_ARC:
                    arcs[action] = NO_ARC


@compiled
def _first_come(arcs: Int64s, at: Int64s, rises_ns: Int64s) -> None:
    """Take out the actions by which somebody inside waits that asks before one that goes on in its place."""
    n, n_actions = len(at), len(arcs)
    exists = arcs.copy()
    for action in range(n_actions):
        those = n_actions - action
        for i in range(n):
            for j in range(n):
                if at[i] == 0 or at[j] == 0 or those & bit_of(i, n) or not those & bit_of(j, n):
                    continue
                other = n_actions - (those ^ (bit_of(i, n) | bit_of(j, n)))
                rises, later = rises_ns[i, at[i]], rises_ns[j, at[j]]
                if exists[other] != NO_ARC and (rises < later or (rises == later and i < j)):
                    arcs[action] = NO_ARC


def graph(cells: Cells, budget: int, *, any_wait: bool) -> Int64s:
    """Return for each node and action the node that it leads to, where a schedule can go on for ever.

    Args:
        cells: Of the jobs.
        budget: Regions.
        any_wait: Whether a job may wait anywhere, in any state that fits. By a plan it may not.
    """
    return arcs_of(cells.n, cells.rows, cells.keeps, budget, any_wait)


def best_run(arcs: Int64s, worth: Floats, slowdown: Sequence[float]) -> tuple[Int8s, Floats]:
    """Return the action that each node has in a best run, and what all jobs' progress comes to in the long run.

    Args:
        arcs: The graph.
        worth: What each job's progress counts.
        slowdown: By what factor each of 0, 1, 2, ... jobs that go on is slower than alone; the last
            for any more.

    Returns:
        Per node the action, ``NO_ARC`` where there is none, and the progress by worth over time.
    """
    n_actions = arcs.shape[1]
    goes = np.arange(n_actions, 0, -1)[:, None] >> np.arange(len(worth))[::-1] & 1
    length = np.array([slowdown[min(int(k), len(slowdown) - 1)] for k in goes.sum(axis=1)], np.float64)
    return best_arcs(arcs, goes @ worth, length, _MOST_ROUNDS)


def solve(
    loads: Sequence[Load], budget: int, worth: Floats, slowdown: Sequence[float], schedule: ScheduleRecord
) -> bool:
    """Fill in the best schedules; false if there is none, or the jobs are too many or too unequal."""
    n = len(loads)
    cell_ns = cell_length_ns(loads, MOST_NODES) if n <= MOST_JOBS else 0
    if cell_ns == 0:
        return False
    cells = cells_for(loads, cell_ns)
    arcs = graph(cells, budget, any_wait=False)
    schedule["cell_ns"], schedule["n_cells"][:n] = cell_ns, cells.n
    counts = np.vstack([np.ones(n), 1 + (RANK - 1) * np.eye(n)])  # as if of a higher priority
    chosen = None
    for actions, count in zip(schedule["actions"], counts, strict=False):
        if chosen is None or n == _FAVOURED:
            chosen, _ratio = best_run(arcs, worth * count, slowdown)
        actions[: len(chosen)] = np.where(chosen == NO_ARC, 0, (1 << n) - 1 - chosen)
    return bool(schedule["actions"][0, 0])
