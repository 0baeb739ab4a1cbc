"""Where a job's frozen weights lie, and what a test says to it, for scripts of tests."""

# ruff: noqa: T201 - scripts talk to their tests
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Iterable

THRESHOLD_BYTES = 1 << 16


def is_outside(address: int) -> bool:
    """Tell whether memory lies outside the pool's window; outside a pool none is."""
    joined = session.current()
    if joined is None:
        return False
    heap = joined.heap
    return not heap.base <= address < heap.base + int(heap.record[0]["window_bytes"])


def outside(frozen: Iterable[Any]) -> int:
    """Return the bytes of large tensors that lie outside the pool's window."""
    return sum(one.nbytes for one in frozen if one.nbytes >= THRESHOLD_BYTES and is_outside(one.data_ptr()))


def obey(job: Any) -> None:  # noqa: ANN401 - a script's own
    """Say that it is ready, then do what each line of stdin names, and print what that returns."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(getattr(job, line.strip())(), flush=True)
