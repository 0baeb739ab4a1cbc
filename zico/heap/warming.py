"""Compile everything a job calls, once, so that jobs only load machine code from the cache."""

from __future__ import annotations

import os

from zico.heap import allocator, fork, hooks  # noqa: F401 - hooks compile when they are imported
from zico.heap.build import Heap
from zico.heap.layout import GRANULE_BYTES
from zico.heap.process import HEAP_RECORD
from zico.pool.table import PoolTable

_REGION_BYTES = 1 << 16


def warm() -> None:
    """Run a miniature job through a pool of its own, so that every function is compiled with its real types."""
    pool = PoolTable.create(budget_bytes=_REGION_BYTES, region_bytes=_REGION_BYTES, use_claims=True, self_admit=True)
    with pool:
        job = pool.join(os.getpid(), "warm")
        with PoolTable.join_pool(os.dup(pool.memory_fd), os.dup(pool.table_fd), os.dup(pool.notify_fd), job) as member:
            heap = Heap(member, HEAP_RECORD)
            record = HEAP_RECORD[0]
            allocator.free(record, allocator.allocate(record, GRANULE_BYTES, 64))
            allocator.mark(record)
            fork.lock(record)
            fork.unlock(record)
            heap.close()
        pool.admit(job)
        pool.snapshot()
        pool.reap(job)
    HEAP_RECORD[0] = 0
