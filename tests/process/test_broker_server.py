"""A real broker process and real jobs: joining, dying, asking, attacking."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from broker_messages import WELCOME, framed, no_descriptor_left, raw_frame

from zico.broker import messages as m
from zico.broker import transport
from zico.broker.client import BrokerClient, Membership
from zico.broker.framing import FrameReader, encode_frame
from zico.errors import BrokerError, LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
REGION_BYTES = 4 * MIB
N_REGIONS = 16
BUDGET_BYTES = N_REGIONS * REGION_BYTES
PATIENCE_S = 120
"""For compiling on a machine that has never run this; seconds otherwise."""
SOMEBODY_ELSE = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as somebody else")

HELLO = m.Hello(version=m.PROTOCOL_VERSION, name="raw", pid=1, framework="torch")


# -- the broker -----------------------------------------------------------------------------------------------------


class Broker:
    """A broker process on a socket of its own."""

    def __init__(self, directory: Path, *options: str) -> None:
        """Start it; ``wait_ready`` says when it listens."""
        self.socket = directory / "zico" / "s"
        self.record = directory / "record.npz"
        self.process = start_python(
            "-m", "zico.broker",
            "--socket", str(self.socket),
            "--budget-bytes", str(BUDGET_BYTES),
            "--region-bytes", str(REGION_BYTES),
            "--record", str(self.record),
            "--no-warm",
            *options,
        )  # fmt: skip
        self.client = BrokerClient(self.socket, deadline_s=20)

    def wait_ready(self) -> None:
        """Wait until it has said that it listens."""
        assert read_line(self.process) == "ready"

    def until(self, condition: Callable[[m.Status], bool], within_s: float) -> m.Status:
        """Return the first status that meets the condition; fail if none does in time."""
        end_s = time.monotonic() + within_s
        while not condition(status := self.client.status()):
            assert time.monotonic() < end_s, f"still {status}"
        return status

    def names(self) -> list[str]:
        """Return the members' names."""
        return [job.name for job in self.client.status().jobs]

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send the signal; return the exit code and what it wrote on stderr."""
        self.client.close()
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors


def start_python(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start Python on this checkout, its three streams piped, with these variables in its environment."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def read_line(process: subprocess.Popen[str]) -> str:
    """Return the process's next line; fail with its stderr if it ends or says nothing in time."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
    line = process.stdout.readline().strip() if readable else ""
    if not line:
        process.kill()
        pytest.fail(f"said nothing: {process.communicate()[1]}")
    return line


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Write a line to the process's stdin."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def kill(process: subprocess.Popen[str]) -> None:
    """End the process and close its streams."""
    process.kill()
    process.communicate(timeout=20)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Give a function that starts brokers; they are killed afterwards, and no descriptor stays open here."""
    brokers: list[Broker] = []

    def start_broker(*options: str, ready: bool = True) -> Broker:
        brokers.append(Broker(tmp_path, *options))
        if ready:
            brokers[-1].wait_ready()
        return brokers[-1]

    with no_descriptor_left():
        yield start_broker
        for broker in brokers:
            broker.client.close()
            kill(broker.process)


@pytest.fixture
def broker(start: Callable[..., Broker]) -> Broker:
    """Give a broker with the policy ``none``."""
    return start("--policy", "none")


@pytest.fixture(scope="module")
def veteran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Give one broker to all tests that cannot disturb it; earlier attackers may still be LEAVING in it."""
    broker = Broker(tmp_path_factory.mktemp("veteran"), "--policy", "none")
    try:
        broker.wait_ready()
        yield broker
    finally:
        broker.client.close()
        kill(broker.process)


@pytest.fixture
def undisturbed(veteran: Broker) -> Iterator[Broker]:
    """Give the veteran with a bystander in it; afterwards the bystander must still be a member, and alone as one."""
    with no_descriptor_left():
        bystander = veteran.client.join("bystander", "torch")
        yield veteran
        status = veteran.client.status()
        close_all(bystander)
        veteran.client.close()
    states = {job.job: job.state for job in status.jobs}
    assert states.pop(bystander.job) == "running"
    assert set(states.values()) <= {"leaving"}


