"""Which of Zico's source files a module's machine code is made of: itself and all that it imports, directly or not."""

from __future__ import annotations

import functools
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent

# An import statement, also one inside a function: `from a import b, c`, with or without
# parentheses, or `import a`.
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(zico[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+(zico[\w.]*))", re.MULTILINE
)
_WORD = re.compile(r"\w+")
_BESIDE = ("adapters", "kernels", "lab")


@functools.cache
def closure(source: Path, package: Path = PACKAGE) -> tuple[Path, ...]:
    """Return the file and every file of the package that it comes to import, sorted; a package's own file counts."""
    found = {source}
    todo = [source]
    while todo:
        fresh = imported(todo.pop(), package) - found
        found |= fresh
        todo += fresh
    return tuple(sorted(found))


@functools.cache
def imported(source: Path, package: Path = PACKAGE) -> frozenset[Path]:
    """Return the files of the package that one file's import statements name."""
    names = set()
    for module, members, plain in _IMPORT.findall(source.read_text()):
        names |= {module or plain} | {f"{module}.{word}" for word in _WORD.findall(members) if module}
    return frozenset(file for name in names for file in _files(name, package))


@functools.cache
def _files(name: str, package: Path) -> list[Path]:
    parts = name.split(".")[1:]
    # In a checkout adapters, kernels and lab lie beside the package that they are installed into.
    bases = (package.joinpath(*parts), *([package.parent.joinpath(*parts)] if parts and parts[0] in _BESIDE else ()))
    return [file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()]
