"""What a job touches next, and which block makes way: tables, prefetch and eviction.

Theory of operation *The execution table* says which operation comes next, from the one that runs
and the three before it. An entry is a set of tuples::

        0: (7, 9, 92, 75)     after 7, 9, 92 and 0 comes 75
           (7, 9, 13, 21)

    There the sets have no bound. Here all tuples share a table of buckets of four; a new one takes the place of the one
    that was used least recently in its bucket, which is counted. Tuples of fewer predecessors are kept beside them, for
    where three were never seen (``SHORTER``).

    *Block tables*, one for each execution, say which block faulted after which, the first one and the last one. A table
    is set-associative; the ways of a row and the successors of a block are in the order of their use, the latest
    first::

        row 5   [block 5    | 6, 9       ]  [block 2053 | 2054 ]
        row 6   [block 6    | 7          ]

    What comes behind the last is forgotten. Blocks are stored as block + 1.

    *The chain* leads from a fault through what faulted after it, and on through the executions that follow. A walk goes
    through the blocks of one execution's table, from its start or from a block that has just faulted, each block once.
    Then the execution table says what runs next, and the walk goes on there, until it is ``degree`` instances ahead,
    where it waits for the job, or until nothing is predicted. What it passes is *expected*; what it passes and is not
    there is to be prefetched::

        now           now + 1       now + 2                 now + 3
        a -> b -> c | d -> e      | (nothing faults here) | f ...      expected: a b c d e f

    *Eviction*: what nothing lives in goes first, then what was migrated longest ago and is not expected.

Guarantees
    * ``note_fault`` is O(1), ``note_execution`` takes time for the blocks that were due; the others
      walk through at most ``MOST_VISITS`` blocks.
    * ``next_prefetch`` returns the block that is due first of all that are not there, not held, and
      expected.
    * What a wrong prediction expected stays so until the instance is over that was to touch it.
    * ``choose_victim_ahead`` returns nothing without ``PREEVICT``, and without ``FURTHEST`` no
      block that is expected. With it, that is at most one that is due after the block that was
      prefetched last.
    * ``choose_victim`` returns a block as long as one is there that is not held. With ``PREEVICT``,
      where all are expected, that is the one that is due last.
    * ``choose_empty`` returns a block as long as one is there in which nothing lives (with
      ``INVALIDATE``).

Sources: "DeepUM" (J. Jung, J. Kim, J. Lee, ASPLOS 2023): section 4.2 for the tables, "pre-eviction"
and "invalidation" of section 5 for eviction. That the furthest goes is optimal: L. Belady, "A study
of replacement algorithms for a virtual-storage computer" (1966).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import array_at, compiled, inlined, keep_out_of_line, spread
from zico.paging.layout import (
    ABSENT,
    ANY,
    APPEND,
    BIRTHS,
    CLEAN,
    CONTEXT,
    FURTHEST,
    HELD,
    IDLE,
    IDLE_DIRTY,
    IDLE_INACTIVE,
    INACTIVE,
    NAME,
    NONE,
    PREEVICT,
    PREFETCH,
    RESIDENT,
    SHORTER,
    SPAN,
    TABLE_HEAD,
    WAYS_OF_CONTEXTS,
)
from zico.paging.residency import block_at, end_instance, expect, hold, is_expected, list_at, list_due, renew

if TYPE_CHECKING:
    from zico.paging.layout import PagingRecord


# -- executions ------------------------------------------------------------------------------------


_HALF = 32
_KEY_SHIFT = np.uint64(20)
_MOST_BEFORE = 3


# -- names -----------------------------------------------------------------------------------------


@compiled
def number_of(paging: PagingRecord, name: int) -> int:
    """Return an execution's number, a new one if the name is seen for the first time.

    With more than ``most_executions`` names all is forgotten first: a job that never repeats would
    fill any table.
    """
    names = array_at(paging.names_address, paging.names, NAME)
    i = spread(name, _HALF) & (paging.names - 1)
    while names[i].number != 0:
        if names[i].name == name:
            return int(names[i].number)
        i = (i + 1) & (paging.names - 1)
    if paging.n_executions == paging.most_executions:
        forget(paging)
        i = spread(name, _HALF) & (paging.names - 1)
    paging.n_executions += 1
    names[i].name = name
    names[i].number = paging.n_executions
    return int(paging.n_executions)


@compiled
def forget(paging: PagingRecord) -> None:
    """Forget all executions, but not which blocks are there. Block tables are cleared when they are used again."""
    keep_out_of_line()
    names = array_at(paging.names_address, paging.names, NAME)
    for i in range(paging.names):
        names[i].number = 0
    contexts = array_at(paging.contexts_address, paging.contexts, CONTEXT)
    for i in range(paging.contexts):
        contexts[i].next = 0
    paging.n_executions = 0
    paging.epoch += 1
    paging.current = 0
    paging.chaining = 0
    for i in range(_MOST_BEFORE):
        paging.history[i] = 0


# -- what follows ----------------------------------------------------------------------------------


@inlined
def _kept(history: Any, i: int, n_before: int) -> int:  # noqa: ANN401 - an array of three
    return history[i] if i < n_before else ANY


@compiled
def _bucket(paging: PagingRecord, history: Any, n_before: int, current: int) -> int:  # noqa: ANN401 - an array of three
    key = np.uint64(current)
    for i in range(_MOST_BEFORE):
        key = np.uint64(spread(key, _HALF)) + (key << _KEY_SHIFT) + np.uint64(_kept(history, i, n_before))
    return (spread(key, _HALF) & (paging.contexts // WAYS_OF_CONTEXTS - 1)) * WAYS_OF_CONTEXTS


@compiled
def _find(paging: PagingRecord, history: Any, n_before: int, current: int) -> int:  # noqa: ANN401 - an array of three
    """Return the slot of a tuple, or of the one to replace minus the number of slots."""
    contexts = array_at(paging.contexts_address, paging.contexts, CONTEXT)
    first = _bucket(paging, history, n_before, current)
    oldest = first
    for i in range(first, first + WAYS_OF_CONTEXTS):
        context = contexts[i]
        if context.next == 0:
            return int(i - paging.contexts)
        same = context.current == current
        for j in range(_MOST_BEFORE):
            same = same and context.before[j] == _kept(history, j, n_before)
        if same:
            return int(i)
        if context.used < contexts[oldest].used:
            oldest = i
    return int(oldest - paging.contexts)


@compiled
def learn(paging: PagingRecord, history: Any, current: int, following: int) -> None:  # noqa: ANN401 - an array of three
    """Note what followed an execution that ran after those in ``history``, the latest first."""
    contexts = array_at(paging.contexts_address, paging.contexts, CONTEXT)
    n_before = _MOST_BEFORE
    while n_before >= 0:
        i = _find(paging, history, n_before, current)
        if i < 0:
            i += paging.contexts
            if contexts[i].next != 0:
                paging.overflows += 1
            contexts[i].current = current
            for j in range(_MOST_BEFORE):
                contexts[i].before[j] = _kept(history, j, n_before)
        contexts[i].next = following
        contexts[i].used = paging.now & 0x7FFFFFFF
        n_before -= 1 if paging.flags & SHORTER else _MOST_BEFORE + 1


@compiled
def following(paging: PagingRecord, history: Any, current: int) -> int:  # noqa: ANN401 - an array of three
    """Return the execution predicted to follow, 0 if nothing is known: what came last time, most predecessors first."""
    contexts = array_at(paging.contexts_address, paging.contexts, CONTEXT)
    n_before = _MOST_BEFORE
    while n_before >= 0:
        i = _find(paging, history, n_before, current)
        if i >= 0:
            return int(contexts[i].next)
        n_before -= 1 if paging.flags & SHORTER else _MOST_BEFORE + 1
    return 0


# -- which block follows which ---------------------------------------------------------------------


_WORD = np.dtype("i4")
_WORD_BYTES = 4
_EPOCH, _START, _END = range(3)


@compiled
def table_of(paging: PagingRecord, execution: int) -> Any:  # noqa: ANN401 - an array of int32
    """Return an execution's block table as words, empty at its first sight."""
    words = array_at(
        paging.tables_address + (execution - 1) * paging.table_words * _WORD_BYTES, paging.table_words, _WORD
    )
    if words[_EPOCH] != paging.epoch + 1:
        if words[_EPOCH] != 0:
            words[:] = 0
        words[_EPOCH] = paging.epoch + 1
    return words


