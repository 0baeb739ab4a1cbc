"""Regions that are not this job's are imported, so that Python can map them outside of the job's window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import entry, keep_out_of_line
from zico.base.libc import private_lock, private_unlock
from zico.device.mapping import enter_context, handle_of, leave_context
from zico.heap.layout import HEAP, device_of

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord


@entry(HEAP, [np.int64], int)
def import_regions(heap: HeapRecord, regions: Any, n: int) -> bool:  # noqa: ANN401 - an int64 array
    """Import ``n`` regions, inside the heap's mutex, as a grant does; false if the driver refuses one."""
    keep_out_of_line()
    device = device_of(heap)
    private_lock(heap.mutex_address)
    others = enter_context(device)
    done = True
    for i in range(n):
        if done and handle_of(device, regions[i]) == 0:
            done = False
    leave_context(device, others)
    private_unlock(heap.mutex_address)
    return done
