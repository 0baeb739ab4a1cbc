"""A pool outlives its broker: what a broker notes down of its pool, and how the next one takes that pool over.

How it works
    Beside its socket a broker keeps a *note*: a small file that names its own process, the pool's
    settings, the identities of the pool's descriptors, and every job. The kernel keeps table and
    memory as long as some job has them open. The next broker at the socket opens them again by way
    of such a job (``/proc/PID/fd``, proc(5)), watches the processes of all jobs, and goes on.

Guarantees
    * A job is in the note before it gets a descriptor. So a record in the table that no note names
      belongs to no process, and its place is free.
    * A pool is taken over with all of its jobs or not at all. What stands in the way is said, with
      the jobs' names, and nothing has been changed.
    * A process counts as a job only by number and start together, so a number that the kernel has
      given to another process deceives nobody.

Known limitations: pools on the host only, since a job on a GPU closes the descriptors of its
memory. Pagers are not taken over: such a job is its own pager from the old broker's death on. A job
in another pid namespace is not watched, and keeps what it holds until the pool ends.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from zico import __version__
from zico.base.errors import BrokerError
from zico.broker.devices import HOST
from zico.broker.protocol.messages import PROTOCOL_VERSION, Share
from zico.pool.layout import VERSION
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.broker.members import Member

SCHEMA = "zico.broker.v1"
_START_FIELD = 19  # starttime in /proc/PID/stat, counted behind the name (proc_pid_stat(5))


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

    pid: int
    """0: the broker cannot see it."""
    started: int
    """In clock ticks after the machine's start."""

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
        if self.is_alive:  # so the descriptor is of this process, and of no later one of its number
            return pidfd
        os.close(pidfd)
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
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, OSError):
                status = os.stat(path)  # noqa: PTH116 - a link of the kernel's, not a path
                if Identity(status.st_dev, status.st_ino) == identity:
                    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                    if Identity.of(descriptor) == identity:
                        return descriptor
                    os.close(descriptor)  # it has just been closed there, and its number is another file's
        return None


def started_at(pid: int) -> int | None:
    """Return when a process started, in clock ticks after the machine's start; ``None`` if it is dead."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if state in "ZX" else int(fields[_START_FIELD - 1])


class Entry(msgspec.Struct, frozen=True):
    """One job in the note."""

    job: int
    """Its place in the table."""
    name: str
    framework: str
    process: Process
    share: Share

    def __str__(self) -> str:
        """Return what people call it."""
        return f"{self.name} (process {self.process.pid})"


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker notes down, in JSON."""

    schema_version: str = SCHEMA
    zico: str = __version__
    table_version: int = VERSION
    protocol_version: int = PROTOCOL_VERSION
    broker: Process
    device: str
    policy: str
    table: Identity
    pipe: Identity
    memory: Identity
    jobs: tuple[Entry, ...] = ()

    @property
    def living(self) -> tuple[Entry, ...]:
        """Return the jobs whose processes run."""
        return tuple(job for job in self.jobs if job.process.is_alive)

    @property
    def is_ours(self) -> bool:
        """Tell whether the broker was of this version of Zico."""
        ours = (SCHEMA, __version__, VERSION, PROTOCOL_VERSION)
        return (self.schema_version, self.zico, self.table_version, self.protocol_version) == ours


class Head(msgspec.Struct):
    """What notes of all versions of Zico have."""

    schema_version: str
    zico: str
    broker: Process
    device: str
    jobs: tuple[_Named, ...] = ()

    @property
    def living(self) -> tuple[_Named, ...]:
        """Return the jobs whose processes run."""
        return tuple(job for job in self.jobs if job.process.is_alive)


class _Named(msgspec.Struct):
    name: str
    process: Process

    def __str__(self) -> str:
        return f"{self.name} (process {self.process.pid})"


def note_path(socket: Path) -> Path:
    """Return where the broker of a socket keeps its note."""
    return socket.with_suffix(".json") if socket.suffix == ".sock" else socket.with_name(socket.name + ".json")


def read_head(socket: Path) -> Head | None:
    """Return what the note at a socket says of any version's broker; ``None`` if there is none that can be read."""
    try:
        return msgspec.json.decode(note_path(socket).read_bytes(), type=Head)
    except (OSError, msgspec.DecodeError):
        return None


