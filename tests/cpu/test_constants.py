"""The page of constants that tune, against the code."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "design" / "constants.md"
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| `([^`]+)` \| (\w+) \|", re.MULTILINE)
KEPT_AS = ("derived", "setting", "physical", "ablation", "candidate")

Row = tuple[str, str, str, str]


def rows(text: str) -> list[Row]:
    """Return module, name, value and kind of every constant on a page."""
    return ROW.findall(text)


@functools.cache
def _constants(path: Path) -> dict[str, str]:
    tree = ast.parse(path.read_text())
    return {
        target.id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def wrong(row: Row) -> str:
    """Return what a row says that the code does not; empty if they are alike."""
    module, name, value, kind = row
    found = [known[name] for path in (ROOT / "zico").rglob(f"{module}.py") if name in (known := _constants(path))]
    if kind not in KEPT_AS:
        return f"{module}.{name} is kept as {kind}: give one of {', '.join(KEPT_AS)}"
    if len(found) != 1:
        return f"{len(found)} modules {module}.py have a constant {name}: mend the row"
    return "" if found[0] == ast.unparse(ast.parse(value)) else f"{module}.{name} is {found[0]}, not {value}"


@pytest.mark.parametrize("row", rows(PAGE.read_text()), ids=":".join)
def test_the_page_says_what_the_code_does(row: Row) -> None:
    """Each constant of the page stands in one module of that name, with that value."""
    assert wrong(row) == ""


def test_no_row_is_overlooked() -> None:
    """Every row of a table on the page has the form that the test reads, and none stands twice."""
    text = PAGE.read_text()
    found = [(module, name) for module, name, _value, _kind in rows(text)]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(lines) == len(found) == len(set(found)) > 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("| `learning` | `BETTER_BY` | `0.009` | derived | x |", "is 0.008, not 0.009"),
        ("| `learning` | `BETTER` | `0.008` | derived | x |", "0 modules learning.py"),
        ("| `learning` | `BETTER_BY` | `0.008` | guessed | x |", "give one of"),
    ],
)
def test_a_wrong_row_is_found(line: str, words: str) -> None:
    """Another value, an unknown name and an unknown kind are told apart."""
    (row,) = rows(line)
    assert words in wrong(row)
