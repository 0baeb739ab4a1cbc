"""What does a tensor's memory cost from the pool, against the C library?

Compiled loops call the very functions that frameworks call, a thousand times for each reading of
the clock. Every loop marks iterations as training does, outside of what is timed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import loops
import numpy as np
import pytest

from zico.base.libc import libc_address
from zico.base.units import MIB
from zico.heap import allocator, hooks
from zico.heap.layout import HEAP_RECORD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from micro.conftest import Measure

    from zico.pool.table import PoolTable

TENSOR_BYTES = MIB
PAIRS = 1024
"""About as many allocations as an iteration of the PyTorch example has."""
ROUNDS = 2000
LEARNING = 3
"""Rounds after which the classes of all tensors are known."""
GOAL_NS = 150.0
ONE_THREAD = "allocate and free 1 MiB"
THREADED = 20
"""Iterations of each thread for one reading of the clock."""
THREADED_ROUNDS = 20
END_S = 60.0

LIBC = (libc_address("posix_memalign"), libc_address("free"))
POOL = (int(hooks.posix_memalign.address), int(hooks.free.address))


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolTable]:
    """Return a pool whose heap serves the hooks."""
    with loops.joined_pool() as heap:
        yield heap.pool


def pairs(functions: tuple[int, int], n: int = PAIRS) -> None:
    """Allocate and free ``n`` times by these functions."""
    out = np.zeros(1, np.int64)
    loops.heap_pairs(*functions, out.ctypes.data, TENSOR_BYTES, n)


def mark() -> None:
    """End an iteration of the heap."""
    allocator.mark(HEAP_RECORD[0])


def releases_per_pair(pool: PoolTable) -> float:
    """Return how often a region goes back to the pool in an iteration, for each pair."""
    mark()
    before = int(pool.header["sequence"])
    pairs(POOL)
    return (int(pool.header["sequence"]) - before) / PAIRS


def test_c_library(measure: Measure) -> None:
    """The C library's own functions."""
    measure.is_baseline("C library")
    measure(ONE_THREAD, pairs, LIBC, per=PAIRS, rounds=ROUNDS, warmup_rounds=LEARNING)


def test_region_goes_back(measure: Measure, pool: PoolTable) -> None:
    """Every free gives the region back to the pool, and every allocation takes one."""
    how: dict[str, Any] = {"setup": mark, "rounds": ROUNDS, "warmup_rounds": LEARNING}
    measure(ONE_THREAD, pairs, POOL, per=PAIRS, goal_ns=GOAL_NS, **how)
    measure.figures["releases per pair"] = releases_per_pair(pool)
    assert measure.figures["releases per pair"] == 1


def test_region_stays(measure: Measure, pool: PoolTable) -> None:
    """Another short-lived tensor keeps the region."""
    for _ in range(LEARNING):
        mark()
        pairs(POOL)
    mark()
    address = int(allocator.allocate(HEAP_RECORD[0], TENSOR_BYTES, loops.ALIGNMENT_BYTES))
    try:
        measure(ONE_THREAD, pairs, POOL, per=PAIRS, setup=mark, rounds=ROUNDS, warmup_rounds=LEARNING)
        measure.figures["releases per pair"] = releases_per_pair(pool)
    finally:
        allocator.free(HEAP_RECORD[0], address)
    assert measure.figures["releases per pair"] == 0


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("name", ["C library", "pool"])
def test_threads(measure: Measure, name: str, threads: int) -> None:
    """Threads that allocate and free in one heap: nanoseconds of a pair, over the pairs of all threads."""
    functions, n = (LIBC if name == "C library" else POOL), THREADED * PAIRS
    measure.figures["name"] = name
    if name == "C library":
        measure.is_baseline(name)
    with ThreadPoolExecutor(threads) as executor:

        def together() -> None:
            list(executor.map(lambda _: pairs(functions, n), range(threads), timeout=END_S))

        how: dict[str, Any] = {"setup": mark, "rounds": THREADED_ROUNDS, "warmup_rounds": LEARNING}
        measure(f"allocate and free 1 MiB, threads: {threads}", together, per=threads * n, **how)
