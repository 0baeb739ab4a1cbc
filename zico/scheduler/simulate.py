"""Jobs, memory and a clock, driven by the very policies and claims that the broker runs: events, no time steps.

Theory of operation
    A job goes through the steps of its profile and holds so many regions in each; between
    iterations it keeps its persistent ones. At a step that holds more it asks, and waits while what
    it asks for is not free or would leave the state unsafe. The policy is asked when somebody
    arrives or comes to a boundary, and when its own answer says so. Its first iteration has no
    profile and grows alone::

        arrive -> step .. step -> boundary -> decision -> step .. step -> boundary ...
                  waits for regions           waits for the policy

    Where nobody could go on, one blocked job gets its regions from outside the budget: a stall,
    which without overflow would be a deadlock. The laboratory serves policies that page, pause or
    evict (``state.Capabilities``).

Guarantees
    * Deterministic: the same loads, budgets, policy, device and seed give the same outcome.
    * Granted regions never exceed the budget, unless the policy pages; when it is lowered nothing
      more is granted until what is held is within it.

Known limitations
    * Page faults and copies take work time: while jobs slow each other, these are slowed with them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base import laboratory
from zico.base.errors import ProblemError
from zico.base.units import MIB
from zico.pool.layout import JobState
from zico.scheduler.device_model import DeviceModel, taken_ahead
from zico.scheduler.engine import Stop, advance
from zico.scheduler.jobs import BUDGET, EVENT, FOREVER, LOG, PHASE, RUN, SAMPLE, SAMPLES, SCRATCH_ROWS, SIM_JOB
from zico.scheduler.layout import DECISION, JOB, MEMO_BYTES, MEMORY_BYTES, NO_TIME, NOBODY, SNAPSHOT, JobFields, Reason
from zico.scheduler.packed import sentence
from zico.scheduler.shares import floors
from zico.scheduler.state import JobView, PoolView

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zico.scheduler.state import CompiledPolicy, Plan, Profile


REGION_BYTES = 64 * MIB
"""The published default, for jobs whose regions nobody gave a size."""
_ANY = DeviceModel("any")
_MOST_SAMPLED_JOBS = 16_384


@dataclasses.dataclass(frozen=True)
class LoadPhase:
    """What a job does from one of its iterations on, such as one of another batch size."""

    after: int
    """So many iterations are done before."""
    profile: Profile
    persistent: int


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
    """The least normalised throughput that it is owed; 0: half of its share by weight."""
    weight: float = 1.0
    """What its throughput counts beside the others'."""
    priority: int = 0
    """Its turn comes before that of any lower one."""
    phases: tuple[LoadPhase, ...] = ()
    """What it does later; the scheduler is told after the first such iteration, unless it is told wrong."""
    later: tuple[tuple[int, Profile], ...] = ()
    """What it is told instead of what it believed once so many iterations have ended."""


def peak_of(load: Load) -> int:
    """Return the most regions that a job holds in any of its phases."""
    return max([load.profile.peak, *(phase.profile.peak for phase in load.phases)])


