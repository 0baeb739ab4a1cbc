"""Sockets, descriptors and the directory: real ones, on this machine."""

from __future__ import annotations

import array
import fcntl
import os
import resource
import socket
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from cpu.support.broker_messages import no_descriptor_left, open_descriptors

from zico.base.errors import BrokerError, ConfigError, RemoteProtocolError
from zico.broker import transport
from zico.broker.transport import Listener, make_private_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOMEBODY_ELSE = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as somebody else")


@pytest.fixture(autouse=True)
def closed_descriptors() -> Iterator[None]:
    """Fail every test that leaves a descriptor open."""
    with no_descriptor_left():
        yield


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give two connected Unix sockets."""
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Give a directory that only this user may enter."""
    directory = tmp_path / "d"
    directory.mkdir(mode=0o700)
    return directory


def test_the_leak_guard_notices_a_leak() -> None:
    """The guard around every test here fails when a descriptor stays open, and closes it."""
    with pytest.raises(AssertionError, match="left open"), no_descriptor_left():
        os.eventfd(0)


def send_fds(sender: socket.socket, count: int) -> list[int]:
    """Send ``count`` new descriptors with one byte and close our copies; return what they were."""
    fds = [os.eventfd(0) for _ in range(count)]
    sender.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    for fd in fds:
        os.close(fd)
    return fds


def test_descriptors_travel_and_belong_to_the_receiver(pair: tuple[socket.socket, socket.socket]) -> None:
    """A sent descriptor arrives as another number for the same thing, closed on exec, and the sender keeps its own."""
    left, right = pair
    sent_fd = os.eventfd(7, os.EFD_CLOEXEC)
    assert transport.send(left, b"hello", (sent_fd,)) == 5
    data, descriptors = transport.receive(right, max_fds=1)
    (fd,) = descriptors.take()
    os.close(sent_fd)
    assert data == b"hello"
    assert not os.get_inheritable(fd)
    assert os.eventfd_read(fd) == 7
    os.close(fd)


def test_descriptors_not_taken_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    """Leaving the owner's scope closes what was not taken; closing twice does nothing."""
    left, right = pair
    send_fds(left, 2)
    before = open_descriptors()
    _, descriptors = transport.receive(right, max_fds=3)
    with descriptors:
        assert len(open_descriptors()) == len(before) + 2
    assert len(open_descriptors()) == len(before)
    descriptors.close()


@pytest.mark.parametrize("allowed", [0, 1, 3])
@pytest.mark.parametrize("extra", [1, 2, 20])
def test_extra_descriptors_are_closed_and_refused(
    pair: tuple[socket.socket, socket.socket], allowed: int, extra: int
) -> None:
    """More descriptors than allowed, cut off by the kernel or not, are an error and none stays open."""
    left, right = pair
    send_fds(left, allowed + extra)
    before = open_descriptors()
    with pytest.raises(RemoteProtocolError, match=f"the {allowed} allowed"):
        transport.receive(right, max_fds=allowed)
    assert open_descriptors() == before


