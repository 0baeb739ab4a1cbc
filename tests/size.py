"""Print lines per package and the longest files and functions: `make size`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("zico", "adapters", "kernels", "lab")


def source_files(folders: tuple[str, ...] = SOURCES) -> list[Path]:
    """Return the Python files below some folders of the repository, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def statements(path: Path) -> Iterator[ast.AST]:
    """Yield a file's statements, those within others, too, without its expressions, which are most of the nodes."""
    left: list[ast.AST] = [ast.parse(path.read_text())]
    while left:
        node = left.pop()
        yield node
        inner = ast.iter_child_nodes(node)
        left += [one for one in inner if isinstance(one, ast.stmt | ast.excepthandler | ast.match_case)]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of lines of each function in a file, docstrings not counted."""
    for node in statements(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            skipped = (first.end_lineno or 0) - first.lineno + 1 if docstring else 0
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - skipped


def main() -> None:
    """Print the tables."""
    lines = {path: len(path.read_text().splitlines()) for path in source_files((*SOURCES, "tests", "benchmarks"))}
    for folder in (*SOURCES, "tests", "benchmarks"):
        count = sum(n for path, n in lines.items() if path.is_relative_to(ROOT / folder))
        sys.stdout.write(f"{count:7d}  {folder}\n")
    sys.stdout.write("\nlongest files\n")
    for path, count in sorted(lines.items(), key=lambda item: -item[1])[:10]:
        sys.stdout.write(f"{count:7d}  {path.relative_to(ROOT)}\n")
    sys.stdout.write("\nlongest functions\n")
    longest = [(n, f"{path.relative_to(ROOT)}:{name}") for path in source_files() for name, n in functions(path)]
    for count, where in sorted(longest, reverse=True)[:10]:
        sys.stdout.write(f"{count:7d}  {where}\n")


if __name__ == "__main__":
    main()
