"""The functions that frameworks call for a GPU's memory, over a device of software, as C functions by address."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.members import join
from cpu.support.software_device import SoftwareDevice

from zico.heap.build import Heap
from zico.heap.cuda import hooks
from zico.heap.layout import HEAP_RECORD
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
STREAM, OTHER = 11, 12
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY = 0, 1, 2
I32, I64 = ctypes.c_int32, ctypes.c_int64

allocate = ctypes.CFUNCTYPE(I64, I64, I32, I64)(hooks.allocate.address)
free = ctypes.CFUNCTYPE(None, I64, I64, I32, I64)(hooks.free.address)
record_stream = ctypes.CFUNCTYPE(None, I64, I64)(hooks.record_stream.address)
mem_alloc_async = ctypes.CFUNCTYPE(I32, ctypes.c_void_p, I64, I64)(hooks.mem_alloc_async.address)
mem_alloc_from_pool_async = ctypes.CFUNCTYPE(I32, ctypes.c_void_p, I64, I64, I64)(
    hooks.mem_alloc_from_pool_async.address
)
cache_info = ctypes.CFUNCTYPE(None, I64, ctypes.c_int8, ctypes.c_void_p)(hooks.cache_info.address)
mem_free_async = ctypes.CFUNCTYPE(I32, I64, I64)(hooks.mem_free_async.address)


@pytest.fixture
def heap() -> Iterator[Heap]:
    """Let this process's hooks serve from a pool of four regions of 1 MiB, on a device of software."""
    before = HEAP_RECORD.copy()
    device = SoftwareDevice()
    with (
        PoolTable.create(
            budget_bytes=4 * MIB, region_bytes=MIB, use_claims=False, self_admit=True, on_timeline=True
        ) as pool,
        join(pool) as member,
    ):
        made = Heap(member, HEAP_RECORD, wait_limit_s=0.01, timeline=device.timeline(member))
        made.enable()
        yield made
        device.drain()
        made.close()
    HEAP_RECORD[:] = before
    hooks.OTHERS_RECORD[0] = 0


def live_bytes(heap: Heap) -> int:
    """Return what lives in the pool."""
    (job,) = (job for job in heap.pool.jobs if job["pid"])
    return int(job["live_bytes"])


def test_pytorchs_functions_allocate_and_free(heap: Heap) -> None:
    """A tensor lies in the window, is the stream's, and its memory is back after the free."""
    address = allocate(2 * MIB, 0, STREAM)
    assert heap.base <= address < heap.base + int(heap.record[0]["window_bytes"])
    assert live_bytes(heap) == 2 * MIB
    free(address, 2 * MIB, 0, STREAM)
    assert live_bytes(heap) == 0
    assert heap.record[0]["bad_frees"] == 0


def test_nothing_is_allocated_for_nothing(heap: Heap) -> None:
    """No bytes have no address, and freeing that does nothing."""
    assert allocate(0, 0, STREAM) == 0
    free(0, 0, 0, STREAM)
    assert heap.record[0]["bad_frees"] == 0


def test_a_tensor_used_elsewhere_lives_until_that_stream_has_done_its_work(heap: Heap) -> None:
    """After ``record_stream`` the free is deferred: its range is not handed out at once."""
    address = allocate(MIB, 0, STREAM)
    record_stream(address, OTHER)
    free(address, MIB, 0, STREAM)
    assert heap.record[0]["streams"]["n_deferred"] == 1
    assert allocate(MIB, 0, STREAM) != address


def test_what_can_never_be_had_is_told_with_the_figures(heap: Heap) -> None:
    """Whoever wants to know gets requested, held and budget in bytes; the answer is null if he only listens."""
    heard = []
    function = ctypes.CFUNCTYPE(None, I64, I64, I64)(lambda *figures: heard.append(figures))
    held = allocate(MIB, 0, STREAM)
    assert allocate(64 * MIB, 0, STREAM) == 0
    hooks.OTHERS_RECORD[0]["out_of_memory"] = ctypes.cast(function, ctypes.c_void_p).value
    assert allocate(64 * MIB, 0, STREAM) == 0
    assert heard == [(64 * MIB, MIB, 4 * MIB)]
    free(held, MIB, 0, STREAM)
    assert live_bytes(heap) == 0


