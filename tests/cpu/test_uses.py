"""An operation is recorded with the tensors that it reads and writes, each once."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.members import join, make_pool
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.units import KIB, MIB
from zico.heap import allocator
from zico.heap.build import Heap
from zico.heap.layout import HEAP
from zico.trace import ring, ringfile
from zico.trace.events import Kind
from zico.trace.ringfile import RingFile, RingReader

if TYPE_CHECKING:
    from collections.abc import Iterator

N_TENSORS = 4
STRANGER = N_TENSORS
"""Stands for memory that is not the pool's."""

some = st.lists(st.integers(0, STRANGER), max_size=6)


class Place:
    """A heap that records, with a few tensors in it."""

    def __init__(self, heap: Heap, reader: RingReader) -> None:
        """Allocate them."""
        self.heap, self.reader = heap, reader
        self.addresses = [int(allocator.allocate(heap.record[0], 64 * KIB, 64)) for _ in range(N_TENSORS)] + [0]
        self.name = heap.ring.number_of("aten::add") if heap.ring else -1
        reader.read()

    def recorded(self, read: list[int], written: list[int], made: list[int]) -> list[tuple[Kind, int]]:
        """Record an operation; returns kind and tensor of the events that come of it."""
        numbers = [*read, *written, *made]
        tensors = (ctypes.c_int64 * max(1, len(numbers)))(*(self.addresses[number] for number in numbers))
        counts = (len(read), len(written), len(made))
        allocator.record_op(
            int(self.heap.record.ctypes.data), ctypes.addressof(tensors), *counts, self.name, ring.now_ticks()
        )
        return [(Kind(event["kind"]), int(event["tensor"])) for event in self.reader.read()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Make a pool of one job that records, and a reader that believes its clock at once."""
    record = np.zeros(1, HEAP)
    with (
        pytest.MonkeyPatch.context() as patch,
        make_pool(8, region_bytes=MIB) as pool,
        join(pool) as member,
        RingReader(tmp_path_factory.mktemp("ring") / "ring") as reader,
    ):
        patch.setattr(ringfile, "_LEAST_NS", 0)
        heap = Heap(member, record)
        heap.record_to(RingFile(reader.path, "test", 64 * KIB))
        heap.enable(plan=False)
        yield Place(heap, reader)
        heap.close()


@settings(deadline=None, max_examples=100)
@given(read=some, written=some, made=some)
def test_every_tensor_is_read_once_and_written_once(
    place: Place, read: list[int], written: list[int], made: list[int]
) -> None:
    """What is returned is written, unless it was read: then it is a view. Other memory is not in the trace."""
    expected = [(Kind.READ, number) for number in dict.fromkeys(read) if number != STRANGER]
    writes = [*written, *(number for number in made if number not in read)]
    expected += [(Kind.WRITE, number) for number in dict.fromkeys(writes) if number != STRANGER]
    assert place.recorded(read, written, made) == [*expected, (Kind.OP, 0)]


def test_an_operation_without_tensors_is_recorded_too(place: Place) -> None:
    """It has a name and a time."""
    assert place.recorded([], [], []) == [(Kind.OP, 0)]
