"""Jobs of a pool that isolates them, on the host device: nobody finds what another left, nobody reaches it."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.heap_machine import HeapMachine
from cpu.support.isolated import N_REGIONS, REGION_BYTES, IsolatedTenant, Refusing, bytes_found, fill, isolated, take
from cpu.support.members import acquire, check_counters, free_list, is_mapped, job_of, owners
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from zico.heap import allocator

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_S = 120.0


class IsolatedHeapMachine(HeapMachine):
    """The heap's machine in a pool that isolates jobs; they die, too."""

    jobs = staticmethod(isolated)

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Invariants 5 and 11: a job dies, and another comes in its place; nobody finds anything of it."""
        which = data.draw(st.integers(0, 5)) % len(self.tenants)
        dead = self.tenants[which]
        assert isinstance(dead, IsolatedTenant)
        dead.die()
        heir = self.stack.enter_context(IsolatedTenant(dead.member, wait_limit_s=0.002))
        heir.record[0]["optimizer"]["limit"] = self.n
        self.tenants[which] = heir

    @invariant()
    def maps_only_what_is_used(self) -> None:
        """Invariant 11: a slot without a live block is not mapped."""
        for tenant in getattr(self, "tenants", []):
            tenant.check_mappings()


IsolatedHeapMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestIsolatedHeap = IsolatedHeapMachine.TestCase


@pytest.fixture
def pair() -> Iterator[list[IsolatedTenant]]:
    """Make two jobs in a pool of sixteen regions of 64 KiB that isolates them."""
    with isolated(N_REGIONS, 2, claims=False) as made:
        yield made  # type: ignore[misc]


def test_what_a_job_frees_is_zeros_to_the_next_one(pair: list[IsolatedTenant]) -> None:
    """Invariant 11: a job that gets what another has freed finds zeros, in every byte."""
    a, b = pair
    allocator.free(a.record[0], fill(a, 0xAA))
    assert bytes_found(b) == {0}


def test_what_a_job_frees_is_out_of_its_reach(pair: list[IsolatedTenant]) -> None:
    """Invariant 11: freed memory is unmapped where no live tensor shares the region, before another can have it."""
    a, b = pair
    address = fill(a, 0xAA)
    assert is_mapped(address)
    allocator.free(a.record[0], address)
    assert not any(is_mapped(address + n * REGION_BYTES) for n in range(N_REGIONS))
    theirs = fill(b, 0xBB)
    assert not is_mapped(address)
    assert is_mapped(theirs)


STRAY = """
import ctypes
from cpu.support import members
with members.make_pool(4, region_bytes=1 << 16, isolate={isolate}) as pool, members.Tenant(pool) as job:
    address = job.allocate(1 << 16)
    job.free(address)
    ctypes.string_at(address, 1)
"""


@pytest.mark.parametrize("isolate", [True, False])
def test_a_stray_access_to_freed_memory_is_a_fault(*, isolate: bool) -> None:
    """Invariant 11: a process that reads what it has freed dies of SIGSEGV; without isolation it would read on."""
    code = STRAY.format(isolate=isolate)
    here = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], cwd=here, timeout=DEADLINE_S, capture_output=True, check=False)
    assert done.returncode == (-signal.SIGSEGV if isolate else 0), done.stderr


def test_nobody_finds_what_a_dead_job_held(pair: list[IsolatedTenant]) -> None:
    """Invariants 5 and 11: a job dies holding everything; the next one to have it finds zeros."""
    a, b = pair
    fill(a, 0xAA)
    a.die()
    assert bytes_found(b) == {0}


def test_who_had_a_region_before_the_dead_does_not_find_what_they_left(pair: list[IsolatedTenant]) -> None:
    """Invariant 11: A's region goes to B, B dies with it, and A finds nothing of B's, though it was A's before."""
    a, b = pair
    allocator.free(a.record[0], fill(a, 0xAA))
    fill(b, 0xBB)
    b.die()
    assert bytes_found(a) == {0}


def test_a_job_in_a_dead_ones_place_does_not_find_what_they_freed(pair: list[IsolatedTenant]) -> None:
    """Invariant 11: a job gets the number of a dead one, and is another job all the same."""
    a, _ = pair
    place = job_of(a.member)
    allocator.free(a.record[0], fill(a, 0xAA))
    a.die()
    with IsolatedTenant(a.member) as heir:
        assert job_of(heir.member) == place
        assert bytes_found(heir) == {0}


