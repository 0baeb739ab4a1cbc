"""The chain: from a fault through what faulted after it, and on through the executions that follow.

Theory of operation
    A walk goes through the blocks of one execution's table, from its start or from a block that has just faulted, each
    block once. Then the execution table says what runs next, and the walk goes on there, until it is ``degree``
    instances ahead, where it waits for the job, or until nothing is predicted. What it passes is *expected*; what it
    passes and is not there comes into a queue::

        now           now + 1       now + 2
        a -> b -> c | d -> e      | (nothing faults here) | f ...      expected: a b c d e f
                                                                       queue: those of them that are elsewhere

Guarantees
    * ``note_execution`` and ``note_fault`` are O(1), but for the queue that a wrong prediction empties; the others walk
      through at most ``MOST_VISITS`` blocks.
    * ``next_prefetch`` returns no block that is there, on its way, or expected only by what is over.
    * A block that was expected by instances up to ``degree`` ahead stays so until the last of them is over, also if the
      prediction was wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zico.compiled import array_at, compiled, inlined, keep_out_of_line
from zico.paging.blocks import end_of, entry_of, link, set_end, set_start, start_of, table_of
from zico.paging.executions import following, learn, number_of
from zico.paging.layout import (
    APPEND,
    MOST_DEGREE,
    NONE,
    PENDING,
    PREEVICT,
    PREFETCH,
    QUEUED,
    RENEW,
    RESIDENT,
)
from zico.paging.resident import block_at, renew

MOST_VISITS = 4096
"""Blocks and executions that one call walks through, so that nobody waits long for it."""

_I32 = np.dtype("i4")
_PREDICTED = 2 * MOST_DEGREE - 1  # mask
_NO_BLOCK = 0  # in lists, where blocks are counted from one

Record = Any


# -- what happens -----------------------------------------------------------------------------------------------------


@compiled
def note_execution(paging: Record, name: int) -> None:
    """Note that the job starts an execution; that of before is over."""
    number = number_of(paging, name)
    if paging.current > 0:
        learn(paging, paging.history, paging.current, number)
    paging.now += 1
    paging.history[2] = paging.history[1]
    paging.history[1] = paging.history[0]
    paging.history[0] = paging.current
    paging.current = number
    paging.last_fault = _NO_BLOCK
    foreseen = paging.chaining and paging.chain_at >= paging.now
    if foreseen and paging.predicted[paging.now & _PREDICTED] == number:
        return
    if foreseen:
        paging.mispredicted += 1
        _drop_queue(paging)
    _begin_at(paging, start_of(table_of(paging, number)))


@compiled
def note_fault(paging: Record, block: int) -> None:
    """Note that the job waits for a block: learn from it, and let the chain begin there if it did not lead there."""
    known = block_at(paging, block)
    paging.faults += 1
    was_expected = known.expected >= paging.now and paging.chaining
    paging.late += was_expected
    known.state |= PENDING
    if paging.current > 0:
        _learn_fault(paging, block)
        if not was_expected:
            _begin_at(paging, block)


@compiled
def _learn_fault(paging: Record, block: int) -> None:
    table = table_of(paging, paging.current)
    start, end = start_of(table), end_of(table)
    if paging.last_fault != _NO_BLOCK:
        if paging.last_fault != block + 1:
            link(paging, table, paging.last_fault - 1, block)
    elif start == NONE or not paging.flags & APPEND or not block_at(paging, start).state & RESIDENT:
        set_start(table, block)
    elif end != block:
        link(paging, table, end, block)
    set_end(table, block)
    paging.last_fault = block + 1


# -- the walk ---------------------------------------------------------------------------------------------------------


@compiled
def _begin_at(paging: Record, block: int) -> None:
    """Let the chain begin in the execution that runs, at a block or, if that is ``NONE``, behind it."""
    paging.chaining = 1
    paging.chain_at = paging.now
    paging.chain = paging.current
    for i in range(len(paging.history)):
        paging.chain_history[i] = paging.history[i]
    _enter(paging, block)


@inlined
def _enter(paging: Record, block: int) -> None:
    """Begin to visit an execution at a block."""
    paging.visit += 1
    paging.frontier = 0
    paging.n_frontier = 0
    if block != NONE:
        _reach(paging, block)


@inlined
def _reach(paging: Record, block: int) -> None:
    known = block_at(paging, block)
    if known.seen != paging.visit:
        known.seen = paging.visit
        array_at(paging.frontier_address, paging.n_blocks, _I32)[paging.n_frontier] = block
        paging.n_frontier += 1


@compiled
def walk(paging: Record) -> None:
    """Let the chain go on, until it is ``degree`` ahead, has ended, or for ``MOST_VISITS`` steps."""
    if not paging.flags & (PREFETCH | PREEVICT) or not paging.chaining:
        return
    table = table_of(paging, paging.chain)
    for _ in range(MOST_VISITS):
        if paging.frontier < paging.n_frontier:
            _visit(paging, table)
            continue
        if paging.chain_at - paging.now >= paging.degree:
            return
        number = following(paging, paging.chain_history, paging.chain)
        if number == 0:
            paging.chaining = 0
            paging.ended += 1
            return
        paging.chain_history[2] = paging.chain_history[1]
        paging.chain_history[1] = paging.chain_history[0]
        paging.chain_history[0] = paging.chain
        paging.chain = number
        paging.chain_at += 1
        paging.predicted[paging.chain_at & _PREDICTED] = number
        table = table_of(paging, number)
        _enter(paging, start_of(table))


@compiled
def _visit(paging: Record, table: Any) -> None:  # noqa: ANN401 - as table_of returns
    """Expect the next block of the frontier, and reach what faulted after it."""
    block = int(array_at(paging.frontier_address, paging.n_blocks, _I32)[paging.frontier])
    paging.frontier += 1
    known = block_at(paging, block)
    known.expected = max(known.expected, paging.chain_at)
    if known.state & RESIDENT:
        if paging.flags & RENEW:
            renew(paging, block)
    elif not known.state & (QUEUED | PENDING) and paging.flags & PREFETCH:
        known.state |= QUEUED
        array_at(paging.queue_address, paging.n_blocks, _I32)[paging.queue_tail % paging.n_blocks] = block
        paging.queue_tail += 1
    entry = entry_of(paging, table, block)
    if entry != NONE:
        for i in range(entry + 1, entry + 1 + paging.successors):
            if table[i] != _NO_BLOCK:
                _reach(paging, table[i] - 1)


# -- the queue --------------------------------------------------------------------------------------------------------


@compiled
def next_prefetch(paging: Record) -> int:
    """Return the block to bring in next, held until it arrives or ``release`` says that it will not; or ``NONE``."""
    walk(paging)
    queue = array_at(paging.queue_address, paging.n_blocks, _I32)
    while paging.queue_head < paging.queue_tail:
        block = int(queue[paging.queue_head % paging.n_blocks])
        paging.queue_head += 1
        known = block_at(paging, block)
        known.state &= ~QUEUED
        if not known.state & (RESIDENT | PENDING) and known.expected >= paging.now:
            known.state |= PENDING
            paging.prefetched += 1
            return block
    return NONE


@compiled
def is_expected(paging: Record, block: int) -> bool:
    """Tell whether an instance from the one that runs to ``degree`` ahead is expected to touch a block."""
    return block_at(paging, block).expected >= paging.now


@compiled
def _drop_queue(paging: Record) -> None:
    """Forget what was to be prefetched."""
    keep_out_of_line()
    queue = array_at(paging.queue_address, paging.n_blocks, _I32)
    while paging.queue_head < paging.queue_tail:
        block_at(paging, int(queue[paging.queue_head % paging.n_blocks])).state &= ~QUEUED
        paging.queue_head += 1
