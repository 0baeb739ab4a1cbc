"""Who may say what when: one table for both ends of a connection, and no sockets.

    NEW --Hello--> JOINING --Welcome--> MEMBER --Goodbye--> CLOSED
    MEMBER --MoreRequest--> MORE_DUE --More--> MEMBER              (likewise Pages and Paged)
    NEW --Observe--> OBSERVER --StatusRequest--> STATUS_DUE --Status--> OBSERVER      (likewise for Report, and Change)

The broker may end any state by ``Refused`` or ``ErrorReply``. A message that the table does not list is the
fault of its sender: ``LocalProtocolError`` if that is this end, ``RemoteProtocolError`` if it is the other.
"""

from __future__ import annotations

import enum
from typing import Any

from zico.broker import messages as m
from zico.broker.framing import FrameReader, encode_frame
from zico.errors import LocalProtocolError, RemoteProtocolError


class Role(enum.Enum):
    """Which end of a connection."""

    CLIENT = "client"
    BROKER = "broker"


class State(enum.Enum):
    """Where a connection is."""

    NEW = "new"
    JOINING = "joining"
    MEMBER = "member"
    MORE_DUE = "more due"
    PAGES_DUE = "pages due"
    OBSERVER = "observer"
    STATUS_DUE = "status due"
    REPORT_DUE = "report due"
    CHANGE_DUE = "change due"
    CLOSED = "closed"


_BY_CLIENT: dict[State, dict[type[Any], State]] = {
    State.NEW: {m.Hello: State.JOINING, m.Observe: State.OBSERVER},
    State.MEMBER: {m.MoreRequest: State.MORE_DUE, m.Pages: State.PAGES_DUE, m.Goodbye: State.CLOSED},
    State.OBSERVER: {
        m.StatusRequest: State.STATUS_DUE,
        m.ReportRequest: State.REPORT_DUE,
        m.Change: State.CHANGE_DUE,
        m.Goodbye: State.CLOSED,
    },
}
_BY_BROKER: dict[State, dict[type[Any], State]] = {
    State.JOINING: {m.Welcome: State.MEMBER},
    State.MORE_DUE: {m.More: State.MEMBER},
    State.PAGES_DUE: {m.Paged: State.MEMBER},
    State.STATUS_DUE: {m.Status: State.OBSERVER},
    State.REPORT_DUE: {m.Report: State.OBSERVER},
    State.CHANGE_DUE: {m.Changed: State.OBSERVER},
}
_ENDINGS: dict[type[Any], State] = {m.Refused: State.CLOSED, m.ErrorReply: State.CLOSED}


def next_state(state: State, sender: Role, message: m.Message) -> State | None:
    """Return the state after ``sender`` has said ``message``, ``None`` if it may not say that now."""
    table = _BY_CLIENT if sender is Role.CLIENT else _BY_BROKER
    allowed = table.get(state, {})
    if sender is Role.BROKER and state is not State.CLOSED:
        allowed = allowed | _ENDINGS
    return allowed.get(type(message))


class Connection:
    """One end of a connection: messages out as bytes, bytes in as messages."""

    def __init__(self, role: Role) -> None:
        """Begin as ``role`` with nothing said."""
        self._role = role
        self._peer = Role.BROKER if role is Role.CLIENT else Role.CLIENT
        self._reader = FrameReader()
        self.state = State.NEW

    @property
    def in_frame(self) -> bool:
        """Return whether the peer has begun a frame and not ended it."""
        return self._reader.in_frame

    def send(self, message: m.Message) -> bytes:
        """Return the bytes that say ``message`` and move on.

        Raises:
            LocalProtocolError: This end may not say that now, or the message is out of bounds; nothing has
                changed.
        """
        after = next_state(self.state, self._role, message)
        if after is None:
            raise LocalProtocolError(f"{self._role.value} may not say {type(message).__name__} when {self.state.value}")
        frame = encode_frame(message)
        self.state = after
        return frame

    def receive(self, data: bytes) -> list[m.Message]:
        """Take bytes from the peer without acting on them; pass each message to ``accept``.

        Raises:
            RemoteProtocolError: The bytes are no messages.
        """
        return self._reader.feed(data)

    def accept(self, message: m.Message) -> None:
        """Let the peer have said ``message`` and move on.

        Apart from ``receive``, since the answer to one message decides whether the next one is allowed.

        Raises:
            RemoteProtocolError: The peer may not say that now.
        """
        after = next_state(self.state, self._peer, message)
        if after is None:
            raise RemoteProtocolError(
                f"{self._peer.value} may not say {type(message).__name__} when {self.state.value}"
            )
        self.state = after

    def end_of_stream(self) -> None:
        """Close after the peer's last byte.

        Raises:
            RemoteProtocolError: It ended in the middle of a frame; the peer may still be told.
        """
        if self._reader.in_frame:
            raise RemoteProtocolError("closed the connection in the middle of a frame")
        self.state = State.CLOSED
