"""From the table's records to views, figures and the record file, and from decisions back to the table."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zico.broker.accounting import Ledger, write_record
from zico.broker.admission import RECHECK_NS, RETRY_NS, admit_all
from zico.broker.members import Entry
from zico.broker.notes import NOT_SEEN
from zico.broker.outside import OutsideFigures
from zico.broker.pool_manager import SAMPLE_NS, TRIAL_LOOK_NS, PoolManager
from zico.broker.protocol import messages as m
from zico.broker.protocol.connection import FrameReader, encode_frame
from zico.broker.trials import SavingTrial
from zico.broker.views import ProfileCache, jobs_in, mask_of, pool_view
from zico.pool.layout import HEADER, JOB, MAX_JOBS, NO_MORE, NOBODY, Auto, JobState, SaveMode
from zico.pool.table import PoolTable
from zico.report.model import read_record
from zico.scheduler.policies import policy_named
from zico.scheduler.state import Decision, PoolView, Profile, Start, Wait
from zico.trace.profile import UNPROFILED_SHIFT

if TYPE_CHECKING:
    from pathlib import Path

    from zico.broker.members import Member

MIB = 1 << 20
S = 1_000_000_000
BEGAN_NS = 5 * S


def hello(name: str) -> m.Hello:
    """Return what a job of that name says first."""
    return m.Hello(version=m.PROTOCOL_VERSION, name=name, pid=7, framework="torch")


def empty_table() -> tuple[Any, Any]:
    """Return a header and job records as of a pool of 16 regions without jobs."""
    header = np.zeros(1, HEADER)[0]
    header["budget_regions"] = header["budget_total"] = 16
    header["alone_job"] = NOBODY
    return header, np.zeros(MAX_JOBS, JOB)


def set_fields(record: Any, **values: object) -> None:  # noqa: ANN401 - a numpy record
    """Set these fields of a record."""
    for name, value in values.items():
        record[name] = value


def new_ledger(*, is_recorded: bool = True) -> Ledger:
    """Return a ledger without members."""
    return Ledger(
        policy="zico",
        device="host",
        region_bytes=MIB,
        budget_bytes=16 * MIB,
        began_ns=BEGAN_NS,
        is_recorded=is_recorded,
    )


def join(ledger: Ledger, job: int, name: str) -> Member:
    """Add a member."""
    entry = Entry(name=name, process=NOT_SEEN, job=job, framework="torch", share=m.DEFAULT_SHARE)
    return ledger.join(entry, pid=100 + job)


# -- views -----------------------------------------------------------------------------------------


def test_a_view_has_every_job_that_has_a_place() -> None:
    """Phases, waits, profile and the job that grows alone come out as the table has them."""
    header, jobs = empty_table()
    header["alone_job"] = 0
    set_fields(jobs[0], state=JobState.RUNNING, name=b"a", held=4, need=2, need_since_ns=7, boundary_since_ns=9)
    set_fields(jobs[3], state=JobState.BOUNDARY, name="\N{SNOWMAN}".encode(), held=1, persistent=1, progress=5)
    set_fields(jobs[3], iteration=6, started_ns=11, boundary_since_ns=13, profiled=1)
    set_fields(jobs[3]["profile"], shift=2, n_bins=3, n_events=10, duration_ns=99)
    jobs[3]["profile"]["held"][:4] = (1, 5, 2, 77)
    jobs[3]["profile"]["t_ns"][:4] = (0, 10, 20, 77)
    set_fields(jobs[9], state=JobState.LEAVING)
    view = pool_view(header, jobs, 42, ProfileCache())
    assert (view.now_ns, view.budget, view.alone_job) == (42, 16, 0)
    assert [(job.job, job.phase, job.profile is None) for job in view.jobs] == [
        (0, JobState.RUNNING, True),
        (3, JobState.BOUNDARY, False),
        (9, JobState.LEAVING, True),
    ]
    assert (view.job(0).waiting_since_ns, view.job(0).need, view.job(0).held) == (7, 2, 4)
    waiting = view.job(3)
    assert (waiting.name, waiting.waiting_since_ns, waiting.iteration, waiting.started_ns) == ("\N{SNOWMAN}", 13, 6, 11)
    assert (waiting.held, waiting.persistent, waiting.progress) == (1, 1, 5)
    expected = Profile(held=(1, 5, 2), t_ns=(0, 10, 20), duration_ns=99, shift=2, n_events=10)
    assert waiting.profile == expected
    assert {type(value) for value in (*expected.held, waiting.held, view.budget)} == {int}


@pytest.mark.parametrize(("need_since_ns", "in_bin_ns"), [(0, 25), (190, 15)])
def test_a_view_tells_how_long_a_job_is_in_its_bin(need_since_ns: int, in_bin_ns: int) -> None:
    """The curve of the iteration that goes on says when the bin began; waits for memory do not count."""
    header, jobs = empty_table()
    set_fields(jobs[0], state=JobState.RUNNING, profiled=1, progress=9, started_ns=100, iteration_waited_ns=5)
    set_fields(jobs[0], need_since_ns=need_since_ns)
    set_fields(jobs[0]["profile"], shift=2, n_bins=3, n_events=10, duration_ns=99)
    jobs[0]["profile"]["t_ns"][:3] = (0, 10, 20)
    set_fields(jobs[0]["current"], shift=1, n_bins=5)
    jobs[0]["current"]["t_ns"][:5] = (0, 8, 30, 50, 70)
    assert pool_view(header, jobs, 200, ProfileCache()).job(0).in_bin_ns == in_bin_ns


@pytest.mark.parametrize("word", [-(2**31), -1, 2**31 - 1])
def test_a_view_trusts_no_word_of_a_curve(word: int) -> None:
    """Whatever a job has left in its curves, the broker gets a time that a message can carry."""
    header, jobs = empty_table()
    set_fields(jobs[0], state=JobState.RUNNING, profiled=1, progress=word << 32, started_ns=word << 32)
    set_fields(jobs[0]["profile"], shift=word, n_bins=3, n_events=10, duration_ns=99)
    set_fields(jobs[0]["current"], shift=word, n_bins=word)
    jobs[0]["current"]["t_ns"][:] = word << 32
    assert 0 <= pool_view(header, jobs, 200, ProfileCache()).job(0).in_bin_ns <= m.MAX_COUNT


def test_what_is_lent_between_iterations_is_not_kept() -> None:
    """Those that swap, and all of a crowded pool: held inside, free at the boundary, until they have evicted all."""
    header, jobs = empty_table()
    for job, state in enumerate((JobState.RUNNING, JobState.BOUNDARY, JobState.BOUNDARY, JobState.RUNNING)):
        set_fields(jobs[job], state=state, held=5, persistent=3)
    set_fields(jobs[2], evict=NO_MORE)
    set_fields(jobs[3], save=SaveMode.SWAP)

    def seen() -> list[tuple[int, int]]:
        return [(job.held, job.kept) for job in pool_view(header, jobs, 42, ProfileCache()).jobs]

    assert seen() == [(5, 3), (5, 3), (5, 3), (5, 0)]
    header["crowded"] = 1
    assert seen() == [(5, 0), (0, 0), (5, 3), (5, 0)]
    set_fields(header, crowded=0, on_timeline=1)
    assert seen() == [(5, 3), (5, 3), (5, 3), (5, 3)], "on a GPU nobody evicts"


def test_a_profile_is_converted_once_until_it_changes() -> None:
    """The same profile is the same object; a changed one is converted anew."""
    _, jobs = empty_table()
    set_fields(jobs[0], state=JobState.RUNNING, profiled=1)
    set_fields(jobs[0]["profile"], n_bins=1)
    cache = ProfileCache()
    first = cache.profile(0, jobs[0])
    assert cache.profile(0, jobs[0]) is first
    jobs[0]["profile"]["held"][0] = 5
    changed = cache.profile(0, jobs[0])
    assert changed is not None
    assert changed.peak == 5


@given(st.sets(st.integers(0, MAX_JOBS - 1)))
def test_masks_name_the_same_jobs_both_ways(jobs: set[int]) -> None:
    """Any set of jobs, the last place included, survives the table's signed word."""
    mask = mask_of(tuple(jobs))
    assert int(np.int64(mask)) == mask
    assert jobs_in(mask) == tuple(sorted(jobs))


