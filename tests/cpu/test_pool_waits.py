"""Waits in a pool end when they should, whoever ends them; threads of several members."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.members import HOUR_NS, acquire, check_counters, give_profile, grab, job_of, joined, make_pool, release
from cpu.support.pool_model import INSIDE

from zico.base.compiled import compiled, entry
from zico.pool import boundaries, deaths, results, rules, waits
from zico.pool.layout import CURVE_BINS, MEMBER, NOBODY, JobState
from zico.pool.results import ADMITTED, AGAIN, ASKED, COMING, GRANTED, MUST_WAIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.pool.layout import Member
    from zico.pool.table import PoolTable

Array = Any
DEADLINE_S = 20.0


@pytest.fixture
def pool() -> Iterator[PoolTable]:
    """Make a pool of ten regions in which nobody starts unasked."""
    with make_pool(10, unasked=False) as pool:
        yield pool


# -- the loop of a wait ----------------------------------------------------------------------------

_STEPS = 8
_ANSWER, _IS_VAIN, _IS_SIGNAL, _SEEN, _SLEPT = range(0, 5 * _STEPS, _STEPS)
_WAS_VAIN, _HAS_ASKED, _INTERRUPTED = 1, 2, 4


@compiled
def _begin(_pool: Member, script: Array) -> Array:
    return script


@compiled
def _look(_pool: Member, script: Array, look: waits.Look) -> tuple[int, bool]:
    n = look.number
    seen = (_WAS_VAIN if look.vain_since_ns > 0 else 0) + (_HAS_ASKED if look.asked_ns > 0 else 0)
    script[_SEEN + n] = seen + (_INTERRUPTED if look.interrupted else 0)
    script[_SLEPT] = n
    return script[_ANSWER + n], script[_IS_VAIN + n] == 1


@compiled
def _sleep(_pool: Member, script: Array) -> bool:
    n = script[_SLEPT]
    script[_SLEPT + 1 + n] = 1
    return bool(script[_IS_SIGNAL + n] == 1)


@entry(MEMBER, ["i8"])
def _wait(pool: Member, script: Array) -> int:
    return waits.wait(pool, pool, script, _begin, _look, _sleep)


def test_a_wait_looks_again_sleeps_or_ends_as_its_looks_say(pool: PoolTable) -> None:
    """Only after COMING and ASKED a thread sleeps; each look knows what those before it have found."""
    looks = [(AGAIN, 1, 0), (COMING, 1, 1), (ASKED, 0, 0), (AGAIN, 0, 1), (ADMITTED, 1, 0)]
    script = np.zeros(6 * _STEPS, "i8")
    for n, (answer, is_vain, is_signal) in enumerate(looks):
        script[[_ANSWER + n, _IS_VAIN + n, _IS_SIGNAL + n]] = answer, is_vain, is_signal
    with joined(pool, 1) as (member,):
        assert _wait(member.member[0], script) == ADMITTED
    assert script[_SLEPT + 1 :][: len(looks)].tolist() == [0, 1, 1, 0, 0]
    seen = [0, _WAS_VAIN, _WAS_VAIN + _INTERRUPTED, _HAS_ASKED, _HAS_ASKED]
    assert script[_SEEN:][: len(looks)].tolist() == seen


def test_a_result_has_one_meaning() -> None:
    """No two results are one number, and none can be taken for an offset or an index."""
    numbers = [value for name, value in vars(results).items() if name.isupper()]
    assert len(set(numbers)) == len(numbers) > 0 > max(numbers)


# -- waits -----------------------------------------------------------------------------------------


def test_a_release_wakes_whoever_waits_for_memory(pool: PoolTable) -> None:
    """Invariant 7: a thread that sleeps until the pool changes is woken by a release, long before its slice ends."""
    with joined(pool, 2) as (first, second):
        second.member[0]["slice"] = (1000, 0)
        (r,) = grab(first, 1)
        waits.start_waiting(second.member[0], 1)
        sequence = int(pool.header["sequence"])
        thread = threading.Thread(target=waits.sleep_until_change, args=(second.member[0], sequence), daemon=True)
        thread.start()
        release(first, [r])
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_an_admission_wakes_the_job_without_its_python(pool: PoolTable) -> None:
    """Invariant 7: a job that sleeps at its boundary goes on when it is admitted."""
    with joined(pool, 1) as (member,):
        member.member[0]["slice"] = (1000, 0)
        assert not boundaries.finish_iteration(member.member[0], 0)
        thread = threading.Thread(target=boundaries.await_admission, args=(member.member[0],), daemon=True)
        thread.start()
        assert pool.admit(job_of(member))
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert pool.jobs[job_of(member)]["boundary_since_ns"] == 0


def test_an_iteration_begins_when_it_is_admitted(pool: PoolTable) -> None:
    """A job that stood at its boundary for long and has not woken yet does not count as standing still inside."""
    with joined(pool, 1) as (member,):
        assert not boundaries.finish_iteration(member.member[0], 0)
        record = pool.jobs[job_of(member)]
        record["started_ns"], record["iteration_waited_ns"] = 1, 2
        assert pool.admit(job_of(member))
        assert record["started_ns"] > time.monotonic_ns() - DEADLINE_S * 1_000_000_000
        assert record["iteration_waited_ns"] == 0


def test_without_a_broker_jobs_admit_themselves_and_bury_the_dead(pool: PoolTable) -> None:
    """Invariant 7: when the broker's process is gone a job starts as soon as that is safe, and reaps dead jobs."""
    gone = _dead_pid()
    with joined(pool, 2) as (member, dead):
        grab(dead, 7)
        pool.jobs[job_of(dead)]["pid"] = gone
        pool.resign()
        assert not boundaries.finish_iteration(member.member[0], 0)
        boundaries.await_admission(member.member[0])
        assert pool.jobs[job_of(member)]["state"] == JobState.RUNNING
        assert pool.jobs[job_of(dead)]["state"] == JobState.EMPTY
        check_counters(pool)
        grab(member, 10)


