"""The tables of learned paging against models in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import ConfigError
from zico.paging.layout import DEEPUM, NONE, PAGING, SHORTER, Sizes, lay_out
from zico.paging.needed_next import (
    end_of,
    entry_of,
    following,
    forget,
    learn,
    link,
    number_of,
    set_end,
    set_start,
    start_of,
    table_of,
)

Record = Any
SMALL = Sizes(blocks=64, rows=4, ways=2, successors=3, executions=8, contexts=1 << 10)


def begin(sizes: Sizes = SMALL, flags: int = DEEPUM) -> tuple[Any, Record]:
    """Return memory and the record in it."""
    memory = np.zeros(sizes.total_bytes, np.uint8)
    return memory, lay_out(memory, sizes, flags)


def history_of(paging: Record, before: tuple[int, ...]) -> Record:
    """Return an array for three predecessors, the latest first, as the compiled code has it."""
    paging["history"][:] = before
    return paging["history"]


# -- executions ------------------------------------------------------------------------------------


def test_the_papers_example_holds() -> None:
    """Entry 0 holds (7, 9, 92, 75): after 7, 9, 92 and 0 comes 75, and after other predecessors nothing is known."""
    _memory, paging = begin()
    learn(paging, history_of(paging, (92, 9, 7)), 100, 75)  # numbers count from 1: 100 stands for 0
    assert following(paging, history_of(paging, (92, 9, 7)), 100) == 75
    assert following(paging, history_of(paging, (92, 9, 8)), 100) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=5, max_size=200), st.sampled_from([0, SHORTER]))
def test_predictions_are_those_of_a_dictionary(sequence: list[int], shorter: int) -> None:
    """What is predicted is what came last after the same three predecessors, else, if asked for, after fewer."""
    _memory, paging = begin(flags=shorter)
    model: dict[tuple[int, ...], int] = {}
    padded = [0, 0, 0, *sequence]
    for i in range(4, len(padded)):
        history, current, then = tuple(padded[i - 2 : i - 5 : -1] if i > 4 else padded[2::-1]), padded[i - 1], padded[i]
        lengths = range(3, -1, -1) if shorter else (3,)
        expected = next((model[n, *history[:n], current] for n in lengths if (n, *history[:n], current) in model), 0)
        assert following(paging, history_of(paging, history), current) == expected
        learn(paging, history_of(paging, history), current, then)
        for n in lengths:
            model[n, *history[:n], current] = then
    assert paging["overflows"] == 0


def test_a_full_execution_table_forgets_what_was_used_least_recently() -> None:
    """With room for four tuples the four last ones are known, and the others are counted."""
    _memory, paging = begin(Sizes(blocks=64, rows=4, executions=8, contexts=4))
    for current in range(1, 8):
        paging["now"] = current
        learn(paging, history_of(paging, (1, 2, 3)), current, current + 1)
    known = [following(paging, history_of(paging, (1, 2, 3)), current) for current in range(1, 8)]
    assert known == [0, 0, 0, 5, 6, 7, 8]
    assert paging["overflows"] == 3


def test_names_keep_their_numbers() -> None:
    """A name has the number of its first sight, whatever 64-bit number it is."""
    _memory, paging = begin()
    names = [5, -1, 0, 1 << 62, -(1 << 63), 1 << 32]
    assert [number_of(paging, name) for name in names] == [1, 2, 3, 4, 5, 6]
    assert [number_of(paging, name) for name in reversed(names)] == [6, 5, 4, 3, 2, 1]


def test_with_too_many_names_all_is_forgotten() -> None:
    """The ninth of eight names begins anew: numbers, what follows, and block tables, too."""
    _memory, paging = begin()
    for name in range(8):
        number_of(paging, name)
    learn(paging, history_of(paging, (1, 2, 3)), 4, 5)
    link(paging, table_of(paging, 1), 7, 8)
    assert number_of(paging, 8) == 1
    assert paging["epoch"] == 1
    assert following(paging, history_of(paging, (1, 2, 3)), 4) == 0
    assert entry_of(paging, table_of(paging, 1), 7) == NONE


def test_forgetting_leaves_no_chain() -> None:
    """After all is forgotten nothing runs and nothing is followed."""
    _memory, paging = begin()
    paging["chaining"] = 1
    paging["current"] = 3
    forget(paging)
    assert (paging["chaining"], paging["current"], paging["n_executions"]) == (0, 0, 0)


# -- block tables ----------------------------------------------------------------------------------


def successors(paging: Record, execution: int, block: int) -> list[int]:
    """Return what is known to have faulted after a block, the latest first."""
    table = table_of(paging, execution)
    entry = entry_of(paging, table, block)
    if entry == NONE:
        return []
    return [word - 1 for word in table[entry + 1 : entry + 1 + paging["successors"]].tolist() if word]


class Model:
    """A block table in plain Python: rows of entries, the latest first."""

    def __init__(self, sizes: Sizes) -> None:
        """Begin with empty rows."""
        self._sizes = sizes
        self._rows: dict[int, dict[int, list[int]]] = {}

    def link(self, block: int, successor: int) -> None:
        """Note that a block faulted after another."""
        row = self._rows.setdefault(block % self._sizes.rows, {})
        known = row.pop(block, [])
        kept = [successor, *(one for one in known if one != successor)][: self._sizes.successors]
        latest = dict(list(row.items())[: self._sizes.ways - 1])
        self._rows[block % self._sizes.rows] = {block: kept} | latest

    def successors(self, block: int) -> list[int]:
        """Return what faulted after a block."""
        return self._rows.get(block % self._sizes.rows, {}).get(block, [])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 63), st.integers(0, 63)), max_size=200),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4]),
)
def test_block_tables_are_those_of_a_dictionary(faults: list[tuple[int, int, int]], ways: int, kept: int) -> None:
    """Each execution's table keeps, of each row, the latest ways, and of each block the latest successors."""
    sizes = Sizes(blocks=64, rows=4, ways=ways, successors=kept, executions=8, contexts=4)
    _memory, paging = begin(sizes)
    models = {execution: Model(sizes) for execution in range(1, 4)}
    for execution, block, successor in faults:
        link(paging, table_of(paging, execution), block, successor)
        models[execution].link(block, successor)
    for execution, model in models.items():
        for block in range(64):
            assert successors(paging, execution, block) == model.successors(block)


