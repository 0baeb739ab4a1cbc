"""Set up a process's heap over a pool it has joined.

The window is address space only: four arenas of twice the pool, since fragmentation of addresses is
free. On a device that works behind the processor's back there is one more for each stream but the
first. The last one is for the next tier: a sparse unlinked file, on a GPU pinned memory.
Bookkeeping lies in anonymous memory that becomes resident as it is used.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.errors import ConfigError
from zico.base.libc import libc_address
from zico.device import host
from zico.device.record import DEVICE
from zico.heap import backing, waiting
from zico.heap.cuda import timeline as timelines
from zico.heap.layout import (
    ARENA,
    BLOCK,
    COUNT,
    COUNTS,
    FIRST_PLAN_INTERVAL,
    GAP,
    GRANULE_BYTES,
    GRANULE_SHIFT,
    HEAP,
    KEYS,
    LIFETIME,
    LOG,
    LOGS,
    MAX_ALIGNMENT_BYTES,
    MAX_GAPS,
    MAX_LIFETIMES,
    PINNED,
    SLOT,
    Arena,
    Attached,
)
from zico.pool.layout import NOBODY
from zico.tiers.destinations import open_spill_file, sets_space_aside
from zico.trace.events import NO_NAME
from zico.trace.online import MEMORY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zico.base.records import Layout
    from zico.device.cuda.managed import Managed
    from zico.heap.plan_thread import Planning
    from zico.paging.pager import PagedMemory, Pager
    from zico.pool.table import PoolTable
    from zico.tiers.stack import TierStack
    from zico.trace.ringfile import RingFile

REAL = ("posix_memalign", "aligned_alloc", "free")
"""The hooks call these for the rest, as ``real_NAME`` of the record."""
_ARENA_SHARE = 2
"""An arena's address space is so many times the pool's size. The next tier holds at most as many times the budget
that there was when the job joined."""
_PAGED_SHARE = 16
"""It is so many times that where a job may need more than the pool has."""
_FEWEST_REGIONS = 64


class Heap:
    """A heap and everything that it lives in; closed only by tests, since hooks may run until the process ends."""

    def __init__(  # noqa: PLR0913 - settings, each with a default
        self,
        pool: PoolTable,
        record: Any,  # noqa: ANN401 - one HEAP record
        *,
        threshold_bytes: int = GRANULE_BYTES,
        wait_limit_s: float = 600.0,
        spill_directory: str | None = None,
        timeline: timelines.Timeline | None = None,
        managed: Managed | None = None,
        tiers: TierStack | None = None,
        paging: Mapping[str, int] | None = None,
    ) -> None:
        """Reserve the window and fill the record; the hooks serve from it once ``enable`` is called.

        Args:
            pool: The pool, joined.
            record: Where the compiled code looks: ``process.HEAP_RECORD`` or a test's own.
            threshold_bytes: Smaller requests go to the real allocator.
            wait_limit_s: How long an allocation waits for regions before it goes to the next tier.
            spill_directory: Where the next tier's file is; ``None`` is the system's directory for
                large temporary files.
            timeline: Of a device that works behind the processor's back; ``None``: the host device.
            managed: Memory that is the window, on such a device; the caller's to close, after the
                heap. ``None``: a window of its own, where regions are mapped.
            tiers: On the host device, where pages go of a job that may hold less than it needs;
                ``None``: nowhere.
            paging: ``flags`` and ``degree`` of ``zico.paging.pager.PagedMemory``, where given.

        Raises:
            ConfigError: The threshold is below a granule, the pool isolates jobs and the device
                cannot scrub, or there is too little managed memory.
            DriverError: No address space, or the kernel does not let this process's faults be
                served.
        """
        if threshold_bytes < GRANULE_BYTES:
            message = f"a threshold of {threshold_bytes} bytes does not work: give at least {GRANULE_BYTES} (64KiB)"
            raise ConfigError(message)
        self.pool = pool
        self.record = record
        self.planning: Planning | None = None
        self.ring: RingFile | None = None
        self.pinned_handles: Any = None
        """Handles of the next tier's memory on a GPU, by slot."""
        self.paged: PagedMemory | None = None
        """The window's own memory where the job is paged on the host device."""
        self.pager: Pager | None = None
        """What serves the faults of ``paged``."""
        self.no_next_tier = ""
        """Why a GPU has no next tier, empty where it has one."""
        self.managed = managed
        self.steering: Any = None
        """The ``MANAGED`` record where the window is managed memory."""
        self.slot_bytes = pool.region_bytes
        self._keep: list[Any] = []
        with contextlib.ExitStack() as undo:
            if managed is None:
                self._reserve(undo, spill_directory, timeline, _ARENA_SHARE if tiers is None else _PAGED_SHARE)
            else:
                self._cut(managed)
            self._fill(threshold_bytes, wait_limit_s)
            if timeline is not None:
                timelines.fill(self, timeline, undo)
                undo.callback(self._unmap)
            elif tiers is not None:
                self._page(undo, tiers, paging or {})
            elif pool.header["isolate"]:
                self._isolate()
            if managed is not None:
                self._steer(managed)
            self._undo = undo.pop_all()

    def _reserve(
        self, undo: contextlib.ExitStack, spill_directory: str | None, timeline: timelines.Timeline | None, share: int
    ) -> None:
        region_bytes = self.pool.region_bytes
        pool_bytes = int(self.pool.header["n_regions"]) * region_bytes
        self.arena_bytes = max(share * pool_bytes, _FEWEST_REGIONS * region_bytes)
        self._side_bytes = max(pool_bytes, _FEWEST_REGIONS * region_bytes)
        sides = 0 if timeline is None else timelines.SIDE_STREAMS
        self._side_offset = Arena.SPILL * self.arena_bytes
        self._spill_offset = self._side_offset + sides * self._side_bytes
        self._window_bytes = self._spill_offset + self.arena_bytes
        starts = [*range(0, self._side_offset, self.arena_bytes), self._spill_offset]
        self._ranges = [(start, self.arena_bytes) for start in starts]
        self._ranges += [
            (start, self._side_bytes) for start in range(self._side_offset, self._spill_offset, self._side_bytes)
        ]
        self.window = undo.enter_context(self.pool.driver.reserve(self._window_bytes + MAX_ALIGNMENT_BYTES))
        self.base = -(-self.window.handle // MAX_ALIGNMENT_BYTES) * MAX_ALIGNMENT_BYTES
        self._spill_fd = open_spill_file(spill_directory, self.arena_bytes) if timeline is None else -1
        if self._spill_fd >= 0:
            undo.callback(os.close, self._spill_fd)

    def _cut(self, managed: Managed) -> None:
        """Make managed memory the window; there is no file and no pinned memory behind it."""
        from zico.heap.cuda import managed_window

        self.window = managed
        self.base = -(-managed.handle // MAX_ALIGNMENT_BYTES) * MAX_ALIGNMENT_BYTES
        self.slot_bytes = managed_window.SLOT_BYTES
        cut = managed_window.cut(managed.handle + managed.size_bytes - self.base)
        self._ranges, self._side_offset, self._side_bytes = cut.ranges, cut.side_offset, cut.side_bytes
        self._spill_offset = self._window_bytes = cut.end
        self._spill_fd = -1

    def _fill(self, threshold_bytes: int, wait_limit_s: float) -> None:
        heap = self.record[0]
        region_bytes = self.pool.region_bytes
        window_bytes = self._window_bytes
        n_slots = window_bytes // self.slot_bytes
        self.slots = self.zeros(SLOT, n_slots)
        self.slots["region"] = NOBODY
        self.slots["mapped"] = NOBODY
        self.arenas = self.zeros(ARENA, len(self._ranges))
        for arena, (start, size_bytes) in zip(self.arenas, self._ranges, strict=True):
            self._fill_arena(arena, start, size_bytes)
        heap["region_shift"] = self.slot_bytes.bit_length() - 1
        heap["address"] = self.record.ctypes.data
        heap["pool_shift"] = region_bytes.bit_length() - 1
        heap["most_streams"] = 1 + len(self._ranges) - len(Arena)
        heap["base"] = self.base
        heap["window_bytes"] = window_bytes
        heap["spill_offset"] = self._spill_offset
        heap["side_offset"] = self._side_offset
        heap["side_bytes"] = self._side_bytes
        heap["threshold_bytes"] = threshold_bytes
        heap["member_address"] = self.pool.member.ctypes.data
        heap["arenas_address"] = self.arenas.ctypes.data
        heap["slots_address"] = self.slots.ctypes.data
        heap["blocks_address"] = self.zeros(BLOCK, window_bytes >> GRANULE_SHIFT).ctypes.data
        heap["classes_address"] = self.zeros(np.dtype("u1"), KEYS).ctypes.data
        heap["counts_address"] = self.zeros(COUNT, COUNTS).ctypes.data
        heap["wanted_address"] = self.zeros(np.dtype("i4"), n_slots).ctypes.data
        self._fill_planning(heap)
        heap["tracker"]["memory_address"] = self.zeros(np.dtype("u1"), MEMORY_BYTES).ctypes.data
        self.device = self.zeros(DEVICE, 1)
        self.pool.driver.fill_device(self.device[0], self.pool.memory)
        heap["backing"]["device_address"] = self.device.ctypes.data
        heap["spill"]["fd"] = self._spill_fd
        heap["spill"]["is_sparse"] = self._spill_fd >= 0 and not sets_space_aside(self._spill_fd)
        heap["spill"]["limit_bytes"] = _ARENA_SHARE * int(self.pool.header["budget_total"]) * region_bytes
        heap["wait"]["limit_ns"] = int(wait_limit_s * 1e9)
        heap["wait"]["raise_address"] = waiting.raise_kept.address
        heap["swap"]["fd"] = -1
        heap["spill"]["map_address"] = libc_address("mmap")
        heap["spill"]["fallocate_address"] = libc_address("fallocate")
        for name in REAL:
            if not heap[f"real_{name}"]:  # else a forked child's, which calls what its parent called
                heap[f"real_{name}"] = libc_address(name)
        heap["mutex_address"] = self.record.ctypes.data + HEAP.fields["mutex"][1]

    def _fill_planning(self, heap: Any) -> None:  # noqa: ANN401 - the HEAP record
        """Lay out the logs of iterations and what is handed to the planner."""
        logs = self.zeros(LOG, LOGS)
        for log in logs:
            log["lifetimes_address"] = self.zeros(LIFETIME, MAX_LIFETIMES).ctypes.data
        self.handed = self.zeros(LIFETIME, MAX_LIFETIMES)
        heap["planning"]["handed"]["lifetimes_address"] = self.handed.ctypes.data
        heap["logs_address"] = logs.ctypes.data
        self.pinned = self.zeros(PINNED, MAX_LIFETIMES)
        heap["planning"]["pinned_address"] = self.pinned.ctypes.data
        heap["planned_offset"] = self._ranges[Arena.LONG][0]
        heap["planning"]["fd"] = -1
        heap["planning"]["interval"] = FIRST_PLAN_INTERVAL

    def _fill_arena(self, arena: Any, start: int, size_bytes: int) -> None:  # noqa: ANN401 - one ARENA record
        gaps = self.zeros(GAP, MAX_GAPS)
        gaps[0] = (start, size_bytes)
        arena["start"] = start
        arena["end"] = start + size_bytes
        arena["n_gaps"] = int(size_bytes > 0)
        arena["gaps_address"] = gaps.ctypes.data

    def zeros(self, dtype: np.dtype[Any] | Layout[Any], count: int) -> Any:  # noqa: ANN401 - an array of dtype
        """Return zeroed records in anonymous memory that costs nothing until touched.

        In modes 0 and 1 of ``vm.overcommit_memory`` the kernel charges nothing for these arrays.
        Mode 2 ignores ``MAP_NORESERVE`` and charges them in full, as all private memory that can be
        written (mmap(2), proc_sys_vm(5)).
        """
        mapping = mmap.mmap(-1, max(dtype.itemsize * count, 1), host.RESERVED)
        array = np.frombuffer(mapping, dtype, count)
        self._keep.append((mapping, array))
        return array

    def enable(self, *, plan: bool = False) -> None:
        """Serve requests from the pool from now on.

        Args:
            plan: Whether iterations are planned in a thread, once some have passed. A plan puts
                temporaries among other tensors, so there is none where they lie apart.
        """
        if plan and not self.record[0]["paged"]["apart"]:
            from zico.heap.plan_thread import Planning

            self.planning = Planning(self)
            self.planning.start()
        if self.record[0]["streams"]["address"]:
            self._undo.callback(timelines.start_progress_thread(self))
        self.record[0]["attached"] = Attached.YES

    def record_to(self, ring: RingFile) -> None:
        """Record every allocation and free from now on."""
        self.ring = ring
        self.record[0]["recording"]["op"] = NO_NAME
        self.record[0]["ring_address"] = ring.address

    def _page(self, undo: contextlib.ExitStack, tiers: TierStack, paging: Mapping[str, int]) -> None:
        """Put memory of the job's own behind the window, whose faults a pager serves."""
        from zico.heap import paged  # compiled or loaded by this, so only where it is needed
        from zico.paging.layout import APART
        from zico.paging.pager import PagedMemory

        self.paged = PagedMemory(
            self.base,
            self._spill_offset,
            n_regions=int(self.pool.header["n_regions"]),
            region_bytes=self.pool.region_bytes,
            tiers=tiers,
            **paging,
        )
        undo.callback(self.paged.close)
        record = self.record[0]
        for field in ("live_address", "births_address", "regions_address"):
            record["paged"][field] = self.paged.arrays[field]
        record["paged"]["events_address"] = self.paged.arrays["ring_address"]
        record["paged"]["pager_fd"] = self.paged.wake_fd
        record["paged"]["page_table_address"] = self.paged.address
        table = self.paged.page_table
        for arena in self.arenas:
            if arena["start"] < self._spill_offset:  # what lies behind is not the pager's
                arena["states_address"] = self.paged.arrays["states_address"]
                arena["blocks_shift"] = int(table["region_shift"]) - int(table["block_shift"])
        if self.paged.flags & APART:
            record["paged"]["apart"] = 1
            short = self.arenas[Arena.SHORT]
            table["apart_from"], table["apart_to"] = (
                int(short[end]) >> table["block_shift"] for end in ("start", "end")
            )
        self.back_with(back=paged.back, entered=paged.entered, left=paged.left, give_way=paged.give_way)

    def back_with(self, **functions: Any) -> None:  # noqa: ANN401 - compiled callbacks
        """Let callbacks do from now on what the plain host's way would; the names are those of ``layout.Backing``."""
        for name, function in functions.items():
            self.record[0]["backing"][name] = function.address

    def _isolate(self) -> None:
        self.back_with(ready=backing.ready_isolated, release=backing.release_isolated)

    def _steer(self, managed: Managed) -> None:
        from zico.heap.cuda import managed_window

        managed_window.fill(self, managed)

    def _unmap(self) -> None:
        """Unmap what compiled code has mapped: such a device does not free addresses that are in use."""
        from zico.device.mapping import unmap_piece, unmap_pinned

        for slot in np.flatnonzero(self.slots["mapped"] != NOBODY):
            address = self.base + int(slot) * self.pool.region_bytes
            if self.pinned_handles is not None and self.pinned_handles[slot]:
                unmap_pinned(self.device[0], address, int(self.pinned_handles[slot]))
                self.pinned_handles[slot] = 0
            else:
                unmap_piece(self.device[0], address)
        self.slots["mapped"] = NOBODY

    def hand_over(self) -> None:
        """Make the record ready for another heap, in a forked child whose parent never had a tensor in this one.

        The window stays reserved. It may not be used by any other thread meanwhile.
        """
        fresh = np.zeros_like(self.record)
        for name in REAL:
            fresh[0][f"real_{name}"] = self.record[0][f"real_{name}"]
        self.record[:] = fresh  # at once: a free by the garbage collector finds its way before and after

    def close(self) -> None:
        """Unmap the window; no tensor of it may be used afterwards, nor may the device have work on one."""
        self.record[0]["attached"] = Attached.NO
        self.record[0]["window_bytes"] = 0
        self._undo.close()
