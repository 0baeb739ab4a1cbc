"""Paging in the simulator: the tables that the real pager has, driven by a trace on a device model.

Known limitations
    * An operation goes through its blocks in order, so many of them at once (``Device.batch_blocks``), in equal times.
    * The processor that starts operations is never late, and handling costs nothing but what ``Device`` says.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import compiled
from zico.errors import ConfigError
from zico.paging.layout import BLOCK_BYTES, DEGREE, INVALIDATE, NONE, PREEVICT, PREFETCH, Sizes, lay_out
from zico.paging.machine import MACHINE, NEVER, PAGE, advance, fault, page_at
from zico.paging.prefetch import note_execution
from zico.paging.resident import hold, note_active, note_inactive, note_written, release
from zico.paging.tuning import note_iteration, note_lost

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.paging.layout import PagingRecord
    from zico.paging.machine import Machine
    from zico.paging.workload import Workload

Array = Any

_NS = 1e9


@dataclasses.dataclass(frozen=True)
class Device:
    """What the simulator needs to know of a device.

    Raises:
        ConfigError: A number cannot be used.
    """

    memory_bytes: int
    copy_bytes_per_s: float = 16e9
    """Each way: what 16 lanes of PCI Express of the third generation carry."""
    fault_ns: int = 45_000
    """Handling of a batch of faults. Source: G10 (H. Zhang et al., MICRO 2023)."""
    fault_bytes: int = BLOCK_BYTES
    """What one handling brings in; a block of more needs so many. A whole block: all its faults are in one batch."""
    batch_blocks: int = 1
    """Blocks that an operation touches at once."""
    reserve_blocks: int = 8
    """Free blocks that pre-eviction aims at."""
    keeps_copies: int = 0
    """1: clean blocks need not be copied out again, as where the next tier keeps them. Unified memory's do."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.memory_bytes // BLOCK_BYTES <= self.batch_blocks:
            raise ConfigError(
                f"memory of {self.memory_bytes} bytes is less than {self.batch_blocks + 1} blocks of {BLOCK_BYTES}: "
                "give more"
            )


@dataclasses.dataclass(frozen=True)
class IterationResult:
    """What an iteration took."""

    time_ns: int
    faults: int
    """Blocks that were not there."""
    late: int
    """Blocks that were on their way."""
    moved_in: int
    moved_out: int
    dropped: int
    """Blocks evicted without a copy."""
    lost_ns: int
    """From faults until their operations went on."""
    prefetched: int
    degree: int


_COUNTED = ("faults", "late", "moved_in", "moved_out", "dropped", "lost_ns")


