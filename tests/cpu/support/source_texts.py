"""What the repository's files say: comments, docstrings and pages."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
RECORDS = ("CHANGELOG.md", "docs/results-history.md", "benchmarks/results/")
"""Pages that say what was there."""


@functools.cache
def files() -> tuple[str, ...]:
    """Return the paths of the repository's files."""
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(name for name in listed.stdout.splitlines() if (ROOT / name).is_file())


def texts(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield the programs and pages in some folders, but for records; no folder: all."""
    for name in files():
        if (
            name.endswith((".py", ".md", ".c", ".cpp"))
            and name.startswith(folders or "")
            and not name.startswith(RECORDS)
        ):
            yield name, text_of(name)


@functools.cache
def text_of(name: str) -> str:
    """Return what is in a file of the repository."""
    return (ROOT / name).read_text()