def test_in_a_lost_context_the_drivers_status_is_the_answer(heap: Heap) -> None:
    """No memory is given, nobody hears that it is out, and whoever raises for PyTorch is told the status."""
    heard: list[Any] = []
    full = ctypes.CFUNCTYPE(None, I64, I64, I64)(lambda *figures: heard.append(figures))
    lost = ctypes.CFUNCTYPE(None, I64)(heard.append)
    hooks.OTHERS_RECORD[0]["lost"] = ctypes.cast(lost, ctypes.c_void_p).value
    heap.record[0]["streams"]["lost"] = 700
    assert allocate(MIB, 0, STREAM) == 0
    assert heard == [700]
    out = np.zeros(1, np.int64)
    assert mem_alloc_async(out.ctypes.data, MIB, STREAM) == 700
    assert (int(out[0]), live_bytes(heap)) == (0, 0)
    hooks.OTHERS_RECORD[0]["lost"] = 0
    hooks.OTHERS_RECORD[0]["out_of_memory"] = ctypes.cast(full, ctypes.c_void_p).value
    assert allocate(MIB, 0, STREAM) == 0
    assert heard == [700, (MIB, 0, 4 * MIB)], "a build of PyTorch that has no check raises something"


def test_a_request_for_another_device_is_refused(heap: Heap) -> None:
    """Only the pool's device is served where somebody refuses the others; then nothing is taken."""
    refused: list[int] = []
    function = ctypes.CFUNCTYPE(None, I64)(refused.append)
    hooks.OTHERS_RECORD[0]["device"] = 1
    hooks.OTHERS_RECORD[0]["refuse"] = ctypes.cast(function, ctypes.c_void_p).value
    assert (allocate(MIB, 0, STREAM), live_bytes(heap), refused) == (0, 0, [hooks.Refusal.OTHER_DEVICE])
    address = allocate(MIB, 1, STREAM)
    assert (address != 0, live_bytes(heap), len(refused)) == (True, MIB, 1)
    free(address, MIB, 1, STREAM)


def largest_workspace() -> int:
    """Return what PyTorch's ``cacheInfo`` is answered."""
    out = np.full(1, -1, np.int64)
    cache_info(0, 0, out.ctypes.data)
    return int(out[0])


def test_a_workspace_may_be_what_can_be_had_without_waiting(heap: Heap) -> None:
    """It is what nobody holds, within the job's limit, and what the job holds unused; 0 without a heap."""
    assert largest_workspace() == 4 * MIB
    address = allocate(MIB // 2, 0, STREAM)
    assert largest_workspace() == 3 * MIB + MIB // 2
    heap.pool.header["granted"] += 1
    assert largest_workspace() == 2 * MIB + MIB // 2
    heap.pool.header["granted"] -= 1
    (job,) = (job for job in heap.pool.jobs if job["pid"])
    job["limit"] = 2
    assert largest_workspace() == MIB + MIB // 2
    job["limit"] = 0
    free(address, MIB // 2, 0, STREAM)
    attached, heap.record[0]["attached"] = int(heap.record[0]["attached"]), 0
    assert largest_workspace() == 0
    heap.record[0]["attached"] = attached


@pytest.mark.parametrize("from_pool", [False, True])
def test_the_drivers_names_answer_as_the_driver_does(heap: Heap, from_pool: bool) -> None:  # noqa: FBT001 - a case
    """Success and an address; an error for no bytes and for too many; a free of it is ours."""

    def ask(size_bytes: int) -> tuple[int, int]:
        out = np.zeros(1, np.int64)
        if from_pool:
            return mem_alloc_from_pool_async(out.ctypes.data, size_bytes, 99, STREAM), int(out[0])
        return mem_alloc_async(out.ctypes.data, size_bytes, STREAM), int(out[0])

    status, address = ask(MIB)
    assert (status, live_bytes(heap)) == (SUCCESS, MIB)
    assert ask(0) == (INVALID_VALUE, 0)
    assert ask(64 * MIB) == (OUT_OF_MEMORY, 0)
    assert mem_free_async(address, STREAM) == SUCCESS
    assert live_bytes(heap) == 0


def test_what_the_driver_allocated_goes_back_to_the_driver(heap: Heap) -> None:
    """An address outside the window is not ours: the driver's function is asked, and without one it is an error."""
    seen = []
    function = ctypes.CFUNCTYPE(I32, I64, I64)(lambda address, stream: seen.append((address, stream)) or 700)
    outside = heap.base + int(heap.record[0]["window_bytes"])
    assert mem_free_async(outside, STREAM) == INVALID_VALUE
    hooks.OTHERS_RECORD[0]["free_async"] = ctypes.cast(function, ctypes.c_void_p).value
    assert mem_free_async(outside, STREAM) == 700
    assert seen == [(outside, STREAM)]
    assert heap.record[0]["bad_frees"] == 0
