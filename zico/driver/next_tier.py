"""Pinned memory of the host at a window's addresses, from compiled code: the next tier of a CUDA device.

Each piece has a handle of its own, which the caller keeps: created when it is mapped, released when it is unmapped.

Known limitations
    One call at a time per ``DEVICE`` record, as in ``zico.driver.mapping``. Not seen on a real GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.compiled import call, compiled, inlined, keep_out_of_line
from zico.driver.mapping import address_of, enter_context, leave_context, status
from zico.driver.record import DEVICE

if TYPE_CHECKING:
    from zico.driver.record import DeviceRecord

__all__ = ["map_pinned", "unmap_pinned"]

_ACCESSES = 2
_ACCESS = DEVICE.fields["pinned_access"][1]
_PROPERTIES = DEVICE.fields["pinned_properties"][1]
_CREATED = DEVICE.fields["created"][1]


@compiled
def map_pinned(device: DeviceRecord, address: int) -> int:
    """Create a piece of pinned memory and map it where nothing is mapped, for the device and the processor.

    Args:
        device: A ``DEVICE`` record that ``fill_pinned`` has filled.
        address: Where; a multiple of the granularity.

    Returns:
        The piece's handle; 0: the driver has refused, and nothing has changed.
    """
    keep_out_of_line()
    others = enter_context(device)
    handle = _create(device)
    if handle != 0 and not _map(device, address, handle):
        call(device.cuMemRelease, (handle,))
        handle = 0
    leave_context(device, others)
    return handle


@inlined
def _create(device: DeviceRecord) -> int:
    device.created = 0
    record = address_of(device)
    arguments = (record + _CREATED, device.piece_bytes, record + _PROPERTIES, 0)
    return device.created if status(call(device.cuMemCreate, arguments)) == 0 else 0


@inlined
def _map(device: DeviceRecord, address: int, handle: int) -> bool:
    length = device.piece_bytes
    if status(call(device.cuMemMap, (address, length, 0, handle, 0))) != 0:
        return False
    if status(call(device.cuMemSetAccess, (address, length, address_of(device) + _ACCESS, _ACCESSES))) != 0:
        call(device.cuMemUnmap, (address, length))
        return False
    return True


@compiled
def unmap_pinned(device: DeviceRecord, address: int, handle: int) -> bool:
    """Unmap a piece that nobody uses any more and give it back; false if the driver refused: it is still there."""
    keep_out_of_line()
    others = enter_context(device)
    done = status(call(device.cuMemUnmap, (address, device.piece_bytes))) == 0
    if done:
        call(device.cuMemRelease, (handle,))
    leave_context(device, others)
    return done
