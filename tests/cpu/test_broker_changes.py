"""What an observer may change, and what it is told otherwise."""

from __future__ import annotations

import ctypes
import os
import re
from typing import TYPE_CHECKING

import msgspec
import pytest
from cpu.support.members import acquire, check_counters, grab, join, make_pool, release

from zico.broker import changes
from zico.broker.members import Member
from zico.broker.notes import Process
from zico.broker.protocol import messages as m
from zico.pool.layout import NOBODY, SaveMode
from zico.pool.results import GRANTED, MUST_WAIT, NEVER_FITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.pool.table import PoolTable

PAGE = 4096
REGIONS = 8


@pytest.fixture
def pool() -> Iterator[PoolTable]:
    """Make a pool of eight regions without claims."""
    with make_pool(REGIONS, claims=False) as pool:
        yield pool


def member(job: int, name: str) -> Member:
    """Return a member with the default share."""
    process = Process(os.getpid(), 0)
    return Member(
        name=name, process=process, job=job, framework="torch", share=m.Share(), index=job, pid=process.pid, record=None
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (m.Change(budget_bytes=0), "a budget of 0 B is below one region of 4 KiB"),
        (m.Change(budget_bytes=9 * PAGE), "above the 32 KiB that this pool was made for.*--most"),
        (m.Change(weight=2.0), "of one job: name it"),
        (m.Change(job="c", weight=2.0), "no job is called 'c': there are a, b$"),
        (m.Change(job="a", limit_bytes=PAGE - 1), "a limit of 4.0 KiB is below one region"),
        (m.Change(paused=True), "or a pause is of one job: name it"),
        (m.Change(job="c", paused=True), "no job is called 'c': there are a, b"),
        (m.Change(job="a", paused=False), "^a is not paused$"),
        (m.Change(job="a", move=True), "only what a job keeps that is paused can be moved"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(pool: PoolTable, change: m.Change, reason: str) -> None:
    """Each fault has its sentence; what is not at fault has none."""
    members = [member(0, "a"), member(1, "b"), member(2, "b")]
    assert re.search(reason, changes.refusal(change, pool.header, pool.jobs, members))
    assert (
        changes.refusal(m.Change(budget_bytes=REGIONS * PAGE, job="b", slo=None), pool.header, pool.jobs, members) == ""
    )


def test_shares_that_contradict_each_other_are_refused(pool: PoolTable) -> None:
    """A guarantee below somebody of higher priority who is owed nothing could not be kept."""
    members = [member(0, "a"), member(1, "b")]
    changes.carry_out(m.Change(job="a", priority=1), pool, members)
    assert "guaranteed" in changes.refusal(m.Change(job="b", slo=0.1), pool.header, pool.jobs, members)
    assert changes.refusal(m.Change(job="b", slo=0.1, priority=1), pool.header, pool.jobs, members) == ""
    several = [member(0, "a"), msgspec.structs.replace(member(1, "b"), pid=7), member(2, "b")]
    changes.carry_out(m.Change(job="a", priority=1), pool, several)
    assert "guaranteed" in changes.refusal(m.Change(job="b", pid=7, slo=0.1), pool.header, pool.jobs, several)


def test_every_process_of_a_name_changes_and_what_is_left_out_stays(pool: PoolTable) -> None:
    """A change of one figure leaves the others, and jobs of other names, as they are."""
    members = [member(0, "a"), member(1, "b"), member(2, "b")]
    changes.carry_out(m.Change(job="b", weight=2.0, slo=0.1), pool, members)
    changes.carry_out(m.Change(job="b", priority=-4, slo=None, limit_bytes=3 * PAGE), pool, members)
    assert [one.share for one in members] == [m.Share(), *[m.Share(weight=2.0, priority=-4)] * 2]
    assert pool.jobs["limit"][:3].tolist() == [0, 3, 3]
    assert pool.header["budget_regions"] == REGIONS


def test_a_job_is_paused_once_and_told_to_move_once(pool: PoolTable) -> None:
    """A second time is refused, but moving can be asked for later; a job that is ending is told apart."""
    with join(pool), join(pool):
        members = [member(0, "a"), member(1, "b")]
        pause, move, resume = (
            m.Change(job="a", paused=p, move=w) for p, w in ((True, False), (True, True), (False, False))
        )

        def refused(change: m.Change) -> str:
            return changes.refusal(change, pool.header, pool.jobs, members)

        for change, again in ((pause, [pause]), (move, [pause, move]), (resume, [resume])):
            assert refused(change) == ""
            changes.carry_out(change, pool, members)
            assert all(refused(one) for one in again)
        assert "zico resume a" in (changes.carry_out(pause, pool, members) or refused(pause))
        pool.header["on_timeline"] = 1
        assert refused(move) == ""
        pool.jobs[0]["save"] = SaveMode.PAGE
        assert "pause it without --move" in refused(move)
        assert pool.jobs["paused"][:2].tolist() == [1, 0]
        members[0].leaving = True
        assert refused(resume) == "a is ending, and begins no iteration any more"


def test_a_job_is_paused_with_the_ranks_of_its_group(pool: PoolTable) -> None:
    """They begin iterations together."""
    with join(pool), join(pool), join(pool):
        pool.jobs["group"][:2] = 7
        changes.carry_out(m.Change(job="a", paused=True), pool, [member(i, "abc"[i]) for i in range(3)])
        assert pool.jobs["paused"][:3].tolist() == [1, 1, 0]


def test_one_process_of_a_name_is_meant_by_its_number(pool: PoolTable) -> None:
    """A limit is its own; a share and a pause are also for the ranks that begin iterations together with it."""
    with join(pool), join(pool), join(pool):
        members = [msgspec.structs.replace(member(place, "a"), pid=100 + place) for place in range(3)]

        def made(change: m.Change) -> int:
            assert changes.refusal(change, pool.header, pool.jobs, members) == ""
            changes.carry_out(change, pool, members)
            return changes.concerned(change, pool.jobs, members)

        assert made(m.Change(job="a", pid=101, limit_bytes=3 * PAGE, weight=2.0)) == 1
        assert made(m.Change(job="a", pid=101, paused=True)) == 1
        assert pool.jobs["limit"][:3].tolist() == [0, 3, 0]
        assert pool.jobs["paused"][:3].tolist() == [0, 1, 0]
        assert [one.share.weight for one in members] == [1.0, 2.0, 1.0]
        resume = m.Change(job="a", pid=100, paused=False)
        assert changes.refusal(resume, pool.header, pool.jobs, members) == "a/100 is not paused"
        pool.jobs["group"][1:3] = 7
        assert made(m.Change(job="a", pid=102, limit_bytes=2 * PAGE)) == 1
        assert made(m.Change(job="a", pid=102, priority=1)) == 2
        assert made(m.Change(job="a", pid=102, paused=True, move=True)) == 2
        assert pool.jobs["limit"][:3].tolist() == [0, 3, 2]
        assert [one.share.priority for one in members] == [0, 1, 1]
        assert made(m.Change(job="a", paused=False)) == made(m.Change(job="a", limit_bytes=0)) == 3
        assert changes.concerned(m.Change(budget_bytes=PAGE), pool.jobs, members) == 0
        unknown = changes.refusal(m.Change(job="a", pid=7, paused=True), pool.header, pool.jobs, members)
        assert unknown == "no process 7 of a is in the pool: zico status shows who is"


def test_a_lowered_budget_gives_memory_back_as_jobs_do(pool: PoolTable) -> None:
    """Invariant 1: pages of free regions go at once, those of held ones when they come back, none of a live tensor."""
    with join(pool) as first, join(pool) as second:
        mine, yours = grab(first, 4), grab(second, 4)
        window = pool.driver.reserve(REGIONS * PAGE)
        pool.driver.map(window, 0, pool.memory, 0, REGIONS * PAGE)
        (memory := _bytes_at(window.handle, REGIONS * PAGE))[:] = b"x" * REGIONS * PAGE
        release(second, [yours.pop(0)])
        changes.carry_out(m.Change(budget_bytes=4 * PAGE), pool, [])
        assert pool.physical_bytes() == 7 * PAGE
        release(second, [yours.pop()])
        assert acquire(first, [NOBODY])[0] == MUST_WAIT
        pool.settle()
        assert pool.physical_bytes() == 6 * PAGE
        release(second, yours)
        pool.settle()
        assert pool.physical_bytes() == 4 * PAGE
        assert all(memory[r * PAGE] == ord("x") for r in mine), "what is held stays"
        release(first, mine[:1])
        assert acquire(second, [NOBODY])[0] == GRANTED
        check_counters(pool)
        del memory
        window.close()


def test_what_was_promised_waits_and_what_never_was_is_refused(pool: PoolTable) -> None:
    """A request that no budget since the job joined allows is refused; one that a lowered budget excludes waits."""
    with join(pool) as member_before:
        changes.carry_out(m.Change(budget_bytes=2 * PAGE), pool, [])
        with join(pool) as member_after:
            assert acquire(member_before, [NOBODY] * 8)[0] == MUST_WAIT
            assert acquire(member_before, [NOBODY] * 9)[0] == NEVER_FITS
            assert acquire(member_after, [NOBODY] * 3)[0] == NEVER_FITS
            changes.carry_out(m.Change(budget_bytes=3 * PAGE), pool, [])
            assert acquire(member_after, [NOBODY] * 3)[0] == GRANTED


def _bytes_at(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
