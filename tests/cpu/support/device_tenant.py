"""A job with a heap on the software device, whose kernels write patterns and check them before each free."""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from cpu.support.members import is_mapped, job_of, join

from zico.heap.build import Heap
from zico.heap.cuda import on_stream
from zico.heap.layout import HEAP, Arena

if TYPE_CHECKING:
    from types import TracebackType

    from cpu.support.software_device import SoftwareDevice

    from zico.pool.table import PoolTable

Record = Any
WORD_BYTES = 8
_handles = itertools.count(1)
_tags = itertools.count(1)


@dataclasses.dataclass
class Tensor:
    """A live tensor, the stream it is for, and whether its first kernel has run."""

    address: int
    size_bytes: int
    stream: int
    tag: int
    written: bool = False
    users: set[int] = dataclasses.field(default_factory=set)


class DeviceTenant:
    """A member with a heap and streams on a device; ``faults`` are patterns that somebody else has overwritten."""

    def __init__(
        self,
        pool: PoolTable,
        device: SoftwareDevice,
        *,
        streams: int = 2,
        spacing_bytes: int = 0,
        alone_bytes: int = 0,
        beside_bytes: int = 0,
        wait_limit_s: float,
    ) -> None:
        """Join and build the heap."""
        self.pool, self.device = pool, device
        self.member = join(pool)
        self.record = np.zeros(1, HEAP)
        spacing = {"spacing_bytes": spacing_bytes, "alone_bytes": alone_bytes, "beside_bytes": beside_bytes}
        timeline = device.timeline(self.member, **spacing)
        self.heap = Heap(self.member, self.record, wait_limit_s=wait_limit_s, timeline=timeline)
        self.streams = [next(_handles) for _ in range(streams)]
        self.live: list[Tensor] = []
        self._spans: list[tuple[int, int]] = []  # of the living, by address
        self.faults: list[str] = []
        self._tags: set[int] = set()

    @property
    def job(self) -> Record:
        """Return the record of the job."""
        return self.member.jobs[job_of(self.member)]

    def allocate(self, size_bytes: int, stream: int = 0) -> Tensor | None:
        """Allocate for a stream and let a kernel write a pattern; ``None`` if it is refused."""
        handle = self.streams[stream]
        address = int(on_stream.allocate_on(self.record[0], size_bytes, handle))
        if address <= 0:
            return None
        assert address % 512 == 0
        at = bisect.bisect(self._spans, (address, 0))
        beside = self._spans[max(at - 1, 0) : at + 1]
        assert all(address + size_bytes <= begin or end <= address for begin, end in beside)
        self._spans.insert(at, (address, address + size_bytes))
        tensor = Tensor(address, size_bytes, handle, next(_tags))
        self.live.append(tensor)
        self.device.launch(handle, lambda: self._write(tensor))
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Let a kernel check the pattern, and free behind it."""
        self.forget(tensor)
        self.device.launch(tensor.stream, lambda: self._check(tensor))
        on_stream.free_on(self.record[0], tensor.address, tensor.stream)

    def forget(self, tensor: Tensor) -> None:
        """Leave a tensor to whoever frees it."""
        self.live.remove(tensor)
        self._spans.remove((tensor.address, tensor.address + tensor.size_bytes))

    def use_on(self, tensor: Tensor, stream: int) -> None:
        """Let a kernel on another stream check the pattern, behind an event after the tensor's first kernel.

        The heap is told once a stream, as PyTorch's programs do.
        """
        handle = self.streams[stream]
        self.device.wait_until(handle, lambda: tensor.written)
        self.device.launch(handle, lambda: self._check(tensor))
        if handle not in tensor.users:
            on_stream.record_stream(self.record[0], tensor.address, handle)
        tensor.users.add(handle)

    def free_all(self) -> None:
        """Free every tensor."""
        for tensor in list(self.live):
            self.free(tensor)

    def settle(self) -> None:
        """Wait for the device, and let the heap notice."""
        on_stream.settle(self.record[0])
        self.device.drain()
        on_stream.settle(self.record[0])
        self.device.drain()

    def check_empty(self) -> None:
        """Nothing is held, lent or waiting, and every arena is one gap."""
        record = self.record[0]
        assert (self.job["held"], self.job["live_bytes"], record["streams"]["n_deferred"]) == (0, 0, 0)
        assert record["bad_frees"] == 0
        assert (self.heap.slots["live"] == 0).all()
        assert (self.heap.arenas["n_gaps"] == 1).all()
        assert len(self.heap.arenas) == len(Arena) + 15

    def _places(self, tensor: Tensor) -> list[int]:
        region_bytes = self.member.region_bytes
        first = tensor.address - (tensor.address - self.heap.base) % region_bytes + region_bytes
        last = tensor.address + max(tensor.size_bytes // WORD_BYTES * WORD_BYTES - WORD_BYTES, 0)
        return [tensor.address, last, *range(first, last, region_bytes)]

    def _write(self, tensor: Tensor) -> None:
        tensor.written = True
        if not self._is_there(tensor):
            return
        if self.member.header["isolate"]:
            self._look_for_others(tensor)
        self._tags.add(tensor.tag)
        for place in self._places(tensor):
            ctypes.c_int64.from_address(place).value = tensor.tag

    def _is_there(self, tensor: Tensor) -> bool:
        """Tell whether the tensor is mapped when a kernel comes to use it."""
        if all(is_mapped(place) for place in self._places(tensor)):
            return True
        self.faults.append(f"tensor {tensor.tag} is not mapped")
        return False

    def _look_for_others(self, tensor: Tensor) -> None:
        """In a pool that isolates jobs there is nothing in a new tensor but zeros and what this job wrote before."""
        words = np.frombuffer((ctypes.c_char * tensor.size_bytes).from_address(tensor.address), "i1")
        words = words[: tensor.size_bytes // WORD_BYTES * WORD_BYTES].view("i8")
        others = set(words[words != 0].tolist()) - self._tags
        if others:
            self.faults.append(f"tensor {tensor.tag} begins with what others have written: {others}")

    def _check(self, tensor: Tensor) -> None:
        if not self._is_there(tensor):
            return
        for place in self._places(tensor):
            found = ctypes.c_int64.from_address(place).value
            if found != tensor.tag:
                self.faults.append(f"tensor {tensor.tag} finds what {found} has written")

    def die(self) -> None:
        """Die: the device work ends, the addresses go, the broker reaps."""
        self.device.kill(self.streams)
        self.close()
        self.pool.reap(job_of(self.member))

    def close(self) -> None:
        """Close the heap and the member's mapping of the table stays for counters that streams may still be given."""
        self.heap.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        self.close()
