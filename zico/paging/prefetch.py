"""The chain: from a fault through what faulted after it, and on through the executions that follow.

Theory of operation
    A walk goes through the blocks of one execution's table, from its start or from a block that has just faulted, each
    block once. Then the execution table says what runs next, and the walk goes on there, until it is ``degree``
    instances ahead, where it waits for the job, or until nothing is predicted. What it passes is *expected*; what it
    passes and is not there is to be prefetched::

        now           now + 1       now + 2                 now + 3
        a -> b -> c | d -> e      | (nothing faults here) | f ...      expected: a b c d e f

Guarantees
    * ``note_fault`` is O(1), ``note_execution`` takes time for the blocks that were due; the others walk through at
      most ``MOST_VISITS`` blocks.
    * ``next_prefetch`` returns the block that is due first of all that are not there, not held, and expected.
    * What a wrong prediction expected stays so until the instance is over that was to touch it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import array_at, compiled, inlined
from zico.paging.blocks import end_of, entry_of, link, set_end, set_start, start_of, table_of
from zico.paging.executions import following, learn, number_of
from zico.paging.layout import ABSENT, APPEND, BIRTHS, NONE, PREEVICT, PREFETCH, RESIDENT, SPAN
from zico.paging.resident import block_at, end_instance, expect, hold, is_expected, list_at, list_due

if TYPE_CHECKING:
    from zico.paging.layout import PagingRecord

MOST_VISITS = 4096
"""Blocks and executions that one call walks through, so that nobody waits long for it."""

_I32 = np.dtype("i4")
_NO_BLOCK = 0  # in lists, where blocks are counted from one


# -- what happens -----------------------------------------------------------------------------------------------------


@compiled
def note_execution(paging: PagingRecord, name: int) -> None:
    """Note that the job starts an execution; that of before is over."""
    number = number_of(paging, name)
    if paging.current > 0:
        learn(paging, paging.history, paging.current, number)
    paging.now += 1
    end_instance(paging, paging.now - 1)
    paging.history[2] = paging.history[1]
    paging.history[1] = paging.history[0]
    paging.history[0] = paging.current
    paging.current = number
    paging.last_fault = _NO_BLOCK
    foreseen = paging.chaining and paging.chain_at >= paging.now
    if foreseen and paging.predicted[paging.now & (SPAN - 1)] == number:
        return
    paging.mispredicted += foreseen
    _begin_at(paging, start_of(table_of(paging, number)))


@compiled
def note_fault(paging: PagingRecord, block: int) -> None:
    """Note that the job waits for a block: learn from it, and let the chain begin there if it did not lead there."""
    paging.faults += 1
    was_expected = paging.chaining and is_expected(paging, block)
    paging.late += was_expected
    hold(paging, block)
    if paging.current > 0:
        _learn_fault(paging, block)
        if not was_expected:
            _begin_at(paging, block)


@compiled
def note_birth(paging: PagingRecord, block: int) -> None:
    """Note that something comes to lie in a block in which nothing lay. Without ``BIRTHS`` that teaches nothing."""
    if paging.flags & BIRTHS and paging.current > 0:
        _learn_fault(paging, block)


@compiled
def _learn_fault(paging: PagingRecord, block: int) -> None:
    table = table_of(paging, paging.current)
    start, end = start_of(table), end_of(table)
    if paging.last_fault != _NO_BLOCK:
        if paging.last_fault != block + 1:
            link(paging, table, paging.last_fault - 1, block)
    elif start in (NONE, block) or not paging.flags & APPEND or not block_at(paging, start).state & RESIDENT:
        set_start(table, block)
    elif end != block:
        link(paging, table, end, block)
    set_end(table, block)
    paging.last_fault = block + 1


# -- the walk ---------------------------------------------------------------------------------------------------------


@compiled
def _begin_at(paging: PagingRecord, block: int) -> None:
    """Let the chain begin in the execution that runs, at a block or, if that is ``NONE``, behind it."""
    paging.chaining = 1
    paging.chain_at = paging.now
    paging.chain = paging.current
    for i in range(len(paging.history)):
        paging.chain_history[i] = paging.history[i]
    _enter(paging, block)


@inlined
def _enter(paging: PagingRecord, block: int) -> None:
    """Begin to visit an execution at a block."""
    paging.visit += 1
    paging.frontier = 0
    paging.n_frontier = 0
    if block != NONE:
        _reach(paging, block)


@inlined
def _reach(paging: PagingRecord, block: int) -> None:
    known = block_at(paging, block)
    if known.seen != paging.visit:
        known.seen = paging.visit
        array_at(paging.frontier_address, paging.n_blocks, _I32)[paging.n_frontier] = block
        paging.n_frontier += 1


@compiled
def walk(paging: PagingRecord) -> None:
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
        paging.predicted[paging.chain_at & (SPAN - 1)] = number
        table = table_of(paging, number)
        _enter(paging, start_of(table))


@compiled
def _visit(paging: PagingRecord, table: Any) -> None:  # noqa: ANN401 - as table_of returns
    """Expect the next block of the frontier, and reach what faulted after it."""
    block = int(array_at(paging.frontier_address, paging.n_blocks, _I32)[paging.frontier])
    paging.frontier += 1
    expect(paging, block, paging.chain_at)
    entry = entry_of(paging, table, block)
    if entry != NONE:
        for i in range(entry + 1, entry + 1 + paging.successors):
            if table[i] != _NO_BLOCK:
                _reach(paging, table[i] - 1)


# -- what to bring in -------------------------------------------------------------------------------------------------


@compiled
def next_prefetch(paging: PagingRecord) -> int:
    """Return the block to bring in next, held until it arrives or ``release`` says that it will not; or ``NONE``."""
    paging.next_due = 0
    if not paging.flags & PREFETCH:
        return NONE
    walk(paging)
    at = max(paging.now, paging.nearest)
    while at <= paging.chain_at:
        block = int(list_at(paging, ABSENT + list_due(at)).first) - 1
        if block != NONE:
            paging.nearest = at
            paging.next_due = at
            paging.prefetched += 1
            hold(paging, block)
            return block
        at += 1
    paging.nearest = at
    return NONE