# -- jobs -----------------------------------------------------------------------------------------------------------

JOB_SCRIPT = """
import os, sys
from pathlib import Path
import numpy as np
from zico.broker.client import BrokerClient
from zico.pool import regions, waiting
from zico.pool.table import PoolTable

def say(*words):
    print(*words, flush=True)

membership = BrokerClient(Path(sys.argv[1])).join(sys.argv[2], "torch")
pool = PoolTable.join_pool(membership.memory_fd, membership.table_fd, membership.notify_fd, membership.job)
me = pool.member[0]
say("joined", membership.job)
for line in sys.stdin:
    command, *numbers = line.split()
    if command == "hold":
        wanted = np.full(int(numbers[0]), -1, np.int32)
        say("held", regions.try_acquire(me, wanted, len(wanted)))
    elif command == "iterate":
        if not waiting.finish_iteration(me):
            say("boundary")
            waiting.await_admission(me)
        waiting.begin_iteration(me)
        say("began")
    elif command == "fork":
        child = os.fork()
        if not child:
            sys.stdin.read()
            os._exit(0)
        say("child", child)
    elif command == "exec":
        os.execv(sys.executable, [sys.executable, "-c", os.environ["JOB_SCRIPT"], *sys.argv[1:]])
    elif command == "leave":
        membership.leave()
        say("left")
"""


