"""Checks of raising through PyTorch's C++ frames, in a process of their own: ``raising_checks.py``."""

from __future__ import annotations

import sys

import llvmlite.binding
import numpy as np
import torch
from numba import types
from zico.adapters import torch_raising

from zico import elf
from zico.compiled import array_at, call, callback, symbol_address

GIB = 1 << 30
REFUSAL = "zico: not on this device"
_SYMBOL = "zico_test_raise"
_FUNCTION = np.array([torch_raising.prepare(torch)], np.int64)
llvmlite.binding.add_symbol(_SYMBOL, _FUNCTION.ctypes.data)
_function_address = symbol_address(_SYMBOL)
_I64 = np.dtype("i8")


@callback(types.int32(types.int64, types.int64, types.int64))
def failing(_out_address: int, _alignment: int, size_bytes: int) -> int:
    """Stand in for ``posix_memalign``: every request is refused by raising."""
    call(array_at(_function_address(), 1, _I64)[0], (size_bytes, 3 * GIB, 4 * GIB))
    return 12


def main() -> None:
    """Allocate through the failing function, see its messages, allocate again through the real one."""
    libc10 = elf.find_loaded("libc10.so")
    originals = elf.replace_imports(libc10, {"posix_memalign": int(failing.address)}).originals
    messages = []
    for size in (5 * GIB, 1):
        try:
            torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            messages.append(str(error))
    _FUNCTION[0] = torch_raising.prepare_refusal(torch, REFUSAL)
    try:
        torch.empty(1)
    except RuntimeError as error:
        messages.append(f"{type(error).__name__}: {error}")
    elf.replace_imports(libc10, originals)
    sys.stdout.write("\n".join(messages) + f"\n{int(torch.ones(1000).sum())}\n")


if __name__ == "__main__":
    main()
