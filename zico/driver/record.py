"""The record from which compiled code maps pieces: filled once in Python by a driver's ``fill_device``."""

from __future__ import annotations

import numpy as np

HOST = 0
CUDA = 1

FUNCTIONS = (
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuStreamWaitValue64_v2",
    "cuStreamWriteValue64_v2",
    "cuStreamSynchronize",
    "cuStreamIsCapturing",
    "cuLaunchKernel",
)
"""Functions of the CUDA driver that compiled code calls, each by its address in the field of the same name."""

MANAGED_FUNCTIONS = ("cuMemPrefetchAsync_v2",)
"""Further ones for memory that the driver manages, which drivers before CUDA 12.2 do not have."""

ACCESS = np.dtype([("location_type", "i4"), ("location_id", "i4"), ("flags", "i4"), ("unused", "i4")])
"""``CUmemAccessDesc`` of cuda.h (12 bytes)."""

DEVICE = np.dtype(
    [
        ("kind", "i8"),  # HOST or CUDA
        ("piece_bytes", "i8"),
        ("mmap", "i8"),  # host: addresses of functions of the C library
        ("fallocate", "i8"),
        ("madvise", "i8"),
        ("sysconf", "i8"),
        ("descriptor", "i8"),  # host: the memory's memfd
        ("handles_address", "i8"),  # cuda: a u8 a piece
        ("context", "i8"),  # cuda: the primary context
        ("current", "i8"),  # cuda: where cuCtxGetCurrent writes
        ("access", ACCESS),
        ("pinned_access", "i4", (2, 3)),  # cuda, for memory of the host: two CUmemAccessDesc, the device's first
        ("pinned_properties", "u8", (4,)),  # CUmemAllocationProp, 32 bytes in every cuda.h from 10.2 to 13
        ("created", "i8"),  # where cuMemCreate writes
        *[(name, "i8") for name in FUNCTIONS],
    ]
)
"""One process's way to one memory. Calls that use one record must not overlap: the caller holds its own lock."""

MOVER = np.dtype(
    [
        ("context", DEVICE),  # whose primary context is made current
        ("stream", "i8"),  # on which memory moves
        ("to_device", "i8"),  # CUmemLocation, 8 bytes that are passed in one register
        ("to_host", "i8"),
        *[(name, "i8") for name in MANAGED_FUNCTIONS],
    ]
)
"""One process's way to move memory that the driver manages. Calls that use one record must not overlap."""
