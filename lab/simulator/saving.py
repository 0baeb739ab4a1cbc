"""What jobs come to under ``--save auto``: by turns, or with their shares of the budget, whichever is better.

Theory of operation
    A job that saves holds at most a limit, and its iterations take longer. So it is a job with
    another curve: the old one, cut off at the limit and stretched. Such a curve is an operating
    point. Two settings are simulated, as ``zico.broker.trials`` measures them in a run::

        none      whoever is larger than the budget saves until it fits; all wait for their turns
        shares    whoever wants more than its share of the budget by weight holds no more than that

    In each a job takes the fastest of its points within what it may hold.

Known limitations
    A stretched curve is slower everywhere alike, although copies delay some operations and not
    others. Jobs that move memory at the same time share the link, by a rule. A point is good for so
    many of them as it says (``OperatingPoint.among``), whether they copy all the time or hardly
    ever.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from zico.base.errors import ProblemError
from zico.base.units import format_bytes
from zico.lab.simulator.compare import simulate
from zico.scheduler import fit
from zico.scheduler.curves import in_regions
from zico.scheduler.plan_search import AT_BOUNDARIES, score_of
from zico.scheduler.policies import policy_named
from zico.scheduler.shares import budget_shares, floors, worths
from zico.scheduler.simulate import Load, Simulation, peak_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.lab.simulator.compare import Horizon, Pool, Result
    from zico.scheduler.fit import Fit, JobFit
    from zico.scheduler.state import CompiledPolicy

MANY = 1 << 30
"""Jobs: more than there ever are."""
POINT_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Of a trace's peak, with which it is worked out how long its job would take."""
_WARM_UP, _ROUNDS = 8, 24
"""Iterations of the longest job."""
_LATER_SHARE = 0.005
"""Of an iteration's time: who is later by less is not called late."""
_NS_A_SECOND = 1e9


@dataclasses.dataclass(frozen=True)
class OperatingPoint:
    """One way in which a job goes on with less than its peak."""

    how: str
    """``swap``, ``page``, or a planner's name."""
    limit: int
    """Regions that it holds at most."""
    duration_ns: int
    """Of an iteration alone."""
    among: int = MANY
    """It takes no longer while so many jobs, itself included, move memory at the same time."""


Points = tuple["OperatingPoint | None", ...]
"""What each job does; ``None``: it holds what it wants."""


@dataclasses.dataclass(frozen=True)
class SavingLoad(Load):
    """A job that can save."""

    points: tuple[OperatingPoint, ...] = ()