def test_nobody_is_judged_by_a_number_of_another_pid_namespace(pool: PoolTable) -> None:
    """A dead number tells nothing to who sees other numbers, and a job without a number here is never dead."""
    with joined(pool, 3) as (member, dead, foreign):
        pool.jobs[job_of(dead)]["pid"] = _dead_pid()
        pool.jobs[job_of(foreign)]["pid"] = 0
        member.member[0]["pid_namespace"] += 1
        deaths.reap_dead(member.member[0])
        assert [int(state) for state in pool.jobs["state"][:3]] == [JobState.RUNNING] * 3
        member.member[0]["pid_namespace"] -= 1
        deaths.reap_dead(member.member[0])
        assert [int(state) for state in pool.jobs["state"][:3]] == [JobState.RUNNING, JobState.EMPTY, JobState.RUNNING]


def test_a_number_of_a_later_process_is_no_life(pool: PoolTable) -> None:
    """Invariant 5: what a dead job held comes back although a living process has got its number."""
    with joined(pool, 2) as (member, dead):
        grab(dead, 7)
        pool.jobs[job_of(dead)]["started"] -= 1
        deaths.reap_dead(member.member[0])
        assert pool.jobs[job_of(dead)]["state"] == JobState.EMPTY
        grab(member, 10)


def _dead_pid() -> int:
    """Return the number of a process that has been and is no more."""
    import subprocess
    import sys

    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait(DEADLINE_S)
    return child.pid


def test_a_state_in_which_nobody_runs_is_given_up_sooner(pool: PoolTable) -> None:
    """A job inside its iteration with no waiting thread makes the others more patient, but not for ever."""
    with joined(pool, 2) as (a, b):
        waits.start_waiting(a.member[0], 3)
        assert waits.patience_ns(a.member[0], 0) == rules.IDLE_NS
        waits.start_waiting(b.member[0], 2)
        assert waits.patience_ns(a.member[0], 0) == waits.STUCK_NS
        first = waits.standstill(a.member[0])
        assert first == waits.standstill(b.member[0])
        pool.jobs[job_of(b)]["progress"] += 1
        assert waits.standstill(a.member[0]) != first
        assert not waits.is_first_to_yield(a.member[0])
        assert waits.is_first_to_yield(b.member[0])
        pool.jobs[job_of(b)]["need"] = 3
        assert waits.is_first_to_yield(a.member[0])
        assert not waits.is_first_to_yield(b.member[0])


@pytest.mark.parametrize("state", INSIDE)
def test_some_waiting_job_always_yields_first(pool: PoolTable, state: JobState) -> None:
    """Invariant 7: when all jobs wait, exactly one of those in an iteration is the first to use the next tier."""
    with joined(pool, 2) as (a, b):
        for member in (a, b):
            waits.start_waiting(member.member[0], 2)
        pool.jobs[job_of(b)]["state"] = state
        assert sum(bool(waits.is_first_to_yield(member.member[0])) for member in (a, b)) == 1
        pool.jobs[job_of(b)]["state"] = JobState.RUNNING


