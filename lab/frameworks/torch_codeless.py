"""``torch.compile`` on fake tensors: it makes its graphs as for a job, and no machine code.

Theory of operation
    Dynamo, AOTAutograd and Inductor work on shapes alone, so they take fake tensors. The Python that
    Inductor writes allocates, calls kernels and frees in the order of the job. It runs on fake tensors
    once three things are replaced that are no operations of PyTorch. These are the kernels of C++, and
    two functions that make tensors without the dispatcher. A kernel then does nothing, but tells of
    the tensors that it would read and write.

Guarantees
    * Each trace compiles anew, for the shapes that it has: as a job does, which knows no other ones.
    * What is compiled here is gone afterwards: nothing else in this process calls a kernel that does
      nothing.

Known limitations
    * Older PyTorch compiles nothing below a dispatch mode (``COMPILES``). The step without
      ``torch.compile`` is followed there.
    * The graphs are those for a processor, also where the device model is a GPU.
"""

# ruff: noqa: ANN401, SLF001 - torch has no types, and private names
from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Kernel = Callable[[list[Any], list[Any]], None]

COMPILES = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether this PyTorch compiles below a dispatch mode that asks for it."""


@contextlib.contextmanager
def codeless(kernel: Kernel) -> Iterator[None]:
    """Let ``torch.compile`` make no machine code within this; ``kernel`` hears what each kernel reads and writes."""
    if not COMPILES:
        yield
        return
    compile_ = torch.compile
    with contextlib.ExitStack() as stack:
        # Inductor takes seconds to import, which steps that are not compiled do without.
        begin = functools.cache(lambda: stack.enter_context(_codeless(kernel)))

        def compile_without_code(*args: Any, **kwargs: Any) -> Any:
            begin()
            return compile_(*args, **kwargs)

        if "torch._dynamo" in sys.modules:  # what was decorated before
            begin()
        stack.enter_context(mock.patch.object(torch, "compile", compile_without_code))
        yield


def is_compiling() -> bool:
    """Tell whether operations are those of the compiler, not of the job."""
    return torch._guards.TracingContext.try_get() is not None


@contextlib.contextmanager
def _codeless(kernel: Kernel) -> Iterator[None]:
    import torch._dynamo
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import clear_inductor_caches

    def made(_self: Any, argument_types: Sequence[str], *_source: Any, **_more: Any) -> Callable[..., None]:
        return functools.partial(_run, kernel, argument_types)

    guards = torch._C._dynamo.guards
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="zico-codeless-"))
        stack.enter_context(mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=directory))
        stack.enter_context(config.patch(fx_graph_cache=False, compile_threads=1))
        stack.enter_context(mock.patch.object(AsyncCompile, "cpp_pybinding", made))
        stack.enter_context(mock.patch.object(guards, "_empty_strided_cpu", _empty_strided))
        stack.enter_context(mock.patch.object(guards, "_reinterpret_tensor", _reinterpret))
        for forget in (torch._dynamo.reset, clear_inductor_caches):  # after a few shapes, they compile no more
            forget()
            stack.callback(forget)
        yield


def _run(kernel: Kernel, argument_types: Sequence[str], *arguments: Any) -> None:
    read: list[Any] = []
    written: list[Any] = []
    for one, kind in zip(arguments, argument_types, strict=True):
        if torch.is_tensor(one):
            (read if kind.startswith("const ") else written).append(one)
    kernel(read, written)


def _empty_strided(size: Any, stride: Any, dtype: Any) -> Any:
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpret(tensor: Any, size: Any, stride: Any, offset: int = 0) -> Any:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
