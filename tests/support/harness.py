"""Real brokers and real jobs for tests: every wait has a deadline, whatever is left is killed.

A ``Pool`` is a broker process together with this process's own view of its shared table, which
stays when the broker dies. Jobs that need no framework come from a ``Nursery``: one process that
has loaded all compiled code and forks a job in a millisecond (``light_job.py``). Jobs with a
framework are in ``scripts``.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from zico.broker.client import BrokerClient
from zico.pool import layout
from zico.pool.layout import HEADER, JOB, MAX_JOBS, NOBODY, REGION, JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
TESTS = HERE.parent
"""Where packages of support are found, in ``PYTHONPATH`` too: ``cpu.support``, ``process.support``."""
EXAMPLES = TESTS.parent / "examples"
FRAMEWORK, PROCESS = TESTS / "framework" / "support", TESTS / "process" / "support"
"""Of scripts that tests run."""
BROKER = Path(layout.__file__).parents[1] / "broker" / "__main__.py"
KIB = 1 << 10
MIB = 1 << 20
PATIENCE_S = 300.0
"""For anything that may have to compile, import a framework or train, on a machine that is busy."""
ANSWER_S = 20.0
LIMIT_S = 1.0
"""Within this time after a death the others go on (invariant 5)."""
TRIES = 5
"""Deaths of which one must be over within that time: on a machine that is busy some take longer."""

Value = TypeVar("Value")


def until(look: Callable[[], Value], within_s: float, what: str) -> Value:
    """Return the first truthy value of ``look``; fail if there is none in time."""
    end_s = time.monotonic() + within_s
    while not (value := look()):
        assert time.monotonic() < end_s, f"not within {within_s:g} s: {what}"
        select.select([], [], [], 0.001)
    return value


SALUS = "zico.lab.policies.salus"
"""The one program of another system's policy that real brokers run; compiling it would keep them from their jobs."""


