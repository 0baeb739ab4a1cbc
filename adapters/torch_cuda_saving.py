"""What autograd saves of a GPU's memory leaves by a side stream and comes back by another, on the device's timeline.

Theory of operation
    As ``zico.adapters.torch_saving``, with four differences. Each stream that saves or unpacks a
    tensor is recorded as one that uses it. So a copy out waits for its work, and so does the
    memory's next owner. What comes back lies in memory that was allocated for the stream that
    copies in. A stream that unpacks waits for that copy, on the device.

    Digests are taken by the stream that computes. The processor, which is ahead of the device, reads
    them later. So a tensor that is to be dropped is checked first. Its digest and those of its
    sources are taken anew, with a mark behind them. It is dropped once the device has come by that
    mark, all digests are equal, and nobody has reached for any of the tensors meanwhile.

Known limitations
    A tensor that several streams use is never dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from zico.adapters.torch_saving import Saved, Saving, Storage, are_same, storage_of

from zico.base.errors import DriverError
from zico.base.records import word_of
from zico.heap.cuda import hooks, on_stream
from zico.swap.device_clock import DeviceClock
from zico.swap.mover import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zico.heap.build import Heap
    from zico.swap.device_digests import Digest, Digests
    from zico.swap.device_tier import DeviceTier
    from zico.swap.swapper import Swapper

_RECORD_STREAM = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
NS_PER_MS = 1e6
_SLICE_S = 50e-6
"""Seconds between two looks whether the device has come by, less than a layer of a network takes."""
_IN_MEMORY = Place.HERE, Place.LEAVING
"""What is being copied out can be read, too, until it is freed behind that copy."""


class Check:
    """Digests of a tensor and its sources that the device is going to take. Keeps nothing alive."""

    def __init__(self, storage: DeviceStorage, sources: list[Saved], pairs: list[tuple[Any, Any]], fence: int) -> None:
        """Stand for digests that are there behind a mark."""
        self.pairs = pairs
        self.fences = {fence, *(digest.fence for pair in pairs for digest in pair if digest is not None)}
        self._uses = storage.uses
        self._sources = [(weakref.ref(saved), saved.storage.uses) for saved in sources]

    def sources(self, storage: DeviceStorage) -> list[Saved] | None:
        """Return what its tensor is made of; ``None``: some is lost, or somebody has reached for it, or can."""
        sources = [(saved, uses) for reference, uses in self._sources if (saved := reference()) is not None]
        is_as_it_was = storage.uses == self._uses and storage.address_if_idle() != 0
        if not is_as_it_was or len(sources) != len(self._sources):
            return None
        for saved, uses in sources:
            one = saved.storage
            if one.uses != uses or (one.place in _IN_MEMORY and one.address_if_idle() == 0):
                return None
        return [saved for saved, _ in sources]


class DeviceStorage(Storage):  # type: ignore[misc]  # mypy knows no adapter by this name
    """Memory of a GPU that only saved tensors refer to, sooner or later."""

    _saving: DeviceSaving
    fence = 0
    """Of the copy in that has made it, 0: none has."""

    def __init__(self, saving: DeviceSaving, storage: Any) -> None:  # noqa: ANN401 - torch has no types
        super().__init__(saving, storage)
        self.streams: set[int] = set()
        """Those that are known to use it where it is now."""
        self.uses = 0
        """Times somebody has saved it or reached for it."""
        self._check: Check | None = None
        self._has_changed = False
        """A check has found that it is not what it was."""

    def settle(self) -> int:
        """Allocate as PyTorch does, for the stream that copies in."""
        # A stream's context alone would leave a context of CUDA's on whatever device is the thread's current one.
        with torch.cuda.device(self._saving.device), torch.cuda.stream(self._saving.incoming):
            self._settled = storage_of(torch.empty(self.size_bytes, dtype=torch.uint8, device=self._saving.device))
        return int(self._settled.data_ptr())

    def make(self, bring: Callable[..., Any]) -> None:
        """Make it again, which is no part of the iteration that plans are made for."""
        with self._saving.clock.standing():
            super().make(bring)

    def arrive(self) -> None:
        """Be here again, for those who wait for the copy, or for the stream that made it."""
        if self.is_dropped:
            stream = self._saving.stream()
            self.fence = self._saving.tier.mark(stream)  # first: where that raises, it is to be made again
            self._saving.record_stream(self._settled.data_ptr(), stream)
            self.streams = {stream}
        else:
            self.streams = set()
            self.fence = self._saving.tier.fence_of(self.ticket)
        super().arrive()
        self._check = None  # of a recipe that it has no more

    def note_use(self) -> None:
        """Let the calling thread's stream use it behind the copy that made it; its next copy waits for that stream."""
        stream = self._saving.stream()
        if stream in self.streams:
            return
        self._saving.record_stream(self._storage.data_ptr(), stream)
        if self.fence:
            self._saving.tier.follow(stream, self.fence)
        self.streams.add(stream)

    # -- to be dropped -----------------------------------------------------------------------------

    def keep_sources(self) -> bool:
        """Check whether it can be made again, and keep what it is made of once the device has said so; tells that."""
        if self._has_changed or not self.is_checked():
            return False
        check, self._check = self._check, None
        sources = None if check is None else check.sources(self)
        if check is None or sources is None:
            self._begin_check()
            return False
        if not are_same(check.pairs):
            self._has_changed = True
            return False
        self._kept = sources
        return True

    def _begin_check(self) -> None:
        sources = self.made_of() if self.address_if_idle() != 0 else None
        if sources is None:
            return
        here = [one for one in (self, *(saved.storage for saved in sources)) if one.place in _IN_MEMORY]
        streams = set().union(*(one.streams for one in here))
        if len(streams) != 1 or any(one.address_if_idle() == 0 for one in here):
            return
        (stream,) = streams
        with self._saving.on(stream):  # whoever asks may be another thread, which waits for memory
            if self._saving.is_capturing():  # a graph would take digests whenever it is launched
                return
            pairs = self.compared(sources)
        if pairs is not None:
            self._check = Check(self, sources, pairs, self._saving.tier.mark(stream))

    def is_checked(self) -> bool:
        """Tell whether no check is under way."""
        check = self._check
        return check is None or all(map(self._saving.tier.has_passed, check.fences))

    def await_check(self, within_s: float) -> bool:
        """Wait for the check that is under way; tells whether there was one."""
        if self.is_checked():
            return False
        end_s = time.monotonic() + within_s
        while not self.is_checked() and time.monotonic() < end_s:
            time.sleep(_SLICE_S)
        return True

    def last_digest(self) -> Digest | None:
        """Let the stream that copies out take the digest, behind all that the tensor's streams were given."""
        saving, address = self._saving, self._storage.data_ptr()
        if not on_stream.use_behind(saving.record, address, saving.tier.outgoing):
            return None
        digest = saving.digest_on(saving.tier.outgoing, self._storage)
        if digest is not None:
            digest.fence = saving.tier.mark(saving.tier.outgoing)
        return digest


