"""The records of learned paging, in memory that the caller gives: numbers and addresses, no Python object.

Words
    A *block* is what is moved at once (2 MiB), by its number in the job's window. An *execution* is
    one operation that the job starts. Its *name* is any 64-bit number that is the same when the
    same operation comes again. Its *number* is what the tables call that name: 1, 2, 3... in the
    order of sight. An *instance* is one of the times that an execution runs; instances are counted,
    and ``now`` is the one that runs.

Memory that nothing was written to is zero, and zero means nothing in all tables, so that what is
not used costs no page.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from zico.base.errors import ConfigError
from zico.base.records import I4, I8, Numbers, Record, dtype_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK_BYTES = 2 << 20
"""The unit of unified memory's driver, and a huge page."""

NONE = -1
"""No block."""

# Flags: the parts, each of which may be left out.
PREFETCH = 1
"""Blocks are brought in before they are touched."""
PREEVICT = 2
"""Victims are what no execution up to ``degree`` ahead is expected to touch; room is made before it is needed."""
INVALIDATE = 4
"""Blocks in which nothing lives go first. Whoever moves blocks drops them instead of copying them."""
DEEPUM = PREFETCH | PREEVICT | INVALIDATE
"""The parts that are published."""
APPEND = 8
"""A fault behind what was prefetched extends what is known of the execution; without it, it begins anew there."""
SHORTER = 16
"""Where three predecessors are not known, fewer predict."""
FURTHEST = 32
"""What is expected may go for what is expected earlier: the furthest first, as Belady's optimal replacement does."""
CLEAN = 64
"""Blocks that were not written go before others, and others are copied out while they stay, so that they are clean."""
TUNE = 128
"""``note_iteration`` changes the degree."""
WRITABLE = 256
"""Blocks that were written during their last stay come back writable, but for one in ``LOOK_AGAIN``."""
BIRTHS = 512
"""That something comes to lie where nothing lay is learned as a fault is: it is written to next, fault or not."""
PIECES = 1024
"""Who waits for a block goes on with the pieces of it that are there."""
APART = 2048
"""Temporaries lie in blocks of their own, which stay: fewer than half of what may be there. A GPU's do not."""
ALL = DEEPUM | APPEND | SHORTER | FURTHEST | CLEAN | TUNE | WRITABLE | BIRTHS | PIECES

LOOK_AGAIN = 16
"""Of so many blocks that would come writable one does not, so that it shows whether it still is written to."""

DEGREE = 32
MOST_DEGREE = 256
"""Executions that the chain may be ahead. Source: J. Jung, J. Kim, J. Lee, "DeepUM: Tensor Migration and Prefetching
in Unified Memory" (ASPLOS 2023), which tries 8 to 256 and chooses 32."""
SPAN = 2 * MOST_DEGREE
"""Instances that are told apart, a power of two: what is expected, and as many that are over."""

# What is known of a block, in BLOCK.state.
RESIDENT = 1
INACTIVE = 2
"""Nothing lives in it."""
DIRTY = 4
"""Written since it came or was copied out."""
WRITTEN = 8
"""Written since it came."""
WAS_WRITTEN = 16
"""Written during its last stay."""
HELD = 32
"""On its way, or somebody waits for it: no victim, and not to be prefetched."""

WORD_SHIFT = 5
WORDS = SPAN >> WORD_SHIFT


class Block(Record):
    """What is known of one block."""

    dues: Annotated[Numbers, "i8", (WORDS,)]  # a bit for each instance that is expected to touch it, 32 to a word
    cleared: I8  # instances before have no bit
    due: I8  # the first of them, 0: it is not expected
    seen: I8  # by the visit of this number
    previous: I4  # in the list it is in: neighbours + 1, 0 at the ends
    next: I4
    state: I4


BLOCK = dtype_of(Block)


class BlockList(Record):
    """Blocks in an order: block + 1, 0 for none."""

    first: I4
    last: I4
    n: I8


LIST = dtype_of(BlockList)

# Lists by number: resident blocks by when they are due, absent ones by when they are due, resident
# ones that are not.
ABSENT = SPAN
IDLE_INACTIVE = 2 * SPAN
IDLE = IDLE_INACTIVE + 1
IDLE_DIRTY = IDLE_INACTIVE + 2
LISTS = IDLE_INACTIVE + 3


class Name(Record):
    """The number of an execution, by its name; 0: nothing is here."""

    name: I8
    number: I8


NAME = dtype_of(Name)


class Context(Record):
    """One tuple of the execution table: what followed ``current`` after these three; ANY where fewer were asked for."""

    before: Annotated[Numbers, "i4", (3,)]
    current: I4
    next: I4
    used: I4


CONTEXT = dtype_of(Context)
ANY = -1