# -- figures ---------------------------------------------------------------------------------------


def test_a_report_has_the_figures_of_jobs_gone_and_present() -> None:
    """A departed job keeps its last figures, also when another has its place now."""
    ledger = new_ledger()
    header, jobs = empty_table()
    set_fields(header, granted=5, peak_granted=9, recoveries=1, stalls=2)
    gone = join(ledger, 0, "gone")
    set_fields(jobs[0], state=JobState.RUNNING, held=5, peak_held=8, persistent=3, iteration=16, requested_bytes=200)
    set_fields(jobs[0], evaluations=3, parts=2)
    set_fields(jobs[0], pooled_bytes=150, spilled_bytes=50, peak_live_bytes=77, maps=4, oom_count=1, oom_held=2)
    set_fields(jobs[0], oom_request_bytes=999, first_boundary_ns=BEGAN_NS, last_boundary_ns=BEGAN_NS + 5 * S)
    set_fields(jobs[0], boundary_waited_ns=S, need_waited_ns=2 * S)
    ledger.observe(header.copy(), jobs.copy(), 7 * MIB, BEGAN_NS + 6 * S)
    ledger.depart(gone, BEGAN_NS + 6 * S)
    jobs[0] = np.zeros((), JOB)
    set_fields(jobs[0], state=JobState.RUNNING)
    join(ledger, 0, "next")
    ledger.observe(header.copy(), jobs.copy(), 2 * MIB, BEGAN_NS + 7 * S)
    report = ledger.report(BEGAN_NS + 7 * S)
    assert [job.name for job in report.jobs] == ["gone", "next"]
    assert msgspec.structs.replace(report.jobs[0], spent=msgspec.UNSET) == m.JobReport(
        job=0,
        name="gone",
        pid=100,
        framework="torch",
        state="gone",
        held_bytes=5 * MIB,
        iterations=11,
        evaluations=3,
        parts=2,
        iterations_per_s=2.0,
        waited_s=3.0,
        boundary_waited_s=1.0,
        peak_bytes=8 * MIB,
        peak_tensor_bytes=77,
        persistent_bytes=3 * MIB,
        requested_bytes=200,
        pooled_bytes=150,
        spilled_bytes=50,
        pool_fraction=0.75,
        maps=4,
        oom=m.RefusedRequest(request_bytes=999, held_bytes=2 * MIB),
        normalised=1.0,
    )
    assert (report.jobs[1].iterations_per_s, report.jobs[1].pool_fraction, report.jobs[1].oom) == (0, 0, None)
    assert report.pool == m.PoolReport(
        region_bytes=MIB,
        last_budget_bytes=16 * MIB,
        peak_granted_bytes=9 * MIB,
        peak_physical_bytes=7 * MIB,
        recoveries=1,
        stalls=2,
    )


