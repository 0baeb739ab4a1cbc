"""What CuPy and Numba call, over a device of software: as C functions by address, with Python's lock held."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

import pytest
from cpu.support.device_tenant import DeviceTenant
from cpu.support.hooked_place import BUDGET_BYTES, MIB, Place, put_in_place

from zico.heap.cuda import python_hooks
from zico.heap.layout import Attached

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAM, OTHER = 11, 12
PATIENCE_S = 10.0
I32, I64 = ctypes.c_int32, ctypes.c_int64

# PYFUNCTYPE keeps the lock for the call, as CuPy does: the functions must find it held.
allocate = ctypes.PYFUNCTYPE(I64, I64, I64, I32)(python_hooks.allocate.address)
allocate_for_all = ctypes.PYFUNCTYPE(I64, I64, I64, I32)(python_hooks.allocate_for_all.address)
free = ctypes.PYFUNCTYPE(None, I64, I64, I32)(python_hooks.free.address)


@pytest.fixture
def place() -> Iterator[Place]:
    """Give hooks that hardly wait for memory."""
    with put_in_place(wait_limit_s=0.01) as made:
        yield made


def test_memory_is_the_streams_and_comes_back_to_it(place: Place) -> None:
    """What a stream frees it may use again at once, with nobody waiting for the device."""
    address = allocate(STREAM, MIB, 0)
    assert place.heap.base <= address < place.heap.base + int(place.heap.record[0]["window_bytes"])
    assert place.live_bytes == MIB
    free(STREAM, address, 0)
    assert (place.live_bytes, place.device.synchronized) == (0, 0)
    assert allocate(STREAM, MIB, 0) == address
    free(STREAM, address, 0)
    assert place.heap.record[0]["bad_frees"] == 0


@pytest.mark.parametrize("size_bytes", [256, MIB])
def test_memory_for_all_streams_waits_for_the_device_at_both_ends(place: Place, size_bytes: int) -> None:
    """Invariant 2: no stream's work is left on it when it is given, and none when it is given back."""
    launched = []
    place.device.launch(OTHER, lambda: launched.append("before"))
    address = allocate_for_all(0, size_bytes, 0)
    assert launched == ["before"]
    place.device.launch(OTHER, lambda: launched.append("use"))
    free(0, address, 0)
    assert launched == ["before", "use"]
    assert (place.live_bytes, place.device.synchronized) == (0, 2)
    assert place.heap.record[0]["streams"]["n_deferred"] == 0


def test_memory_that_others_still_use_is_waited_for_before_any_stream_gets_it(place: Place) -> None:
    """Invariant 2: a region behind another job's fence is given for all streams only when that job is done with it."""
    done = []
    with DeviceTenant(place.pool, place.device, wait_limit_s=0.01) as other:
        held = other.allocate(BUDGET_BYTES - MIB)
        assert held is not None
        place.device.launch(held.stream, lambda: done.append("use"))
        other.free(held)
        address = allocate(STREAM, 2 * MIB, 0)
        assert (address > 0, done) == (True, []), "given behind the fence, with the use still to come"
        free(STREAM, address, 0)
        address = allocate_for_all(0, 2 * MIB, 0)
        assert (address > 0, done) == (True, ["use"])
        free(0, address, 0)
        other.settle()


def test_nothing_is_allocated_for_nothing_or_for_too_much(place: Place) -> None:
    """No bytes have no address, nor has more than the budget."""
    for function in (allocate, allocate_for_all):
        assert [function(0, size_bytes, 0) for size_bytes in (0, -1, 64 * MIB)] == [0, 0, 0]
    assert place.device.synchronized == 0


def test_what_is_not_the_pools_is_ignored(place: Place) -> None:
    """A free of somebody else's address, or of none, changes nothing."""
    outside = place.heap.base + int(place.heap.record[0]["window_bytes"])
    for address in (0, place.heap.base - 1, outside):
        free(STREAM, address, 0)
    assert place.heap.record[0]["bad_frees"] == 0


def test_a_forked_child_touches_nothing(place: Place) -> None:
    """Invariant 10: a process that has left the pool to its parent gets nothing, and its frees change nothing."""
    address = allocate(STREAM, MIB, 0)
    place.heap.record[0]["attached"] = Attached.FORKED
    assert (allocate(STREAM, MIB, 0), allocate_for_all(0, MIB, 0)) == (0, 0)
    free(STREAM, address, 0)
    assert place.live_bytes == MIB
    place.heap.record[0]["attached"] = Attached.YES
    free(STREAM, address, 0)


def test_who_waits_for_memory_leaves_python_to_the_thread_that_frees_it() -> None:
    """Invariant 7: the lock is given up while waiting, or the other thread could never come to its free."""
    with (
        put_in_place(wait_limit_s=PATIENCE_S) as place,
        DeviceTenant(place.pool, place.device, wait_limit_s=0.01) as other,
    ):
        held = other.allocate(BUDGET_BYTES - MIB)
        got: list[int] = []
        waiter = threading.Thread(target=lambda: got.append(allocate(STREAM, 2 * MIB, 0)), daemon=True)
        waiter.start()
        while place.pool.header["waiters"] == 0 and waiter.is_alive():
            waiter.join(0.001)
        assert waiter.is_alive(), "it ended before it got memory"
        other.free(held)
        while waiter.is_alive():
            place.device.step_any(0)
            waiter.join(0.001)
        assert got[0] > 0
        free(STREAM, got[0], 0)
        other.settle()
