"""Mapping from compiled code: one piece at one address, on either device, without Python.

Known limitations
    One call at a time per ``DEVICE`` record: the caller holds the lock that guards its slots.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from zico.base.compiled import array_at, call, compiled, inlined, keep_out_of_line, record_at
from zico.device import host
from zico.device.record import DEVICE, HOST, MOVER

if TYPE_CHECKING:
    from zico.device.record import DeviceRecord

_SHARED_FIXED = mmap.MAP_SHARED | host.MAP_FIXED
_PRIVATE_FIXED = mmap.MAP_PRIVATE | host.MAP_FIXED
_RESERVED_FIXED = host.RESERVED | host.MAP_FIXED
_READ_WRITE = host.PROT_READ_WRITE
_NONE = host.PROT_NONE
_U64 = np.dtype("u8")
_I32 = np.dtype("i4")
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_STATUS_MASK = 0xFFFFFFFF  # a CUresult is 32 bits wide; the upper half of the register is anything
_CURRENT = DEVICE.fields["current"][1]
_ACCESS = DEVICE.fields["access"][1]
_CREATED = DEVICE.fields["created"][1]


@intrinsic
def address_of(_typing: Any, record: Any) -> Any:  # noqa: ANN401 - Numba types
    """Return the address at which a record lies."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401 - LLVM builders
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(record), codegen


@inlined
def status(result: int) -> int:
    """Return the CUresult in what ``zico.base.compiled.call`` brought back from a function of the CUDA driver."""
    return result & _STATUS_MASK


@compiled
def map_piece(device: DeviceRecord, address: int, piece: int, was_mapped: int) -> bool:
    """Map a piece of the device's memory at an address of a window; it is to be used after ``open_pieces``.

    On a CUDA device a piece of another process's memory is imported when it is mapped for the first
    time.

    Args:
        device: A ``DEVICE`` record.
        address: Where; a multiple of the granularity.
        piece: Which piece of the memory.
        was_mapped: Whether something may be mapped there; then it is unmapped first. Not 0 is
            always right, only slower.

    Returns:
        Whether it is mapped. If not, the address must be taken for one where nothing, or anything,
        is mapped.
    """
    keep_out_of_line()
    if device.kind == HOST:
        length = device.piece_bytes
        arguments = (address, length, _READ_WRITE, _SHARED_FIXED, device.descriptor, piece * length)
        return call(device.mmap, arguments) == address
    others = enter_context(device)
    if was_mapped != 0:
        call(device.cuMemUnmap, (address, device.piece_bytes))  # a failure shows: nothing maps over a mapping
    handle = handle_of(device, piece)
    mapped = handle != 0 and status(call(device.cuMemMap, (address, device.piece_bytes, 0, handle, 0))) == 0
    leave_context(device, others)
    return mapped


@compiled
def _import(device: DeviceRecord, piece: int) -> int:
    """Import a piece by its descriptor, which is closed then; returns its handle, 0: the driver has refused."""
    keep_out_of_line()
    descriptors = array_at(device.descriptors_address, piece + 1, _I32)
    descriptor: int = np.int64(descriptors[piece])  # type: ignore[assignment]  # one type for compiled code
    device.created = 0
    arguments = (address_of(device) + _CREATED, descriptor, _FILE_DESCRIPTOR)
    if status(call(device.cuMemImportFromShareableHandle, arguments)) != 0:
        return 0
    array_at(device.handles_address, piece + 1, _U64)[piece] = device.created
    descriptors[piece] = -1
    call(device.close, (descriptor,))
    return device.created


@compiled
def open_pieces(device: DeviceRecord, address: int, n: int) -> bool:
    """Let the device read and write ``n`` pieces that ``map_piece`` has put side by side, by one call.

    Returns:
        Whether it may. If not, the pieces are mapped, and whoever touches one faults.
    """
    keep_out_of_line()
    if device.kind == HOST:
        return True
    others = enter_context(device)
    result = call(device.cuMemSetAccess, (address, n * device.piece_bytes, address_of(device) + _ACCESS, 1))
    leave_context(device, others)
    return status(result) == 0


@compiled
def map_pages(device: DeviceRecord, address: int) -> None:
    """Map all pages of the piece that is mapped at ``address``, which else takes a fault for each.

    A page that is not resident becomes so. On the host device only, and since Linux 5.14; elsewhere
    this does nothing.
    """
    keep_out_of_line()
    if device.kind == HOST:
        call(device.madvise, (address, device.piece_bytes, host.POPULATE_READ))


@compiled
def unmap_piece(device: DeviceRecord, address: int) -> bool:
    """Turn the piece-sized addresses at ``address`` into mere reserved ones; false if the device refused."""
    keep_out_of_line()
    if device.kind == HOST:
        return call(device.mmap, (address, device.piece_bytes, _NONE, _RESERVED_FIXED, -1, 0)) == address
    others = enter_context(device)
    result = call(device.cuMemUnmap, (address, device.piece_bytes))
    leave_context(device, others)
    return status(result) == 0


