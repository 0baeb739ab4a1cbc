"""The best that two jobs can do beside each other, and how: by looking at all pairs of progresses.

Theory of operation
    A node is a pair (p, q): how many cells of its iteration each job has behind it, so 0 is its
    boundary. From there both do their next cell, or one does while the other waits. An arc exists
    if what is held during it fits and the state stays safe by the banker's rule; and if both could
    go on, a job may be kept waiting only at its boundary, since inside an iteration it waits for
    memory alone::

        q |  . . . . . . .     . an arc for both, diagonal
          |  . . # # # . .     # both peaks together do not fit: to go around, one has to wait
          |  . . # # # . .
          |  . . . . . . .     over the edge on the right or above, the next iteration begins: a torus
          +---------------- p

    The best cycle on that torus (``zico.scheduler.pair_schedule``) is the best schedule there is.
    The action at the nodes where one job is at its boundary says when it starts.

Guarantees
    * Nobody starves: besides the actions that get the most out of both, there are those that favour
      each.

Known limitations
    * A cell's level is the most held in it, and times are whole cells: figures are lower than the
      truth by about a cell an iteration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from numba import types

from zico.base.compiled import compiled, entry, record_at
from zico.base.records import F8, I8, Numbers, Record, dtype_of
from zico.pool.rules import is_safe
from zico.scheduler.layout import PROFILE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.scheduler.layout import ProfileRecord

    Int64s = NDArray[np.int64]
    Int8s = NDArray[np.int8]
    Floats = NDArray[np.float64]


# --------------------------------------------------------------------------------------------------
# The best cycle of a graph whose arcs have a gain and a length: where a run for ever gains the most
# per length.
#
# Theory of operation
#     Howard's policy iteration: every node follows one arc. So each path ends in a cycle, whose
#     ratio of gains to lengths all nodes on the path have; a node's *value* is what it gains beyond
#     that ratio before it is in the cycle. Each round lets nodes follow an arc to a better ratio,
#     or, where none does, to a better value, until none improves.
#
# Guarantees
#     * Exact up to rounding: no arc leads to a better ratio, or to the same and a better value.
#     * Deterministic.
#
# Source: J. Cochet-Terrasson, G. Cohen, S. Gaubert, M. McGettrick, J.-P. Quadrat, "Numerical
# computation of spectral elements in max-plus algebra", 1998; for ratios A. Dasdan, "Experimental
# analysis of the fastest optimum cycle ratio and mean algorithms", ACM TODAES 9(4), 2004.

NO_ARC = -1
_RATIO_SLACK = 1e-12
_VALUE_SLACK = 1e-9


@entry(types.int64[:, ::1])
def prune(arcs: Int64s) -> None:
    """Take out, by ``NO_ARC``, every arc that leads where no arc leads on."""
    dead = np.zeros(len(arcs), np.uint8)
    found = True
    while found:
        found = False
        for node in range(len(arcs) - 1, -1, -1):
            if dead[node]:
                continue
            leads_on = False
            for a in range(arcs.shape[1]):
                if arcs[node, a] != NO_ARC and dead[arcs[node, a]]:
                    arcs[node, a] = NO_ARC
                leads_on = leads_on or arcs[node, a] != NO_ARC
            if not leads_on:
                dead[node] = 1
                found = True


@entry(types.int64[:, ::1], [np.float64], [np.float64], int)
def best_arcs(arcs: Int64s, gain: Floats, length: Floats, most_rounds: int) -> tuple[Int8s, Floats]:
    """Return the arc that each node follows in a best run, and the ratio that it comes to.

    Args:
        arcs: For each node and action the node it leads to, or ``NO_ARC``. What ``prune`` leaves.
        gain: Of each action.
        length: Of each action, above 0.
        most_rounds: Stop after so many, with what is best then.

    Returns:
        Per node the action, ``NO_ARC`` where there is none, and gains over lengths in the long run.
    """
    n = len(arcs)
    chosen = np.full(n, NO_ARC, np.int8)
    ratio, value = np.zeros(n), np.zeros(n)
    for node in range(n):
        for a in range(arcs.shape[1] - 1, -1, -1):
            if arcs[node, a] != NO_ARC:
                chosen[node] = a
    scratch = np.empty((2, n), np.int64)
    for _ in range(most_rounds):
        _evaluate(arcs, gain, length, chosen, ratio, value, scratch)
        if not _improve(arcs, gain, length, chosen, ratio, value):
            break
    return chosen, ratio


@compiled
def _evaluate(
    arcs: Int64s, gain: Floats, length: Floats, chosen: Int8s, ratio: Floats, value: Floats, scratch: Int64s
) -> None:
    """Find the cycle that each node runs into, its ratio, and the values on the way."""
    path, seen = scratch
    seen[:] = 0
    for first in range(len(arcs)):
        if chosen[first] == NO_ARC or seen[first] != 0:
            continue
        n, node = 0, first
        while seen[node] == 0:
            seen[node] = first + 1
            path[n] = node
            n += 1
            node = arcs[node, chosen[node]]
        if seen[node] == first + 1:  # a new cycle: its entry keeps the value it had
            gains = lengths = 0.0
            at = node
            while True:
                gains += gain[chosen[at]]
                lengths += length[chosen[at]]
                at = arcs[at, chosen[at]]
                if at == node:
                    break
            ratio[node] = gains / lengths
        for i in range(n - 1, -1, -1):
            at = path[i]
            if at == node and seen[node] == first + 1:
                continue
            onward = arcs[at, chosen[at]]
            ratio[at] = ratio[onward]
            value[at] = gain[chosen[at]] - ratio[onward] * length[chosen[at]] + value[onward]


@compiled
def _improve(arcs: Int64s, gain: Floats, length: Floats, chosen: Int8s, ratio: Floats, value: Floats) -> bool:
    """Follow better arcs; false if there are none."""
    better = False
    for node in range(len(arcs)):
        best = ratio[node] + _RATIO_SLACK
        for a in range(arcs.shape[1]):
            if arcs[node, a] != NO_ARC and ratio[arcs[node, a]] > best:
                best, chosen[node], better = ratio[arcs[node, a]], a, True
    if better:
        return True
    for node in range(len(arcs)):
        best = value[node] + _VALUE_SLACK
        for a in range(arcs.shape[1]):
            onward = arcs[node, a]
            if onward != NO_ARC and ratio[onward] >= ratio[node] - _RATIO_SLACK:
                there = gain[a] - ratio[node] * length[a] + value[onward]
                if there > best:
                    best, chosen[node], better = there, a, True
    return better


# --------------------------------------------------------------------------------------------------

CELLS = 128
"""Of the longer iteration, at least."""
LEAST_CELLS = 24
"""Of the shorter iteration."""
MOST_CELLS = 1024
BOTH, FIRST, SECOND = 0, 1, 2
"""Actions: who does the next cell."""
FAVOURS = 3
"""Objectives: the sum, the first job, the second."""
_FAVOUR = 8.0  # how much more the favoured job's progress counts
_MOST_ROUNDS = 300
_N_ACTIONS = 3


class PairRecord(Record):
    """What two jobs do best. ``actions[f, k, c]`` is for job ``k`` at its boundary and the other at its cell ``c``."""

    cell_ns: I8
    n_cells: Annotated[Numbers, "i8", (2,)]
    mean: F8  # of both jobs' throughputs over alone's, as they count, by the actions that favour neither
    actions: Annotated[Numbers, "i1", (FAVOURS, 2, MOST_CELLS)]  # with one at its boundary: at each cell of the other


PAIR = dtype_of(PairRecord)


@compiled
def cell_length_ns(a: ProfileRecord, b: ProfileRecord) -> int:
    """Return the length of a cell; 0 if the iterations are too unequal to be laid beside each other."""
    longer, shorter = max(a.duration_ns, b.duration_ns), min(a.duration_ns, b.duration_ns)
    cell_ns = min(longer // CELLS, shorter // LEAST_CELLS)
    return cell_ns if cell_ns > 0 and longer // cell_ns < MOST_CELLS else 0


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


@compiled
def _is_safe(budget: int, held: Int64s, claim: Int64s, keeps: Int64s, running: NDArray[np.uint8]) -> bool:
    done = np.empty(2, np.uint8)
    free = budget - held[0] - held[1]
    return free >= 0 and is_safe(free, held, claim, keeps, running, done, 2)


@compiled
def arcs_of(
    a: tuple[Int64s, Int64s, Int64s, Int64s],
    b: tuple[Int64s, Int64s, Int64s, Int64s],
    keeps: Int64s,
    budget: int,
) -> Int64s:
    """Return for each pair of progresses and action the pair that it leads to.

    Args:
        a: Cells of the first job.
        b: And of the second.
        keeps: Regions that each keeps between iterations.
        budget: Regions.
    """
    n_a, n_b = len(a[0]), len(b[0])
    arcs = np.full((n_a * n_b, _N_ACTIONS), NO_ARC, np.int64)
    held, claim, running = np.empty(2, np.int64), np.empty(2, np.int64), np.empty(2, np.uint8)
    for p in range(n_a):
        for q in range(n_b):
            node = p * n_b + q
            claim[0], claim[1] = a[2][p], b[2][q]
            for action in (BOTH, FIRST, SECOND):
                held[0] = a[1][p] if action == SECOND else a[0][p]
                held[1] = b[1][q] if action == FIRST else b[0][q]
                running[0] = p > 0 or action != SECOND
                running[1] = q > 0 or action != FIRST
                if _is_safe(budget, held, claim, keeps, running):
                    to_p = p if action == SECOND else (p + 1) % n_a
                    to_q = q if action == FIRST else (q + 1) % n_b
                    arcs[node, action] = to_p * n_b + to_q
            goes = arcs[node, BOTH] != NO_ARC
            if p > 0 and (goes or a[0][p] <= a[1][p]):  # inside, a job waits for memory alone
                arcs[node, SECOND] = NO_ARC
            if q > 0 and (goes or b[0][q] <= b[1][q]):
                arcs[node, FIRST] = NO_ARC
            if p > 0 and q > 0 and arcs[node, FIRST] != NO_ARC and arcs[node, SECOND] != NO_ARC:
                arcs[node, SECOND if a[3][p] <= b[3][q] else FIRST] = NO_ARC  # who asks first gets it
    prune(arcs)
    return arcs


@entry(int, int, [np.int64], int, float, [np.float64], PAIR)
def solve(
    a_address: int,
    b_address: int,
    keeps: Int64s,
    budget: int,
    together: float,
    worth: NDArray[np.float64],
    pair: PairRecord,
) -> bool:
    """Fill in what two jobs do best; false if their iterations are too unequal, or never fit.

    Args:
        a_address: Of the first job's PROFILE.
        b_address: Of the second's.
        keeps: Regions that each keeps between iterations.
        budget: Regions.
        together: By what factor each is slower while both work.
        worth: What each one's throughput counts, together 1.
        pair: A PAIR record.
    """
    a, b = record_at(a_address, PROFILE), record_at(b_address, PROFILE)
    cell_ns = cell_length_ns(a, b)
    if cell_ns == 0:
        return False
    cells_a, cells_b = cells_of(a, cell_ns, keeps[0]), cells_of(b, cell_ns, keeps[1])
    n_a, n_b = len(cells_a[0]), len(cells_b[0])
    arcs = arcs_of(cells_a, cells_b, keeps, budget)
    pair.cell_ns = cell_ns
    pair.n_cells[0], pair.n_cells[1] = n_a, n_b
    length = np.array([together, 1.0, 1.0])
    for favour in range(FAVOURS):
        worth_a = worth[0] * (_FAVOUR if favour == FIRST else 1.0)
        worth_b = worth[1] * (_FAVOUR if favour == SECOND else 1.0)
        gain = np.array([worth_a + worth_b, worth_a, worth_b])
        chosen, ratio = best_arcs(arcs, gain, length, _MOST_ROUNDS)
        if chosen[0] == NO_ARC:
            return False
        if favour == BOTH:
            pair.mean = ratio[0]
        for q in range(n_b):
            pair.actions[favour, 0, q] = chosen[q]
        for p in range(n_a):
            pair.actions[favour, 1, p] = chosen[p * n_b]
    return True
