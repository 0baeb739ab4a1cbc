"""Slabs against a model: who lives where, one size and one stream to a chunk, and no chunk kept that is empty."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.device_tenant import DeviceTenant
from cpu.support.software_device import SoftwareDevice
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from zico.heap.cuda import on_stream
from zico.heap.cuda.layout import CHUNK, CHUNK_BYTES, MAX_CHUNKS, UNIT_SIZES
from zico.heap.layout import GRANULE_BYTES
from zico.pool.layout import NOBODY
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator

REGION_BYTES = 4 * CHUNK_BYTES
STREAMS = 2
# The largest units fill a chunk at once, so that chunks come and go; the smallest share one for
# long.
SIZES = st.sampled_from([*UNIT_SIZES[-2:] * 3, *UNIT_SIZES])
WHICH = st.integers(0, 1 << 20)
COUNTS = st.sampled_from([1, 2, 5, 40, 70])


@contextlib.contextmanager
def job_on(device: SoftwareDevice, n_regions: int) -> Iterator[DeviceTenant]:
    """Make a job that can have so many regions: a neighbour holds as many and one more, and keeps them.

    A request that is above what is left is one to wait for, then, and not one to refuse after a
    fifth of a second.
    """
    sizes = {"budget_bytes": (2 * n_regions + 1) * REGION_BYTES, "region_bytes": REGION_BYTES}
    with (
        PoolTable.create(**sizes, use_claims=False, self_admit=True, on_timeline=True) as pool,
        DeviceTenant(pool, device, streams=1, wait_limit_s=0.002) as neighbour,
        DeviceTenant(pool, device, streams=STREAMS, wait_limit_s=0.002) as job,
    ):
        assert neighbour.allocate((n_regions + 1) * REGION_BYTES) is not None
        yield job


@dataclasses.dataclass
class Unit:
    """A tensor in a unit."""

    address: int
    unit_bytes: int
    stream: int
    users: int = 0
    """Other streams, a bit each."""

    @property
    def chunk(self) -> int:
        """Return where its chunk begins."""
        return self.address // CHUNK_BYTES * CHUNK_BYTES


class SlabMachine(RuleBasedStateMachine):
    """One job allocates and frees small tensors on two streams; the model knows what lives and what waits."""

    @initialize(n_regions=st.sampled_from([1, 2, 6]), sizes=st.tuples(SIZES, SIZES))
    def begin(self, n_regions: int, sizes: tuple[int, int]) -> None:
        """Make the job; it has tensors of two sizes, so that there are many of one."""
        self.sizes = sizes
        self.stack = contextlib.ExitStack()
        self.device = SoftwareDevice()
        self.job = self.stack.enter_context(job_on(self.device, n_regions))
        record = self.job.record[0]
        kind = ctypes.c_int32 * (int(record["window_bytes"]) // CHUNK_BYTES)
        entries = kind.from_address(int(record["slab"]["chunk_of_address"]))
        self.chunk_of = np.frombuffer(entries, np.int32)
        self.freed = 0
        """The last tensor that was freed."""
        self.live: list[Unit] = []
        self.waiting: list[Unit] = []
        """Freed, but another stream has not come by."""

    def teardown(self) -> None:
        """When all is freed and the device has caught up, nothing is held."""
        if not hasattr(self, "stack"):
            return
        with self.stack:
            self.free(0, len(self.live), 0)
            self.job.settle()
            self.job.check_empty()
            record = self.job.record[0]
            assert record["streams"]["n_deferred"] == record["bad_frees"] == 0

    def _full(self) -> set[int]:
        """Return the chunks in which there is no free unit, waiting ones being none."""
        taken = Counter((unit.chunk, unit.unit_bytes) for unit in self.live + self.waiting)
        return {chunk for (chunk, unit_bytes), n in taken.items() if n == CHUNK_BYTES // unit_bytes}

    def _there(self) -> set[int]:
        """Return where the heap has chunks."""
        return {self.job.heap.base + int(n) * CHUNK_BYTES for n in np.flatnonzero(self.chunk_of)}

    @rule(size=st.integers(0, 1), less=st.integers(0, 511), count=COUNTS, stream=st.integers(0, 1))
    def allocate(self, size: int, less: int, count: int, stream: int) -> None:
        """A tensor gets a unit of the least size that holds it: a free one of its chunks if there is any."""
        size_bytes = self.sizes[size] - less
        unit_bytes = min(size for size in UNIT_SIZES if size >= size_bytes)
        for _ in range(count):
            chunks = {unit.chunk for unit in self.live if (unit.unit_bytes, unit.stream) == (unit_bytes, stream)}
            there = self._there()  # also those in which units only wait
            address = int(on_stream.allocate_on(self.job.record[0], size_bytes, self.job.streams[stream]))
            self._notice_the_device()
            if address <= 0:
                assert chunks <= self._full(), "refused although there is a free unit"
                return
            unit = Unit(address, unit_bytes, stream)
            assert address not in {unit.address for unit in self.live + self.waiting}
            assert (address - unit.chunk) % unit_bytes == 0
            assert address + unit_bytes <= unit.chunk + CHUNK_BYTES
            assert unit.chunk in there or chunks <= self._full(), "a new chunk although there is a free unit"
            self.live.append(unit)

    @rule(which=WHICH, count=COUNTS, stream=st.integers(0, 1), apart=st.sampled_from([0, 31]))
    def free(self, which: int, count: int, stream: int, apart: int = 0) -> None:
        """Tensors are freed, neighbours or in several chunks; those that another stream uses wait for it."""
        for n in range(min(count, len(self.live))):
            unit = self.live.pop((which + n * apart) % len(self.live))
            self.freed = unit.address
            unit.users |= 1 << stream
            on_stream.free_on(self.job.record[0], unit.address, self.job.streams[stream])
            if unit.users & ~(1 << unit.stream):
                self.waiting.append(unit)

    @rule(which=WHICH)
    def use_elsewhere(self, which: int) -> None:
        """The other stream uses a tensor, too."""
        if self.live:
            unit = self.live[which % len(self.live)]
            unit.users |= 1 << (1 - unit.stream)
            on_stream.record_stream(self.job.record[0], unit.address, self.job.streams[1 - unit.stream])

    @rule()
    def device_catches_up(self) -> None:
        """The device does everything, and the heap looks at all that waited for it."""
        self.device.drain()
        on_stream.settle(self.job.record[0])
        self.waiting.clear()

    def _notice_the_device(self) -> None:
        """Forget what waits no more: all that did, when its streams had come by or were made to wait for it."""
        if self.job.record[0]["streams"]["n_deferred"] == 0:
            self.waiting.clear()

    @rule(which=WHICH, away=st.sampled_from([-1, 1, 8, 256, CHUNK_BYTES]))
    def free_what_is_none(self, which: int, away: int) -> None:
        """An address beside a tensor's is no tensor: it is counted, and nothing changes."""
        if self.live:
            address = self.live[which % len(self.live)].address + away
            if address not in {unit.address for unit in self.live}:
                on_stream.free_on(self.job.record[0], address, self.job.streams[0])
                assert self.job.record[0]["bad_frees"] == 1
                self.job.record[0]["bad_frees"] = 0

    @rule()
    def free_again(self) -> None:
        """A tensor that was freed is none: freeing it again is counted, and nothing changes."""
        if self.freed and self.freed not in {unit.address for unit in self.live}:
            on_stream.free_on(self.job.record[0], self.freed, self.job.streams[0])
            assert self.job.record[0]["bad_frees"] == 1
            self.job.record[0]["bad_frees"] = 0

    @invariant()
    def agrees(self) -> None:
        """A chunk's units are of one size and stream, and chunks are where tensors live or wait, and nowhere else."""
        if not hasattr(self, "stack"):
            return
        self._notice_the_device()
        kinds = {(unit.chunk, unit.unit_bytes, unit.stream) for unit in self.live + self.waiting}
        chunks = {kind[0] for kind in kinds}
        assert len(chunks) == len(kinds)
        record = self.job.record[0]
        there = self._there()
        assert {unit.chunk for unit in self.live} <= there <= chunks
        assert self.job.job["live_bytes"] == sum(unit.unit_bytes for unit in self.live)
        assert record["streams"]["n_deferred"] <= len(self.waiting)
        assert record["slab"]["n_chunks"] - self._idle_records() == len(there), (
            "a chunk's record is lost, or used twice"
        )

    def _idle_records(self) -> int:
        """Count the records of chunks that were used before and are free."""
        record = self.job.record[0]
        kind = ctypes.c_char * (CHUNK.itemsize * int(record["slab"]["n_chunks"]))
        chunks = np.frombuffer(kind.from_address(int(record["slab"]["chunks_address"])), CHUNK)
        count, number = 0, int(record["slab"]["idle_chunk"])
        while number != NOBODY:
            count, number = count + 1, int(chunks[number]["next"])
            assert count <= len(chunks), "a record is in the list twice"
        return count


