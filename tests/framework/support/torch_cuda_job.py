"""PyTorch on a GPU as a job on the driver's twin: ``torch_cuda_job.py FOLDER ORDER``.

The build of PyTorch for the processor has no allocator for CUDA. FOLDER/lib has libraries that
stand in for it (``fake_torch_cuda.cpp``); the functions of Python that lead there stand in as
well. What the job saw is printed as JSON.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import json
import os
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from zico.adapters import torch as adapter

from zico.heap import layout
from zico.heap.cuda import hooks
from zico.job import lookup, session

if TYPE_CHECKING:
    from collections.abc import Callable

LONG_S = 100
KIB, MIB = 1 << 10, 1 << 20
RAISED_BYTES = 1024
SETTERS = ("set_record_stream_fn", "set_begin_allocate_to_pool", "set_end_allocate_to_pool_fn", "set_release_pool")


def stand_in(folder: Path) -> ctypes.CDLL:
    """Let PyTorch's functions lead to the fake; returns it."""
    library = ctypes.CDLL(str(folder / "lib" / "libtorch_cuda.so"))
    library.make.restype = ctypes.c_uint64
    library.largest_workspace.restype = ctypes.c_int64
    library.allocator_name.restype = ctypes.c_char_p

    def make_allocator(allocate: int, free: int) -> SimpleNamespace:
        return SimpleNamespace(**dict.fromkeys(SETTERS, lambda _function: None), functions=(allocate, free))

    def use(allocator: SimpleNamespace) -> None:
        library.use_allocator(*map(ctypes.c_uint64, allocator.functions))

    core: Any = torch._C
    core._cuda_getAllocatorBackend = lambda: "native"
    core._cuda_customAllocator = make_allocator
    torch.cuda.memory._CUDAAllocator = lambda allocator: allocator  # type: ignore[misc,assignment]
    torch.cuda.memory.change_current_allocator = use  # type: ignore[assignment]
    torch.__file__ = str(folder / "__init__.py")
    return library


def make(library: ctypes.CDLL, size_bytes: int, device: int) -> tuple[int, str]:
    """Make a tensor on a device; returns its address, and what was raised instead."""
    raised = ctypes.create_string_buffer(RAISED_BYTES)
    address = library.make(ctypes.c_uint64(size_bytes), device, raised, ctypes.c_uint64(RAISED_BYTES))
    return address, raised.value.decode()


def look(library: ctypes.CDLL, joined: session.Session) -> dict[str, Any]:
    """Ask for workspaces, and for memory of both devices."""
    largest = [library.largest_workspace()]
    in_pool = 0 <= make(library, 4 * MIB, 0)[0] - joined.heap.base < int(joined.heap.record[0]["window_bytes"])
    largest.append(library.largest_workspace())
    live_bytes = int(joined.record["live_bytes"])
    (segment,) = torch.cuda.memory_snapshot()
    info = torch.cuda.mem_get_info(0)
    address, raised = make(library, MIB, 1)
    kept_bytes = int(joined.record["live_bytes"]) - live_bytes
    return {
        "largest": largest,
        "name": library.allocator_name().decode(),
        "in_pool": in_pool,
        "snapshot": [segment["total_size"], segment["allocated_size"], segment["stream"], len(segment["blocks"])],
        "info": info,
        "other_device": [address, raised],
        "kept_bytes": kept_bytes,
        "beyond_budget": make(library, 1024 * MIB, 0),
    }


def report_deaths(joined: session.Session) -> None:
    """Write a line to stderr for each thing that frees need and that goes with the interpreter."""
    names = ("allocate", "free", "record_stream", "OTHERS_RECORD")
    needed = {name: getattr(hooks, name) for name in names}
    needed |= {"HEAP_RECORD": layout.HEAP_RECORD, "session": joined}
    for name, thing in needed.items():
        lookup.keep(weakref.ref(thing, functools.partial(_report, os.write, f"{name} is gone\n".encode())))


def _report(write: Callable[[int, bytes], int], line: bytes, _reference: object) -> None:
    write(2, line)


def leave(library: ctypes.CDLL, joined: session.Session) -> dict[str, Any]:
    """Leave tensors to the end of the process.

    Another one keeps their region: its release would need a mark, and the twin's marks are Python.
    """
    make(library, 64 * KIB, 0)
    report_deaths(joined)
    record = joined.record
    address = record.__array_interface__["data"][0] + record.dtype.fields["live_bytes"][1]
    library.leave(4, ctypes.c_void_p(address))
    return {"live_bytes": int(joined.record["live_bytes"])}


def main() -> None:
    """Join, do what is asked, tell."""
    faulthandler.dump_traceback_later(LONG_S, exit=True)
    library = stand_in(Path(sys.argv[1]))
    joined = adapter.enable()
    assert joined is not None
    found = {"look": look, "leave": leave}[sys.argv[2]](library, joined)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
