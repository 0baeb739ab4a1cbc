"""Who waits and who goes on with less: the best way for each job, found by simulating them together.

Theory of operation
    A job that moves idle memory away holds at most its limit, and its iterations take longer. So it
    is a job with another curve: the old one, cut off at the limit and stretched. Each job has a few
    such ways besides its own curve (waiting for its turn); of all combinations that one is taken
    under which ``zico`` gets them furthest, by weight::

        a: all of it, 8 of 10, 6 of 10      the bound of a combination: nobody waits for anybody
        b: all of it, 5 of 9                simulated from the highest bound on, until no bound is above the best

    Where all limits fit together nobody waits, and the bound is what they get. Many jobs are
    changed one at a time. What is left of the budget then goes to the jobs that save most, as long
    as their ways are no slower: copies cost more than predictions know.

Known limitations
    A stretched curve is slower everywhere alike, although copies delay some operations and not
    others. Jobs that move memory at the same time share the link, by a rule: a way is good for so
    many of them as it says (``OperatingPoint.among``), whether they copy all the time or hardly
    ever.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from zico.base.errors import ProblemError
from zico.scheduler.plan_search import AT_BOUNDARIES, mean_of, score_of
from zico.scheduler.policies import policy_named
from zico.scheduler.shares import floors, worths
from zico.scheduler.simulate import Simulation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zico.scheduler.simulate import Load
    from zico.scheduler.state import OperatingPoint, Profile

_WARM_UP, _ROUNDS = 8, 24
"""Iterations of the longest job."""
_MOST_COMBINATIONS = 512
_MOST_SWEEPS = 4
_ALIKE = 1e-9
_NONE = "more jobs have to do with less at once than any of their ways counts with: raise the budget"

Combination = tuple[int, ...]
"""For each job the number of its way; 0: all that it wants."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What each job is to do."""

    less: tuple[OperatingPoint | None, ...]
    """``None``: it holds what it wants, and waits for its turn."""
    normalised: tuple[float, ...]
    """Throughput over that alone with all the memory that it wants."""
    score: float
    """Their mean by weight, less what jobs lack of what they are owed."""


def limited(load: Load, less: OperatingPoint) -> Load:
    """Return a job as it is with less: its curve cut off at the limit, and as long as it says."""
    return dataclasses.replace(
        load,
        profile=_limited(load.profile, less),
        persistent=min(load.persistent, less.limit),
        phases=(),
        believed=None,
        later=(),
        less=(),
    )


def _limited(profile: Profile, less: OperatingPoint) -> Profile:
    longer = less.duration_ns / max(1, profile.duration_ns)
    return dataclasses.replace(
        profile,
        held=tuple(min(held, less.limit) for held in profile.held),
        t_ns=tuple(round(t_ns * longer) for t_ns in profile.t_ns),
        duration_ns=less.duration_ns,
    )


def useful(load: Load) -> tuple[OperatingPoint, ...]:
    """Return a job's ways that hold less than its peak, none worse than another in all figures, the largest first."""
    found: list[OperatingPoint] = []
    for way in sorted(load.less, key=lambda way: (way.duration_ns, way.limit, -way.among)):
        better = (one.limit for one in found if one.among >= way.among)
        if way.limit < min([load.profile.peak, *better]):
            found.append(dataclasses.replace(way, duration_ns=max(way.duration_ns, load.profile.duration_ns)))
    return tuple(sorted(found, key=lambda way: -way.limit))


def choose(loads: Sequence[Load], budget: int, *, slowdown: Sequence[float] = (1.0,), seed: int = 0) -> Choice:
    """Return what each job is to do so that all get furthest together.

    Takes a simulation, milliseconds to a few hundred for many jobs, for each combination that might
    be the best.

    Args:
        loads: The jobs, with all the memory that they want, and how each could go on with less.
        budget: Regions.
        slowdown: By what factor each of 0, 1, 2, ... working jobs is slower than alone.
        seed: Of the jitter.

    Raises:
        ProblemError: There are no jobs, or one fits the budget in none of its ways.
    """
    if not loads:
        raise ProblemError("no jobs: give at least one")
    options = [[None, *useful(load)] for load in loads]
    fitting = [_fitting(load, some, budget) for load, some in zip(loads, options, strict=True)]
    search = _Search(loads, options, budget, slowdown, seed)
    if math.prod(map(len, fitting)) <= _MOST_COMBINATIONS:
        return _raised(search.best(itertools.product(*fitting)), loads, budget)
    return _raised(search.climb(fitting), loads, budget)


def _raised(choice: Choice, loads: Sequence[Load], budget: int) -> Choice:
    """Return a choice in which nobody waits with what is left of the budget: no job is slower, and each saves less.

    The job with the smallest share of its peak gets more first.
    """
    limits = [way.limit if way else load.profile.peak for way, load in zip(choice.less, loads, strict=True)]
    less = list(choice.less)
    spare = budget - sum(limits)
    while spare > 0:
        by_share = sorted(range(len(loads)), key=lambda i: limits[i] / loads[i].profile.peak)
        larger = next(((i, way) for i in by_share if (way := _larger(less[i], loads[i], spare))), None)
        if larger is None:
            break
        i, way = larger
        spare -= way.limit - limits[i]
        less[i], limits[i] = way, way.limit
    return dataclasses.replace(choice, less=tuple(less))