class PagingRecord(Record):
    """One job's learned paging."""

    flags: I8
    degree: I8
    n_blocks: I8
    rows: I8
    ways: I8
    successors: I8
    table_words: I8  # of one execution's block table
    most_executions: I8
    n_executions: I8
    names: I8  # slots
    contexts: I8  # slots
    epoch: I8  # how often all was forgotten because there were too many executions
    now: I8  # instances ever
    current: I4  # the execution that runs, 0 before the first
    last_fault: I4  # of this instance, block + 1; 0: none yet
    history: Annotated[Numbers, "i4", (3,)]  # the executions before, the latest first
    chaining: I4  # 1: the chain goes on; 0: it ended
    chain_at: I8  # the instance that the chain is in
    chain: I4  # its execution
    chain_history: Annotated[Numbers, "i4", (3,)]
    predicted: Annotated[Numbers, "i4", (MOST_DEGREE * 2,)]  # execution by instance
    visit: I8  # of an instance by the chain, counted
    frontier: I8  # blocks of this visit, the first of which have been looked at
    n_frontier: I8
    nearest: I8  # no absent block is due before
    furthest: I8  # no resident block is due after
    next_due: I8  # when the block that was prefetched last is, 0: none waits
    pressed: I8  # the last instance in which a block had to go in which something lived, 0: none
    kept_from: I8  # of these blocks none is a victim once it is there, whatever is expected (residency.keep)
    kept_to: I8
    blocks_address: I8
    names_address: I8
    contexts_address: I8
    tables_address: I8
    frontier_address: I8
    lists_address: I8
    # Counted, ever.
    faults: I8
    late: I8  # of blocks that were expected
    prefetched: I8  # by next_prefetch
    early: I8  # victims that were expected
    cleaned: I8  # by choose_to_clean
    mispredicted: I8  # instances that were not the predicted execution
    ended: I8  # chains that found no prediction
    overflows: I8  # tuples of the execution table that others replaced
    # Of the degree's tuning.
    lost_ns: I8  # since the iteration began
    best_ns: I8  # lost at the best degree
    best_degree: I8  # 0 before the first trial
    direction: I8  # of the trial, 0: none
    turned: I8  # 1: the other direction was tried, or need not be
    trial: I8  # iterations of it, or since the last one
    trial_ns: I8  # the least that one of them lost


PAGING = dtype_of(PagingRecord)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the tables are.

    Raises:
        ConfigError: A number cannot be used; the message says which.
    """

    blocks: int
    """Blocks of the window."""
    rows: int = 2048
    """Of each execution's block table; a power of two. This, ways and successors: DeepUM's best configuration."""
    ways: int = 2
    successors: int = 4
    executions: int = 4096
    """Names that are told apart; with one more, all is forgotten."""
    contexts: int = 1 << 16
    """Tuples that the execution table has room for; a power of two."""

    def __post_init__(self) -> None:
        for name in ("blocks", "ways", "successors", "executions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is no size of a table: give 1 or more")
        for name in ("rows", "contexts"):
            value = getattr(self, name)
            if value < WAYS_OF_CONTEXTS or value & (value - 1):
                raise ConfigError(f"{name}={value} is no size of a table: give a power of two from 4 on")

    @property
    def table_words(self) -> int:
        """Words of one execution's block table."""
        return TABLE_HEAD + self.rows * self.ways * (1 + self.successors)

    @property
    def names(self) -> int:
        """Slots for names, a power of two at most half full."""
        return 1 << (2 * self.executions).bit_length()

    def parts(self) -> dict[str, int]:
        """Return the bytes of each part, by the field that has its address."""
        return {
            "blocks_address": self.blocks * BLOCK.itemsize,
            "names_address": self.names * NAME.itemsize,
            "contexts_address": self.contexts * CONTEXT.itemsize,
            "frontier_address": self.blocks * 4,
            "lists_address": LISTS * LIST.itemsize,
            "tables_address": self.executions * self.table_words * 4,
        }

    @property
    def total_bytes(self) -> int:
        """Bytes of memory for ``lay_out``, most of which stay untouched."""
        return _rounded(PAGING.itemsize) + sum(_rounded(size) for size in self.parts().values())


WAYS_OF_CONTEXTS = 4
TABLE_HEAD = 4
"""Words before a block table's rows: epoch + 1, start + 1, end + 1, and one that is not used."""
_ALIGNMENT = 64


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def lay_out(memory: NDArray[np.uint8], sizes: Sizes, flags: int = ALL, degree: int = DEGREE) -> Any:  # noqa: ANN401 - a record
    """Begin to learn, in memory that is zero; returns the record that all functions of this package take.

    Args:
        memory: ``sizes.total_bytes`` zero bytes aligned to 64, which must outlive the record.
        sizes: Of the tables.
        flags: The parts that are on.
        degree: Executions that the chain is ahead, 1 to ``MOST_DEGREE``.

    Raises:
        ConfigError: The memory is too small, or the degree cannot be used.
    """
    if memory.nbytes < sizes.total_bytes:
        raise ConfigError(f"{memory.nbytes} bytes are too few for tables of {sizes.total_bytes}: give as many")
    if not 1 <= degree <= MOST_DEGREE:
        raise ConfigError(f"degree {degree} cannot be used: give 1 to {MOST_DEGREE}")
    record = memory[: PAGING.itemsize].view(PAGING)[0]
    address = memory.ctypes.data + _rounded(PAGING.itemsize)
    for field, size_bytes in sizes.parts().items():
        record[field] = address
        address += _rounded(size_bytes)
    record["flags"], record["degree"], record["n_blocks"] = flags, degree, sizes.blocks
    record["rows"], record["ways"], record["successors"] = sizes.rows, sizes.ways, sizes.successors
    record["table_words"], record["most_executions"] = sizes.table_words, sizes.executions
    record["contexts"] = sizes.contexts
    record["names"] = sizes.names
    return record