def test_what_a_job_waited_before_its_first_iteration_ended_slows_nothing() -> None:
    """The normalised throughput is the share of the time since then in which it did not wait; unknown before."""
    ledger = new_ledger()
    header, jobs = empty_table()
    join(ledger, 0, "a")
    set_fields(jobs[0], state=JobState.RUNNING, need_waited_ns=3 * S)
    ledger.observe(header.copy(), jobs.copy(), 0, BEGAN_NS + 3 * S)
    assert ledger.report(BEGAN_NS).jobs[0].normalised is msgspec.UNSET
    set_fields(jobs[0], iteration=1, first_boundary_ns=BEGAN_NS + 4 * S, last_boundary_ns=BEGAN_NS + 4 * S)
    ledger.observe(header.copy(), jobs.copy(), 0, BEGAN_NS + 4 * S)
    set_fields(jobs[0], iteration=9, last_boundary_ns=BEGAN_NS + 12 * S, boundary_waited_ns=S, need_waited_ns=4 * S)
    ledger.observe(header.copy(), jobs.copy(), 0, BEGAN_NS + 12 * S)
    assert ledger.report(BEGAN_NS).jobs[0].normalised == pytest.approx(0.75)


def test_a_status_has_the_members_and_whom_they_wait_for() -> None:
    """A waiting job's present wait counts at once, before the table adds it up."""
    ledger = new_ledger()
    header, jobs = empty_table()
    header["granted"] = 3
    join(ledger, 1, "a")
    leaving = join(ledger, 2, "b")
    leaving.leaving = True
    set_fields(jobs[1], state=JobState.BOUNDARY, held=3, waits_for=1 << 2, boundary_since_ns=BEGAN_NS + S)
    set_fields(jobs[1], boundary_waited_ns=4 * S)
    set_fields(jobs[2], state=JobState.LEAVING)
    ledger.observe(header.copy(), jobs.copy(), MIB, BEGAN_NS + 2 * S)
    status = ledger.status(BEGAN_NS + 3 * S)
    assert (status.schema_version, status.uptime_s) == ("zico.status.v1", 3.0)
    assert (status.granted_bytes, status.physical_bytes, status.budget_bytes) == (3 * MIB, MIB, 16 * MIB)
    first, second = status.jobs
    assert (first.state, first.waits_for, first.waiting_s, first.waited_s) == ("boundary", (2,), 2.0, 6.0)
    assert (second.state, second.waits_for, second.waiting_s) == ("leaving", (), 0.0)


def test_a_job_says_whose_plan_it_follows_and_why() -> None:
    """What it has written stands in status and report; what is not printable ASCII is a question mark."""
    ledger = new_ledger()
    header, jobs = empty_table()
    join(ledger, 1, "a")
    set_fields(jobs[1], save=SaveMode.SWAP, planner=b"longest", planner_note=b"chen found \x1b[31mno\xff plan")
    ledger.observe(header.copy(), jobs.copy(), MIB, BEGAN_NS)
    for saving in (ledger.status(BEGAN_NS).jobs[0].saving, ledger.report(BEGAN_NS).jobs[0].saving):
        assert (saving.how, saving.planner) == ("swap", "longest")
        assert saving.planner_note == "chen found ?[31mno? plan"


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_report_names_the_latest_jobs_and_counts_the_rest(is_recorded: bool) -> None:  # noqa: FBT001 - a parameter
    """However many jobs there were, the answer fits into a frame."""
    ledger = new_ledger(is_recorded=is_recorded)
    for number in range(m.MAX_REPORTED_JOBS + 5):
        ledger.depart(join(ledger, 0, f"job {number}"), BEGAN_NS)
    report = ledger.report(BEGAN_NS)
    assert (len(report.jobs), report.jobs_left_out, report.jobs[0].name) == (m.MAX_REPORTED_JOBS, 5, "job 5")
    assert FrameReader().feed(encode_frame(report)) == [report]


