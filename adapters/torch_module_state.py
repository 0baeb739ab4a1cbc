"""What a run of a PyTorch module can depend on: noted, compared, and had again for another run."""

# ruff: noqa: SLF001 - PyTorch has no other names for what is used here
# ruff: noqa: ANN401 - modules take and have anything
from __future__ import annotations

import collections
import contextlib
import pickle
import random
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel
from torch.nn.modules import module as module_hooks
from torch.utils import _pytree as pytree
from zico.adapters.torch_recipes import AsBefore
from zico.adapters.torch_saving import is_plain, storage_of

from zico.offload.digest import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SMALL_BYTES = 1 << 16
"""A buffer of at most this size is copied for each run."""
_TENSORS = (torch.Tensor, nn.Parameter)
_NUMBERS = (bool, int, float, str, type(None))
_NO_TENSORS = (*_NUMBERS, torch.dtype, torch.device)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_CONTAINERS = (list, tuple, set, dict, collections.deque)
_PARTS = ("_parameters", "_buffers", "_modules")
_MODULE_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks") and "state_dict" not in name)
_GLOBAL_HOOKS = tuple(f"_global_{name}_hooks" for name in ("forward_pre", "forward", "backward_pre", "backward"))
_MOST_INSIDE = 64
_DEEPEST = 3
"""Functions that call each other in which names are looked up."""


# -- numbers ---------------------------------------------------------------------------------------


def digest_of_tensor(tensor: torch.Tensor) -> int:
    """Return the digest of a tensor's numbers, in their order; its own identity if they cannot be read."""
    if not (type(tensor) in _TENSORS and is_plain(tensor) and _is_here(tensor)):
        return id(tensor)
    whole = tensor.detach().contiguous()
    return digest(whole.data_ptr(), whole.nbytes) if whole.nbytes else 0


def _is_here(tensor: torch.Tensor) -> bool:
    """Tell whether all of a tensor's memory is there: storages can be resized, and zeros need none."""
    if tensor._is_zerotensor():
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    needed_bytes = (tensor.storage_offset() + last + 1) * tensor.itemsize if tensor.numel() else 0
    return storage_of(tensor).nbytes() >= needed_bytes


def digests_of(tensors: Any) -> list[int]:
    """Return the digests of all tensors in lists, tuples and dictionaries."""
    return [digest_of_tensor(each) for each in pytree.tree_leaves(tensors) if isinstance(each, torch.Tensor)]


def are_plain(given: Any) -> bool:
    """Tell whether these are numbers, text, and tensors that are nothing but their memory."""
    return all(
        is_plain(each) if type(each) in _TENSORS else isinstance(each, _NO_TENSORS)
        for each in pytree.tree_leaves(given)
    )


# -- the module ------------------------------------------------------------------------------------


def fingerprint(module: nn.Module) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return PyTorch's settings, and what a module and those inside it are, but for the numbers in tensors.

    Two are equal if nothing has been replaced, switched, or put into a container between them.
    Takes 0.1 ms.
    """
    settings = (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        *(len(getattr(module_hooks, name)) for name in _GLOBAL_HOOKS),
    )
    found: list[Any] = []
    for each in module.modules():
        found.append(type(each))
        for key, value in vars(each).items():
            if key == "_parameters":
                found += [(name, id(one), one is not None and one.requires_grad) for name, one in value.items()]
            elif isinstance(value, _NUMBERS):
                found.append((key, value))
            else:
                found.append((key, id(value), *_inside(value)))
    return settings, tuple(found)


def _inside(value: Any) -> tuple[int, ...]:
    """Return what is in a container or an object, as far as it is looked at."""
    if isinstance(value, nn.Module | torch.Tensor | type | types.FunctionType | types.ModuleType):
        return ()
    inside = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", ())
    some = list(inside.values() if isinstance(inside, dict) else inside)[:_MOST_INSIDE]
    return (len(inside), *(len(one) if isinstance(one, list) else id(one) for one in some))


def unfit(module: nn.Module) -> str:
    """Return why a module cannot run again whatever it computes; empty: nothing speaks against it."""
    if any(getattr(module_hooks, name) for name in _GLOBAL_HOOKS):
        return "all modules have hooks"
    return next(filter(None, map(_unfit, module.modules())), "")


def _unfit(module: nn.Module) -> str:
    """Return why a module cannot run again, but for those inside it."""
    forward, held = type(module).forward, list(vars(module).values())
    held += [one for value in held if isinstance(value, _CONTAINERS) for one in _values(value)]
    if isinstance(module, torch.jit.ScriptModule) or not isinstance(forward, types.FunctionType):
        return "it is compiled"
    other = _other(forward, _DEEPEST)
    reasons = {
        "it has hooks": "forward" in vars(module) or any(getattr(module, name, None) for name in _MODULE_HOOKS),
        "it changes its parameters": getattr(module, "max_norm", None) is not None,
        "it draws from a generator of its own": any(isinstance(one, _GENERATORS) for one in held),
        f"it uses {other}, which is no part of it": bool(other),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def _values(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _other(function: types.FunctionType, depth: int) -> str:
    """Return the name of something outside a module that a function may change; empty: none is seen."""
    if depth == 0 or (function.__module__ or "").startswith("torch."):
        return ""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    seen = {name: cell.cell_contents for name, cell in cells if _is_full(cell)}
    seen |= {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    for name, value in seen.items():
        if isinstance(value, (list, dict, set, collections.deque, *_GENERATORS)):
            return name
        if isinstance(value, types.FunctionType):
            inner = _other(value, depth - 1)
            if inner:
                return inner
    return ""


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _names(code: types.CodeType) -> set[str]:
    """Return the names of attributes and globals in a code and those inside it."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*inner)


