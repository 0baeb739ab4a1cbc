"""A pool of many descriptors: batches from the broker's server to a job's client, and everything that can go wrong."""

from __future__ import annotations

import array
import contextlib
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from cpu.support.broker_messages import no_descriptor_left, open_descriptors
from cpu.support.fake_nvml import UUID, Library, Memory
from cpu.support.members import make_pool
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import BrokerError, RemoteProtocolError, ZicoError
from zico.base.units import GIB
from zico.broker import outside, transport
from zico.broker.client import BrokerClient, Membership
from zico.broker.devices import Device
from zico.broker.notes import NOT_SEEN
from zico.broker.pool_manager import GONE, PoolManager
from zico.broker.protocol import messages as m
from zico.broker.protocol.connection import FrameReader, encode_frame
from zico.broker.server import Server
from zico.broker.transport import Listener
from zico.cli.status import _show
from zico.pool.table import PoolTable
from zico.scheduler.policies import policy_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0
REGION_BYTES = 1 << 16
N_MEMORY = 300
"""Descriptors of the memory: all but one come after the welcome, in two full batches and one of 43."""
N_FDS = N_MEMORY + 2
CUDA = Device("cuda:0", "GPU-1")
HELLO = m.Hello(version=m.PROTOCOL_VERSION, name="raw", pid=1, framework="torch")

SizedPool = tuple[Path, list[int]]


# -- a true broker in this process -----------------------------------------------------------------


@contextlib.contextmanager
def serving(directory: Path, n_memory: int) -> Iterator[Path]:
    """Serve a pool with so many memory descriptors, each an eventfd that holds its number counted from 1."""
    with contextlib.ExitStack() as owned:
        memory_fds = [os.eventfd(number, os.EFD_CLOEXEC) for number in range(1, n_memory + 1)]
        owned.enter_context(transport.Descriptors(list(memory_fds)))
        made = PoolTable.create(
            budget_bytes=4 * REGION_BYTES, region_bytes=REGION_BYTES, use_claims=False, self_admit=True
        )
        manager = PoolManager(owned.enter_context(made), memory_fds, policy_named("none"), device=CUDA)
        yield owned.enter_context(served(directory, manager))


@contextlib.contextmanager
def served(directory: Path, manager: PoolManager) -> Iterator[Path]:
    """Serve a pool by a thread."""
    with contextlib.ExitStack() as owned:
        listener = owned.enter_context(Listener(directory / "zico" / "s"))
        stopped, stop = os.pipe()
        owned.callback(os.close, stopped)
        server = Server(manager, listener)
        thread = threading.Thread(target=server.serve, kwargs={"stop_fd": stopped}, daemon=True)
        thread.start()
        try:
            yield listener.path
        finally:
            os.close(stop)
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "the server does not end"


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Give a broker's socket; when it has ended, no descriptor may be left."""
    with no_descriptor_left(), serving(tmp_path, N_MEMORY) as served:
        yield served


def joined(path: Path, name: str = "job") -> Membership:
    """Join the pool."""
    return BrokerClient(path, DEADLINE_S).join(name, "torch")


def left(membership: Membership) -> None:
    """Leave the pool."""
    membership.leave()
    membership.close_descriptors()


@contextlib.contextmanager
def raw(path: Path) -> Iterator[socket.socket]:
    """Give a plain connection."""
    with transport.connect(path, DEADLINE_S) as connection:
        connection.settimeout(DEADLINE_S)
        yield connection


def answer(connection: socket.socket, max_fds: int = m.FDS_PER_MESSAGE) -> tuple[m.Message, int]:
    """Return the next message and how many descriptors came with it; they are closed."""
    reader, n_fds = FrameReader(), 0
    while True:
        data, descriptors = transport.receive(connection, max_fds=max_fds)
        n_fds += len(descriptors)
        descriptors.close()
        assert data, "the broker hung up"
        if messages := reader.feed(data):
            return messages[0], n_fds