def test_what_is_granted_is_lacking_no_more_before_the_waiting_thread_wakes(pool: PoolTable) -> None:
    """A job that gives at its boundary gives what is lacking once, however late the other's thread wakes."""
    with joined(pool, 2) as (a, b):
        held = grab(a, 4)
        assert not boundaries.finish_iteration(a.member[0], 0)
        waits.start_waiting(b.member[0], 8)
        assert boundaries._others_lack(a.member[0]) == 2
        assert acquire(b, [NOBODY] * 8)[0] == MUST_WAIT
        release(a, held[:2])
        grab(b, 8)
        assert boundaries._others_lack(a.member[0]) == 0
        waits.stop_waiting(b.member[0])


def test_the_broker_is_notified_once_until_it_looks(pool: PoolTable) -> None:
    """With a job at its boundary the first release writes the pipe, later ones do not until the broker looks."""
    with joined(pool, 2) as (a, b):
        held = grab(b, 4)
        assert not boundaries.finish_iteration(a.member[0], 0)
        assert len(os.read(pool.notify_fd, 64)) == 8
        release(b, held[:1])
        with pytest.raises(BlockingIOError):
            os.read(pool.notify_fd, 64)
        pool.take_notice()
        release(b, held[1:2])
        release(b, held[2:3])
        assert len(os.read(pool.notify_fd, 64)) == 8


def test_an_unprofiled_job_grows_alone_and_not_for_ever(pool: PoolTable) -> None:
    """While a first iteration grows no other first iteration may; it loses the right by time, or by its end."""
    with joined(pool, 2) as (a, b):
        grab(a, 1)
        pool.header["alone_since_ns"] = time.monotonic_ns() + HOUR_NS
        assert acquire(b, [NOBODY])[0] == MUST_WAIT
        for change in (
            ("header", "alone_since_ns", time.monotonic_ns() - 2 * rules.STILL_NS),
            ("job", "alone_spent_ns", rules.IDLE_NS + 1),
            ("job", "profiled", 1),
        ):
            record = pool.header if change[0] == "header" else pool.jobs[job_of(a)]
            before = record[change[1]].copy()
            record[change[1]] = change[2]
            (r,) = grab(b, 1)
            release(b, [r])
            record[change[1]] = before
            pool.header["alone_job"] = job_of(a)
            pool.header["alone_since_ns"] = time.monotonic_ns() + HOUR_NS
        assert acquire(b, [NOBODY])[0] == MUST_WAIT


# -- threads ---------------------------------------------------------------------------------------


def test_threads_of_several_members_keep_the_table_right() -> None:
    """Invariants 1 and 2: four members take and give at once; nothing is lost and nobody gets another's region."""
    with make_pool(24, claims=False) as pool, joined(pool, 4) as members:
        claimed = np.full(24, NOBODY)
        faults: list[str] = []

        def hammer(member: PoolTable) -> None:
            rng = np.random.default_rng(job_of(member))
            held: list[int] = []
            for _ in range(1500):
                wanted = rng.integers(-1, 24, rng.integers(1, 5)).tolist()
                status, granted = acquire(member, wanted)
                if status == GRANTED:
                    if (claimed[granted] != NOBODY).any():
                        faults.append("granted twice")
                    claimed[granted] = job_of(member)
                    held += granted
                give = held[: rng.integers(0, len(held) + 1)]
                if give:
                    claimed[give] = NOBODY
                    release(member, give)
                    held = held[len(give) :]
                if pool.header["peak_granted"] > 24:
                    faults.append("above the budget")
            claimed[held] = NOBODY
            release(member, held)

        threads = [threading.Thread(target=hammer, args=(member,), daemon=True) for member in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads)
        assert faults == []
        check_counters(pool)
        assert pool.header["granted"] == 0
        assert pool.header["recoveries"] == 0


def test_claims_arrays_have_room_for_every_bin() -> None:
    """A profile may use all of its bins; the last one is read and written inside the arrays."""
    with make_pool(10) as pool, joined(pool, 1) as (member,):
        record = pool.jobs[job_of(member)]
        give_profile(record, [1] * (CURVE_BINS - 1) + [5])
        record["progress"] = CURVE_BINS - 1
        grab(member, 5)
        record["progress"] = CURVE_BINS + 1000
        assert acquire(member, [NOBODY])[0] == GRANTED
        assert record["outgrown"] == 1
