"""A paused job's memory leaves the GPU for pinned memory of the host, and comes back to the same addresses.

Theory of operation
    The job stands at its boundary. A slot's region changes places with pinned memory
    (``zico.device.exchange``), and goes back to the pool. The slot is evicted then, as one on the host
    device (``zico.heap.evicting``). Its tensors keep their addresses and bytes. Kernels find them over
    the bus, which is slower. The way back is the same, before the job's next iteration.

    A kernel that runs while a slot has no mapping would lose the context. So the job is held still
    first. For ``QUIET_NS`` no thread has asked for memory, and the device has done everything. This
    thread then takes Python's global lock, and keeps it to the end: no thread begins another call of
    Python's. Calls that are under way without the lock have ``SETTLE_NS`` to come to their launch.

Guarantees
    4. A tensor never moves, and keeps its bytes.
    11. A region that is being written to on the way back counts as one with anybody's bytes.
    Where the job does not hold still, or the driver refuses, memory stays where it is.

Known limitations
    Two things are not held still. A native thread may launch without asking for memory, while its job
    stands at a boundary. A copy from pageable memory may take longer than ``SETTLE_NS`` to be
    launched. Where either meets the instant at which a slot has no mapping, the context is lost.
    A function of the host, put on a stream in the last moment, may need the global lock. Then this
    thread waits for it for ever.
    A job that goes on before it has everything back uses pinned memory. It tries again at boundaries,
    after a failure no sooner than ``AGAIN_NS`` later.
    All that time the global lock is held, and a pause's end is seen only afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import types

from zico.base.compiled import call, callback, compare_exchange, compiled, inlined, keep_out_of_line, record_at
from zico.base.libc import monotonic_ns, private_lock, private_unlock, sleep_for
from zico.device.exchange import DONE, MAY_RUN, put_in_piece, put_in_pinned
from zico.device.mapping import enter_context, leave_context, status
from zico.heap import evicting
from zico.heap.cuda import streams
from zico.heap.cuda.backing import handles_of
from zico.heap.layout import HEAP, PRIVATE, device_of, job_of, pool_of, slot_address, slots_of, wanted_of
from zico.heap.waiting import is_initialized, leave_global_lock, take_global_lock
from zico.pool import regions
from zico.pool.fences import NO_FENCE
from zico.pool.layout import BOUNDARY, NO_MORE, NOBODY, header_of, regions_of

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Job

QUIET_NS = 250_000_000
"""A thread that copies the next batch to the GPU asks for memory for it just before."""
SETTLE_NS = 20_000_000
"""A call that has given the global lock up has so long to come to its launch, which is some function calls away."""
AGAIN_NS = 5_000_000_000
"""A boundary that tries in vain takes ``QUIET_NS``: 5 % of the time at most."""
_LOOKS = 8
"""A job that asks for memory all the time is not held still: it is given up after two seconds."""

_I64 = types.int64


# -- held still ------------------------------------------------------------------------------------


_MOVES = -1
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


@inlined
def _let_go(held: int) -> None:
    if is_initialized() != 0:
        leave_global_lock(held)


@compiled
def _hold_still(heap: HeapRecord, looks: int) -> int:
    """Take Python's global lock once nothing of the job runs on the device. Leaves the heap's mutex meanwhile.

    Returns:
        What ``_let_go`` gives back. ``_MOVES``: the job does not hold still, and the lock is not taken.
    """
    keep_out_of_line()
    for _ in range(looks):
        events = heap.events
        private_unlock(heap.mutex_address)
        sleep_for(QUIET_NS)
        private_lock(heap.mutex_address)
        streams.synchronize(heap)  # before the global lock, which functions of the host on a stream may wait for
        private_unlock(heap.mutex_address)
        held = take_global_lock() if is_initialized() != 0 else 0
        sleep_for(SETTLE_NS)
        if compare_exchange(heap.mutex_address, 0, 1) == 0:  # no wait: each lock may be held by who wants the other
            if events == heap.events and _is_idle(heap):
                return held
            _let_go(held)
        else:
            _let_go(held)
            private_lock(heap.mutex_address)
    return _MOVES


@compiled
def _is_idle(heap: HeapRecord) -> bool:
    """Tell whether the device has done everything: what streams have is asked for, and the rest waited for."""
    keep_out_of_line()
    device = device_of(heap)
    others = enter_context(device)
    busy = False
    for slot in range(heap.streams.n):
        asked = call(device.cuStreamQuery, (streams.stream_at(heap, slot).handle,))
        busy = busy or status(asked) == _NOT_READY
    leave_context(device, others)
    return not busy and streams.synchronize(heap) and heap.streams.lost == 0


# -- out of the budget -----------------------------------------------------------------------------


@callback(_I64(_I64, _I64))
def give_way(heap_address: int, asked: int) -> int:
    """Give back so many regions with live tensors, or as many as can be; 1: none, and none until the job has run."""
    heap = record_at(heap_address, HEAP)
    me = job_of(heap)
    held = _hold_still(heap, _LOOKS)
    if held == _MOVES:
        return 1
    done = _move_out(heap, me, min(asked, evicting.room(heap, me)))
    _let_go(held)
    me.evict = 0 if done == asked else NO_MORE
    if done > 0:
        heap.wait.return_until_ns = monotonic_ns() + evicting.patience_ns(heap)
    return 0


@compiled
def _move_out(heap: HeapRecord, me: Job, most: int) -> int:
    """Evict slots from the last one on, each region for itself: others go on with the first ones; returns how many."""
    keep_out_of_line()
    slots = slots_of(heap)
    given = wanted_of(heap)
    n = 0
    slot = heap.spill_offset >> heap.region_shift
    while slot > 0 and n < most:
        slot -= 1
        if slots[slot].live == 0 or slots[slot].region < 0:
            continue
        region: int = int(slots[slot].region)
        address = slot_address(heap, slot)
        staging, stream = heap.spill.staging_address, heap.captures.stream
        pinned = put_in_pinned(device_of(heap), address, staging, stream, region)
        if pinned == 0:
            break
        handles_of(heap)[slot] = pinned
        slots[slot].mapped = PRIVATE
        slots[slot].region = NOBODY
        given[0] = region
        me.evicted += 1  # first, as on the host device
        me.evictions += 1
        regions.give_back(pool_of(heap), given, 1, NO_FENCE)
        n += 1
    return n


# -- back in the budget ----------------------------------------------------------------------------


@callback(_I64(_I64))
def bring_back(heap_address: int) -> int:
    """Bring back all that is evicted, between two iterations alone; 0: it cannot be had now, or not all of it."""
    heap = record_at(heap_address, HEAP)
    me = job_of(heap)
    header = header_of(pool_of(heap))
    in_vain = heap.wait.return_until_ns == 0 and monotonic_ns() < heap.wait.again_ns
    if heap.wait.between == 0 or me.state == BOUNDARY or in_vain:
        return 0
    if header.granted + me.evicted > header.budget_regions:
        return 0
    held = _hold_still(heap, 1)
    done = False
    if held != _MOVES:
        done = _bring_back(heap, me)
        _let_go(held)
    heap.wait.again_ns = monotonic_ns() + AGAIN_NS
    if done:
        heap.wait.return_until_ns = 0
    return int(done)


@compiled
def _bring_back(heap: HeapRecord, me: Job) -> bool:
    keep_out_of_line()
    pool = pool_of(heap)
    granted = wanted_of(heap)
    n = me.evicted
    if not evicting.acquire_evicted(heap, me):
        return False
    done, lost = _fill(heap, n) if _wait_for_others(heap) else (0, 0)
    if done < n:
        me.evicted += n - done
        first = done + lost
        regions.give_back_unused(pool, granted[first:n], n - first)
    return done == n


@inlined
def _wait_for_others(heap: HeapRecord) -> bool:
    """Let the stream that copies wait for what the device still does on granted regions; false: it has refused."""
    pool = pool_of(heap)
    done = True
    for i in range(pool.n_waits):
        pair = pool.wait_pairs[i]
        done = done and streams.wait_on_device(heap, heap.captures.stream, pair, pool.wait_values[pair])
    streams.drop_waits(heap)
    return done


@compiled
def _fill(heap: HeapRecord, n: int) -> tuple[int, int]:
    """Put ``n`` granted regions behind the evicted slots, until the driver refuses.

    Returns:
        Behind how many, and how many more the job keeps for good, since the device may write there.
    """
    keep_out_of_line()
    slots = slots_of(heap)
    done = 0
    for slot in range(heap.spill_offset >> heap.region_shift):
        if done == n or slots[slot].live == 0 or slots[slot].mapped != PRIVATE:
            continue
        region: int = int(wanted_of(heap)[done])
        if heap.scrubbing.address != 0:
            regions_of(pool_of(heap))[region].last_owner = NOBODY  # until it is this job's: who dies leaves it unclean
        address = slot_address(heap, slot)
        staging, stream = heap.spill.staging_address, heap.captures.stream
        pinned: int = int(handles_of(heap)[slot])
        found = put_in_piece(device_of(heap), address, staging, stream, pinned, region)
        if found != DONE:
            return done, int(found == MAY_RUN)
        handles_of(heap)[slot] = 0
        slots[slot].mapped = region
        slots[slot].region = region
        if heap.scrubbing.address != 0:
            regions.note_scrubbed(pool_of(heap), region)
        done += 1
    return done, 0
