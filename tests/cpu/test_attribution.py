"""Where a job's time went: parts that add up, from made records and made figures."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zico.base.processes import Counters, counters_of, started_at
from zico.broker.protocol.messages import Counted, Spent
from zico.broker.spending import FEW, Spending
from zico.pool.layout import JOB, JobState
from zico.report.attribution import FAULT_S, PARTS, Attribution, attribute

MS = 1_000_000
WORDS = st.one_of(st.integers(0, 40_000 * MS), st.integers(-(2**63), 2**63 - 1))
HOSTILE = st.fixed_dictionaries(
    dict.fromkeys(
        (
            *("iteration", "started_ns", "last_boundary_ns", "boundary_waited_ns", "boundary_since_ns"),
            *("need_waited_ns", "need_since_ns", "iteration_waited_ns", "copy_waited_ns", "making_ns"),
        ),
        WORDS,
    )
    | {
        "state": st.sampled_from([int(state) for state in JobState]),
        "phase": st.integers(0, 1),
        "atypical": st.integers(0, 1),
        "paused": st.integers(0, 1),
    }
)
SECONDS = st.floats(0, 1e6)
COUNTED = st.builds(
    Counted,
    iterations=st.integers(0, 10**6),
    running_s=SECONDS,
    processor_s=st.none() | SECONDS,
    system_s=SECONDS,
    queued_s=st.none() | SECONDS,
    minor_faults=st.integers(0, 10**9),
)
FIGURES = st.builds(
    Spent,
    **dict.fromkeys(("elapsed_s", "learning_s", "boundary_s", "inside_s", "copies_s"), SECONDS),
    **dict.fromkeys(("usual", "windows"), COUNTED),
    learning_iterations=st.integers(0, 100),
    own=st.none() | COUNTED,
    own_is_alone=st.booleans(),
)


def parts_of(time: Attribution) -> dict[str, float]:
    """Return the parts that are known."""
    return {name: value for name in PARTS if (value := getattr(time, name)) is not msgspec.UNSET}


def check(time: Attribution) -> None:
    """Hold an attribution to what is guaranteed of each."""
    parts = parts_of(time)
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(time.elapsed_s, abs=1e-6)


@given(FIGURES)
def test_the_parts_of_any_figures_add_up(spent: Spent) -> None:
    """No part is negative, and their sum is the elapsed time; what nobody knows is left out."""
    time = attribute(spent)
    check(time)
    is_known = spent.own is not None and spent.own.iterations > 0
    assert (time.slower_s is not msgspec.UNSET) == (time.own_iteration_s is not msgspec.UNSET) == is_known
    assert (time.minor_faults is not msgspec.UNSET) == (is_known and spent.windows.processor_s is not None)


@given(st.lists(st.tuples(st.integers(0, 1000 * MS), HOSTILE, st.booleans(), st.booleans())))
def test_whatever_a_job_writes_its_parts_add_up_to_the_time_between_looks(looks: list[Any]) -> None:
    """The elapsed time is that from the first look to the last one, and nothing is counted twice."""
    spending, record, now_ns, began_ns = Spending(), np.zeros((), JOB), 1, None
    for step_ns, words, is_alone, is_planned in looks:
        now_ns += step_ns
        began_ns = now_ns if began_ns is None else began_ns
        for name, word in words.items():
            record[name] = word
        spending.is_planned |= is_planned
        spending.observe(record.copy(), now_ns, is_alone=is_alone)
        if spending.is_to_count:
            spending.count(None)
    time = attribute(spending.spent(record))
    check(time)
    assert time.elapsed_s == pytest.approx((now_ns - (now_ns if began_ns is None else began_ns)) / 1e9)


class Job:
    """A job's record and counters, which are looked at whenever an iteration has begun."""

    def __init__(self) -> None:
        """Join at 1 s."""
        self.now_ns = 1000 * MS
        self.record = np.zeros((), JOB)
        self.record["state"] = JobState.RUNNING
        self.counters = Counters(0, 0, 0, 0, 0)
        self.spending = Spending()
        self.look()

    def look(self, *, is_alone: bool = False) -> None:
        """Look at it now."""
        self.spending.observe(self.record.copy(), self.now_ns, is_alone=is_alone)
        if self.spending.is_to_count:
            self.spending.count(self.counters)

    def iterate(
        self,
        times: int,
        ms: int,
        counts: tuple[int, int, int] = (0, 0, 0),
        *,
        boundary: int = 0,
        inside: int = 0,
        copies: int = 0,
        is_alone: bool = False,
    ) -> None:
        """Iterate, each time for so many milliseconds of running, and waits and copies.

        ``counts`` are milliseconds of a processor, those in which a thread waited for one, and page faults.
        """
        for _ in range(times):
            self.look(is_alone=is_alone)
            self.now_ns += (ms + inside + copies) * MS
            for name, more in {"need_waited_ns": inside, "copy_waited_ns": copies}.items():
                self.record[name] += more * MS
            self.record["last_boundary_ns"] = self.now_ns
            self.now_ns += boundary * MS
            self.record["boundary_waited_ns"] += boundary * MS
            self.record["iteration"] += 1
            self.record["started_ns"] = self.now_ns
            used_ms, queued_ms, faults = counts
            more = (used_ms * MS, used_ms * MS, queued_ms * MS, faults, 0)
            self.counters = Counters(*np.add(self.counters, more).tolist())
            self.look(is_alone=is_alone)