def settles(condition: Callable[[], bool]) -> bool:
    """Tell whether the condition holds within the deadline."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end_s:
            return False
        select.select([], [], [], 0.001)
    return True


@pytest.mark.parametrize("n_memory", [1, 2, 128, 129, 130, 257, 258, 1000])
def test_all_descriptors_come_in_their_order(tmp_path: Path, n_memory: int) -> None:
    """However many there are, one batch exactly full or one over, each arrives once and in the order of the pieces."""
    with no_descriptor_left(), serving(tmp_path, n_memory) as path:
        membership = joined(path)
        assert [os.eventfd_read(fd) for fd in membership.memory_fds] == list(range(1, n_memory + 1))
        assert "memfd:zico-table" in str(Path(f"/proc/self/fd/{membership.table_fd}").readlink())
        assert membership.device == CUDA
        assert not any(map(os.get_inheritable, membership.memory_fds))
        left(membership)


def test_two_jobs_at_once_get_all_of_them_each(path: Path) -> None:
    """Batches of one member do not count for another."""
    memberships: list[Membership] = []
    threads = [threading.Thread(target=lambda: memberships.append(joined(path)), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [len(membership.memory_fds) for membership in memberships] == [N_MEMORY] * 4
    for membership in memberships:
        left(membership)


def test_a_batch_beyond_the_last_is_the_peers_fault(path: Path) -> None:
    """Who asks for more than was announced is told so and dropped; before, each batch came as large as announced."""
    with raw(path) as connection:
        connection.sendall(encode_frame(HELLO))
        welcome, n_fds = answer(connection)
        assert isinstance(welcome, m.Welcome)
        assert (welcome.n_fds, n_fds) == (N_FDS, m.WELCOME_FDS)
        for first in range(m.WELCOME_FDS, N_FDS, m.FDS_PER_MESSAGE):
            connection.sendall(encode_frame(m.MoreRequest()))
            count = min(m.FDS_PER_MESSAGE, N_FDS - first)
            assert answer(connection) == (m.More(first=first, count=count), count)
        connection.sendall(encode_frame(m.MoreRequest()))
        refused, n_fds = answer(connection)
    assert refused == m.ErrorReply(f"asked for more than the {N_FDS} descriptors that there are")
    assert n_fds == 0


def test_a_process_that_cannot_be_watched_gets_no_place_on_a_gpu() -> None:
    """Without a pidfd nobody knows when a process's device work has ended: a GPU's pool refuses it, the host's not."""
    with PoolTable.create(
        budget_bytes=4 * REGION_BYTES, region_bytes=REGION_BYTES, use_claims=False, self_admit=True
    ) as table:
        manager = PoolManager(table, [], policy_named("none"), device=CUDA)
        with pytest.raises(BrokerError, match=r"process 1 cannot be watched from here.*cuda:0.*Linux 6.5"):
            manager.join(HELLO, process=NOT_SEEN, pidfd=None)
        assert manager.members == ()
        assert PoolManager(table, [], policy_named("none")).join(HELLO, process=NOT_SEEN, pidfd=None).pid == 1


def test_a_pool_whose_gpu_is_lost_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The broker's log says once what has happened and what to do, ``zico status`` says it, and so hears who joins."""
    library = Library(Memory(80 * GIB, 80 * GIB), [])
    library.install(monkeypatch)
    monkeypatch.setattr(outside, "LOOK_NS", 0)
    gone = GONE.format("cuda:0", "the GPU is lost")
    with make_pool(4, claims=False) as table:
        seen = outside.Outside(UUID, table.memory.size_bytes)
        manager = PoolManager(table, [table.memory_fd], policy_named("none"), device=CUDA, outside=seen)
        with served(tmp_path, manager) as path, BrokerClient(path, DEADLINE_S) as client:
            assert client.status().fault == ""
            library.lost = 15
            with caplog.at_level(logging.ERROR):
                found = [client.status() for _ in range(2)]
            with pytest.raises(BrokerError, match=re.escape(gone)):
                joined(path)
    _show(path, found[0])
    assert [one.fault for one in found] == [gone, gone]
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [gone]
    assert gone in capsys.readouterr().out


def test_a_process_is_not_taken_for_a_member_of_another_namespace_with_its_number(tmp_path: Path) -> None:
    """The one that joins has not replaced the other's program, and the other keeps its place and what it holds."""
    with make_pool(4, claims=False) as table:
        manager = PoolManager(table, [table.memory_fd], policy_named("none"))
        foreign = manager.join(msgspec.structs.replace(HELLO, pid=os.getpid()), process=NOT_SEEN, pidfd=None)
        manager.leave(foreign)
        with served(tmp_path, manager) as path, BrokerClient(path, DEADLINE_S) as client:
            membership = joined(path)
            found = [(job.name, job.pid, job.state) for job in client.status().jobs]
            left(membership)
        assert found == [("raw", os.getpid(), "leaving"), ("job", os.getpid(), "running")]
        assert [int(number) for number in table.jobs["pid"][:2]] == [0, os.getpid()]


