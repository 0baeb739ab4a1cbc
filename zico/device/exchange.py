"""Other memory takes the place of a piece of a CUDA device's memory, at the same addresses, with the same bytes.

Theory of operation
    The driver replaces no mapping in one step. So the bytes are copied at a *staging* address, where
    nothing is mapped otherwise, and the mappings change places after that::

        address -> old     staging -> new      the device copies, and this waits for it
        address -> nothing                     whoever touches it now faults
        address -> new

Guarantees
    What the driver refuses changes nothing, unless it also refuses to map what was mapped before.
    After a wait that it refuses, no further memory is exchanged.

Known limitations
    The caller sees to it that nothing of the process works on the device meanwhile. One call at a
    time per ``DEVICE`` record, as in ``zico.device.mapping``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.compiled import call, compiled, inlined, keep_out_of_line
from zico.device.mapping import create_pinned, enter_context, handle_of, leave_context, map_handle, status

if TYPE_CHECKING:
    from zico.device.record import DeviceRecord

DONE, REFUSED, MAY_RUN = 0, 1, 2


@compiled
def put_in_pinned(device: DeviceRecord, address: int, staging: int, stream: int, piece: int) -> int:
    """Put new pinned memory of the host behind an address where a piece is mapped.

    Args:
        device: A ``DEVICE`` record that ``fill_pinned`` has filled.
        address: Where the piece is mapped.
        staging: As many reserved bytes, where nothing is mapped.
        stream: Which copies; it captures nothing.
        piece: What is mapped there; it keeps its bytes, and can be given away.

    Returns:
        The handle of the pinned memory, 0: the driver has refused.
    """
    keep_out_of_line()
    others = enter_context(device)
    pinned = create_pinned(device)
    if pinned != 0 and _exchange(device, address, staging, stream, handle_of(device, piece), pinned) != DONE:
        call(device.cuMemRelease, (pinned,))
        pinned = 0
    leave_context(device, others)
    return pinned


@compiled
def put_in_piece(device: DeviceRecord, address: int, staging: int, stream: int, pinned: int, piece: int) -> int:
    """Put a piece behind an address where pinned memory is mapped, which is given back.

    Args:
        device: As for ``put_in_pinned``, as are the next three.
        address: Where the memory is mapped.
        staging: As many reserved bytes.
        stream: Which copies.
        pinned: The handle of the pinned memory.
        piece: What is to be mapped there.

    Returns:
        ``DONE``. Else the pinned memory is mapped still: ``REFUSED``, or ``MAY_RUN``: the device may
        still write to the piece, which must go to nobody.
    """
    keep_out_of_line()
    others = enter_context(device)
    handle = handle_of(device, piece)
    found = REFUSED if handle == 0 else _exchange(device, address, staging, stream, pinned, handle)
    if found == DONE:
        call(device.cuMemRelease, (pinned,))
    leave_context(device, others)
    return found


@inlined
def _exchange(device: DeviceRecord, address: int, staging: int, stream: int, old: int, new: int) -> int:
    """Copy what lies at the address into other memory and map that there; both by handle."""
    if not map_handle(device, staging, new):
        return REFUSED
    copied = status(call(device.cuMemcpyAsync, (staging, address, device.piece_bytes, stream))) == 0
    if status(call(device.cuStreamSynchronize, (stream,))) != 0:
        return MAY_RUN  # so the staging address stays taken, and nothing is exchanged any more
    call(device.cuMemUnmap, (staging, device.piece_bytes))
    if not copied or status(call(device.cuMemUnmap, (address, device.piece_bytes))) != 0:
        return REFUSED
    if map_handle(device, address, new):
        return DONE
    map_handle(device, address, old)
    return REFUSED
