"""One accepted connection: its socket, its protocol state, what is still to be sent, and its deadline.

Guarantees
    * It never blocks.
    * At most one answer is unsent. From a peer that does not take its answers nothing is read, and
      its next request is not looked at.
    * A peer that owes something has ``PATIENCE_NS``: its first message, the rest of a frame, or
      that it takes an answer.
"""

from __future__ import annotations

import collections
import contextlib
import selectors
from typing import TYPE_CHECKING

from zico.broker import transport
from zico.broker.protocol.connection import Connection, Role, State

if TYPE_CHECKING:
    import socket

    from zico.broker.members import Member
    from zico.broker.protocol.messages import BrokerMessage, Message

PATIENCE_NS = 10_000_000_000


class Link:
    """The broker's end of one connection. Owns the socket; ``close`` once."""

    def __init__(self, connection: socket.socket, now_ns: int) -> None:
        """Own ``connection``, which must not block, and expect its first message."""
        connection.settimeout(0)
        self.socket = connection
        self.peer = transport.peer_of(connection)
        self.protocol = Connection(Role.BROKER)
        self.member: Member | None = None
        self.fds_sent = 0
        """How many of the pool's descriptors the peer has been sent."""
        self._inbox: collections.deque[Message] = collections.deque()
        self._unsent = b""
        self._fds: tuple[int, ...] = ()
        self._owed_since_ns: int | None = now_ns

    @property
    def is_open(self) -> bool:
        """Return whether the socket is still ours."""
        return self.socket.fileno() >= 0

    @property
    def is_done(self) -> bool:
        """Return whether everything was said and taken."""
        return self.protocol.state is State.CLOSED and not self._unsent

    @property
    def interest(self) -> int:
        """Return the selector's events to wait for."""
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    @property
    def deadline_ns(self) -> int | None:
        """Return when patience ends, ``None`` while the peer owes nothing."""
        return None if self._owed_since_ns is None else self._owed_since_ns + PATIENCE_NS

    def read(self, now_ns: int) -> None:
        """Take in what has arrived.

        Raises:
            RemoteProtocolError: The peer broke the protocol.
            OSError: The connection is lost.
        """
        try:
            data, _ = transport.receive(self.socket)
        except BlockingIOError:
            return
        if not data:
            self.protocol.end_of_stream()
            return
        messages = self.protocol.receive(data)
        self._inbox.extend(messages)
        if messages or not self.protocol.in_frame:
            self._owed_since_ns = None
        if self.protocol.in_frame and self._owed_since_ns is None:
            self._owed_since_ns = now_ns

    def next_message(self) -> Message | None:
        """Return the next message, accepted; ``None`` if none is there or an answer is unsent.

        Raises:
            RemoteProtocolError: The peer may not say that now.
        """
        if self._unsent or not self._inbox or self.protocol.state is State.CLOSED:
            return None
        message = self._inbox.popleft()
        self.protocol.accept(message)
        return message

    def say(self, message: BrokerMessage, now_ns: int, fds: tuple[int, ...] = ()) -> None:
        """Send ``message``, as much as fits now; ``fds`` stay the caller's and must outlive the sending.

        Raises:
            OSError: The connection is lost.
        """
        self._unsent += self.protocol.send(message)
        self._fds += fds
        if self._owed_since_ns is None:
            self._owed_since_ns = now_ns
        self.flush()

    def flush(self) -> None:
        """Send what fits of what is unsent.

        Raises:
            OSError: The connection is lost.
        """
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent_bytes = transport.send(self.socket, self._unsent, self._fds)
                self._unsent = self._unsent[sent_bytes:]
                self._fds = ()
        if not self._unsent and not self.protocol.in_frame:
            self._owed_since_ns = None

    def close(self) -> None:
        """Close the socket; a second time does nothing."""
        self.socket.close()
