"""What an optimizer keeps leaves between steps where memory is short, and is back before the next step."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import TYPE_CHECKING

import pytest
from cpu.support.evicting_parts import Writers
from cpu.support.members import PAGE_BYTES, Tenant, check_counters, tenants
from cpu.support.threads import DEADLINE_S, in_thread, until

from zico.heap import state_offload
from zico.heap.layout import GRANULE_BYTES, Attached
from zico.swap.schedule import LEAD_NS
from zico.swap.state_return import Lead

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 64
MS = 1_000_000


@contextlib.contextmanager
def apart(tenant: Tenant) -> Iterator[None]:
    """Let what this thread allocates lie where it can leave from."""
    tenant.record[0]["optimizer"]["thread"] = threading.get_ident()
    yield
    tenant.record[0]["optimizer"]["thread"] = 0


def state(tenant: Tenant, n: int, *, most: int = MOST) -> int:
    """Let an optimizer allocate ``n`` regions in its first step; returns where."""
    tenant.record[0]["optimizer"]["limit"] = most
    state_offload.begin_step(tenant.record[0])
    with apart(tenant):
        address = tenant.allocate(n * GRANULE_BYTES)
    state_offload.end_step(tenant.record[0])
    return address


def figures(tenant: Tenant, *names: str) -> list[int]:
    """Return figures of the heap."""
    return [int(tenant.record[0]["optimizer"][name]) for name in names]


def test_it_leaves_when_memory_is_short_and_is_back_before_the_step() -> None:
    """Invariants 4 and 9: a tensor that finds no room gets what it lacks; before the step it is the state's again."""
    with tenants(8, 1) as (a,):
        kept = state(a, 4)
        small = a.allocate(3 * GRANULE_BYTES)
        assert figures(a, "in_use", "away") == [4, 0], "there is room"
        large = a.allocate(3 * GRANULE_BYTES)
        assert not a.is_spilled(large)
        assert (a.job["held"], *figures(a, "away")) == (8, 2), "what it lacks and no more"
        a.check(kept)
        a.check_structure()
        a.free(large)
        a.free(small)
        state_offload.begin_step(a.record[0])
        assert (a.job["held"], *figures(a, "away", "left", "returned", "late")) == (4, 0, 2, 2, 1)
        assert a.job["spilled_bytes"] == a.job["evictions"] == 0
        a.check(kept)
        a.check_structure()
        a.free_all()
        check_counters(a.member)


def test_what_is_away_has_memory_once() -> None:
    """Invariants 1 and 9: by the kernel what is back has its own pages, and the pool none for them."""
    with tenants(8, 1) as (a,):
        kept = state(a, 4)
        large = a.allocate(8 * GRANULE_BYTES)
        a.free(large)
        resident = a.member.physical_bytes()
        state_offload.begin_step(a.record[0])
        assert a.member.physical_bytes() <= resident - 4 * PAGE_BYTES
        a.check(kept)
        a.free(kept)


def test_nothing_leaves_in_a_step_nor_beyond_what_tiers_have() -> None:
    """During a step the state stays; between steps no more of it goes than there is room for; the rest spills."""
    with tenants(16, 1) as (a,):
        a.member.set_limit(0, 8)
        state(a, 4, most=2)
        state_offload.begin_step(a.record[0])
        during = a.allocate(5 * GRANULE_BYTES)
        assert a.is_spilled(during)
        a.free(during)
        state_offload.end_step(a.record[0])
        assert not a.is_spilled(a.allocate(6 * GRANULE_BYTES))
        assert figures(a, "away") == [2]
        assert a.is_spilled(a.allocate(GRANULE_BYTES))
        a.free_all()


