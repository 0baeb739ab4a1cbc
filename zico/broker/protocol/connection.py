"""Who may say what when: one table for both ends of a connection, and no sockets.

The table::

    NEW --Hello--> JOINING --Welcome--> MEMBER --Goodbye--> CLOSED
    MEMBER --MoreRequest--> MORE_DUE --More--> MEMBER
    MEMBER --ShareRequest, Filled--> SHARE_DUE --Shared--> MEMBER --Unshare--> MEMBER
    NEW --Outside--> CLOSED
    NEW --Observe--> OBSERVER --StatusRequest--> STATUS_DUE --Status--> OBSERVER      (likewise for Report, and Change)

The broker may end any state by ``Refused`` or ``ErrorReply``. A message that the table does not
list is the fault of its sender. ``LocalProtocolError``: that is this end. ``RemoteProtocolError``:
that is the other.
"""

from __future__ import annotations

import enum
import re
import reprlib
from typing import Any

import msgspec

from zico.base.decoding import WRONG
from zico.base.errors import LocalProtocolError, RemoteProtocolError
from zico.broker.protocol import messages as m
from zico.broker.protocol.messages import MAX_FRAME_BYTES, Message

# -- bytes in, messages out: a four-byte big-endian length, then one msgpack map -------------------
#
# Guarantees: no frame longer than ``MAX_FRAME_BYTES`` is buffered, whatever its header says.
# Whatever bytes arrive, in whatever pieces, the only error is ``RemoteProtocolError``. After it the
# reader stays broken.

HEADER_BYTES = 4
_DECODER = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()
_NOT_ENCODED = (msgspec.MsgspecError, UnicodeEncodeError, OverflowError, TypeError)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")  # of the path that msgspec gives, such as $.jobs[1].limit_bytes


def encode_frame(message: Message) -> bytes:
    """Return the frame of ``message``.

    Raises:
        LocalProtocolError: A field is outside its bounds or the frame would be too long; the peer
            would refuse it.
    """
    try:
        body: bytes = _ENCODER.encode(message)
    except _NOT_ENCODED as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise LocalProtocolError(f"{type(message).__name__} takes {len(body)} bytes, the limit is {MAX_FRAME_BYTES}")
    try:
        _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be sent: {_fault(error, body)}") from error
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class FrameReader:
    """Collect one peer's bytes and take the messages out of them."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._broken: str | None = None

    @property
    def in_frame(self) -> bool:
        """Return whether a frame has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[Message]:
        """Take bytes and return the messages that are complete now, in order.

        Messages before a bad frame in the same piece are lost with it, as the connection is.

        Raises:
            RemoteProtocolError: A frame is empty, too long or no message; also on every later call.
        """
        if self._broken is not None:
            raise RemoteProtocolError(self._broken)
        messages = []
        rest = memoryview(data)
        while rest:
            rest = self._collect(rest)
            if self._is_complete():
                messages.append(self._decode())
        return messages

    def _collect(self, data: memoryview) -> memoryview:
        """Move what the header or the body still lacks into the buffer; return the rest."""
        wanted_bytes = HEADER_BYTES if len(self._buffer) < HEADER_BYTES else HEADER_BYTES + self._body_bytes()
        taken_bytes = wanted_bytes - len(self._buffer)
        self._buffer += data[:taken_bytes]
        if len(self._buffer) == HEADER_BYTES:
            self._check_length(self._body_bytes())
        return data[taken_bytes:]

    def _body_bytes(self) -> int:
        return int.from_bytes(self._buffer[:HEADER_BYTES], "big")

    def _is_complete(self) -> bool:
        return len(self._buffer) > HEADER_BYTES and len(self._buffer) == HEADER_BYTES + self._body_bytes()

    def _check_length(self, body_bytes: int) -> None:
        if body_bytes == 0:
            self._break("sent an empty frame")
        if body_bytes > MAX_FRAME_BYTES:
            self._break(f"announced a frame of {body_bytes} bytes, the limit is {MAX_FRAME_BYTES}")

    def _decode(self) -> Message:
        body = bytes(self._buffer[HEADER_BYTES:])
        self._buffer.clear()
        try:
            message: Message = _DECODER.decode(body)
        except WRONG as error:
            self._break(f"sent a frame that is no message: {_fault(error, body)}", error)
        return message

    def _break(self, reason: str, cause: Exception | None = None) -> None:
        self._broken = reason
        self._buffer.clear()
        raise RemoteProtocolError(reason) from cause


def _fault(error: Exception, body: bytes) -> str:
    """Return what is wrong with a frame's body: the range, the field and, where it can be had, the value."""
    _, _, path = str(error).partition(" - at `$")
    try:
        value = msgspec.msgpack.decode(body)
        for field, index in _STEP.findall(path):
            value = value[field or int(index)]
    except (*WRONG, LookupError, TypeError):
        return str(error)
    return f"{error}, not {reprlib.repr(value)}" if path else str(error)


# --------------------------------------------------------------------------------------------------


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
    SHARE_DUE = "share due"
    OBSERVER = "observer"
    STATUS_DUE = "status due"
    REPORT_DUE = "report due"
    CHANGE_DUE = "change due"
    CLOSED = "closed"


_BY_CLIENT: dict[State, dict[type[Any], State]] = {
    State.NEW: {m.Hello: State.JOINING, m.Outside: State.CLOSED, m.Observe: State.OBSERVER},
    State.MEMBER: {
        m.MoreRequest: State.MORE_DUE,
        m.ShareRequest: State.SHARE_DUE,
        m.Filled: State.SHARE_DUE,
        m.Unshare: State.MEMBER,
        m.Goodbye: State.CLOSED,
    },
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
    State.SHARE_DUE: {m.Shared: State.MEMBER},
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
            LocalProtocolError: This end may not say that now, or the message is out of bounds;
                nothing has changed.
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

        Apart from ``receive``, since the answer to one message decides whether the next one is
        allowed.

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
