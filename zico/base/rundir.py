"""Directories for sockets: private, short enough, and found again by ``zico status``."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from zico.base.errors import ConfigError
from zico.base.settings import HOST

if TYPE_CHECKING:
    from collections.abc import Iterator

SOCKET_NAME = "broker.sock"
RUN_PREFIX = "run-"
PRIVATE_MODE = 0o700
OTHERS_MODE = 0o077
MAX_SOCKET_PATH_BYTES = 107
"""``sun_path`` has 108 bytes on Linux, the last one zero (unix(7))."""


def base_directory() -> Path:
    """Return the user's directory for sockets, created with mode 0700 where it is missing.

    The session's runtime directory where there is one, else a directory of our own among the
    temporary files.

    Raises:
        ConfigError: Neither can be used: missing, of another user, open to others, or its path too
            long.
    """
    with warnings.catch_warnings(action="ignore"):  # it warns where there is no runtime directory; we have another
        runtime_dir = platformdirs.user_runtime_dir("zico")
    candidates = (Path(runtime_dir), Path(tempfile.gettempdir()) / f"zico-{os.getuid()}")
    reasons = []
    for candidate in candidates:
        reason = _unusable(candidate)
        if reason is None:
            return candidate
        reasons.append(f"{candidate} {reason}")
    raise ConfigError(
        f"no directory for the socket: {'; '.join(reasons)}. Set XDG_RUNTIME_DIR or TMPDIR to another one"
    )


@contextmanager
def run_directory() -> Iterator[Path]:
    """Give a fresh directory of mode 0700 and remove it with all that is in it afterwards."""
    base = base_directory()
    path = base
    while path.exists():
        path = base / f"{RUN_PREFIX}{secrets.token_hex(4)}"
    try:  # before it is there: a signal may end this at any instant
        path.mkdir(mode=PRIVATE_MODE)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def socket_for(device: str = HOST) -> Path:
    """Return the socket that a broker for a device listens on when it is told none; ``cuda`` is ``cuda:0``."""
    if device == HOST:
        return base_directory() / SOCKET_NAME
    device = "cuda:0" if device == "cuda" else device
    return base_directory() / f"broker-{re.sub('[^a-z0-9]', '-', device.lower())}.sock"


def known_sockets() -> list[Path]:
    """Return the sockets of this user's brokers, the default one first; some may have no broker behind them."""
    base = base_directory()
    patterns = ("broker-*.sock", f"{RUN_PREFIX}*/{SOCKET_NAME}", f"{RUN_PREFIX}*/*/{SOCKET_NAME}")
    found = [base / SOCKET_NAME, *(path for pattern in patterns for path in sorted(base.glob(pattern)))]
    return [path for path in found if path.is_socket()]


def _unusable(directory: Path) -> str | None:
    """Return why sockets cannot live in ``directory``, or ``None``; creates it if it is missing."""
    longest = directory / f"{RUN_PREFIX}12345678" / "15" / SOCKET_NAME  # of a run on several devices
    if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES:
        return f"is too long for a socket path ({MAX_SOCKET_PATH_BYTES} bytes)"
    try:
        directory.mkdir(mode=PRIVATE_MODE, exist_ok=True)
        # Not followed: a link put there by somebody else must not lead us into a directory of
        # theirs.
        status = directory.lstat()
        parent = directory.parent.stat()
    except OSError as error:
        return f"cannot be created ({error.strerror})"
    faults = {
        "is not a directory": not stat.S_ISDIR(status.st_mode),
        f"belongs to user {status.st_uid}": status.st_uid != os.getuid(),
        f"is in a directory of user {parent.st_uid}": parent.st_uid not in {0, os.getuid()},
        "is open to other users": bool(stat.S_IMODE(status.st_mode) & OTHERS_MODE),
        "is not writable": not os.access(directory, os.W_OK | os.X_OK),
    }
    return next((fault for fault, present in faults.items() if present), None)
