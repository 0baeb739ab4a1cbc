"""Stands in for what the adapter uses of CuPy, with the signatures of CuPy 14.2; tests say which stream is current."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace


class Block:
    """Stands in for ``CFunctionAllocatorMemory``: calls C functions with the lock held, the second one when it dies."""

    def __init__(self, size: int, param: int, malloc: int, free: int, device: int) -> None:
        """Allocate."""
        types = ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32
        self._free = ctypes.PYFUNCTYPE(None, *types[1:])(free)
        self._param, self._device, self.ptr = param, device, 0
        if size > 0:
            self.ptr = ctypes.PYFUNCTYPE(*types)(malloc)(param, size, device)

    def __del__(self) -> None:
        """Free."""
        if self.ptr:
            self._free(self._param, self.ptr, self._device)


class Pointer:
    """Stands in for ``MemoryPointer``."""

    def __init__(self, mem: Block, offset: int) -> None:
        """Point."""
        self.mem, self.ptr = mem, mem.ptr + offset


class FullError(MemoryError):
    """Stands in for ``OutOfMemoryError``."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        """Say the figures as CuPy does."""
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes, limit {limit:,}")


class FailedError(RuntimeError):
    """Stands in for ``CUDARuntimeError``."""

    def __init__(self, status: int) -> None:
        """Keep the status."""
        super().__init__(f"status {status}")
        self.status = status


class Stream:
    """A stream that is but a handle."""

    def __init__(self, ptr: int) -> None:
        """Keep the handle."""
        self.ptr = ptr

    def begin_capture(self) -> None:
        """Stand in for what is refused."""


def stand_in() -> SimpleNamespace:
    """Return a module with what the adapter uses of CuPy."""
    memory = SimpleNamespace(CFunctionAllocatorMemory=Block, MemoryPointer=Pointer, OutOfMemoryError=FullError)
    used = []
    cuda = SimpleNamespace(
        memory=memory,
        runtime=SimpleNamespace(CUDARuntimeError=FailedError, ipcGetMemHandle=lambda address: ("a handle", address)),
        Stream=type("Stream", (Stream,), {}),
        ExternalStream=type("ExternalStream", (Stream,), {}),
        set_allocator=lambda allocator=None: used.append(allocator),
        get_allocator=lambda: used[-1],
    )
    return SimpleNamespace(cuda=cuda, __version__="0")
