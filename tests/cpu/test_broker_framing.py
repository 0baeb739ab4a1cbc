"""Frames: what goes in comes out, and nothing that a peer sends can do more than end its own connection."""

from __future__ import annotations

import itertools

import pytest
from cpu.support.broker_messages import EXAMPLES, LONGEST_NAME, REPORT, STATUS, WELCOME, framed, messages, raw_frame
from hypothesis import example, given
from hypothesis import strategies as st

from zico.base.errors import LocalProtocolError, RemoteProtocolError
from zico.broker.protocol import messages as m
from zico.broker.protocol.connection import HEADER_BYTES, FrameReader, encode_frame

WELCOMING = {name: getattr(WELCOME, name) for name in WELCOME.__struct_fields__ if name != "n_fds"}


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """Return ``data`` cut at these places, modulo its length."""
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[begin:end] for begin, end in itertools.pairwise(places)]


@given(st.lists(messages, max_size=3), st.lists(st.integers(0, 10**6), max_size=20))
def test_messages_survive_any_cuts(sent: list[m.Message], cuts: list[int]) -> None:
    """Messages cut into pieces anywhere come out the same, in order, and leave nothing behind."""
    reader = FrameReader()
    got = [message for piece in pieces_of(b"".join(map(encode_frame, sent)), cuts) for message in reader.feed(piece)]
    assert got == sent
    assert not reader.in_frame


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_survives_byte_by_byte(message: m.Message) -> None:
    """Each kind of message comes out at its last byte and not before."""
    reader = FrameReader()
    frame = encode_frame(message)
    for byte in frame[:-1]:
        assert reader.feed(bytes([byte])) == []
        assert reader.in_frame
    assert reader.feed(frame[-1:]) == [message]


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=8))
@example(b"\x00\x00\x00\x00", [])
@example(b"\xff\xff\xff\xff", [2])
def test_hostile_bytes_raise_only_the_protocol_error(data: bytes, cuts: list[int]) -> None:
    """Bytes out of nowhere, in any pieces, give messages or the one error."""
    reader = FrameReader()
    try:
        for piece in pieces_of(data, cuts):
            reader.feed(piece)
    except RemoteProtocolError:
        with pytest.raises(RemoteProtocolError):
            reader.feed(b"")


@given(st.binary(min_size=1, max_size=300))
def test_hostile_bodies_raise_only_the_protocol_error(body: bytes) -> None:
    """Bodies out of nowhere behind an honest length give a message or the one error."""
    try:
        (message,) = FrameReader().feed(framed(body))
    except RemoteProtocolError:
        return
    assert isinstance(message, m.Message)


@given(messages, st.data())
def test_damaged_frames_raise_only_the_protocol_error(message: m.Message, data: st.DataObject) -> None:
    """A good frame with one byte changed gives messages, the one error, or waits for more."""
    frame = bytearray(encode_frame(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        FrameReader().feed(bytes(frame))
    except RemoteProtocolError as error:
        assert str(error).startswith(("sent", "announced"))  # noqa: PT017 - no error is fine as well


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 60_000,  # lists in lists
        b"\x82\xa4type\xa6status\xa1q" + b"\x91" * 60_000,  # the same where the decoder skips a field
        b"\x82\xa4type\xa5error\xa6reason\xa2\xff\xff",  # no UTF-8
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand million
        b"\xc1",
        b"\x80",
        b"\xc0",
    ],
)
def test_known_attacks_raise_the_protocol_error(body: bytes) -> None:
    """Deep nesting, huge counts and broken text are refused."""
    with pytest.raises(RemoteProtocolError, match="no message"):
        FrameReader().feed(framed(body))


def test_too_long_is_refused_at_the_header() -> None:
    """A length over the limit is refused with the header's last byte, before any of the body is kept."""
    reader = FrameReader()
    length = (m.MAX_FRAME_BYTES + 1).to_bytes(HEADER_BYTES, "big")
    assert reader.feed(length[:-1]) == []
    with pytest.raises(RemoteProtocolError, match="147457 bytes, the limit is 147456"):
        reader.feed(length[-1:])
    with pytest.raises(RemoteProtocolError, match="147457"):
        reader.feed(encode_frame(m.Goodbye()))


def test_the_longest_frame_is_taken() -> None:
    """A frame of exactly the limit is read; it only fails for what it says."""
    with pytest.raises(RemoteProtocolError, match="no message"):
        FrameReader().feed(framed(b"\x00" * m.MAX_FRAME_BYTES))


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "hello", "version": -1, "name": "a", "pid": 1, "framework": "torch"},
        {"type": "hello", "version": 1, "name": "", "pid": 1, "framework": "torch"},
        {"type": "hello", "version": 1, "name": "a" * 49, "pid": 1, "framework": "torch"},
        {"type": "hello", "version": 1, "name": "a\x1b[2J", "pid": 1, "framework": "torch"},
        {"type": "hello", "version": 1, "name": "a\n", "pid": 1, "framework": "torch"},
        {"type": "hello", "version": 2**63, "name": "a", "pid": 1, "framework": "torch"},
        {"type": "hello", "version": "1", "name": "a", "pid": 1, "framework": "torch"},
        {"type": "hello", "version": 1, "name": "a", "pid": 1},
        {"type": "nothing"},
        {"type": "more", "first": 0, "count": 0},
        {"type": "more", "first": 0, "count": 129},
        {"type": "welcome", **WELCOMING, "n_fds": 2},
        {"type": "welcome", **WELCOMING, "n_fds": (1 << 20) + 1},
    ],
)
def test_fields_out_of_bounds_are_refused_by_both_ends(fields: dict[str, object]) -> None:
    """A field outside its bounds never becomes a message."""
    with pytest.raises(RemoteProtocolError):
        FrameReader().feed(raw_frame(**fields))


def test_we_do_not_send_what_the_peer_would_refuse() -> None:
    """A name that is too long or has control characters is our own fault, found before sending."""
    for name in ("", "a" * 49, "a\x00b"):
        with pytest.raises(LocalProtocolError):
            encode_frame(m.Hello(version=1, name=name, pid=1, framework="torch"))
    with pytest.raises(LocalProtocolError, match="the limit is 147456"):
        encode_frame(m.Status(**{**as_fields(STATUS), "jobs": STATUS.jobs * 3}))


def as_fields(message: m.Status) -> dict[str, object]:
    """Return a message's fields by name."""
    return {name: getattr(message, name) for name in message.__struct_fields__}


@pytest.mark.parametrize("message", [STATUS, REPORT], ids=["Status", "Report"])
def test_the_fullest_answers_fit(message: m.Message) -> None:
    """A status or report with every place taken and every field at its longest is within the limit."""
    assert len(encode_frame(message)) <= m.MAX_FRAME_BYTES
    assert LONGEST_NAME in {job.name for job in message.jobs}  # type: ignore[union-attr]
