"""One process of ``torch_calls.py``: times PyTorch's allocations whenever it is asked, with Zico or without.

It is asked over a Unix socket, so that a process of its own and one under ``zico run`` can take
turns.
"""

from __future__ import annotations

import os
import sys
import time
import timeit
from multiprocessing.connection import Client
from typing import TYPE_CHECKING

import torch

import zico

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

ELEMENTS = 1 << 18
"""1 MiB of float32."""

STATEMENTS = {
    "torch.empty": "torch.empty(ELEMENTS)",
    "torch.empty_like": "torch.empty_like(like)",
    "torch.empty, region stays": "torch.empty(ELEMENTS)",
    "torch.zeros": "torch.zeros(ELEMENTS)",
}
"""Each result is freed at once. ``zeros`` writes the memory, so it also pays for pages that are not resident."""
BESIDE = ("torch.empty, region stays",)
"""Timed while another short-lived tensor is alive, so that its region does not go back to the pool each time."""


def time_statement(name: str, batches: int, batch: int) -> list[float]:
    """Return nanoseconds per statement, one figure per batch."""
    timer = timeit.Timer(STATEMENTS[name], globals={"torch": torch, "ELEMENTS": ELEMENTS, "like": torch.ones(ELEMENTS)})
    for _ in range(2):  # after the first of these iterations all of these tensors are known to be short-lived
        zico.step()
        timer.timeit(batch)
    zico.step()
    beside = torch.empty(ELEMENTS) if name in BESIDE else None
    times = []
    for _ in range(batches):
        zico.step()  # as a training loop would; nothing in a process that is in no pool
        times.append(timer.timeit(batch) / batch * 1e9)
    del beside
    return times


def time_pairs(size_bytes: int, batches: int, batch: int) -> list[float]:
    """Return nanoseconds per allocation and free by PyTorch's CUDA allocator, one figure per batch."""
    import torch_allocator

    torch.empty(1)  # the device is in use from here on
    allocate = torch_allocator.function(torch, torch_allocator.ALLOCATE)
    free = torch_allocator.function(torch, torch_allocator.FREE)
    allocator, stream = torch_allocator.current(torch), torch.cuda.current_stream().cuda_stream

    def run() -> None:
        torch_allocator.pairs(allocate, free, allocator, size_bytes, stream, batch)

    for _ in range(2):
        zico.step()
        run()
    times = []
    for _ in range(batches):
        zico.step()
        began_ns = time.perf_counter_ns()
        run()
        times.append((time.perf_counter_ns() - began_ns) / batch)
    return times


def time_fork(live_mib: int, repeats: int) -> list[float]:
    """Return nanoseconds from before ``fork`` until it has returned in the parent, with so many live tensors."""
    live = [torch.ones(ELEMENTS) for _ in range(live_mib)]
    times = []
    for _ in range(repeats):
        began_s = timeit.default_timer()
        child = os.fork()
        if child == 0:
            os._exit(0)
        times.append((timeit.default_timer() - began_s) * 1e9)
        os.waitpid(child, 0)
    live.clear()
    return times


def serve(connection: Connection) -> None:
    """Answer until the other end closes. The first word is whether this process is in a pool."""
    connection.send(zico.status() is not None)
    kinds: dict[str, Callable[..., list[float]]] = {"statement": time_statement, "pairs": time_pairs, "fork": time_fork}
    while True:
        try:
            kind, arguments = connection.recv()
        except EOFError:
            return
        connection.send(kinds[kind](*arguments))


def main() -> None:
    """Connect to the socket that the command line names; tensors are of the device behind it (cpu or cuda)."""
    torch.set_num_threads(1)
    torch.set_default_device(sys.argv[2])
    with Client(sys.argv[1]) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
