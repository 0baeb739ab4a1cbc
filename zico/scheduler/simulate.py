"""Jobs, memory and a clock, driven by the very policies and claims that the broker runs: events, no time steps.

Theory of operation
    A job goes through the steps of its profile and holds so many regions in each; between iterations it keeps its
    persistent ones. At a step that holds more it asks, and waits while what it asks for is not free or would leave
    the state unsafe. The policy is asked when somebody arrives or comes to a boundary, and when its own answer says
    so. Its first iteration has no profile and grows alone::

        arrive -> step .. step -> boundary -> decision -> step .. step -> boundary ...
                  waits for regions           waits for the policy

    Where nobody could go on, one blocked job gets its regions from outside the budget: a stall.

Guarantees
    * Deterministic: the same loads, budget, policy and seed give the same outcome.
    * Granted regions never exceed the budget.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.errors import ProblemError
from zico.scheduler.engine import Stop, advance
from zico.scheduler.layout import DECISION, JOB, NOBODY, SCENE, Reason
from zico.scheduler.layout import Phase as Code
from zico.scheduler.packed import packed, sentence
from zico.scheduler.state import JobView, Phase, PoolView
from zico.scheduler.tenants import EVENT, FOREVER, LOG, RUN, SCRATCH_ROWS, TENANT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from zico.scheduler.state import CompiledPolicy, Plan, Profile


@dataclasses.dataclass(frozen=True)
class Load:
    """What one job does in every iteration."""

    name: str
    profile: Profile
    """What it really holds, and when."""
    persistent: int
    """Regions that it keeps between iterations."""
    believed: Profile | None = None
    """What the scheduler is told after the first iteration, if that is wrong."""
    jitter: float = 0.0
    """Each iteration is longer or shorter by up to this share."""
    arrive_ns: int = 0
    iterations: int = 0
    """After so many it leaves; 0: never."""
    floor: float = 0.0
    """The least normalised throughput that it is owed."""
    weight: float = 1.0
    """What its throughput counts beside the others'."""
    priority: int = 0
    """Its turn comes before that of any lower one."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run came to; per job in the order of the loads."""

    normalised: tuple[float, ...]
    """Work done over what it would have done alone, after the warm-up."""
    iterations: tuple[int, ...]
    waited_ns: tuple[int, ...]
    """At boundaries and in allocations, after the warm-up."""
    reasons: tuple[str, ...]
    """What the policy said most often when it made the job wait after the warm-up; empty if it never did."""
    peak_granted: int
    stalls: int
    decisions: int
    longest_wait_ns: int

    @property
    def mean(self) -> float:
        """Return the mean over the jobs."""
        return sum(self.normalised) / len(self.normalised)


