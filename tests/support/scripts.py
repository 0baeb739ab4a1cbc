"""Jobs with a framework: Python processes started as ``zico run`` starts them, and scripts of checks in them."""

from __future__ import annotations

import ast
import json
import os
import re
import select
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from support.harness import ANSWER_S, PATIENCE_S, Pool, Value, clean_environment, compile_once, until, warm
from zico.broker.saving import Wish
from zico.launch.jobs import job_environment
from zico.pool.layout import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zico.broker.protocol.messages import SaveMode

_IMPORTS = re.compile(r"^import (torch|tensorflow|keras)\b", re.MULTILINE)


class Script:
    """A Python process with its output; dead when the block ends."""

    def __init__(
        self,
        arguments: list[str],
        environment: Mapping[str, str],
        under: Sequence[str] = (),
        *,
        loaded: str = "",
        fresh: bool = False,
    ) -> None:
        """Start it.

        Args:
            arguments: A script and what it is told.
            environment: All of its environment.
            under: A command that is to run it.
            loaded: A framework that is loaded when it begins (``warm``): the one that it imports if
                none is named.
            fresh: Let it import its framework itself.
        """
        if not loaded and not fresh and not under:
            found = _IMPORTS.search(Path(arguments[0]).read_text())
            loaded = found[1] if found else ""
        command = warm(loaded.replace("tensorflow", "keras")) if loaded else [sys.executable]
        self.process = subprocess.Popen(
            [*under, *command, *arguments],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        self._unread = b""

    def __enter__(self) -> Self:
        """Return the process."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate(timeout=ANSWER_S)

    def tell(self, line: str) -> None:
        """Write a line to its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def line(self, within_s: float = PATIENCE_S) -> str:
        """Return its next line; fail with what it complained of if there is none in time."""
        stdout = self.process.stdout
        assert stdout is not None
        end_s = time.monotonic() + within_s
        while b"\n" not in self._unread and select.select([stdout], [], [], max(0, end_s - time.monotonic()))[0]:
            data = os.read(stdout.fileno(), 4096)  # not by the stream, which would read ahead of ``select``
            if not data:
                break
            self._unread += data
        line, end, rest = self._unread.partition(b"\n")
        if not end:
            self.process.kill()
            _, errors = self.process.communicate(timeout=ANSWER_S)
            raise AssertionError(f"said nothing within {within_s:g} s: {errors}")
        self._unread = rest
        return line.decode().strip()

    def until(self, look: Callable[[], Value], what: str, within_s: float = PATIENCE_S) -> Value:
        """Return the first truthy value of ``look``; fail if there is none in time, and at once if the process ends."""

        def looked() -> Value:
            code = self.process.poll()  # first: what it did before its end counts
            value = look()
            if not value and code is not None:
                _, errors = self.process.communicate(timeout=ANSWER_S)
                raise AssertionError(f"it has ended with {code} before: {what}: {errors}")
            return value

        return until(looked, within_s, what)

    def finish(self, within_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Wait for its end and return what it wrote."""
        output, errors = self.process.communicate(timeout=within_s)
        output = self._unread.decode() + output
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, output, errors)


def job(
    pool: Pool, name: str, *arguments: object, fresh: bool = False, save: SaveMode | None = None, limit_bytes: int = 0
) -> Script:
    """Start a Python job in the pool as ``zico run`` does."""
    environment = job_environment(clean_environment(), pool.socket, name, wish=Wish(save, limit_bytes=limit_bytes))
    return Script([str(argument) for argument in arguments], environment, fresh=fresh)


def alone(*arguments: object, fresh: bool = False) -> Script:
    """Start the same Python process without Zico."""
    environment = clean_environment() | {"PYTHONUNBUFFERED": "1"}
    return Script([str(argument) for argument in arguments], environment, fresh=fresh)


def zico_run(
    directory: Path, *options: str, commands: Mapping[str, Sequence[object]], **environ: str
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """Run Python commands as jobs of these names by ``zico run``, to their ends; fail unless all end well.

    Args:
        directory: Of the run, which leaves its report there.
        options: Of the command, but for regions, which are of 1 MiB.
        commands: What each job's interpreter is told.
        environ: What the jobs see besides.

    Returns:
        The report, and what has ended.
    """
    compile_once()
    report = directory / "report.json"
    words = ["--quiet", "--region", "1MiB", "--json", str(report), *options]
    words += [word for name in commands for word in ("--name", name)]
    words += [shlex.join([sys.executable, *map(str, command)]) for command in commands.values()]
    done = subprocess.run(
        [sys.executable, "-m", "zico", "run", *words],
        env=clean_environment() | {"XDG_RUNTIME_DIR": str(directory)} | environ,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text()), done


def place_of(pool: Pool, name: str, script: Script) -> int:
    """Return the place of the job with that name, as soon as it has joined; fail at once if its process ends before."""

    def found() -> list[int]:
        living = pool.jobs["state"] != JobState.EMPTY
        return np.flatnonzero(living & (pool.jobs["name"] == name.encode())).tolist()

    return script.until(found, f"{name} joins")[0]


def run_checks(
    script: Path, start: Callable[..., Script], *arguments: object, within_s: float = PATIENCE_S
) -> dict[str, Any]:
    """Run a script of checks to its end; returns what it found by the check's name."""
    with tempfile.TemporaryDirectory(prefix="zc-") as directory:
        results = Path(directory) / "results.json"
        with start(script, results, *arguments) as process:
            done = process.finish(within_s)
        assert results.exists(), done.stderr
        found: dict[str, Any] = json.loads(results.read_text())
    return found | {"exit": {"code": done.returncode, "stderr": done.stderr}}


def checks_in(script: Path) -> list[str]:
    """Return the names of a script's checks, in their order."""
    functions = [node for node in ast.parse(script.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [function.name for function in functions if function.name.startswith("check_")]
