"""PyTorch's frozen parameters are held once for all jobs of a pool on the host that have the same ones.

Theory of operation
    A parameter is frozen that requires no gradient. Before the first module computes, its frozen
    parameters in the pool's memory are offered to ``zico.job.frozen``. So are, at the end of each of
    the first iterations, all of the process that have not been written since the end before. Those
    that are mapped now get their memory there (``Tensor.data``), and what they had is freed. The end
    of an iteration shows which of them were written since, or require a gradient now. They get memory
    of their own again, which is the pool's and counts.

Guarantees (numbers as in docs/design/invariants.md)
    6. Parameters keep their bits, shapes, strides, versions and identity.
    12. A parameter that is written is a page of this process's from the write on.
    Only memory to which nothing but one parameter refers is moved, there and back, so that no alias
    stays behind. What fails here costs a line on stderr, and the job goes on with its own memory.

Known limitations
    * Memory of PyTorch that is not its own cannot be resized (``resize_``).
    * A write that changes no version (``Tensor.data``, NumPy) is seen by the process's pages. Those
      are looked at rarely: at the ends of iterations 1, 2, 4, 8 and so on. Until then, and where an
      alias keeps a written parameter where it is, its pages are not counted.
    * A region goes back when all of it is free. Where frozen parameters lie between others that
      stay, sharing gains that much less.
    * A write by another thread at the moment of the move may be lost. Such a thread writes what this
      one is about to compute with, or what nobody has written since the last end of an iteration.
    * A module that first computes inside ``torch.compile`` shares at the end of an iteration.
"""

# ruff: noqa: SLF001 - PyTorch has no other names for what is used here
from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from zico.adapters.torch_saving import PLAIN, has_memory_alone, is_dense, is_transformed, storage_of

from zico.job.frozen import OFFERS, Bytes, Sharer, is_written

if TYPE_CHECKING:
    from zico.job.frozen import Mapping
    from zico.job.session import Session


class FrozenSharing(Sharer):
    """Shares frozen parameters of this process, and takes those back that are frozen no more."""

    takes = "a module of PyTorch or a list of its tensors"
    device = "cpu"
    """Whose memory it shares."""

    def __init__(self, joined: Session) -> None:
        """Share nothing yet."""
        super().__init__(joined)
        self._shared: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        """By identity: a tensor, its version, and its address."""
        self._changed: dict[int, weakref.ref[torch.Tensor]] = {}
        """By identity: tensors that were written, which are not offered again."""
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """By identity: frozen parameters at the last end of an iteration, and their versions then."""
        self._ends = 0
        self._hook: Any = None

    def install(self) -> None:
        """Offer frozen parameters before the first module computes, and at the ends of the first iterations."""
        self._offers = OFFERS
        self._hook = register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: Any, _args: Any) -> None:  # noqa: ANN401 - as torch's hooks
        if torch.compiler.is_compiling():
            return
        self._hook.remove()  # a module without any hook is called by a shorter way
        self._offer(module.parameters)

    def knows(self, given: Any) -> bool:  # noqa: ANN401 - whatever a user gives
        """Tell whether this is a module, or several tensors."""
        if isinstance(given, torch.nn.Module):
            return True
        is_several = isinstance(given, Iterable) and not isinstance(given, torch.Tensor)
        return is_several and all(isinstance(one, torch.Tensor) for one in given)

    def share(self, given: Any) -> Any:  # noqa: ANN401 - as given
        """Share the memory of a module's parameters, or of these tensors, as far as it can be."""
        if is_transformed():
            return given
        versions, wanted = {}, []
        for tensor in given.parameters() if isinstance(given, torch.nn.Module) else given:
            version = 0 if tensor.is_inference() else tensor._version
            bytes_of = self._bytes_of(tensor)
            if bytes_of is not None:
                versions[id(tensor)] = version
                wanted.append(bytes_of)

        def move(bytes_: Bytes, mapping: Mapping) -> bool:
            one, version = bytes_.of, versions[id(bytes_.of)]
            if one._version != version:
                return False
            self._place(one, mapping)
            self._shared[id(one)] = (weakref.ref(one), version, one.data_ptr())
            return True

        with torch.inference_mode(mode=False), torch.no_grad():
            self._sharing.share(wanted, move)
        return given

    def _place(self, tensor: torch.Tensor, mapping: Mapping) -> None:
        """Let a tensor have its memory in a mapping."""
        place_in(tensor, storage_of(torch.frombuffer(mapping.buffer(), dtype=torch.uint8)))

    def _bytes_of(self, tensor: torch.Tensor) -> Bytes | None:
        """Return a tensor's memory if that is the pool's, and nobody but this tensor refers to it."""
        if (
            type(tensor) not in PLAIN
            or tensor.device.type != self.device
            or tensor.requires_grad
            or not is_dense(tensor)
        ):
            return None
        changed = self._changed.get(id(tensor))
        if changed is not None and changed() is tensor:
            return None
        if tensor.is_inference() or tensor._is_view() or not has_memory_alone(tensor):
            return None
        storage = storage_of(tensor)
        if not (self._sharing.has(storage.data_ptr()) and storage.resizable()):
            return None
        return Bytes(storage.data_ptr(), storage.nbytes(), tensor)

    def _take_back(self) -> None:
        self._ends += 1
        looks = self._ends & (self._ends - 1) == 0  # a power of two
        for identity, (reference, version, address) in list(self._shared.items()):
            tensor = reference()
            if tensor is None or tensor.data_ptr() != address:
                del self._shared[identity]
            elif tensor._version != version or tensor.requires_grad or (looks and _is_written(tensor)):
                del self._shared[identity]
                self._changed[identity] = reference
                _let_have_its_own(tensor)

    def _still_frozen(self) -> list[torch.Tensor]:
        """Return the frozen parameters that nobody has written since the last end of an iteration, or the beginning."""
        before, found = self._seen, frozen_parameters()
        self._seen = {id(one): (weakref.ref(one), one._version) for one in found}
        return [one for one in found if id(one) in before and _is_as(one, *before[id(one)])]


def _let_have_its_own(tensor: torch.Tensor) -> None:
    if has_memory_alone(tensor):  # else its aliases would see no more writes
        with torch.inference_mode(mode=False), torch.no_grad():
            tensor.data = tensor.data.clone(memory_format=torch.preserve_format)


def _is_as(tensor: Any, reference: weakref.ref[torch.Tensor], version: int) -> bool:  # noqa: ANN401 - torch has no types
    return bool(tensor._version == version) and reference() is tensor


def _is_written(tensor: torch.Tensor) -> bool:
    storage = storage_of(tensor)
    return is_written(storage.data_ptr(), storage.nbytes())


def frozen_parameters() -> list[torch.Tensor]:
    """Return all parameters of this process that require no gradient."""
    found = [one for one in gc.get_objects() if type(one) is torch.nn.Parameter and not one.requires_grad]
    return [one for one in found if not one.is_inference()]


def place_in(tensor: torch.Tensor, storage: Any) -> None:  # noqa: ANN401 - torch has no types
    """Let a tensor have its memory in another storage with the same bytes, as it had it before."""
    there = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    there.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    tensor.data = there
