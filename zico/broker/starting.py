"""A broker started as a process of its own, which outlives the one that starts it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from typing import IO, TYPE_CHECKING, cast

from zico.base import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from zico.base.settings import Settings

START_S = 1800.0
"""The first broker on a machine compiles."""
END_S = 5.0
READY = b"ready\n"
"""A broker says this, where it is asked to, when jobs can join."""
COMPILING = b"compiling\n"
"""A broker says this before, if it has to compile."""
_WORDS_BYTES = 64


def start_broker(words: Sequence[str], said: IO[bytes], tell: Callable[[str], None]) -> list[str] | None:
    """Start ``zico broker`` in a session of its own, and wait until jobs can join it or it has ended.

    A thread reaps it as soon as it ends, while this process lives.

    Args:
        words: What follows ``zico broker``.
        said: A file for what it writes on stderr, as long as it lives; at its beginning.
        tell: Gets a line if it has to compile.

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
            if await_ready(ready.fileno(), START_S, tell):
                threading.Thread(target=child.wait, name="zico-broker-end", daemon=True).start()
                undo.pop_all()
                return None
    return lines_of(said) or ["it ended without a word"]


def await_ready(ready_fd: int, patience_s: float, tell: Callable[[str], None]) -> bool:
    """Wait until a broker says that jobs can join; false if it has ended, or the time is over.

    Args:
        ready_fd: Our end of the pipe into which it says so.
        patience_s: Most time to wait.
        tell: Gets a line if it has to compile.
    """
    end_s = time.monotonic() + patience_s
    while select.select([ready_fd], [], [], max(0.0, end_s - time.monotonic()))[0]:
        if (is_ready := hears_ready(ready_fd, tell)) is not None:
            return is_ready
    return False


def hears_ready(ready_fd: int, tell: Callable[[str], None]) -> bool | None:
    """Read what a broker says on its way: true if jobs can join, false if it has ended, ``None`` if it goes on."""
    words = os.read(ready_fd, _WORDS_BYTES)
    if COMPILING in words:
        tell("compiling; this takes a minute or two, once per machine")
    return READY in words if READY in words or not words else None


def words_of(settings: Settings, socket: Path) -> list[str]:
    """Return what ``zico.broker`` is called with for these settings."""
    return [
        *("--socket", str(socket)),
        *("--budget-bytes", str(settings.budget_bytes.value)),
        *("--most-bytes", str(settings.most_bytes.value)),
        *("--region-bytes", str(settings.region_bytes.value)),
        *("--reserve-bytes", str(settings.reserve_bytes.value)),
        *("--device", settings.device.value),
        *(["--isolate"] if settings.isolate.value else []),
        *("--policy", settings.policy.value),
        *("--log-level", settings.log_level.value),
    ]


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
