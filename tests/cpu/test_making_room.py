"""A job that is in its own way asks for room, waits as long as something leaves, and no longer."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import TYPE_CHECKING

import pytest
from cpu.support.members import tenants
from cpu.support.threads import DEADLINE_S, in_thread, until

from zico.heap.layout import GRANULE_BYTES
from zico.swap.joining import HeapGauge
from zico.swap.mover import Figures

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cpu.support.members import Tenant

LONGER_THAN_A_STANDSTILL_S = 0.5


@contextlib.contextmanager
def asked(tenant: Tenant) -> Iterator[int]:
    """Be there to be asked; gives the descriptor that is written to."""
    descriptor = os.eventfd(0, os.EFD_CLOEXEC)
    tenant.record[0]["swap"]["fd"] = descriptor
    try:
        yield descriptor
    finally:
        tenant.record[0]["swap"]["fd"] = -1
        tenant.record[0]["swap"]["leaving_bytes"] = 0
        tenant.record[0]["swap"]["answered"] = tenant.record[0]["swap"]["asked"]
        until(lambda: tenant.job["waiting_threads"] == 0)  # before the pool goes, also where a test has failed
        os.close(descriptor)


def await_question(tenant: Tenant, descriptor: int) -> int:
    """Return the number of a question that has come."""
    poll = select.poll()  # takes descriptors of any number, as ``select`` does not
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(DEADLINE_S * 1000), "nobody asks"
    os.eventfd_read(descriptor)
    return int(tenant.record[0]["swap"]["asked"])


def begin_to_wait(tenant: Tenant, limit: int, wanted: int) -> threading.Thread:
    """Let a job that may hold less than it wants ask for more."""
    tenant.member.set_limit(0, limit)
    return in_thread(lambda: tenant.allocate(wanted * GRANULE_BYTES))


def test_a_job_at_its_limit_gets_what_leaves() -> None:
    """It asks once, waits beyond what counts as a standstill while bytes leave, and goes on in the pool."""
    with tenants(8, 1, wait_limit_s=DEADLINE_S) as (a,), asked(a) as descriptor:
        block = a.allocate(3 * GRANULE_BYTES)
        thread = begin_to_wait(a, 4, 2)
        number = await_question(a, descriptor)
        a.record[0]["swap"]["leaving_bytes"] = 3 * GRANULE_BYTES
        a.record[0]["swap"]["answered"] = number
        thread.join(LONGER_THAN_A_STANDSTILL_S)
        assert thread.is_alive(), "it waits for what leaves"
        a.free(block)
        a.record[0]["swap"]["leaving_bytes"] = 0
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        (address,) = a.live
        assert not a.is_spilled(address)
        assert a.record[0]["swap"]["asked"] == 1
        a.free_all()


def test_an_answer_by_which_nothing_leaves_ends_the_wait() -> None:
    """Invariant 7: it goes to the next tier as without anybody to ask."""
    with tenants(8, 1, wait_limit_s=DEADLINE_S) as (a,), asked(a) as descriptor:
        a.allocate(3 * GRANULE_BYTES)
        thread = begin_to_wait(a, 4, 2)
        a.record[0]["swap"]["answered"] = await_question(a, descriptor)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert [a.is_spilled(address) for address in sorted(a.live)] == [False, True]
        assert a.record[0]["swap"]["asked"] == 1, "the pool is as it was, so there is nothing to ask again"
        a.free_all()


def test_it_asks_again_when_what_left_was_not_enough() -> None:
    """Each change of the pool is worth a question."""
    with tenants(8, 1, wait_limit_s=DEADLINE_S) as (a,), asked(a) as descriptor:
        blocks = [a.allocate(GRANULE_BYTES) for _ in range(4)]
        thread = begin_to_wait(a, 4, 2)
        number = await_question(a, descriptor)
        a.record[0]["swap"]["leaving_bytes"] = GRANULE_BYTES
        a.record[0]["swap"]["answered"] = number
        a.free(blocks[0])
        a.record[0]["swap"]["leaving_bytes"] = 0
        again = await_question(a, descriptor)
        assert again == 2
        a.free(blocks[1])
        a.record[0]["swap"]["answered"] = again
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert not any(a.is_spilled(address) for address in a.live)
        a.free_all()


def test_it_asks_again_when_a_tensor_has_arrived() -> None:
    """What has come back, or was kept by the tier, changes neither pool nor heap, and may now leave."""
    with tenants(8, 1, wait_limit_s=DEADLINE_S) as (a,), asked(a) as descriptor:
        block = a.allocate(3 * GRANULE_BYTES)
        thread = begin_to_wait(a, 4, 2)
        number = await_question(a, descriptor)
        a.record[0]["swap"]["leaving_bytes"] = GRANULE_BYTES
        a.record[0]["swap"]["answered"] = number
        HeapGauge(a.heap).publish(Figures())
        assert await_question(a, descriptor) == 2
        a.free(block)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        a.free_all()


def test_it_asks_again_when_what_left_emptied_no_region() -> None:
    """What comes free inside a region changes nothing in the pool, and is worth a question all the same."""
    with tenants(8, 1, region_bytes=2 * GRANULE_BYTES, wait_limit_s=DEADLINE_S) as (a,), asked(a) as descriptor:
        blocks = [a.allocate(GRANULE_BYTES) for _ in range(4)]
        thread = begin_to_wait(a, 2, 2)
        number = await_question(a, descriptor)
        sequence = int(a.member.header["sequence"])
        a.record[0]["swap"]["leaving_bytes"] = GRANULE_BYTES
        a.record[0]["swap"]["answered"] = number
        a.free(blocks[0])
        assert a.member.header["sequence"] == sequence
        a.record[0]["swap"]["leaving_bytes"] = 0
        again = await_question(a, descriptor)
        a.free(blocks[1])
        a.record[0]["swap"]["answered"] = again
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert not any(a.is_spilled(address) for address in a.live)
        a.free_all()


@pytest.mark.parametrize("is_heard", [False, True])
def test_who_may_hold_no_more_goes_wherever_there_is_room(is_heard: bool) -> None:  # noqa: FBT001 - cases
    """A small tensor that has an arena of its own goes into another arena's hole, if the job is one that swaps."""
    with tenants(8, 1, region_bytes=8 * GRANULE_BYTES) as (a,), contextlib.ExitStack() as stack:
        if is_heard:
            stack.enter_context(asked(a))
        a.member.set_limit(0, 1)
        a.allocate(6 * GRANULE_BYTES)
        small = a.allocate(GRANULE_BYTES)
        assert a.is_spilled(small) != is_heard
        assert a.job["held"] == 1
        assert a.record[0]["swap"]["asked"] == 0
        a.check_structure()
        a.free_all()