def test_start_and_end_are_kept_beside_the_rows() -> None:
    """Start and end of one table are those that were set, and another table has none."""
    _memory, paging = begin()
    set_start(table_of(paging, 2), 5)
    set_end(table_of(paging, 2), 6)
    assert (start_of(table_of(paging, 2)), end_of(table_of(paging, 2))) == (5, 6)
    assert (start_of(table_of(paging, 3)), end_of(table_of(paging, 1))) == (NONE, NONE)


# -- memory ----------------------------------------------------------------------------------------


def test_the_parts_do_not_overlap() -> None:
    """Every part lies within the memory, behind the one before it."""
    memory, paging = begin()
    at = memory.ctypes.data + PAGING.itemsize
    for field, size_bytes in SMALL.parts().items():
        assert paging[field] >= at
        at = int(paging[field]) + size_bytes
    assert at <= memory.ctypes.data + memory.nbytes


def test_what_cannot_be_used_is_refused() -> None:
    """Sizes that are no sizes, memory that is too small and a degree that is none say so."""
    with pytest.raises(ConfigError, match=r"rows=3 .* power of two"):
        Sizes(blocks=1, rows=3)
    with pytest.raises(ConfigError, match=r"ways=0 .* 1 or more"):
        Sizes(blocks=1, ways=0)
    with pytest.raises(ConfigError, match="too few"):
        lay_out(np.zeros(SMALL.total_bytes - 1, np.uint8), SMALL)
    with pytest.raises(ConfigError, match="degree 0"):
        lay_out(np.zeros(SMALL.total_bytes, np.uint8), SMALL, degree=0)
