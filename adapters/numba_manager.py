"""Numba's external memory manager (interface version 1): device arrays live in the pool. Imported by ``numba.py`` only.

Numba says of an array neither which streams use it nor, when it goes, which still do. Its own
manager frees by ``cuMemFree``, which waits for the whole device. So here memory is given with no
work left on it, and its free waits for the device too. Both give up Python's lock meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from typing import TYPE_CHECKING, Any

from numba.cuda.cudadrv import driver

from zico.heap.cuda import python_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zico.job.session import Session

INTERFACE_VERSION = 1
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_LOST = "an earlier kernel has failed, and the context is lost with it: end the process"

_allocate = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32)(
    python_hooks.allocate_for_all.address
)
_free = ctypes.PYFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32)(python_hooks.free.address)


class PoolMemoryManager(driver.NumbaCUDAMemoryManager):  # type: ignore[misc]  # Numba ships no types
    """The manager of one context. On another device than the pool's it is Numba's own; so is all host memory."""

    def __init__(self, joined: Session, context: Any) -> None:  # noqa: ANN401 - a numba.cuda Context, or None
        """Manage a context's memory; without one Numba asks for the version only."""
        super().__init__(context=context)
        self._session = joined
        ordinal = joined.pool.driver.facts.ordinal  # type: ignore[attr-defined]  # a CUDA device's driver
        self._is_pools = context is not None and context.device.id == ordinal
        self._frees = _Frees()

    @property
    def interface_version(self) -> int:
        """Return the version of Numba's interface that this is written for."""
        return INTERFACE_VERSION

    def memalloc(self, size: int) -> Any:  # noqa: ANN401 - Numba's MemoryPointer
        """Return memory that any stream may use at once; waits for it.

        Raises:
            CudaAPIError: Numba's own: the budget can never hold it, or the context is lost.
        """
        if not self._is_pools or size <= 0:
            return super().memalloc(size)
        address = _allocate(python_hooks.LEGACY_STREAM, size, 0)
        if address == 0 and self._session.lost_status:
            raise driver.CudaAPIError(self._session.lost_status, _LOST)
        if address == 0:
            raise driver.CudaAPIError(_OUT_OF_MEMORY, self._why_not(size))
        finalizer = _freeing(self.allocations, self._frees, address)
        memory = driver.AutoFreePointer(weakref.proxy(self.context), _pointer(address), size, finalizer=finalizer)
        self.allocations[address] = memory
        return memory.own()

    def _why_not(self, size_bytes: int) -> str:
        free_bytes, most_bytes = self._session.pool.free_and_total_bytes()
        return (
            f"out of memory: {size_bytes} bytes cannot be had; this job may hold {most_bytes} bytes, and still take "
            f"{free_bytes}: raise --budget or use a smaller batch"
        )

    def get_memory_info(self) -> Any:  # noqa: ANN401 - Numba's MemoryInfo
        """Return what this job may still take, and the most that it may hold, in bytes."""
        if not self._is_pools:
            return super().get_memory_info()
        free_bytes, most_bytes = self._session.pool.free_and_total_bytes()
        return driver.MemoryInfo(free=free_bytes, total=most_bytes)

    def get_ipc_handle(self, memory: Any) -> Any:  # noqa: ANN401 - Numba's MemoryPointer and IpcHandle
        """Refuse: CUDA makes such handles of what ``cuMemAlloc`` gave only."""
        if not self._is_pools:
            return super().get_ipc_handle(memory)
        message = "not with Zico's memory manager: IPC handles of device arrays; copy the array through host memory"
        raise RuntimeError(message)

    @contextlib.contextmanager
    def defer_cleanup(self) -> Iterator[None]:
        """Free nothing, and so wait for nothing, inside the block."""
        with super().defer_cleanup(), self._frees.put_off():
            yield


def _pointer(address: int) -> Any:  # noqa: ANN401 - what Numba's driver calls a device pointer
    binding = getattr(driver, "binding", None)  # there where Numba calls the driver through NVIDIA's bindings
    return ctypes.c_size_t(address) if binding is None else binding.CUdeviceptr(address)


class _Frees:
    """Frees of a context's arrays: done at once, or when the last block ends that puts them off."""

    def __init__(self) -> None:
        self._blocks = 0
        self._addresses: list[int] = []

    def add(self, address: int) -> None:
        self._addresses.append(address)
        self._run()

    def _run(self) -> None:
        if self._blocks > 0:
            return
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while True:
                _free(python_hooks.LEGACY_STREAM, self._addresses.pop(), 0)

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            self._run()


def _freeing(allocations: dict[int, Any], frees: _Frees, address: int) -> Callable[[], None]:
    """Return what Numba calls when nobody has an array any more. It must not keep the manager alive."""

    def finalize() -> None:
        allocations.pop(address, None)
        frees.add(address)

    return finalize
