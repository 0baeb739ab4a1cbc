"""Several members of one pool in one process: each has its own mapping of the table and its own member record."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from zico.heap import allocator, history
from zico.heap.build import Heap
from zico.heap.layout import GAP, HEAP, PLACE, PLAN_ENTRIES, PRIVATE, STATE_AWAY, Arena, Attached
from zico.pool import regions, results
from zico.pool.fences import VALUE_BITS
from zico.pool.layout import COUNTER_BYTES, MAX_JOBS, NO_PAGES, NOBODY, STREAMS
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

Record = Any
PAGE_BYTES = 4096
SLICE_NS = 1_000_000
"""A wait looks around every millisecond, so that what takes several slices takes no time in a test."""
EDGE_BYTES = 64
HOUR_NS = 3600 * 10**9
_libc = ctypes.CDLL(None)


def make_pool(
    n_regions: int,
    *,
    region_bytes: int = PAGE_BYTES,
    claims: bool = True,
    unasked: bool = True,
    isolate: bool = False,
) -> PoolTable:
    """Make a pool of ``n_regions`` regions; without ``unasked`` every iteration waits for ``admit``."""
    return PoolTable.create(
        budget_bytes=n_regions * region_bytes,
        region_bytes=region_bytes,
        use_claims=claims,
        self_admit=unasked,
        isolate=isolate,
    )


def join(pool: PoolTable, name: str = "job") -> PoolTable:
    """Join from this process as one more job."""
    job = pool.join(os.getpid(), name)
    copies = [os.dup(fd) for fd in (pool.memory_fd, pool.table_fd, pool.notify_fd)]
    member = PoolTable.join_pool(*copies, job)
    member.member[0]["slice"] = (0, SLICE_NS)
    return member


@contextlib.contextmanager
def joined(pool: PoolTable, n: int) -> Iterator[list[PoolTable]]:
    """Join ``n`` times."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(join(pool, f"job{i}")) for i in range(n)]


def job_of(member: PoolTable) -> int:
    """Return which job the member is."""
    return int(member.member[0]["job"])


def acquire(member: PoolTable, wanted: Sequence[int]) -> tuple[int, list[int]]:
    """Ask for as many regions as ``wanted`` names; returns the status and what was granted."""
    array = np.array(wanted, "i4")
    status = int(regions.acquire(member.member[0], array, len(wanted), regions.HOST_SLOT))
    return status, array.tolist() if status == results.GRANTED else []


def grab(member: PoolTable, n: int) -> list[int]:
    """Ask for ``n`` regions, which must be granted."""
    status, granted = acquire(member, [NOBODY] * n)
    assert status == results.GRANTED
    return granted


def release(member: PoolTable, given: Sequence[int]) -> None:
    """Return regions."""
    regions.release(member.member[0], np.array(given, "i4"), len(given))


def is_mapped(address: int) -> bool:
    """Tell whether this process could read a byte there: the kernel tries, and would say so."""
    written = _libc.write(_pipe()[1], ctypes.c_void_p(address), 1) == 1
    if written:
        os.read(_pipe()[0], 1)
    return written


@functools.cache
def _pipe() -> tuple[int, int]:
    return os.pipe()


def fence(job: int, slot: int, value: int) -> int:
    """Return the fence that is passed when a job's stream comes to the mark with that value."""
    return (job * STREAMS + slot) << VALUE_BITS | value


def issued(pool: PoolTable) -> Record:
    """View the last mark issued, by job and slot."""
    return _shared_words(pool, "issued_address", MAX_JOBS * STREAMS).reshape(MAX_JOBS, STREAMS)


