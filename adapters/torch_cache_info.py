"""Answer PyTorch's question for the largest workspace that cuDNN may try.

With ``torch.backends.cudnn.benchmark = True`` PyTorch asks ``CUDAAllocator::cacheInfo`` before it
times algorithms. ``CUDAPluggableAllocator`` raises there, and neither C++ nor Python has a setter
for an answer. So the one allocator that is Zico's gets a copy of its class's table of virtual
functions, with Zico's function in place of PyTorch's.

Guarantees
    The place is found by the address of PyTorch's function, so versions may order their tables.
    Nothing is written unless the object is of that class and the table has the function once.
    One object changes, by one aligned store; the class and its other objects do not.

The symbols and the table's entries were read in the builds of PyTorch 2.11.0, 2.12.0 and 2.13.0 for
CUDA 13 on x86-64. ``install`` has run on those libraries without a GPU. Has not run on a GPU.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from zico.adapters.torch_raising import FUNCTIONS_OFFSET, address_in

from zico import lookup
from zico.errors import HookError
from zico.heap.cuda import hooks

_CURRENT_ALLOCATOR = "_ZN3c104cuda20CUDACachingAllocator9allocatorE"
_TABLE = "_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE"
_CACHE_INFO = "_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator9cacheInfoEaPm"

_WITH_SYMBOL = 1  # RTLD_DL_SYMENT


class _Place(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("file_address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class _Symbol(ctypes.Structure):
    """``Elf64_Sym`` of elf(5)."""

    _fields_ = (
        ("name", ctypes.c_uint32),
        ("info", ctypes.c_uint8),
        ("other", ctypes.c_uint8),
        ("section", ctypes.c_uint16),
        ("value", ctypes.c_uint64),
        ("size_bytes", ctypes.c_uint64),
    )


def install(torch: Any) -> None:  # noqa: ANN401 - the module
    """Let PyTorch's present allocator, which is Zico's, answer ``cacheInfo``.

    Raises:
        HookError: This build lacks a symbol or is laid out otherwise; nothing has been changed.
    """
    folder = Path(torch.__file__).parent / "lib"
    try:
        allocator = _word_at(address_in(ctypes.CDLL(str(folder / "libc10_cuda.so")), _CURRENT_ALLOCATOR))
        library = ctypes.CDLL(str(folder / "libtorch_cuda.so"))
        table_address, function = address_in(library, _TABLE), address_in(library, _CACHE_INFO)
    except (OSError, AttributeError, ValueError) as error:
        raise _refusal(torch, str(error)) from error
    table = _words_of(table_address)
    (places,) = np.nonzero(table == function)
    if allocator.value == 0 or _word_at(allocator.value).value != table_address + FUNCTIONS_OFFSET:
        raise _refusal(torch, "its current allocator is no CUDAPluggableAllocator")
    if len(places) != 1:
        raise _refusal(torch, f"its table of virtual functions names cacheInfo {len(places)} times")
    table[places[0]] = hooks.cache_info.address
    lookup.keep(table, hooks.cache_info)
    _word_at(allocator.value).value = table.ctypes.data + FUNCTIONS_OFFSET


def _refusal(torch: Any, why: str) -> HookError:  # noqa: ANN401 - the module
    return HookError(f"PyTorch {torch.__version__}: {why}; leave torch.backends.cudnn.benchmark at False")


def _word_at(address: int) -> ctypes.c_uint64:
    """Return the word at an address; writing its value writes there."""
    return ctypes.c_uint64.from_address(address)


def _words_of(address: int) -> Any:  # noqa: ANN401 - an array of words
    """Return a copy of the object that begins at a symbol's address; empty where no symbol does."""
    place, symbol = _Place(), ctypes.POINTER(_Symbol)()
    dladdr1 = ctypes.CDLL(None).dladdr1
    found = dladdr1(ctypes.c_void_p(address), ctypes.byref(place), ctypes.byref(symbol), _WITH_SYMBOL)
    is_there = found and symbol and place.address == address
    size_bytes = symbol.contents.size_bytes if is_there else 0
    return np.frombuffer(ctypes.string_at(address, size_bytes), np.uint64).copy()
