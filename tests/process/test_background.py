"""The end of the interpreter waits for threads that work under a lock, and lets none of them begin again."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from support.harness import PATIENCE_S, clean_environment

from zico.base import background

if TYPE_CHECKING:
    import pytest

SCRIPT = """
import threading
from zico.base.background import work_lock

lock, begun = work_lock(), threading.Event()

def work():
    with lock:
        begun.set()
        threading.main_thread().join()
        print("worked to the end", flush=True)

threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


def test_the_end_waits_for_a_thread_that_works() -> None:
    """Else it would meet the interpreter's end inside a library, and abort the process there."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "worked to the end\n", "")


def test_the_end_keeps_the_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no thread begins to work again."""
    monkeypatch.setattr(background, "_locks", [])
    monkeypatch.setattr(background, "_ending", threading.Event())  # else planners of later tests find no time left
    lock = background.work_lock()
    background._come_to_rest()
    assert not lock.acquire(blocking=False)