@contextlib.contextmanager
def job(broker: Broker, name: str, hold: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Run a job that holds so many regions; it is killed on the way out."""
    process = start_python("-c", JOB_SCRIPT, str(broker.socket), name, JOB_SCRIPT=JOB_SCRIPT)
    try:
        assert read_line(process).startswith("joined")
        if hold:
            tell(process, f"hold {hold}")
            assert read_line(process) == "held 0"
        yield process
    finally:
        kill(process)


def close_all(membership: Membership) -> None:
    """Leave and close what came with the membership."""
    membership.leave()
    for fd in (membership.memory_fd, membership.table_fd, membership.notify_fd):
        os.close(fd)


# -- joining and asking ---------------------------------------------------------------------------------------------


def test_a_job_joins_and_gets_memory_table_and_eventfd(broker: Broker) -> None:
    """The welcome tells the pool's sizes, and the three descriptors are its memory, its table and its eventfd."""
    membership = broker.client.join("first", "torch")
    assert (membership.job, membership.policy) == (0, "none")
    assert (membership.region_bytes, membership.n_regions) == (REGION_BYTES, N_REGIONS)
    assert membership.budget_bytes == os.fstat(membership.memory_fd).st_size == BUDGET_BYTES
    assert "memfd" in str(Path(f"/proc/self/fd/{membership.table_fd}").readlink())
    assert "eventfd" in str(Path(f"/proc/self/fd/{membership.notify_fd}").readlink())
    (status,) = broker.client.status().jobs
    assert (status.name, status.pid, status.framework, status.state) == ("first", os.getpid(), "torch", "running")
    close_all(membership)


def test_a_member_that_leaves_and_lives_keeps_its_place_as_leaving(broker: Broker) -> None:
    """Goodbye ends the connection, not the use of memory: regions come back only with the process's end."""
    with job(broker, "a", hold=3) as process:
        tell(process, "leave")
        assert read_line(process) == "left"
        status = broker.until(lambda status: status.jobs[0].state == "leaving", within_s=5)
        assert status.granted_bytes == 3 * REGION_BYTES
        process.kill()
        status = broker.until(lambda status: not status.jobs, within_s=1)
    assert status.granted_bytes == 0
    (report,) = broker.client.report().jobs
    assert (report.name, report.peak_bytes) == ("a", 3 * REGION_BYTES)


def test_a_process_that_replaces_its_program_gives_up_what_the_old_one_held(broker: Broker) -> None:
    """After exec the old program's regions are nobody's, and the new one joins afresh."""
    with job(broker, "a", hold=3) as process:
        tell(process, "exec")
        assert read_line(process).startswith("joined")
        status = broker.until(lambda status: [job.state for job in status.jobs] == ["running"], within_s=5)
        assert status.granted_bytes == 0


def test_a_forked_child_does_not_say_goodbye_for_its_parent(broker: Broker) -> None:
    """Leaving in a forked child closes only the child's copy of the connection."""
    membership = broker.client.join("parent", "torch")
    child = os.fork()
    if not child:
        membership.leave()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [job.state for job in broker.client.status().jobs] == ["running"]
    close_all(membership)


@pytest.mark.parametrize("name", ["\N{SNOWMAN}" * 17, "x" * 49, "", "a\x1bb"])
def test_a_name_that_the_table_cannot_hold_is_refused(undisturbed: Broker, name: str) -> None:
    """Too many bytes, too many characters, none at all and control characters are refused on one side or the other."""
    with pytest.raises((BrokerError, LocalProtocolError)):
        undisturbed.client.join(name, "torch")
    assert name not in undisturbed.names()


def test_when_all_places_are_taken_the_next_is_refused(broker: Broker) -> None:
    """The 65th member is told so and the others stay."""
    with contextlib.ExitStack() as members:
        for number in range(64):
            members.callback(close_all, broker.client.join(f"job {number}", "torch"))
        with pytest.raises(BrokerError, match="all 64 places"):
            broker.client.join("one more", "torch")
        assert len(broker.names()) == 64


def test_too_many_connections_are_refused_and_the_rest_served(undisturbed: Broker) -> None:
    """Connections over the limit are told so; those below it, and new ones after, are served."""
    with contextlib.ExitStack() as connections:
        silent = [connections.enter_context(raw(undisturbed)) for _ in range(140)]
        refused = [end for end in silent[-5:] if isinstance(replies(end)[-1], m.Refused)]
        assert len(refused) == 5
    end_s = time.monotonic() + 5
    while not is_served(undisturbed):
        assert time.monotonic() < end_s


def is_served(broker: Broker) -> bool:
    """Tell whether a new connection is not refused; a refusal may close it before we have spoken."""
    with raw(broker) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(encode_frame(m.Observe(m.PROTOCOL_VERSION)) + encode_frame(m.Goodbye()))
        return replies(connection) == []
    return False


# -- deaths ---------------------------------------------------------------------------------------------------------


def test_a_killed_members_place_and_regions_come_back_within_a_second(broker: Broker) -> None:
    """After SIGKILL the other member stays, and what the dead one held is free."""
    with job(broker, "victim", hold=5) as victim, job(broker, "other", hold=2):
        assert broker.client.status().granted_bytes == 7 * REGION_BYTES
        victim.kill()
        status = broker.until(lambda status: len(status.jobs) == 1, within_s=1)
        assert (status.jobs[0].name, status.granted_bytes) == ("other", 2 * REGION_BYTES)
    victim_report = broker.client.report().jobs[0]
    assert (victim_report.name, victim_report.peak_bytes) == ("victim", 5 * REGION_BYTES)


def test_a_dead_member_is_noticed_though_its_child_keeps_the_connection(broker: Broker) -> None:
    """A forked data loader that outlives its killed parent does not keep the parent's place."""
    with job(broker, "parent", hold=5) as parent:
        tell(parent, "fork")
        child = int(read_line(parent).split()[1])
        try:
            parent.kill()
            status = broker.until(lambda status: not status.jobs, within_s=1)
        finally:
            os.kill(child, signal.SIGKILL)
    assert status.granted_bytes == 0


# -- boundaries -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_runs_one_waits(broker: Broker) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """Run two jobs until the first is inside its second iteration and the other waits for it at its boundary."""
    with job(broker, "a") as a, job(broker, "b") as b:
        tell(a, "iterate")
        assert [read_line(a), read_line(a)] == ["boundary", "began"]
        tell(b, "iterate")
        assert read_line(b) == "boundary"
        broker.until(lambda status: status.jobs[1].waits_for == (0,), within_s=5)
        yield a, b


@pytest.mark.parametrize("policy", ["serial", "salus:lanes=1"])
def test_with_one_lane_one_iterates_while_the_other_waits_and_then_they_change(
    policy: str, start: Callable[..., Broker]
) -> None:
    """A job at its boundary starts when the running one reaches its own: an eventfd and a futex wake them."""
    broker = start("--policy", policy)
    with one_runs_one_waits(broker) as (a, b):
        waiting = broker.client.status().jobs[1]
        assert (waiting.state, waiting.iterations) == ("boundary", 1)
        for running, waiter in ((a, b), (b, a), (a, b)):
            tell(running, "iterate")
            assert read_line(running) == "boundary"
            assert read_line(waiter) == "began"
        report = broker.client.report()
    assert [entry.iterations for entry in report.jobs] == [3, 2]
    assert all(entry.boundary_waited_s > 0 for entry in report.jobs)
    with np.load(broker.record, allow_pickle=False) as record:
        assert sorted(set(record["wait_job"].tolist())) == [0, 1]
        assert set(record["wait_kind"].tolist()) == {0}
        assert np.bincount(record["boundary_job"]).tolist() == [3, 2]


def test_a_write_to_the_eventfd_is_taken_in(broker: Broker) -> None:
    """After a wake-up the eventfd is empty again, so that the broker sleeps until the next one."""
    membership = broker.client.join("a", "torch")
    os.eventfd_write(membership.notify_fd, 1)
    end_s = time.monotonic() + 5
    while select.select([membership.notify_fd], [], [], 0)[0]:
        assert time.monotonic() < end_s
    close_all(membership)


def test_a_job_that_waits_for_a_killed_one_starts_within_a_second(start: Callable[..., Broker]) -> None:
    """Whoever waits at its boundary for a job that dies goes on."""
    with one_runs_one_waits(start("--policy", "serial")) as (a, b):
        a.kill()
        begin_s = time.monotonic()
        assert read_line(b) == "began"
        assert time.monotonic() - begin_s < 1


# -- attacks --------------------------------------------------------------------------------------------------------


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


ATTACKS = {
    "garbage": (framed(b"\xc1\xff\x00garbage"), "no message"),
    "a huge frame": (b"\x7f\xff\xff\xff" + bytes(1000), "2147483647 bytes, the limit is 65536"),
    "an empty frame": (bytes(4), "empty frame"),
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n", "the limit is 65536"),
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
    # One pidfd stays for each member, also for an attacker that had become one, since this process lives.
    assert descriptors_of(undisturbed) - len(undisturbed.names()) == before


def descriptors_of(broker: Broker) -> int:
    """Return how many descriptors the broker has now that it has answered once more."""
    broker.names()
    return len(list(Path(f"/proc/{broker.process.pid}/fd").iterdir()))


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


def test_a_frame_that_never_ends_is_given_up(undisturbed: Broker) -> None:
    """A peer that owes the rest of its frame is dropped when the patience of ten seconds ends, dripping or not."""
    begin_s = time.monotonic()
    with raw(undisturbed) as connection:
        connection.sendall(encode_frame(HELLO)[:5])
        (last,) = replies(connection)
    assert isinstance(last, m.ErrorReply)
    assert "10 s" in last.reason
    assert 9 < time.monotonic() - begin_s < 19


@pytest.mark.parametrize("kind", ["hello", "observe"])
def test_another_version_is_refused(undisturbed: Broker, kind: str) -> None:
    """A peer of another version is told both versions."""
    with raw(undisturbed) as connection:
        connection.sendall(raw_frame(type=kind, version=99, name="a", pid=1, framework="torch"))
        (last,) = replies(connection)
    assert last == m.Refused(f"you speak version 99, this broker {m.PROTOCOL_VERSION}: use one installation for both")


@as_root
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
    for parent in path.parents:
        if parent.is_relative_to(tmp_path_factory.getbasetemp().parent):
            parent.chmod(0o755)
    path.chmod(0o666)
    process = start_python("-c", script, str(path))
    answer, errors = process.communicate(timeout=PATIENCE_S)
    assert f"you are {SOMEBODY_ELSE}" in answer, errors


# -- brokers that are none ------------------------------------------------------------------------------------------


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
        (b"SSH-2.0-OpenSSH\r\n", RemoteProtocolError, "limit is 65536"),
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


# -- beginning and end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(broker: Broker, number: int) -> None:
    """SIGTERM and SIGINT leave exit code 0, no socket, no lock file, and the record."""
    with job(broker, "a", hold=2):
        broker.until(lambda status: status.granted_bytes == 2 * REGION_BYTES, within_s=5)
        code, errors = broker.end(number)
    assert (code, errors) == (0, "")
    assert list(broker.socket.parent.iterdir()) == []
    with np.load(broker.record, allow_pickle=False) as record:
        assert record["names"].tolist() == ["a"]
        assert record["held_bytes"].max() == 2 * REGION_BYTES
        assert record["budget_bytes"] == BUDGET_BYTES
        assert np.all(np.diff(record["t_s"]) > 0)


def test_a_report_writes_the_record(broker: Broker) -> None:
    """Whoever has the report may read the record, while the broker goes on."""
    assert not broker.record.exists()
    broker.client.report()
    assert broker.record.exists()
    assert broker.names() == []


def test_a_record_that_cannot_be_written_stops_nothing(start: Callable[..., Broker]) -> None:
    """A record in a directory that does not exist is only complained about."""
    broker = start("--policy", "none", "--record", "/nonexistent/record.npz")
    assert broker.client.report().jobs == ()
    code, errors = broker.end()
    assert code == 0
    assert "/nonexistent/record.npz cannot be written" in errors


def test_of_two_brokers_on_one_path_the_second_is_refused(start: Callable[..., Broker]) -> None:
    """The second says that another lives and ends with 1; the first serves on."""
    first = start("--policy", "none")
    second = start("--policy", "none", ready=False)
    _, errors = second.process.communicate(timeout=PATIENCE_S)
    assert second.process.returncode == 1
    assert "another broker lives" in errors
    assert first.names() == []


def test_a_killed_brokers_socket_is_taken_over(start: Callable[..., Broker]) -> None:
    """After SIGKILL the next broker on the path lives."""
    first = start("--policy", "none")
    kill(first.process)
    with pytest.raises(BrokerError, match="no broker at"):
        first.client.status()
    assert start("--policy", "none").names() == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--policy", "fairy"), "'fairy' is no policy"),
        (("--budget-bytes", "0"), "below one region"),
        (("--region-bytes", "12345"), "12345 bytes does not work"),
        (("--parent-pid", "999999999"), "living process"),
        (("--socket", "/" + "x" * 200), "the limit is 107"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(
    start: Callable[..., Broker], options: tuple[str, str], complaint: str
) -> None:
    """Exit code 2 and one line that names the value."""
    broker = start(*options, ready=False)
    _, errors = broker.process.communicate(timeout=PATIENCE_S)
    assert broker.process.returncode == 2
    assert complaint in errors
    assert len(errors.splitlines()) == 1


def test_ready_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    """A descriptor named by --ready-fd gets the line, and stdout none."""
    fifo = tmp_path / "ready"
    os.mkfifo(fifo)
    read_fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    command = f"exec 9>{fifo}; exec {sys.executable} -m zico.broker --socket {tmp_path}/zico/s --no-warm --ready-fd 9 "
    command += f"--budget-bytes {BUDGET_BYTES} --region-bytes {REGION_BYTES} --policy none"
    with subprocess.Popen(["/bin/sh", "-c", command], stdout=subprocess.PIPE, cwd=ROOT) as process:
        readable, _, _ = select.select([read_fd], [], [], PATIENCE_S)
        told = os.read(read_fd, 100) if readable else b""
        process.terminate()
        written, _ = process.communicate(timeout=20)
    os.close(read_fd)
    assert (told, written) == (b"ready\n", b"")


def test_without_its_parent_it_ends_after_the_last_job(start: Callable[..., Broker]) -> None:
    """A broker whose parent was killed serves the jobs that are left and ends by itself."""
    parent = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        broker = start("--policy", "none", "--parent-pid", str(parent.pid))
        with job(broker, "a"):
            parent.kill()
            parent.communicate(timeout=20)
            assert broker.names() == ["a"]
        broker.client.close()
        assert broker.process.wait(timeout=20) == 0
    finally:
        parent.kill()
        parent.communicate(timeout=20)
    assert list(broker.socket.parent.iterdir()) == []
