"""Where a job's frozen weights lie, for scripts of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Iterable

THRESHOLD_BYTES = 1 << 16


def outside(frozen: Iterable[Any]) -> int:
    """Return the bytes of large tensors that lie outside the pool's window; outside a pool none is asked for."""
    joined = session.current()
    if joined is None:
        return 0
    heap = joined.heap
    end = heap.base + int(heap.record[0]["window_bytes"])
    large = [one for one in frozen if one.nbytes >= THRESHOLD_BYTES]
    return sum(one.nbytes for one in large if not heap.base <= one.data_ptr() < end)
