"""A daemon of NVIDIA's Multi-Process Service: where it is, which clients it has, and how a client's work is ended.

Under MPS a client may be killed with work on the GPU. That leaves the server and its other clients
in a state that NVIDIA does not define. ``terminate_client`` ends that work first. So whoever sends a
deadly signal calls ``end_work`` before.

Known limitations
    A process that others kill, or that ends by a fault of its own, is not seen before it is dead.

Standard library only: the process that ends the jobs of a killed run imports this module, too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

CONTROL = "nvidia-cuda-mps-control"
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
PERCENTAGE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""The most that a client may use of a GPU's multiprocessors, in percent; a lower one of the daemon's counts."""
ANSWER_S = 2.0
"""How long a daemon may take for a list."""
END_S = 5.0
"""How long a daemon may take to end the work of clients, its lists included."""

_DEFAULT_PIPES = "/tmp/nvidia-mps"  # noqa: S108 - where clients look when nothing is set (manual of MPS)
_PROC = Path("/proc")
_NAME = CONTROL[:15]  # as the kernel cuts it (proc(5), comm); the daemon and its servers have it in common
_DEAD_STATES = frozenset("ZX")
_HANDLED = ("SigIgn", "SigCgt")  # masks in proc_pid_status(5)
_silent: set[Path] = set()
"""Daemons that have not answered in time: none is waited for twice."""


def daemon_at(environ: Mapping[str, str]) -> Path | None:
    """Return the directory of an MPS daemon that processes in ``environ`` use anyway, ``None`` if there is none."""
    directory = Path(environ.get(PIPE_VARIABLE) or _DEFAULT_PIPES)
    return directory if (directory / "control").exists() else None


def is_process(pid: int) -> bool:
    """Tell whether a living process, as numbered here, is a daemon or a server of MPS."""
    try:
        name, _, state = (_PROC / str(pid) / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
    except OSError:
        return False
    return name == _NAME and state.split()[0] not in _DEAD_STATES


def clients(pipes: Path) -> dict[int, frozenset[int]] | None:
    """Return the clients of each server of a daemon; ``None`` if it does not tell within ``ANSWER_S`` a question."""
    servers = _asked(pipes, "get_server_list", ANSWER_S)
    if servers is None:
        return None
    found: dict[int, frozenset[int]] = {}
    for server in servers:
        its = _asked(pipes, f"get_client_list {server}", ANSWER_S)
        if its is None:
            return None
        found[server] = its
    return found


def end_work(pids: Collection[int], signum: int = signal.SIGKILL) -> None:
    """Let MPS end what processes have on a GPU that a signal will kill; waits ``END_S`` at most for each daemon.

    Those that handle the signal, or are no clients, are left alone.
    """
    doomed = frozenset(pid for pid in pids if _is_deadly(pid, signum))
    for pipes in {daemon_at(_environ_of(pid)) for pid in doomed} - _silent - {None}:
        end_work_at(pipes, doomed)


def end_work_at(pipes: Path | None, pids: Collection[int] | None = None) -> None:
    """Let a daemon end the work of those clients that are among some processes, or of all its clients."""
    if pipes is None or pipes in _silent:
        return
    end_s = time.monotonic() + END_S
    # Numbers of another pid namespace would be those of strangers.
    servers = {server: its for server, its in (clients(pipes) or {}).items() if is_process(server)}
    lines = [
        f"terminate_client {server} {pid}"
        for server, its in servers.items()
        for pid in sorted(its if pids is None else its.intersection(pids))
    ]
    if lines:
        _asked(pipes, "\n".join(lines), end_s - time.monotonic())


def _asked(pipes: Path, text: str, answer_s: float) -> frozenset[int] | None:
    """Return the numbers that the control program answers to lines of text; ``None`` if it fails or is late."""
    program = shutil.which(CONTROL)
    if program is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - the program that the user's PATH names
            [program],
            input=text + "\n",
            capture_output=True,
            text=True,
            env={**os.environ, PIPE_VARIABLE: str(pipes)},
            timeout=max(0.0, answer_s),
            check=False,
        )
    except subprocess.TimeoutExpired:
        _silent.add(pipes)
        return None
    except OSError:
        return None
    return frozenset(int(word) for word in done.stdout.split() if word.isdigit()) if done.returncode == 0 else None


def _environ_of(pid: int) -> dict[str, str]:
    """Return the variables with which a process was started; empty where that cannot be read."""
    try:
        words = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (word.partition(b"=") for word in words)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _is_deadly(pid: int, signum: int) -> bool:
    """Tell whether a signal ends a process at once: it neither handles nor ignores it."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    masks = (int(line.partition(":")[2], 16) for line in lines if line.startswith(_HANDLED))
    return signum == signal.SIGKILL or not any(mask >> (signum - 1) & 1 for mask in masks)