def test_a_report_names_the_latest_processes_outside_once_each() -> None:
    """The last thing that a process said of a framework counts, and however many say so, the answer fits."""
    ledger = new_ledger()
    told = [m.Outside(name="a", pid=pid, framework="torch", reason=f"{pid}") for pid in range(m.MAX_OUTSIDERS + 3)]
    for outsider in (*told, msgspec.structs.replace(told[5], reason="again")):
        ledger.note_outsider(outsider)
    report = ledger.report(BEGAN_NS)
    assert [one.pid for one in report.outside] == [3, 4, *range(6, m.MAX_OUTSIDERS + 3), 5]
    assert report.outside[-1].reason == "again"
    assert FrameReader().feed(encode_frame(report)) == [report]


def test_a_broker_without_a_record_does_not_grow_with_the_jobs_that_have_left() -> None:
    """Three hundred joins, iterations and waits take no more memory than a hundred, and all jobs are counted."""
    ledger = new_ledger(is_recorded=False)
    header, jobs = empty_table()
    stays = join(ledger, 1, "stays")
    taken = {}
    tracemalloc.start()
    for number in range(300):
        member = join(ledger, 0, f"job {number}")
        launcher = join(ledger, 2, "launcher")
        set_fields(jobs[2], aside=1)
        for look in range(3):
            now_ns = BEGAN_NS + (10 * number + look) * S
            set_fields(jobs[0], iteration=look, last_boundary_ns=now_ns, boundary_since_ns=now_ns * (look % 2))
            set_fields(jobs[1], iteration=3 * number + look, last_boundary_ns=now_ns)
            ledger.observe(header, jobs.copy(), 0, now_ns)
        ledger.depart(launcher, now_ns)
        ledger.depart(member, now_ns)
        if number in (99, 299):
            gc.collect()  # garbage in cycles is not growth
            taken[number] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken[299] < taken[99] + 200 * 160, "a job that is kept takes some 2,000 bytes"
    report = ledger.report(now_ns)
    names = [job.name for job in report.jobs]
    assert (len(names), report.jobs_left_out, names[0], names[-1]) == (m.MAX_REPORTED_JOBS, 237, "job 236", "job 299")
    assert ledger.members == (stays,)
    assert ledger.status(now_ns).jobs[0].iterations == 899


def test_figures_of_a_job_that_died_half_way_are_still_a_report() -> None:
    """Counters that a death left negative or inconsistent are told as zero or at most all."""
    ledger = new_ledger()
    header, jobs = empty_table()
    join(ledger, 0, "a")
    set_fields(jobs[0], state=JobState.RUNNING, live_bytes=-5, requested_bytes=10, pooled_bytes=20, need_waited_ns=-1)
    ledger.observe(header.copy(), jobs.copy(), 0, BEGAN_NS)
    for answer in (ledger.report(BEGAN_NS), ledger.status(BEGAN_NS)):
        assert FrameReader().feed(encode_frame(answer)) == [answer]
    assert ledger.report(BEGAN_NS).jobs[0].pool_fraction == 1.0


def test_what_lies_outside_the_pool_is_told_where_it_is_known_and_left_out_elsewhere() -> None:
    """A status has the figures of now, a report the most seen of each; where nobody knows, neither has the fields."""
    ledger = new_ledger()
    header, jobs = empty_table()
    ledger.observe(header, jobs, 0, BEGAN_NS)
    ledger.observe_outside(None)
    for answer in (ledger.status(BEGAN_NS), ledger.report(BEGAN_NS).pool):
        assert answer.context_bytes is answer.foreign_bytes is msgspec.UNSET
        assert b"context_bytes" not in msgspec.json.encode(answer)
    ledger.observe_outside(OutsideFigures(context_bytes=5, foreign_bytes=70))
    ledger.observe_outside(OutsideFigures(context_bytes=50, foreign_bytes=7))
    status, pool = ledger.status(BEGAN_NS), ledger.report(BEGAN_NS).pool
    assert (status.context_bytes, status.foreign_bytes) == (50, 7)
    assert (pool.context_bytes, pool.foreign_bytes) == (50, 70)
    ledger.observe_outside(None)
    assert ledger.status(BEGAN_NS).context_bytes is msgspec.UNSET
    assert ledger.report(BEGAN_NS).pool.context_bytes == 50


# -- the record file -------------------------------------------------------------------------------


