"""Pool, policies and simulator answer alike: one claim, one banker's rule, whatever state the jobs are in."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from cpu.support.members import make_pool
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zico.broker.views import ProfileCache, pool_view
from zico.pool import boundaries, groups, regions
from zico.pool.layout import JOB, NO_MORE, JobState, Paused, SaveMode
from zico.scheduler import grants, turns
from zico.scheduler.jobs import see_debt
from zico.scheduler.packed import Snapshot
from zico.scheduler.policies import policy_named
from zico.scheduler.simulate import Load, Simulation
from zico.scheduler.state import Profile
from zico.trace import profile as curves

if TYPE_CHECKING:
    from zico.pool.table import PoolTable

S = 1_000_000_000
MS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A job in some state, by the names of its record."""

    state: JobState
    levels: tuple[int, ...]
    held: int
    progress: int
    persistent: int
    evicted: int = 0
    claim_extra: int = 0
    claim_floor: int = 0
    above: int = 0
    """By which its peak exceeds its profile's."""
    limit: int = 0
    swaps: bool = False
    is_empty: bool = False
    """It has nothing more to evict."""
    outgrown: bool = False
    profiled: bool = True
    waits: int = 0
    patient: int = 0
    inside_ns: int = 0
    waited_ns: int = 0
    stopped: bool = False
    paused: bool = False
    group: int = 0
    round: int = 0
    uneven: int = 0


@st.composite
def drawn_jobs(draw: st.DrawFn) -> Drawn:
    """Draw a job; most are inside iterations or at boundaries, with profiles that hold."""
    usual = st.sampled_from
    return Drawn(
        state=draw(usual([JobState.RUNNING] * 3 + [JobState.BOUNDARY] * 3 + [JobState.LEAVING])),
        levels=draw(st.lists(st.integers(0, 7), min_size=1, max_size=6).map(tuple)),
        held=draw(st.integers(0, 6)),
        progress=draw(st.integers(0, 18)),
        persistent=draw(st.integers(0, 5)),
        evicted=draw(usual([0, 0, 1, 2])),
        claim_extra=draw(usual([0, 0, 1, 2])),
        claim_floor=draw(usual([0, 0, 4, 7])),
        above=draw(usual([0, 0, 1])),
        limit=draw(usual([0, 0, 0, 3, 5])),
        swaps=draw(st.booleans()),
        is_empty=draw(usual([False, False, True])),
        outgrown=draw(usual([False] * 5 + [True])),
        profiled=draw(usual([True] * 5 + [False])),
        waits=draw(usual([0, 0, 1])),
        patient=draw(usual([0, 0, 1])),
        inside_ns=draw(usual([0, S, 100 * S])),
        waited_ns=draw(usual([0, 0, 99 * S])),
        stopped=draw(usual([False] * 4 + [True])),
        paused=draw(usual([False] * 5 + [True])),
        group=draw(usual([0, 0, 0, 1, 2])),
        round=draw(usual([1, 1, 2])),
        uneven=draw(usual([0, 0, 3])),
    )


def fill(record: Any, job: Drawn, now_ns: int) -> None:  # noqa: ANN401 - a JOB record
    """Write a drawn job into its record."""
    record["state"], record["name"] = job.state, b"job"
    names = ("held", "progress", "persistent", "evicted", "claim_extra", "claim_floor", "limit", "outgrown", "profiled")
    for name in (*names, "patient", "group", "round", "uneven"):
        record[name] = getattr(job, name)
    curve = record["profile"]
    curve["n_bins"], curve["n_events"], curve["duration_ns"] = len(job.levels), len(job.levels), S // 10
    curve["held"][: len(job.levels)] = job.levels
    curve["t_ns"][: len(job.levels)] = np.arange(len(job.levels)) * MS
    record["claim_peak"] = curves.suffix_maximum(curve, record["claims"]) + job.above
    record["save"], record["evict"] = SaveMode.SWAP if job.swaps else SaveMode.NONE, NO_MORE if job.is_empty else 0
    record["started_ns"] = record["moved_ns"] = now_ns - job.inside_ns
    record["iteration_waited_ns"] = min(job.waited_ns, job.inside_ns)
    record["stopped_until_ns"] = now_ns + 3600 * S if job.stopped else 0
    record["paused"] = Paused.STAYS if job.paused and job.state == JobState.BOUNDARY else Paused.NO
    if job.state == JobState.RUNNING and job.waits:
        record["waiting_threads"], record["need"], record["need_since_ns"] = 1, 1, now_ns