@inlined
def start_of(table: Any) -> int:  # noqa: ANN401 - as table_of returns
    """Return the block that faults first, or ``NONE``."""
    return table[_START] - 1


@inlined
def end_of(table: Any) -> int:  # noqa: ANN401 - as table_of returns
    """Return the block that faults last, or ``NONE``."""
    return table[_END] - 1


@inlined
def set_start(table: Any, block: int) -> None:  # noqa: ANN401 - as table_of returns
    """Note which block faults first."""
    table[_START] = block + 1


@inlined
def set_end(table: Any, block: int) -> None:  # noqa: ANN401 - as table_of returns
    """Note which block faults last."""
    table[_END] = block + 1


@compiled
def entry_of(paging: PagingRecord, table: Any, block: int) -> int:  # noqa: ANN401 - as table_of returns
    """Return where a block's entry begins in its table, or ``NONE``."""
    words = 1 + paging.successors
    first = TABLE_HEAD + (block & (paging.rows - 1)) * paging.ways * words
    for way in range(paging.ways):
        if table[first + way * words] == block + 1:
            return int(first + way * words)
    return NONE


@compiled
def link(paging: PagingRecord, table: Any, block: int, successor: int) -> None:  # noqa: ANN401 - as table_of returns
    """Note that a block faulted after another one."""
    words = 1 + paging.successors
    first = TABLE_HEAD + (block & (paging.rows - 1)) * paging.ways * words
    entry = entry_of(paging, table, block)
    if entry == NONE:
        _move_back(table, first, first + (paging.ways - 1) * words, words)
        table[first] = block + 1
        for i in range(1, words):
            table[first + i] = 0
    elif entry != first:
        for i in range(words):  # the last of the row's latest ones comes behind all that it passes
            word = table[entry + i]
            for at in range(entry + i, first + i, -words):
                table[at] = table[at - words]
            table[first + i] = word
    _put_first(table, first + 1, paging.successors, successor + 1)


