"""Block tables, one for each execution: which block faulted after which, the first one and the last one.

Source: section 4.2 of "DeepUM" (J. Jung, J. Kim, J. Lee, ASPLOS 2023). A table is set-associative; the ways of a row
and the successors of a block are in the order of their use, the latest first::

    row 5   [block 5    | 6, 9       ]  [block 2053 | 2054 ]
    row 6   [block 6    | 7          ]

What comes behind the last is forgotten. Blocks are stored as block + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import array_at, compiled, inlined
from zico.paging.layout import NONE, TABLE_HEAD

if TYPE_CHECKING:
    from zico.paging.layout import PagingRecord

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
