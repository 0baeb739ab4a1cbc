"""SwapAdvisor: a genetic search over what a planner of swaps takes as alike, scored by the replay.

An individual says into which size class each size falls, and which gaps are kept: they are used
only where no other serves. For each individual a planner chooses swaps as Belady would. At an
operation above the limit, the tensor leaves whose next use is furthest. It is of the size class
that the operation needs, and has waited for a threshold. It leaves at once, and returns as early as
there is room. ``Replayer`` tells how long an iteration takes. Individuals survive by the softmax of
``(T_best - t) / T_best``. Source: C. Huang et al., "SwapAdvisor: Pushing Deep Learning Beyond the
GPU Memory Limit via Smart Swapping" (ASPLOS 2020), sections 4 and 5.

Known limitations
    * The published search also orders operations. Our traces have one order, which stays.
    * Published, memory is a pool for each size class. Here classes decide only what leaves: the
      limit counts real bytes.
    * The published planner runs twice, to learn what is in memory when an iteration begins. Here
      operations lie on a circle, and one run is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.base.units import format_bytes
from zico.lab.saving.autoswap import LEAST_BYTES, Limited, begin_ns, end_ns, gaps_between_accesses, in_order
from zico.lab.saving.replayer import Replayer
from zico.planning.saving.clock import now_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.lab.saving.autoswap import Floats
    from zico.planning.saving.problem import Bools, Int64s, SwapPlan, SwapProblem

POPULATION = 24
PATIENCE = 12
"""Generations without gain, after which the search ends."""
MOST_GENERATIONS = 200
_MUTATES = 0.05
"""The share of genes that change."""
_KEPT = 0.1
"""The share of gaps that are kept in the first generation."""
_SEED = 0


class Individual(NamedTuple):
    """The genes."""

    tops: Bools
    """Of each size, ascending: whether it is the largest of its class. The last one always is."""
    kept: Bools
    """Of each gap."""


# -- the planner for an individual -----------------------------------------------------------------


class Belady:
    """What leaves, by the furthest next use, and when it returns."""

    def __init__(self, problem: SwapProblem, limit_bytes: int, least_bytes: int = LEAST_BYTES) -> None:
        self._problem, self._limit, n = problem, limit_bytes, problem.n_ops
        above = np.concatenate([[0], np.cumsum(np.tile(problem.load_bytes > limit_bytes, 3))])
        gaps = gaps_between_accesses(problem, least_bytes)
        self.gaps = gaps.take(above[gaps.last + 1] > above[gaps.first])
        self.sizes, self._size = np.unique(self.gaps.size_bytes, return_inverse=True)
        self._ops = [np.arange(*ends) % n for ends in zip(self.gaps.first, self.gaps.last + 1, strict=True)]
        self._over = [self._over_op(op) for op in range(n)]
        self._needs = _needs(problem)
        gone_ns = end_ns(problem, self.gaps.first - 1) + self.gaps.out_ns
        begins = begin_ns(problem, np.arange(3 * n + 1))
        self._gone = np.searchsorted(begins, gone_ns)

    def _over_op(self, op: int) -> tuple[Int64s, Int64s, Bools]:
        """Return the gaps that pass an operation, operations until their end, and which began early enough."""
        gaps, n = self.gaps, self._problem.n_ops
        at = gaps.first + (op - gaps.first) % n
        which = np.flatnonzero(at <= gaps.last)
        gaps, at = gaps.take(which), at[which]
        waited_ns = begin_ns(self._problem, at) - end_ns(self._problem, gaps.first - 1)
        return which, gaps.last - at, np.asarray(waited_ns >= gaps.out_ns)

    def load_with_all_away(self) -> Int64s:
        """Return the bytes in memory at each operation if every gap is used from end to end."""
        load = self._problem.load_bytes.copy()
        for gap, ops in enumerate(self._ops):
            load[ops] -= self.gaps.size_bytes[gap]
        return load

    def plan(self, individual: Individual) -> SwapPlan:
        """Return an individual's plan. There is one if the limit holds with all away."""
        load = self._problem.load_bytes.copy()
        chosen = self._leaving(individual, load)
        gaps = self.gaps.take(chosen)
        returns = self._returning(chosen, load)
        none, n = np.zeros(len(gaps), np.int64), self._problem.n_ops
        out, back = in_order(gaps.first - 1, none, gaps.first, n), in_order(returns, none, gaps.last, n)
        return gaps.moved(out, back, SwapAdvisor.name)

    def _leaving(self, individual: Individual, load: Int64s) -> Int64s:
        """Return the gaps that are used; take them off the load."""
        class_of: Int64s = np.cumsum(individual.tops) - individual.tops
        mine: Int64s = class_of[self._size]
        is_away = np.zeros(len(self.gaps), np.bool_)
        for op in np.flatnonzero(load > self._limit).tolist():
            if load[op] <= self._limit:
                continue
            which, until, waited = self._over[op]
            needs = int(class_of[min(int(np.searchsorted(self.sizes, self._needs[op])), len(class_of) - 1)])
            first = np.lexsort((-until, mine[which] != needs, ~waited, individual.kept[which]))
            for gap in which[first].tolist():
                if load[op] <= self._limit:
                    break
                if not is_away[gap]:
                    is_away[gap] = True
                    load[self._ops[gap]] -= self.gaps.size_bytes[gap]
        return np.flatnonzero(is_away)

    def _returning(self, chosen: Int64s, load: Int64s) -> Int64s:
        """Return the first operations from which on there is room for each tensor, those needed first first."""
        returns = self.gaps.last[chosen]
        for i in np.argsort(returns, kind="stable").tolist():
            gap = int(chosen[i])
            ops, size = self._ops[gap], self.gaps.size_bytes[gap]
            full = np.flatnonzero(load[ops] + size > self._limit)
            first = int(self.gaps.first[gap])
            begin = max(first + int(full[-1]) + 1 if len(full) else first, int(self._gone[gap]))
            load[ops[begin - first :]] += size
            returns[i] = min(begin, returns[i])
        return returns


