"""PyTorch's current CUDA allocator as its C++ calls it: by the object's table of virtual functions.

PyTorch's own allocator and a pluggable one derive from one class, so a function has one place in
both tables. The place is found in the pluggable one's, whose functions are exported.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from zico.adapters import torch_cuda

from zico.base.compiled import call, compiled

_CLASS = "_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator"
ALLOCATE = f"{_CLASS}21raw_alloc_with_streamEmP11CUstream_st"
FREE = f"{_CLASS}10raw_deleteEPv"
CACHE_INFO = torch_cuda.CACHE_INFO


def current(torch: Any) -> int:  # noqa: ANN401 - the module
    """Return the address of the allocator that PyTorch uses now."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so"))
    return torch_cuda.word_at(torch_cuda.address_in(library, torch_cuda.CURRENT_ALLOCATOR)).value


def function(torch: Any, symbol: str) -> int:  # noqa: ANN401 - the module
    """Return the address of its function in the place of one of ``CUDAPluggableAllocator``; the object comes first.

    Raises:
        ValueError: This build has no such function, or not in the table.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    table = torch_cuda.words_of(torch_cuda.address_in(library, torch_cuda.ALLOCATOR_TABLE)).tolist()
    place_bytes = 8 * table.index(torch_cuda.address_in(library, symbol)) - torch_cuda.FUNCTIONS_OFFSET
    return torch_cuda.word_at(torch_cuda.word_at(current(torch)).value + place_bytes).value


@compiled
def pairs(allocate: int, free: int, allocator: int, size_bytes: int, stream: int, n: int) -> None:
    """Allocate and free ``n`` times by an allocator's functions, as PyTorch's C++ does for a tensor."""
    for _ in range(n):
        call(free, (allocator, call(allocate, (allocator, size_bytes, stream))))