@inlined
def _move_back(table: Any, first: int, last: int, words: int) -> None:  # noqa: ANN401 - as table_of returns
    """Move the entries of a row by one, so that the last one is lost."""
    for at in range(last + words - 1, first + words - 1, -1):
        table[at] = table[at - words]


@inlined
def _put_first(table: Any, first: int, n: int, value: int) -> None:  # noqa: ANN401 - as table_of returns
    """Put a value before others, and take it, or else the last one, away behind."""
    at = first
    while at < first + n - 1 and table[at] != value:
        at += 1
    while at > first:
        table[at] = table[at - 1]
        at -= 1
    table[first] = value


# -- prefetching -----------------------------------------------------------------------------------


MOST_VISITS = 4096
"""Blocks and executions that one call walks through, so that nobody waits long for it."""

_I32 = np.dtype("i4")
_NO_BLOCK = 0  # in lists, where blocks are counted from one


# -- what happens ----------------------------------------------------------------------------------


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


# -- the walk --------------------------------------------------------------------------------------


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


# -- what to bring in ------------------------------------------------------------------------------


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


# -- eviction --------------------------------------------------------------------------------------


_PRESSED = 1 << 16
"""Instances for which a job counts as too large after a block had to go in which something lived."""


@compiled
def choose_victim(paging: PagingRecord) -> int:
    """Return the resident block that a waiting fault should take the place of, or ``NONE``. It is not removed yet."""
    walk(paging)
    block = _idle(paging)
    if block == NONE:
        block = _furthest(paging, paging.now)
        paging.early += block != NONE
    return block


@compiled
def choose_empty(paging: PagingRecord) -> int:
    """Return a resident block in which nothing lives, or ``NONE``: one that nobody expects, else what is due last.

    It may be held: nobody touches what has been freed.
    """
    block = int(list_at(paging, IDLE_INACTIVE).first) - 1
    at = paging.furthest
    while block == NONE and at >= paging.now:
        block = int(list_at(paging, list_due(at)).first) - 1
        while block != NONE and not block_at(paging, block).state & INACTIVE:
            block = int(block_at(paging, block).next) - 1
        at -= 1
    return block


@compiled
def choose_victim_ahead(paging: PagingRecord) -> int:
    """Return a resident block that may go before its room is needed, or ``NONE``. It is not removed yet."""
    if not paging.flags & PREEVICT:
        return NONE
    walk(paging)
    block = _idle(paging)
    if block == NONE and paging.flags & FURTHEST and paging.next_due > 0:
        block = _furthest(paging, paging.next_due + 1)
    return block


@compiled
def choose_to_clean(paging: PagingRecord) -> int:
    """Return a resident block to copy out while it stays, or ``NONE``: with ``CLEAN``, what would go next but is dirty.

    Nothing is returned to a job for which no block had to go lately in which something lived.
    """
    if not paging.flags & CLEAN or paging.pressed == 0 or paging.now - paging.pressed > _PRESSED:
        return NONE
    return _oldest(paging, IDLE_DIRTY)


@compiled
def _idle(paging: PagingRecord) -> int:
    """Return the first block that is not expected: of the inactive ones, else of the clean ones, else of all."""
    block = _oldest(paging, IDLE_INACTIVE)
    if block == NONE:
        block = _oldest(paging, IDLE)
        if block == NONE:
            block = _oldest(paging, IDLE_DIRTY)
        if block != NONE:
            paging.pressed = paging.now
    return block


@compiled
def _oldest(paging: PagingRecord, number: int) -> int:
    """Return the first block of a list that is not held, or ``NONE``."""
    ordered = list_at(paging, number)
    for _ in range(ordered.n):
        block = int(ordered.first) - 1
        if not block_at(paging, block).state & HELD:
            return block
        renew(paging, block)
    return NONE


@compiled
def _furthest(paging: PagingRecord, least: int) -> int:
    """Return the block that is due last, but not before an instance; or ``NONE``."""
    at = paging.furthest
    while at >= least:
        block = _oldest(paging, list_due(at))
        if block != NONE:
            paging.pressed = paging.now
            return block
        if at == paging.furthest and list_at(paging, list_due(at)).n == 0:
            paging.furthest -= 1
        at -= 1
    return NONE
