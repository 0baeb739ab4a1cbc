"""The process that compiles beside a job what few jobs call."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from zico.base import programs, warming

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(programs.fault() != "", reason="this version of Numba compiles by itself")

WAIT_S = 90.0
SHORT = "zico.heap.cuda.contents"
"""The program that is compiled soonest."""


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let nothing be compiled yet, and return where it will be."""
    monkeypatch.setenv("ZICO_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_what_is_missing_is_compiled_once(empty_cache: Path) -> None:
    """The machine code is on disk then, of nothing else, and no process is started again."""
    beside = warming.compile_beside(SHORT)
    assert beside is not None
    try:
        assert beside.wait(WAIT_S) == 0
    finally:
        beside.kill()
        beside.wait(WAIT_S)
    assert warming.missing([SHORT]) == []
    assert [file.stem.rpartition("-")[0] for file in empty_cache.rglob("*.o")] == [SHORT]
    assert warming.compile_beside(SHORT) is None


@pytest.mark.usefixtures("empty_cache")
def test_it_ends_with_the_process_that_started_it() -> None:
    """A job that is killed leaves nobody who goes on for a minute."""
    code = "import sys; from zico.base import warming; print(warming.compile_beside(*warming.ALL).pid, flush=True)"
    starter = subprocess.Popen(
        [sys.executable, "-c", f"{code}; sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    pidfd = -1
    try:
        pid = int(starter.stdout.readline())
        pidfd = os.pidfd_open(pid)
        starter.kill()
        starter.wait(WAIT_S)
        has_ended, _, _ = select.select([pidfd], [], [], WAIT_S / 3)
    finally:
        starter.kill()
        starter.communicate(timeout=WAIT_S)
        if pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
    assert has_ended