def test_a_death_between_grant_and_scrubbing_leaves_nothing_readable(pair: list[IsolatedTenant]) -> None:
    """Invariants 5 and 11: a job dies between the grant and the scrubbing; the region is scrubbed by the next owner."""
    a, b = pair
    allocator.free(a.record[0], fill(a, 0xAA, 1))
    region = int(np.flatnonzero(a.member.regions["last_owner"] == job_of(a.member))[0])
    assert acquire(b.member, [region])[1] == [region]
    b.die()
    with IsolatedTenant(a.member) as heir:
        assert bytes_found(heir) == {0}
    check_counters(a.member)


def test_what_comes_back_to_its_job_is_not_scrubbed(pair: list[IsolatedTenant]) -> None:
    """A job that gets a region back that nobody else has had finds its own bytes, at the same place."""
    a, b = pair
    address = fill(a, 0xAA, 4)
    assert a.record[0]["scrubbing"]["scrubs"] == 0, "nobody has had them"
    allocator.free(a.record[0], address)
    allocator.free(b.record[0], fill(b, 0xBB, 4))
    address = fill(a, 0xAA, 4)
    assert a.record[0]["scrubbing"]["scrubs"] == 4
    allocator.free(a.record[0], address)
    for _ in range(3):
        again = take(a, 4)
        assert again == address
        assert set(ctypes.string_at(again, 4 * REGION_BYTES)) == {0xAA}
        allocator.free(a.record[0], again)
    assert a.record[0]["scrubbing"]["scrubs"] == 4


def test_scrubbing_gives_the_memory_back(pair: list[IsolatedTenant]) -> None:
    """Invariant 9: what is scrubbed is not resident any more until it is touched, by the kernel's account."""
    a, b = pair
    allocator.free(a.record[0], fill(a, 0xAA))
    assert a.member.physical_bytes() == N_REGIONS * REGION_BYTES
    address = take(b)
    assert b.member.physical_bytes() == 0
    ctypes.memset(address, 1, 1)
    assert 0 < b.member.physical_bytes() <= REGION_BYTES


def test_a_block_beside_a_freed_one_stays(pair: list[IsolatedTenant]) -> None:
    """Invariant 4: a slot in which another block lives keeps its region and its mapping."""
    a, _ = pair
    first, second = a.allocate(REGION_BYTES + 64), a.allocate(REGION_BYTES)
    a.free(first)
    assert not is_mapped(first)
    assert is_mapped(second - 64), "the border lies in the slot of the second block"
    a.check(second)
    a.free(second)


@pytest.mark.parametrize("call", range(1, 5))
@pytest.mark.parametrize("name", ["mmap", "fallocate"])
def test_a_refused_grant_leaves_nothing_mapped_and_nothing_readable(
    pair: list[IsolatedTenant], name: str, call: int
) -> None:
    """Invariant 11: whichever call of a grant fails, nothing of it is held or mapped, and what was left is not read."""
    a, b = pair
    allocator.free(a.record[0], fill(a, 0xAA))
    with Refusing(b, name, lambda number: number >= call):
        assert allocator.allocate(b.record[0], 4 * REGION_BYTES, 64) < 0
    assert b.job["held"] == 0
    assert len(free_list(b.member)) == N_REGIONS
    b.check_mappings()
    check_counters(b.member)
    assert bytes_found(b) == {0}
    assert bytes_found(a) == {0}


def test_a_region_that_is_not_unmapped_stays_the_jobs(pair: list[IsolatedTenant]) -> None:
    """Invariant 11: where the kernel refuses to unmap, nobody else gets the region, and everything else goes on."""
    a, b = pair
    address = fill(a, 0xAA, 3)
    with Refusing(a, "mmap", lambda number: number == 2, unmaps=True):
        allocator.free(a.record[0], address)
    assert [is_mapped(address + n * REGION_BYTES) for n in range(3)] == [False, True, False]
    assert a.job["held"] == owners(a.member).count(job_of(a.member)) == 1
    assert bytes_found(b, N_REGIONS - 1) == {0}
    assert bytes_found(a, 3) <= {0, 0xAA}
    check_counters(a.member)
