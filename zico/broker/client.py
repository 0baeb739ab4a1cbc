"""The other end: how a job joins and how anybody with the same user asks. Blocking, with a deadline."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from typing import TYPE_CHECKING, Self, TypeVar

from zico.base.errors import BrokerError, ConfigError, RemoteProtocolError, ZicoError
from zico.broker import transport
from zico.broker.devices import Device, open_driver
from zico.broker.protocol import messages as m
from zico.broker.protocol.connection import Connection, Role
from zico.broker.saving import DEFAULT_WISH, Wish
from zico.broker.transport import make_room

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from zico.pool.table import PoolTable

DEADLINE_S = 10.0

_Answer = TypeVar("_Answer", m.Welcome, m.More, m.Shared, m.Status, m.Report, m.Changed)


@dataclasses.dataclass(frozen=True)
class Membership:
    """A job's place in the pool, kept while ``connection`` is open.

    The descriptors are the caller's to close, or to hand over by ``map_pool``. ``leave`` ends the
    membership; so does the end of the process.
    """

    job: int
    region_bytes: int
    n_regions: int
    budget_bytes: int
    policy: str
    device: Device
    table_fd: int
    notify_fd: int
    memory_fds: tuple[int, ...]
    """The pool's memory in the order of its pieces: one on the host device, one for each region on a CUDA device."""
    connection: socket.socket
    protocol: Connection
    owner_pid: int
    path: Path
    """Where the broker listens."""

    @property
    def memory_fd(self) -> int:
        """Return the only descriptor of the memory of a pool on the host device."""
        (memory_fd,) = self.memory_fds
        return memory_fd

    def map_pool(self) -> PoolTable:
        """Map the pool by its device's driver; takes over the descriptors, also when it fails.

        Raises:
            BrokerError: The table has another version.
            DriverError: The device refuses, or this process does not see it.
        """
        from zico.pool.table import PoolTable

        with transport.Descriptors([*self.memory_fds, self.table_fd, self.notify_fd]) as owned:
            driver = open_driver(self.device)
            *memory_fds, table_fd, notify_fd = owned.take()
            return PoolTable.join_pool(memory_fds, table_fd, notify_fd, self.job, driver)

    def close_descriptors(self) -> None:
        """Close them, where ``map_pool`` is not going to."""
        transport.Descriptors([*self.memory_fds, self.table_fd, self.notify_fd]).close()

    def ask(
        self, question: m.ShareRequest | m.Filled, deadline_s: float = DEADLINE_S
    ) -> tuple[m.Shared, transport.Descriptors]:
        """Ask for memory that this job has in common with others, and return the answer with what came with it.

        Raises:
            BrokerError: The broker does not answer within the deadline, or it refuses. Nothing can
                be asked of it any more; the membership is what it was.
            RemoteProtocolError: What answers is no broker.
        """
        dialog = _Dialog(self.path, deadline_s, (self.connection, self.protocol))
        try:
            max_fds = 1 if isinstance(question, m.ShareRequest) else 0
            return dialog.ask(question, m.Shared, max_fds=max_fds), dialog.take_descriptors()
        finally:
            dialog.take_connection()

    def tell(self, message: m.Unshare, deadline_s: float = DEADLINE_S) -> None:
        """Tell the broker something that it does not answer.

        Raises:
            BrokerError: It does not read within the deadline.
        """
        dialog = _Dialog(self.path, deadline_s, (self.connection, self.protocol))
        try:
            dialog.say(message)
        finally:
            dialog.take_connection()

    def leave(self) -> None:
        """Say goodbye and close the connection; waits for nothing. A second time does nothing.

        The regions come back when this process ends, since until then it may use them. In a forked
        child only the child's copy of the connection is closed.
        """
        if self.connection.fileno() < 0:
            return
        if os.getpid() == self.owner_pid:
            # A broker that is gone needs no goodbye.
            with contextlib.suppress(OSError):
                self.connection.settimeout(0)
                self.connection.send(self.protocol.send(m.Goodbye()))
        self.connection.close()


