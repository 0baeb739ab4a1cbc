"""PyTorch's frozen parameters on a GPU are held once for all jobs of a pool that have the same ones.

Theory of operation
    What is frozen, and when it is offered, is as on the host (``zico.adapters.torch_frozen``). But a
    write on the device to memory that it may only read loses the context. So shared tensors are of a
    class of their own, which PyTorch asks before each of its functions that gets one
    (``__torch_function__``). A function that writes one waits until the tensor's memory is this
    process's (``zico.job.frozen_device``). Views, ``detach`` and ``data`` give tensors that do the same.
    The backward pass and the kernels themselves are not asked, so they cost nothing. From inside of a
    compiled graph nobody can ask. So such a graph has the functions that are known to read alone, and
    breaks at any other that gets a shared tensor.

Guarantees (numbers as in docs/design/invariants.md)
    4, 6. As on the host. A tensor that is written stays where it is, so that aliases see the write.
    Copies and checkpoints of a shared tensor are plain tensors and parameters.

Known limitations
    * It has run on no GPU.
    * Who writes by an address (``data_ptr``, DLPack, a storage) is not seen, and loses its context. So
      does C++ that writes a tensor which Python gave it. PyTorch does not tell either of a tensor that
      took the memory by ``set_`` or into its ``data``. None of them can change what others see.
    * A write for which the budget has no room is refused by an error, before it is launched.
    * Each of PyTorch's Python functions that gets such a tensor takes some microseconds longer.
    * While a CUDA graph is captured nothing is shared, and a write is refused. Nothing is shared
      among the ranks of a job, whose collectives write in C++.
    * PyTorch's own modules of attention keep theirs, since they compute in another way for such tensors.
    * Inside of ``torch.func``, ``vmap`` and ``torch.jit`` nobody is asked.
"""

# mypy: disallow-subclassing-any=False
# ruff: noqa: SLF001, ANN401 - PyTorch has no other names for what is used here, and no types
from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo import assume_constant_result
from zico.adapters.torch_frozen import FrozenSharing, place_in
from zico.adapters.torch_saving import storage_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zico.job.frozen import Bytes
    from zico.job.frozen_device import Content, Part

