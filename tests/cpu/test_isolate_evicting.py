"""Eviction in a pool that isolates jobs: contents and addresses stay, and nobody finds what another has left."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest
from cpu.support.evicting_parts import evict, take_back
from cpu.support.isolated import N_REGIONS, REGION_BYTES, IsolatedTenant, Refusing, bytes_found, fill, isolated
from cpu.support.members import check_counters, is_mapped

from zico.base.libc import libc_address
from zico.heap import allocator
from zico.pool.layout import NO_MORE

if TYPE_CHECKING:
    from collections.abc import Iterator

EVICTED = 6


@pytest.fixture
def pair() -> Iterator[list[IsolatedTenant]]:
    """Make two jobs in a pool of sixteen regions of 64 KiB that isolates them."""
    with isolated(N_REGIONS, 2, claims=False) as made:
        yield made  # type: ignore[misc]


def bytes_at(address: int, n_regions: int = EVICTED) -> set[int]:
    """Return which bytes are there."""
    return set(ctypes.string_at(address, n_regions * REGION_BYTES))


def test_what_is_evicted_is_zeros_to_others_and_stays_as_it_was(pair: list[IsolatedTenant]) -> None:
    """Invariants 4 and 11: the regions' next owner finds zeros, and what it writes is never seen where they were."""
    a, b = pair
    address = fill(a, 0xAA, EVICTED)
    for _ in range(3):
        assert evict(a, EVICTED) == 0
        assert (a.job["held"], a.job["evicted"]) == (0, EVICTED)
        theirs = fill(b, 0xBB)
        assert bytes_at(address) == {0xAA}
        allocator.free(b.record[0], theirs)
        assert take_back(a)
        assert bytes_at(address) == {0xAA}
        assert bytes_found(b, N_REGIONS - EVICTED) <= {0, 0xBB}, "those that came back have nothing of theirs"
    allocator.free(a.record[0], address)
    assert bytes_found(b) <= {0, 0xBB}
    assert bytes_found(a) == {0}
    check_counters(a.member)


@pytest.mark.parametrize("back", [0, EVICTED])
def test_what_was_evicted_and_is_freed_is_out_of_reach(pair: list[IsolatedTenant], back: int) -> None:
    """Invariant 11: freed while it is evicted, or after it came back, memory is unmapped; others find zeros."""
    a, b = pair
    address = fill(a, 0xAA, EVICTED)
    assert evict(a, EVICTED) == 0
    if back:
        assert take_back(a)
    assert a.job["held"] == back
    allocator.free(a.record[0], address)
    assert not any(is_mapped(address + n * REGION_BYTES) for n in range(EVICTED))
    assert (a.job["held"], a.job["evicted"]) == (0, 0)
    a.check_mappings()
    assert bytes_found(b) == {0}


def test_nobody_finds_what_a_dead_job_had_evicted(pair: list[IsolatedTenant]) -> None:
    """Invariants 5 and 11: a job dies with memory evicted; what its regions held before is gone, too."""
    a, b = pair
    fill(a, 0xAA, EVICTED)
    assert evict(a, EVICTED - 2) == 0
    a.die()
    assert bytes_found(b) == {0}
    check_counters(b.member)


@pytest.mark.parametrize("refused", [1, 2])
def test_pages_that_still_depend_on_a_region_keep_it(pair: list[IsolatedTenant], refused: int) -> None:
    """Invariant 11: a region that the kernel neither copies nor unmaps stays the job's: nobody writes what it reads."""
    a, b = pair
    address = fill(a, 0xAA, 1)
    copies = int(a.heap.device[0]["madvise"])
    a.heap.device[0]["madvise"] = libc_address("getpid")
    assert evict(a, 1) == NO_MORE
    a.heap.device[0]["madvise"] = copies
    with Refusing(a, "mmap", lambda number: number <= refused, unmaps=True):
        allocator.free(a.record[0], address)
    stays = refused > 1
    assert (is_mapped(address), int(a.job["held"])) == (stays, int(stays))
    fill(b, 0xBB, N_REGIONS - int(stays))
    assert not stays or bytes_at(address, 1) == {0xAA}
    check_counters(a.member)