def test_descriptors_are_for_members_only(path: Path) -> None:
    """Neither a stranger nor an observer gets any."""
    for greeting in (b"", encode_frame(m.Observe(m.PROTOCOL_VERSION))):
        with raw(path) as connection:
            connection.sendall(greeting + encode_frame(m.MoreRequest()))
            refused, n_fds = answer(connection)
        assert isinstance(refused, m.ErrorReply)
        assert "may not say MoreRequest" in refused.reason
        assert n_fds == 0


@pytest.mark.parametrize("n_bytes", range(len(encode_frame(m.MoreRequest()))))
def test_a_member_that_goes_in_the_middle_of_asking_leaves_nothing(path: Path, n_bytes: int) -> None:
    """A request cut at any byte, its sender gone with unread descriptors, costs the broker nothing and no other job."""
    before = len(open_descriptors())
    with raw(path) as connection:
        connection.sendall(encode_frame(HELLO) + encode_frame(m.MoreRequest())[:n_bytes])
    # One pidfd stays: the member's process, this one, lives on.
    assert settles(lambda: len(open_descriptors()) <= before + 1)
    left(joined(path))


_VICTIM = """
import socket, sys
from zico.broker.notes import NOT_SEEN
from zico.broker.protocol import messages as m
from zico.broker.protocol.connection import encode_frame
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
connection.sendall(encode_frame(m.Hello(version=m.PROTOCOL_VERSION, name="victim", pid=1, framework="torch")))
connection.sendall(encode_frame(m.MoreRequest()) * int(sys.argv[2]))
sys.stdout.write("asked\\n"); sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_a_job_killed_between_two_batches_is_forgotten(path: Path, batches: int) -> None:
    """A job that is killed with batches asked for and not taken leaves no place taken and no descriptor open."""
    before = len(open_descriptors())
    command = [sys.executable, "-c", _VICTIM, str(path), str(batches)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        BrokerClient(path, DEADLINE_S) as observer,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as victim,
    ):
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"asked\n"
        assert settles(lambda: [job.name for job in observer.status().jobs] == ["victim"])
        victim.send_signal(signal.SIGKILL)
        assert settles(lambda: not observer.status().jobs)
    assert settles(lambda: len(open_descriptors()) == before)
    left(joined(path))


# -- brokers that are none -------------------------------------------------------------------------

Piece = tuple[bytes, int]
"""Bytes with so many descriptors."""
Answer = list[Piece]
"""What one message of the client is answered by."""


def frames(*counts: tuple[m.Message, int]) -> list[Answer]:
    """Return answers of one message each."""
    return [[(encode_frame(message), n_fds)] for message, n_fds in counts]


WELCOME = m.Welcome(
    job=0, region_bytes=1, n_regions=N_MEMORY, budget_bytes=1, policy="none", device="cuda:0", device_id="", n_fds=N_FDS
)
FIELDS = {name: getattr(WELCOME, name) for name in WELCOME.__struct_fields__}
FIRST = m.More(first=3, count=128)
SECOND = m.More(first=131, count=128)
LAST = m.More(first=259, count=43)
HONEST = frames((WELCOME, 3), (FIRST, 128), (SECOND, 128), (LAST, 43))


def send_piece(connection: socket.socket, data: bytes, n_fds: int) -> None:
    """Send bytes with new descriptors, of which no copy stays here."""
    fds = [os.eventfd(0) for _ in range(n_fds)]
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with transport.Descriptors(fds), contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendmsg([data], control)


@contextlib.contextmanager
def impostor(tmp_path: Path, answers: list[Answer], *, hangs_up: bool = True) -> Iterator[BrokerClient]:
    """Answer one client by these, one for each message of its, then hang up or stay silent."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen(1)
        done = threading.Event()

        def answer_all() -> None:
            with listening.accept()[0] as connection:
                connection.settimeout(DEADLINE_S)
                for pieces in answers:
                    if not connection.recv(1 << 16):
                        return
                    for piece in pieces:
                        send_piece(connection, *piece)
                if not hangs_up:
                    done.wait(DEADLINE_S)

        thread = threading.Thread(target=answer_all, daemon=True)
        thread.start()
        try:
            yield BrokerClient(tmp_path / "s", DEADLINE_S if hangs_up else 0.2)
        finally:
            done.set()
            thread.join(DEADLINE_S)


def test_the_impostor_can_be_honest(tmp_path: Path) -> None:
    """What the tests below spoil is a whole answer otherwise."""
    with no_descriptor_left(), impostor(tmp_path, HONEST) as client:
        membership = client.join("a", "torch")
        assert len(membership.memory_fds) == N_MEMORY
        left(membership)