_IN_PLACE = frozenset(
    ("__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")))
)
_IN_PLACE |= frozenset(f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "pow"))
_SETS_NOTHING = frozenset(("requires_grad_", "rename_", "retain_grad_"))
"""Functions that are named as if they wrote."""
_NORMS = ("batch_norm", "instance_norm")
"""Functions with this in their names write the statistics that they are given."""
_MAX_NORM = 3
"""Which argument of ``embedding`` has the weight be written."""
_FAST = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder)
"""Modules that compute in another way where a parameter is of a class that is asked."""
_READ = frozenset(
    (
        *("linear", "bilinear", "embedding", "conv1d", "conv2d", "conv3d", "layer_norm", "rms_norm", "group_norm"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention"),
        *("matmul", "rmatmul", "mm", "bmm", "mv", "addmm", "baddbmm", "add", "radd", "sub", "rsub", "mul", "rmul"),
        *("truediv", "div", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size"),
    )
)
"""Functions that write no argument and return new memory: they need not be looked at, and may be compiled."""
_NO_ROOM = (
    "a frozen tensor that jobs share on the GPU is to be written, and the pool has no room for a copy of it now: raise "
    "the budget, or leave --share-frozen out"
)
_ALONE = (
    "a frozen tensor that jobs share on the GPU is to be written, and the broker that gives memory for a copy of it is "
    "gone: start anew, with --share-frozen or without"
)
_CAPTURED = "a frozen tensor that jobs share on the GPU is written while a CUDA graph is captured: write it once before"

_contents: weakref.WeakValueDictionary[int, Content] = weakref.WeakValueDictionary()
"""What is mapped here, by where the memory of a tensor begins."""


def _asks(_cls: Any, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call one of PyTorch's functions, once what it writes is this process's."""
    kwargs = kwargs or {}
    if torch.compiler.is_compiling():
        if _is_to_write(func, args, kwargs) or not _reads_alone(func):
            return _ask_uncompiled(func, args, kwargs)
    elif _is_to_write(func, args, kwargs) or not _is_known_to_read(func):
        return _ask(func, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _is_to_write(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether a function is told to write what it does not write by itself."""
    get = kwargs.get
    if get("out") is not None or get("max_norm") is not None or get("inplace"):
        return True
    return len(args) > _MAX_NORM and func is torch.nn.functional.embedding and args[_MAX_NORM] is not None


def _ask(func: Any, args: Any, kwargs: Any) -> Any:
    for tensor in written(func, args, kwargs):
        _own(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        if _may_alias(func):
            _guard(result)
    return result


_ask_uncompiled = torch.compiler.disable(_ask)


@functools.cache
def _is_known_to_read(func: Any) -> bool:
    """Tell whether a function neither writes nor returns the memory of its arguments, as far as that is known."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return False
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return not _may_alias(func)
    return name in _READ or (name.startswith("__") and name.strip("_") in _READ)


@assume_constant_result
def _reads_alone(func: Any) -> bool:
    return _is_known_to_read(func)


def written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield the shared tensors that one of PyTorch's functions is going to write."""
    name = getattr(func, "__name__", "")
    targets: list[Any] = [kwargs["out"]] if "out" in kwargs else []
    named_so = name in _IN_PLACE or (name.endswith("_") and not name.startswith("__") and name not in _SETS_NOTHING)
    if named_so or kwargs.get("inplace"):
        targets += _first(args, kwargs)
    if any(one in name for one in _NORMS) or _renorms(name, args, kwargs) or _is_mutable(func):
        targets += [*args, *kwargs.values()]
    for target in targets:
        for tensor in target if isinstance(target, list | tuple) else (target,):
            if isinstance(tensor, SharedParameter | SharedTensor):
                yield tensor


def _renorms(name: str, args: Any, kwargs: Any) -> bool:
    by_place = name == "embedding" and len(args) > _MAX_NORM and args[_MAX_NORM] is not None
    return by_place or kwargs.get("max_norm") is not None


def _is_mutable(func: Any) -> bool:
    """Tell whether an operator of ``torch.ops`` writes any of its arguments, whatever its name."""
    if isinstance(func, torch._ops.OpOverload):
        return bool(func._schema.is_mutable)
    if isinstance(func, torch._ops.OpOverloadPacket):
        return any(getattr(func, one)._schema.is_mutable for one in func.overloads())
    return False


def _first(args: Any, kwargs: Any) -> Iterable[Any]:
    """Return what a function in place may write: its first argument, or all where that is a list."""
    if args and isinstance(args[0], list | tuple):
        return args
    return args[:1] or kwargs.values()


_GIVES_MEMORY = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
"""Attributes that are tensors of the same memory."""


def _may_alias(func: Any) -> bool:
    """Tell whether what a function returns may have the memory of its argument."""
    if getattr(func, "__name__", "") != "__get__":
        return True
    return getattr(getattr(func, "__self__", None), "__name__", "") in _GIVES_MEMORY


def _guard(result: Any) -> None:
    """Let what has the memory of a shared tensor ask before it is written, too."""
    for one in result if isinstance(result, list | tuple) else (result,):
        if type(one) in _SHARED and _content_of(one) is not None:
            one.__class__ = _SHARED[type(one)]


def _content_of(tensor: Any) -> Content | None:
    try:
        return _contents.get(storage_of(tensor).data_ptr())
    except RuntimeError:  # it has no storage
        return None


def _own(tensor: Any) -> None:
    """Let a tensor's memory be this process's before it is written.

    Raises:
        RuntimeError: That cannot be now; nothing has been written.
    """
    with torch._C.DisableTorchFunctionSubclass():
        content = _content_of(tensor)
    if content is None or content.held.is_own:
        return
    if _is_captured():
        raise RuntimeError(_CAPTURED)
    if not content.own():
        raise RuntimeError(_ALONE if content.is_alone else _NO_ROOM)


def _is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _plain(tensor: Any) -> torch.Tensor:
    """Return a tensor of the same memory that is of no class of ours, for copies of it."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def _copied(tensor: Any) -> Any:
    """Return a tensor of the same memory, as ``copy.copy`` does."""
    plain = _plain(tensor)
    alias = torch.nn.Parameter(plain, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else plain
    _guard(alias)
    return alias


class SharedParameter(torch.nn.Parameter):
    """A frozen parameter whose memory other jobs have as well; a write to it is preceded by ``own``."""

    __torch_function__ = classmethod(_asks)
    __copy__ = _copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be saved as a plain parameter."""
        return torch.nn.Parameter(_plain(self), requires_grad=self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        """Be copied to a plain parameter."""
        return torch.nn.Parameter(copy.deepcopy(_plain(self), memo), requires_grad=self.requires_grad)


class SharedTensor(torch.Tensor):
    """A tensor of the memory of such a parameter."""

    __torch_function__ = classmethod(_asks)
    __copy__ = _copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be saved as a plain tensor."""
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        """Be copied to a plain tensor."""
        return copy.deepcopy(_plain(self), memo)


_SHARED = {torch.nn.Parameter: SharedParameter, torch.Tensor: SharedTensor}
_PLAIN = {shared: plain for plain, shared in _SHARED.items()}


@functools.cache
def _watch() -> None:
    """Let those ask, too, who make a parameter of a shared tensor, or broadcast one in C++."""
    make = torch.nn.Parameter.__new__

    def __new__(cls: Any, data: Any = None, requires_grad: Any = True) -> Any:  # noqa: N807, FBT002 - as torch's
        if type(data) not in _PLAIN:
            return make(cls, data, requires_grad)
        made = make(cls, _plain(data), requires_grad)
        _guard(made)
        return made

    torch.nn.Parameter.__new__ = __new__
    if torch.distributed.is_available():
        broadcast = torch.distributed._broadcast_coalesced

        def _broadcast_coalesced(group: Any, tensors: Any, *more: Any, **named: Any) -> Any:
            for tensor in tensors:
                if type(tensor) in _PLAIN:
                    _own(tensor)
            return broadcast(group, tensors, *more, **named)

        torch.distributed._broadcast_coalesced = _broadcast_coalesced


class CudaFrozenSharing(FrozenSharing):
    """Shares frozen parameters of this process on a GPU, and forgets those that became its own."""

    device = "cuda"
    _left_out: frozenset[int] = frozenset()
    """Parameters that stay where they are, by identity."""

    def share(self, given: Any) -> Any:
        """Share the memory of a module's parameters, or of these tensors, as far as it can be."""
        if _is_captured() or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return given
        _watch()
        modules = [one for one in gc.get_objects() if issubclass(type(one), _FAST)]
        self._left_out = frozenset(id(parameter) for module in modules for parameter in module.parameters())
        return super().share(given)

    def _bytes_of(self, tensor: torch.Tensor) -> Bytes | None:
        return None if id(tensor) in self._left_out else super()._bytes_of(tensor)

    def at_boundary(self) -> None:
        """Offer what is not shared yet, and let go of what nobody refers to."""
        if not _is_captured():
            super().at_boundary()

    def _place(self, tensor: torch.Tensor, mapping: Any) -> None:
        place_in(tensor, self._storage(mapping, storage_of(tensor).nbytes(), tensor.device))
        _contents[mapping.address] = mapping.content
        tensor.__class__ = _SHARED[type(tensor)]

    def _storage(self, part: Part, size_bytes: int, device: Any) -> Any:
        return storage_of(torch.as_tensor(part.bytes_at(size_bytes), device=device))

    def _take_back(self) -> None:
        for identity, (reference, _version, _address) in list(self._shared.items()):
            tensor = reference()
            content = None if tensor is None else _content_of(tensor)
            if content is not None and not content.held.is_own:
                continue
            del self._shared[identity]
            if tensor is not None:  # it has memory of its own
                self._changed[identity] = reference
                tensor.__class__ = _PLAIN.get(type(tensor), type(tensor))
