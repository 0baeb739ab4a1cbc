"""What a broker notes down of itself and its jobs, as anybody reads it: which processes, and which of them live.

The note lies beside the broker's socket. Its reader may be of another version of Zico, and needs
neither NumPy nor compiled code. What only the next broker needs of it: ``zico.broker.handover``.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from zico.base.decoding import WRONG
from zico.base.errors import ZicoError
from zico.base.processes import started_at
from zico.broker import transport

Kind = TypeVar("Kind")
CONNECT_S = 5.0
MOST_PID = 1 << 22
"""The kernel gives no process a higher number (PID_MAX_LIMIT)."""


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """What tells an open file from every other one."""

    device: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> Identity:
        """Return the identity of an open descriptor."""
        status = os.fstat(descriptor)
        return cls(status.st_dev, status.st_ino)


class Process(msgspec.Struct, frozen=True):
    """One process of this machine, by its number and its start."""

    pid: Annotated[int, msgspec.Meta(ge=0, le=MOST_PID)]
    """In the broker's pid namespace, 0: it has none there."""
    started: Annotated[int, msgspec.Meta(ge=0)]
    """In clock ticks after the machine's start."""

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the living process of that number; one that has ended has no start, and is nobody."""
        return cls(pid, started_at(pid) or 0)

    @property
    def is_alive(self) -> bool:
        """Tell whether the process still runs."""
        return self.pid > 0 and started_at(self.pid) == self.started

    def watch(self) -> int | None:
        """Return a descriptor, the caller's, that is readable when the process is dead; ``None`` if it is."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, pidfd)
            if self.is_alive:  # so the descriptor is of this process, and of no later one of its number
                undo.pop_all()
                return pidfd
        return None

    def find(self, identity: Identity) -> int | None:
        """Open again what the process has open; the caller closes it.

        Returns:
            ``None`` if the process does not have it open, or is dead.

        Raises:
            PermissionError: The kernel does not let us look.
        """
        try:
            names = os.listdir(f"/proc/{self.pid}/fd")  # noqa: PTH208 - names only
        except (FileNotFoundError, ProcessLookupError):
            return None
        for name in names:
            path = f"/proc/{self.pid}/fd/{name}"
            with contextlib.suppress(OSError):  # it has just been closed, or the process has ended
                status = os.stat(path)  # noqa: PTH116 - a link of the kernel's, not a path
                if Identity(status.st_dev, status.st_ino) == identity:
                    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                    if Identity.of(descriptor) == identity:
                        return descriptor
                    os.close(descriptor)  # it has just been closed there, and its number is another file's
        return None


NOT_SEEN = Process(0, 0)
"""A process of another pid namespace that has no number in the broker's."""


# -- what other users may know ---------------------------------------------------------------------

PROC = Path("/proc")
_MOST_MIB = 10**7 - 1  # the kernel keeps 15 characters (proc_pid_comm(5))
_SHOWN = re.compile(r"[0-9]+ \(zico ([0-9]+)MiB\) [^ZXx] ")  # the name and the state (proc_pid_stat(5))


def show_budget(budget_bytes: int) -> None:
    """Name this process by the budget of its pool on the host, which every user can read."""
    with contextlib.suppress(OSError):  # only what others take by default depends on it
        (PROC / "self/comm").write_text(f"zico {min(budget_bytes >> 20, _MOST_MIB)}MiB")


def shown_budgets_bytes(proc: Path = PROC) -> int:
    """Return the sum of the budgets of all brokers of this machine's memory that the kernel lets us see."""
    shown = 0
    for path in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found = _SHOWN.match(path.read_text(errors="replace"))
            shown += int(found[1]) << 20 if found else 0
    return shown


# --------------------------------------------------------------------------------------------------


class Head(msgspec.Struct):
    """What notes of all versions of Zico have."""

    schema_version: str
    zico: str
    broker: Process
    device: str
    jobs: tuple[NamedJob, ...] = ()

    @property
    def living(self) -> tuple[NamedJob, ...]:
        """Return the jobs whose processes run."""
        return tuple(job for job in self.jobs if job.process.is_alive)


class NamedJob(msgspec.Struct):
    """One job of such a note."""

    name: str
    process: Process

    def __str__(self) -> str:
        return f"{self.name} (process {self.process.pid})"


def note_path(socket: Path) -> Path:
    """Return where the broker of a socket keeps its note."""
    return socket.with_suffix(".json") if socket.suffix == ".sock" else socket.with_name(socket.name + ".json")


def read_head(socket: Path) -> Head | None:
    """Return what the note at a socket says of any version's broker; ``None`` if there is none that can be read."""
    return read(socket, Head)


def read(socket: Path, kind: type[Kind]) -> Kind | None:
    """Return what the note at a socket says, as far as a type has it; ``None`` if there is none that can be read."""
    try:
        return msgspec.json.decode(note_path(socket).read_bytes(), type=kind)
    except (OSError, *WRONG):  # a crash may leave anything
        return None


def is_served(head: Head, socket: Path) -> bool:
    """Tell whether the broker of a note lives; waits ``CONNECT_S`` at most.

    In another pid namespace, such as a container's, its number is nobody's or a stranger's. There it
    lives if it listens.
    """
    if head.broker.is_alive:
        return True
    try:
        transport.connect(socket, CONNECT_S).close()
    except ZicoError:
        return False
    return True