def test_the_record_has_samples_boundaries_and_waits(tmp_path: Path) -> None:
    """The file holds what its docstring lists, in seconds since the broker began, waits that last ended now."""
    ledger = new_ledger()
    header, jobs = empty_table()
    join(ledger, 0, "a")
    set_fields(jobs[0], state=JobState.RUNNING, held=2, peak_held=8)
    ledger.observe(header.copy(), jobs.copy(), MIB, BEGAN_NS + S)
    set_fields(jobs[0], state=JobState.BOUNDARY, iteration=1, last_boundary_ns=BEGAN_NS + 2 * S - S // 4)
    set_fields(jobs[0], boundary_since_ns=BEGAN_NS + 2 * S - S // 4)
    set_fields(jobs[0], out_now_bytes=2 * MIB + 1)
    header["budget_total"] = 9
    ledger.observe(header.copy(), jobs.copy(), MIB, BEGAN_NS + 2 * S)
    set_fields(jobs[0], state=JobState.RUNNING, boundary_since_ns=0, started_ns=BEGAN_NS + 3 * S - S // 2)
    set_fields(jobs[0], out_now_bytes=-1)
    join(ledger, 1, "b")
    set_fields(jobs[1], state=JobState.RUNNING, held=7, need=1, need_since_ns=BEGAN_NS + 3 * S)
    ledger.observe(header.copy(), jobs.copy(), 5 * MIB, BEGAN_NS + 3 * S)
    write_record(tmp_path / "record.npz", ledger.arrays(BEGAN_NS + 4 * S))
    with np.load(tmp_path / "record.npz", allow_pickle=False) as record:
        got = {name: record[name] for name in record.files}
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.npz"]
    assert got["t_s"].tolist() == [1.0, 2.0, 3.0]
    assert got["held_bytes"].tolist() == [[2 * MIB, 0], [2 * MIB, 0], [2 * MIB, 7 * MIB]]
    assert got["out_bytes"].tolist() == [[0, 0], [3 * MIB, 0], [0, 0]]
    assert got["physical_bytes"].tolist() == [MIB, MIB, 5 * MIB]
    assert (got["budget_t_s"].tolist(), got["budget_bytes"].tolist()) == ([0.0, 2.0], [16 * MIB, 9 * MIB])
    assert ledger.report(BEGAN_NS + 4 * S).pool.last_budget_bytes == 9 * MIB
    assert got["names"].tolist() == ["a", "b"]
    assert got["peak_bytes"].tolist() == [8 * MIB, 0]
    assert (got["boundary_job"].tolist(), got["boundary_t_s"].tolist()) == ([0], [1.75])
    assert (got["wait_job"].tolist(), got["wait_kind"].tolist()) == ([0, 1], [0, 1])
    assert got["wait_t_s"].tolist() == [[1.75, 2.5], [3.0, 4.0]]


def test_the_record_tells_whom_each_wait_was_for() -> None:
    """A wait keeps every job that it was for, also one that has left; the next wait begins with none."""
    ledger = new_ledger()
    header, jobs = empty_table()
    waiting, first, second = (join(ledger, place, name) for place, name in enumerate("abc"))
    set_fields(jobs[0], state=JobState.BOUNDARY, boundary_since_ns=BEGAN_NS + S, waits_for=1 << first.job)
    ledger.observe(header.copy(), jobs.copy(), 0, BEGAN_NS + S)
    ledger.note_blockers(waiting, 1 << second.job | 1 << 9)  # nobody has place 9
    ledger.note_blockers(first, 1 << second.job)  # does not wait
    ledger.depart(first, BEGAN_NS + S)
    set_fields(jobs[0], boundary_since_ns=0, started_ns=BEGAN_NS + 2 * S, waits_for=0)
    set_fields(jobs[0], state=JobState.RUNNING, need=1, need_since_ns=BEGAN_NS + 3 * S)
    ledger.observe(header.copy(), jobs.copy(), 0, BEGAN_NS + 3 * S)
    set_fields(jobs[0], need_since_ns=BEGAN_NS + 4 * S, need_waited_ns=S, waits_for=1 << second.job)
    ledger.observe(header.copy(), jobs.copy(), 0, BEGAN_NS + 6 * S)
    set_fields(jobs[0], need_since_ns=BEGAN_NS + 6 * S + 1, need_waited_ns=3 * S, waits_for=0)
    ledger.observe(header.copy(), jobs.copy(), 0, BEGAN_NS + 7 * S)
    got = ledger.arrays(BEGAN_NS + 8 * S)
    assert got["wait_t_s"].round(3).tolist() == [[1.0, 2.0], [3.0, 4.0], [4.0, 6.0], [6.0, 8.0]]
    assert (got["blocker_wait"].tolist(), got["blocker_job"].tolist()) == ([0, 0, 2], [1, 2, 2])


def test_a_wait_inside_ends_when_the_job_says_and_not_when_it_is_looked_at() -> None:
    """A look a second after a wait of a tenth does not make it a second."""
    ledger = new_ledger()
    header, jobs = empty_table()
    join(ledger, 0, "a")
    set_fields(jobs[0], state=JobState.RUNNING, need=1, need_since_ns=BEGAN_NS + S, need_waited_ns=7 * S)
    ledger.observe(header.copy(), jobs.copy(), 0, BEGAN_NS + S)
    set_fields(jobs[0], need=0, need_since_ns=0, need_waited_ns=7 * S + S // 10)
    ledger.observe(header.copy(), jobs.copy(), 0, BEGAN_NS + 2 * S)
    assert ledger.arrays(BEGAN_NS + 2 * S)["wait_t_s"].round(3).tolist() == [[1.0, 1.1]]


@pytest.mark.parametrize(("n", "ends_s"), [(1, [4.0]), (3, [2.0, 3.0, 4.0]), (17, [4.0])])
def test_iterations_between_two_looks_are_in_the_record(n: int, ends_s: list[float]) -> None:
    """They lie evenly before the last one; of many the last one stands for all."""
    ledger = new_ledger()
    header, jobs = empty_table()
    join(ledger, 0, "a")
    set_fields(jobs[0], state=JobState.RUNNING, iteration=1, last_boundary_ns=BEGAN_NS + S)
    ledger.observe(header.copy(), jobs.copy(), 0, BEGAN_NS + S)
    set_fields(jobs[0], iteration=1 + n, last_boundary_ns=BEGAN_NS + 4 * S)
    ledger.observe(header.copy(), jobs.copy(), 0, BEGAN_NS + 5 * S)
    assert ledger.arrays(BEGAN_NS + 5 * S)["boundary_t_s"].round(3).tolist() == [1.0, *ends_s]


def test_the_record_has_the_profiles_of_jobs_that_have_one() -> None:
    """What an iteration holds is there per job, in bytes and seconds; a job without a profile has none."""
    ledger = new_ledger()
    header, jobs = empty_table()
    join(ledger, 0, "a")
    join(ledger, 1, "b")
    set_fields(jobs[0], state=JobState.RUNNING)
    set_fields(jobs[1], state=JobState.RUNNING, profiled=1, persistent=3)
    set_fields(jobs[1]["profile"], n_bins=2, duration_ns=4 * S)
    jobs[1]["profile"]["held"][:2] = 5, 7
    jobs[1]["profile"]["t_ns"][:2] = 0, S
    ledger.observe(header.copy(), jobs.copy(), 0, BEGAN_NS)
    got = ledger.arrays(BEGAN_NS + S)
    assert got["iteration_s"].tolist() == [0.0, 4.0]
    assert got["persistent_bytes"].tolist() == [0, 3 * MIB]
    assert got["profile_job"].tolist() == [1, 1]
    assert got["profile_t_s"].tolist() == [0.0, 1.0]
    assert got["profile_bytes"].tolist() == [5 * MIB, 7 * MIB]


def test_writing_a_record_twice_adds_nothing_to_the_ledger() -> None:
    """A wait that still lasts is in the record and goes on lasting."""
    ledger = new_ledger()
    header, jobs = empty_table()
    member = join(ledger, 0, "a")
    set_fields(jobs[0], state=JobState.BOUNDARY, boundary_since_ns=BEGAN_NS)
    ledger.observe(header.copy(), jobs.copy(), 0, BEGAN_NS)
    for end_s in (1, 2):
        assert ledger.arrays(BEGAN_NS + end_s * S)["wait_t_s"].tolist() == [[0.0, end_s]]
    ledger.depart(member, BEGAN_NS + 3 * S)
    assert ledger.arrays(BEGAN_NS + 9 * S)["wait_t_s"].tolist() == [[0.0, 3.0]]


def test_an_empty_record_has_all_arrays(tmp_path: Path) -> None:
    """A broker that never had a job writes the same arrays with nothing in them."""
    write_record(tmp_path / "record.npz", new_ledger().arrays(BEGAN_NS))
    with np.load(tmp_path / "record.npz", allow_pickle=False) as record:
        shapes = {name: record[name].shape for name in record.files}
    assert shapes == {
        **dict.fromkeys(["t_s", "physical_bytes", "names", "peak_bytes", "boundary_job", "boundary_t_s"], (0,)),
        **dict.fromkeys(["wait_job", "wait_kind", "blocker_wait", "blocker_job"], (0,)),
        **dict.fromkeys(["iteration_s", "persistent_bytes", "profile_job", "profile_t_s", "profile_bytes"], (0,)),
        **dict.fromkeys(["held_bytes", "out_bytes"], (0, 0)),
        "wait_t_s": (0, 2),
        "budget_t_s": (1,),
        "budget_bytes": (1,),
    }


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    """A failure half-way neither replaces the record nor leaves a partial file."""
    (tmp_path / "record.npz").write_text("old")
    with pytest.raises(ValueError, match="Object arrays"):
        write_record(tmp_path / "record.npz", {"bad": np.array([object()])})
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("record.npz", "old")]


def test_a_wait_that_is_over_before_the_next_look_is_known_for_whom_it_was(tmp_path: Path) -> None:
    """The pool manager notes whom a job waits for when it decides so, not only when it looks."""
    with PoolTable.create(budget_bytes=4 * MIB, region_bytes=MIB, use_claims=False, self_admit=False) as table:
        manager = PoolManager(table, [], policy_named("serial"), record_path=tmp_path / "record.npz")
        runs, waits = (
            manager.join(
                m.Hello(version=m.PROTOCOL_VERSION, name=name, pid=7, framework="torch"), process=NOT_SEEN, pidfd=None
            )
            for name in "ab"
        )
        now_ns = time.monotonic_ns()
        set_fields(table.jobs[runs.job], state=JobState.RUNNING, held=1, iteration=1, profiled=1, started_ns=now_ns)
        set_fields(table.jobs[runs.job]["profile"], n_events=9, n_bins=2, duration_ns=S)
        set_fields(table.jobs[waits.job], state=JobState.BOUNDARY, boundary_since_ns=now_ns)
        manager.act(now_ns)
        assert int(table.jobs[waits.job]["waits_for"]) == 1 << runs.job
        set_fields(table.jobs[waits.job], state=JobState.RUNNING, boundary_since_ns=0, started_ns=now_ns, waits_for=0)
        manager.write_record(now_ns)
    record = read_record(tmp_path / "record.npz")
    assert (record.wait_job.tolist(), record.blockers()) == ([1], [(0,)])


@pytest.mark.parametrize(("save", "promised"), [("none", 2), ("swap", 4), ("page", 4), ("auto", 4)])
def test_who_does_not_save_is_promised_its_limit(save: m.SaveMode, promised: int) -> None:
    """What exceeds it is refused, as what exceeds the budget; whoever saves goes on with less."""
    hello = m.Hello(version=m.PROTOCOL_VERSION, name="a", pid=7, framework="torch", save=save, limit_bytes=2 * MIB)
    with PoolTable.create(budget_bytes=4 * MIB, region_bytes=MIB, use_claims=False, self_admit=False) as table:
        member = PoolManager(table, [], policy_named("serial")).join(hello, process=NOT_SEEN, pidfd=None)
        assert (int(table.jobs[member.job]["limit"]), int(table.jobs[member.job]["promised"])) == (2, promised)


def test_shares_on_trial_are_looked_at_though_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool manager decides again soon as long as the trial is open, and no longer."""
    with PoolTable.create(budget_bytes=4 * MIB, region_bytes=MIB, use_claims=False, self_admit=False) as table:
        manager = PoolManager(table, [], policy_named("serial"))
        manager.join(
            m.Hello(version=m.PROTOCOL_VERSION, name="a", pid=7, framework="torch"), process=NOT_SEEN, pidfd=None
        )
        now_ns = time.monotonic_ns()
        for is_open in (True, False):
            monkeypatch.setattr(SavingTrial, "is_open", is_open)
            manager._evaluate(now_ns)
            assert manager._evaluate_at_ns == (now_ns + TRIAL_LOOK_NS if is_open else None)


@pytest.mark.parametrize(("shift", "is_planned"), [(UNPROFILED_SHIFT, False), (2, True)])
def test_a_job_that_never_waits_has_learned_when_its_iterations_are_known(shift: int, is_planned: bool) -> None:  # noqa: FBT001 - a parameter
    """No decision is due for it, so the next look tells; a first iteration tells nothing but the peak."""
    with PoolTable.create(budget_bytes=4 * MIB, region_bytes=MIB, use_claims=True, self_admit=True) as table:
        manager = PoolManager(table, [], policy_named("zico"))
        member = manager.join(hello("a"), process=NOT_SEEN, pidfd=None)
        now_ns = time.monotonic_ns()
        manager.act(now_ns)
        set_fields(table.jobs[member.job], state=JobState.RUNNING, iteration=2, profiled=1, started_ns=now_ns)
        set_fields(table.jobs[member.job]["profile"], n_events=9, n_bins=2, duration_ns=S, shift=shift)
        manager.act(manager.due_ns)
        assert member.spending.is_planned == is_planned


@pytest.mark.parametrize(("look_ns", "again_ns"), [(SAMPLE_NS // 1000, SAMPLE_NS), (SAMPLE_NS, 100 * SAMPLE_NS)])
def test_looks_take_a_small_share_of_a_processor(look_ns: int, again_ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look is due so much later as the last one was dear."""
    spent = itertools.count(step=look_ns)
    with PoolTable.create(budget_bytes=4 * MIB, region_bytes=MIB, use_claims=False, self_admit=False) as table:
        manager = PoolManager(table, [], policy_named("serial"))
        manager.join(
            m.Hello(version=m.PROTOCOL_VERSION, name="a", pid=7, framework="torch"), process=NOT_SEEN, pidfd=None
        )
        now_ns = time.monotonic_ns()
        manager.act(now_ns)
        monkeypatch.setattr("zico.broker.pool_manager.time.thread_time_ns", lambda: next(spent))
        manager.status(now_ns)
        assert manager.due_ns == now_ns + again_ns


@pytest.mark.parametrize("peak", [2, 5])
@pytest.mark.parametrize("share", [0, 3])
def test_who_holds_a_share_or_is_larger_than_the_budget_saves(
    share: int, peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record says so, which lets it evict at its boundaries; else it waits as one that does not save."""
    hello = m.Hello(version=m.PROTOCOL_VERSION, name="a", pid=7, framework="torch", save="auto")
    with PoolTable.create(budget_bytes=4 * MIB, region_bytes=MIB, use_claims=False, self_admit=False) as table:
        manager = PoolManager(table, [], policy_named("serial"))
        record = table.jobs[manager.join(hello, process=NOT_SEEN, pidfd=None).job]
        monkeypatch.setattr(SavingTrial, "limits_for", lambda _trial, view: {job.job: share for job in view.jobs})
        manager._evaluate(time.monotonic_ns())
        assert (record["auto"], record["limit"]) == (Auto.SAVES, 0), "it has not said yet that it can save"
        set_fields(record, save=SaveMode.SWAP, wanted=peak)
        manager._evaluate(time.monotonic_ns())
        assert (record["auto"], record["limit"]) == (Auto.SAVES if share or peak > 4 else Auto.WAITS, share)


# -- admission -------------------------------------------------------------------------------------


@dataclasses.dataclass
class FakeTable:
    """Notes what admission does; starts only the jobs that claims allow."""

    safe: set[int]
    admitted: list[int] = dataclasses.field(default_factory=list)
    waits: dict[int, int] = dataclasses.field(default_factory=dict)

    def admit(self, job: int) -> bool:
        """Start the job if claims allow."""
        if job in self.safe:
            self.admitted.append(job)
        return job in self.safe

    def set_waits_for(self, job: int, mask: int) -> None:
        """Note whom it waits for."""
        self.waits[job] = mask


@dataclasses.dataclass(frozen=True)
class FixedPolicy:
    """Answers what it was told to."""

    answers: dict[int, Decision]
    name: str = "fixed"
    use_claims: bool = True
    self_admit: bool = True

    def decide(self, pool: PoolView) -> dict[int, Decision]:
        """Return the fixed answers."""
        del pool
        return self.answers


def decided(table: FakeTable, *, stale_mask: int = 0, **answers: Decision) -> int | None:
    """Carry out these answers for jobs j0, j1, ... at time 100 with all three holding memory."""
    header, jobs = empty_table()
    for job in range(3):
        set_fields(jobs[job], state=JobState.BOUNDARY, held=1, waits_for=stale_mask)
    policy = FixedPolicy({int(name[1:]): answer for name, answer in answers.items()})
    return admit_all(table, policy, pool_view(header, jobs, 100, ProfileCache()), jobs)


def test_jobs_start_when_policy_and_claims_agree() -> None:
    """A started job is admitted in the table, and with nobody waiting there is nothing to look at again."""
    table = FakeTable(safe={0, 1})
    assert decided(table, j0=Start(), j1=Start()) is None
    assert (table.admitted, table.waits) == ([0, 1], {})


def test_a_start_that_claims_refuse_waits_for_all_holders_and_is_tried_again() -> None:
    """Where the table says unsafe, the job stays, says for whom, and is retried soon."""
    table = FakeTable(safe={1})
    assert decided(table, j0=Start(), j1=Start()) == 100 + RETRY_NS
    assert (table.admitted, table.waits) == ([1], {0: 0b110})


def test_a_wait_says_for_whom_and_ends_at_its_time() -> None:
    """The mask is the policy's; the next look is the earliest time of all, and never later than the recheck."""
    table = FakeTable(safe=set())
    soon = Wait(for_jobs=(1, 2), until_ns=150, reason="peak")
    never = Wait(for_jobs=(2,), until_ns=None, reason="event")
    assert decided(table, j0=soon, j1=never) == 150
    assert table.waits == {0: 0b110, 1: 0b100}
    assert decided(table, j1=never) == 100 + RECHECK_NS


def test_an_unchanged_wait_is_not_written_again() -> None:
    """The table is only written where whom a job waits for has changed."""
    table = FakeTable(safe=set())
    decided(table, stale_mask=0b100, j1=Wait(for_jobs=(2,), until_ns=None, reason="event"))
    assert table.waits == {}
