"""Checks of raising through PyTorch's C++ frames, in a process of their own: ``raising_checks.py``.

PyTorch's allocator for the processor turns every error into ``c10::Error``. So the function fails
that libtorch_cpu.so asks for that allocator; errors leave it as they leave the allocator for CUDA.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import llvmlite.binding
import numpy as np
import torch
from numba import types
from zico.adapters import torch_cuda

from zico.base.compiled import array_at, call, callback, symbol_address
from zico.job import elf

if TYPE_CHECKING:
    import ctypes

GIB = 1 << 30
REFUSAL = "zico: not on this device"
GET_ALLOCATOR = "_ZN3c1015GetCPUAllocatorEv"
_SYMBOL = "zico_test_raise"
_CALL = np.zeros(2, np.int64)  # which function, with how many bytes
llvmlite.binding.add_symbol(_SYMBOL, _CALL.ctypes.data)
_call_address = symbol_address(_SYMBOL)
_I64 = np.dtype("i8")
_address_in = torch_cuda.address_in


@callback(types.int64())
def failing() -> int:
    """Stand in for ``c10::GetCPUAllocator``: every request is refused by raising."""
    asked = array_at(_call_address(), 2, _I64)
    call(asked[0], (asked[1], 3 * GIB, 4 * GIB))
    return 0


def address_in_old_builds(library: ctypes.CDLL, symbol: str) -> int:
    """Hide what PyTorch 2.11 and 2.12 do not export: libc10.so names no ``c10::OutOfMemoryError`` there."""
    if "OutOfMemoryError" in symbol and library._name.endswith("libc10.so"):
        raise ValueError(symbol)
    return _address_in(library, symbol)


def what_is_raised() -> str:
    """Make a tensor; return the error's class and text."""
    try:
        torch.empty(1)
    except Exception as error:  # noqa: BLE001 - whichever it is
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main() -> None:
    """Make tensors with the failing function, see its messages, make one with the real function."""
    torch_cuda.address_in = address_in_old_builds
    _CALL[0] = torch_cuda.prepare(torch)
    libtorch_cpu = elf.find_loaded("libtorch_cpu.so")
    torch.empty(1)  # binds the import
    originals = elf.replace_imports(libtorch_cpu, {GET_ALLOCATOR: int(failing.address)}).originals
    messages = []
    for size_bytes in (5 * GIB, 1):
        _CALL[1] = size_bytes
        messages.append(what_is_raised())
    _CALL[0] = torch_cuda.prepare_refusals(torch, ("another one", REFUSAL))  # number 1, as the bytes above
    messages.append(what_is_raised())
    elf.replace_imports(libtorch_cpu, originals)
    sys.stdout.write("\n".join(messages) + f"\n{int(torch.ones(1000).sum())}\n")


if __name__ == "__main__":
    main()
