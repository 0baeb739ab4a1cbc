"""The connection's table: who may say what when, the same from both ends."""

from __future__ import annotations

import itertools

import pytest
from cpu.support.broker_messages import BROKER_EXAMPLES, CLIENT_EXAMPLES, EXAMPLES
from hypothesis import given
from hypothesis import strategies as st

from zico.base.errors import LocalProtocolError, RemoteProtocolError
from zico.broker.protocol import messages as m
from zico.broker.protocol.connection import Connection, Role, State, next_state

HELLO, ASK_MORE, OUTSIDE, OBSERVE, ASK_STATUS, ASK_REPORT, CHANGE, GOODBYE = CLIENT_EXAMPLES
WELCOME, MORE, REFUSED, ERROR, STATUS, REPORT, CHANGED = BROKER_EXAMPLES

ALLOWED = {
    (State.NEW, Role.CLIENT, HELLO): State.JOINING,
    (State.NEW, Role.CLIENT, OUTSIDE): State.CLOSED,
    (State.NEW, Role.CLIENT, OBSERVE): State.OBSERVER,
    (State.JOINING, Role.BROKER, WELCOME): State.MEMBER,
    (State.MEMBER, Role.CLIENT, ASK_MORE): State.MORE_DUE,
    (State.MORE_DUE, Role.BROKER, MORE): State.MEMBER,
    (State.MEMBER, Role.CLIENT, GOODBYE): State.CLOSED,
    (State.OBSERVER, Role.CLIENT, ASK_STATUS): State.STATUS_DUE,
    (State.OBSERVER, Role.CLIENT, ASK_REPORT): State.REPORT_DUE,
    (State.OBSERVER, Role.CLIENT, CHANGE): State.CHANGE_DUE,
    (State.OBSERVER, Role.CLIENT, GOODBYE): State.CLOSED,
    (State.STATUS_DUE, Role.BROKER, STATUS): State.OBSERVER,
    (State.REPORT_DUE, Role.BROKER, REPORT): State.OBSERVER,
    (State.CHANGE_DUE, Role.BROKER, CHANGED): State.OBSERVER,
    **{
        (state, Role.BROKER, ending): State.CLOSED
        for state in State
        if state is not State.CLOSED
        for ending in (REFUSED, ERROR)
    },
}


def pair() -> tuple[Connection, Connection]:
    """Return the two ends of a new connection."""
    return Connection(Role.CLIENT), Connection(Role.BROKER)


def pass_on(sender: Connection, receiver: Connection, message: m.Message) -> None:
    """Say ``message`` at one end and let the other accept it."""
    (got,) = receiver.receive(sender.send(message))
    assert got == message
    receiver.accept(got)


def test_only_what_the_table_lists_is_allowed() -> None:
    """For every state, sender and message the answer is the one written down here again."""
    for case in itertools.product(State, Role, EXAMPLES):
        assert next_state(*case) == ALLOWED.get(case), case


def test_the_sender_is_at_fault() -> None:
    """What may not be said is a local error for who says it, a remote one for who hears it; nothing moves."""
    for state, role, message in itertools.product(State, Role, EXAMPLES):
        connection = Connection(role)
        connection.state = state
        peer = Role.BROKER if role is Role.CLIENT else Role.CLIENT
        if (state, role, message) not in ALLOWED:
            with pytest.raises(LocalProtocolError, match=type(message).__name__):
                connection.send(message)
        if (state, peer, message) not in ALLOWED:
            with pytest.raises(RemoteProtocolError, match=type(message).__name__):
                connection.accept(message)
        assert connection.state is state


def test_a_job_joins_and_leaves() -> None:
    """Hello, Welcome, the fetching of descriptors and Goodbye take both ends through the same states."""
    client, broker = pair()
    for sender, receiver, message, after in (
        (client, broker, HELLO, State.JOINING),
        (broker, client, WELCOME, State.MEMBER),
        (client, broker, ASK_MORE, State.MORE_DUE),
        (broker, client, MORE, State.MEMBER),
        (client, broker, GOODBYE, State.CLOSED),
    ):
        pass_on(sender, receiver, message)
        assert client.state is broker.state is after


def test_an_observer_asks_again_and_again() -> None:
    """An observer may ask as often as it likes, one question at a time."""
    client, broker = pair()
    pass_on(client, broker, OBSERVE)
    for question, answer in ((ASK_STATUS, STATUS), (ASK_REPORT, REPORT)) * 2:
        pass_on(client, broker, question)
        with pytest.raises(LocalProtocolError):
            client.send(question)
        pass_on(broker, client, answer)


def test_an_unsendable_message_changes_nothing() -> None:
    """After a message out of bounds the connection is where it was."""
    client, _ = pair()
    with pytest.raises(LocalProtocolError):
        client.send(m.Hello(version=1, name="", pid=1, framework="torch"))
    assert client.state is State.NEW
    assert client.send(HELLO)


@pytest.mark.parametrize("n_bytes", [1, 4, 5])
def test_an_end_inside_a_frame_is_the_peers_fault(n_bytes: int) -> None:
    """A stream that ends in the middle of a frame is an error, of which the peer can still be told."""
    client, broker = pair()
    broker.receive(client.send(HELLO)[:n_bytes])
    with pytest.raises(RemoteProtocolError, match="middle of a frame"):
        broker.end_of_stream()
    assert client.receive(broker.send(ERROR)) == [ERROR]
    assert broker.state is State.CLOSED


def test_an_end_between_frames_is_no_fault() -> None:
    """A stream may end where no frame has begun."""
    client, broker = pair()
    pass_on(client, broker, HELLO)
    broker.end_of_stream()
    assert broker.state is State.CLOSED


@given(st.lists(st.sampled_from(EXAMPLES), max_size=12))
def test_any_conversation_keeps_both_ends_together(said: list[m.Message]) -> None:
    """Whatever either end tries to say, both are in the same state after each message."""
    client, broker = pair()
    for message in said:
        for sender, receiver in ((client, broker), (broker, client)):
            try:
                frame = sender.send(message)
            except LocalProtocolError:
                continue
            for got in receiver.receive(frame):
                receiver.accept(got)
            assert client.state is broker.state
