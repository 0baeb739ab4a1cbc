"""Processes that find the CUDA driver's software twin where they look for the driver. For tests only.

Every Python process started with ``environment`` imports a ``sitecustomize`` that puts the twin in
its place, and so does what Zico starts from it: a user's process has no such switch. Twins of
several processes share their memory truly, by the descriptors of its handles.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cpu.support.zico_process import customised
from process.support.broker_process import read_line

ROOT = Path(__file__).parents[3]
PATIENCE_S = 300.0
"""For what may have to compile."""

_SITE = """
sys.path.append({tests!r})
from zico.device.cuda import bindings
from twin.twin import Twin

bindings.use(Twin(**{settings!r}))
{more}
"""

_NVML = """
import operator
import sys
import types
sys.path.insert(0, {directory!r})
from cpu.support.fake_nvml import Library, Memory
from zico.device.cuda.facts import device_uuids
library = Library(Memory({free_bytes}, {free_bytes}), [], uuid=device_uuids()[0])
library.install(types.SimpleNamespace(setitem=operator.setitem))
"""


@functools.cache
def compile_once() -> None:
    """Let all that a job on a GPU calls be on disk before anything has a deadline."""
    subprocess.run([sys.executable, "-m", "zico.base.warming"], timeout=2 * PATIENCE_S, check=True)


def environment(directory: Path, more: str = "", **settings: Any) -> dict[str, str]:  # noqa: ANN401 - the twin's
    """Return variables for processes with a twin of these settings; ``more``: what each of them runs first."""
    return customised(directory, _SITE.format(tests=str(ROOT / "tests"), settings=settings, more=more))


def nvml(free_bytes: int) -> str:
    """Return what a process runs to have a management library that says how much of the first device is free."""
    return _NVML.format(directory=str(ROOT / "tests"), free_bytes=free_bytes)


class Process:
    """A Python process with a twin, spoken to line by line; dead when the block ends."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        """Start it."""
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environ,
        )
        self.pid = self.process.pid

    def __enter__(self) -> Process:  # noqa: PYI034 - final in effect
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)

    def line(self) -> str:
        """Return its next line; fail with what it wrote to stderr if there is none in time."""
        return read_line(self.process)

    def tell(self, order: str) -> None:
        """Give an order; the answer is its next line."""
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def ask(self, order: str) -> str:
        """Give an order and return the answer."""
        self.tell(order)
        return self.line()

    def finish(self) -> tuple[int, str]:
        """Wait for its end; return exit code and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors
