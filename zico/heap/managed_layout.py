"""What steers a window that is managed memory."""

from __future__ import annotations

from zico.driver.record import Mover
from zico.records import I8, Record, dtype_of


class ManagedRecord(Record):
    """One job's steering. All of it inside the heap's mutex."""

    mover: Mover
    paging_address: I8  # PAGING record of the tables
    touched_address: I8  # the iteration of each block's last touch + 1, an i8 each
    held_address: I8  # regions held, by number, an i4 each
    n_held: I8
    n_regions: I8  # of the pool
    blocks_shift: I8  # log2 of the blocks in a region
    iteration: I8  # the job's, when a tensor was allocated last
    live: I8  # blocks in which something lives
    resident: I8  # blocks that are there by our count
    n_silent: I8  # blocks that live and were not touched in the last iteration: they go last
    busy: I8  # a bit for each stream slot that was given work since our stream last waited
    first_out: I8  # blocks that have counted as gone, and are to be ordered out
    n_out: I8
    first_in: I8  # and in, afterwards
    n_in: I8
    # Counted in blocks, ever.
    touches: I8
    missed: I8  # of those, of blocks with something in them that were out
    prefetched: I8
    peak: I8  # most that were resident by our count


MANAGED = dtype_of(ManagedRecord)
MOVER_OFFSET = MANAGED.fields["mover"][1]