def points_in_regions(points: Sequence[OperatingPoint], region_bytes: int) -> tuple[OperatingPoint, ...]:
    """Return points that were in bytes in whole regions of this size."""
    return tuple(dataclasses.replace(point, limit=point.limit // region_bytes) for point in points)


def loads_in_regions(loads: Sequence[SavingLoad], region_bytes: int, *, whole: bool) -> tuple[SavingLoad, ...]:
    """Return jobs that were in bytes in regions, as ``in_regions`` does, with their points."""
    counted = in_regions(loads, region_bytes, whole=whole)
    return tuple(dataclasses.replace(load, points=points_in_regions(load.points, region_bytes)) for load in counted)


def limited(load: SavingLoad, point: OperatingPoint | None) -> SavingLoad:
    """Return a job as it is at a point: its curve cut off at the limit, and as long as that says."""
    if point is None:
        return load
    profile = load.profile
    duration_ns = max(point.duration_ns, profile.duration_ns)
    longer = duration_ns / max(1, profile.duration_ns)
    cut = dataclasses.replace(
        profile,
        held=tuple(min(held, point.limit) for held in profile.held),
        t_ns=tuple(round(t_ns * longer) for t_ns in profile.t_ns),
        duration_ns=duration_ns,
    )
    persistent = min(load.persistent, point.limit)
    return dataclasses.replace(load, profile=cut, persistent=persistent, phases=(), believed=None, later=(), points=())


def settings(loads: Sequence[SavingLoad], budget: int) -> list[Points]:
    """Return what each job does in each setting that is possible: none first, then shares.

    Raises:
        ProblemError: There are no jobs, or one fits the budget at none of its points.
    """
    if not loads:
        raise ProblemError("no jobs: give at least one")
    peaks = [peak_of(load) for load in loads]
    whole = _setting(loads, [budget] * len(loads))
    large = next((load for load in loads if peak_of(load) > budget and not load.points), None)
    if whole is None or large is not None:
        name = (large or max(loads, key=peak_of)).name
        raise ProblemError(f"{name} is larger than the budget of {budget} regions, and no way to save is known")
    shared = _setting(loads, budget_shares(peaks, [load.weight for load in loads], budget))
    return [whole] if shared in (None, whole) else [whole, shared]


def _setting(loads: Sequence[SavingLoad], caps: Sequence[int]) -> Points | None:
    """Return the fastest point within its cap of each job that can save and has to; ``None``: one has none."""
    must = [bool(load.points) and peak_of(load) > cap for load, cap in zip(loads, caps, strict=True)]
    found: list[OperatingPoint | None] = [None] * len(loads)
    for i in (i for i, saves in enumerate(must) if saves):
        within = [point for point in loads[i].points if point.limit <= caps[i] and point.among >= sum(must)]
        if not within:
            return None
        found[i] = min(within, key=lambda point: (point.duration_ns, -point.limit))
    return tuple(found)


def choose(loads: Sequence[SavingLoad], budget: int, *, slowdown: Sequence[float] = (1.0,), seed: int = 0) -> Points:
    """Return what each job does in the setting under which all get furthest together. Takes a simulation of each.

    Args:
        loads: The jobs.
        budget: Regions.
        slowdown: By what factor each of 0, 1, 2, ... working jobs is slower than alone.
        seed: Of the jitter.

    Raises:
        ProblemError: As ``settings``.
    """
    policy = dataclasses.replace(policy_named("zico"), capabilities=AT_BOUNDARIES)

    def score(points: Points) -> float:
        forced = [limited(load, point) for load, point in zip(loads, points, strict=True)]
        longest_ns = max(load.profile.duration_ns for load in forced)
        simulation = Simulation(policy, forced, budget, seed, slowdown=tuple(slowdown))
        outcome = simulation.run((_WARM_UP + _ROUNDS) * longest_ns, _WARM_UP * longest_ns)
        # Whole iterations are counted, so that a window may hold a few thousandths more than its share.
        rates = [load.profile.duration_ns / one.profile.duration_ns for load, one in zip(loads, forced, strict=True)]
        got = [min(each, 1.0) * rate for each, rate in zip(outcome.normalised, rates, strict=True)]
        return score_of(got, floors(loads), worths(loads))

    possible = settings(loads, budget)
    return max(possible, key=score) if len(possible) > 1 else possible[0]


def simulate_saving(
    loads: Sequence[SavingLoad], pool: Pool, horizon: Horizon, *, seed: int = 0
) -> tuple[Result, Points]:
    """Return what jobs come to under ``zico`` in the better setting, and what each does there.

    Raises:
        ProblemError: As ``settings``.
    """
    points = choose(loads, pool.budget, slowdown=pool.device.slowdown, seed=seed)
    forced = [limited(load, point) for load, point in zip(loads, points, strict=True)]
    result = simulate(policy_named("zico"), forced, pool, horizon, seed=seed)
    return over(result, loads, forced), points


def over(result: Result, loads: Sequence[Load], forced: Sequence[Load]) -> Result:
    """Return what jobs came to that saved, over what they would alone with all that they want."""
    jobs = tuple(
        msgspec.structs.replace(job, normalised=job.normalised * load.profile.duration_ns / one.profile.duration_ns)
        for job, load, one in zip(result.jobs, loads, forced, strict=True)
    )
    return dataclasses.replace(result, jobs=jobs)


def fit_saving(
    waiting: Fit,
    loads: Sequence[Load],
    points: Sequence[Sequence[OperatingPoint]],
    budget: int,
    policy: CompiledPolicy,
    region_bytes: int,
) -> Fit:
    """Return how jobs fit together that may save; as if they could not where no job saves then, or none fits.

    Args:
        waiting: How they fit if they only wait.
        loads: The jobs.
        points: Of each, in bytes.
        budget: Regions.
        policy: Who may go on.
        region_bytes: Size of a region.
    """
    those = [
        SavingLoad(load.name, load.profile, load.persistent, points=points_in_regions(some, region_bytes))
        for load, some in zip(loads, points, strict=True)
    ]
    try:
        chosen = choose(those, budget)
        forced = [limited(load, point) for load, point in zip(those, chosen, strict=True)]
        found = fit.fit(forced, budget, policy, region_bytes)
    except ProblemError:
        return waiting
    if found.answer is fit.Answer.NO or not any(chosen):
        return waiting
    jobs = tuple(
        _saving(job, load, point, region_bytes) if point else job
        for job, load, point in zip(found.jobs, loads, chosen, strict=True)
    )
    fits_whole = waiting.answer is not fit.Answer.NO
    reason = "it is faster than waiting" if fits_whole else "not all could end an iteration otherwise"
    return dataclasses.replace(found, answer=fit.Answer.SAVES, jobs=jobs, reason=reason)


def _saving(job: JobFit, load: Load, point: OperatingPoint, region_bytes: int) -> JobFit:
    """Return what became of a job that saves, beside what it is with all that it wants."""
    longer_ns = max(0, point.duration_ns - load.profile.duration_ns)
    reason = f"it trains in {format_bytes(point.limit * region_bytes)} with --save {point.how}"
    if longer_ns >= _LATER_SHARE * load.profile.duration_ns:
        reason += f": {longer_ns / 1e6:.3g} ms later each iteration"
    return dataclasses.replace(
        fit.job_alone(load, region_bytes),
        delay_s=job.delay_s + longer_ns / _NS_A_SECOND,
        normalised=job.normalised * load.profile.duration_ns / (load.profile.duration_ns + longer_ns),
        reason="; ".join(filter(None, (reason, job.reason))),
        limit_bytes=point.limit * region_bytes,
        save=point.how,
    )