def test_nobody_who_answers_is_waited_for_until_the_deadline_only() -> None:
    """Invariant 7: whoever was asked and never answers costs the wait limit."""
    with tenants(8, 1, wait_limit_s=LONGER_THAN_A_STANDSTILL_S) as (a,), asked(a):
        a.allocate(3 * GRANULE_BYTES)
        began_s = time.monotonic()
        thread = begin_to_wait(a, 4, 2)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert time.monotonic() - began_s >= LONGER_THAN_A_STANDSTILL_S
        assert sum(a.is_spilled(address) for address in a.live) == 1
        a.free_all()


@pytest.mark.parametrize("answered", [False, True])
def test_what_exceeds_the_whole_budget_is_refused_only_where_nobody_answers(answered: bool) -> None:  # noqa: FBT001 - cases
    """A job alone in a pool that is too small for it waits while something leaves, and is refused otherwise."""
    with tenants(4, 1, wait_limit_s=DEADLINE_S) as (a,), asked(a) as descriptor:
        block = a.allocate(3 * GRANULE_BYTES)
        thread = in_thread(lambda: a.allocate(2 * GRANULE_BYTES))
        number = await_question(a, descriptor)
        if answered:
            a.record[0]["swap"]["leaving_bytes"] = 3 * GRANULE_BYTES
        a.record[0]["swap"]["answered"] = number
        if answered:
            thread.join(LONGER_THAN_A_STANDSTILL_S)
            assert thread.is_alive()
            a.free(block)
            a.record[0]["swap"]["leaving_bytes"] = 0
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert int(a.job["oom_count"]) == int(not answered)
        a.free_all()


def test_who_waits_for_another_job_does_not_ask() -> None:
    """What a neighbour holds comes back by itself; the job's own tensors stay where they are."""
    with tenants(8, 2, claims=False, wait_limit_s=DEADLINE_S) as (a, b), asked(b):
        block = a.allocate(8 * GRANULE_BYTES)
        thread = in_thread(lambda: b.allocate(2 * GRANULE_BYTES))
        until(lambda: b.job["waiting_threads"] == 1)
        a.free(block)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert b.record[0]["swap"]["asked"] == 0
        b.free_all()


def test_a_thread_that_allocates_for_later_neither_asks_nor_overflows() -> None:
    """It waits beyond what counts as a standstill; when somebody needs what it brings, it asks like any other."""
    with tenants(8, 1, wait_limit_s=DEADLINE_S) as (a,), asked(a) as descriptor:
        block = a.allocate(3 * GRANULE_BYTES)
        a.member.set_limit(0, 4)

        def allocate_for_later() -> None:
            a.record[0]["swap"]["patient_thread"] = threading.get_ident()
            a.allocate(2 * GRANULE_BYTES)

        thread = in_thread(allocate_for_later)
        thread.join(LONGER_THAN_A_STANDSTILL_S)
        assert thread.is_alive()
        assert a.record[0]["swap"]["asked"] == 0
        a.record[0]["swap"]["patient_thread"] = 0
        await_question(a, descriptor)
        a.free(block)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert not any(a.is_spilled(address) for address in a.live)
        a.free_all()
