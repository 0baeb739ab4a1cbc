"""Problems and plans as CSV files of minimalloc: ``id,lower,upper,size`` and, for a plan, ``offset``.

A tensor lives in the half-open interval of ticks from ``lower`` to ``upper``. Columns may come in
any order; others than these are refused, since ignoring one (an alignment, say) would mean to
answer another question.

Source: https://github.com/google/minimalloc, README, "Input format" and "Output format".
"""

from __future__ import annotations

import csv
import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zico.base.errors import ProblemError, TraceError
from zico.planning.packing.problem import LARGEST, Problem

if TYPE_CHECKING:
    from zico.planning.packing.problem import Int64s

_COLUMNS = ("id", "lower", "upper", "size")
_HEADER = "id,lower,upper,size[,offset]"


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """What a file says."""

    problem: Problem
    offset_bytes: Int64s | None
    """Where it says that the tensors lie, if it does; not judged."""


def read_csv(path: Path | str) -> Table:
    """Read a problem, and the plan if the file has one.

    Raises:
        TraceError: The file cannot be read, or is not of this format; the message names file, line
            and remedy.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(str(path), 0, f"{error.strerror or error}: give a file that can be read") from error
    except UnicodeDecodeError as error:
        raise TraceError(str(path), 0, f"is not text: give a CSV file with the header {_HEADER}") from error
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = _columns(next(lines, []))
        rows = [_numbers(row, columns) for row in lines if row]
    except (csv.Error, ValueError) as error:
        raise TraceError(str(path), lines.line_num, str(error)) from error
    names = tuple(name for name, *_ in rows)
    numbers = np.array([cells for _, *cells in rows], np.int64).reshape(len(rows), len(columns) - 1)
    lower, upper, sizes, *offsets = numbers.T
    try:
        problem = Problem(lower, upper, sizes, names)
    except ProblemError as error:
        raise TraceError(str(path), 0, str(error)) from error
    return Table(problem, offsets[0] if offsets else None)


def csv_text(problem: Problem, offset_bytes: Int64s | None = None) -> str:
    """Return a problem, or with offsets a plan, as the text of a CSV file."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [problem.name_of(i) for i in range(len(problem))]
    arrays = [problem.lower, problem.upper, problem.size_bytes]
    header = list(_COLUMNS)
    if offset_bytes is not None:
        arrays.append(offset_bytes)
        header.append("offset")
    writer.writerow(header)
    writer.writerows(zip(names, *(array.tolist() for array in arrays), strict=True))
    return out.getvalue()


def _columns(header: list[str]) -> list[int]:
    """Return where id, lower, upper, size and perhaps offset stand in each row."""
    names = [cell.strip() for cell in header]
    wanted = [*_COLUMNS, "offset"] if "offset" in names else list(_COLUMNS)
    if sorted(names) != sorted(wanted):
        raise ValueError(f"the header is {','.join(names)[:80]!r}: give {_HEADER}")
    return [names.index(name) for name in wanted]


def _numbers(row: list[str], columns: list[int]) -> tuple[str, *tuple[int, ...]]:
    """Return a row's id and numbers in the order of ``columns``."""
    if len(row) != len(columns):
        raise ValueError(f"{len(row)} cells under {len(columns)} columns: give one for each")
    name, *cells = (row[k].strip() for k in columns)
    numbers = tuple(_number(cell) for cell in cells)
    lower, upper, size = numbers[:3]
    if not (0 <= lower < upper and size > 0):
        where = f"tensor {name[:40]} lives from {lower} to {upper} and has {size} bytes"
        raise ValueError(f"{where}: give 0 <= lower < upper and a size of 1 or more")
    return name, *numbers


def _number(cell: str) -> int:
    try:
        number = int(cell)
    except ValueError:
        raise ValueError(f"{cell[:40]!r} is not an integer: give one") from None
    if abs(number) > LARGEST:
        raise ValueError(f"{cell[:40]} is too large: give numbers up to 2**60")
    return number
