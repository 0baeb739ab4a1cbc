"""Processes of a run's jobs that have loaded a framework and are in no pool: which, and why.

Theory of operation
    A framework that Zico watches joins when its import ends. So a process whose memory maps have a
    framework's library, and whom no broker knows, computes outside the budget. Once in ``LOOK_S``
    this reads one line about each process of the machine, and the maps of those of our jobs that
    have grown since. Only where one has loaded a framework are the brokers asked whom they know.
    Why it is outside the process may have told the broker (``zico.job.telling``); else its command
    line and its environment say so.

Guarantees: looking takes ``LOOKING_SHARE`` of a processor at most. What cannot be read is left out. A
process is reported once, and its descendants are not.

Known limitations: a descendant of a job's process in the pool is taken for a worker, which
allocates privately, whatever it does. A process that lives for less than ``LOOK_S`` may be missed,
and so is a framework whose libraries are not in ``LIBRARIES``. ``environ`` is what the process was
started with. Its memory is the machine's; what it takes of a GPU is not looked at.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import time
from operator import itemgetter
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from zico.base.settings import SOCKET_VARIABLE
from zico.job.session import starts_launcher
from zico.launch.jobs import INJECT
from zico.launch.watchdog import PROC, processes
from zico.report.model import OutsideProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from zico.broker.protocol.messages import Report, Status

LOOK_S = 1.0
LOOKING_SHARE = 0.01
KNOWN_AFTER_S = 1.0
"""Seconds after its framework's import until a process is named whose start shows that it cannot join."""
UNKNOWN_AFTER_S = 60.0
"""Seconds until any other process is named, since its import may still be under way."""
MOST = 16
"""Processes of one job that are reported."""

LIBRARIES = {
    "torch": re.compile(rb"^.*(/\S*/libc10\.so)$", re.MULTILINE),
    "tensorflow": re.compile(rb"^.*(/\S*/libtensorflow_framework\.so[.\d]*)$", re.MULTILINE),
    "jax": re.compile(rb"^.*(/\S*/(?:libjax_common|xla_extension)\.so)$", re.MULTILINE),
}

PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
# These keep Python from reading PYTHONPATH (-E, -I) or from importing site (-S), see python(1).
# With the first two Python reads zico.pth where Zico is installed.
BLOCKING_FLAGS = frozenset("EIS")
# Options of the interpreter whose value may follow as the next argument.
_FLAGS_WITH_VALUE = frozenset("WX")

HIDDEN = "its PYTHONPATH hides Zico: install Zico for its Python, or let the command add to $PYTHONPATH"
NO_SOCKET = f"its environment lacks {SOCKET_VARIABLE}: start it with the variables that zico run sets"
UNKNOWN = "Zico does not know why: what the process wrote to standard error may say so"


def blocking_flag(argv: Sequence[str]) -> str | None:
    """Return the interpreter's flag in ``argv`` that keeps Zico out of that process, ``None`` if there is none."""
    if not argv or not PYTHON.fullmatch(PurePath(argv[0]).name):
        return None
    arguments = iter(argv[1:])
    for argument in arguments:
        if not argument.startswith("-") or argument in {"-", "-c", "-m"}:
            return None
        if argument.startswith("--"):
            continue
        if argument[1:2] in _FLAGS_WITH_VALUE:
            if len(argument) == len("-W"):
                next(arguments, None)
            continue
        found = BLOCKING_FLAGS.intersection(argument[1:])
        if found:
            return f"-{max(found)}"  # of several, the one that no .pth file helps against
    return None


def why_outside(argv: Sequence[str], environ: Mapping[str, str], *, has_pth: bool) -> str:
    """Return why Zico does not watch a process that was started so; empty if it may be watching.

    Args:
        argv: Its command line.
        environ: What it was started with.
        has_pth: Whether its Python reads ``zico.pth``.
    """
    if not environ.get(SOCKET_VARIABLE):
        return NO_SOCKET
    flag = blocking_flag(argv)
    if flag == "-S" or (flag is not None and not has_pth):
        return f"python {flag} disables Zico: start python without {flag}"
    if has_pth or str(INJECT) in environ.get("PYTHONPATH", "").split(os.pathsep):
        return ""
    return HIDDEN


