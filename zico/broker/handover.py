"""A pool outlives its broker: what a broker notes down of its pool, and how the next one takes that pool over.

How it works
    Beside its socket a broker keeps a *note*, a small file. It names the broker's process, the
    pool's settings, the identities of the pool's descriptors, and every job. The kernel keeps table
    and memory as long as some job has them open. The next broker at the socket opens them again by
    way of such a job (``/proc/PID/fd``, proc(5)). Then it watches the processes of all jobs, and
    goes on.

Guarantees
    * A job is in the note before it gets a descriptor. So a record in the table that no note names
      belongs to no process, and its place is free.
    * A pool is taken over with all of its jobs or not at all. What stands in the way is said, with
      the jobs' names, and nothing has been changed.
    * A process counts as a job only by number and start together, so a number that the kernel has
      given to another process deceives nobody.

Known limitations: pools on the host only, since a job on a GPU closes the descriptors of regions
that it has mapped. A job in another pid namespace is not watched, and keeps what it holds until the
pool ends.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from zico import __version__
from zico.base.decoding import fields_for
from zico.base.errors import BrokerError
from zico.base.settings import HOST, kind_of
from zico.broker.members import Entry
from zico.broker.notes import Identity, NamedJob, Process, note_path, read, read_head
from zico.broker.protocol.messages import PROTOCOL_VERSION
from zico.pool.layout import VERSION
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SCHEMA = "zico.broker.v1"


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


def read_note(socket: Path) -> Note | None:
    """Return the note of the broker that is, or was, at a socket; ``None`` if there is none that can be read.

    Raises:
        BrokerError: A broker of another version wrote it, and it or one of its jobs lives.
    """
    head = read_head(socket)
    if head is None:
        return None
    note = read(socket, Note)
    if note is not None and note.is_ours:
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
        self._path = note_path(socket)
        self._base = Note(
            broker=Process.of(os.getpid()),
            device=device,
            policy=policy,
            table=Identity.of(table.table_fd),
            pipe=Identity.of(table.notify_fd),
            memory=Identity.of(memory_fds[0]),
        )

    def write(self, members: Sequence[Entry]) -> None:
        """Note these jobs down.

        Raises:
            BrokerError: The file cannot be written; the one before is still there.
        """
        entries = tuple(Entry(**fields_for(Entry, member)) for member in members)
        partial = self._path.with_name(self._path.name[:-1] + "~")
        try:
            partial.write_bytes(msgspec.json.encode(msgspec.structs.replace(self._base, jobs=entries)))
            partial.replace(self._path)
        except OSError as error:
            raise BrokerError(f"the broker cannot note its jobs in {self._path}: {error.strerror}") from error

    def close(self, members: Sequence[Entry]) -> None:
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
    if kind_of(note.device) != HOST:
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


def _named(entries: Sequence[NamedJob]) -> str:
    return ", ".join(map(str, entries))
