"""A broker started as a process of its own, which outlives the one that starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from typing import IO, TYPE_CHECKING, cast

from zico.base import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

START_S = 1800.0
"""The first broker on a machine compiles."""
SAY_AFTER_S = 3.0
END_S = 5.0
_LOOK_S = 0.01


def start_broker(words: Sequence[str], said: IO[bytes], tell: Callable[[str], None]) -> list[str] | None:
    """Start ``zico broker`` in a session of its own, and wait until jobs can join it or it has ended.

    A thread reaps it as soon as it ends, while this process lives.

    Args:
        words: What follows ``zico broker``.
        said: A file for what it writes on stderr, as long as it lives; at its beginning.
        tell: Gets a line if it takes long.

    Returns:
        ``None`` if jobs can join; else the lines that it wrote before it ended, at least one. An
        exception, such as Ctrl-C, ends it.
    """
    with contextlib.ExitStack() as undo:
        with _interrupts_held_back():
            child = subprocess.Popen(  # noqa: S603 - this Python
                interpreter.command("-m", "zico", "broker", *words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,
            )
            undo.callback(_end, child)
        with cast("IO[bytes]", child.stdout) as ready:
            os.set_blocking(ready.fileno(), False)
            _await_word(child, ready, tell)
        undo.pop_all()
    if child.poll() is None:
        threading.Thread(target=child.wait, name="zico-broker-end", daemon=True).start()
        return None
    return lines_of(said) or ["it ended without a word"]


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C raise only after the block, so that what the block starts is known by then."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a broker that nobody waits for any more; kill it after ``END_S``."""
    child.terminate()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


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
