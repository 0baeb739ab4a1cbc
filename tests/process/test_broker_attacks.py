"""Peers that break the protocol harm only themselves, and brokers that are none cost a job a deadline."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from cpu.support.broker_messages import WELCOME, framed, no_descriptor_left, raw_frame
from process.support.broker_process import PATIENCE_S, REGION_BYTES, Broker, job, read_line, start_python, tell

from zico.base.errors import BrokerError, RemoteProtocolError
from zico.broker import transport
from zico.broker.client import BrokerClient
from zico.broker.protocol import messages as m
from zico.broker.protocol.connection import FrameReader, encode_frame
from zico.pool.layout import NAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOMEBODY_ELSE = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as somebody else")

HELLO = m.Hello(version=m.PROTOCOL_VERSION, name="raw", pid=1, framework="torch")


@contextlib.contextmanager
def raw(broker: Broker) -> Iterator[socket.socket]:
    """Give a plain connection to the broker."""
    with transport.connect(broker.socket, 20) as connection:
        connection.settimeout(20)
        yield connection


def replies(connection: socket.socket) -> list[m.Message]:
    """Return everything that the broker says until it hangs up."""
    reader = FrameReader()
    got: list[m.Message] = []
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            got += reader.feed(data)
    return got


def test_too_many_connections_are_refused_and_the_rest_served(undisturbed: Broker) -> None:
    """Connections over the limit are told so; those below it, and new ones after, are served."""
    with contextlib.ExitStack() as connections:
        silent = [connections.enter_context(raw(undisturbed)) for _ in range(140)]
        refused = [end for end in silent[-5:] if isinstance(replies(end)[-1], m.Refused)]
        assert len(refused) == 5
    end_s = time.monotonic() + 5
    while not is_served(undisturbed):
        assert time.monotonic() < end_s


def test_a_broker_without_descriptors_turns_connections_away(undisturbed: Broker) -> None:
    """A connection for which the broker has no descriptor is hung up on; others, and new ones after, are served."""
    pid = undisturbed.process.pid
    undisturbed.client.status()
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    with contextlib.ExitStack() as connections:
        ends = [connections.enter_context(raw(undisturbed)) for _ in range(highest)]
        assert replies(ends[-1]) == []
        undisturbed.client.status()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert is_served(undisturbed)


def is_served(broker: Broker) -> bool:
    """Tell whether a new connection is not refused; a refusal may close it before we have spoken."""
    with raw(broker) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(encode_frame(m.Observe(m.PROTOCOL_VERSION)) + encode_frame(m.Goodbye()))
        return replies(connection) == []
    return False


ATTACKS = {
    "garbage": (framed(b"\xc1\xff\x00garbage"), "no message"),
    "a huge frame": (b"\x7f\xff\xff\xff" + bytes(1000), "2147483647 bytes, the limit is 147456"),
    "an empty frame": (bytes(4), "empty frame"),
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n", "the limit is 147456"),
    "an unknown message": (raw_frame(type="format disk"), "no message"),
    "a broker's message": (encode_frame(m.Refused("you")), "may not say Refused"),
    "a question before a greeting": (encode_frame(m.StatusRequest()), "may not say StatusRequest"),
    "a second greeting": (encode_frame(HELLO) * 2, "may not say Hello"),
    "a member's question": (encode_frame(HELLO) + encode_frame(m.ReportRequest()), "may not say ReportRequest"),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_peer_that_breaks_the_protocol_is_told_and_dropped(undisturbed: Broker, attack: tuple[bytes, str]) -> None:
    """Whatever is wrong, the peer gets an error that says so, the broker no open descriptor, the others no trouble."""
    data, complaint = attack
    before = descriptors_of(undisturbed) - len(undisturbed.names())
    with raw(undisturbed) as connection:
        connection.sendall(data)
        last = replies(connection)[-1]
    assert isinstance(last, m.ErrorReply)
    assert complaint in last.reason
    # One pidfd stays for each member, also for an attacker that had become one, since this process
    # lives.
    assert descriptors_of(undisturbed) - len(undisturbed.names()) == before


def descriptors_of(broker: Broker) -> int:
    """Return how many descriptors the broker has now that it has answered once more."""
    broker.names()
    return len(list(Path(f"/proc/{broker.process.pid}/fd").iterdir()))


EXTREMES: tuple[dict[str, object], ...] = (
    {"limit_bytes": 2**63 - 1},
    {"limit_bytes": m.MAX_SIZE_BYTES},
    {"pid": 2**63 - 1},
    {"version": 2**64 - 1},
    {"share": {"weight": 5e-324, "priority": -1000, "slo": 5e-324, "compute": 5e-324}},
    {"share": {"weight": math.inf}},
    {"share": {"slo": math.nan}},
    {"framework": "\N{GRINNING FACE}" * 48},
)


def test_numbers_at_their_extremes_end_no_broker(start: Callable[..., Broker]) -> None:
    """Beside a peer that says them an honest job goes on to iterate, and the broker ends cleanly, with its record."""
    broker = start("--policy", "claims")
    with job(broker, "honest", hold=2) as honest:
        for extreme in EXTREMES:
            with raw(broker) as member, raw(broker) as observer:
                member.sendall(raw_frame(**{"type": "hello", **msgspec.structs.asdict(HELLO), **extreme}))
                observer.sendall(encode_frame(m.Observe(m.PROTOCOL_VERSION)))
                observer.sendall(raw_frame(type="change", job="raw", limit_bytes=m.MAX_SIZE_BYTES))
                observer.sendall(raw_frame(type="change", budget_bytes=2**63 - 1))
                assert isinstance(replies(observer)[-1], m.ErrorReply)
                entry = next(entry for entry in broker.client.status().jobs if entry.name == "honest")
                assert (entry.held_bytes, entry.limit_bytes, entry.share) == (2 * REGION_BYTES, 0, m.Share())
            tell(honest, "iterate")
            while read_line(honest) != "began":
                pass
        assert broker.client.report().jobs[0].iterations == len(EXTREMES)
    code, words = broker.end()
    assert (code, "Traceback" in words) == (0, False)
    assert broker.record.exists()


@pytest.mark.parametrize("n_bytes", [1, 4, 10])
def test_a_truncated_frame_ends_only_its_own_connection(undisturbed: Broker, n_bytes: int) -> None:
    """A peer that hangs up in the middle of a frame is told so, if it still listens, and nobody else notices."""
    with raw(undisturbed) as connection:
        connection.sendall(encode_frame(HELLO)[:n_bytes])
        connection.shutdown(socket.SHUT_WR)
        (last,) = replies(connection)
    assert last == m.ErrorReply("closed the connection in the middle of a frame")


def test_a_half_sent_frame_disturbs_nobody_meanwhile(undisturbed: Broker) -> None:
    """While one peer sends a frame byte by byte, others are answered, and at last it joins too."""
    with raw(undisturbed) as connection:
        for byte in encode_frame(HELLO):
            assert "raw" not in running(undisturbed)
            connection.sendall(bytes([byte]))
        (reply,) = FrameReader().feed(connection.recv(1 << 16))
        assert isinstance(reply, m.Welcome)
        assert "raw" in running(undisturbed)
    undisturbed.until(lambda status: "raw" not in [job.name for job in status.jobs if job.state == "running"], 5)


def running(broker: Broker) -> list[str]:
    """Return the names of the members whose connections are open."""
    return [job.name for job in broker.client.status().jobs if job.state == "running"]


@pytest.mark.parametrize("kind", ["hello", "observe"])
def test_another_version_is_refused(undisturbed: Broker, kind: str) -> None:
    """A peer of another version is told both versions."""
    with raw(undisturbed) as connection:
        connection.sendall(raw_frame(type=kind, version=99, name="a", pid=1, framework="torch"))
        (last,) = replies(connection)
    assert last == m.Refused(f"you speak version 99, this broker {m.PROTOCOL_VERSION}: use one installation for both")


@as_root
@pytest.mark.parametrize(
    ("name", "shown"),
    [("[/]", "[/]"), ("\u202eevil\u2066", r"\u202eevil\u2066"), ("\u2028" * 9, None), ("\N{GRINNING FACE}", None)],
)
def test_a_name_is_what_people_see(undisturbed: Broker, name: str, shown: str | None) -> None:
    """What is invisible or turns a line around becomes an escape, by which the job can be named; else a refusal."""
    with raw(undisturbed) as connection:
        connection.sendall(encode_frame(msgspec.structs.replace(HELLO, name=name)))
        (answer,) = FrameReader().feed(connection.recv(1 << 16))
        if shown is None:
            assert isinstance(answer, m.Welcome | m.Refused)
            assert isinstance(answer, m.Refused) == (len(m.visible(name).encode()) > NAME_BYTES)
        else:
            assert shown in undisturbed.names()
            undisturbed.client.change(m.Change(job=shown, weight=2.0))


def test_another_user_is_refused(undisturbed: Broker, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Somebody else is refused even where the file's modes would let them in."""
    script = (
        "import os, socket, sys\n"
        f"os.setuid({SOMEBODY_ELSE})\n"
        "connection = socket.socket(socket.AF_UNIX)\n"
        "connection.settimeout(20)\n"
        "connection.connect(sys.argv[1])\n"
        "sys.stdout.write(repr(connection.recv(1000)))\n"
    )
    path = undisturbed.socket
    base = tmp_path_factory.getbasetemp()
    top = base.parents[1 if "PYTEST_XDIST_WORKER" in os.environ else 0]  # a worker's lies one deeper
    for parent in path.parents:
        if parent.is_relative_to(top):
            parent.chmod(0o755)
    path.chmod(0o666)
    process = start_python("-c", script, str(path))
    answer, errors = process.communicate(timeout=PATIENCE_S)
    assert f"you are {SOMEBODY_ELSE}" in answer, errors