def test_a_chunk_in_which_units_only_wait_serves_before_a_new_one() -> None:
    """What is free beside units that another stream still uses is found, though nothing in that chunk lives."""
    machine = SlabMachine()
    machine.begin(n_regions=2, sizes=(24_576, 24_576))
    for allocates, count, stream in (
        *[(True, 1, 0)] * 9,
        (True, 40, 1),
        (False, 40, 0),
        *[(True, 1, 0)] * 2,
        (True, 40, 0),
        (True, 40, 1),
        (False, 70, 1),
    ):
        machine.allocate(0, 0, count, stream) if allocates else machine.free(0, count, stream)
        machine.agrees()
    lives = {unit.chunk for unit in machine.live}
    before = machine._there()
    machine.allocate(0, 0, 1, 1)
    (unit,) = machine.live[-1:]
    assert unit.chunk in before - lives
    machine.teardown()


SlabMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestSlab = SlabMachine.TestCase


@pytest.fixture
def device() -> SoftwareDevice:
    """Make a device."""
    return SoftwareDevice()


@pytest.mark.parametrize("uses", [False, True])
def test_a_unit_that_another_stream_uses_serves_where_no_chunk_can_be_had(
    device: SoftwareDevice, *, uses: bool
) -> None:
    """With the pool full a small tensor gets a unit that was freed, its stream behind the one that used it, if any."""
    with job_on(device, 1) as job:
        units = [job.allocate(UNIT_SIZES[-1]) for _ in range(REGION_BYTES // UNIT_SIZES[-1])]
        freed = units[40]
        assert None not in units
        assert freed is not None
        if uses:
            job.use_on(freed, 1)
        job.free(freed)
        again = job.allocate(UNIT_SIZES[-1])
        assert again is not None
        assert again.address == freed.address
        assert device.waits == int(uses)
        job.free_all()
        job.settle()
        job.check_empty()
        assert not job.faults


def test_a_chunk_that_goes_leaves_the_others_in_the_list(device: SoftwareDevice) -> None:
    """Of two chunks with free units the one goes that is not looked at first; the other's unit is still found."""
    with job_on(device, 1) as job:
        count = CHUNK_BYTES // UNIT_SIZES[-1]
        made = [tensor for _ in range(2 * count) if (tensor := job.allocate(UNIT_SIZES[-1]))]
        assert len(made) == 2 * count
        job.free(made[0])
        job.free(made[count])
        for tensor in made[1:count]:
            job.free(tensor)
        again = job.allocate(UNIT_SIZES[-1])
        assert again is not None
        assert again.address == made[count].address
        job.free_all()
        job.settle()
        job.check_empty()


def test_without_chunk_records_a_small_tensor_is_a_block_and_counted_once(device: SoftwareDevice) -> None:
    """Invariant 9: it takes a granule; it was requested once, and is one event of the iteration."""
    with job_on(device, 1) as job:
        job.record[0]["slab"]["n_chunks"] = MAX_CHUNKS
        assert job.allocate(100) is not None
        figures = ("requested_bytes", "pooled_bytes", "live_bytes", "allocations", "progress")
        assert [int(job.job[name]) for name in figures] == [100, 100, GRANULE_BYTES, 1, 1]
        job.record[0]["slab"]["n_chunks"] = 0
        job.free_all()
        job.settle()
        job.check_empty()
