"""The record from which compiled code maps pieces: filled once in Python by a driver's ``fill_device``."""

from __future__ import annotations

from typing import Annotated

from zico.base.records import I4, I8, Numbers, Record, dtype_of

HOST = 0
CUDA = 1


class Access(Record, align=False):
    """``CUmemAccessDesc`` of cuda.h (12 bytes)."""

    location_type: I4
    location_id: I4
    flags: I4
    unused: I4


class DeviceRecord(Record, align=False):
    """One process's way to one memory. Calls that use one record must not overlap: the caller holds its own lock."""

    kind: I8  # HOST or CUDA
    piece_bytes: I8
    mmap: I8  # host: addresses of functions of the C library
    fallocate: I8
    madvise: I8
    sysconf: I8
    descriptor: I8  # host: the memory's memfd
    handles_address: I8  # cuda: a u8 a piece, 0: it has not been imported yet
    descriptors_address: I8  # cuda: an i4 a piece, by which it is imported
    close: I8  # cuda: address of the C library's function
    context: I8  # cuda: the primary context
    current: I8  # cuda: where cuCtxGetCurrent writes
    access: Access
    pinned_properties: Annotated[Numbers, "u8", (4,)]  # of the host: CUmemAllocationProp, 32 bytes from CUDA 10.2 on
    created: I8  # where cuMemCreate and cuMemImportFromShareableHandle write
    # Addresses of the driver's functions.
    cuMemCreate: I8
    cuMemImportFromShareableHandle: I8
    cuMemRelease: I8
    cuMemMap: I8
    cuMemUnmap: I8
    cuMemSetAccess: I8
    cuCtxGetCurrent: I8
    cuCtxSetCurrent: I8
    cuCtxSynchronize: I8
    cuStreamWaitValue64_v2: I8
    cuStreamWriteValue64_v2: I8
    cuStreamSynchronize: I8
    cuStreamQuery: I8
    cuStreamIsCapturing: I8
    cuThreadExchangeStreamCaptureMode: I8
    cuLaunchKernel: I8
    cuMemcpyAsync: I8


DEVICE = dtype_of(DeviceRecord)
FUNCTIONS = DEVICE.names[DEVICE.names.index("cuMemCreate") :]
"""Functions of the CUDA driver that compiled code calls, each by its address in the field of the same name."""


class Mover(Record, align=False):
    """One process's way to move memory that the driver manages. Calls that use one record must not overlap."""

    context: DeviceRecord  # whose primary context is made current
    stream: I8  # on which memory moves
    to_device: I8  # CUmemLocation, 8 bytes that are passed in one register
    to_host: I8
    # Address of a function that drivers before CUDA 12.2 do not have.
    cuMemPrefetchAsync_v2: I8


MOVER = dtype_of(Mover)
MANAGED_FUNCTIONS = ("cuMemPrefetchAsync_v2",)
"""Further ones for memory that the driver manages."""
