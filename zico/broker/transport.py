"""Unix sockets and the descriptors that travel over them.

Guarantees: every wait has a deadline. The kernel says who the other end is. A descriptor that
arrives is closed by whoever received it unless it is handed over.

Known limitation: Unix sockets carry at most ``MAX_PATH_BYTES`` bytes of path.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import resource
import socket
import stat
import struct
import time
from typing import TYPE_CHECKING, NamedTuple, Self

from zico.base.errors import BrokerError, ConfigError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_PATH_BYTES = 107
"""``sun_path`` has 108 bytes with its closing zero (unix(7))."""

RECEIVE_BYTES = 64 * 1024
_SO_PEERPIDFD = 77  # asm-generic/socket.h, Linux 6.5
_TIMEVAL = struct.Struct("ll")  # struct timeval: seconds, microseconds
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Peer(NamedTuple):
    """Who is at the other end, as the kernel says."""

    pid: int
    """0 if it lives in another pid namespace."""
    uid: int


class Descriptors:
    """Own descriptors that have arrived, until they are taken."""

    def __init__(self, fds: list[int]) -> None:
        """Become the owner of ``fds``."""
        self._fds = fds

    def __len__(self) -> int:
        return len(self._fds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, others: Descriptors) -> None:
        """Become the owner of what ``others`` holds as well."""
        self._fds.extend(others.take())

    def take(self) -> list[int]:
        """Hand all of them to the caller, who closes them."""
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        """Close all of them; a second time does nothing."""
        for fd in self.take():
            os.close(fd)


def check_path(path: Path) -> None:
    """Refuse a path that no Unix socket can have.

    Raises:
        ConfigError: It is longer than ``MAX_PATH_BYTES``.
    """
    length_bytes = len(os.fsencode(path))
    if length_bytes > MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} has {length_bytes} bytes, the limit is {MAX_PATH_BYTES}: "
            "give a shorter directory (ZICO_SOCKET_DIR)"
        )


def connect(path: Path, deadline_s: float) -> socket.socket:
    """Return a connection to the broker at ``path``, which runs as this user.

    Raises:
        ConfigError: The path is too long.
        BrokerError: Nobody listens there within ``deadline_s``, or it is somebody else.
    """
    check_path(path)
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        # A connect that waits for room in the backlog heeds this; with settimeout it would fail at
        # once.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(deadline_s))
        try:
            connection.connect(str(path))
        except OSError as error:
            raise BrokerError(f"no broker at {path} within {deadline_s:g} s (ZICO_SOCKET): {error}") from error
        uid = peer_of(connection).uid
        if uid != os.geteuid():
            raise BrokerError(f"the broker at {path} runs as user {uid}, not as you ({os.geteuid()})")
        undo.pop_all()
    return connection


def _timeval(seconds: float) -> bytes:
    whole_s = int(seconds)
    return _TIMEVAL.pack(whole_s, int((seconds - whole_s) * 1_000_000) or 1)


def peer_of(connection: socket.socket) -> Peer:
    """Return who was at the other end when the connection was made."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid=pid, uid=uid)


def peer_pidfd(connection: socket.socket) -> int | None:
    """Return a descriptor that becomes readable when the peer's process dies; the caller closes it.

    Returns:
        ``None`` if the peer has no pid here or the kernel gives no such descriptor.

    Raises:
        ProcessLookupError: The peer is dead already.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return _pidfd_of(peer_of(connection).pid)


def _pidfd_of(pid: int) -> int | None:
    """Open by number, for kernels that cannot open by connection."""
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def send(connection: socket.socket, data: bytes, fds: tuple[int, ...] = ()) -> int:
    """Send what fits now, the descriptors with the first byte; return the bytes that went.

    The descriptors stay the caller's. Waits no longer than the socket's own timeout.

    Raises:
        OSError: As the kernel says; ``BlockingIOError`` if nothing fits into a non-blocking socket.
    """
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return connection.sendmsg([data], control, socket.MSG_NOSIGNAL)


def send_all(connection: socket.socket, data: bytes, end_s: float) -> None:
    """Send all of ``data``, waiting until ``end_s`` of ``time.monotonic()``.

    Raises:
        TimeoutError: The peer does not read.
        OSError: As the kernel says.
    """
    rest = memoryview(data)
    while rest:
        connection.settimeout(_left_s(end_s))
        rest = rest[connection.send(rest, socket.MSG_NOSIGNAL) :]


def receive(connection: socket.socket, *, max_fds: int = 0) -> tuple[bytes, Descriptors]:
    """Receive what is there; empty bytes mean the end. Waits no longer than the socket's own timeout.

    Raises:
        RemoteProtocolError: More descriptors came than ``max_fds``, or than may be open; all of
            them are closed.
        OSError: As the kernel says; ``BlockingIOError`` if nothing is there on a non-blocking
            socket.
    """
    control_bytes = socket.CMSG_SPACE((max_fds + 1) * array.array("i").itemsize)
    data, control, flags, _ = connection.recvmsg(RECEIVE_BYTES, control_bytes, socket.MSG_CMSG_CLOEXEC)
    descriptors = Descriptors(_fds_in(control))
    if len(descriptors) > max_fds or flags & socket.MSG_CTRUNC:
        descriptors.close()
        raise RemoteProtocolError(f"sent more descriptors than the {max_fds} allowed, or than may be open here")
    return data, descriptors


def receive_within(connection: socket.socket, end_s: float, *, max_fds: int = 0) -> tuple[bytes, Descriptors]:
    """Receive as ``receive`` does, waiting until ``end_s`` of ``time.monotonic()``.

    Raises:
        TimeoutError: Nothing came.
        RemoteProtocolError: As in ``receive``.
        OSError: As the kernel says.
    """
    connection.settimeout(_left_s(end_s))
    return receive(connection, max_fds=max_fds)


def _left_s(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def _fds_in(control: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors of the control messages; a cut-off last one is no descriptor."""
    fds = array.array("i")
    for level, kind, payload in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return fds.tolist()


