"""What steers a window that is managed memory."""

from __future__ import annotations

import numpy as np

from zico.driver.record import MOVER

MANAGED = np.dtype(
    [
        ("mover", MOVER),
        ("paging_address", "i8"),  # PAGING record of the tables
        ("touched_address", "i8"),  # the iteration of each block's last touch + 1, an i8 each
        ("held_address", "i8"),  # regions held, by number, an i4 each
        ("n_held", "i8"),
        ("n_regions", "i8"),  # of the pool
        ("blocks_shift", "i8"),  # log2 of the blocks in a region
        ("iteration", "i8"),  # the job's, when a tensor was allocated last
        ("live", "i8"),  # blocks in which something lives
        ("resident", "i8"),  # blocks that are there by our count
        ("n_silent", "i8"),  # blocks that live and were not touched in the last iteration: they go last
        ("busy", "i8"),  # a bit for each stream slot that was given work since our stream last waited
        ("first_out", "i8"),  # blocks that have counted as gone, and are to be ordered out
        ("n_out", "i8"),
        ("first_in", "i8"),  # and in, afterwards
        ("n_in", "i8"),
        # Counted in blocks, ever.
        ("touches", "i8"),
        ("missed", "i8"),  # of those, of blocks with something in them that were out
        ("prefetched", "i8"),
        ("peak", "i8"),  # most that were resident by our count
    ],
    align=True,
)
"""One job's steering. All of it inside the heap's mutex."""
MOVER_OFFSET = MANAGED.fields["mover"][1]  # type: ignore[index]
