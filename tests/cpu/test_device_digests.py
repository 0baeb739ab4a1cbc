"""Digests of a device's memory on the software twin: of the moment on the stream, and there behind a mark."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

import pytest
from cpu.support.twin_tenant import TwinTenant
from cpu.support.twin_world import REGION_BYTES, World

from zico.heap.cuda import on_stream
from zico.pool.fences import NO_FENCE
from zico.swap.device_digests import Digest, Digests
from zico.swap.device_tier import Marks

if TYPE_CHECKING:
    from collections.abc import Iterator

TENSOR_BYTES = 64 << 10


class Digesting:
    """A job with a tensor, on its first stream."""

    def __init__(self, tenant: TwinTenant, digests: Digests, address: int) -> None:
        """Use them."""
        self.tenant, self.digests, self.address = tenant, digests, address
        self.stream = tenant.handles[0]

    def fill(self, byte: int, size_bytes: int = TENSOR_BYTES) -> None:
        """Let the stream fill the tensor."""
        with self.tenant.driver.context.current():
            self.tenant.driver.call("cuMemsetD8Async", self.address, byte, size_bytes, self.stream)

    def take(self, size_bytes: int = TENSOR_BYTES) -> Digest | None:
        """Let the stream take the tensor's digest."""
        return self.digests.take(self.stream, self.address, size_bytes)

    def mark(self, stream: int | None = None) -> int:
        """Put a mark on the stream, or on another."""
        return int(on_stream.mark_stream(self.tenant.record[0], self.stream if stream is None else stream))

    def has_passed(self, fence: int) -> bool:
        """Tell whether the device has come by a mark."""
        return Marks(self.tenant.heap).has_passed(fence)


@pytest.fixture
def job() -> Iterator[Digesting]:
    """Return a job; at its end nothing is left on the device."""
    with World(2) as world, TwinTenant(world) as tenant, contextlib.ExitStack() as undo:
        digests = Digests(tenant.heap)
        undo.callback(digests.close)
        undo.callback(tenant.settle)
        tensor = tenant.allocate(REGION_BYTES, 0)
        assert tensor is not None
        undo.callback(tenant.free, tensor)
        undo.callback(tenant.driver.synchronize, tenant.handles[0])
        yield Digesting(tenant, digests, tensor.address)


def test_digests_are_of_the_moment_on_the_stream(job: Digesting) -> None:
    """Equal contents have equal digests, others have others, whatever is written behind them."""
    job.fill(1)
    first = job.take()
    again = job.take()
    job.fill(2)
    other = job.take()
    job.fill(1)
    last = job.take()
    fence = job.mark()
    job.tenant.driver.synchronize(job.stream)
    assert job.has_passed(fence)
    assert first == again == last
    assert first != other
    assert first is not None
    assert any(first.words())


def test_one_byte_is_another_digest(job: Digesting) -> None:
    """What differs in its last byte alone has another digest."""
    job.fill(1)
    first = job.take()
    with job.tenant.driver.context.current():
        job.tenant.driver.call("cuMemsetD8Async", job.address + TENSOR_BYTES - 1, 2, 1, job.stream)
    other = job.take()
    job.tenant.driver.synchronize(job.stream)
    assert first != other


def test_a_mark_tells_when_they_are_there(job: Digesting) -> None:
    """While the device stands still the mark is not passed, nor another stream's; it is when the device goes on."""
    for _ in range(2):
        job.mark()
    other = job.tenant.driver.create_stream()
    job.tenant.driver.synchronize(job.stream)
    twin = job.tenant.world.twin
    twin.pause()
    job.fill(3)
    job.take()
    fences = job.mark(), job.mark(other.handle)
    assert not any(map(job.has_passed, fences))
    assert job.has_passed(NO_FENCE)
    twin.release()
    for stream in (job.stream, other.handle):
        job.tenant.driver.synchronize(stream)
    assert all(map(job.has_passed, fences))
    other.close()


def test_slots_come_back(job: Digesting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all slots are in use there is no digest; one that nobody has any more serves its stream again."""
    monkeypatch.setattr(job.digests, "_unused", iter(range(2)))
    kept = [job.take(), job.take()]
    assert None not in kept
    assert job.take() is None
    kept.pop()
    gc.collect()
    assert job.take() is not None
    other = job.tenant.driver.create_stream()
    assert job.digests.take(other.handle, job.address, TENSOR_BYTES) is None, "the slot is the first stream's"
    other.close()


def test_memory_that_is_no_whole_words_has_none(job: Digesting) -> None:
    """A digest of it would leave bytes out."""
    assert job.take(TENSOR_BYTES - 4) is None
    assert job.take(0) is None
