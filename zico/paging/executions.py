"""The execution table: which operation comes next, from the one that runs and the three before it.

Source: section 4.2 of "DeepUM" (J. Jung, J. Kim, J. Lee, ASPLOS 2023). An entry is a set of tuples::

    0: (7, 9, 92, 75)     after 7, 9, 92 and 0 comes 75
       (7, 9, 13, 21)

There the sets have no bound. Here all tuples share a table of buckets of four; a new one takes the place of the one
that was used least recently in its bucket, which is counted. Tuples of fewer predecessors are kept beside them, for
where three were never seen (``SHORTER``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import array_at, compiled, inlined, keep_out_of_line, spread
from zico.paging.layout import ANY, CONTEXT, NAME, SHORTER, WAYS_OF_CONTEXTS

if TYPE_CHECKING:
    from zico.paging.layout import PagingRecord

_HALF = 32
_KEY_SHIFT = np.uint64(20)
_MOST_BEFORE = 3


# -- names ------------------------------------------------------------------------------------------------------------


@compiled
def number_of(paging: PagingRecord, name: int) -> int:
    """Return an execution's number, a new one if the name is seen for the first time.

    With more than ``most_executions`` names all is forgotten first: a job that never repeats would fill any table.
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


# -- what follows -----------------------------------------------------------------------------------------------------


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