class Paging:
    """One job on one device, iteration after iteration."""

    def __init__(
        self, work: Workload, device: Device, flags: int, degree: int = DEGREE, sizes: Sizes | None = None
    ) -> None:
        """Begin with what lives when an iteration begins in the next tier.

        Args:
            work: What each iteration touches.
            device: The device.
            flags: The parts of ``zico.paging.layout`` that are on; 0: paging on demand.
            degree: Executions that prefetching is ahead.
            sizes: Of the tables; by default as published.
        """
        self._work = work
        sizes = sizes or Sizes(work.n_blocks, executions=int(work.name.max()) + 1)
        self._memory = np.zeros(sizes.total_bytes, np.uint8)
        self._paging = lay_out(self._memory, sizes, flags, degree)
        self._pages = np.zeros(work.n_blocks, PAGE)
        self._pages["ready_ns"] = NEVER
        self._pages["has_content"] = self._pages["has_copy"] = work.active
        self._machines = np.zeros(1, MACHINE)
        self._machine = self._machines[0]
        self._machine["pages_address"] = self._pages.ctypes.data
        self._machine["capacity"] = self._machine["free"] = device.memory_bytes // BLOCK_BYTES
        self._machine["next_in"] = NONE
        self._machine["reserve"] = min(device.reserve_blocks, int(self._machine["capacity"]) // 4)
        self._machine["batch"] = device.batch_blocks
        self._machine["fault_ns"] = device.fault_ns
        self._machine["block_fault_ns"] = device.fault_ns * (max(1, BLOCK_BYTES // device.fault_bytes) - 1)
        copy_ns = round(BLOCK_BYTES / device.copy_bytes_per_s * _NS)
        self._machine["in_block_ns"] = self._machine["out_block_ns"] = copy_ns
        self._machine["keeps_copies"] = device.keeps_copies
        for block in np.flatnonzero(~work.active):
            note_inactive(self._paging, int(block))

    @property
    def paging(self) -> Any:  # noqa: ANN401 - a record
        """The record of ``zico.paging.layout.PAGING``, to look at."""
        return self._paging

    @property
    def machine(self) -> Any:  # noqa: ANN401 - a record
        """The record of ``zico.paging.machine.MACHINE``, to look at."""
        return self._machine

    def iterate(self) -> IterationResult:
        """Simulate one iteration."""
        work = self._work
        before = {name: int(self._machine[name]) for name in _COUNTED}
        began_ns, prefetched = int(self._machine["now_ns"]), int(self._paging["prefetched"])
        degree = int(self._paging["degree"])
        _iterate(
            self._machine,
            self._paging,
            (work.name, work.duration_ns, work.first_touch, work.first_change),
            (work.touched, work.changed),
            (work.writes, work.becomes_active),
        )
        lost = {name: int(self._machine[name]) - before[name] for name in _COUNTED}
        return IterationResult(
            time_ns=int(self._machine["now_ns"]) - began_ns,
            prefetched=int(self._paging["prefetched"]) - prefetched,
            degree=degree,
            **lost,
        )

    def resident(self) -> NDArray[np.bool_]:
        """Return which blocks are there, or on their way."""
        there: NDArray[np.bool_] = self._pages["ready_ns"] != NEVER
        return there


# -- compiled ---------------------------------------------------------------------------------------------------------


@compiled
def _iterate(machine: Machine, paging: PagingRecord, numbers: Array, blocks: Array, flags: Array) -> None:
    """Run all executions of an iteration."""
    name, duration_ns, first_touch, first_change = numbers
    touched, changed = blocks
    writes, becomes_active = flags
    learns = paging.flags & (PREFETCH | PREEVICT)
    began_ns, began_lost_ns = machine.now_ns, machine.lost_ns
    for i in range(len(name)):
        _change(machine, paging, changed[first_change[i] : first_change[i + 1]], becomes_active[first_change[i] :])
        if learns:
            note_execution(paging, name[i])
        touches = touched[first_touch[i] : first_touch[i + 1]]
        _execute(machine, paging, touches, writes[first_touch[i] :], duration_ns[i], learns)
    n = len(name)
    _change(machine, paging, changed[first_change[n] : first_change[n + 1]], becomes_active[first_change[n] :])
    note_lost(paging, machine.lost_ns - began_lost_ns)
    note_iteration(paging, machine.now_ns - began_ns)


@compiled
def _change(machine: Machine, paging: PagingRecord, changed: Array, becomes_active: Array) -> None:
    """Note which blocks something lives in now, and in which nothing does any more."""
    for k in range(len(changed)):
        if becomes_active[k]:
            note_active(paging, changed[k])
        else:
            note_inactive(paging, changed[k])
            if paging.flags & INVALIDATE:
                page = page_at(machine, changed[k])
                page.has_content = 0
                page.has_copy = 0


@compiled
def _execute(
    machine: Machine, paging: PagingRecord, touches: Array, writes: Array, duration_ns: int, learns: int
) -> None:
    """Run one execution: touch what it touches, a batch at a time, and let time go by between."""
    n = len(touches)
    done_ns = 0
    for first in range(0, n, machine.batch):
        last = min(n, first + machine.batch)
        for k in range(first, last):
            hold(paging, touches[k])
        fault(machine, paging, touches[first:last], learns)
        for k in range(first, last):
            release(paging, touches[k])
            if writes[k]:
                note_written(paging, touches[k])
                page = page_at(machine, touches[k])
                page.has_content = 1
                page.has_copy = 0
        share_ns = duration_ns * last // n - done_ns
        done_ns += share_ns
        advance(machine, paging, machine.now_ns + share_ns)
