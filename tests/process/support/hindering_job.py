"""A job without a framework: iterations of 10 ms, and of 50 ms while another one of its kind lives.

``hindering_job.py DIRECTORY host|cuda [ITERATIONS]``. Two such jobs together do two fifths of what one does.
"""

from __future__ import annotations

import fcntl
import itertools
import select
import sys
from pathlib import Path
from typing import TextIO

from zico.heap import allocator
from zico.heap.cuda.on_stream import allocate_on, free_on
from zico.job.session import attach, step

ALONE_S, BESIDE_S = 0.01, 0.05


def take(slot: TextIO) -> bool:
    """Lock a slot; false if another job has it."""
    try:
        fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main() -> None:
    """Train until the iterations are used up, for ever without a number."""
    with Path(sys.argv[1], "first").open("w") as first, Path(sys.argv[1], "second").open("w") as second:
        other = second if take(first) else first
        if other is first:
            assert take(second)
        train(other, sys.argv[2], int(sys.argv[3]) if sys.argv[3:] else None)


def train(other: TextIO, kind: str, iterations: int | None) -> None:
    """Iterate; the slot ``other`` is taken while another job lives."""
    session = attach("test", kind=kind)
    assert session is not None
    record = session.heap.record[0]
    for _ in itertools.count() if iterations is None else range(iterations):
        if kind == "cuda":
            free_on(record, int(allocate_on(record, session.membership.region_bytes, 0)), 0)
        else:
            allocator.free(record, allocator.allocate(record, session.membership.region_bytes, 64))
        is_alone = take(other)
        if is_alone:
            fcntl.flock(other, fcntl.LOCK_UN)
        select.select([], [], [], ALONE_S if is_alone else BESIDE_S)  # what the iteration computes
        step()


if __name__ == "__main__":
    main()