def frameworks_in(maps: bytes) -> dict[str, str]:
    """Return the frameworks whose libraries are in a process's maps, and where; of TensorFlow and JAX the former."""
    found = {name: match for name, pattern in LIBRARIES.items() if (match := pattern.search(maps)) is not None}
    if "tensorflow" in found:  # it imports JAX where that is installed
        found.pop("jax", None)
    return {name: os.fsdecode(match[1]) for name, match in found.items()}


@dataclasses.dataclass(eq=False)
class _Process:
    """A process of a job, from when it was first seen."""

    pid: int
    job: str
    parent: _Process | None
    looked_bytes: int = -1
    """Its address space when its maps were looked at."""
    frameworks: str = ""
    since_s: float = 0.0
    """When a framework's library was first seen."""
    is_settled: bool = False
    """It is in a pool, starts others, is a worker or is reported: nothing more is to be found out."""
    is_member: bool = False
    starts_others: bool = False
    """It has loaded a framework only to start those that train."""
    reason: str = ""
    """Why it is outside, as it told or by how it was started; empty: not known, and it may still join."""
    memory_bytes: int = 0
    """The most that was seen."""
    reported: bool = False

    @property
    def is_alone(self) -> bool:
        """Tell whether it has loaded a framework, and neither a pool nor an ancestor is known to stand for it."""
        above = any(one.frameworks and not one.starts_others for one in self.ancestors)
        return bool(self.frameworks) and not self.is_settled and not above

    @property
    def ancestors(self) -> Iterator[_Process]:
        above = self.parent
        while above is not None:
            yield above
            above = above.parent


class Outsiders:
    """What is known of the processes of a run's jobs."""

    def __init__(self, ask: Callable[[], tuple[Sequence[Status], Sequence[Report]]]) -> None:
        """Look at nothing yet; ``ask`` returns what those brokers say that are ready."""
        self._ask = ask
        self._processes: dict[tuple[int, int], _Process] = {}
        self._found: dict[str, list[_Process]] = {}
        """Those that were reported, by job."""
        self._ended: dict[str, list[_Process]] = {}
        """Those that ended before anybody knew whether they would join."""
        self.loaded: dict[str, str] = {}
        """The frameworks that a process of each job has loaded, whether or not it has joined."""
        self._due_s = 0.0
        self._ready_s: float | None = None
        """When the brokers were first seen to be ready."""

    def of(self, job: str, *, ended_well: bool = False) -> tuple[OutsideProcess, ...]:
        """Return the processes of a job that are, or were, outside, whoever has been told of it.

        Args:
            job: Its name.
            ended_well: Its processes have ended, after the imports of their frameworks.
        """
        unsettled = [*self._ended.get(job, ()), *(one for one in self._processes.values() if one.job == job)]
        late = [one for one in unsettled if one.is_alone and (one.reason or ended_well)]
        return tuple(map(_report, (self._found.get(job, []) + late)[:MOST]))

    def look(self, sessions: Mapping[int, str], now_s: float) -> list[tuple[str, OutsideProcess]]:
        """Return those found since the last look, with the job of each, at most once in ``LOOK_S``.

        Args:
            sessions: The name of each living job, by its session.
            now_s: On the monotonic clock.
        """
        if now_s < self._due_s:
            return []
        began_s = time.thread_time()
        self._see(sessions, now_s)
        found = self._settle(now_s)
        took_s = time.thread_time() - began_s
        self._due_s = now_s + max(LOOK_S, took_s / LOOKING_SHARE)
        return found

    def _see(self, sessions: Mapping[int, str], now_s: float) -> None:
        """Take in which processes the jobs have now, and which frameworks they have loaded."""
        seen: dict[tuple[int, int], _Process] = {}
        by_pid: dict[int, _Process] = {}
        for pid, parent, session, start, address_bytes in _processes():
            process = self._processes.get((pid, start))
            above = by_pid.get(parent)
            if process is None:
                job = sessions.get(session) or (above.job if above is not None else "")
                if not job:
                    continue
                process = _Process(pid, job, above)
            seen[pid, start] = by_pid[pid] = process
            if address_bytes != process.looked_bytes and not process.frameworks:
                process.looked_bytes = address_bytes
                _look_at(process, now_s)
            if process.frameworks:
                self.loaded[process.job] = process.frameworks
            if process.frameworks and (process.reported or not process.is_settled):
                process.memory_bytes = max(process.memory_bytes, _memory_bytes(process.pid))
        for key in self._processes.keys() - seen.keys():
            if (process := self._processes[key]).is_alone:
                _keep(self._ended, process)
        self._processes = seen

    def _settle(self, now_s: float) -> list[tuple[str, OutsideProcess]]:
        """Decide on processes that have loaded a framework."""
        waiting = [one for one in self._processes.values() if one.frameworks and not one.is_settled]
        if not waiting:
            return []
        statuses, reports = self._ask()
        if not statuses:  # jobs that would join wait for the broker
            return []
        self._ready_s = now_s if self._ready_s is None else self._ready_s
        members = {member.pid for status in statuses for member in status.jobs}
        launchers = {pid for status in statuses for pid in status.launchers}
        told = {one.pid: one.reason for report in reports for one in report.outside}
        found = []
        for process in waiting:
            process.is_member, process.starts_others = process.pid in members, process.pid in launchers
            process.is_settled = process.is_member or process.starts_others
            above = list(process.ancestors)
            if any(one.is_member or one.reported or one.pid in members for one in above):
                process.is_settled = True  # a worker: its ancestor stands for it
            if process.is_settled or any(one in waiting and not one.is_settled for one in above):
                continue
            reason = told.get(process.pid) or self._reason_after(process, now_s)
            if reason:
                process.is_settled = process.reported = True
                process.reason = reason
                if _keep(self._found, process):
                    found.append((process.job, _report(process)))
        return found

    def _reason_after(self, process: _Process, now_s: float) -> str:
        """Return why a process is outside that told nothing, empty while it may still join."""
        waited_s = now_s - max(process.since_s, self._ready_s or now_s)
        if process.reason:
            return process.reason if waited_s >= KNOWN_AFTER_S else ""
        return UNKNOWN if waited_s >= UNKNOWN_AFTER_S else ""


