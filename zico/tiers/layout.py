"""What describes a stack of tiers.

One memfd holds a ``SHARED`` for each tier and, for each block of each tier, a *word*. A payload of
any size lies in a *chain* of blocks of one tier. The index of its first block is all that one has
to remember::

    word      0             1              2 + 2 * (next + 1) + pages
    block is  free, empty   free, pages    in a chain; next is the index of the chain's next block, -1: none

*pages*: a memory tier's block has physical pages. Free ones are taken by compare-and-exchange, so
no lock is ever held, and no thread waits for one that is preempted.

How fast a tier is, is measured when it is made, and kept current by every copy. A copy of ``n``
bytes takes ``latency + n / bandwidth``. The latency is what a page takes, measured once. The
bandwidth is that of the last copies, so that what others do to the same disk or memory shows in it.
Copies are weighted by their bytes and forgotten by the bytes since: what is ``WINDOW_BYTES`` ago
counts for 1/e.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

from zico.base.compiled import compiled
from zico.base.records import I8, Numbers, Record, Records, dtype_of

MAX_TIERS = 4
MEMORY = 0
FILE = 1
COMPRESSED = 2
KIND_NAMES = ("memory", "file", "compressed")

EMPTY = 0
KEPT = 1
TAKEN = 2
"""A block in a chain has at least this word."""
END = -1
"""A chain's last block has this as the next one."""
WORD_BYTES = 4

FULL = -1
"""Returned instead of a ticket: no tier has room."""
FAILED = -2
"""Returned instead of a ticket: a tier that had room could not be written to; its ``SHARED.error`` says why."""
TIER_BITS = 2
"""A ticket is a chain's first block and, in the lowest bits, the tier; it fits 32 bits."""
TIER_MASK = (1 << TIER_BITS) - 1

ALIGNMENT_BYTES = 4096
"""``O_DIRECT`` wants addresses, offsets and lengths to be multiples of the largest logical block there is."""
BOUNCE_BYTES = 1 << 20
"""A stack has two such buffers, one a direction, for what is not aligned."""


class Shared(Record, align=False):
    """One tier, as a forked child sees it, too."""

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
    """The way to one tier."""

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
    """The way to a stack of tiers, the first of which is asked first."""

    n_tiers: I8
    tiers: Annotated[Records[StoreRecord], StoreRecord, (MAX_TIERS,)]


STACK = dtype_of(StackRecord)


# -- rates -----------------------------------------------------------------------------------------


WINDOW_BYTES = 256.0 * (1 << 20)
OUT = 0
IN = 1
_NS = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """What a copy takes: its latency, and its bytes over the bandwidth."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    out_latency_s: float
    in_latency_s: float

    def out_s(self, size_bytes: int) -> float:
        """Return the seconds that a payload takes to leave."""
        return self.out_latency_s + size_bytes / self.out_bytes_per_s

    def in_s(self, size_bytes: int) -> float:
        """Return the seconds that a payload takes to come back."""
        return self.in_latency_s + size_bytes / self.in_bytes_per_s


@compiled
def note(shared: Shared, direction: int, size_bytes: int, ns: int) -> None:
    """Let a copy count: its payload in bytes, and what it took."""
    if direction == OUT:
        shared.out_bytes += size_bytes
        shared.out_ns += ns
    else:
        shared.in_bytes += size_bytes
        shared.in_ns += ns
    kept = math.exp(-size_bytes / WINDOW_BYTES)
    shared.recent_bytes[direction] = shared.recent_bytes[direction] * kept + size_bytes
    shared.recent_ns[direction] = shared.recent_ns[direction] * kept + max(ns - shared.latency_ns[direction], 1.0)


def rates_of(shared: Any) -> Rates:  # noqa: ANN401 - one SHARED record
    """Return the rates of a tier with at least one copy in each direction, as its first measurement makes."""
    bandwidth = [float(shared["recent_bytes"][way] / shared["recent_ns"][way] / _NS) for way in (OUT, IN)]
    latency = [float(shared["latency_ns"][way] * _NS) for way in (OUT, IN)]
    return Rates(bandwidth[OUT], bandwidth[IN], latency[OUT], latency[IN])


# -- what a tier has done, for reports -------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class TierUse:
    """One tier since it was made."""

    kind: str
    """One of ``zico.tiers.layout.KIND_NAMES``."""
    capacity_bytes: int
    used_bytes: int
    """Whole blocks."""
    peak_bytes: int
    """The most that was in use at a time, whole blocks."""
    out_bytes: int
    """Payload that has come here, out of the device's budget."""
    in_bytes: int
    """Payload that has gone back."""
    out_s: float
    """How long copying it took."""
    in_s: float
    refused: int
    """Times there was no room."""


def use_of(shared: Any) -> TierUse:  # noqa: ANN401 - one SHARED record
    """Return what the tier's record says now."""
    block_bytes = int(shared["block_bytes"])
    return TierUse(
        KIND_NAMES[shared["kind"]],
        int(shared["n_blocks"]) * block_bytes,
        int(shared["used"]) * block_bytes,
        int(shared["peak"]) * block_bytes,
        int(shared["out_bytes"]),
        int(shared["in_bytes"]),
        float(shared["out_ns"] * _NS),
        float(shared["in_ns"] * _NS),
        int(shared["refused"]),
    )