@compiled
def discard_piece(device: DeviceRecord, piece: int) -> bool:
    """Give the physical bytes of a piece back, so that zeros are there; false if that cannot be, as on CUDA."""
    keep_out_of_line()
    length = device.piece_bytes
    if device.kind != HOST:
        return False
    return status(call(device.fallocate, (device.descriptor, host.PUNCH_HOLE, piece * length, length))) == 0


@compiled
def detach_piece(device: DeviceRecord, address: int, piece: int) -> bool:
    """Map the piece at ``address``, where it is mapped and being written to, so that later writes are this process's.

    Reads see the piece where this process has not written since: until ``own_pages`` the piece must
    stay as it is. The kernel replaces the mapping in one step; a write comes before it, and to the
    piece, or after it.

    Returns:
        Whether it is so; if not, nothing has changed. Only on the host device.
    """
    keep_out_of_line()
    if device.kind != HOST:
        return False
    length = device.piece_bytes
    arguments = (address, length, _READ_WRITE, _PRIVATE_FIXED, device.descriptor, piece * length)
    return call(device.mmap, arguments) == address


@compiled
def own_pages(device: DeviceRecord, address: int) -> bool:
    """Let the kernel make a private copy of each page that ``detach_piece`` has left shared.

    Returns:
        Whether nothing at these addresses depends on the piece any more; if not, some pages do, and
        it can be tried again. Writes by other threads are in the copies.
    """
    keep_out_of_line()
    return status(call(device.madvise, (address, device.piece_bytes, host.POPULATE_WRITE))) == 0


@compiled
def free_bytes(device: DeviceRecord) -> int:
    """Return the machine's memory that holds nothing, not even a file's pages."""
    keep_out_of_line()
    return call(device.sysconf, (host.FREE_PAGES,)) * mmap.PAGESIZE


@compiled
def map_handle(device: DeviceRecord, address: int, handle: int) -> bool:
    """Map a piece by its handle where nothing is mapped, and open it; false if the device refuses: nothing is mapped.

    The primary context is current (``enter_context``), as for what follows.
    """
    keep_out_of_line()
    length = device.piece_bytes
    if status(call(device.cuMemMap, (address, length, 0, handle, 0))) != 0:
        return False
    if status(call(device.cuMemSetAccess, (address, length, address_of(device) + _ACCESS, 1))) != 0:
        call(device.cuMemUnmap, (address, length))
        return False
    return True


@inlined
def handle_of(device: DeviceRecord, piece: int) -> int:
    """Return the handle of a piece of a CUDA device's memory, which is imported if it has none; 0: it is refused."""
    handle = int(np.int64(array_at(device.handles_address, piece + 1, _U64)[piece]))
    return handle if handle != 0 else _import(device, piece)


@inlined
def enter_context(device: DeviceRecord) -> int:
    """Make the primary context current in this thread, on a CUDA device; returns whose has to be put back, or 0.

    Where there was none ours stays, as the CUDA runtime would leave it.
    """
    device.current = 0
    call(device.cuCtxGetCurrent, (address_of(device) + _CURRENT,))
    others = device.current
    if others == device.context:
        return 0
    call(device.cuCtxSetCurrent, (device.context,))
    return others


@inlined
def leave_context(device: DeviceRecord, others: int) -> None:
    """Give the thread its own context back."""
    if others != 0:
        call(device.cuCtxSetCurrent, (others,))


# --------------------------------------------------------------------------------------------------
# Managed memory of a CUDA device from compiled code: which parts are to be on the device, and which
# on the host.
#
# Known limitations
#     One call at a time per ``MOVER`` record, as in ``zico.device.mapping``.

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


# --------------------------------------------------------------------------------------------------
# Pinned memory of the host at a window's addresses, from compiled code: the next tier of a CUDA
# device.
#
# Each piece has a handle of its own, which the caller keeps: created when it is mapped, released
# when it is unmapped.
#
# Known limitations
#     One call at a time per ``DEVICE`` record, as in ``zico.device.mapping``.

_PROPERTIES = DEVICE.fields["pinned_properties"][1]


@compiled
def map_pinned(device: DeviceRecord, address: int) -> int:
    """Create a piece of pinned memory and map it where nothing is mapped, for the device.

    Args:
        device: A ``DEVICE`` record that ``fill_pinned`` has filled.
        address: Where; a multiple of the granularity.

    Returns:
        The piece's handle; 0: the driver has refused, and nothing has changed.
    """
    keep_out_of_line()
    others = enter_context(device)
    handle = create_pinned(device)
    if handle != 0 and not map_handle(device, address, handle):
        call(device.cuMemRelease, (handle,))
        handle = 0
    leave_context(device, others)
    return handle


@inlined
def create_pinned(device: DeviceRecord) -> int:
    """Create a piece of pinned memory; returns its handle, 0: the driver has refused."""
    device.created = 0
    record = address_of(device)
    arguments = (record + _CREATED, device.piece_bytes, record + _PROPERTIES, 0)
    return device.created if status(call(device.cuMemCreate, arguments)) == 0 else 0


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
