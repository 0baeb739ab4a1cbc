"""What a job did when it ran before: kept on disk, proposed to it at its start, and dropped if it does something else.

Theory of operation
    Two curves are kept of a job (``zico.pool.profiles``): its first iteration, which contains all
    set-up, and the profile of the next few. The profile is taken early, as the next run begins with
    tensors placed as early, by no plan::

        a run       first iteration | 2 | 3 | 4 | kept           | ...
        the next    claims by the   | claims, turns and plans by the profile, which is learned on
                    first curve     ^ both curves are dropped here if it went otherwise

    Two runs are of the same job if they have the same script, to the byte, and the same arguments,
    but for the directories in these. Framework, device, sizes of regions and of tensors in the pool
    count, too. So does the job's share of the processors, since its iterations take as long as that
    lets them. What else may change, such as a module of the user's, shows in the first iteration.

    A file is one array as NumPy saves it, as the arrays of a record file are.

Guarantees
    * What is remembered costs time if it is wrong, and never correctness. The rules for learned
      profiles that prove wrong hold for it.
    * A file is whole or ignored. Nobody's words but those of a sound profile reach the pool.
    * There are at most ``MOST_FILES`` files, of some 6 KB; those written longest ago go.

Known limitations
    A notebook, and a process that ``multiprocessing`` spawns, have no command that says what they
    do. Jobs that move or overflow tensors keep nothing, since what they hold is what others left.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import logging
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.errors import ConfigError
from zico.base.paths import cache_root
from zico.job.session import Watcher
from zico.pool.layout import SaveMode
from zico.trace.profile import CURVE, CURVE_BINS, UNPROFILED_SHIFT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from zico.job.session import Session

FEW = 4
"""Iterations after which a profile is kept: the second one, and two that were folded into it."""
MOST_FILES = 256
_FOLDER = "profiles"
_DIRECTORY = re.compile(r"[^=\s]*/")
_UNNAMED = ("ipykernel_launcher", "ipython", "--multiprocessing-fork")
"""Programs, and an argument, of processes whose command does not say what they do."""
_LONGEST_NS = 1 << 60

_log = logging.getLogger(__name__)


def remember(session: Session, framework: str) -> None:
    """Propose to a job that has just joined what it did in an earlier run, and keep what it does in this one.

    Jobs that are not known to do the same in each run, and those that save memory, are left alone.
    """
    key = key_of(sys.orig_argv[1:], _script(), *_facts(session, framework))
    if not key or session.record["save"] != SaveMode.NONE:
        return
    try:
        path = cache_root() / _FOLDER / key
    except ConfigError:
        return
    learned = read(path, session.pool.free_and_total_bytes()[1] // session.pool.region_bytes)
    if learned is not None:
        session.pool.remember(learned)
    session.watchers.append(_Keeper(session, path))


def key_of(command: Sequence[str], script: bytes, *facts: object) -> str:
    """Return what names a job: equal where a user would call two runs the same job; empty: nothing says what it is."""
    if any(Path(word).stem in _UNNAMED for word in command) or not (script or "-c" in command):
        return ""
    words = [_DIRECTORY.sub("", word) for word in command] if script else [*command]
    told = repr((words, hashlib.blake2b(script).digest(), facts)).encode()
    return hashlib.blake2b(told, digest_size=16).hexdigest()


def _script() -> bytes:
    """Return the bytes of what this process runs, none if that is no file."""
    file = getattr(sys.modules.get("__main__"), "__file__", None) or os.devnull
    with contextlib.suppress(OSError, ValueError):
        return Path(file).read_bytes()
    return b""


def _facts(session: Session, framework: str) -> tuple[object, ...]:
    """Return what a job's curves depend on besides its command."""
    return (
        framework,
        getattr(sys.modules.get(framework), "__version__", ""),
        session.membership.device.kind,
        session.pool.region_bytes,
        int(session.heap.record[0]["threshold_bytes"]),
        os.environ.get("RANK", ""),
        session.settings.share.compute,
    )


# -- files -----------------------------------------------------------------------------------------


def read(path: Path, most_regions: int) -> NDArray[np.void] | None:
    """Return the two curves in a file; ``None`` if there is none, or it is not sound, or exceeds ``most_regions``."""
    blank = _saved(np.zeros(2, CURVE))
    head = blank[: len(blank) - 2 * CURVE.itemsize]
    try:
        with path.open("rb") as file:
            content = file.read(len(blank) + 1)
    except OSError:
        return None
    if len(content) == len(blank) and content.startswith(head):
        learned = np.frombuffer(content, CURVE, offset=len(head))
        if all(is_sound(curve, most_regions) for curve in learned):
            return learned
    _log.debug("the profile %s is not used: it is damaged, of another Zico, or of a larger budget", path)
    return None


def write(path: Path, learned: NDArray[np.void]) -> None:
    """Replace a file by these two curves, and remove files that are too many in its folder.

    Raises:
        OSError: It cannot be written; what was there is still there.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(_saved(learned))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    by_age = sorted(path.parent.iterdir(), key=_written_ns)
    for file in by_age[:-MOST_FILES]:
        file.unlink(missing_ok=True)


def is_sound(curve: Any, most_regions: int) -> bool:  # noqa: ANN401 - a CURVE record
    """Tell whether a record is a profile of a whole iteration that holds no more than so many regions."""
    n, shift = int(curve["n_bins"]), int(curve["shift"])
    if not (0 < n <= CURVE_BINS and 0 <= shift < UNPROFILED_SHIFT):
        return False
    held, t_ns = curve["held"][:n], curve["t_ns"][:n]
    times = [0, *t_ns.tolist(), int(curve["duration_ns"]), _LONGEST_NS]
    levels = [0, int(held.min()), int(held.max()), most_regions]
    return (
        times == sorted(times)
        and levels == sorted(levels)
        and 0 <= int(curve["tail"]) <= most_regions
        and 0 < int(curve["n_events"]) < CURVE_BINS << shift
    )


def _saved(learned: NDArray[np.void]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, learned, allow_pickle=False)
    return buffer.getvalue()


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # another job has removed it
        return 0


class _Keeper(Watcher):
    """Keeps what a job has learned, once."""

    def __init__(self, session: Session, path: Path) -> None:
        self._session = session
        self._path = path
        self._is_kept = False
        atexit.register(self.at_boundary)  # of a job that marks nothing

    def at_boundary(self) -> None:
        """Keep it if a few iterations have ended, and the job has always had room."""
        if self._is_kept or not self._session.is_member:
            return
        record = self._session.record
        if record["iteration"] < FEW:
            return
        self._is_kept = True
        learned = self._session.pool.learned
        had_room = record["save"] == SaveMode.NONE and not (record["spilled_bytes"] or record["evictions"])
        if had_room and all(is_sound(curve, int(record["promised"])) for curve in learned):
            try:
                write(self._path, learned)
            except OSError as error:
                _log.debug("what this job has learned is not kept: %s", error)
