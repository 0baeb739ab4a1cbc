"""A job of a sweep without a framework: keeps so many regions, takes one more in each iteration, ends when told.

``sweep_job.py REGIONS FIFO [MARKER | --evaluate]``. It says ``begun`` when it has ended some iterations, then
trains on until it can read a byte from FIFO. With MARKER it runs out of memory unless that file is
there, and leaves it there. With ``--evaluate`` it only keeps regions: it ends no iteration.
"""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

from zico.heap import allocator
from zico.job.session import attach

WARM_UP = 4


def main() -> None:
    """Train."""
    regions, fifo = int(sys.argv[1]), os.open(sys.argv[2], os.O_RDONLY | os.O_NONBLOCK)
    evaluates = "--evaluate" in sys.argv
    if len(sys.argv) > 3 and not evaluates and not Path(sys.argv[3]).exists():
        Path(sys.argv[3]).touch()
        raise MemoryError("said by a test")
    session = attach("test")
    assert session is not None
    record, region_bytes = session.heap.record[0], session.membership.region_bytes
    for _ in range(regions):
        allocator.allocate(record, region_bytes, 64)
    if evaluates:
        os.write(1, b"begun\n")
        select.select([fifo], [], [])
        return
    for iteration in range(1 << 30):
        allocator.free(record, allocator.allocate(record, region_bytes, 64))
        allocator.mark(record)
        if iteration == WARM_UP:
            os.write(1, b"begun\n")
        if iteration >= WARM_UP:
            try:
                if os.read(fifo, 1):
                    return
            except BlockingIOError:
                pass


if __name__ == "__main__":
    main()