# -- all that a run depends on ---------------------------------------------------------------------


class Draws:
    """Where the generators of PyTorch, Python and NumPy stand that everybody draws from."""

    def __init__(self, before: Draws | None = None) -> None:
        """Note it; PyTorch's as it was before, where that is given: another thread may have drawn since."""
        self.pytorch: torch.Tensor = torch.get_rng_state() if before is None else before.pytorch
        self.python = random.getstate()
        self.numpy = pickle.dumps(np.random.get_state(legacy=False))  # noqa: NPY002 - whatever the user draws from

    def differ_outside_torch(self, later: Draws) -> bool:
        """Tell whether Python's or NumPy's stands elsewhere later."""
        return self.python != later.python or self.numpy != later.numpy

    def moved(self, later: Draws) -> list[Callable[[], None]]:
        """Return what puts those back here that stand elsewhere later."""
        found: list[Callable[[], None]] = []
        if not torch.equal(self.pytorch, later.pytorch):
            found.append(lambda: torch.set_rng_state(self.pytorch))
        if self.python != later.python:
            found.append(lambda: random.setstate(self.python))
        if self.numpy != later.numpy:
            found.append(lambda: np.random.set_state(pickle.loads(self.numpy)))  # noqa: NPY002, S301 - our own
        return found


class ModuleState:
    """A module and its surroundings as they are now."""

    def __init__(self, module: nn.Module) -> None:
        """Note them; copies small buffers."""
        self._modules = [
            (each, dict(vars(each)), [dict(vars(each)[part]) for part in _PARTS]) for each in module.modules()
        ]
        self._flags = [(each, each.requires_grad) for each in module.parameters()]
        buffers = list(module.buffers())
        self._small = [(each, each.detach().clone()) for each in buffers if each.nbytes <= SMALL_BYTES]
        self.fixed: list[torch.Tensor] = [*module.parameters()]
        """What no run changes: parameters, and buffers that are not copied."""
        self.fixed += [each for each in buffers if each.nbytes > SMALL_BYTES]
        self._threads = torch.get_num_threads()
        self._backends = _cur_sdpa_kernel_backends()
        self.draws = Draws()

    @contextlib.contextmanager
    def again(self, later: Draws) -> Iterator[None]:
        """Have all this again for a while, and what is now afterwards.

        Args:
            later: Where generators stood after the first run: those that it did not move stay.
        """
        back, there = Draws(), self.draws.moved(later)
        now = ModuleState(self._modules[0][0])
        try:
            self._put()
            for put in there:
                put()
            with AsBefore(self._threads), sdpa_kernel(self._backends):
                yield
        finally:
            now._put()
            for put in back.moved(Draws()) if there else ():
                put()

    def _put(self) -> None:
        for each, held, parts in self._modules:
            vars(each).clear()
            vars(each).update(held)
            for name, part in zip(_PARTS, parts, strict=True):
                held[name].clear()
                held[name].update(part)
        for parameter, flag in self._flags:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)
        for buffer, value in self._small:
            if digest_of_tensor(buffer) != digest_of_tensor(value):
                buffer.data.copy_(value)  # graphs that have saved it do not count that as a change: it is put back