def test_what_has_no_room_in_a_step_stays_out_and_is_counted() -> None:
    """Invariant 7: a step that has too little memory goes on at once, with the excess reported as overflowed."""
    with tenants(8, 1, wait_limit_s=DEADLINE_S) as (a,):
        kept = state(a, 4)
        a.allocate(6 * GRANULE_BYTES)
        state_offload.begin_step(a.record[0])
        assert (a.job["held"], *figures(a, "away", "returned", "late")) == (8, 2, 0, 1)
        assert a.job["spilled_bytes"] == 2 * GRANULE_BYTES
        a.check(kept)
        a.free_all()


def test_a_step_waits_for_what_others_hold() -> None:
    """A step whose memory others have waits until it is free; that is counted, and what comes is back."""
    with tenants(8, 2, claims=False, wait_limit_s=DEADLINE_S) as (a, b):
        kept = state(a, 4)
        a.free(a.allocate(8 * GRANULE_BYTES))
        theirs = b.allocate(6 * GRANULE_BYTES)
        thread = in_thread(lambda: state_offload.begin_step(a.record[0]))
        until(lambda: a.job["waiting_threads"] > 0)
        b.free(theirs)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert (a.job["held"], *figures(a, "away", "late")) == (4, 0, 1)
        a.check(kept)
        a.free_all()


def test_what_does_not_come_back_is_away_again() -> None:
    """Invariant 7: others keep the memory for longer than a job waits; the step goes on, and all is as before."""
    with tenants(8, 2, claims=False) as (a, b):
        kept = state(a, 4)
        a.free(a.allocate(8 * GRANULE_BYTES))
        theirs = b.allocate(6 * GRANULE_BYTES)
        state_offload.begin_step(a.record[0])
        assert (a.job["evicted"], *figures(a, "away", "late")) == (4, 0, 1)
        state_offload.end_step(a.record[0])
        assert (a.job["evicted"], *figures(a, "away")) == (0, 4)
        a.check_structure()
        b.free(theirs)
        state_offload.begin_step(a.record[0])
        assert a.job["held"] == 4
        a.check(kept)
        a.free_all()


def test_what_has_room_comes_back_ahead_of_the_step() -> None:
    """Between steps as much comes back as there is room for, and goes again for what has none; the step is in time."""
    with tenants(8, 1) as (a,):
        kept = state(a, 4)
        large = a.allocate(8 * GRANULE_BYTES)
        assert (state_offload.return_ahead(a.record[0]), *figures(a, "away")) == (0, 4)
        a.free(large)
        small = a.allocate(5 * GRANULE_BYTES)
        assert (state_offload.return_ahead(a.record[0]), *figures(a, "away", "returned")) == (3, 1, 3)
        assert a.job["held"] == 8
        again = a.allocate(2 * GRANULE_BYTES)
        assert (a.job["held"], *figures(a, "away")) == (8, 3)
        a.free(again)
        a.free(small)
        assert state_offload.return_ahead(a.record[0]) == 3
        state_offload.begin_step(a.record[0])
        assert (a.job["held"], *figures(a, "away", "late")) == (4, 0, 0)
        assert state_offload.return_ahead(a.record[0]) == 0
        a.check(kept)
        a.free_all()


def test_what_others_hold_does_not_come_back_ahead_of_the_step() -> None:
    """Without room in the pool nothing changes, and nobody waits."""
    with tenants(8, 2, claims=False) as (a, b):
        kept = state(a, 4)
        a.free(a.allocate(8 * GRANULE_BYTES))
        theirs = b.allocate(6 * GRANULE_BYTES)
        waited_ns = int(a.job["need_waited_ns"])
        assert (state_offload.return_ahead(a.record[0]), *figures(a, "away", "lacking", "returned")) == (0, 4, 4, 0)
        assert (a.job["evicted"], a.job["need_waited_ns"]) == (0, waited_ns)
        b.free(theirs)
        assert (state_offload.return_ahead(a.record[0]), *figures(a, "lacking")) == (4, 0)
        a.check(kept)
        a.free_all()


def due_at(lead: Lead, begin_ms: int) -> int:
    """Let an iteration of 20 ms have an event in each; returns the first at which the state is to come back."""
    return [lead.is_due((begin_ms + at) * MS) for at in range(20)].index(True)