def _keep(kept: dict[str, list[_Process]], process: _Process) -> bool:
    """Keep a process by its job, unless there are ``MOST``; tell whether it is kept."""
    of_job = kept.setdefault(process.job, [])
    if len(of_job) < MOST:
        of_job.append(process)
    return process in of_job


def _report(process: _Process) -> OutsideProcess:
    return OutsideProcess(
        pid=process.pid,
        framework=process.frameworks,
        reason=process.reason or UNKNOWN,
        memory_bytes=process.memory_bytes,
    )


# -- what the kernel says of a process; nothing where it has ended, or is another user's -----------


def _processes() -> list[tuple[int, int, int, int, int]]:
    """Return (pid, parent, session, start, bytes of address space) of every process that lives, the oldest first."""
    found = [(pid, int(its[1]), int(its[3]), int(its[19]), int(its[20])) for pid, its in processes()]
    return sorted(found, key=itemgetter(3, 0))  # of one clock tick by number


def _look_at(process: _Process, now_s: float) -> None:
    """Look whether a process has loaded frameworks, and whether it can join then."""
    frameworks = frameworks_in(_read(process.pid, "maps"))
    if frameworks:
        argv = [os.fsdecode(word) for word in _read(process.pid, "cmdline").split(b"\0")[:-1]]
        pairs = (os.fsdecode(pair).partition("=") for pair in _read(process.pid, "environ").split(b"\0"))
        environ = {name: value for name, _, value in pairs}
        process.frameworks = ", ".join(frameworks)
        process.since_s = now_s
        process.is_settled = process.starts_others = starts_launcher(argv)
        process.reason = why_outside(argv, environ, has_pth=_has_pth(frameworks.values(), argv, environ))


def _read(pid: int, name: str) -> bytes:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def _memory_bytes(pid: int) -> int:
    """Return what a process has of the machine's memory that is neither files' nor shared."""
    match = re.search(rb"^RssAnon:\s*(\d+) kB$", _read(pid, "status"), re.MULTILINE)
    return 0 if match is None else int(match[1]) << 10


def _has_pth(libraries: Iterable[str], argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Tell whether ``zico.pth`` lies where the framework does, or in the environment of the interpreter."""
    folders = [above for library in libraries for above in Path(library).parents if above.name == "site-packages"]
    program = shutil.which(argv[0], path=environ.get("PATH")) if argv else None
    if program is not None:
        folders += Path(program).parent.parent.glob("lib/python*/site-packages")
    return any(os.path.exists(folder / "zico.pth") for folder in folders)  # noqa: PTH110 - false where nobody may look