@functools.cache
def compile_once() -> None:
    """Let the compiled code be on disk before anything is timed."""
    command = f"from zico.base import warming; warming.compile_all(*warming.ALL, {SALUS!r})"
    done = subprocess.run(
        [sys.executable, "-c", command],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def clean_environment() -> dict[str, str]:
    """Return this process's environment without anything of Zico's, and quiet frameworks; who aborts says where."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ZICO_") or "CACHE" in name}
    kept |= {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return kept | {"ZICO_PROFILES": "off"}  # no test is another one's earlier run


# -- processes that begin where something is loaded ----------------------------------------------


@functools.cache
def warm(what: str) -> list[str]:
    """Return the command that runs a script where something is loaded (``warm.py``), as long as this process lives."""
    compile_once()
    directory = tempfile.mkdtemp(prefix="zw-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = Path(directory) / "s"
    server = [sys.executable, str(HERE / "warm.py"), "serve", what, str(path)]
    process = subprocess.Popen(server, stdin=subprocess.PIPE, env=clean_environment())
    atexit.register(process.kill)
    until(lambda: path.exists() or process.poll() is not None, PATIENCE_S, f"{what} is loaded")
    assert process.poll() is None, f"{what} could not be loaded"
    return [sys.executable, "-I", "-S", str(HERE / "warm.py"), str(path)]


# -- the pool --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Look:
    """One look at the shared table, all of it copied at once."""

    header: Any
    regions: Any
    jobs: Any
    physical_bytes: int

    def held(self, job: int) -> int:
        """Return the regions that the job owns, counted one by one."""
        return int((self.regions["owner"] == job).sum())

    @property
    def granted(self) -> int:
        """Return the regions that somebody owns, counted one by one."""
        return int((self.regions["owner"] >= 0).sum())

    def check(self) -> None:
        """Assert invariants 1 to 3 and that every counter agrees with the owners."""
        header = self.header
        assert self.granted <= header["budget_regions"], "invariant 1"
        assert self.physical_bytes <= header["budget_regions"] * header["region_bytes"], "invariant 1, by the kernel"
        assert self.granted == header["granted"], "granted is the number of owned regions"
        living = self.jobs["state"] != JobState.EMPTY
        assert set(self.regions["owner"]) - {NOBODY} <= set(np.flatnonzero(living)), "invariant 2: owners live"
        for job in np.flatnonzero(living):
            assert self.held(job) == self.jobs["held"][job], f"held of job {job} is the number of its regions"
        assert sorted(self._free_list()) == np.flatnonzero(self.regions["owner"] == NOBODY).tolist(), "the free list"
        assert header["waiters"] == self.jobs["waiting_threads"][living].sum(), "threads that wait"
        waits = (self.jobs["state"] == JobState.BOUNDARY) & (self.jobs["paused"] == 0)
        assert header["boundary_waiters"] == waits.sum(), "jobs that wait"

    def _free_list(self) -> list[int]:
        """Walk the free list; a walk longer than there are regions is cut."""
        found: list[int] = []
        region = int(self.header["free_head"])
        while region != NOBODY and len(found) <= len(self.regions):
            found.append(region)
            region = int(self.regions["next"][region])
        return found

    def check_safe(self, claim: Callable[[Any], int]) -> None:
        """Assert invariant 3 by trying the orders.

        Args:
            claim: The most regions that a job, given its record, will yet hold in its iteration, as
                the test knows.
        """
        running = [
            (int(job["held"]), max(int(job["held"]), claim(job)), int(job["persistent"]))
            for job in self.jobs[self.jobs["state"] == JobState.RUNNING]
        ]
        free = int(self.header["budget_regions"]) - self.granted
        assert _can_all_finish(free, running), f"invariant 3: {free} free, (held, claim, keeps) {running}"


def _can_all_finish(free: int, running: list[tuple[int, int, int]]) -> bool:
    """Tell whether some order lets every job get all of its claim and end."""
    if not running:
        return True
    for i, (held, claim, residual) in enumerate(running):
        if claim - held <= free and _can_all_finish(free + held - residual, running[:i] + running[i + 1 :]):
            return True
    return False


def _listener(path: Path) -> int:
    """Return the process that listens at a socket (``SO_PEERCRED`` of unix(7))."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


class Pool:
    """A broker process, and this process's view of its table and of its memory."""

    def __init__(self, directory: Path, *options: str, regions: int, region_bytes: int) -> None:
        """Start a broker with these options besides, and wait until it serves."""
        self.region_bytes = region_bytes
        self.socket = directory / "zico" / "s"
        self.pid = 0
        self.process = subprocess.Popen(
            [
                *warm("broker"), str(BROKER), "--no-warm", "--socket", str(self.socket),
                "--budget-bytes", str(regions * region_bytes), "--region-bytes", str(region_bytes), *options,
            ],
            env=clean_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.client = BrokerClient(self.socket, deadline_s=ANSWER_S)
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            assert self.process.stdout is not None
            undo.callback(self.process.stdout.close)
            assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], "the broker is not ready"
            assert self.process.stdout.readline() == "ready\n"
            self.pid = _listener(self.socket)
            self._memory_fd = self._descriptor("zico-pool")
            undo.callback(os.close, self._memory_fd)
            with os.fdopen(self._descriptor("zico-table"), "r+b") as table:
                self._table = np.memmap(table, np.uint8, "r+")
            self._undo = undo.pop_all()

    def _descriptor(self, label: str) -> int:
        """Open the broker's memfd of that name."""
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if f"memfd:{label} " in str(entry.readlink()):
                    return os.open(entry, os.O_RDWR)
        raise AssertionError(f"the broker has no memfd called {label}")

    def _end(self) -> None:
        self.client.close()
        if not self.pid:
            self.process.kill()
        elif self.process.poll() is None:  # else it is dead, and its number may be another's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.process.wait(timeout=ANSWER_S)

    def __enter__(self) -> Self:
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the broker."""
        self._undo.close()

    # -- the table as it is now, unlocked ----------------------------------------------------------

    @property
    def header(self) -> Any:  # noqa: ANN401 - a record
        """Return the living header."""
        return self._table[: HEADER.itemsize].view(HEADER)[0]

    @property
    def jobs(self) -> Any:  # noqa: ANN401 - an array of records
        """Return the living job records."""
        begin = layout.jobs_offset(int(self.header["n_regions"]))
        return self._table[begin : begin + MAX_JOBS * JOB.itemsize].view(JOB)

    @property
    def regions(self) -> Any:  # noqa: ANN401 - an array of records
        """Return the living region records."""
        begin = layout.regions_offset()
        return self._table[begin : begin + int(self.header["n_regions"]) * REGION.itemsize].view(REGION)

    @property
    def physical_bytes(self) -> int:
        """Return what the kernel says that the pool's memory takes."""
        return os.fstat(self._memory_fd).st_blocks * 512

    @property
    def granted(self) -> int:
        """Return the regions that somebody owns now."""
        return int((self.regions["owner"] >= 0).sum())

    def look(self) -> Look:
        """Return a consistent copy of the table; waits for the table's mutex."""
        from zico.pool import mutex
        from zico.pool.layout import MEMBER

        member = np.zeros(1, MEMBER)[0]
        base = self._table.ctypes.data
        member["header_address"] = base
        member["mutex_address"] = base + HEADER.fields["mutex"][1]  # type: ignore[index]
        member["regions_address"] = base + layout.regions_offset()
        member["jobs_address"] = base + layout.jobs_offset(int(self.header["n_regions"]))
        member["job"] = NOBODY
        mutex.lock_for_python(member)
        try:
            return Look(self.header.copy(), self.regions.copy(), self.jobs.copy(), self.physical_bytes)
        finally:
            mutex.unlock_for_python(member)

    def settled(self, condition: Callable[[Look], bool], what: str, within_s: float = ANSWER_S) -> Look:
        """Return the first consistent look that meets the condition."""

        def looked() -> Look | None:
            seen = self.look()
            return seen if condition(seen) else None

        seen = until(looked, within_s, what)
        assert seen is not None
        return seen

    def exceeds(self, field: str, places: list[int], than: Any) -> Callable[[], bool]:  # noqa: ANN401 - one or many
        """Return a condition: a counter of each of the jobs is above a number, or above one for each."""
        return lambda: bool(np.all(self.jobs[field][places] > than))

    def waits_for_memory(self, job: LightJob) -> None:
        """Wait until a thread of the job waits in an allocation."""
        until(lambda: self.jobs[job.place]["waiting_threads"] > 0, ANSWER_S, "the job waits for memory")

    def waits_at_boundary(self, job: LightJob) -> None:
        """Wait until the job waits for admission."""
        until(lambda: self.jobs[job.place]["state"] == JobState.BOUNDARY, ANSWER_S, "the job waits at its boundary")

    def kill_broker(self) -> None:
        """Kill the broker and wait until its number is free."""
        self._end()


@contextlib.contextmanager
def pool(
    directory: Path | None = None,
    *,
    regions: int = 16,
    region_bytes: int = 256 * KIB,
    policy: str = "zico",
    most: int = 0,
    isolate: bool = False,
    device: str = "host",
) -> Iterator[Pool]:
    """Give a pool with a broker of its own, whose invariants hold in the end."""
    options = ["--policy", policy, "--most-bytes", str(most * region_bytes), *["--isolate"] * isolate]
    options += ["--device", device]
    with contextlib.ExitStack() as owned:
        path = directory or Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="zp-")))
        made = owned.enter_context(Pool(path, *options, regions=regions, region_bytes=region_bytes))
        yield made
        made.look().check()


