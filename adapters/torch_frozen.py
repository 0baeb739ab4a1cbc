"""PyTorch's frozen parameters are held once for all jobs of a pool that have the same ones.

Theory of operation
    A parameter is frozen that requires no gradient. Before the first module computes, when models
    have been loaded, all frozen parameters of the pool's memory are offered to ``zico.job.frozen``.
    Those that it has mapped get their memory there (``Tensor.data``), and what they had is freed.
    At the end of an iteration those are looked at that have changed since, or require a gradient
    now: they get memory of their own again, which is the pool's and counts. What there was no room
    for is offered again after each of the first iterations.

Guarantees (numbers as in docs/design/invariants.md)
    6. Parameters keep their bits, shapes, strides, versions and identity.
    12. A parameter that is written is a page of this process's from the write on.
    Only memory to which nothing but one parameter refers is moved, so that no alias stays behind.

Known limitations
    On the host. Memory of PyTorch that is not its own cannot be resized (``resize_``). A write by
    other code than PyTorch's, such as through a NumPy array, changes no version: the pages that it
    writes are not counted. Neither are those of a job whose iterations no mark ends.
"""

# ruff: noqa: SLF001 - PyTorch has no other names for what is used here
from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from zico.adapters.torch_saving import PLAIN, has_memory_alone, is_dense, is_transformed, storage_of

from zico.base.saying import inform
from zico.job.frozen import Bytes, Sharing, told
from zico.job.session import Watcher

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zico.job.frozen import Mapping
    from zico.job.session import Session

OFFERS = 3
"""Iterations after which what is not shared yet is offered again."""


class FrozenSharing(Watcher):
    """Shares frozen parameters of this process, and takes those back that are frozen no more."""

    def __init__(self, joined: Session) -> None:
        """Share nothing yet."""
        self._session = joined
        self._sharing = Sharing(joined.membership)
        self._begin, self._end = joined.heap.base, joined.heap.base + int(joined.heap.record[0]["window_bytes"])
        self._shared: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        """By identity: a tensor, its version, and its address."""
        self._changed: dict[int, weakref.ref[torch.Tensor]] = {}
        """By identity: tensors that have been taken back, which are not offered again."""
        self._offers = 0
        self._hook: Any = None

    def install(self) -> None:
        """Offer all frozen parameters before the first module computes."""
        self._offers = OFFERS
        self._hook = register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, _module: Any, _args: Any) -> None:  # noqa: ANN401 - as torch's hooks
        self._hook.remove()  # a module without any hook is called by a shorter way
        self.share(frozen_parameters())

    def share(self, tensors: Iterable[torch.Tensor]) -> int:
        """Share the memory of these tensors as far as it can be; returns how many bytes are shared by this call."""
        if not self._session.is_member or is_transformed():
            return 0
        wanted = [one for tensor in tensors if (one := self._bytes_of(tensor)) is not None]
        wanted.sort(key=lambda one: -one.size_bytes)
        n = size_bytes = 0
        for bytes_, mapping in self._sharing.share(wanted):
            _move(bytes_.of, mapping)
            tensor = bytes_.of
            self._shared[id(tensor)] = (weakref.ref(tensor), tensor._version, tensor.data_ptr())
            n += 1
            size_bytes += bytes_.size_bytes
        if n:
            inform(told(n, size_bytes))
        return size_bytes

    def _bytes_of(self, tensor: torch.Tensor) -> Bytes | None:
        """Return a tensor's memory if that is the pool's, and nobody but this tensor refers to it."""
        if type(tensor) not in PLAIN or not tensor.is_cpu or tensor.requires_grad or not is_dense(tensor):
            return None
        changed = self._changed.get(id(tensor))
        if changed is not None and changed() is tensor:
            return None
        if tensor.is_inference() or tensor._is_view() or not has_memory_alone(tensor):
            return None
        storage = storage_of(tensor)
        if not (self._begin <= storage.data_ptr() < self._end and storage.resizable()):
            return None
        return Bytes(storage.data_ptr(), storage.nbytes(), tensor)

    def at_boundary(self) -> None:
        """Take back what is frozen no more, and offer what is not shared yet."""
        for identity, (reference, version, address) in list(self._shared.items()):
            tensor = reference()
            if tensor is None or tensor.data_ptr() != address:
                del self._shared[identity]
            elif tensor._version != version or tensor.requires_grad:
                del self._shared[identity]
                tensor.data = tensor.data.clone()
                self._changed[identity] = reference
        if self._offers:
            self._offers -= 1
            self.share(frozen_parameters())
        self._sharing.give_back()


def frozen_parameters() -> list[torch.Tensor]:
    """Return all parameters of this process that require no gradient."""
    return [one for one in gc.get_objects() if type(one) is torch.nn.Parameter and not one.requires_grad]


def _move(tensor: torch.Tensor, mapping: Mapping) -> None:
    """Let a tensor have its memory in a mapping, as it had it before."""
    storage = storage_of(torch.frombuffer(mapping.buffer(), dtype=torch.uint8))
    there = torch.empty(0, dtype=tensor.dtype)
    there.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    tensor.data = there
