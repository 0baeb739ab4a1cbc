"""The supervisor's side of the guardian: which sessions it must end if we are killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import IO, TYPE_CHECKING, cast

from zico.launch import guardian

if TYPE_CHECKING:
    from pathlib import Path

CLOSE_S = 2.0


class Ward:
    """A running guardian; ``close`` tells it that all is well."""

    def __init__(self, run_dir: Path) -> None:
        """Start a guardian that would remove ``run_dir``."""
        self._popen = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-S", "-m", guardian.__name__, str(run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._pipe = cast("IO[bytes]", self._popen.stdin)

    def add(self, session: int) -> None:
        """Let the guardian end ``session`` if we are killed."""
        self._tell(f"+{session}")

    def remove(self, session: int) -> None:
        """Forget ``session``; call it before its leader is reaped."""
        self._tell(f"-{session}")

    def close(self) -> None:
        """Send the guardian away; the directory is then the caller's to remove."""
        self._tell(guardian.DONE)
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        try:
            self._popen.wait(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait(timeout=CLOSE_S)

    def _tell(self, word: str) -> None:
        """Write one line. A guardian that somebody has killed is missed only if we are killed as well."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(f"{word}\n".encode())
            self._pipe.flush()