# -- jobs without a framework ----------------------------------------------------------------------


class LightJob:
    """A forked job that does what it is told, line by line."""

    def __init__(self, connection: socket.socket, pid: int = 0) -> None:
        """Wait for its first words: its process, which has the number ``pid`` here if any is given, and its place."""
        self._connection = connection
        self._unread = b""
        words = self.answer(PATIENCE_S).split()
        self.pid, self.place = pid or int(words[1]), int(words[2])
        self.pidfd = os.pidfd_open(self.pid)

    def tell(self, line: str) -> None:
        """Give an order; the answer is read later."""
        self._connection.sendall(line.encode() + b"\n")

    def ask(self, line: str, within_s: float = ANSWER_S) -> str:
        """Give an order and return the answer."""
        self.tell(line)
        return self.answer(within_s)

    def has_answered(self, within_s: float = 0) -> bool:
        """Tell whether there is an answer, or will be in time; the end of the job counts as one."""
        while b"\n" not in self._unread:
            if not select.select([self._connection], [], [], within_s)[0]:
                return False
            data = self._connection.recv(4096)
            if not data:
                return True
            self._unread += data
        return True

    def answer(self, within_s: float = ANSWER_S) -> str:
        """Return the next answer; fail if there is none in time or the job is dead."""
        assert self.has_answered(within_s), f"no answer within {within_s:g} s"
        line, end, self._unread = self._unread.partition(b"\n")
        assert end, "the job is dead"
        return line.decode()

    def is_stopped(self) -> bool:
        """Tell whether job control has stopped it."""
        return self._state() == "T"

    def sleeps(self) -> bool:
        """Tell whether its main thread sleeps in the kernel."""
        return self._state() == "S"

    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0]

    def send(self, number: int) -> None:
        """Send a signal."""
        signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Kill it and wait until it is dead."""
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self.wait_dead()

    def wait_dead(self) -> None:
        """Wait until the process is dead."""
        assert select.select([self.pidfd], [], [], ANSWER_S)[0], "the job is not dead"

    def close(self) -> None:
        """Kill it and let go of it."""
        self.kill()
        self._connection.close()
        os.close(self.pidfd)


class Nursery:
    """The process that jobs without a framework are forked from."""

    def __init__(self) -> None:
        """Start it and wait until everything is loaded."""
        compile_once()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.light_job", str(theirs.fileno())],
                env=clean_environment() | {"PYTHONPATH": str(TESTS)},
                pass_fds=(theirs.fileno(),),
            )
        assert select.select([self._connection], [], [], PATIENCE_S)[0], "the nursery is not ready"
        assert self._connection.recv(100) == b"ready"

    def close(self) -> None:
        """End it, and whatever came from it with it."""
        self._connection.close()
        self._process.kill()
        self._process.wait(timeout=ANSWER_S)

    def begin(self, pool: Pool, name: str, run: str = "") -> socket.socket:
        """Let a new job begin to join the pool; returns the connection on which it will answer, or die."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._connection, [f"{pool.socket} {name} {run}".encode()], [theirs.fileno()])
        return ours

    @contextlib.contextmanager
    def job(self, pool: Pool, name: str, run: str = "") -> Iterator[LightJob]:
        """Give a new job in the pool, of the run of that identity; it is dead when the block ends."""
        job = LightJob(self.begin(pool, name, run))
        try:
            yield job
        finally:
            job.close()
