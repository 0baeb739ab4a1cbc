"""What a job and its planning process say to each other arrives whole, or the wait for it ends."""

from __future__ import annotations

import signal
import socket
import threading
from typing import TYPE_CHECKING, NoReturn

import pytest

from zico.swap import planning_process
from zico.swap.planning_process import _Late, _Patience, _receive, _send

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give both ends of a connection; no wait of the first takes longer than a hundredth of a second."""
    ours, theirs = socket.socketpair()
    ours.settimeout(0.01)
    with ours, theirs:
        yield ours, theirs


def test_long_messages_arrive_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    """Also one that no buffer takes at once, and one without content."""
    ours, theirs = pair
    messages = [bytes(range(256)) * 20_000, b"", b"end"]
    patience = _Patience(1000)
    sending = threading.Thread(target=lambda: [_send(ours, each, patience.wait) for each in messages])
    sending.start()
    assert [_receive(theirs) for _ in messages] == messages
    sending.join()


@pytest.mark.parametrize("piece", [b"", b"\x05\0", b"\x05\0\0\0\0\0\0\0abcd"])
def test_a_peer_that_goes_is_noticed(pair: tuple[socket.socket, socket.socket], piece: bytes) -> None:
    """At the beginning of a message, in its length and in its content."""
    ours, theirs = pair
    theirs.sendall(piece)
    theirs.close()
    with pytest.raises(EOFError):
        _receive(ours, _Patience(10).wait)


def test_a_silent_peer_is_not_waited_for(pair: tuple[socket.socket, socket.socket]) -> None:
    """A message that does not end, and one that nobody takes, end the patience."""
    ours, theirs = pair
    theirs.sendall(b"\x05\0\0")
    with pytest.raises(_Late):
        _receive(ours, _Patience(3).wait)
    with pytest.raises(_Late):
        _send(ours, bytes(1 << 24), _Patience(3).wait)


def test_a_wait_counts_once_however_long_it_was() -> None:
    """So that a job may be stopped while it waits."""
    tries: list[None] = []

    def act() -> NoReturn:
        tries.append(None)
        raise TimeoutError

    with pytest.raises(_Late):
        _Patience(4.5).wait(act)
    assert len(tries) == 5


def test_a_dead_peer_sends_no_signal(pair: tuple[socket.socket, socket.socket]) -> None:
    """A script that leaves SIGPIPE to the kernel would be killed by it."""
    ours, theirs = pair
    theirs.close()
    heard: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, _frame: heard.append(number))
    try:
        with pytest.raises(BrokenPipeError):
            _send(ours, b"anybody", _Patience(3).wait)
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert heard == []


def test_a_process_gets_what_finds_compiled_code_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Zico's variables; others stay as they are."""
    for name in ("ZICO", "ZICO_SOCKET", "ZICO_OWNER_PID", "ZICO_CACHE_DIR", "OTHER"):
        monkeypatch.setenv(name, name)
    environment = planning_process._environment()
    assert {name for name in environment if name.startswith("ZICO")} - {"ZICO_COMPILER"} == {"ZICO_CACHE_DIR"}
    assert environment["OTHER"] == "OTHER"
