"""Where Zico keeps files of its own, and which directories it loads machine code from.

Theory of operation:
    Numba loads machine code by ``pickle``: a user who writes a file of the cache runs code as the
    user who loads it. Zico therefore makes one directory of mode 0700 for machine code. It checks
    the way to that directory as the kernel walks it, through every link. The models are StrictModes
    of OpenSSH and ``safe.directory`` of git.

Guarantees:
    * Every directory and link on the way belongs to the user or to root. No other user may write
      these directories, except those with the sticky bit, such as ``/tmp``.
    * On a way through the user's home directory, Zico does not check the directories above the
      home. A user who may replace the home needs no cache.
    * Zico loads nothing that others left in a cache that was once open to them. Such files lie
      beside the directory for machine code, or that directory belongs to others and is refused.
    * All processes of a user choose the same directory in the same environment.

Known limitations:
    * A group counts as others even if the user is its only member: Zico cannot know who joins
      later.
    * The mode shows what POSIX access control lists allow, but not what those of NFSv4 allow.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import pwd
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from zico.base.errors import ConfigError
from zico.base.saying import inform

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE_VARIABLE = "ZICO_CACHE_DIR"
SETTINGS_VARIABLE = "ZICO_CONFIG"
_CODE = "code"
_PRIVATE_MODE = 0o700
_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_MAX_LINKS = 40
"""The kernel follows as many links (path_resolution(7))."""
_ADVICE = f"take others' right to write away (chmod go-w), or set {CACHE_VARIABLE} to a directory of yours alone"


def cache_root() -> Path:
    """Return the directory for what can be made again.

    The directory is that of ``ZICO_CACHE_DIR``, else the user's cache directory, and is created if
    it is missing. If it is refused, one line on stderr says so, once per process. The next choices
    are the user's cache directory, ``.cache`` in the home directory, and a directory among
    temporary files.

    Raises:
        ConfigError: All of them are refused.
    """
    return _cache_root(_wanted())


def settings_file() -> Path:
    """Return the settings file that ``ZICO_CONFIG`` names, else the user's own; it may be missing."""
    named = os.environ.get(SETTINGS_VARIABLE)
    return Path(named) if named else platformdirs.user_config_path("zico") / "config.toml"


def code_directory() -> Path:
    """Return the directory for machine code, closed to other users; see ``cache_root``."""
    return cache_root() / _CODE


def cache_refusal() -> tuple[Path, str]:
    """Return the cache directory that is asked for, and why it is refused, if so; creates nothing."""
    wanted = _wanted()
    fault = refusal(wanted / _CODE)
    return wanted, fault and f"{fault}: {_ADVICE}"


def refusal(directory: Path) -> str:
    """Return why machine code must not lie in a directory, which may be missing, or an empty text."""
    uid = os.getuid()
    try:
        passed = _way_to(directory)
        nearest = next(place for place in (directory, *directory.parents) if place.exists())
        status = nearest.stat()
    except OSError as error:
        return f"{directory} cannot be used ({error.strerror})"
    home = _home(uid)
    unasked = home.parents if home in passed else ()
    for place, found in passed.items():
        fault = _fault(found, uid)
        if fault and place not in unasked:
            return f"{place} {fault} ({_owner_and_mode(found)})"
    if nearest == directory and stat.S_IMODE(status.st_mode) & _OTHERS:
        return f"{directory} is open to others ({_owner_and_mode(status)})"
    try:
        tempfile.TemporaryFile(dir=nearest).close()  # what Numba does before it takes a directory
    except OSError as error:
        return f"{nearest} cannot be written ({error.strerror})"
    return ""


def _wanted() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("zico")).absolute()


@functools.cache  # so that the sentence comes once
def _cache_root(wanted: Path) -> Path:
    refused: dict[Path, str] = {}
    for root in itertools.chain((wanted,), _instead()):
        code = root / _CODE
        fault = refused.get(root) or refusal(code) or _make(code) or refusal(code)
        if not fault:
            break
        refused[root] = fault
    else:
        raise ConfigError(f"no directory for machine code: {'; '.join(refused.values())}: {_ADVICE}")
    if refused:
        faults = "; ".join(dict.fromkeys(refused.values()))
        inform(f"machine code is kept in {root} and not in {wanted}, as {faults}: {_ADVICE}")
    return root


def _instead() -> Iterator[Path]:
    """Yield where to go when what was asked for is refused."""
    yield Path(platformdirs.user_cache_dir("zico")).absolute()
    home = _home(os.getuid())
    if home is not None:
        yield home / ".cache" / "zico"
    # The next process finds this name again, so that Zico compiles, for minutes, only once.
    yield Path(tempfile.gettempdir()) / f"zico-cache-{os.getuid()}"


def _home(uid: int) -> Path | None:
    """Return the user's home directory without links, from the list of users: anybody may set ``HOME``."""
    try:
        return Path(pwd.getpwuid(uid).pw_dir).resolve()
    except (KeyError, OSError):
        return None


def _make(directory: Path) -> str:
    """Create a directory and its parents with mode 0700; returns why that is impossible, if it is."""
    try:
        for place in reversed((directory, *directory.parents)):
            with contextlib.suppress(FileExistsError):
                place.mkdir(_PRIVATE_MODE)
    except OSError as error:
        return f"{directory} cannot be created ({error.strerror})"
    return ""


def _way_to(directory: Path) -> dict[Path, os.stat_result]:
    """Return the status of every directory and link on the way to a directory, in the kernel's order.

    A parent's status is older than its child's. If no other user may write the parent, none has
    changed the child since.
    """
    found: dict[Path, os.stat_result] = {}
    place, links = Path("/"), 0
    todo = [*reversed(directory.absolute().parts)]
    while todo:
        name = todo.pop()
        # A link's target may begin with "/", which leads back to the root.
        entry = place.parent if name == os.pardir else place / name
        try:
            status = found[entry] = entry.lstat()
        except FileNotFoundError:
            break
        if not stat.S_ISLNK(status.st_mode):
            place = entry
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(directory))
        todo += reversed(entry.readlink().parts)
    return found


def _fault(status: os.stat_result, uid: int) -> str:
    """Return what lets other users change a directory's content or a link's target, or an empty text."""
    if status.st_uid not in {0, uid}:
        return "belongs to another user"
    if stat.S_ISLNK(status.st_mode):  # a link's mode means nothing: its directory says who may replace it
        return ""
    if not stat.S_ISDIR(status.st_mode):
        return "is not a directory"
    # A sticky directory lets no user replace an entry of another, and the next entry must be the
    # user's own.
    open_to_all = status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
    return "may be written by others" if open_to_all else ""


def _owner_and_mode(status: os.stat_result) -> str:
    return f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}"