def test_a_lead_begins_earlier_when_something_was_late() -> None:
    """What came late by some time begins earlier by that and 5 % of it; what went again, later."""
    lead = Lead()
    assert [lead.is_due(at * MS) for at in range(20)] == [False] * 20, "nothing is known"
    lead.turn(20 * MS, 0, was_in_vain=False)
    assert due_at(lead, 100) == 20 - LEAD_NS // MS
    lead.turn(120 * MS, 8 * MS, was_in_vain=False)
    assert lead.lead_ns == LEAD_NS + 8.4 * MS
    assert due_at(lead, 200) == 6
    lead.turn(220 * MS, 8 * MS, was_in_vain=True)
    assert due_at(lead, 300) == 10
    lead.turn(320 * MS, 100 * MS, was_in_vain=False)
    assert due_at(lead, 400) == 0, "from the beginning at the earliest"
    lead.turn(420 * MS, 0, was_in_vain=False)
    lead.turn(421 * MS, 0, was_in_vain=False)
    assert due_at(lead, 500) == 0, "another optimizer's step changes nothing"


def test_a_job_that_nobody_else_can_help_lets_its_own_state_leave_first() -> None:
    """Two jobs that wait for one another's memory: one goes on by what it need not have, and nobody is asked."""
    with tenants(8, 2, claims=False, wait_limit_s=DEADLINE_S) as (a, b):
        state(a, 3)
        b.allocate(5 * GRANULE_BYTES)
        thread = in_thread(lambda: b.allocate(3 * GRANULE_BYTES))
        until(lambda: b.job["waiting_threads"] == 1)
        more = a.allocate(2 * GRANULE_BYTES)
        assert not a.is_spilled(more)
        assert figures(a, "away") == [2]
        assert a.job["evictions"] == b.job["evictions"] == 0
        wanted = int(a.job["current"]["held"].max())
        a.free_all()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert wanted == 5, "its profile has what it would hold if the other had left it that"
        b.free_all()


def test_a_state_that_dies_while_it_is_away_leaves_nothing() -> None:
    """Freed while it is away, it needs no region; and its slots are used as ever."""
    with tenants(8, 1) as (a,):
        kept = state(a, 4)
        large = a.allocate(7 * GRANULE_BYTES)
        a.free(kept)
        assert (a.job["held"], *figures(a, "away")) == (7, 0)
        a.free(large)
        state(a, 4)
        assert a.job["held"] == 4
        a.check_structure()
        a.free_all()
        check_counters(a.member)


def test_no_write_is_lost_while_it_is_away_and_comes_back() -> None:
    """Invariants 4 and 6: threads and the kernel write all the while; each word is what was last written there."""
    n = 4
    with tenants(2 * n, 1) as (a,):
        address = state(a, n)
        ctypes.memset(address, 0, n * GRANULE_BYTES)
        del a.live[address]
        writers = Writers(address, n * GRANULE_BYTES // PAGE_BYTES)
        for _ in range(20):
            other = a.allocate(2 * n * GRANULE_BYTES)
            assert figures(a, "away") == [n]
            a.free(other)
            state_offload.begin_step(a.record[0])
            assert figures(a, "away") == [0]
            state_offload.end_step(a.record[0])
        writers.stop()


@pytest.mark.parametrize("attached", [Attached.NO, Attached.FORKED])
def test_a_process_that_is_in_no_pool_lets_nothing_leave(attached: Attached) -> None:
    """Invariant 10: in a forked child, or before and after its life in the pool, steps change nothing."""
    with tenants(8, 1) as (a,):
        state(a, 4)
        a.allocate(6 * GRANULE_BYTES)
        a.record[0]["attached"] = attached
        state_offload.begin_step(a.record[0])
        state_offload.end_step(a.record[0])
        assert (a.job["held"], *figures(a, "away")) == (8, 2)
        a.free_all()
