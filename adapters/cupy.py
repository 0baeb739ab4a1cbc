"""CuPy: arrays live in the pool, each freed on the stream it was allocated on.

Any number of streams is right. The first few that CuPy uses are kept for as long as the process
lives, since the heap knows a stream by its handle. Each thread's default stream has one handle that
stands for many streams. There, and on further ones, an array waits for the whole device when it is
freed, or at both its ends.

Memory of other devices than the pool's, managed memory, pinned memory and allocators that the
program chooses itself (``using_allocator``) are left alone. CUDA graphs are refused: what is
captured would set the marks that tell others when memory is free.

CuPy marks no iterations: they are found by repetition, or marked by ``zico.step()``.

Rejected: ``cupy.cuda.MemoryPool`` over an allocator of ours would keep its figures. But it returns
nothing before it is told to, so nobody else could use what an iteration has finished with.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zico.base.errors import HookError
from zico.job import joining, session
from zico.job.autoload import complain

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.job.session import Session

TESTED_VERSION = "14.2"

LIMIT_VARIABLE = "CUPY_GPU_MEMORY_LIMIT"
PER_THREAD_STREAM = 2
"""``cudaStreamPerThread``: the handle of the default stream of whichever thread uses it."""
MOST_STREAMS = 64
"""Streams that are kept alive, since the heap may mark them later; further ones get memory for
all streams."""


class Allocator:
    """What ``cupy.cuda.set_allocator`` takes."""

    def __init__(self, joined: Session, cupy: Any) -> None:  # noqa: ANN401 - the module
        from zico.heap.cuda import python_hooks

        self._session = joined
        self._memory = cupy.cuda.memory
        self._block = cupy.cuda.memory.CFunctionAllocatorMemory  # as CFunctionAllocator, but each with its own stream
        self._current_stream = cupy.cuda.get_current_stream
        self._current_device = cupy.cuda.runtime.getDevice
        self._runtime_error = cupy.cuda.runtime.CUDARuntimeError
        self._elsewhere = cupy.get_default_memory_pool().malloc
        self._ordinal = joined.pool.driver.facts.ordinal  # type: ignore[attr-defined]  # a CUDA device's driver
        self._hooks = python_hooks
        self._streams: dict[int, Any] = {}

    def __call__(self, size_bytes: int) -> Any:  # noqa: ANN401 - a cupy.cuda.MemoryPointer
        """Return memory for the current stream's work; waits for it.

        Raises:
            OutOfMemoryError: CuPy's own: the budget can never hold it.
            CUDARuntimeError: CuPy's own: the context is lost.
        """
        if self._current_device() != self._ordinal:
            return self._elsewhere(size_bytes)
        stream = self._current_stream()
        handle, hooks = stream.ptr, self._hooks
        allocate = hooks.allocate
        if handle == PER_THREAD_STREAM or (handle not in self._streams and len(self._streams) == MOST_STREAMS):
            handle, allocate = hooks.LEGACY_STREAM, hooks.allocate_for_all
        else:
            self._streams.setdefault(handle, stream)
        block = self._block(size_bytes, handle, allocate.address, hooks.free.address, self._ordinal)
        if block.ptr == 0 and size_bytes > 0:
            raise self._refusal(size_bytes)
        return self._memory.MemoryPointer(block, 0)

    def _refusal(self, size_bytes: int) -> Exception:
        joined = self._session
        if joined.lost_status:
            lost: Exception = self._runtime_error(joined.lost_status)
            return lost
        region_bytes = joined.pool.region_bytes
        held_bytes = int(joined.record["held"]) * region_bytes
        budget_bytes = int(joined.pool.header["budget_regions"]) * region_bytes
        error: Exception = self._memory.OutOfMemoryError(size_bytes, held_bytes, budget_bytes)
        return error


@session.once
def enable() -> Session | None:
    """Take CuPy's memory from the pool of the broker that ``ZICO_SOCKET`` names.

    Returns:
        The session, or ``None`` if there is no broker to join.

    Raises:
        HookError: The pool is on the host, where CuPy has no arrays, or Zico cannot redirect this
            CuPy.
        ZicoError: The broker or the device refuses this process.
    """
    joined = session.attach("cupy", kind="cuda")
    if joined is None:
        return None
    redirect(joined, import_module("cupy"))
    return joined


def enable_on_gpu() -> Session | None:
    """Do as ``enable`` where the pool is on a GPU, and nothing where it is the host's: for whoever imports CuPy."""
    return enable() if session.pool_kind() != "host" else None


def redirect(joined: Session, cupy: Any) -> None:  # noqa: ANN401 - the module
    """Take CuPy's device memory from a session's pool.

    Raises:
        HookError: This CuPy lacks what that needs; it works as without Zico.
    """
    try:
        allocator = Allocator(joined, cupy)
        streams = (cupy.cuda.Stream, cupy.cuda.ExternalStream)
        shared = _shared(joined, cupy.cuda.runtime.ipcGetMemHandle)
        cupy.cuda.set_allocator(allocator)
    except (AttributeError, ValueError) as error:
        message = f"CuPy {cupy.__version__} does not take Zico's allocator: {error}"
        raise HookError(message) from error
    for stream in streams:
        stream.begin_capture = _refuse_capture
    cupy.cuda.runtime.ipcGetMemHandle = shared
    announced = _announced(cupy.cuda.set_allocator)
    cupy.cuda.set_allocator = cupy.cuda.memory.set_allocator = announced
    if LIMIT_VARIABLE in os.environ:
        complain(f"{LIMIT_VARIABLE} has no effect", HookError("the budget is the limit of what CuPy takes"))


def _announced(set_allocator: Callable[[Any], None]) -> Callable[..., None]:
    """Wrap ``cupy.cuda.set_allocator``: a program may choose its own allocator, and is told what that means."""

    def announcing(allocator: Any = None) -> None:  # noqa: ANN401 - whatever CuPy takes
        set_allocator(allocator)
        if not isinstance(allocator, Allocator):
            reason = "the program has chosen another allocator (cupy.cuda.set_allocator)"
            complain("CuPy's arrays are no longer in the pool", HookError(reason))

    return announcing


def _shared(joined: Session, get_handle: Callable[[int], Any]) -> Callable[[int], Any]:
    """Wrap ``ipcGetMemHandle``: memory of the pool is mapped, and CUDA makes handles of what ``cudaMalloc`` gave."""

    def sharing(address: int) -> Any:  # noqa: ANN401 - CuPy's handle
        if 0 <= address - joined.heap.base < joined.heap.window.size_bytes:
            message = "not with Zico's allocator: IPC handles of arrays; send a copy in host memory (cupy.asnumpy)"
            raise RuntimeError(message)
        return get_handle(address)

    return sharing


def _refuse_capture(*_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401 - whatever CuPy passes
    message = "not with Zico's allocator: CUDA graphs, whose replay would repeat the marks by which memory is shared"
    raise RuntimeError(message)


joining.enter()  # the import is the front door