def _larger(way: OperatingPoint | None, load: Load, spare: int) -> OperatingPoint | None:
    """Return the next way with more memory that is no slower; ``None``: there is none, or it has all that it wants."""
    if way is None:
        return None
    peak, alone_ns = load.profile.peak, load.profile.duration_ns
    found = [
        one
        for one in load.less
        if way.limit < one.limit <= min(way.limit + spare, peak - 1)
        and max(one.duration_ns, alone_ns) <= way.duration_ns
        and one.among >= way.among
    ]
    smallest = min(found, key=lambda one: one.limit, default=None)
    return smallest and dataclasses.replace(smallest, duration_ns=max(smallest.duration_ns, alone_ns))


def _among(less: OperatingPoint | None) -> int:
    return less.among if less else 0


def _fitting(load: Load, options: Sequence[OperatingPoint | None], budget: int) -> list[int]:
    found = [i for i, less in enumerate(options) if (less.limit if less else load.profile.peak) <= budget]
    if not found:
        message = (
            f"{load.name} needs {load.profile.peak} regions, and no way to do with the budget of {budget} is known"
        )
        raise ProblemError(message)
    return found


class _Search:
    """Simulates combinations, each once."""

    def __init__(
        self,
        loads: Sequence[Load],
        options: Sequence[Sequence[OperatingPoint | None]],
        budget: int,
        slowdown: Sequence[float],
        seed: int,
    ) -> None:
        self._loads, self._options, self._budget = loads, options, budget
        self._policy = dataclasses.replace(policy_named("zico"), capabilities=AT_BOUNDARIES)
        self._slowdown, self._seed = tuple(slowdown), seed
        self._worth = worths(loads)
        self._known: dict[Combination, Choice] = {}

    def best(self, combinations: Iterator[Combination]) -> Choice:
        """Return the best of some; those that cannot be are not simulated."""
        order = sorted(filter(self._can_be, combinations), key=self._bound, reverse=True)
        if not order:
            raise ProblemError(_NONE)
        best = self._tried(order[0])
        for one in order[1:]:
            if self._bound(one) <= best.score + _ALIKE:
                break
            best = max(best, self._tried(one), key=lambda choice: choice.score)
        return best

    def climb(self, fitting: Sequence[Sequence[int]]) -> Choice:
        """Return what changing one job at a time comes to, from everybody's largest and everybody's smallest."""
        found = []
        smallest = tuple(self._smallest(number, some) for number, some in enumerate(fitting))
        for start in (tuple(some[0] for some in fitting), smallest):
            now = start
            for _ in range(_MOST_SWEEPS):
                before = now
                for number, some in enumerate(fitting):
                    changed = [(*now[:number], i, *now[number + 1 :]) for i in some]
                    now = max(filter(self._can_be, changed), key=lambda one: self._tried(one).score, default=now)
                if now == before:
                    break
            if self._can_be(now):
                found.append(self._tried(now))
        if not found:
            raise ProblemError(_NONE)
        return max(found, key=lambda choice: choice.score)

    def _smallest(self, number: int, fitting: Sequence[int]) -> int:
        """Return a job's smallest way among those that count with the most others."""
        return max(fitting, key=lambda i: (_among(self._options[number][i]), i))

    def _can_be(self, combination: Combination) -> bool:
        """Tell whether no more jobs move memory than each of their ways counts with."""
        moving = [way for way in self._less(combination) if way]
        return all(way.among >= len(moving) for way in moving)

    def _bound(self, combination: Combination) -> float:
        """Return what no schedule exceeds: nobody waits for memory."""
        return mean_of(self._rates(combination), self._worth)

    def _rates(self, combination: Combination) -> list[float]:
        """Return each job's speed over that alone, if it never waits."""
        loads = zip(self._loads, self._less(combination), strict=True)
        return [load.profile.duration_ns / less.duration_ns if less else 1.0 for load, less in loads]

    def _less(self, combination: Combination) -> tuple[OperatingPoint | None, ...]:
        return tuple(some[i] for some, i in zip(self._options, combination, strict=True))

    def _tried(self, combination: Combination) -> Choice:
        if combination not in self._known:
            self._known[combination] = self._simulated(combination)
        return self._known[combination]

    def _simulated(self, combination: Combination) -> Choice:
        less = self._less(combination)
        loads = [limited(load, way) if way else load for load, way in zip(self._loads, less, strict=True)]
        longest_ns = max(load.profile.duration_ns for load in loads)
        simulation = Simulation(self._policy, loads, self._budget, self._seed, slowdown=self._slowdown)
        outcome = simulation.run((_WARM_UP + _ROUNDS) * longest_ns, _WARM_UP * longest_ns)
        rates = zip(outcome.normalised, self._rates(combination), strict=True)
        # Whole iterations are counted, so that a window may hold a few thousandths more than its
        # share.
        normalised = tuple(min(got, 1.0) * rate for got, rate in rates)
        return Choice(less, normalised, score_of(normalised, floors(self._loads), self._worth))
