"""Several jobs of one process on the CUDA driver's software twin, with all of Zico between them and it real.

Every kernel judges what it meets when the device comes to it: whether its tensor's addresses still
lead to the bytes that they led to at the allocation, whether everybody who had those bytes before
has finished with them, and whether what it finds there is what the tensor's own first kernel wrote.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import threading
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from cpu.support.members import check_counters
from cpu.support.twin_device import MIB
from twin.entry import SUCCESS
from twin.meanings import register
from twin.twin import Twin

from zico.device.cuda.driver import CudaDriver
from zico.device.record import FUNCTIONS
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from cpu.support.twin_tenant import TwinTenant

REGION_BYTES = 2 * MIB
WRITE, CHECK = "test_write", "test_check"
IMAGE = f"{WRITE} {CHECK}".encode()
_WORD_BYTES = 8


class WatchedTwin(Twin):
    """A twin that notes what it refuses to do for compiled code, which may not tell anybody."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - the twin's
        """Start with nothing refused."""
        self.refused: list[str] = []
        super().__init__(**settings)


def _watched(name: str) -> Callable[..., Any]:
    function = getattr(Twin, name)

    @functools.wraps(function)
    def call(self: WatchedTwin, *args: Any) -> Any:  # noqa: ANN401 - as the function
        result = function(self, *args)
        if result[0] != SUCCESS:
            self.refused.append(f"{name}{args}: {result[0].name}")
        return result

    return call


for _name in FUNCTIONS:
    setattr(WatchedTwin, _name.removesuffix("_v2"), _watched(_name.removesuffix("_v2")))


@dataclasses.dataclass(eq=False)
class Tensor:
    """A tensor, and how far the device is with it."""

    number: int
    owner: TwinTenant
    address: int
    size_bytes: int
    stream: int
    pieces: list[tuple[int, int, int]]
    """Physical memory, from which byte to which."""
    before: list[Tensor]
    """Whose the bytes were when it was allocated, as far as the device had not finished with them."""
    pending: int = 0
    """Kernels that the device has not come to."""
    freed: bool = False
    content: int = 0
    """The number of the tensor whose bytes came here by a copy, 0: its own."""

    @property
    def is_over(self) -> bool:
        """Tell whether no kernel will touch it any more."""
        return self.freed and self.pending == 0

    def overlaps(self, pieces: list[tuple[int, int, int]]) -> bool:
        """Tell whether it has bytes of those pieces."""
        return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a, b in itertools.product(self.pieces, pieces))