@pytest.mark.parametrize(
    ("answers", "complaint"),
    [
        (frames((WELCOME, 2)), "sent 2 descriptors, not 3"),
        (frames((WELCOME, 4)), "more descriptors than the 3 allowed"),
        (frames((WELCOME, 0)), "sent 0 descriptors, not 3"),
        (frames((WELCOME, 3), (FIRST, 127)), "sent 130 descriptors, not 131"),
        (frames((WELCOME, 3), (FIRST, 129)), "more descriptors than the 128 allowed"),
        (frames((WELCOME, 3), (FIRST, 0)), "sent 3 descriptors, not 131"),
        (frames((WELCOME, 3), (FIRST, 128), (SECOND, 128), (LAST, 44)), "more descriptors than the 43 allowed"),
        (frames((WELCOME, 3), (m.More(first=3, count=127), 127)), "announced 127 descriptors from 3 on"),
        (frames((WELCOME, 3), (m.More(first=0, count=128), 128)), "announced 128 descriptors from 0 on"),
        (frames((WELCOME, 3), (WELCOME, 3)), "may not say Welcome"),
        (frames((WELCOME, 3), (m.ErrorReply("no"), 5)), "refused MoreRequest: no"),
        (frames((WELCOME, 3), (m.Refused("full"), 0)), "refused MoreRequest: full"),
        (frames((WELCOME, 3)), "went away without answering MoreRequest"),
        ([[(b"\x00", 2), (b"\x00", 2)]], "more descriptors than the 1 allowed"),
    ],
)
def test_descriptors_that_do_not_fit_what_was_announced_are_closed(
    tmp_path: Path, answers: list[Answer], complaint: str
) -> None:
    """Too few, too many, another batch, another message or none: one error that says so, and nothing stays open."""
    with no_descriptor_left(), impostor(tmp_path, answers) as client, pytest.raises(ZicoError, match=complaint):
        client.join("a", "torch")


CUTS = [(whole, n_bytes) for whole in range(len(HONEST)) for n_bytes in range(len(HONEST[whole][0][0]))]


@pytest.mark.parametrize(("whole", "n_bytes"), CUTS)
def test_an_answer_cut_at_any_byte_leaves_nothing(tmp_path: Path, whole: int, n_bytes: int) -> None:
    """A broker that dies at any byte of any answer is an error, and what had arrived is closed."""
    ((data, n_fds),) = HONEST[whole]
    cut = [*HONEST[:whole], [(data[:n_bytes], n_fds if n_bytes else 0)]]
    with (
        no_descriptor_left(),
        impostor(tmp_path, cut) as client,
        pytest.raises((BrokerError, RemoteProtocolError), match=r"went away|middle of a frame"),
    ):
        client.join("a", "torch")


def test_a_broker_that_falls_silent_between_batches_costs_the_deadline(tmp_path: Path) -> None:
    """All of joining has one deadline; when it passes, what had arrived is closed."""
    with (
        no_descriptor_left(),
        impostor(tmp_path, HONEST[:3], hangs_up=False) as client,
        pytest.raises(BrokerError, match=r"did not answer MoreRequest within 0\.2 s"),
    ):
        client.join("a", "torch")


def honest(n_fds: int) -> list[tuple[m.Message, int]]:
    """Return the messages, each with its descriptors, by which a broker hands out so many."""
    said: list[tuple[m.Message, int]] = [(m.Welcome(**{**FIELDS, "n_fds": n_fds}), m.WELCOME_FDS)]
    for first in range(m.WELCOME_FDS, n_fds, m.FDS_PER_MESSAGE):
        count = min(n_fds - first, m.FDS_PER_MESSAGE)
        said.append((m.More(first, count), count))
    return said


@settings(max_examples=80, deadline=None)
@given(n_fds=st.integers(3, 400), lies=st.dictionaries(st.integers(0, 3), st.integers(-140, 140), max_size=2))
def test_a_client_has_all_that_was_announced_or_nothing(n_fds: int, lies: dict[int, int]) -> None:
    """However many there are, and whatever an answer has too many or too few: all in the end, or an error and none."""
    said = [
        (message, min(max(0, count + lies.get(number, 0)), 253))
        for number, (message, count) in enumerate(honest(n_fds))
    ]
    is_honest = said == honest(n_fds)
    with tempfile.TemporaryDirectory(prefix="zt-") as directory, no_descriptor_left():
        with impostor(Path(directory), frames(*said)) as client:
            if not is_honest:
                with pytest.raises(RemoteProtocolError, match="descriptors"):
                    client.join("a", "torch")
                return
            membership = client.join("a", "torch")
        assert len(membership.memory_fds) == n_fds - 2
        left(membership)
