"""What autograd saves of a GPU's memory leaves by a side stream and comes back by another, on the device's timeline.

As ``zico.adapters.torch_saving``, with three differences. Each stream that saves or unpacks a tensor
is recorded as one that uses it, so that a copy out waits for its work, and so does the memory's
next owner. What comes back lies in memory that was allocated for the stream that copies in. A
stream that unpacks waits for that copy, on the device.

Has not run on a GPU.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from zico.adapters.torch_saving import Saved, Saving, Storage, storage_of

from zico.heap.cuda import hooks

if TYPE_CHECKING:
    from zico.heap.build import Heap
    from zico.offload.device_tier import DeviceTier
    from zico.offload.swapper import Swapper

_RECORD_STREAM = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)


class DeviceStorage(Storage):  # type: ignore[misc]  # mypy knows no adapter by this name
    """Memory of a GPU that only saved tensors refer to, sooner or later."""

    _saving: DeviceSaving
    fence = 0
    """Of the copy in that has made it, 0: none has."""

    def __init__(self, saving: DeviceSaving, storage: Any) -> None:  # noqa: ANN401 - torch has no types
        """Stand for a storage that is here."""
        super().__init__(saving, storage)
        self._streams: set[int] = set()
        """Those that are known to use it where it is now."""

    def settle(self) -> int:
        """Allocate as PyTorch does, for the stream that copies in."""
        with torch.cuda.stream(self._saving.incoming):
            self._settled = storage_of(torch.empty(self.size_bytes, dtype=torch.uint8, device=self._saving.device))
        return int(self._settled.data_ptr())

    def arrive(self) -> None:
        """Be here again, for those who wait for the copy."""
        super().arrive()
        self._streams = set()
        self.fence = self._saving.tier.fence_of(self.ticket)

    def note_use(self) -> None:
        """Let the calling thread's stream use it behind the copy that made it; its next copy waits for that stream."""
        stream = torch._C._cuda_getCurrentRawStream(self._saving.device.index)  # noqa: SLF001 - the only way without an object
        if stream in self._streams:
            return
        self._saving.record_stream(self._storage.data_ptr(), stream)
        if self.fence:
            self._saving.tier.follow(stream, self.fence)
        self._streams.add(stream)


class DeviceSaving(Saving):  # type: ignore[misc]  # as above
    """The hooks for a GPU's tensors."""

    storage_type = DeviceStorage

    def __init__(self, swapper: Swapper, begin: int, end: int, least_bytes: int, heap: Heap) -> None:
        """Swap what is saved of a heap's memory from ``begin`` to ``end``, in pieces of ``least_bytes`` or more."""
        super().__init__(swapper, begin, end, least_bytes)
        self.tier: DeviceTier = swapper.tier
        self.record_stream = _RECORD_STREAM(hooks.record_stream.address)
        """What PyTorch's allocator does for ``Tensor.record_stream``."""
        self.device = torch.device("cuda", heap.pool.driver.facts.ordinal)  # type: ignore[attr-defined]  # a CUDA device's
        self._incoming: Any = None

    @property
    def incoming(self) -> Any:  # noqa: ANN401 - a torch.cuda.ExternalStream
        """Return the stream that copies in."""
        if self._incoming is None:  # not before the program itself uses CUDA
            self._incoming = torch.cuda.ExternalStream(self.tier.incoming, self.device)
        return self._incoming

    @staticmethod
    def is_ours(tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is on a GPU."""
        return tensor.is_cuda

    def pack(self, tensor: torch.Tensor) -> Saved | tuple[torch.Tensor, int]:
        """Return what stands for a tensor in the graph; the thread's stream uses the tensor."""
        packed = super().pack(tensor)
        if isinstance(packed, Saved):
            packed.storage.note_use()
        return packed

    def unpack(self, packed: Saved | tuple[torch.Tensor, int]) -> torch.Tensor:
        """Return the tensor again; the thread's stream waits until its bytes are here, and uses it."""
        tensor = super().unpack(packed)
        if isinstance(packed, Saved):
            packed.storage.note_use()
        return tensor
