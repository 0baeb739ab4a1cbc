"""Files of minimalloc: what is read, what is written, and what is refused how."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.planner_cases import problems
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zico.base.errors import TraceError
from zico.lab.packing.files import Table, csv_text, read_csv

if TYPE_CHECKING:
    from pathlib import Path

    from zico.planning.packing.problem import Problem

ANYWHERE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(path: Path, text: str | bytes) -> Path:
    """Write a file and return its path."""
    path = path / "given.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_problem_as_in_minimallocs_files(tmp_path: Path) -> None:
    """Intervals are half-open, ids are names, and there is no plan."""
    table = read_csv(written(tmp_path, "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\n"))
    assert table.problem.names == ("b1", "b2")
    assert table.problem.lower.tolist() == [0, 3]
    assert table.problem.upper.tolist() == [3, 9]
    assert table.problem.peak_live_bytes == 4
    assert table.offset_bytes is None


def test_columns_in_another_order_with_a_plan(tmp_path: Path) -> None:
    """The header says what a column is; a byte order mark, spaces and other line ends do not matter."""
    table = read_csv(written(tmp_path, "\ufeffoffset, size ,id,upper,lower\r\n7, 4,x,3,0\r\n\r\n"))
    assert table.offset_bytes is not None
    row = (table.problem.lower, table.problem.upper, table.problem.size_bytes, table.offset_bytes)
    assert [array.tolist() for array in row] == [[0], [3], [4], [7]]
    assert table.problem.names == ("x",)


@given(problems(), st.data())
@ANYWHERE
def test_what_is_written_is_read(tmp_path: Path, problem: Problem, data: st.DataObject) -> None:
    """A problem, with and without a plan, comes back as it was."""
    offsets = np.array(data.draw(st.lists(st.integers(0, 99), min_size=len(problem), max_size=len(problem))), np.int64)
    for given_offsets in (None, offsets):
        table = read_csv(written(tmp_path, csv_text(problem, given_offsets)))
        for name in ("lower", "upper", "size_bytes"):
            assert getattr(table.problem, name).tolist() == getattr(problem, name).tolist()
        if given_offsets is not None:
            assert table.offset_bytes is not None
            assert table.offset_bytes.tolist() == offsets.tolist()


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", 0, "give id,lower,upper,size[,offset]"),
        ("a,b\n", 1, "the header is 'a,b': give id,lower,upper,size[,offset]"),
        ("id,lower,upper,size,alignment\n", 1, "give id,lower,upper,size[,offset]"),
        ("id,lower,upper,size\nx,0,1,2\nx,0,1\n", 3, "3 cells under 4 columns: give one for each"),
        ("id,lower,upper,size\nx,0,1,2.5\n", 2, "'2.5' is not an integer: give one"),
        ("id,lower,upper,size\nx,0,1,99999999999999999999\n", 2, "give numbers up to 2**60"),
        ("id,lower,upper,size\nx,0,1,-2\n", 2, "has -2 bytes: give 0 <= lower < upper and a size of 1 or more"),
        ("id,lower,upper,size\nx,-1,1,2\n", 2, "lives from -1 to 1"),
        ("id,lower,upper,size\nx,3,3,2\n", 2, "lives from 3 to 3"),
        (f"id,lower,upper,size\nx,0,1,{1 << 60}\ny,0,1,1\n", 0, "the sizes must add up to less than 2**60"),
        ('id,lower,upper,size\n"x,0,1,1\n', 2, "unexpected end of data"),
        (b"id,lower,upper,size\n\xff,0,1,1\n", 0, "is not text: give a CSV file with the header"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str | bytes, line: int, what: str) -> None:
    """The error is one line that names the file, the line and the remedy."""
    path = written(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_csv(path)
    assert (caught.value.path, caught.value.line) == (str(path), line)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """The error names it."""
    with pytest.raises(TraceError, match=r"none\.csv: No such file or directory: give a file that can be read"):
        read_csv(tmp_path / "none.csv")


@given(st.one_of(st.binary(max_size=200), st.text('id,lowerupsz0123456789-\n\r"\0 ', max_size=60).map(str.encode)))
@ANYWHERE
def test_any_bytes_are_a_table_or_an_error(tmp_path: Path, content: bytes) -> None:
    """Nothing but a trace error is raised, whatever the file contains."""
    for begin in (b"", b"id,lower,upper,size\n"):
        with contextlib.suppress(TraceError):
            assert isinstance(read_csv(written(tmp_path, begin + content)), Table)