class BrokerClient:
    """Ask the broker at a path; owns one connection for questions, from the first one to ``close``."""

    def __init__(self, path: Path, deadline_s: float = DEADLINE_S) -> None:
        """Remember where the broker is and how long each call may take; nothing is connected yet."""
        self._path = path
        self._deadline_s = deadline_s
        self._observer: _Dialog | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection for questions, not a membership; a second time does nothing."""
        if self._observer is not None:
            self._observer.close()
            self._observer = None

    def join(
        self,
        name: str,
        framework: str,
        share: m.Share = m.DEFAULT_SHARE,
        wish: Wish = DEFAULT_WISH,
        run: str = "",
    ) -> Membership:
        """Make this process a member of the pool, over a connection of its own.

        Args:
            name: Of the job.
            framework: Which joins.
            share: What the job gets beside the others.
            wish: How it goes on with less than its peak.
            run: The ``zico run`` that started it, as ``RunId`` says; empty: none.

        Raises:
            BrokerError: No broker answers within the deadline, or it refuses.
            RemoteProtocolError: What answers is no broker.
            LocalProtocolError: The name or the framework is empty, too long or has control
                characters, or the run is none.
            ConfigError: This process may not open as many descriptors as the pool has.
        """
        hello = m.Hello(
            version=m.PROTOCOL_VERSION,
            name=name,
            pid=os.getpid(),
            framework=framework,
            share=share,
            limit_bytes=wish.limit_bytes,
            save=wish.save or "none",
            run=run,
        )
        with _Dialog(self._path, self._deadline_s) as dialog:
            welcome = dialog.ask(hello, m.Welcome, max_fds=m.WELCOME_FDS)
            table_fd, notify_fd, *memory_fds = dialog.fetch(welcome.n_fds)
            return Membership(
                job=welcome.job,
                region_bytes=welcome.region_bytes,
                n_regions=welcome.n_regions,
                budget_bytes=welcome.budget_bytes,
                policy=welcome.policy,
                device=Device(welcome.device, welcome.device_id),
                table_fd=table_fd,
                notify_fd=notify_fd,
                memory_fds=tuple(memory_fds),
                connection=dialog.take_connection(),
                protocol=dialog.protocol,
                owner_pid=os.getpid(),
                path=self._path,
            )

    def status(self) -> m.Status:
        """Return how the pool is now.

        Raises:
            BrokerError: No broker answers within the deadline, or it refuses; the next call
                connects anew.
            RemoteProtocolError: What answers is no broker.
        """
        return self._observe(m.StatusRequest(), m.Status)

    def report(self, *, record: bool = True, profiles_to: Path | None = None) -> m.Report:
        """Return every job's figures so far; with ``record`` the broker has then also written its record file.

        With ``profiles_to`` it has written the profiles of the same jobs, in the same order, to that
        file, as a record without a history.

        Raises:
            BrokerError: No broker answers within the deadline, or it refuses; the next call
                connects anew.
            RemoteProtocolError: What answers is no broker.
        """
        asked = m.ReportRequest(record=record, profiles_to="" if profiles_to is None else str(profiles_to))
        return self._observe(asked, m.Report)

    def change(self, wanted: m.Change) -> int:
        """Change the pool's budget or what one job gets; when this returns it is so.

        Returns how many jobs' processes it was for.

        Raises:
            ConfigError: The pool cannot be changed so; nothing has been.
            BrokerError: No broker answers within the deadline, or it refuses; the next call
                connects anew.
            RemoteProtocolError: What answers is no broker.
            LocalProtocolError: A field is out of bounds.
        """
        answer = self._observe(wanted, m.Changed)
        if answer.refused:
            raise ConfigError(answer.refused)
        return answer.processes

    def _observe(self, question: m.ClientMessage, kind: type[_Answer]) -> _Answer:
        try:
            if self._observer is None:
                self._observer = _Dialog(self._path, self._deadline_s)
                self._observer.say(m.Observe(m.PROTOCOL_VERSION))
            self._observer.renew_deadline()
            return self._observer.ask(question, kind)
        except ZicoError:
            self.close()
            raise


class _Dialog:
    """One connection. Owns it and what arrives on it until taken; all that it does until renewed has one deadline."""

    def __init__(self, path: Path, deadline_s: float, opened: tuple[socket.socket, Connection] | None = None) -> None:
        self._path = path
        self._deadline_s = deadline_s
        self._end_s = time.monotonic() + deadline_s
        self._asked = ""
        self._max_fds = 0
        self._undo = contextlib.ExitStack()
        self._descriptors = self._undo.enter_context(transport.Descriptors([]))
        connection, self.protocol = opened or (transport.connect(path, deadline_s), Connection(Role.CLIENT))
        self._connection = self._undo.enter_context(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._undo.close()

    def renew_deadline(self) -> None:
        """Begin to count from now."""
        self._end_s = time.monotonic() + self._deadline_s

    def ask(self, question: m.ClientMessage, kind: type[_Answer], *, max_fds: int = 0) -> _Answer:
        """Say ``question`` and return the answer, of that kind; ``max_fds`` descriptors may come with it."""
        self._max_fds = max_fds
        self.say(question)
        message = self._next_message()
        if isinstance(message, m.Refused | m.ErrorReply):
            raise BrokerError(f"the broker at {self._path} refused {self._asked}: {message.reason}")
        if not isinstance(message, kind):
            raise RemoteProtocolError(f"the broker at {self._path} answered {self._asked} by {type(message).__name__}")
        return message

    def say(self, message: m.ClientMessage) -> None:
        """Send a message. A peer that has hung up may have said why, which the answer tells."""
        self._asked = type(message).__name__
        frame = self.protocol.send(message)
        try:
            transport.send_all(self._connection, frame, self._end_s)
        except TimeoutError as error:
            raise self._timed_out() from error
        except (BrokenPipeError, ConnectionResetError):
            return

    def fetch(self, n_fds: int) -> list[int]:
        """Hand over ``n_fds`` descriptors: those that came with the welcome, and the rest, asked for by the batch."""
        self._check_count(m.WELCOME_FDS)
        make_room(n_fds - len(self._descriptors), f"the pool behind {self._path}")
        while (first := len(self._descriptors)) < n_fds:
            expected = min(n_fds - first, m.FDS_PER_MESSAGE)
            more = self.ask(m.MoreRequest(), m.More, max_fds=expected)
            if (more.first, more.count) != (first, expected):
                raise RemoteProtocolError(
                    f"the broker at {self._path} announced {more.count} descriptors from {more.first} on, "
                    f"not {expected} from {first}"
                )
            self._check_count(first + expected)
        return self._descriptors.take()

    def take_descriptors(self) -> transport.Descriptors:
        """Hand over what has come so far."""
        return transport.Descriptors(self._descriptors.take())

    def _check_count(self, n_fds: int) -> None:
        if len(self._descriptors) != n_fds:
            raise RemoteProtocolError(
                f"the broker at {self._path} sent {len(self._descriptors)} descriptors, not {n_fds}"
            )

    def take_connection(self) -> socket.socket:
        """Hand over the connection, which does not block from here on; close what has come and was not taken."""
        self._descriptors.close()
        self._undo.pop_all()
        self._connection.settimeout(0)
        return self._connection

    def _next_message(self) -> m.Message:
        while True:
            messages = self.protocol.receive(self._more())
            if messages:
                self.protocol.accept(messages[0])
                return messages[0]

    def _more(self) -> bytes:
        """Return the next bytes; keep the descriptors that come with them."""
        try:
            data, descriptors = transport.receive_within(self._connection, self._end_s, max_fds=self._max_fds)
        except TimeoutError as error:
            raise self._timed_out() from error
        except ConnectionResetError:
            data, descriptors = b"", transport.Descriptors([])
        self._max_fds -= len(descriptors)
        self._descriptors.add(descriptors)
        if not data:
            self.protocol.end_of_stream()
            raise BrokerError(f"the broker at {self._path} went away without answering {self._asked}")
        return data

    def _timed_out(self) -> BrokerError:
        return BrokerError(
            f"broker {self._path} did not answer {self._asked} within {self._deadline_s:g} s (deadline_s)"
        )
