"""Managed memory of a CUDA device from compiled code: which parts are to be on the device, and which on the host.

Known limitations
    One call at a time per ``MOVER`` record, as in ``zico.driver.mapping``. Not seen on a real GPU yet.
"""

from __future__ import annotations

from zico.compiled import call, compiled, keep_out_of_line, record_at
from zico.driver.mapping import enter_context, leave_context, status
from zico.driver.record import DEVICE, MOVER

__all__ = ["move"]

_CONTEXT = MOVER.fields["context"][1]


@compiled
def move(mover_address: int, address: int, size_bytes: int, location: int) -> bool:
    """Let a range move when the mover's stream comes there; contents and addresses stay.

    A kernel that uses it before, meanwhile or afterwards finds it, if more slowly.

    Args:
        mover_address: Of a ``MOVER`` record.
        address: Inside managed memory.
        size_bytes: At least 1.
        location: ``to_device`` or ``to_host`` of the record.

    Returns:
        Whether the driver has taken the order; if not, all stays where it is.
    """
    keep_out_of_line()
    mover = record_at(mover_address, MOVER)
    device = record_at(mover_address + _CONTEXT, DEVICE)
    others = enter_context(device)
    result = call(mover.cuMemPrefetchAsync_v2, (address, size_bytes, location, 0, mover.stream))
    leave_context(device, others)
    return status(result) == 0