class Simulation:
    """Run jobs under a policy and a budget until a given time."""

    def __init__(
        self,
        policy: CompiledPolicy,
        loads: Iterable[Load],
        budget: int,
        seed: int = 0,
        *,
        slowdown: Sequence[float] = (1.0,),
        log: int = 0,
    ) -> None:
        """Take the jobs in the order of their numbers; nothing runs yet.

        Args:
            policy: Who may start.
            loads: The jobs.
            budget: Regions.
            seed: Of the jitter.
            slowdown: By what factor each of 0, 1, 2, ... working jobs is slower than alone; the last for any more.
            log: How many changes of what jobs hold to keep.

        Raises:
            ProblemError: There are no jobs.
        """
        self.policy = policy
        self.loads = tuple(loads)
        if not self.loads:
            raise ProblemError("no jobs: give at least one")
        n = len(self.loads)
        self._packed = [(packed(load.profile), packed(load.believed or load.profile)) for load in self.loads]
        self.tenants = np.zeros(n, TENANT)
        for number, (load, (true, believed)) in enumerate(zip(self.loads, self._packed, strict=True)):
            tenant = self.tenants[number]
            tenant["true_address"], tenant["believed_address"] = true.ctypes.data, believed.ctypes.data
            tenant["keeps"], tenant["arrive_ns"], tenant["limit"] = load.persistent, load.arrive_ns, load.iterations
            tenant["jitter"], tenant["floor"] = load.jitter, load.floor or 1 / n
            tenant["weight"], tenant["priority"] = load.weight, load.priority
            tenant["random"] = (seed * 997 + number) & 0xFFFF_FFFF_FFFF_FFFF
        self.log = np.zeros(log, LOG)
        self._plan: Plan | None = None
        self._slowdown = tuple(slowdown)
        self._run = np.zeros(1, RUN)
        run = self._run[0]
        run["policy_address"], run["use_claims"], run["budget"] = policy.address, policy.use_claims, budget
        run["alone"], run["look_at_ns"], run["retry_at"] = NOBODY, FOREVER, FOREVER
        run["plans"] = policy.plan is not None
        self._lay_out(run, np.array(slowdown, np.float64))

    def _lay_out(self, run: Any, slowdown: npt.NDArray[np.float64]) -> None:  # noqa: ANN401 - a RUN record
        """Make the arrays that the record leads to, and keep them."""
        n = len(self.loads)
        self._present = np.zeros(n, np.int64)
        jobs, decisions, scene = np.zeros(n, JOB), np.zeros(n, DECISION), np.zeros(1, SCENE)
        scene[0]["jobs_address"], scene[0]["decisions_address"] = jobs.ctypes.data, decisions.ctypes.data
        arrivals = np.argsort([load.arrive_ns for load in self.loads], kind="stable").astype(np.int64)
        arrays = {
            "tenants": self.tenants,
            "arrivals": arrivals,
            "present": self._present,
            "scene": scene,
            "queue": np.zeros(n, EVENT),
            "scratch": np.zeros((SCRATCH_ROWS, n), np.int64),
            "slowdown": slowdown,
            "log": self.log,
        }
        for name, array in arrays.items():
            run[f"{name}_address"] = array.ctypes.data
        run["n_arrivals"], run["n_slowdown"], run["log_room"] = n, len(slowdown), len(self.log)
        self._kept = (jobs, decisions, arrays)

    def run(self, until_ns: int, warm_up_ns: int = 0) -> Outcome:
        """Run to the given time; work and waits before the warm-up's end do not count."""
        run = self._run[0]
        run["warm_up_ns"] = warm_up_ns
        while self._advance(until_ns) == Stop.CHANGED:
            self._make_plan()
        window_ns = until_ns - warm_up_ns
        return Outcome(
            normalised=tuple((self.tenants["counted_ns"] / window_ns).tolist()),
            iterations=tuple(self.tenants["iteration"].tolist()),
            waited_ns=tuple(self.tenants["waited_ns"].tolist()),
            reasons=tuple(self._reason(number) for number in range(len(self.loads))),
            peak_granted=int(run["peak_granted"]),
            stalls=int(run["stalls"]),
            decisions=int(run["decisions"]),
            longest_wait_ns=max([int(run["longest_wait_ns"]), *self._waits_ns(until_ns)]),
        )

    def _advance(self, until_ns: int) -> int:
        return int(advance(self._run[0], until_ns))

    def _make_plan(self) -> None:
        """Let the policy think about the jobs that are there."""
        run = self._run[0]
        there = self._present[: int(run["n_present"])].tolist()
        jobs = tuple(self._view(number) for number in there)
        view = PoolView(int(run["now_ns"]), int(run["budget"]), jobs, slowdown=self._slowdown)
        self._plan = self.policy.plan(view) if self.policy.plan else None
        run["plan_address"] = 0 if self._plan is None else self._plan.address

    def _view(self, number: int) -> JobView:
        """Return what a plan has to know of a job."""
        tenant, load = self.tenants[number], self.loads[number]
        return JobView(
            job=number,
            name=load.name,
            phase=Phase.RUNNING,
            held=int(tenant["held"]),
            persistent=int(tenant["persistent"]),
            progress=0,
            profile=(load.believed or load.profile) if tenant["profiled"] else None,
            iteration=int(tenant["iteration"]),
            started_ns=int(tenant["started_ns"]),
            waiting_since_ns=0,
            need=0,
            floor=float(tenant["floor"]),
            weight=load.weight,
            priority=load.priority,
        )

    def _waits_ns(self, now_ns: int) -> list[int]:
        """Return how long those wait that stand at a boundary."""
        there = self.tenants[(self.tenants["present"] == 1) & (self.tenants["phase"] == Code.BOUNDARY)]
        return [now_ns - since_ns for since_ns in there["waiting_since_ns"].tolist() if since_ns]

    def _reason(self, number: int) -> str:
        counts = self.tenants[number]["reasons"]
        if not counts.any():
            return ""
        reason = Reason(int(counts.argmax()))
        against = int(self.tenants[number]["against"][reason])
        return sentence(reason, "others" if against == NOBODY else self.loads[against].name)