def _needs(problem: SwapProblem) -> Int64s:
    """Return the largest tensor that each operation makes or uses."""
    needs = np.zeros(problem.n_ops, np.int64)
    owner = np.repeat(np.arange(len(problem)), np.diff(problem.access_begin))
    np.maximum.at(needs, problem.access_op % problem.n_ops, problem.size_bytes[owner])
    made = ~problem.persistent
    np.maximum.at(needs, problem.alloc_op[made], problem.size_bytes[made])
    return needs


# -- the search ------------------------------------------------------------------------------------


class SwapAdvisor(Limited):
    """The genetic search. Deterministic unless the deadline ends it."""

    name = "swapadvisor"

    def __init__(self, least_bytes: int = LEAST_BYTES, population: int = POPULATION) -> None:
        """Keep so many individuals; leave tensors below ``least_bytes`` where they are."""
        self._least_bytes = least_bytes
        self._population = max(population, 2)

    def found(self, problem: SwapProblem, limit_bytes: int, end_s: float) -> SwapPlan | str:
        """Return the best plan found, or what is in the way."""
        planner = Belady(problem, limit_bytes, self._least_bytes)
        left = int(planner.load_with_all_away().max())
        if left > limit_bytes:
            return f"with all {len(planner.gaps)} candidates away {format_bytes(left)} are left, {left} bytes"
        search = _Search(problem, planner, end_s)
        best = search.run(self._population)
        return f"all {len(search.took_ns)} plans come to a deadlock" if best is None else best


class _Search:
    """The individuals seen, and how long their iterations take."""

    def __init__(self, problem: SwapProblem, planner: Belady, end_s: float) -> None:
        self._planner, self._end_s, self._least_ns = planner, end_s, problem.period_ns
        self._replayer = Replayer(problem)
        self._random = np.random.default_rng(_SEED)
        self.took_ns: dict[bytes, float] = {}
        self._best_ns = np.inf
        self._best: SwapPlan | None = None

    def run(self, size: int) -> SwapPlan | None:
        """Return the best plan of all generations."""
        population = self._first(size)
        took_ns = self._evaluate(population)
        since = 0
        for _ in range(MOST_GENERATIONS):
            if since >= PATIENCE or self._ended():
                break
            before_ns = self._best_ns
            children = [self._child(population) for _ in range(size)]
            took_ns = np.concatenate([took_ns, self._evaluate(children)])
            population += children
            left = self._survivors(took_ns, size)
            population, took_ns = [population[i] for i in left], took_ns[left]
            since = 0 if self._best_ns < before_ns else since + 1
        return self._best

    def _ended(self) -> bool:
        return self._best_ns <= self._least_ns or now_s() > self._end_s

    def _first(self, size: int) -> list[Individual]:
        """Return the first generation: each size its own class, all in one, and random ones."""
        n_sizes, n_gaps = len(self._planner.sizes), len(self._planner.gaps)
        none = np.zeros(n_gaps, np.bool_)
        population = [Individual(np.ones(n_sizes, np.bool_), none), Individual(_closed(np.zeros(n_sizes)), none)]
        while len(population) < size:
            tops = self._random.random(n_sizes) < self._random.random()
            population.append(Individual(_closed(tops), self._random.random(n_gaps) < _KEPT))
        return population

    def _child(self, population: Sequence[Individual]) -> Individual:
        """Return a child of two, cut at one place of each of their genes, with some genes changed."""
        parents = self._random.choice(len(population), 2, replace=False).tolist()
        genes = []
        for one, other in zip(population[parents[0]], population[parents[1]], strict=True):
            cut = self._random.integers(len(one) + 1)
            mixed = np.concatenate([one[:cut], other[cut:]])
            genes.append(mixed ^ (self._random.random(len(mixed)) < _MUTATES))
        return Individual(_closed(genes[0]), genes[1])

    def _survivors(self, took_ns: Floats, size: int) -> Int64s:
        """Return which individuals stay, drawn by the softmax of how far they are behind the best one."""
        share = (
            np.exp((self._best_ns - took_ns) / self._best_ns) if np.isfinite(self._best_ns) else np.ones(len(took_ns))
        )
        alive = np.flatnonzero(share > 0)
        drawn = self._random.choice(alive, min(size, len(alive)), replace=False, p=share[alive] / share.sum())
        return np.sort(drawn)

    def _evaluate(self, population: Sequence[Individual]) -> Floats:
        """Return how long iterations take; those of which the deadline leaves no time take for ever."""
        return np.array([self._iteration_ns(individual) for individual in population])

    def _iteration_ns(self, individual: Individual) -> float:
        key = individual.tops.tobytes() + individual.kept.tobytes()
        if key not in self.took_ns:
            if self.took_ns and self._ended():
                return np.inf
            made = self._planner.plan(individual)
            replayed = self._replayer.replay(made)
            self.took_ns[key] = replayed.duration_ns if replayed.is_good else np.inf
            if self.took_ns[key] < self._best_ns:
                self._best_ns, self._best = self.took_ns[key], made
        return self.took_ns[key]


def _closed(tops: Bools | Floats) -> Bools:
    """Return classes of which the last one ends with the largest size."""
    closed = np.asarray(tops, np.bool_).copy()
    closed[-1:] = True
    return closed
