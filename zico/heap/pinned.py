"""The next tier of a GPU: pinned memory of the host, mapped in the window where tensors overflow to.

Called by address where every heap comes by, so the host device's functions do not contain it. Kernels find such a
tensor as any other, over the bus: slower, still right. Its memory is this process's own, and in no way inside the
budget; it is bounded as the host device's next tier is (``zico.heap.evicting.room``), because pinned memory cannot even
be swapped.

Guarantees
    What the driver refuses changes nothing: the tensor is refused as where there is no next tier.
    Memory goes back only when no tensor lies in it, and the device has done everything (``zico.heap.tensors.bury``).

Known limitations
    Not seen on a real GPU yet. Every free of such a tensor waits for the device, and creating its memory takes the
    driver milliseconds: it is the way out where nobody could go on otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types

from zico.compiled import array_at, callback, compiled, inlined, keep_out_of_line, record_at
from zico.driver.mapping import DEVICE
from zico.driver.next_tier import map_pinned, unmap_pinned
from zico.heap import evicting
from zico.heap.backing import address_of
from zico.heap.layout import HEAP
from zico.heap.records import job_of, slots_of
from zico.pool.layout import NOBODY
from zico.pool.regions import GRANTED, NEVER

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord

_I64 = types.int64
_U64 = np.dtype("u8")

Array = Any


@inlined
def _handles_of(heap: HeapRecord) -> Array:
    return array_at(heap.spill.pinned_address, heap.window_bytes >> heap.region_shift, _U64)


@compiled
def _map(heap: HeapRecord, slot: int) -> bool:
    """Map new memory behind a slot of which nothing is mapped; false if the driver refuses."""
    keep_out_of_line()
    handle = map_pinned(record_at(heap.backing.device_address, DEVICE), address_of(heap, slot))
    if handle == 0:
        return False
    _handles_of(heap)[slot] = handle
    slots_of(heap)[slot].mapped = slot
    heap.spill.live_bytes += 1 << heap.region_shift
    return True


@compiled
def _unmap(heap: HeapRecord, slot: int) -> None:
    """Give the memory behind an empty slot back; what the driver does not unmap stays, for the next tensor there."""
    keep_out_of_line()
    handle: int = np.int64(_handles_of(heap)[slot])  # type: ignore[assignment]  # one type for compiled code
    if handle != 0 and unmap_pinned(record_at(heap.backing.device_address, DEVICE), address_of(heap, slot), handle):
        _handles_of(heap)[slot] = 0
        slots_of(heap)[slot].mapped = NOBODY
        heap.spill.live_bytes -= 1 << heap.region_shift


@callback(_I64(_I64, _I64, _I64))
def overflow(heap_address: int, first: int, last: int) -> int:
    """Put pinned memory behind the slots of a run that have nothing; all or nothing.

    Returns:
        ``GRANTED``; ``NEVER``: there is no room, or the driver has refused.
    """
    heap = record_at(heap_address, HEAP)
    slots = slots_of(heap)
    n = 0
    for slot in range(first, last + 1):
        n += int(slots[slot].mapped == NOBODY)
    if n > evicting.room(heap, job_of(heap)):
        return NEVER
    for slot in range(first, last + 1):
        if slots[slot].mapped == NOBODY and not _map(heap, slot):
            for other in range(first, last + 1):
                if slots[other].live == 0:
                    _unmap(heap, other)
            return NEVER
    return GRANTED


@callback(types.void(_I64, _I64))
def retire(heap_address: int, slot: int) -> None:
    """Give the memory behind a slot back that no tensor lies in any more."""
    _unmap(record_at(heap_address, HEAP), slot)
