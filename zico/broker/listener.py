"""The live broker's place in the file system: a private directory, a lock, a socket.

Guarantees: the socket lives in a directory that only its user may enter; of two brokers on one path exactly
one lives, decided by a lock before anything is unlinked; closing leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from typing import TYPE_CHECKING, Self

from zico.broker.transport import check_path
from zico.errors import BrokerError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

LOCK_ATTEMPTS = 100
_BACKLOG = 64


def make_private_directory(directory: Path) -> None:
    """Create the directory 0700, or check the one that is there.

    Raises:
        ConfigError: It is a symbolic link or no directory, belongs to somebody else, or others may enter it.
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


class Listener:
    """The live broker's socket: lock held, bound, listening; closing it leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        """Lock, take away a stale socket, bind and listen without blocking.

        Raises:
            ConfigError: The path or its directory cannot be used.
            BrokerError: Another broker lives on this path, which is undisturbed.
        """
        check_path(path)
        make_private_directory(path.parent)
        self.path = path
        self._lock_path = path.with_name(path.name + ".lock")
        with contextlib.ExitStack() as undo:
            self._lock_fd = _lock(self._lock_path)
            undo.callback(self._unlock)
            self.socket = _listen(path)
            undo.pop_all()

    def __enter__(self) -> Self:
        """Close on the way out."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Unlink the socket and the lock file and close both; a second time does nothing."""
        if self.socket.fileno() < 0:
            return
        self.path.unlink(missing_ok=True)
        self.socket.close()
        self._unlock()

    def _unlock(self) -> None:
        # Unlinked while locked: whoever waits for this file finds another inode at the path and begins again.
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock_fd)


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
    """Return the listening socket, made in the place of a stale one. The caller holds the lock."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} exists and is not a socket: give another one")
        path.unlink()
    with contextlib.ExitStack() as undo:
        listening = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listening.settimeout(0)
        listening.bind(str(path))
        undo.callback(path.unlink, missing_ok=True)
        path.chmod(0o600)
        listening.listen(_BACKLOG)
        undo.pop_all()
    return listening