def filled(pool: PoolTable, drawn: list[Drawn], budget: int, *, crowded: bool, now_ns: int) -> None:
    """Make a pool's table that of these jobs."""
    for place, job in enumerate(drawn):
        fresh = np.zeros(1, JOB)[0]
        fill(fresh, job, now_ns)
        pool.jobs[place] = fresh
    pool.header["places"], pool.header["budget_regions"] = len(drawn), budget
    pool.header["granted"] = sum(job.held for job in drawn)
    pool.header["crowded"], pool.header["grouped"] = crowded, any(job.group for job in drawn)


GOING = Drawn(JobState.RUNNING, (0,), held=0, progress=0, persistent=0, group=1)
NEXT = Drawn(JobState.BOUNDARY, (0,), held=0, progress=0, persistent=1)
UNEVEN = [GOING, NEXT, dataclasses.replace(NEXT, group=1, uneven=3)]
"""A rank that waits for no other stands at its boundary; what it claims is nothing to others until it begins."""


@given(drawn=st.lists(drawn_jobs(), min_size=1, max_size=5), spare=st.integers(-2, 10), crowded=st.booleans())
@example(drawn=UNEVEN, spare=0, crowded=False)
@settings(max_examples=300, deadline=None)
def test_a_policy_starts_exactly_whom_the_pool_lets_in(drawn: list[Drawn], spare: int, crowded: bool) -> None:  # noqa: FBT001
    """Invariant 3: for every job and group at its boundary the policy's banker says what the pool's says."""
    with make_pool(64, unasked=False) as pool:
        now_ns = time.monotonic_ns()
        filled(pool, drawn, max(1, sum(job.held for job in drawn) + spare), crowded=crowded, now_ns=now_ns)
        view = pool_view(*pool.snapshot(), now_ns, ProfileCache())
        snapshot = Snapshot(view).snapshot[0]
        for index, job in enumerate(view.jobs):
            if job.phase == JobState.BOUNDARY and job.profile is not None:
                asks = next(rank for rank in job.ranks or (job.job,) if drawn[rank].state == JobState.BOUNDARY)
                lets_in = regions.stays_safe(pool.member[0], asks, 0, groups.peak_of(pool.jobs[asks]))
                assert turns.may_start(snapshot, turns.banker_of(snapshot), index) == lets_in
            elif job.phase != JobState.BOUNDARY and not drawn[job.job].group:
                assert job.claim == regions.claim_of(pool.jobs[job.job])


@given(drawn=st.lists(drawn_jobs(), min_size=1, max_size=5), budget=st.integers(1, 24))
@settings(max_examples=200, deadline=None)
def test_all_fit_at_once_for_the_pool_where_they_do_for_a_policy(drawn: list[Drawn], budget: int) -> None:
    """A job that comes to its boundary begins unasked where, and only where, a policy would start all that wait."""
    drawn = [dataclasses.replace(job, profiled=True, outgrown=False, paused=False) for job in drawn]
    with make_pool(64, unasked=True) as pool:
        now_ns = time.monotonic_ns()
        filled(pool, drawn, budget, crowded=False, now_ns=now_ns)
        pool.member[0]["job"] = 0
        view = pool_view(*pool.snapshot(), now_ns, ProfileCache())
        together = turns.peaks_together(Snapshot(view).snapshot[0])
        assert boundaries._may_start_unasked(pool.member[0], now_ns) == (together <= budget)


@given(drawn=drawn_jobs(), spare=st.integers(-3, 4))
@settings(max_examples=100, deadline=None)
def test_one_job_that_may_start_does(drawn: Drawn, spare: int) -> None:
    """A policy whose start the pool refuses would ask again every 20 ms: beside a job inside both say the same."""
    other = Drawn(JobState.RUNNING, (3, 5, 2), held=4, progress=2, persistent=1)
    asks = dataclasses.replace(drawn, state=JobState.BOUNDARY, profiled=True, outgrown=False, paused=False, group=0)
    with make_pool(64, unasked=False) as pool:
        now_ns = time.monotonic_ns()
        filled(pool, [other, asks], max(1, 4 + asks.held + spare), crowded=False, now_ns=now_ns)
        view = pool_view(*pool.snapshot(), now_ns, ProfileCache())
        said = policy_named("claims").decide(view)[1]
        if "does not fit" not in getattr(said, "reason", ""):
            assert (type(said).__name__ == "Start") == pool.admit(1)


# -- the simulator ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Simulated:
    """A job of a simulation, and of a pool in the same state."""

    levels: tuple[int, ...]
    """Believed."""
    step: int
    held: int
    persistent: int
    claim_extra: int
    inside: bool
    is_late: bool
    """It has been inside for far longer than an iteration takes."""


