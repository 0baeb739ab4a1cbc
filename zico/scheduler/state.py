"""What a policy sees and what it answers: frozen, in regions and nanoseconds, no clock of its own."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Protocol

import numpy as np

from zico.base.errors import ProblemError
from zico.scheduler.layout import PROFILE, JobFields
from zico.trace.profile import CURVE_BINS, UNPROFILED_SHIFT

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_TICK_SHIFT = 7  # a curve has 128 to 256 bins


@dataclasses.dataclass(frozen=True)
class Profile:
    """Regions held against time within one iteration, as steps.

    ``held[i]`` is the most regions held from ``t_ns[i]`` to ``t_ns[i + 1]`` (the last one to
    ``duration_ns``). The job is at step i when its progress is in ``[i << shift, (i + 1) <<
    shift)``.
    """

    held: tuple[int, ...]
    t_ns: tuple[int, ...]
    duration_ns: int
    shift: int
    n_events: int

    @property
    def peak(self) -> int:
        """Return the most regions held at once."""
        return max(self.held)

    @property
    def is_flat(self) -> bool:
        """Tell whether only the peak is known, of an iteration that contained the job's set-up."""
        return self.shift == UNPROFILED_SHIFT

    @functools.cached_property
    def record(self) -> NDArray[np.void]:
        """Return its PROFILE record, in an array of one that lives as long as this does.

        Raises:
            ProblemError: It has more bins than a record.
        """
        n = len(self.held)
        if not 0 < n <= CURVE_BINS:
            raise ProblemError(f"a profile has {n} bins: give 1 to {CURVE_BINS}")
        held, t_ns = np.asarray(self.held, np.int64), np.asarray(self.t_ns, np.int64)
        first = np.flatnonzero(np.diff(held, prepend=held[0] - 1))
        records = np.zeros(1, PROFILE)
        record = records[0]
        for name in ("duration_ns", "n_events", "shift", "peak"):
            record[name] = getattr(self, name)
        record["tick_ns"] = max(1, self.duration_ns >> _TICK_SHIFT)
        record["n_bins"], record["n_steps"] = n, len(first)
        record["held"][:n], record["t_ns"][:n] = held, t_ns
        record["claims"][:n] = np.maximum.accumulate(held[::-1])[::-1]
        record["step_ns"][: len(first)] = t_ns[first]
        record["level"][: len(first)] = held[first]
        return records


@dataclasses.dataclass(kw_only=True)
class JobView(JobFields):
    """One job at one instant. Nobody changes a view: ``dataclasses.replace`` makes another one."""

    name: str
    profile: Profile | None
    """``None`` until the first iteration has ended, and while one goes on that is like none before."""
    in_main_phase: bool = True
    """Its iteration is one of those that marks begin, or that repeat where nothing marks them: plans are for these."""
    jitter: float = 0.0
    """By up to what share its iterations are known to be longer or shorter, waits left out."""
    limit: int = 0
    """Regions that it may hold by a limit of its own, 0: as many as the budget has."""
    wanted: int = 0
    """Regions that it would hold without a limit, 0: not known."""
    saves: bool = False
    """It can go on with less than it wants, and leaves it to the broker whether it does."""
    ranks: tuple[int, ...] = ()
    """The places of a group's ranks, if this is a group: its figures are their sums."""


class Plan(Protocol):
    """What a policy has worked out about some jobs, which outlasts the view that it was for."""

    @property
    def address(self) -> int:
        """Return where the record is that compiled decisions read."""
        ...


@dataclasses.dataclass(frozen=True)
class PoolView:
    """All jobs of a pool at one instant."""

    now_ns: int
    budget: int
    """Regions, but for those that paused jobs keep."""
    jobs: tuple[JobView, ...]
    alone_job: int | None = None
    """The job that grows now in an iteration of which nothing is known: nobody else may start one."""
    late: tuple[int, ...] = ()
    """Ranks at their boundaries whose group goes on: the others may wait for them in a collective."""
    staying: tuple[int, ...] = ()
    """The places of jobs that hold memory at boundaries where a pause or a gate keeps them."""
    plan: Plan | None = None
    """What the policy has worked out about these jobs, if it has."""
    slowdown: tuple[float, ...] = (1.0,)
    """By what factor each of 0, 1, 2, ... working jobs is slower than alone; the last for any more."""

    def job(self, job: int) -> JobView:
        """Return the job with that number; ``KeyError`` if there is none."""
        for view in self.jobs:
            if view.job == job:
                return view
        raise KeyError(job)


@dataclasses.dataclass(frozen=True)
class Start:
    """Let the job begin its next iteration now."""


@dataclasses.dataclass(frozen=True)
class Wait:
    """Keep the job at its boundary."""

    for_jobs: tuple[int, ...]
    """Whom it waits for."""
    until_ns: int | None
    """When the answer may change although nothing happens; ``None``: only an event can change it."""
    reason: str
    for_kept: bool = False
    """It waits for what others keep between iterations."""


Decision = Start | Wait


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a policy needs of the machine that it is asked by."""

    runs: bool = True
    """Brokers can do what it says; otherwise it is for the simulator alone."""
    pauses: bool = False
    """It decides about jobs inside their iterations, too, and may have any job's memory copied out."""
    watches: bool = False
    """It wants to be asked, too, when a job has to wait inside its iteration."""
    pages: bool = False
    """Frameworks keep what they once had, memory is granted above the budget, and what does not fit is paged."""
    asks: bool = False
    """A job's first iteration asks for leave as any other; brokers let it begin and grow alone."""
    offline: bool = False
    """Profiles are known before jobs come."""


class Policy(Protocol):
    """Who may begin an iteration now. The same views one after the other give the same decisions."""

    @property
    def name(self) -> str:
        """Return what it is called."""
        ...

    @property
    def use_claims(self) -> bool:
        """Tell whether every region grant must leave the state safe."""
        ...

    @property
    def self_admit(self) -> bool:
        """Tell whether a job may start unasked while all jobs' peaks together fit the budget."""
        ...

    @property
    def plan(self) -> Callable[[PoolView], Plan | None] | None:
        """Return what works out a plan for the jobs of a view, in its own time, if there is anything to plan."""
        ...

    def decide(self, pool: PoolView) -> dict[int, Decision]:
        """Return a decision for every job at its boundary."""
        ...


class CompiledPolicy(Policy, Protocol):
    """A policy whose decisions are machine code, which the simulator calls."""

    @property
    def address(self) -> int:
        """Return the address of a C function that takes a SNAPSHOT's and fills its decisions."""
        ...

    @property
    def options_address(self) -> int:
        """Return the address of its parameters."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Return what it needs of the machine that it is asked by."""
        ...
