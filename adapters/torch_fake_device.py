"""Let a script's devices all be the one on which fake tensors are, and let PyTorch do as on that device.

``device=`` arguments and moves are followed to the CPU, where the tensors are. Where the device model is a CUDA
device, dropout and attention are the fused ones, and optimizers take their multi-tensor path.
"""

# ruff: noqa: A002, ANN401, FBT001, FBT002, SLF001 - torch has no types, its own signatures and its private names

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from zico.trace.roofline import DeviceModel

_ACCELERATORS = {"cuda", "mps", "xpu"}
_MOVES = {torch.Tensor.cuda, torch.Tensor.pin_memory}
_optimizers = importlib.import_module("torch.optim.optimizer")  # torch.optim hides it
_plain_dropout = torch.nn.functional.dropout
_plain_attention = torch.nn.functional.scaled_dot_product_attention


def pretences(device: DeviceModel) -> Iterator[AbstractContextManager[object]]:
    """Yield what to enter, in this order, before a script runs on fake tensors of a device model."""
    yield _OneDevice()
    yield mock.patch.object(torch.nn.Module, "_apply", _apply)
    yield from _multi_tensor()
    if device.is_cuda:
        yield from _as_cuda()


class _OneDevice(TorchFunctionMode):  # type: ignore[misc] # torch has no types
    """Lets a script's devices all be the one on which the fake tensors are."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MOVES:
            return args[0]
        kwargs = {name: _here(value, name) for name, value in (kwargs or {}).items()}
        return func(*map(_here, args), **kwargs)


def _here(value: Any, name: str = "") -> Any:
    kind = value.type if isinstance(value, torch.device) else value.partition(":")[0] if isinstance(value, str) else ""
    return "cpu" if kind in _ACCELERATORS or (name == "device" and isinstance(value, int)) else value


def _fused_dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or inplace or not 0 < p < 1:
        return _plain_dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, train=True)[0]


def _apply(module: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """Convert a module as ``Module._apply`` does real ones; fake tensors it swaps, which references to them forbid."""
    for child in module.children() if recurse else ():
        child._apply(fn)
    for parameter in module._parameters.values():
        for tensor in (parameter, getattr(parameter, "grad", None)):
            if tensor is not None:
                with torch.no_grad():
                    tensor.data = fn(tensor)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _fused_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
) -> Any:
    if not dropout_p or kwargs.get("enable_gqa") or query.dim() != 4:  # noqa: PLR2004 - with heads
        return _plain_attention(query, key, value, attn_mask, dropout_p, *args, **kwargs)
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    keeps_sums = True
    # The kernel that a CUDA device has for it; without dropout the CPU's keeps as much.
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, keeps_sums, dropout_p, *args, **kwargs
    )[0]


def _multi_tensor() -> Iterator[Any]:
    """Yield what lets fake tensors be worked on together where real ones are."""
    for module in (_optimizers, _foreach_utils):
        types = [*module._foreach_supported_types, FakeTensor]
        yield mock.patch.object(module, "_foreach_supported_types", types)


def _as_cuda() -> Iterator[Any]:
    """Yield what lets PyTorch do as on a CUDA device."""
    yield mock.patch.object(torch.nn.functional, "dropout", _fused_dropout)
    yield mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _fused_attention)
    yield mock.patch.object(_optimizers, "_get_foreach_kernels_supported_devices", return_value=["cpu"])