def counters(pool: PoolTable) -> Record:
    """View the device's counters, by job and slot."""
    words = _shared_words(pool, "counters_address", MAX_JOBS * STREAMS * COUNTER_BYTES // 8)
    return words[:: COUNTER_BYTES // 8].reshape(MAX_JOBS, STREAMS)


def _shared_words(pool: PoolTable, field: str, count: int) -> Record:
    buffer = (ctypes.c_int64 * count).from_address(int(pool.member[0][field]))
    return np.frombuffer(buffer, np.int64)


def free_list(pool: PoolTable) -> list[int]:
    """Walk the free list in both directions and return it."""
    forward, backward = [], []
    r = int(pool.header["free_head"])
    while r != NOBODY and len(forward) <= len(pool.regions):
        forward.append(r)
        r = int(pool.regions[r]["next"])
    r = int(pool.header["free_tail"])
    while r != NOBODY and len(backward) <= len(pool.regions):
        backward.append(r)
        r = int(pool.regions[r]["previous"])
    assert forward == backward[::-1], "the list reads differently backwards"
    return forward


def bare_list(pool: PoolTable) -> list[int]:
    """Return the regions of the free list that have no pages."""
    return [r for r in free_list(pool) if pool.regions[r]["last_owner"] == NO_PAGES]


def give_profile(record: Record, levels: list[int], *, events_per_bin_shift: int = 0) -> None:
    """Let a job expect these levels in its iteration, one bin each."""
    n = len(levels)
    profile = record["profile"]
    profile["shift"], profile["n_bins"] = events_per_bin_shift, n
    profile["n_events"] = (n << events_per_bin_shift) - 1
    profile["duration_ns"] = HOUR_NS  # so that it never seems to stand still
    profile["held"][:n] = levels
    record["claims"][:n] = np.maximum.accumulate(levels[::-1])[::-1]
    record["claim_peak"] = max(levels)
    record["profiled"] = 1


def owners(pool: PoolTable) -> list[int]:
    """Return each region's owner."""
    return pool.regions["owner"].tolist()


def check_counters(pool: PoolTable) -> None:
    """Invariants 1 and 2: each region is in the free list, bare ones last, or counted for its one owner."""
    everyone = owners(pool)
    free = free_list(pool)
    assert sorted(free) == [r for r, owner in enumerate(everyone) if owner == NOBODY]
    bare = bare_list(pool)
    assert free[len(free) - len(bare) :] == bare
    assert pool.header["bare"] == len(bare)
    assert pool.header["bare_head"] == (bare[0] if bare else NOBODY)
    for job, record in enumerate(pool.jobs):
        assert record["held"] == everyone.count(job)
    assert pool.header["granted"] == sum(owner >= 0 for owner in everyone)
    assert pool.header["peak_granted"] >= pool.header["granted"]


class Tenant:
    """A member with a heap, whose blocks are filled with a pattern and checked before they are freed."""

    def __init__(self, pool: PoolTable, *, wait_limit_s: float = 0.02, name: str = "job") -> None:
        """Join and build the heap."""
        self.member = join(pool, name)
        self.record = np.zeros(1, HEAP)
        self.heap = Heap(self.member, self.record, wait_limit_s=wait_limit_s)
        self.record[0]["attached"] = Attached.YES
        self.live: dict[int, int] = {}

    @property
    def job(self) -> Record:
        """Return the record of the job."""
        return self.member.jobs[job_of(self.member)]

    @property
    def base(self) -> int:
        """Return where the window begins."""
        return int(self.record[0]["base"])

    def allocate(self, size_bytes: int, alignment: int = EDGE_BYTES) -> int:
        """Allocate; writes the pattern if that worked. Returns what the allocator did."""
        address = int(allocator.allocate(self.record[0], size_bytes, alignment))
        if address > 0:
            assert address not in self.live
            self.live[address] = size_bytes
            self.write(address)
        return address

    def write(self, address: int) -> None:
        """Write the pattern of a block that is new."""
        for place in self.places(address):
            words_at(place)[:] = _pattern(address, self.live[address], place)

    def check(self, address: int) -> None:
        """Compare a block with its pattern."""
        for place in self.places(address):
            assert (words_at(place) == _pattern(address, self.live[address], place)).all(), "somebody wrote here"

    def free(self, address: int) -> None:
        """Check a block's pattern and free it."""
        self.check(address)
        del self.live[address]
        allocator.free(self.record[0], address)

    def free_all(self) -> None:
        """Free every block."""
        for address in list(self.live):
            self.free(address)

    def mark(self) -> None:
        """End the iteration."""
        allocator.mark(self.record[0])

    def is_spilled(self, address: int) -> bool:
        """Tell whether a block lies in the next tier."""
        return address - self.base >= self.record[0]["spill_offset"]

    def places(self, address: int) -> list[int]:
        """Return where patterns lie in a block: its first and last bytes and the first of each region."""
        region_bytes = self.member.region_bytes
        last = address + self.live[address] - EDGE_BYTES
        first_edge = address - (address - self.base) % region_bytes + region_bytes
        return [address, last, *range(first_edge, last - EDGE_BYTES + 1, region_bytes)]

    def check_structure(self) -> None:
        """Compare slots, gaps and counters with the live blocks, the slow and obvious way."""
        shift = int(self.record[0]["region_shift"])
        touching: dict[int, int] = {}
        for address, size in self.live.items():
            offset = address - self.base
            assert 0 <= offset < offset + size <= self.record[0]["window_bytes"]
            for slot in range(offset >> shift, (offset + _rounded(size) - 1 >> shift) + 1):
                touching[slot] = touching.get(slot, 0) + 1
        live = self.heap.slots["live"]
        assert {int(s): int(live[s]) for s in np.flatnonzero(live)} == touching
        first_spilled = int(self.record[0]["spill_offset"]) >> shift
        pooled_slots = [slot for slot in touching if slot < first_spilled]
        backed = [slot for slot in pooled_slots if self.heap.slots["region"][slot] >= 0]
        away = [slot for slot in pooled_slots if self.heap.slots["region"][slot] == STATE_AWAY]
        assert self.record[0]["optimizer"]["away"] == len(away)
        assert self.job["evicted"] == len(pooled_slots) - len(backed) - len(away)
        mine = [r for r, owner in enumerate(owners(self.member)) if owner == job_of(self.member)]
        assert sorted(self.heap.slots["region"][backed]) == mine
        mapped, region = (self.heap.slots[field] for field in ("mapped", "region"))
        assert all(mapped[slot] in (region[slot], PRIVATE) for slot in pooled_slots)
        pooled = sum(_rounded(size) for address, size in self.live.items() if not self.is_spilled(address))
        assert self.job["live_bytes"] == pooled
        assert self.record[0]["spill"]["live_bytes"] == (len(touching) - len(pooled_slots)) << shift
        for arena in Arena:
            assert self.gaps(arena) == self._expected_gaps(arena)

    def follow(self, plan: dict[tuple[int, int], int]) -> None:
        """Put a plan in force: (rounded size, occurrence) to offset in the arena LONG."""
        table = self.heap.zeros(PLACE, PLAN_ENTRIES)
        keys = np.array([size + (n << history.SIZE_BITS) for size, n in plan], np.int64)
        history.fill_plan(table.ctypes.data, keys, np.array(list(plan.values()), np.int64), len(plan))
        self.record[0]["plan_address"] = table.ctypes.data

    def gaps(self, arena: int) -> list[tuple[int, int]]:
        """Return an arena's gaps as (start, end)."""
        record = self.heap.arenas[arena]
        n = int(record["n_gaps"])
        buffer = (ctypes.c_char * (n * GAP.itemsize)).from_address(int(record["gaps_address"]))
        return [(int(gap["start"]), int(gap["start"] + gap["size_bytes"])) for gap in np.frombuffer(buffer, GAP)]

    def _expected_gaps(self, arena: int) -> list[tuple[int, int]]:
        start, end = (int(self.heap.arenas[arena][field]) for field in ("start", "end"))
        expected = []
        for address in sorted(self.live):
            offset = address - self.base
            if start <= offset < end:
                if offset > start:
                    expected.append((start, offset))
                start = offset + _rounded(self.live[address])
        return [*expected, (start, end)] if start < end else expected

    def close(self) -> None:
        """Leave: the heap, the place in the pool, the member's mapping."""
        self.heap.close()
        self.member.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        self.close()


@contextlib.contextmanager
def tenants(
    n_regions: int, count: int = 1, *, region_bytes: int = 1 << 16, claims: bool = True, wait_limit_s: float = 0.02
) -> Iterator[list[Tenant]]:
    """Make a pool and ``count`` jobs with heaps in it."""
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(make_pool(n_regions, region_bytes=region_bytes, claims=claims))
        yield [stack.enter_context(Tenant(pool, wait_limit_s=wait_limit_s, name=f"job{i}")) for i in range(count)]


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // EDGE_BYTES) * EDGE_BYTES


def words_at(place: int) -> Record:
    """View the words in which a pattern lies."""
    return np.frombuffer((ctypes.c_char * EDGE_BYTES).from_address(place), "u4")


def _pattern(address: int, size_bytes: int, place: int) -> int:
    return hash((address, size_bytes, place)) & 0xFFFFFFFF
