"""A broker started as a process of its own, which outlives the one that starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

START_S = 1800.0
"""The first broker on a machine compiles."""
SAY_AFTER_S = 3.0
_LOOK_S = 0.01


def start_broker(words: Sequence[str], said: IO[bytes], tell: Callable[[str], None]) -> list[str] | None:
    """Start ``zico broker`` in a session of its own, and wait until jobs can join it or it has ended.

    Args:
        words: What follows ``zico broker``.
        said: A file for what it writes on stderr, as long as it lives; at its beginning.
        tell: Gets a line if it takes long.

    Returns:
        ``None`` if jobs can join; else the lines that it wrote before it ended, at least one.
    """
    child = subprocess.Popen(  # noqa: S603 - this Python
        [sys.executable, "-P", "-m", "zico", "broker", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=said,
        start_new_session=True,
    )
    with cast("IO[bytes]", child.stdout) as ready:
        os.set_blocking(ready.fileno(), False)
        _await_word(child, ready, tell)
    if child.poll() is None:
        return None
    return lines_of(said) or ["it ended without a word"]


def lines_of(said: IO[bytes]) -> list[str]:
    """Return what a broker has written so far."""
    # Not by the file's position, which is the broker's, too.
    text = os.pread(said.fileno(), os.fstat(said.fileno()).st_size, 0)
    return text.decode(errors="replace").strip().splitlines()


def _await_word(child: subprocess.Popen[bytes], ready: IO[bytes], tell: Callable[[str], None]) -> None:
    """Wait until the broker says that it is ready, or has ended."""
    began_s = time.monotonic()
    told = False
    while child.poll() is None and not ready.read(1):
        waited_s = time.monotonic() - began_s
        if waited_s > START_S:
            child.kill()
            child.wait()
        if waited_s > SAY_AFTER_S and not told:
            tell("compiling; this takes a minute or two, once per machine")
            told = True
        time.sleep(_LOOK_S)
