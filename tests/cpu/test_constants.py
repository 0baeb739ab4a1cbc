"""The page of constants that tune, against the code."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "design" / "constants.md"
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| `([^`]+)` \| (\w+) \| (.+) \|$", re.MULTILINE)
KEPT_AS = ("derived", "setting", "physical", "ablation", "insensitive", "candidate")

Row = tuple[str, str, str, str, str]


def rows(text: str) -> list[Row]:
    """Return module, name, value, kind and reason of every constant on a page."""
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
    module, name, value, kind, reason = row
    found = [known[name] for path in (ROOT / "zico").rglob(f"{module}.py") if name in (known := _constants(path))]
    if kind not in KEPT_AS:
        return f"{module}.{name} is kept as {kind}: give one of {', '.join(KEPT_AS)}"
    if kind in ("ablation", "insensitive") and "](" not in reason:
        return f"{module}.{name} is kept as {kind}: link the figures"
    if kind == "insensitive" and not re.search("any value from .+ to .+ does", reason):
        return f"{module}.{name} is kept as {kind}: say that any value from x to y does"
    if len(found) != 1:
        return f"{len(found)} modules {module}.py have a constant {name}: mend the row"
    return "" if found[0] == ast.unparse(ast.parse(value)) else f"{module}.{name} is {found[0]}, not {value}"


@pytest.mark.parametrize("row", rows(PAGE.read_text()), ids=lambda row: ":".join(row[:2]))
def test_the_page_says_what_the_code_does(row: Row) -> None:
    """Each constant of the page stands in one module of that name, with that value."""
    assert wrong(row) == ""


def test_no_row_is_overlooked() -> None:
    """Every row of a table on the page has the form that the test reads, and none stands twice."""
    text = PAGE.read_text()
    found = [(module, name) for module, name, *_ in rows(text)]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(lines) == len(found) == len(set(found)) > 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("| `learning` | `BETTER_BY` | `0.009` | derived | x |", "is 0.008, not 0.009"),
        ("| `learning` | `BETTER` | `0.008` | derived | x |", "0 modules learning.py"),
        ("| `learning` | `BETTER_BY` | `0.008` | guessed | x |", "give one of"),
        ("| `learning` | `BETTER_BY` | `0.008` | ablation | x |", "link the figures"),
        ("| `learning` | `BETTER_BY` | `0.008` | insensitive | [x](y) |", "say that any value"),
    ],
)
def test_a_wrong_row_is_found(line: str, words: str) -> None:
    """Another value, an unknown name or kind, and a missing figure are told apart."""
    (row,) = rows(line)
    assert words in wrong(row)
