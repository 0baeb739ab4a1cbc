"""What describes a stack of tiers: in shared memory what is true, in each process how it gets there.

One memfd holds a ``SHARED`` for each tier and, for each block of each tier, a *word*. A payload of any size lies in a
*chain* of blocks of one tier; the index of its first block is all that one has to remember::

    word      0             1              2 + 2 * (next + 1) + pages
    block is  free, empty   free, pages    in a chain; next is the index of the chain's next block, -1: none

*pages*: a memory tier's block has physical pages. Free ones are taken by compare-and-exchange, so no lock is ever held,
and nothing that another process waits for can die with one.
"""

from __future__ import annotations

from typing import Annotated

from zico.records import I8, Numbers, Record, Records, dtype_of

MAGIC = 0x5A49434F_54494552  # "ZICOTIER"
MAX_TIERS = 4
MEMORY = 0
FILE = 1
COMPRESSED = 2
KIND_NAMES = ("memory", "file", "compressed")

EMPTY = 0
KEPT = 1
TAKEN = 2
"""The least word of a block in a chain."""
END = -1
"""The next block of a chain's last one."""
WORD_BYTES = 4

FULL = -1
"""Instead of a ticket: no tier has room."""
FAILED = -2
"""Instead of a ticket: a tier that had room could not be written to; its ``SHARED.error`` says why."""
TIER_BITS = 2
"""A ticket is a chain's first block and, in the lowest bits, the tier; it fits 32 bits."""
TIER_MASK = (1 << TIER_BITS) - 1

ALIGNMENT_BYTES = 4096
"""What ``O_DIRECT`` wants addresses, offsets and lengths to be multiples of: the largest logical block there is."""
BOUNCE_BYTES = 1 << 20
"""Two of these in each process, one a direction, for what is not aligned."""


class Shared(Record, align=False):
    """One tier, as every process sees it."""

    magic: I8
    kind: I8
    block_bytes: I8
    n_blocks: I8
    words_offset: I8  # from the memfd's start
    prepared: I8  # blocks for which the disk has set space aside
    hint: I8  # hardly any block below this is free
    used: I8  # blocks in chains
    peak: I8
    recent_peak: I8  # since epoch_ns
    epoch_ns: I8  # CLOCK_MONOTONIC
    trim_at: I8  # free blocks from here on need no pages any more
    out_bytes: I8  # payload moved; one thread at a time writes each direction's figures
    in_bytes: I8
    out_ns: I8
    in_ns: I8
    refused: I8  # times there was no room
    error: I8  # errno of the last failure
    latency_ns: Annotated[Numbers, "f8", (2,)]  # out, in: measured at start
    recent_bytes: Annotated[Numbers, "f8", (2,)]  # decaying
    recent_ns: Annotated[Numbers, "f8", (2,)]  # decaying, without latency


SHARED = dtype_of(Shared)


class StoreRecord(Record, align=False):
    """One process's way to one tier."""

    shared_address: I8
    words_address: I8
    descriptor: I8
    map_address: I8  # of a memory tier; 0 for a file
    bounce_address: Annotated[Numbers, "i8", (2,)]  # out, in
    direct: I8  # 1: the file is open with O_DIRECT
    memcpy: I8  # addresses of functions of the C library
    pread: I8
    pwrite: I8
    fallocate: I8
    errno_location: I8


STORE = dtype_of(StoreRecord)


class StackRecord(Record, align=False):
    """One process's way to a stack of tiers, the first is asked first."""

    n_tiers: I8
    tiers: Annotated[Records[StoreRecord], StoreRecord, (MAX_TIERS,)]


STACK = dtype_of(StackRecord)