class DeviceSaving(Saving):  # type: ignore[misc]  # as above
    """The hooks for a GPU's tensors."""

    storage_type = DeviceStorage
    kind = "cuda"

    def __init__(self, swapper: Swapper, begin: int, end: int, least_bytes: int, heap: Heap) -> None:
        """Swap what is saved of a heap's memory from ``begin`` to ``end``, in pieces of ``least_bytes`` or more."""
        super().__init__(swapper, begin, end, least_bytes)
        self.tier: DeviceTier = swapper.tier
        self.record: Any = heap.record[0]
        self._heap = heap
        self._capturing = word_of(self.record, "streams", "capturing")
        self._digests: Digests | None = None
        self.record_stream = _RECORD_STREAM(hooks.record_stream.address)
        """What PyTorch's allocator does for ``Tensor.record_stream``."""
        self.device = torch.device("cuda", heap.pool.driver.facts.ordinal)  # type: ignore[attr-defined]  # a CUDA device's
        self._incoming: Any = None
        self.clock = self.tier.clock = DeviceClock(heap, (self.tier.outgoing, self.tier.incoming), self._computing)
        swapper.tell_time_by(self.clock)

    @property
    def incoming(self) -> Any:  # noqa: ANN401 - a torch.cuda.ExternalStream
        """Return the stream that copies in."""
        if self._incoming is None:  # not before the program itself uses CUDA
            self._incoming = torch.cuda.ExternalStream(self.tier.incoming, self.device)
        return self._incoming

    def stream(self) -> int:
        """Return the calling thread's stream."""
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))  # noqa: SLF001 - the only way without an object

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Let the calling thread give work to a stream for a while."""
        if stream == self.stream():
            yield
        else:
            with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.ExternalStream(stream, self.device)):
                yield

    def _computing(self) -> int | None:
        return None if self.is_capturing() else self.stream()

    def take_digests(self) -> None:
        """Be ready to take digests; loads a kernel.

        Raises:
            ConfigError: The kernel cannot be compiled here.
            DriverError: The device refuses it, or memory.
        """
        from zico.swap.device_digests import Digests

        if self._digests is None:
            self._digests = Digests(self._heap)

    def digest(self, storage: Any) -> Digest | None:  # noqa: ANN401 - torch has no types
        """Let the calling thread's stream take the digest of a tensor's memory."""
        return self.digest_on(self.stream(), storage)

    def digest_on(self, stream: int, storage: Any) -> Digest | None:  # noqa: ANN401 - as above
        """Let a stream take the digest of a tensor's memory; ``None``: it cannot."""
        if self._digests is None:
            return None
        with contextlib.suppress(DriverError):
            return self._digests.take(stream, storage.data_ptr(), storage.nbytes())
        return None

    def is_capturing(self) -> bool:
        """Tell whether what this thread computes may become a graph instead: while PyTorch captures one in any."""
        try:
            return self._capturing[0] != 0 or torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # the default stream cannot be asked while a stream captures that waits for it
            return True

    @contextlib.contextmanager
    def timed(self) -> Iterator[Callable[[], int]]:
        """Give what returns, behind the block, the nanoseconds that the device has computed in it; that waits."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)  # another device may be the thread's current one
        begin.record(stream)

        def took_ns() -> int:
            end.synchronize()
            return round(begin.elapsed_time(end) * NS_PER_MS)

        yield took_ns
        end.record(stream)

    @staticmethod
    def is_ours(tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is on a GPU."""
        return tensor.is_cuda

    def pack(self, tensor: torch.Tensor) -> Saved | tuple[torch.Tensor, int]:
        """Return what stands for a tensor in the graph; the thread's stream uses the tensor."""
        packed = super().pack(tensor)
        if isinstance(packed, Saved):
            packed.storage.uses += 1
            packed.storage.note_use()
        return packed

    def unpack(self, packed: Saved | tuple[torch.Tensor, int]) -> torch.Tensor:
        """Return the tensor again; the thread's stream waits until its bytes are here, and uses it."""
        tensor = super().unpack(packed)
        if isinstance(packed, Saved):
            packed.storage.uses += 1  # only now, so that a check that has begun meanwhile finds it changed
            packed.storage.note_use()
        return tensor