SIMULATED = st.builds(
    Simulated,
    levels=st.lists(st.integers(0, 7), min_size=1, max_size=6).map(tuple),
    step=st.integers(0, 24),
    held=st.integers(0, 6),
    persistent=st.integers(0, 5),
    claim_extra=st.sampled_from([0, 0, 1, 2]),
    inside=st.sampled_from([True, True, False]),
    is_late=st.booleans(),
)
STEPS = 25
NOW_NS = 200 * S


def believed(job: Simulated) -> Profile:
    """Return what the scheduler takes the job to do."""
    n = len(job.levels)
    return Profile(job.levels, tuple(i * MS for i in range(n)), S // 10, shift=0, n_events=n)


def true_of(job: Simulated, need: int) -> Profile:
    """Return a profile of many steps, of which the present one holds so much more than the job has."""
    held = [(i % 2) + 40 for i in range(STEPS)]
    held[job.step] = job.held + need
    return Profile(tuple(held), tuple(i * MS for i in range(STEPS)), STEPS * MS, shift=0, n_events=STEPS)


def simulated(drawn: list[Simulated], needs: list[int], budget: int) -> tuple[Simulation, Any]:
    """Return a simulation in which the jobs are where they are drawn, and its RUN record."""
    loads = [
        Load(f"job{i}", true_of(job, need), job.persistent, believed(job))
        for i, (job, need) in enumerate(zip(drawn, needs, strict=True))
    ]
    simulation = Simulation(policy_named("claims"), loads, budget)
    run = simulation._run[0]
    simulation._present[:] = np.arange(len(drawn))
    run["n_present"], run["now_ns"], run["granted"] = len(drawn), NOW_NS, sum(job.held for job in drawn)
    for record, job in zip(simulation.sim_jobs, drawn, strict=True):
        record["phase"] = JobState.RUNNING if job.inside else JobState.BOUNDARY
        record["profiled"] = record["present"] = 1
        record["step"], record["held"], record["persistent"] = job.step, job.held, job.persistent
        record["claim_extra"] = job.claim_extra
        record["claim"] = 99  # as seen long ago: claims fall
        record["overruns"] = len(job.levels) + 8 < STEPS
        record["started_ns"] = NOW_NS - (100 * S if job.is_late else 0)
    return simulation, run


@given(drawn=st.lists(SIMULATED, min_size=1, max_size=4), need=st.integers(1, 4), spare=st.integers(0, 8))
@settings(max_examples=300, deadline=None)
def test_the_simulator_grants_what_the_pool_grants(drawn: list[Simulated], need: int, spare: int) -> None:
    """Invariant 3: to a job inside that needs more, whatever it was believed to need, both give or refuse the same."""
    drawn[0] = dataclasses.replace(drawn[0], inside=True)
    needs = [need] + [0] * (len(drawn) - 1)
    budget = max(1, sum(job.held for job in drawn) + spare)
    simulation, run = simulated(drawn, needs, budget)
    takes = int(grants.may_take(run, 0))
    most = min(need, budget - int(run["granted"]))
    with make_pool(64, unasked=False) as pool:
        now_ns = time.monotonic_ns()
        table = [
            Drawn(
                JobState.RUNNING if job.inside else JobState.BOUNDARY,
                job.levels,
                job.held,
                job.step,
                job.persistent,
                claim_extra=job.claim_extra,
                inside_ns=100 * S if job.is_late else 0,
            )
            for job in drawn
        ]
        filled(pool, table, budget, crowded=False, now_ns=now_ns)
        pool.member[0]["job"] = 0
        granted = most > 0 and bool(regions.may_grant(pool.member[0], pool.jobs[0], most))
        record, sim_job = pool.jobs[0], simulation.sim_jobs[0]
        assert (takes == most > 0) == granted
        assert (sim_job["outgrown"], sim_job["claim_extra"]) == (record["outgrown"], record["claim_extra"])


@given(job=SIMULATED)
@settings(max_examples=200, deadline=None)
def test_a_simulated_job_claims_what_a_job_of_the_pool_claims(job: Simulated) -> None:
    """Whatever it holds, and however far it has come."""
    simulation, run = simulated([dataclasses.replace(job, inside=True)], [0], 64)
    sim_job = simulation.sim_jobs[0]
    see_debt(run, sim_job)
    record = np.zeros(1, JOB)[0]
    inside = Drawn(JobState.RUNNING, job.levels, job.held, job.step, job.persistent, claim_extra=job.claim_extra)
    fill(record, inside, NOW_NS)
    assert sim_job["claim"] == regions.claim_of(record)
