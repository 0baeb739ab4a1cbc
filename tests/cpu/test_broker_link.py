"""The broker's end of a connection: nothing unbounded, nothing endless."""

from __future__ import annotations

import selectors
import socket
from typing import TYPE_CHECKING

import pytest
from cpu.support.broker_messages import STATUS, no_descriptor_left

from zico.base.errors import RemoteProtocolError
from zico.broker.link import PATIENCE_NS, Link
from zico.broker.members import Member
from zico.broker.notes import Process
from zico.broker.protocol import messages as m
from zico.broker.protocol.connection import FrameReader, encode_frame

if TYPE_CHECKING:
    from collections.abc import Iterator

OBSERVE = encode_frame(m.Observe(m.PROTOCOL_VERSION))
ASK = encode_frame(m.StatusRequest())


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Link]]:
    """Give a peer's socket and the broker's link to it, accepted at time 0; no descriptor may stay."""
    with no_descriptor_left():
        peer, accepted = socket.socketpair()
        link = Link(accepted, now_ns=0)
        with peer:
            yield peer, link
        link.close()


def answer_all(link: Link, now_ns: int) -> int:
    """Answer every request that may be looked at; return how many."""
    answered = 0
    while (message := link.next_message()) is not None:
        if isinstance(message, m.StatusRequest):
            link.say(STATUS, now_ns)
            answered += 1
    return answered


def test_a_flood_of_requests_waits_for_the_answers_to_be_taken(ends: tuple[socket.socket, Link]) -> None:
    """Of many requests in one piece only those are answered whose answers fit; the rest follow as they are taken."""
    peer, link = ends
    n = 300
    peer.sendall(OBSERVE + ASK * n)
    link.read(1)
    answered = answer_all(link, 1)
    assert 0 < answered < n
    assert link.interest == selectors.EVENT_WRITE
    reader = FrameReader()
    peer.settimeout(10)
    taken = 0
    while taken < n:
        taken += len(reader.feed(peer.recv(1 << 20)))
        link.flush()
        answered += answer_all(link, 2)
    assert answered == taken == n
    assert link.interest == selectors.EVENT_READ
    assert link.deadline_ns is None


def test_patience_is_owed_a_first_message(ends: tuple[socket.socket, Link]) -> None:
    """A peer that says nothing at first has the patience from being accepted, and none is counted afterwards."""
    peer, link = ends
    assert link.deadline_ns == PATIENCE_NS
    link.read(5)
    assert link.deadline_ns == PATIENCE_NS
    peer.sendall(OBSERVE)
    link.read(6)
    assert link.deadline_ns is None


def test_patience_counts_from_a_frames_first_byte(ends: tuple[socket.socket, Link]) -> None:
    """Bytes that drip in do not renew the patience; the frame's end ends it."""
    peer, link = ends
    peer.sendall(OBSERVE)
    link.read(5)
    for now_ns, byte in enumerate(ASK, start=10):
        peer.sendall(bytes([byte]))
        link.read(now_ns)
        assert link.deadline_ns == (None if byte is ASK[-1] and now_ns == 9 + len(ASK) else 10 + PATIENCE_NS)


def test_patience_counts_while_an_answer_is_not_taken(ends: tuple[socket.socket, Link]) -> None:
    """A peer that asks and does not read has the patience from the first answer that did not fit."""
    peer, link = ends
    peer.sendall(OBSERVE + ASK * 100)
    link.read(5)
    answer_all(link, 7)
    assert link.deadline_ns == 7 + PATIENCE_NS


def test_a_second_request_before_the_answer_is_no_fault(ends: tuple[socket.socket, Link]) -> None:
    """Requests that came together are answered in order, since each is looked at after the one before."""
    peer, link = ends
    peer.sendall(OBSERVE + ASK + ASK)
    link.read(1)
    assert answer_all(link, 1) == 2


def test_what_comes_after_the_end_is_ignored(ends: tuple[socket.socket, Link]) -> None:
    """After a refusal the peer's further messages are neither answered nor an error."""
    peer, link = ends
    peer.sendall(encode_frame(m.Observe(99)) + ASK)
    link.read(1)
    assert link.next_message() == m.Observe(99)
    link.say(m.Refused("version"), 1)
    assert link.next_message() is None
    assert link.is_done


@pytest.mark.parametrize("is_member", [False, True])
def test_descriptors_from_a_peer_are_refused(ends: tuple[socket.socket, Link], *, is_member: bool) -> None:
    """A peer that sends descriptors breaks the protocol, also as a member, and they are closed."""
    peer, link = ends
    if is_member:
        link.member = Member(
            name="a", process=Process(1, 0), job=0, framework="torch", share=m.Share(), index=0, pid=1, record=None
        )
    with no_descriptor_left():
        socket.send_fds(peer, [OBSERVE], [peer.fileno()])
        with pytest.raises(RemoteProtocolError, match="more descriptors than the 0"):
            link.read(1)