def read_note(socket: Path) -> Note | None:
    """Return the note of the broker that is, or was, at a socket; ``None`` if there is none that can be read.

    Raises:
        BrokerError: A broker of another version wrote it, and it or one of its jobs lives.
    """
    try:
        content = note_path(socket).read_bytes()
        head = msgspec.json.decode(content, type=Head)
    except (OSError, msgspec.DecodeError):
        return None
    with contextlib.suppress(msgspec.DecodeError):
        note = msgspec.json.decode(content, type=Note)
        if note.is_ours:
            return note
    if head.broker.is_alive:
        raise BrokerError(
            f"the broker of {head.device} (process {head.broker.pid}) is of another Zico ({head.zico}, this is "
            f"{__version__}): end its jobs, then the broker by zico broker stop, before this Zico starts one"
        )
    if head.living:
        raise BrokerError(
            f"the pool of {head.device} is of another Zico ({head.zico}, this is {__version__}), which cannot be taken "
            f"over from {_named(head.living)}: wait until they end, or stop them, or go on with that Zico"
        )
    return None


class NoteKeeper:
    """Keep the note of one broker at its socket up to date; written whole or not at all."""

    def __init__(self, socket: Path, table: PoolTable, memory_fds: Sequence[int], *, device: str, policy: str) -> None:
        """Write nothing yet."""
        self._path = note_path(socket)
        self._base = Note(
            broker=Process(os.getpid(), started_at(os.getpid()) or 0),
            device=device,
            policy=policy,
            table=Identity.of(table.table_fd),
            pipe=Identity.of(table.notify_fd),
            memory=Identity.of(memory_fds[0]),
        )

    def write(self, members: Sequence[Member]) -> None:
        """Note these jobs down.

        Raises:
            BrokerError: The file cannot be written; the one before is still there.
        """
        entries = tuple(
            Entry(
                job=member.job,
                name=member.name,
                framework=member.framework,
                process=member.process,
                share=member.share,
            )
            for member in members
        )
        partial = self._path.with_name(self._path.name[:-1] + "~")
        try:
            partial.write_bytes(msgspec.json.encode(msgspec.structs.replace(self._base, jobs=entries)))
            partial.replace(self._path)
        except OSError as error:
            raise BrokerError(f"the broker cannot note its jobs in {self._path}: {error.strerror}") from error

    def close(self, members: Sequence[Member]) -> None:
        """Take the note away, unless there are jobs from which the next broker can take the pool over."""
        if not members:
            self._path.unlink(missing_ok=True)


class Inherited(NamedTuple):
    """A pool that was taken over; the table is the caller's to close."""

    table: PoolTable
    note: Note

    def has_open(self, process: Process) -> bool:
        """Tell whether a process has the table open, as jobs do; also where the kernel does not let us look."""
        try:
            descriptor = process.find(self.note.table)
        except PermissionError:
            return True
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is not None


def check_previous(socket: Path) -> bool:
    """Tell whether jobs of a dead broker live from whom the pool at a socket is to be taken over.

    Raises:
        BrokerError: They live, and the pool cannot be taken over; the message names them.
    """
    note = read_note(socket)
    if note is None or note.broker.is_alive or not note.living:
        return False
    if note.device != HOST:
        raise BrokerError(
            f"the pool of {note.device} cannot be taken over from {_named(note.living)}: only a pool on the host can; "
            "wait until they end, or stop them"
        )
    return True


def take_over(socket: Path) -> Inherited | None:
    """Take over the pool whose broker at a socket has died; the caller holds the socket's lock.

    Returns:
        ``None`` if no job is left.

    Raises:
        BrokerError: Jobs live, and the pool cannot be taken over; the message names them.
    """
    if not check_previous(socket):
        return None
    note = read_note(socket)
    assert note is not None  # noqa: S101 - as it has just been
    closed = []
    for entry in note.living:
        try:
            table = _open(note, entry.process)
        except PermissionError:
            closed.append(entry)
            continue
        if table is not None:
            return Inherited(table, note)
    if closed:
        raise BrokerError(
            f"the pool of {note.device} cannot be taken over from {_named(closed)}: the kernel does not show their "
            "open files (/proc/PID/fd); wait until they end, or stop them"
        )
    return None


def _open(note: Note, process: Process) -> PoolTable | None:
    """Open a pool by way of one of its jobs; ``None`` if that has not all of it."""
    found = []
    with contextlib.ExitStack() as undo:
        for identity in (note.memory, note.table, note.pipe):
            descriptor = process.find(identity)
            if descriptor is None:
                return None
            undo.callback(os.close, descriptor)
            found.append(descriptor)
        undo.pop_all()
    return PoolTable.take_over(*found)


def _named(entries: Sequence[Entry | _Named]) -> str:
    return ", ".join(map(str, entries))
