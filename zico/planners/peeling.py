"""Take off what may lie at the bottom without loss, until only cores are left.

A tensor that lives as long as all those it is connected with in time may lie below them: whatever plan there is, slide
it down and what was below it up. The rest falls into parts that have no tick in common, and so on. A stack is solved by
this alone. What remains are cores, each above a base::

    address |    +--+ +----+         a is peeled, and then b, which is all that lives in its part;
            |    |c | | e  |         c, d and e form a core, whose base is the top of a
            |--+ | ++-+--+-+
            |b | |  d    |
            +--+-+-------+---+
            |       a        |
            +----------------+--> tick
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.compiled import compiled
from zico.planners.classic import part_of

if TYPE_CHECKING:
    from zico.planners.problem import Int64s, Problem


@dataclasses.dataclass(frozen=True, eq=False)
class Core:
    """Tensors connected in time, none of which lives as long as all of them: to be placed above a base."""

    problem: Problem
    tensors: Int64s
    """Their numbers in the whole problem."""
    base_bytes: int


def peeled(problem: Problem, offset_bytes: Int64s) -> list[Core]:
    """Set the offsets of what can be peeled, and return the cores."""
    order = np.lexsort((-problem.upper, problem.lower))
    cores = np.empty((len(problem), 3), np.int64)
    count = peel(order, problem.lower, problem.upper, problem.size_bytes, offset_bytes, cores)
    return [Core(part_of(problem, order[k:end]), order[k:end], base) for k, end, base in cores[:count].tolist()]


@compiled
def peel(order: Int64s, lower: Int64s, upper: Int64s, sizes: Int64s, offsets: Int64s, cores: Int64s) -> int:
    """Place what lives as long as its part at the part's bottom, again and again; return the number of cores.

    ``order`` are the tensors' numbers by start, the longer-lived first. ``cores`` is set to begin and end in ``order``,
    and base, of each part that remains.
    """
    n_cores = 0
    stack = np.empty((len(order) + 1, 3), np.int64)
    stack[0, 0], stack[0, 1], stack[0, 2] = 0, len(order), 0
    depth = 1
    while depth:
        depth -= 1
        k, end, base = stack[depth, 0], stack[depth, 1], stack[depth, 2]
        while k < end:
            begin = k
            until = upper[order[k]]
            while k < end and lower[order[k]] < until:
                until = max(until, upper[order[k]])
                k += 1
            inner, height = begin, base
            while inner < k and lower[order[inner]] == lower[order[begin]] and upper[order[inner]] == until:
                offsets[order[inner]] = height
                height += sizes[order[inner]]
                inner += 1
            if inner == begin:
                cores[n_cores, 0], cores[n_cores, 1], cores[n_cores, 2] = begin, k, base
                n_cores += 1
            elif inner < k:
                stack[depth, 0], stack[depth, 1], stack[depth, 2] = inner, k, height
                depth += 1
    return n_cores