# -- the live broker's place in the file system: a private directory, a lock, a socket -------------
#
# Guarantees: the socket lives in a directory that only its user may enter. Of two brokers on one
# path exactly one lives, decided by a lock before anything is unlinked. Closing leaves nothing
# behind.

LOCK_ATTEMPTS = 100
_BACKLOG = 64


def make_private_directory(directory: Path) -> None:
    """Create the directory 0700, or check the one that is there.

    Raises:
        ConfigError: It is a symbolic link or no directory, belongs to somebody else, or others may
            enter it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot hold a socket: {error.strerror}; give a directory, no symbolic link"
        ) from error
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{directory} belongs to user {status.st_uid}, not to you ({os.geteuid()}): give another one")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ConfigError(f"{directory} has mode {mode:04o}, so others may enter it: chmod 0700 {directory}")


@contextlib.contextmanager
def place_of(path: Path) -> Iterator[None]:
    """Hold the lock by which one broker at a time lives on a path.

    Raises:
        ConfigError: The path or its directory cannot be used.
        BrokerError: Another broker lives on this path, which is undisturbed.
    """
    check_path(path)
    make_private_directory(path.parent)
    lock_path = path.with_name(path.name + ".lock")
    lock_fd = _lock(lock_path)
    try:
        yield
    finally:
        # Unlinked while locked: whoever waits for this file finds another inode at the path and
        # begins again.
        lock_path.unlink(missing_ok=True)
        os.close(lock_fd)


class Listener:
    """The live broker's socket: lock held, bound, listening; closing it leaves nothing behind."""

    def __init__(self, path: Path, *, has_place: bool = False) -> None:
        """Lock, unless the caller ``has_place`` already; take away a stale socket, bind and listen without blocking.

        Raises:
            ConfigError: The path or its directory cannot be used.
            BrokerError: Another broker lives on this path, which is undisturbed.
        """
        self.path = path
        with contextlib.ExitStack() as undo:
            if not has_place:
                undo.enter_context(place_of(path))
            self.socket = _listen(path)
            self._owned = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlink the socket, and the lock file that is its own, and close both; a second time does nothing."""
        if self.socket.fileno() < 0:
            return
        self.path.unlink(missing_ok=True)
        self.socket.close()
        self._owned.close()


def _lock(path: Path) -> int:
    """Return a descriptor that holds the lock on the file that is at ``path`` now."""
    for _ in range(LOCK_ATTEMPTS):
        with contextlib.ExitStack() as undo:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BrokerError(f"another broker lives at {path}: stop it or give another socket") from error
            if _is_at(fd, path):
                undo.pop_all()
                return fd
    raise BrokerError(f"the lock {path} was replaced {LOCK_ATTEMPTS} times in a row")


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _listen(path: Path) -> socket.socket:
    """Return the listening socket, made in the place of a stale one. The caller holds the lock.

    It appears at its path when it listens: whoever finds it is not refused.
    """
    new = path.with_name(path.name[:-1] + "~")  # no longer than the path, which has been checked
    for stale in (path, new):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(stale.lstat().st_mode):
                raise ConfigError(f"{stale} exists and is not a socket: give another one")
    with contextlib.ExitStack() as undo:
        listening = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listening.settimeout(0)
        new.unlink(missing_ok=True)  # of a broker that was killed here
        listening.bind(str(new))
        undo.callback(new.unlink, missing_ok=True)
        new.chmod(0o600)
        listening.listen(_BACKLOG)
        new.rename(path)
        undo.pop_all()
    return listening


# --------------------------------------------------------------------------------------------------
# How many descriptors this process may open: the soft limit is raised to what is needed, the hard
# one is not ours.

SPARE_FDS = 64
"""So many descriptors are left for everything else: files, pipes, libraries."""


def make_room(n_fds: int, whose: str, spare: int = SPARE_FDS) -> None:
    """Let this process open ``n_fds`` descriptors besides those that it has open, and some to spare.

    Changes the soft limit of the process (``RLIMIT_NOFILE``), for good: its children inherit it.
    Where the hard limit allows, whatever else runs in the process can open as many as before. Then
    there is room for twice as many, since a driver may keep one of its own for each. Does nothing
    for no descriptors.

    Raises:
        ConfigError: The hard limit is too low, which only an administrator can change; nothing has
            been changed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + n_fds + spare  # noqa: PTH208 - only their number counts
    wanted = max(needed, soft) + n_fds
    if n_fds == 0 or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{whose} needs {needed} open files here and the limit is {hard}: raise it (ulimit -Hn {needed}, or "
            "LimitNOFILE in systemd), or use larger regions (--region)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