# -- brokers that are none -------------------------------------------------------------------------


@contextlib.contextmanager
def impostor(tmp_path: Path, answer: bytes | None) -> Iterator[BrokerClient]:
    """Listen in a broker's place; give the client. ``None`` accepts nobody, bytes are the last it says."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen(1)
        script = "import socket, sys; c, _ = socket.socket(fileno=0).accept(); c.sendall(bytes.fromhex(sys.argv[1]))"
        with contextlib.ExitStack() as owned:
            if answer is not None:
                command = [sys.executable, "-c", script, answer.hex()]
                process = owned.enter_context(subprocess.Popen(command, stdin=listening.fileno()))
                owned.callback(process.wait, 20)
            yield owned.enter_context(BrokerClient(tmp_path / "s", deadline_s=5 if answer is not None else 0.2))


def test_a_broker_that_never_answers_costs_the_deadline(tmp_path: Path) -> None:
    """The error names the request and the seconds."""
    with impostor(tmp_path, None) as client:
        for ask in (client.status, client.report, lambda: client.join("a", "torch")):
            with pytest.raises(BrokerError, match=r"did not answer \w+ within 0.2 s|within 0.2 s"):
                ask()


@pytest.mark.parametrize(
    ("answer", "error", "complaint"),
    [
        (b"", BrokerError, "went away without answering Hello"),
        (b"SSH-2.0-OpenSSH\r\n", RemoteProtocolError, "limit is 147456"),
        (encode_frame(HELLO), RemoteProtocolError, "may not say Hello"),
        (
            encode_frame(WELCOME),
            RemoteProtocolError,
            "0 descriptors",
        ),
        (encode_frame(m.Refused("full")), BrokerError, "refused Hello: full"),
    ],
    ids=["nothing", "ssh", "a client", "no descriptors", "refused"],
)
def test_an_impostor_is_an_error(tmp_path: Path, answer: bytes, error: type[Exception], complaint: str) -> None:
    """What is no broker gives an error that says why, and leaves no descriptor open."""
    with no_descriptor_left(), impostor(tmp_path, answer) as client, pytest.raises(error, match=complaint):
        client.join("a", "torch")