class World:
    """The device, the broker's pool on it, and what kernels have found; at its end nothing may be held."""

    def __init__(
        self,
        n_regions: int,
        *,
        fail_at: int = 0,
        isolate: bool = False,
        **settings: Any,  # noqa: ANN401 - the twin's
    ) -> None:
        """Make twin, driver and pool; ``fail_at``: which call of the driver is refused, counted from here."""
        self.faults: list[str] = []
        self.handed_on = 0
        """Tensors that got bytes with which the device had not finished."""
        self.twin = WatchedTwin(**({"total_bytes": 64 * REGION_BYTES} | settings))
        self.broker = threading.RLock()
        """The broker does one thing at a time."""
        self._tensors: dict[int, Tensor] = {}
        self._owners: dict[int, TwinTenant] = {}
        self._numbers = itertools.count(1)
        register(self.twin)
        self.twin.kernel(WRITE, ctypes.c_int64)(lambda _twin, number: self._kernel(number, self._write))
        self.twin.kernel(CHECK, ctypes.c_int64)(lambda _twin, number: self._kernel(number, self._check))
        self.twin.fail_at = fail_at
        with contextlib.ExitStack() as undo:
            undo.callback(self.twin.close)
            self.driver = CudaDriver(0, self.twin)
            undo.callback(self.driver.close)
            sizes = {"budget_bytes": n_regions * REGION_BYTES, "region_bytes": REGION_BYTES}
            ways = {"use_claims": False, "self_admit": True, "isolate": isolate}
            self.pool = undo.enter_context(PoolTable.create(**sizes, **ways, driver=self.driver))
            self.use_context()
            self._undo = undo.pop_all()

    def use_context(self) -> None:
        """Make the device's context current in this thread, as a framework does that launches kernels."""
        self.driver.call("cuCtxSetCurrent", self.driver.context.retain())

    # -- tensors -----------------------------------------------------------------------------------

    def enter(self, owner: TwinTenant, address: int, size_bytes: int, stream: int) -> Tensor:
        """Note that a tensor has been allocated."""
        with self.twin.lock:
            pieces = self._pieces(address, size_bytes)
            others = [one for one in self._tensors.values() if not one.is_over]
            before = [one for one in others if one.overlaps(pieces)]
            tensor = Tensor(next(self._numbers), owner, address, size_bytes, stream, pieces, before)
            self.faults += [
                f"{tensor.number} got bytes of {one.number}, which is live" for one in before if not one.freed
            ]
            self._owners[tensor.number] = owner
            self.handed_on += any(one.owner is not owner for one in before)
            self._tensors = {one.number: one for one in [*others, tensor]}
            return tensor

    def forget(self, owner: TwinTenant) -> None:
        """Note that a job is dead, and its device work with it."""
        with self.twin.lock:
            for one in self._tensors.values():
                if one.owner is owner:
                    one.freed, one.pending = True, 0

    def _pieces(self, address: int, size_bytes: int) -> list[tuple[int, int, int]]:
        """Return where in physical memory a range of addresses is."""
        end = address + size_bytes
        found = []
        for start in self.twin._overlapping(address, size_bytes):
            mapping = self.twin._mappings[start]
            inode = self.twin._handles[mapping.handle].inode
            found.append((inode, max(address, start) - start, min(end, start + mapping.size_bytes) - start))
        managed = self.twin._find(address, size_bytes)
        return found if managed is None else [(managed.address, address - managed.address, end - managed.address)]

    # -- kernels -----------------------------------------------------------------------------------

    def _kernel(self, number: int, run: Callable[[Tensor], None]) -> None:
        with self.twin.lock:
            tensor = self._tensors[number]
            if self._pieces(tensor.address, tensor.size_bytes) != tensor.pieces:
                self.faults.append(f"other memory lies at the addresses of {number} than when it was allocated")
            run(tensor)
            tensor.pending -= 1

    def _write(self, tensor: Tensor) -> None:
        late = [one.number for one in tensor.before if not one.is_over]
        self.faults += [f"{tensor.number} writes where {number} is not done" for number in late]
        tensor.before = []
        if self.pool.header["isolate"]:
            n_words = max(tensor.size_bytes // _WORD_BYTES, 1)  # a smaller tensor has a whole word of its block, too
            words = np.frombuffer(self.twin.read(tensor.address, n_words * _WORD_BYTES), "i8")
            left = {self._owners[number] for number in words[words != 0].tolist()} - {tensor.owner}
            self.faults += [f"{tensor.number} can read what another job has written"] * bool(left)
        for place in self._places(tensor):
            ctypes.c_int64.from_address(self.twin.locate(place, _WORD_BYTES)).value = tensor.number

    def _check(self, tensor: Tensor) -> None:
        for place in self._places(tensor):
            found = ctypes.c_int64.from_address(self.twin.locate(place, _WORD_BYTES)).value
            if found != (tensor.content or tensor.number):
                self.faults.append(f"{tensor.number} finds what {found} has written")

    @staticmethod
    def _places(tensor: Tensor) -> list[int]:
        """Return the tensor's first and last word and the first one of each piece of memory that it lies in.

        What came by a copy was written where other words were the first ones of pieces.
        """
        last = tensor.address + max(tensor.size_bytes // _WORD_BYTES - 1, 0) * _WORD_BYTES
        next_piece = (tensor.address // REGION_BYTES + 1) * REGION_BYTES
        return [tensor.address, last, *(() if tensor.content else range(next_piece, last, REGION_BYTES))]

    # -- what must be true -------------------------------------------------------------------------

    def check(self) -> None:
        """No kernel has found anything wrong, the device has refused nothing, no stream is lost, the table is whole."""
        assert not self.faults
        assert not self.twin.refused
        assert not [stream.error for stream in self.twin._all_streams() if stream.error]
        check_counters(self.pool)
        assert self.pool.header["peak_granted"] <= self.pool.header["budget_regions"]

    def close(self) -> None:
        """Give everything back."""
        self._undo.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close; if nothing went wrong the device must have everything back."""
        with self._undo:
            if kind is None:
                self.pool.close()
                self.driver.close()
                assert self.twin.leaks() == {}
