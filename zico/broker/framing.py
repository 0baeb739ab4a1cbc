"""Bytes in, messages out: a four-byte big-endian length, then one msgpack map.

Guarantees: no frame longer than ``MAX_FRAME_BYTES`` is buffered, whatever its header says; whatever bytes
arrive, in whatever pieces, the only error is ``RemoteProtocolError``; after it the reader stays broken.
"""

from __future__ import annotations

import re
import reprlib

import msgspec

from zico.broker.messages import MAX_FRAME_BYTES, Message
from zico.errors import LocalProtocolError, RemoteProtocolError

HEADER_BYTES = 4
_DECODER = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()
_NOT_DECODED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_NOT_ENCODED = (msgspec.MsgspecError, UnicodeEncodeError, OverflowError, TypeError)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")  # of the path that msgspec gives, such as $.jobs[1].limit_bytes


def encode_frame(message: Message) -> bytes:
    """Return the frame of ``message``.

    Raises:
        LocalProtocolError: A field is outside its bounds or the frame would be too long; the peer would
            refuse it.
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
        """Begin with nothing received."""
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
        except _NOT_DECODED as error:
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
    except (*_NOT_DECODED, LookupError, TypeError):
        return str(error)
    return f"{error}, not {reprlib.repr(value)}" if path else str(error)