def test_descriptors_that_cannot_be_opened_are_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    """Where this process may open no more, the loss is noticed, not taken for a message without descriptors."""
    left, right = pair
    send_fds(left, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(RemoteProtocolError, match="may be open here"):
            transport.receive(right, max_fds=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_receiving_ends_at_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    """A peer that says nothing costs the deadline and no more."""
    begin_s = time.monotonic()
    with pytest.raises(TimeoutError):
        transport.receive_within(pair[0], begin_s + 0.05)
    assert 0.05 <= time.monotonic() - begin_s < 5


def test_sending_ends_at_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    """A peer that does not read costs the deadline and no more."""
    with pytest.raises(TimeoutError):
        transport.send_all(pair[0], bytes(10_000_000), time.monotonic() + 0.05)


def test_the_kernel_says_who_the_peer_is(pair: tuple[socket.socket, socket.socket]) -> None:
    """Pid and user of the peer come from the kernel, and its pidfd is not readable while it lives."""
    assert transport.peer_of(pair[0]) == (os.getpid(), os.geteuid())
    fd = transport.peer_pidfd(pair[0])
    assert fd is not None
    os.close(fd)


# -- directory and path ----------------------------------------------------------------------------


def test_a_missing_directory_is_made_private(tmp_path: Path) -> None:
    """A directory that is not there is made with its parents, for this user alone."""
    make_private_directory(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o777, 0o701])
def test_an_open_directory_is_refused(private: Path, mode: int) -> None:
    """A directory that others may enter is refused with the command that closes it, and is not changed."""
    private.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 0700"):
        make_private_directory(private)
    assert stat.S_IMODE(private.stat().st_mode) == mode


def test_a_symbolic_link_is_refused(private: Path, tmp_path: Path) -> None:
    """A link to a good directory is refused all the same."""
    (tmp_path / "link").symlink_to(private)
    with pytest.raises(ConfigError, match="no symbolic link"):
        make_private_directory(tmp_path / "link")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    """A file in the directory's place is refused."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot hold a socket"):
        make_private_directory(tmp_path / "file")


@as_root
def test_somebody_elses_directory_is_refused(private: Path) -> None:
    """A directory of another user is refused even for root."""
    os.chown(private, SOMEBODY_ELSE, SOMEBODY_ELSE)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        make_private_directory(private)


@pytest.mark.parametrize("end", [Listener, lambda path: transport.connect(path, 1)], ids=["listen", "connect"])
def test_a_path_over_the_limit_is_refused_by_both_ends(private: Path, end: type[Listener]) -> None:
    """A path of 108 bytes is refused with its length and the setting; one of 107 can be listened on."""
    longest = private / ("x" * (transport.MAX_PATH_BYTES - len(os.fsencode(private)) - 1))
    assert len(os.fsencode(longest)) == transport.MAX_PATH_BYTES
    with Listener(longest):
        transport.connect(longest, 1).close()
    with pytest.raises(ConfigError, match=r"has 108 bytes, the limit is 107.*ZICO_SOCKET_DIR"):
        end(longest.with_name(longest.name + "x"))


# -- listening -------------------------------------------------------------------------------------


def test_listening_leaves_nothing_behind(private: Path) -> None:
    """The socket is 0600 while it lives; closing it, also twice, leaves an empty directory."""
    with Listener(private / "s") as listener:
        assert stat.S_IMODE((private / "s").stat().st_mode) == 0o600
        listener.close()
    assert list(private.iterdir()) == []


def test_the_second_broker_is_refused_and_the_first_undisturbed(private: Path) -> None:
    """Who comes second is told, unlinks nothing, and the first still answers."""
    with Listener(private / "s"):
        with pytest.raises(BrokerError, match="another broker lives"):
            Listener(private / "s")
        transport.connect(private / "s", 1).close()


def test_a_stale_socket_is_replaced(private: Path) -> None:
    """A socket and a lock file that a killed broker left are taken over."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(private / "s"))
    (private / "s.lock").touch()
    with Listener(private / "s"):
        transport.connect(private / "s", 1).close()


def test_a_lock_that_is_replaced_meanwhile_is_not_trusted(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who locks a file that the last broker unlinks just then locks the path's new file before it listens."""
    lock = private / "s.lock"
    flock = fcntl.flock
    times = iter([lock.unlink])

    def late_flock(fd: int, how: int) -> None:
        next(times, lambda: None)()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late_flock)
    with Listener(private / "s"), pytest.raises(BrokerError, match="another broker lives"):
        Listener(private / "s")


def test_a_file_in_the_sockets_place_is_kept(private: Path) -> None:
    """What is no socket is not unlinked, and the lock is given back."""
    (private / "s").write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        Listener(private / "s")
    assert (private / "s").read_text() == "precious"
    assert [entry.name for entry in private.iterdir()] == ["s"]


_RACER = """
import sys
from pathlib import Path
from zico.broker.transport import Listener
from zico.base.errors import BrokerError
sys.stdout.write("set\\n"); sys.stdout.flush()
sys.stdin.readline()
try:
    listener = Listener(Path(sys.argv[1]))
except BrokerError:
    sys.stdout.write("lost\\n")
else:
    sys.stdout.write("won\\n"); sys.stdout.flush()
    sys.stdin.readline()
    listener.close()
"""


def test_of_many_racing_for_one_path_one_lives(private: Path) -> None:
    """Of several processes that start at once on a stale socket exactly one listens, and a client reaches it."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(private / "s"))
    command = [sys.executable, "-c", _RACER, str(private / "s")]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(4)
    ]
    try:
        results = race(racers)
        reached = results.count("won") == 1 and transport.connect(private / "s", 5)
    finally:
        for racer in racers:
            racer.communicate(timeout=20)
    assert sorted(results) == ["lost", "lost", "lost", "won"]
    assert reached
    reached.close()
    assert list(private.iterdir()) == []


def race(racers: list[subprocess.Popen[str]]) -> list[str]:
    """Start all of them at once when all are set; return who won and who lost."""
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "set\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
    return [racer.stdout.readline().strip() for racer in racers if racer.stdout is not None]


# -- connecting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("left_behind", [False, True])
def test_nobody_listening_is_said(private: Path, *, left_behind: bool) -> None:
    """No socket, or one that nobody listens on, is an error that names path, seconds and setting."""
    if left_behind:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(private / "s"))
    with pytest.raises(BrokerError, match=r"no broker at .*/s within 2 s \(ZICO_SOCKET\)"):
        transport.connect(private / "s", 2)


def test_connecting_to_a_full_backlog_ends_at_the_deadline(private: Path) -> None:
    """A broker that accepts nobody costs the deadline and no more."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(private / "s"))
        listening.listen(0)
        first = transport.connect(private / "s", 1)
        begin_s = time.monotonic()
        with pytest.raises(BrokerError, match=r"within 0\.1 s"):
            transport.connect(private / "s", 0.1)
        assert 0.05 <= time.monotonic() - begin_s < 5
        first.close()


@as_root
def test_a_broker_of_somebody_else_is_refused(private: Path) -> None:
    """A client does not talk to a socket on which another user listens."""
    script = (
        "import os, socket, sys\n"
        "listening = socket.socket(socket.AF_UNIX)\n"
        "listening.bind(sys.argv[1])\n"
        f"os.setuid({SOMEBODY_ELSE})\n"
        "listening.listen(1)\n"
        "print('listening', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(private / "s")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "listening\n"
        with pytest.raises(BrokerError, match="runs as user 65534"):
            transport.connect(private / "s", 5)
        other.communicate(timeout=20)
