"""A job that sets itself up and trains, step by step: each line of its input is what it does next; says when it has.

``remembering_job.py LAYERS``. ``set up`` keeps a region; ``train`` ends an iteration that comes to
hold LAYERS more.
"""

from __future__ import annotations

import os
import sys

from zico.heap import allocator
from zico.job.session import attach


def main() -> None:
    """Do what is said."""
    session = attach("test")
    assert session is not None
    record, region_bytes = session.heap.record[0], session.membership.region_bytes
    os.write(1, b"joined\n")
    for line in sys.stdin:
        if line.strip() == "train":
            for address in [allocator.allocate(record, region_bytes, 64) for _ in range(int(sys.argv[1]))]:
                allocator.free(record, address)
            session.mark()
        else:
            allocator.allocate(record, region_bytes, 64)
        os.write(1, b"done\n")


if __name__ == "__main__":
    main()
