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


class Answer(enum.Enum):
    """Whether jobs fit into a budget together."""

    FITS = "fits"
    WAITS = "fits with waiting"
    SAVES = "fits with less memory"
    NO = "does not fit"


@dataclasses.dataclass(frozen=True)
class JobFit:
    """One job among the others."""

    name: str
    peak: int
    """Regions, as when it runs alone."""
    persistent: int
    delay_ns: int
    """By how much each iteration takes longer than alone, on the average; 0 if the jobs do not fit."""
    normalised: float
    """Throughput over alone's; 0 if the jobs do not fit."""
    reason: str
    limit: int = 0
    """Regions that it holds at most as it saves; 0: all that it wants."""
    how: str = ""
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
        region_bytes: Size of a region, for the sentences.

    Raises:
        ProblemError: There are no jobs, or one takes no time.
    """
    if not loads or any(load.profile.duration_ns <= 0 for load in loads):
        raise ProblemError("no job, or one whose iteration takes no time: give traces with times")
    least, reason = _least_budget(loads, budget, region_bytes)
    if least > budget:
        return _misfit(loads, least, reason)
    longest_ns = max(load.profile.duration_ns for load in loads)
    warm_up_ns, until_ns = WARM_UP * longest_ns, _until_ns(loads, longest_ns)
    outcome = Simulation(policy, loads, budget).run(until_ns, warm_up_ns)
    if outcome.stalls:
        return _misfit(loads, least, f"under {policy.name} the jobs come to wait for each other, and memory overflows")
    jobs = tuple(_job_fit(load, i, outcome, until_ns - warm_up_ns) for i, load in enumerate(loads))
    waits = any(job.delay_ns for job in jobs)
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


def _misfit(loads: Sequence[Load], least: int, reason: str) -> Fit:
    jobs = tuple(JobFit(load.name, peak_of(load), load.persistent, 0, 0.0, "") for load in loads)
    return Fit(Answer.NO, least, jobs, reason)


def _until_ns(loads: Sequence[Load], longest_ns: int) -> int:
    steps = sum(len(load.profile.held) * longest_ns / load.profile.duration_ns for load in loads)
    return longest_ns * (WARM_UP + max(WARM_UP, min(ITERATIONS, round(_MOST_STEPS / steps))))


def _job_fit(load: Load, number: int, outcome: Outcome, window_ns: int) -> JobFit:
    """Spread what a job waited over the iterations' worth of work that it did."""
    normalised = min(1.0, outcome.normalised[number])
    iterations = outcome.normalised[number] * window_ns / load.profile.duration_ns
    delay_ns = round(outcome.waited_ns[number] / iterations) if iterations > 0 else window_ns
    if delay_ns < _NEGLIGIBLE * load.profile.duration_ns:
        return JobFit(load.name, peak_of(load), load.persistent, 0, 1.0, "")
    why = outcome.reasons[number] or "memory is short within its iteration"
    reason = f"{why}: {_milliseconds(delay_ns)} later each iteration"
    return JobFit(load.name, peak_of(load), load.persistent, delay_ns, normalised, reason)


def _milliseconds(t_ns: int) -> str:
    return f"{t_ns / 1e6:.3g} ms"
