"""Will these jobs fit together, and how much slower? Answered by running the scheduler itself on their profiles."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from zico.base.errors import ProblemError
from zico.base.units import format_bytes
from zico.scheduler.simulate import Simulation, peak_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.scheduler.simulate import Load, Outcome
    from zico.scheduler.state import CompiledPolicy

WARM_UP = 5
ITERATIONS = 40
"""A simulation lasts so many iterations of the longest job after its warm-up."""
_MOST_STEPS = 400_000  # a job that is a thousand times shorter than its neighbour must not take minutes
_NEGLIGIBLE = 0.005  # of an iteration
_NS_A_SECOND = 1e9


class Answer(enum.Enum):
    """Whether jobs fit into a budget together."""

    FITS = "fits"
    WAITS = "fits with waiting"
    SAVES = "fits with less memory"
    NO = "does not fit"


@dataclasses.dataclass(frozen=True)
class JobFit:
    """One job among the others, as ``zico fit --json`` prints it."""

    name: str
    peak_bytes: int
    """As when it runs alone."""
    persistent_bytes: int
    iteration_s: float
    """As when it runs alone."""
    delay_s: float = 0.0
    """By how much each iteration takes longer than alone, on the average; 0 if the jobs do not fit."""
    normalised: float = 0.0
    """Throughput over alone's; 0 if the jobs do not fit."""
    reason: str = ""
    limit_bytes: int | None = None
    """What it holds at most as it saves; ``None``: all that it wants."""
    save: str | None = None
    """How it saves: ``swap``, ``page``, or a planner's name."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """All jobs together."""

    answer: Answer
    peak: int
    """The most regions granted at once; where the jobs do not fit, the fewest that would do."""
    jobs: tuple[JobFit, ...]
    reason: str


def fit(loads: Sequence[Load], budget: int, policy: CompiledPolicy, region_bytes: int) -> Fit:
    """Return whether jobs fit together, simulated with one processor for each: only memory makes them wait.

    Args:
        loads: The jobs; each has its own name.
        budget: Regions.
        policy: Who may go on.
        region_bytes: Size of a region.

    Raises:
        ProblemError: There are no jobs, or one takes no time.
    """
    if not loads or any(load.profile.duration_ns <= 0 for load in loads):
        raise ProblemError("no job, or one whose iteration takes no time: give traces with times")
    least, reason = _least_budget(loads, budget, region_bytes)
    if least > budget:
        return _misfit(loads, least, reason, region_bytes)
    longest_ns = max(load.profile.duration_ns for load in loads)
    warm_up_ns, until_ns = WARM_UP * longest_ns, _until_ns(loads, longest_ns)
    outcome = Simulation(policy, loads, budget).run(until_ns, warm_up_ns)
    if outcome.stalls:
        reason = f"under {policy.name} the jobs come to wait for each other, and memory overflows"
        return _misfit(loads, least, reason, region_bytes)
    jobs = tuple(_beside(load, i, outcome, until_ns - warm_up_ns, region_bytes) for i, load in enumerate(loads))
    waits = any(job.delay_s for job in jobs)
    answer = Answer.WAITS if waits else Answer.FITS
    return Fit(answer, outcome.peak_granted, jobs, _peaks_together(loads, budget, waits, region_bytes))


def _least_budget(loads: Sequence[Load], budget: int, region_bytes: int) -> tuple[int, str]:
    """Return the regions without which some job can never end an iteration, and whose fault that is."""
    kept = sum(load.persistent for load in loads)
    worst = max(loads, key=lambda load: peak_of(load) - load.persistent)
    least = peak_of(worst) - worst.persistent + kept
    largest = max(loads, key=peak_of)
    if peak_of(largest) > budget:
        return least, f"{largest.name} alone needs {format_bytes(peak_of(largest) * region_bytes)}"
    needs = format_bytes(peak_of(worst) * region_bytes)
    keep = format_bytes((kept - worst.persistent) * region_bytes)
    return least, f"{worst.name} needs {needs}, and the others keep {keep} between iterations"


def _peaks_together(loads: Sequence[Load], budget: int, waits: bool, region_bytes: int) -> str:  # noqa: FBT001
    terms = " + ".join(format_bytes(peak_of(load) * region_bytes) for load in loads)
    if sum(map(peak_of, loads)) <= budget:
        return f"peaks {terms} are within {format_bytes(budget * region_bytes)}"
    return f"peaks {terms} exceed {format_bytes(budget * region_bytes)}" + ("" if waits else ", but need not meet")


def _misfit(loads: Sequence[Load], least: int, reason: str, region_bytes: int) -> Fit:
    return Fit(Answer.NO, least, tuple(job_alone(load, region_bytes) for load in loads), reason)


def job_alone(load: Load, region_bytes: int) -> JobFit:
    """Return what a job is by itself, without an answer."""
    iteration_s = load.profile.duration_ns / _NS_A_SECOND
    return JobFit(load.name, peak_of(load) * region_bytes, load.persistent * region_bytes, iteration_s)


def _until_ns(loads: Sequence[Load], longest_ns: int) -> int:
    steps = sum(len(load.profile.held) * longest_ns / load.profile.duration_ns for load in loads)
    return longest_ns * (WARM_UP + max(WARM_UP, min(ITERATIONS, round(_MOST_STEPS / steps))))


def _beside(load: Load, number: int, outcome: Outcome, window_ns: int, region_bytes: int) -> JobFit:
    """Spread what a job waited over the iterations' worth of work that it did."""
    job = job_alone(load, region_bytes)
    normalised = min(1.0, outcome.normalised[number])
    iterations = outcome.normalised[number] * window_ns / load.profile.duration_ns
    delay_ns = round(outcome.waited_ns[number] / iterations) if iterations > 0 else window_ns
    if delay_ns < _NEGLIGIBLE * load.profile.duration_ns:
        return dataclasses.replace(job, normalised=1.0)
    why = outcome.reasons[number] or "memory is short within its iteration"
    reason = f"{why}: {_milliseconds(delay_ns)} later each iteration"
    return dataclasses.replace(job, delay_s=delay_ns / _NS_A_SECOND, normalised=normalised, reason=reason)


def _milliseconds(t_ns: int) -> str:
    return f"{t_ns / 1e6:.3g} ms"
