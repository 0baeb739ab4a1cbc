"""Between Python's frozen views and the records of compiled policies."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.pool.layout import JobState
from zico.scheduler.layout import (
    BLOCKERS,
    DECISION,
    JOB,
    MEMO_BYTES,
    MEMORY_BYTES,
    NO_TIME,
    NOBODY,
    SNAPSHOT,
    Reason,
)
from zico.scheduler.parameters import values
from zico.scheduler.state import Capabilities, Start, Wait

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from zico.scheduler.parameters import Parameter
    from zico.scheduler.state import Decision, JobView, Plan, PoolView

_DECIDE = ctypes.CFUNCTYPE(None, ctypes.c_int64)

_SENTENCES = {
    Reason.NONE: "",
    Reason.ALONE: "the first iteration of {} runs alone",
    Reason.MISFIT: "its peak does not fit beside what {} keep between iterations",
    Reason.MEETS: "its peak would meet that of {}",
    Reason.UNSAFE: "with one more iteration begun, no order would let all of them finish",
    Reason.TURN: "its turn comes after {}'s iteration",
    Reason.BETTER: "beside {} it gets further when it starts later",
    Reason.LANE: "it shares a lane with {}, whose iteration goes on",
    Reason.QUANTUM: "the device is {}'s for a while",
    Reason.SHARE: "its peak exceeds its share of the budget",
    Reason.YIELDS: "it runs as far as {} loses nothing",
    Reason.ANEW: "all begin anew together once the iteration of {} has ended",
}


class Snapshot:
    """The records of a pool's view, which this keeps."""

    def __init__(self, pool: PoolView) -> None:
        n = len(pool.jobs)
        self._pool = pool
        self.jobs = np.array([_row(job) for job in pool.jobs], JOB)
        self.decisions = np.zeros(n, DECISION)
        index = {job.job: i for i, job in enumerate(pool.jobs)}
        self.snapshot = np.zeros(1, SNAPSHOT)
        snapshot = self.snapshot[0]
        snapshot["now_ns"], snapshot["budget"], snapshot["n"] = pool.now_ns, pool.budget, n
        snapshot["alone"] = NOBODY if pool.alone_job is None else index.get(pool.alone_job, NOBODY)
        snapshot["jobs_address"] = self.jobs.ctypes.data
        snapshot["decisions_address"] = self.decisions.ctypes.data
        snapshot["plan_address"] = 0 if pool.plan is None else pool.plan.address

    def decided(self) -> dict[int, Decision]:
        """Return what a policy has decided, for every job at its boundary."""
        waiting = np.flatnonzero(self.jobs["phase"] == JobState.BOUNDARY)
        return {self._pool.jobs[i].job: decision_of(self.decisions[i], self._pool, i) for i in waiting.tolist()}


def _row(job: JobView) -> tuple[int | float, ...]:
    """Return a job as a record of a snapshot, whose fields have the names of the view's."""
    address = 0 if job.profile is None else job.profile.record.ctypes.data
    return tuple(address if name == "profile_address" else getattr(job, name) for name in JOB.names)


def decision_of(record: Any, pool: PoolView, index: int) -> Decision:  # noqa: ANN401 - one DECISION record
    """Return a decision in Python's terms."""
    if record["starts"]:
        return Start()
    blockers = int(record["blockers"])
    those = [job for i, job in enumerate(pool.jobs[:BLOCKERS]) if blockers >> i & 1]
    against = int(record["against"])
    if not those and against != NOBODY:
        those = [pool.jobs[against]]
    until_ns = int(record["until_ns"])
    reason = Reason(int(record["reason"]))
    misfit = reason is Reason.MISFIT
    said = _misfit(pool, pool.jobs[index]) if misfit else sentence(reason, _names(those))
    return Wait(tuple(job.job for job in those), None if until_ns == NO_TIME else until_ns, said, misfit)


def _names(jobs: Sequence[JobView]) -> str:
    return ", ".join(job.name for job in jobs)


def sentence(reason: Reason, names: str) -> str:
    """Return why a job waits for those of these names."""
    return _SENTENCES[reason].format(names)


def _misfit(pool: PoolView, job: JobView) -> str:
    kept = sum(_kept(other) for other in pool.jobs if other is not job)
    peak = job.held if job.profile is None else job.profile.peak
    return (
        f"its peak of {peak} regions does not fit: the others keep {kept} of the budget of {pool.budget} "
        "between iterations"
    )


def _kept(job: JobView) -> int:
    return job.kept if job.phase == JobState.RUNNING and job.profile is not None else job.held


class Memory:
    """What a policy remembers of the jobs that are there: zeros when those are others."""

    def __init__(self) -> None:
        self.of_all = np.zeros(MEMORY_BYTES, np.uint8)
        self.of_each = np.zeros(0, np.uint8)
        self._jobs: tuple[int, ...] = ()

    def show(self, snapshot: Any, jobs: tuple[int, ...]) -> None:  # noqa: ANN401 - a SNAPSHOT record
        """Let a snapshot of the jobs with these numbers lead here."""
        if jobs != self._jobs:
            self.of_all[:] = 0
            self.of_each = np.zeros(len(jobs) * MEMO_BYTES, np.uint8)
            self._jobs = jobs
        snapshot["memory_address"], snapshot["memos_address"] = self.of_all.ctypes.data, self.of_each.ctypes.data


_ANY_MANNER = Capabilities()


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A policy whose decisions are one compiled function over a snapshot."""

    name: str
    function: Any
    """A ``callback``: takes the address of a SNAPSHOT and fills the decisions of the jobs at their boundaries."""
    use_claims: bool = True
    self_admit: bool = True
    plan: Callable[[PoolView], Plan | None] | None = None
    """What it works out about the jobs of a view, apart from its decisions."""
    parameters: tuple[Parameter, ...] = ()
    knows: str = ""
    """What it has to know of jobs, for people."""
    capabilities: Capabilities = _ANY_MANNER
    options: npt.NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(0), repr=False, compare=False)
    """The parameters' values."""
    memory: Memory = dataclasses.field(default_factory=Memory, repr=False, compare=False)

    @property
    def address(self) -> int:
        """Return the address of the function."""
        return int(self.function.address)

    @property
    def options_address(self) -> int:
        """Return the address of the parameters' values."""
        return self.options.ctypes.data

    def told(self, told: Mapping[str, str]) -> Compiled:
        """Return the same policy with other parameters, which remembers nothing yet.

        Raises:
            ConfigError: It has no such parameter, or a value cannot be used.
        """
        options = np.array(values(self.name, self.parameters, told), np.float64)
        return dataclasses.replace(self, options=options, memory=Memory())

    def decide(self, pool: PoolView) -> dict[int, Decision]:
        """Return a decision for every job at its boundary."""
        snapshot = Snapshot(pool)
        snapshot.snapshot[0]["options_address"] = self.options_address
        self.memory.show(snapshot.snapshot[0], tuple(job.job for job in pool.jobs))
        _DECIDE(self.address)(snapshot.snapshot.ctypes.data)
        return snapshot.decided()
