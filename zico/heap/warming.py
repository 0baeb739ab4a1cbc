"""Compile everything a job calls, once, so that jobs only load machine code from the cache."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from zico.heap import allocator, fork, hooks, resting, stepping  # noqa: F401 - callbacks compile when imported
from zico.heap.build import Heap
from zico.heap.layout import GRANULE_BYTES, HEAP
from zico.heap.planning import Planning
from zico.heap.process import HEAP_RECORD
from zico.pool.table import PoolTable

_REGION_BYTES = 1 << 16
_TENSORS = 12
_MOST_ITERATIONS = 16


def warm() -> None:
    """Run a miniature job through a pool of its own, so that every function is compiled with its real types."""
    pool = PoolTable.create(
        budget_bytes=2 * _TENSORS * _REGION_BYTES, region_bytes=_REGION_BYTES, use_claims=True, self_admit=True
    )
    with pool:
        job = pool.join(os.getpid(), "warm")
        with PoolTable.join_pool(os.dup(pool.memory_fd), os.dup(pool.table_fd), os.dup(pool.notify_fd), job) as member:
            heap = Heap(member, HEAP_RECORD)
            record = HEAP_RECORD[0]
            _follow_a_plan(heap, record)
            resting.end_step(record)
            stepping.begin_step(record)
            heap.close()
        pool.set_budget(_TENSORS)
        pool.settle()
        pool.set_limit(job, _TENSORS)
        pool.admit(job)
        pool.snapshot()
        pool.bury(job)
        pool.reap(job)
    HEAP_RECORD[0] = 0


def _follow_a_plan(heap: Heap, record: Any) -> None:  # noqa: ANN401 - the HEAP record
    """Iterate until the heap follows a plan: then everything that a job's thread calls is compiled, too."""
    planning = Planning(heap)
    planning.load()
    for _ in range(_MOST_ITERATIONS):
        for address in [allocator.allocate(record, GRANULE_BYTES, 64) for _ in range(_TENSORS)]:
            allocator.free(record, address)
        allocator.mark(record)
        if record["plan_asked"] and not record["next_plan_address"]:
            planning.plan_handed()
        if record["plans"]:
            break
    planning.close()


def warm_paging() -> None:
    """Put what serves the faults of paged jobs into the cache on disk, and load it.

    Raises:
        DriverError: This process may not have its faults served, so that none of it is of use.
    """
    from zico.paging.pager import Pager
    from zico.tiers.stack import TierStack
    from zico.tiers.wishes import TierWish

    made = PoolTable.create(
        budget_bytes=_TENSORS * _REGION_BYTES, region_bytes=_REGION_BYTES, use_claims=True, self_admit=True
    )
    with made as pool:
        pool.member[0]["job"] = pool.join(os.getpid(), "warm")
        tiers = TierStack.create([TierWish("memory", _TENSORS * _REGION_BYTES)], block_bytes=_REGION_BYTES)
        heap = Heap(pool, np.zeros(1, HEAP), tiers=tiers)
        if heap.paged is not None:
            with Pager(heap.paged.export(), pool.member) as pager:
                pager.load()
        heap.close()
