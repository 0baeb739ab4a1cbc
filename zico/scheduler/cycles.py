"""The best cycle of a graph whose arcs have a gain and a length: where a run for ever gains the most per length.

Theory of operation
    Howard's policy iteration: every node follows one arc. So each path ends in a cycle, whose ratio
    of gains to lengths all nodes on the path have. A node's *value* is what it gains beyond that
    ratio before it is in the cycle. Each round lets nodes follow an arc to a better ratio, or,
    where none does, to a better value, until none improves.

Guarantees
    * Exact up to rounding: no arc leads to a better ratio, or to the same and a better value.
    * Deterministic.

Source: J. Cochet-Terrasson, G. Cohen, S. Gaubert, M. McGettrick, J.-P. Quadrat, "Numerical
computation of spectral elements in max-plus algebra", 1998; for ratios A. Dasdan, "Experimental
analysis of the fastest optimum cycle ratio and mean algorithms", ACM TODAES 9(4), 2004.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import types

from zico.base.compiled import compiled, entry

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]
    Int8s = NDArray[np.int8]
    Floats = NDArray[np.float64]

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