def load_of(job: JobView, profile: Profile) -> Load:
    """Return what a job that a broker sees will go on to do."""
    asked = {name: getattr(job, name) for name in ("name", "jitter", "floor", "weight", "priority")}
    return Load(profile=profile, persistent=job.kept, **asked)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run came to; per job in the order of the loads."""

    normalised: tuple[float, ...]
    """Work done over what it would have done alone, while it was there and after the warm-up."""
    iterations: tuple[int, ...]
    waited_ns: tuple[int, ...]
    """At boundaries and in allocations, after the warm-up."""
    reasons: tuple[str, ...]
    """What the policy said most often when it made the job wait after the warm-up; empty if it never did."""
    peak_granted: int
    stalls: int
    """How often nobody could have gone on within the budget."""
    decisions: int
    longest_wait_ns: int
    iterations_per_s: tuple[float, ...] = ()
    """Ended while it was there and after the warm-up."""
    present_ns: tuple[int, ...] = ()
    """How long it was there after the warm-up."""
    left_ns: tuple[int, ...] = ()
    """When it left; 0: it is still there."""
    faulted: float = 0.0
    """Regions brought in by page faults."""
    copied: int = 0
    """Regions copied out."""

    @property
    def mean(self) -> float:
        """Return the mean over the jobs."""
        return sum(self.normalised) / len(self.normalised)


class Simulation:
    """Run jobs under a policy and a budget until a given time."""

    def __init__(  # noqa: PLR0913 - each has a name
        self,
        policy: CompiledPolicy,
        loads: Iterable[Load],
        budget: int,
        seed: int = 0,
        *,
        slowdown: Sequence[float] | None = None,
        log: int = 0,
        device: DeviceModel = _ANY,
        region_bytes: int = REGION_BYTES,
        budgets: Iterable[tuple[int, int]] = (),
        samples: bool = False,
    ) -> None:
        """Take the jobs in the order of their numbers; nothing runs yet.

        Args:
            policy: Who may start.
            loads: The jobs.
            budget: Regions.
            seed: Of the jitter.
            slowdown: By what factor each of 0, 1, 2, ... working jobs is slower than alone; the
                last for any more. The device's if not given.
            log: How many changes of what jobs hold to keep.
            device: How fast jobs together, copies and page faults are.
            region_bytes: What copies and page faults of a region move.
            budgets: Later budgets, each with the time in nanoseconds from which on it holds.
            samples: Keep some of the snapshots that the policy is asked about, for ``snapshots``.

        Raises:
            ProblemError: There are no jobs.
        """
        self.policy = policy
        self.loads = tuple(loads)
        if not self.loads:
            raise ProblemError("no jobs: give at least one")
        ahead_ns = device.run_ahead_ns
        self._slowdown = tuple(device.slowdown if slowdown is None else slowdown)
        self.sim_jobs = np.zeros(len(self.loads), SIM_JOB)
        self._kept: list[Any] = []
        self._believed = [taken_ahead(load.believed or load.profile, ahead_ns) for load in self.loads]
        for number, (load, owed) in enumerate(zip(self.loads, floors(self.loads), strict=True)):
            self._fill(number, load, owed, ahead_ns, seed)
        self.log = np.zeros(log, LOG)
        self._plan: Plan | None = None
        self._run = np.zeros(1, RUN)
        run = self._run[0]
        run["policy_address"], run["use_claims"], run["budget"] = policy.address, policy.use_claims, budget
        run["alone"], run["look_at_ns"], run["retry_at"] = NOBODY, FOREVER, FOREVER
        run["plans"] = policy.plan is not None
        for name in ("pauses", "watches", "pages", "asks", "offline"):
            run[name] = getattr(policy.capabilities, name)
        if policy.capabilities.pauses or policy.capabilities.pages:
            serve = laboratory.part("simulator.pauses_and_pages", "serve", f"the policy {policy.name}")
            run["extra_address"], run["address"] = serve.address, self._run.ctypes.data
        run["fault_ns"], run["copy_ns"] = device.region_fault_ns(region_bytes), device.region_copy_ns(region_bytes)
        self._lay_out(run, sorted(budgets), samples=samples)

    def _fill(self, number: int, load: Load, owed: float, ahead_ns: int, seed: int) -> None:
        """Fill the record of a job."""
        sim_job = self.sim_jobs[number]
        true, believed = taken_ahead(load.profile, ahead_ns), self._believed[number]
        sim_job["true_address"], sim_job["believed_address"] = true.record.ctypes.data, believed.record.ctypes.data
        sim_job["job"], sim_job["floor"], sim_job["waiting_since_ns"] = number, owed, NO_TIME
        sim_job["keeps"], sim_job["arrive_ns"], sim_job["left"] = load.persistent, load.arrive_ns, load.iterations
        sim_job["jitter"], sim_job["weight"], sim_job["priority"] = load.jitter, load.weight, load.priority
        sim_job["random"] = (seed * 997 + number) & 0xFFFF_FFFF_FFFF_FFFF
        phases, rows = [], []
        for phase in load.phases:
            phases.append(taken_ahead(phase.profile, ahead_ns).record)
            rows.append((phase.after, phases[-1].ctypes.data, phase.persistent))
            if load.believed is None:
                rows.append((phase.after + 1, phases[-1].ctypes.data, -1))
        for after, profile in load.later:
            phases.append(taken_ahead(profile, ahead_ns).record)
            rows.append((after, phases[-1].ctypes.data, -1))
        records = np.array(sorted(rows, key=lambda row: (row[0], row[2])), PHASE)
        sim_job["phases_address"], sim_job["n_phases"] = records.ctypes.data, len(records)
        self._kept.append((true, believed, phases, records))

    def _lay_out(self, run: Any, budgets: list[tuple[int, int]], *, samples: bool) -> None:  # noqa: ANN401 - a record
        """Make the arrays that the record leads to, and keep them."""
        n = len(self.loads)
        self._present = np.zeros(n, np.int64)
        jobs, decisions, snapshot = np.zeros(n, JOB), np.zeros(n, DECISION), np.zeros(1, SNAPSHOT)
        memory, memos = np.zeros(MEMORY_BYTES, np.uint8), np.zeros(n * MEMO_BYTES, np.uint8)
        addresses = {"jobs": jobs, "decisions": decisions, "memory": memory, "memos": memos}
        for name, array in addresses.items():
            snapshot[0][f"{name}_address"] = array.ctypes.data
        snapshot[0]["options_address"] = self.policy.options_address
        self._samples = np.zeros(SAMPLES if samples else 0, SAMPLE)
        arrays = {
            "sim_jobs": self.sim_jobs,
            "arrivals": np.argsort([load.arrive_ns for load in self.loads], kind="stable").astype(np.int64),
            "present": self._present,
            "snapshot": snapshot,
            "queue": np.zeros(n, EVENT),
            "scratch": np.zeros((SCRATCH_ROWS, n), np.int64),
            "slowdown": np.array(self._slowdown, np.float64),
            "log": self.log,
            "budgets": np.array(budgets, BUDGET),
            "samples": self._samples,
            "sample_jobs": np.zeros(min(n * SAMPLES, _MOST_SAMPLED_JOBS) if samples else 0, JOB),
            "memory": memory,
            "memos": memos,
        }
        for name, made in arrays.items():
            run[f"{name}_address"] = made.ctypes.data
        for name in ("arrivals", "slowdown", "budgets", "sample_jobs"):
            run[f"n_{name}"] = len(arrays[name])
        run["log_room"], run["sample_at"] = len(self.log), 0 if samples else -1
        run["next_budget_ns"] = budgets[0][0] if budgets else FOREVER
        self._kept += [addresses, arrays]

    def run(self, until_ns: int, warm_up_ns: int = 0) -> Outcome:
        """Run to the given time; work and waits before the warm-up's end do not count."""
        run = self._run[0]
        run["warm_up_ns"] = warm_up_ns
        while self._advance(until_ns) == Stop.CHANGED:
            self._make_plan()
        return self._outcome(until_ns, warm_up_ns)

    def _outcome(self, until_ns: int, warm_up_ns: int) -> Outcome:
        run, sim_jobs = self._run[0], self.sim_jobs
        began_ns = np.maximum(sim_jobs["arrive_ns"], warm_up_ns)
        ended_ns = np.where(sim_jobs["left_ns"] > 0, sim_jobs["left_ns"], until_ns)
        present_ns = np.maximum(0, ended_ns - began_ns)
        rate = 1 / np.maximum(1, present_ns)
        waits = (sim_jobs["present"] == 1) & (sim_jobs["waiting_since_ns"] != NO_TIME)
        waiting_ns = np.where(waits, np.maximum(0, until_ns - np.maximum(sim_jobs["waiting_since_ns"], warm_up_ns)), 0)
        return Outcome(
            normalised=tuple((sim_jobs["counted_ns"] * rate).tolist()),
            iterations=tuple(sim_jobs["iteration"].tolist()),
            waited_ns=tuple((sim_jobs["counted_waited_ns"] + waiting_ns).tolist()),
            reasons=tuple(self._reason(number) for number in range(len(self.loads))),
            peak_granted=int(run["peak_granted"]),
            stalls=int(run["stalls"]),
            decisions=int(run["decisions"]),
            longest_wait_ns=max([int(run["longest_wait_ns"]), *self._waits_ns(until_ns)]),
            iterations_per_s=tuple((sim_jobs["counted"] * rate * 1e9).tolist()),
            present_ns=tuple(present_ns.tolist()),
            left_ns=tuple(sim_jobs["left_ns"].tolist()),
            faulted=float(run["faulted"]),
            copied=int(run["copied"]),
        )

    def snapshots(self) -> tuple[Any, int, int]:
        """Return the SAMPLE records that are kept, the address of the JOB records behind them, and the plan's."""
        run = self._run[0]
        plan_address = 0 if self._plan is None else self._plan.address
        return self._samples[: int(run["n_samples"])], int(run["sample_jobs_address"]), plan_address

    def _advance(self, until_ns: int) -> int:
        return int(advance(self._run[0], until_ns))

    def _make_plan(self) -> None:
        """Let the policy think about the jobs that are there."""
        run = self._run[0]
        there = self._present[: int(run["n_present"])].tolist()
        jobs = tuple(self._view(number) for number in there)
        view = PoolView(int(run["now_ns"]), int(run["budget"]), jobs, plan=self._plan, slowdown=self._slowdown)
        self._plan = self.policy.plan(view) if self.policy.plan else None
        run["plan_address"] = 0 if self._plan is None else self._plan.address

    def _view(self, number: int) -> JobView:
        """Return what a plan has to know of a job."""
        sim_job, load = self.sim_jobs[number], self.loads[number]
        fields = {field.name: sim_job[field.name].item() for field in dataclasses.fields(JobFields)}
        profile = self._profile_of(number) if sim_job["profiled"] else None
        return JobView(
            **fields | {"floor": load.floor, "waiting_since_ns": 0}, name=load.name, profile=profile, jitter=load.jitter
        )

    def _profile_of(self, number: int) -> Profile:
        """Return what the scheduler believes a job's profile to be now."""
        load, done = self.loads[number], int(self.sim_jobs[number]["iteration"])
        told = [profile for after, profile in load.later if after <= done]
        if told:
            return told[-1]
        past = [phase for phase in load.phases if phase.after < done]
        return self._believed[number] if not past or load.believed is not None else past[-1].profile

    def _waits_ns(self, now_ns: int) -> list[int]:
        """Return how long those wait that stand at a boundary."""
        there = self.sim_jobs[(self.sim_jobs["present"] == 1) & (self.sim_jobs["phase"] == JobState.BOUNDARY)]
        return [now_ns - since_ns for since_ns in there["waiting_since_ns"].tolist() if since_ns != NO_TIME]

    def _reason(self, number: int) -> str:
        counts = self.sim_jobs[number]["reasons"]
        if not counts.any():
            return ""
        reason = Reason(int(counts.argmax()))
        against = int(self.sim_jobs[number]["against"][reason])
        return sentence(reason, "others" if against == NOBODY else self.loads[against].name)
