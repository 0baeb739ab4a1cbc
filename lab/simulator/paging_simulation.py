"""Paging in the simulator: the tables that the real pager has, driven by a trace on a device model.

Theory of operation
    The device is a clock, memory of so many blocks, and one engine for copies in each direction.

    A fault is handled as unified memory's driver does: fixed time for a batch, then for each of its
    blocks room, then its content. Blocks are moved in the background while operations run, as
    ``zico.paging.needed_next`` says. A fault waits for the block that is being moved in, and goes
    before all others::

        fault on b, c     |45 us|evict x -> out|b in|evict y -> out|c in|  then the operation goes on
        in background     in:  d | e | f        out: x | y              whenever an engine is free

    Without ``PREEVICT`` a prefetch makes its own room, one after the other as a fault does.

Known limitations
    * An operation goes through its blocks in order, so many of them at once
      (``Device.batch_blocks``), in equal times.
    * The processor that starts operations is never late, and handling costs nothing but what
      ``Device`` says.

Source: section 2 of "DeepUM" (J. Jung, J. Kim, J. Lee, ASPLOS 2023), figure 3.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import compiled, inlined, record_at
from zico.base.errors import ConfigError, TraceError
from zico.base.records import I4, I8, Record, dtype_of
from zico.lab.packing.caching import reserved_by_caching
from zico.lab.simulator.paging_workload import Naming, workload
from zico.lab.simulator.points import sharing
from zico.lab.simulator.saving import POINT_SHARES, OperatingPoint
from zico.paging.layout import (
    ALL,
    BLOCK_BYTES,
    DEGREE,
    INACTIVE,
    INVALIDATE,
    NONE,
    PREEVICT,
    PREFETCH,
    TUNE,
    Sizes,
    lay_out,
)
from zico.paging.needed_next import (
    choose_to_clean,
    choose_victim,
    choose_victim_ahead,
    next_prefetch,
    note_execution,
    note_fault,
)
from zico.paging.residency import (
    block_at,
    hold,
    is_expected,
    keep,
    note_active,
    note_arrival,
    note_cleaned,
    note_departure,
    note_inactive,
    note_written,
    release,
)
from zico.paging.tuning import note_iteration, note_lost
from zico.planning.packing.from_trace import iteration_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from zico.lab.simulator.paging_workload import Workload
    from zico.paging.layout import PagingRecord
    from zico.trace.events import Trace


# -- the simulated machine -------------------------------------------------------------------------


class Page(Record):
    """What the machine knows of a block."""

    ready_ns: I8  # when a resident block is there
    room_ns: I8  # in the ring of rooms to come: when
    has_content: I4  # of use to anybody
    has_copy: I4  # in the next tier, as the content is


PAGE = dtype_of(Page)


class Machine(Record):
    """One device in the simulator."""

    now_ns: I8
    moved_ns: I8  # until when the background has been followed
    in_ns: I8  # when each engine is free
    out_ns: I8
    capacity: I8  # in blocks, as all that follows
    free: I8
    reserve: I8  # free ones that pre-eviction aims at
    leaving_head: I8  # rooms to come: the ring's ends
    leaving_tail: I8
    next_in: I8  # block that waits for room, or NONE
    batch: I8  # blocks touched at once, whose faults are handled together
    fault_ns: I8  # of a batch
    block_fault_ns: I8  # of each block in it
    in_block_ns: I8
    out_block_ns: I8
    keeps_copies: I8  # 1: the next tier keeps what was brought in, so that clean blocks need not go back
    pages_address: I8
    # Counted, ever.
    faults: I8
    late: I8  # of blocks on their way
    moved_in: I8
    moved_out: I8
    dropped: I8
    lost_ns: I8  # from a fault until its operation goes on


MACHINE = dtype_of(Machine)

_PAGE_BYTES = PAGE.itemsize
NEVER = 1 << 62
"""When a block is there that is not."""


@inlined
def page_at(machine: Machine, block: int) -> Page:
    """Return what the machine knows of a block."""
    return record_at(machine.pages_address + block * _PAGE_BYTES, PAGE)


@inlined
def _must_copy(machine: Machine, paging: PagingRecord, block: int) -> bool:
    """Tell whether a resident block has content that is nowhere else."""
    page = page_at(machine, block)
    is_kept = page.has_copy and machine.keeps_copies
    return bool(page.has_content and not is_kept and not block_at(paging, block).state & INACTIVE)


# -- room ------------------------------------------------------------------------------------------


@compiled
def _settle(machine: Machine, n_blocks: int, until_ns: int) -> None:
    """Count rooms as free that have become so."""
    while machine.leaving_head < machine.leaving_tail:
        if page_at(machine, machine.leaving_head % n_blocks).room_ns > until_ns:
            break
        machine.leaving_head += 1
        machine.free += 1


@compiled
def _send_out(machine: Machine, paging: PagingRecord, block: int, from_ns: int) -> int:
    """Evict a block from a time on; returns when its room is free."""
    page = page_at(machine, block)
    if _must_copy(machine, paging, block):
        from_ns = max(from_ns, machine.out_ns, page.ready_ns) + machine.out_block_ns
        machine.out_ns = from_ns
        machine.moved_out += 1
        page.has_copy = 1
    else:
        machine.dropped += 1
    page.ready_ns = NEVER
    note_departure(paging, block)
    return from_ns


@compiled
def _bring_in(machine: Machine, paging: PagingRecord, block: int, from_ns: int) -> int:
    """Move a block into a free room from a time on; returns when it is there."""
    page = page_at(machine, block)
    machine.free -= 1
    page.ready_ns = from_ns
    if page.has_content:
        page.ready_ns = max(from_ns, machine.in_ns) + machine.in_block_ns
        machine.in_ns = page.ready_ns
        machine.moved_in += 1
    note_arrival(paging, block)  # as far as choices go; a victim's copy waits until it is really there
    return int(page.ready_ns)


# -- faults ----------------------------------------------------------------------------------------


@compiled
def _room_for_fault(machine: Machine, paging: PagingRecord, from_ns: int) -> int:
    """Make room on the critical path; returns when there is."""
    _settle(machine, paging.n_blocks, from_ns)
    if machine.free > 0:
        return from_ns
    if machine.leaving_head < machine.leaving_tail:
        from_ns = max(from_ns, page_at(machine, machine.leaving_head % paging.n_blocks).room_ns)
    else:
        victim = choose_victim(paging)
        from_ns = _send_out(machine, paging, victim, from_ns)
        machine.free += 1
    _settle(machine, paging.n_blocks, from_ns)
    return from_ns


@compiled
def fault(machine: Machine, paging: PagingRecord, blocks: Any, learns: int) -> None:  # noqa: ANN401 - an array of int32
    """Bring in those of some blocks, all of which are held, that are not there; the clock goes on until all are."""
    ready_ns = machine.now_ns
    missing = 0
    for block in blocks:
        page = page_at(machine, block)
        if page.ready_ns == NEVER:
            missing += 1
            if learns:
                number: int = np.int64(block)  # type: ignore[assignment]  # one type for compiled code
                note_fault(paging, number)
        elif page.ready_ns > machine.now_ns:
            machine.late += 1
            ready_ns = max(ready_ns, page.ready_ns)
    if missing == 0 and ready_ns == machine.now_ns:
        return
    at_ns = machine.now_ns + machine.fault_ns + missing * machine.block_fault_ns
    for block in blocks:
        if page_at(machine, block).ready_ns == NEVER:
            at_ns = _bring_in(machine, paging, block, _room_for_fault(machine, paging, at_ns))
            hold(paging, block)
    at_ns = max(at_ns, ready_ns)
    machine.faults += missing
    machine.lost_ns += at_ns - machine.now_ns
    machine.now_ns = at_ns


# -- in background ---------------------------------------------------------------------------------


@compiled
def advance(machine: Machine, paging: PagingRecord, until_ns: int) -> None:
    """Let the clock go on, and blocks be moved meanwhile."""
    while (
        _move_in(machine, paging, until_ns) or _move_out(machine, paging, until_ns) or _clean(machine, paging, until_ns)
    ):
        pass
    machine.moved_ns = until_ns
    machine.now_ns = until_ns


@compiled
def _move_out(machine: Machine, paging: PagingRecord, until_ns: int) -> bool:
    """Begin to evict one block ahead of need; tells whether that could begin before the time is over."""
    coming = machine.leaving_tail - machine.leaving_head
    if not paging.flags & PREEVICT or machine.free + coming >= machine.reserve:
        return False
    victim = choose_victim_ahead(paging)
    if victim == NONE:
        return False
    copies = _must_copy(machine, paging, victim)
    if copies and max(machine.out_ns, machine.moved_ns) >= until_ns:
        return False
    room_ns = _send_out(machine, paging, victim, machine.moved_ns)
    if copies:
        _note_room(machine, paging.n_blocks, room_ns)
    else:
        machine.free += 1
    return True


@compiled
def _clean(machine: Machine, paging: PagingRecord, until_ns: int) -> bool:
    """Begin to copy out one block that stays; tells whether that could begin before the time is over."""
    start_ns = max(machine.out_ns, machine.moved_ns)
    block = choose_to_clean(paging) if start_ns < until_ns and machine.keeps_copies else NONE
    if block == NONE:
        return False
    page = page_at(machine, block)
    machine.out_ns = max(start_ns, page.ready_ns) + machine.out_block_ns
    machine.moved_out += 1
    page.has_copy = 1
    note_cleaned(paging, block)
    return True


@inlined
def _note_room(machine: Machine, n_blocks: int, room_ns: int) -> None:
    page_at(machine, machine.leaving_tail % n_blocks).room_ns = room_ns
    machine.leaving_tail += 1


@compiled
def _move_in(machine: Machine, paging: PagingRecord, until_ns: int) -> bool:
    """Begin to prefetch one block; tells whether that could begin before the time is over."""
    start_ns = max(machine.in_ns, machine.moved_ns)
    if not paging.flags & PREFETCH or start_ns >= until_ns or not _choose_next(machine, paging):
        return False
    _settle(machine, paging.n_blocks, start_ns)
    if machine.free == 0:
        start_ns = _room_for_prefetch(machine, paging, start_ns)
        if start_ns >= until_ns:
            return False
        _settle(machine, paging.n_blocks, start_ns)
    _bring_in(machine, paging, int(machine.next_in), start_ns)
    machine.next_in = NONE
    return True


@compiled
def _choose_next(machine: Machine, paging: PagingRecord) -> bool:
    """Set the block to prefetch next, that of before if it is still of use; tells whether there is one."""
    waits = machine.next_in
    if waits != NONE and page_at(machine, waits).ready_ns == NEVER:
        if is_expected(paging, waits):
            return True
        release(paging, waits)
    machine.next_in = next_prefetch(paging)
    return machine.next_in != NONE


@compiled
def _room_for_prefetch(machine: Machine, paging: PagingRecord, from_ns: int) -> int:
    """Return when a room will be free, ``NEVER`` if that is not known yet."""
    if machine.leaving_head == machine.leaving_tail:
        victim = NONE if paging.flags & PREEVICT else choose_victim(paging)
        if victim == NONE:
            return NEVER
        _note_room(machine, paging.n_blocks, _send_out(machine, paging, victim, max(from_ns, machine.out_ns)))
    return max(from_ns, page_at(machine, machine.leaving_head % paging.n_blocks).room_ns)


# -- simulation ------------------------------------------------------------------------------------


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
        self,
        work: Workload,
        device: Device,
        flags: int,
        degree: int = DEGREE,
        sizes: Sizes | None = None,
        kept: range = range(0),
    ) -> None:
        """Begin with what lives when an iteration begins in the next tier.

        Args:
            work: What each iteration touches.
            device: The device.
            flags: The parts of ``zico.paging.layout`` that are on; 0: paging on demand.
            degree: Executions that prefetching is ahead.
            sizes: Of the tables; by default as published.
            kept: Blocks that stay once they are there: the first ones, fewer than half of the memory has room for.
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
        keep(self._paging, kept.start, min(kept.stop, kept.start + (int(self._machine["capacity"]) - 1) // 2))
        for block in np.flatnonzero(~work.active):
            note_inactive(self._paging, int(block))

    @property
    def paging(self) -> Any:  # noqa: ANN401 - a record
        """The record of ``zico.paging.layout.PAGING``, to look at."""
        return self._paging

    @property
    def machine(self) -> Any:  # noqa: ANN401 - a record
        """The record of ``zico.lab.simulator.paging_simulation.MACHINE``, to look at."""
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


# -- compiled --------------------------------------------------------------------------------------


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


# -- with less memory than a trace needs -----------------------------------------------------------


_ITERATIONS = 10
"""Of which the last one counts, when the tables have been learned."""
_FEWEST_BLOCKS = 16


def by_paging(trace: Trace, copy_bytes_per_s: float, jobs: int) -> tuple[OperatingPoint, ...]:
    """Return a traced job's operating points by paging, in bytes; nothing if the trace has no accesses.

    Args:
        trace: The trace.
        copy_bytes_per_s: Of the link, each way.
        jobs: So many share the device.
    """
    return tuple(_simulated(trace, copy_bytes_per_s, jobs))


def _simulated(trace: Trace, copy_bytes_per_s: float, jobs: int) -> Iterator[OperatingPoint]:
    found = iteration_problem(trace)
    problem = found.problem
    offsets = reserved_by_caching(problem).offset_bytes
    try:
        work = workload(trace, found.life, found.iterations, found.iteration, offsets, Naming.ARGUMENTS)
    except TraceError:
        return
    if problem.tick_ns is None:
        return
    idle_ns = max(0, int(np.ptp(problem.tick_ns)) - work.compute_ns)
    for among in sharing(jobs):
        for share in POINT_SHARES:
            limit_bytes = int(share * problem.peak_live_bytes)
            if limit_bytes < _FEWEST_BLOCKS * BLOCK_BYTES:
                break
            device = Device(limit_bytes, copy_bytes_per_s / among)
            paging = Paging(work, device, ALL & ~TUNE)
            runs = [paging.iterate() for _ in range(_ITERATIONS)]
            yield OperatingPoint("page", limit_bytes, runs[-1].time_ns + idle_ns, among)
