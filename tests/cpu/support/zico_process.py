"""A ``zico run`` in a process of its own, read with deadlines and killed with all that it started."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType
    from typing import IO

DEADLINE_S = 300.0
"""The first broker on a machine compiles for about a minute."""
HEADLESS = """
import ctypes, os, threading
def rest():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        pass
    os.write(1, b".")
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=rest).start()
ctypes.CDLL(None).pthread_exit(None)
"""
"""Code: ends its first thread; another writes a byte when it has ended, and ends the process when stdin does."""
_DEAD_STATES = {"Z", "X"}


def python(code: str) -> str:
    """Return a command that runs ``code`` in this interpreter."""
    return shlex.join([sys.executable, "-c", code])


def customised(directory: Path, code: str) -> dict[str, str]:
    """Return variables with which Python processes run ``code`` first, and so do those that Zico starts from them.

    The former find it in ``PYTHONPATH``. The latter do not look there: they run an interpreter that
    has it in its own site packages.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site_packages = directory / "lib" / version / "site-packages"
    for folder in (directory / "bin", site_packages):
        folder.mkdir(parents=True)
    executable = directory / "bin" / "python"
    base = Path(sys._base_executable)  # type: ignore[attr-defined]
    executable.symlink_to(base)
    (directory / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    ours = [path for path in sys.path if path.endswith("-packages")]
    (site_packages / "it.pth").write_text(f"{directory}\nimport site; list(map(site.addsitedir, {ours}))\n")
    (directory / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(executable)!r}\n{code}")
    return {"PYTHONPATH": str(directory)}


def is_alive(pid: int) -> bool:
    """Say whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in _DEAD_STATES


def survivors(pids: list[int], timeout_s: float = 10.0) -> list[int]:
    """Return those still alive after all were given ``timeout_s`` to end; they are killed."""
    deadline_s = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as nothing:
        while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
            nothing.select(0.02)
    left = [pid for pid in pids if is_alive(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def descendants(pid: int) -> list[int]:
    """Return the living processes below ``pid``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


class ZicoRun:
    """``zico run`` or another command, in a runtime directory of its own; all below it is dead when the block ends."""

    def __init__(
        self,
        *arguments: str,
        command: str = "run",
        program: Sequence[str] = (sys.executable, "-m", "zico"),
        **environ: str,
    ) -> None:
        """Start it."""
        self.runtime = Path(tempfile.mkdtemp(prefix="zr-"))
        self._out = {"stdout": b"", "stderr": b""}
        self.process = subprocess.Popen(
            [*program, command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"XDG_RUNTIME_DIR": str(self.runtime), "ZICO_BUDGET": "64MiB"} | environ,
            start_new_session=True,
        )
        self._selector = selectors.DefaultSelector()
        for name in self._out:
            self._selector.register(self.pipe(name), selectors.EVENT_READ, name)

    def __enter__(self) -> Self:
        """Return the run."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill whatever is left."""
        below = descendants(self.process.pid)
        self.process.kill()
        self.process.wait(timeout=DEADLINE_S)
        survivors(below, timeout_s=0)
        self._selector.close()
        for name in self._out:
            self.pipe(name).close()
        shutil.rmtree(self.runtime, ignore_errors=True)

    def pipe(self, name: str) -> IO[bytes]:
        """Return our end of its ``stdout`` or ``stderr``."""
        return cast("IO[bytes]", getattr(self.process, name))

    @property
    def stdout(self) -> str:
        """Return what it has written so far."""
        return self._out["stdout"].decode(errors="surrogateescape")

    @property
    def stderr(self) -> str:
        """Return what it has written to standard error so far."""
        return self._out["stderr"].decode(errors="surrogateescape")

    def read_until(self, text: str) -> None:
        """Read until one of the streams contains ``text``."""
        deadline_s = time.monotonic() + DEADLINE_S
        while text not in self.stdout and text not in self.stderr:
            assert self._selector.get_map(), f"ended without {text!r}: {self.stdout}{self.stderr}"
            assert time.monotonic() < deadline_s, f"no {text!r} in time: {self.stdout}{self.stderr}"
            self._read()

    def until(self, look: Callable[[], object]) -> None:
        """Read until ``look`` returns something true."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not look():
            assert time.monotonic() < deadline_s, f"not in time: {self.stdout}{self.stderr}"
            self._read(0.02)

    def close_stdout(self) -> None:
        """Stop reading its standard output."""
        self._selector.unregister(self.pipe("stdout"))
        self.pipe("stdout").close()

    def finish(self) -> int:
        """Read to the end and return the exit code."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self._selector.get_map():
            assert time.monotonic() < deadline_s, f"does not end: {self.stdout}{self.stderr}"
            self._read()
        return self.process.wait(timeout=DEADLINE_S)

    def number_after(self, text: str) -> int:
        """Wait for ``text`` and a number after it on its line, and return the number."""
        self.read_until(text)
        rest = (self.stdout + self.stderr).partition(text)[2]
        while "\n" not in rest:
            self._read()
            rest = (self.stdout + self.stderr).partition(text)[2]
        return int(rest.split()[0])

    @property
    def leftovers(self) -> list[Path]:
        """Return the run directories that were not removed."""
        return list(self.runtime.glob("zico/run-*"))

    def _read(self, wait_s: float = 1.0) -> None:
        for key, _ in self._selector.select(wait_s):
            chunk = os.read(key.fd, 65536)
            self._out[key.data] += chunk
            if not chunk:
                self._selector.unregister(key.fileobj)


@contextlib.contextmanager
def fifos(directory: Path, names: str) -> Iterator[dict[str, int]]:
    """Stand in a directory with a pipe ``fifoN`` for each name N; gives the ends that jobs which read them wait for."""
    with contextlib.chdir(directory), contextlib.ExitStack() as opened:
        ends = {}
        for name in names:
            os.mkfifo(f"fifo{name}")
            ends[name] = os.open(f"fifo{name}", os.O_RDWR)
            opened.callback(os.close, ends[name])
        yield ends