def test_each_cause_of_a_made_job_has_the_time_that_it_took() -> None:
    """Start, learning, waits, copies, faults, processors, neighbours and an evaluation are told apart."""
    job = Job()
    job.iterate(1, 3000, boundary=200)  # the start, and a wait while nothing is known
    job.iterate(1, 150)
    job.spending.is_planned = True
    job.iterate(2, 150, (100, 0, 0), boundary=100)  # the first of them ends the learning
    job.iterate(20, 100, (100, 0, 0), is_alone=True)
    job.iterate(10, 160, (120, 30, 1000), boundary=50, inside=30, copies=20)
    job.record["phase"] = 1
    job.iterate(1, 700)
    job.record["phase"] = 0
    job.look()
    spent = job.spending.spent(job.record)
    time = attribute(spent)
    check(time)
    assert (spent.usual.iterations, spent.windows.iterations, spent.own_is_alone) == (31, 29, True)
    lost_s, all_windows = 0.05 + 10 * 0.06, 31 / 29
    faults_s, queued_s = 8 * 1000 * FAULT_S * all_windows, 8 * 0.03 * all_windows
    assert time == Attribution(
        elapsed_s=pytest.approx((job.now_ns - 1000 * MS) / 1e9),
        iterations_s=pytest.approx(33 * 0.1),
        learning_s=pytest.approx(0.2 + 0.05 + 0.05 + 0.1),
        boundary_waited_s=pytest.approx(0.1 + 10 * 0.05),
        inside_waited_s=pytest.approx(10 * 0.03),
        copies_s=pytest.approx(10 * 0.02),
        page_faults_s=pytest.approx(faults_s),
        processor_waited_s=pytest.approx(queued_s),
        slower_s=pytest.approx(lost_s - faults_s - queued_s),
        other_s=pytest.approx(3.0 + 0.7),
        own_iteration_s=pytest.approx(0.1),
        own_iteration_is="alone",
        minor_faults=8000,
        major_faults=0,
    )


def test_two_threads_that_wait_for_a_processor_lose_the_time_of_one() -> None:
    """Seconds of threads are shared by as many threads as the job has, and none is lost that was not."""
    job = Job()
    job.spending.is_planned = True
    job.iterate(20, 100, (200, 0, 0), is_alone=True)
    job.iterate(20, 200, (200, 200, 0))
    time = attribute(job.spending.spent(job.record))
    assert time.processor_waited_s == pytest.approx(2.0, abs=0.2)
    check(time)


def test_the_own_time_is_of_the_best_window_where_the_job_is_never_alone_and_not_known_without_one() -> None:
    """A single fast iteration does not count; without an own time nothing is called slower."""
    job = Job()
    job.spending.is_planned = True
    job.iterate(FEW, 500)
    few = attribute(job.spending.spent(job.record))
    assert (few.own_iteration_s, few.own_iteration_is) == (msgspec.UNSET, "not known")
    assert few.iterations_s == pytest.approx((FEW - 1) * 0.5)
    job.iterate(1, 500)
    for ms in (200, 300, 10, *[300] * (FEW - 3)):
        job.iterate(1, ms)
    found = attribute(job.spending.spent(job.record))
    assert found.own_iteration_is == "best"
    assert found.own_iteration_s == pytest.approx((0.2 + 0.01 + (FEW - 2) * 0.3) / FEW)
    check(found)


def test_a_job_that_takes_turns_is_alone_in_its_own() -> None:
    """Who is inside while it waits at its boundary has nothing to do with what its iterations take."""
    job = Job()
    job.spending.is_planned = True
    for _ in range(30):
        job.iterate(1, 100, is_alone=True)
        job.record["state"] = JobState.BOUNDARY
        job.record["boundary_since_ns"] = job.now_ns
        job.look(is_alone=False)
        job.record["state"] = JobState.RUNNING
        job.record["boundary_since_ns"] = 0
    assert attribute(job.spending.spent(job.record)).own_iteration_is == "alone"


def test_a_wait_that_lasts_counts_as_one() -> None:
    """A job that has waited for a second when it is looked at has lost that second to the wait."""
    job = Job()
    job.spending.is_planned = True
    job.iterate(2, 100)
    job.record["need_since_ns"] = job.now_ns
    job.now_ns += 1000 * MS
    job.look()
    assert attribute(job.spending.spent(job.record)).inside_waited_s == pytest.approx(1.0)


def test_the_kernel_tells_of_a_process_that_lives_and_of_no_other() -> None:
    """This process has used a processor and touched pages; with another start the number is another process's."""
    pid = os.getpid()
    started = started_at(pid)
    assert started is not None
    before = counters_of(pid, started)
    pages = bytearray(64 << 20)
    after = counters_of(pid, started)
    assert before is not None
    assert after is not None
    assert after.minor_faults - before.minor_faults > 0
    assert after.processor_ns >= before.processor_ns > 0
    assert len(pages) > 0
    assert counters_of(pid, started + 1) is None
    assert counters_of(0, 0) is None
