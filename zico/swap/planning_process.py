"""Plans to save memory are worked out in a process of its own, beside the job.

Theory of operation
    A planner is Python that computes for seconds. In a thread of the job it would hold the GIL,
    which the thread that launches kernels needs a thousand times an iteration. So a job asks a
    process, and the thread that asks only waits, without the GIL. The process is started when a
    planner that takes time is first asked, and ends after a minute without work. It has one end of
    a socket pair, and gets requests and gives answers as pickles, each with its length ahead::

        job        request ...... waits ...... answer        nothing to plan       its end
        process            starts, plans (nice 5)            waits, then ends      ends, too

    What takes milliseconds is worked out in the job: plans by ``longest``, times of a plan's copies,
    and the operating points of an iteration with few events.

Guarantees
    * The process ends when the job does, however that dies and whatever the process computes. While
      it plans, the kernel sends it SIGIO when the other end closes, which ends it in machine code,
      too. While it waits it also watches the job's pidfd: C code that forks without ``exec`` would
      keep the other end open.
    * It is no child of the job's: the job's script may wait for all children that it has.
    * It joins no pool and imports no framework, and none of the user's code runs in it: it starts
      isolated (``zico.base.interpreter``), and without Zico's variables.
    * It has the job's session, so ``zico run`` ends it with the job's processes. The signals that
      ask a job to end are the job's to answer.
    * Each wait has a deadline. Time for which the job is stopped does not count.
    * A process that cannot start, dies or is late is given up for as long as the job lives.
    * A forked child closes its copy of the socket and plans nothing.

Known limitations
    * Each job that plans has one. It starts in 0.3 s and takes 110 MiB with the planner ``zico``,
      of which 43 MiB are its own and the rest files that all such processes share. Planners that
      need SciPy take up to 190 MiB, 100 of them their own. No budget counts that.
    * The job's script gets one SIGCHLD for each start, of a process that is reaped at once.
    * Where others keep all processors busy, it gets a quarter of one. Plans come later then.
    * Where process 1 reaps no orphans, one dead process is left for each start.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import math
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

from zico.base import interpreter
from zico.base.errors import ConfigError
from zico.planning.saving.registry import LONGEST
from zico.swap.learning import ways
from zico.swap.schedule import MOST_HIGHER, PLANNING_S, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zico.planning.packing.problem import NoPlan
    from zico.swap.learning import Way
    from zico.swap.observed import Observed
    from zico.swap.schedule import Chosen
    from zico.tiers.layout import Rates

    Value = TypeVar("Value")

    class Wait(Protocol):
        """Waits for a call on a socket."""

        def __call__(self, act: Callable[[], Value]) -> Value:
            """Return what ``act`` returns."""


START_S = 60.0
COMPILING_S = 120.0
"""The first plan on a machine compiles its planner."""
ANSWER_S = START_S + COMPILING_S + 2 * PLANNING_S * MOST_HIGHER
"""Most time from a question to its answer: planners may take a little longer than they are given."""
IDLE_S = 60.0
"""After which a process without work ends."""
NICENESS = 5
MANY_EVENTS = 500
"""With more of them, operating points take more than tens of milliseconds: a process is worth its start."""

_BEGIN = """\
import os, sys
os.fork() and os._exit(0)
from zico.swap.planning_process import serve
serve(int(sys.argv[1]), float(sys.argv[2]))
"""
_KEPT = ("ZICO_CACHE_DIR", "ZICO_COMPILER")
"""Variables that say where compiled code is."""
_LENGTH = struct.Struct("<q")
_FAREWELL = b""
"""What a process sends that ends for want of work."""
_SLICE_S = 1.0
_PIECE_BYTES = 1 << 16
_HANG_UP = select.POLLHUP | select.POLLRDHUP | select.POLLERR


class _Late(Exception):  # noqa: N818 - nothing is wrong with it but its time
    """There is no answer in time."""


class _Over(Exception):  # noqa: N818 - says what is so
    """There is no planning process any more, and will be none."""


def _simply(act: Callable[[], Value]) -> Value:
    """Wait without a deadline."""
    return act()


class _Patience:
    """What is left of the time for an answer, in waits of a second: one that the job is stopped in counts as one."""

    def __init__(self, limit_s: float) -> None:
        """Have so many seconds."""
        self.limit_s = limit_s
        self._left = math.ceil(limit_s / _SLICE_S)

    def wait(self, act: Callable[[], Value]) -> Value:
        """Return what ``act`` returns, which raises ``TimeoutError`` after a second at most.

        Raises:
            _Late: The time is over.
        """
        while self._left > 0:
            with contextlib.suppress(TimeoutError):
                return act()
            self._left -= 1
        raise _Late


# -- in the job ------------------------------------------------------------------------------------


class _Ends:
    """What this process has of a planning process: our end of the socket, its pidfd, and what it says on stderr."""

    def __init__(self) -> None:
        """Make what a process needs to be started."""
        self.connection, self.theirs = socket.socketpair()
        self.connection.settimeout(_SLICE_S)
        self.said = os.memfd_create("zico-planning")
        self.pidfd: int | None = None
        self._lock = threading.Lock()
        self._is_open = True

    def end(self) -> None:
        """Kill the process, and wake who waits for it."""
        with self._lock:
            if not self._is_open:
                return
            if self.pidfd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all of it; does nothing the second time."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self.close_copies()

    def close_copies(self) -> None:
        """Close all of it in a forked child, where nobody else is."""
        self.connection.close()
        self.theirs.close()
        os.close(self.said)
        if self.pidfd is not None:
            os.close(self.pidfd)

    def last_line(self) -> str:
        """Return the last line that the process has written on stderr."""
        return os.pread(self.said, _PIECE_BYTES, 0).decode(errors="replace").strip().rpartition("\n")[2]


class PlanningProcess:
    """Asks a process beside this one for plans."""

    def __init__(self, *, answer_s: float = ANSWER_S, idle_s: float = IDLE_S, begin: str = _BEGIN) -> None:
        """Start nothing yet.

        Args:
            answer_s: Most time from a question to its answer.
            idle_s: After which a process without work ends.
            begin: What it runs, in Python.
        """
        self._answer_s, self._idle_s, self._begin = answer_s, idle_s, begin
        self._asking = threading.Lock()
        self._ends: _Ends | None = None
        self._is_over = False
        self._failure = ""
        self.pid = 0
        """The process that there is, or was last; 0: none has started."""
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def choose(self, seen: Observed, limit_bytes: int, rates: Rates, planner: str) -> Chosen | NoPlan | None:
        """Return what ``swap_schedule.choose`` does, of which it has arguments and meaning.

        Waits for the process, ``answer_s`` at most. Once that is closed, nothing is chosen.

        Raises:
            ConfigError: The planner cannot plan here. Or the process could not start, has died or
                was late.
        """
        if planner == LONGEST:
            return None
        with contextlib.suppress(_Over):
            chosen: Chosen | NoPlan | None = self._ask(choose, seen, limit_bytes, rates, planner)
            return chosen
        if self._failure:
            raise ConfigError(self._failure)
        return None

    def ways(self, seen: Observed, rates: Rates, margin: float) -> list[Way]:
        """Return what ``swap_learning.ways`` does; the process works that out where it runs, or where it takes long."""
        with contextlib.suppress(_Over):
            if self._ends is not None or len(seen.sequence) > MANY_EVENTS:
                found: list[Way] = self._ask(ways, seen, rates, margin)
                return found
        return ways(seen, rates, margin)

    def close(self) -> None:
        """End the process, without waiting for it; a thread that waits for its answer goes on without."""
        self._is_over = True
        ends = self._ends
        if ends is not None:
            ends.end()
        if self._asking.acquire(timeout=_SLICE_S):
            self._let_go()
            self._asking.release()

    def _ask(self, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - of the function
        """Return what a function returns in the process.

        Raises:
            _Over: There is no process, or none any more.
        """
        request = pickle.dumps((function, arguments))
        patience = _Patience(self._answer_s)
        with self._asking:
            try:
                answer = self._answer_to(request, patience)
            except _Late:
                self._fail(f"gave no answer within {self._answer_s:g} s")
            except (EOFError, ConnectionResetError):
                self._fail("ended before it answered")
            except OSError as error:
                self._fail(f"could not be started ({error})")
        is_answer, value = pickle.loads(answer)  # noqa: S301 - from our own process
        if not is_answer:
            raise value
        return value

    def _answer_to(self, request: bytes, patience: _Patience) -> bytes:
        while True:
            if self._is_over:
                raise _Over
            if self._ends is None:
                self._start(patience)
            ends = cast("_Ends", self._ends)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has said farewell, or is dead
                _send(ends.connection, request, patience.wait)
            answer = _receive(ends.connection, patience.wait)
            if answer != _FAREWELL:
                return answer
            self._let_go()  # it has ended for want of work: another one starts

    def _start(self, patience: _Patience) -> None:
        """Start the process, and wait until it says who it is."""
        ends = self._ends = _Ends()
        if self._is_over:  # closed meanwhile
            self._let_go()
            raise _Over
        launcher = subprocess.Popen(  # noqa: S603 - this Python
            interpreter.command("-c", self._begin, str(os.getpid()), str(self._idle_s)),
            env=_environment(),
            stdin=ends.theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=ends.said,
        )
        ends.theirs.close()
        try:
            launcher.wait(START_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
            raise _Late from None
        receive = partial(socket.recv_fds, ends.connection, _LENGTH.size, 1, socket.MSG_CMSG_CLOEXEC)
        hello, pidfds, _, _ = patience.wait(receive)
        if not pidfds:
            raise EOFError
        (self.pid,), (ends.pidfd,) = _LENGTH.unpack(hello), pidfds

    def _fail(self, what: str) -> NoReturn:
        """Give the process up.

        Raises:
            _Over: Always.
        """
        if not self._is_over:
            self._is_over = True
            line = self._ends.last_line() if self._ends is not None else ""
            said = f", its last line is {line!r}" if line else ""
            self._failure = f"the process that plans {what}{said}: --save swap needs none"
        self._let_go()
        raise _Over

    def _let_go(self) -> None:
        ends, self._ends = self._ends, None
        if ends is not None:
            ends.end()
            ends.close()

    def _leave_to_parent(self) -> None:
        """Have no process, and end none: for a forked child."""
        self._asking = threading.Lock()
        self._is_over, self._failure = True, ""
        ends, self._ends = self._ends, None
        if ends is not None:
            ends.close_copies()


def _environment() -> dict[str, str]:
    """Return this process's environment without what makes a job of a process."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ZICO") or name in _KEPT}


# -- messages --------------------------------------------------------------------------------------


def _send(connection: socket.socket, message: bytes, wait: Wait = _simply) -> None:
    """Send a message; a peer that is gone raises, and sends no SIGPIPE."""
    waiting = memoryview(_LENGTH.pack(len(message)) + message)
    while waiting:
        waiting = waiting[wait(partial(connection.send, waiting, socket.MSG_NOSIGNAL)) :]


def _receive(connection: socket.socket, wait: Wait = _simply) -> bytes:
    """Receive a message.

    Raises:
        EOFError: The peer is gone.
    """
    (size_bytes,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, wait))
    return _exactly(connection, size_bytes, wait)


def _exactly(connection: socket.socket, size_bytes: int, wait: Wait) -> bytes:
    found = bytearray()
    while len(found) < size_bytes:
        piece = wait(partial(connection.recv, min(size_bytes - len(found), _PIECE_BYTES)))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


# -- in the process --------------------------------------------------------------------------------


def serve(job: int, idle_s: float) -> None:
    """Answer what comes in at descriptor 0, until the job's process is gone or nothing comes for ``idle_s``."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO})
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("zico-planning")
    connection = socket.socket(fileno=0)
    with contextlib.suppress(EOFError, ConnectionError, ProcessLookupError):
        job_pidfd, own_pidfd = os.pidfd_open(job), os.pidfd_open(os.getpid())
        socket.send_fds(connection, [_LENGTH.pack(os.getpid())], [own_pidfd])
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        poll.register(job_pidfd, select.POLLIN)
        while True:
            ready = dict(poll.poll(idle_s * 1000))
            if job_pidfd in ready:
                return
            if not ready:
                _send(connection, _FAREWELL)
                return
            request = _receive(connection)
            with _ending_with_the_job(connection):
                answer = _answer(request)
            _send(connection, answer)


@contextlib.contextmanager
def _ending_with_the_job(connection: socket.socket) -> Iterator[None]:
    """Let the kernel end this process when the other end is closed, even while it runs machine code."""
    descriptor = connection.fileno()
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    poll = select.poll()
    poll.register(descriptor, _HANG_UP)
    if poll.poll(0):  # it was closed before the kernel knew
        raise EOFError
    yield
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _answer(request: bytes) -> bytes:
    """Return what a function returns, or the error for the job."""
    function, arguments = pickle.loads(request)  # noqa: S301 - from our own job
    try:
        return pickle.dumps((True, function(*arguments)))
    except ConfigError as error:
        return pickle.dumps((False, error))
    except Exception as error:  # noqa: BLE001 - whatever fails, the job goes on without this plan
        return pickle.dumps((False, ConfigError(f"it failed with {type(error).__name__}: {error}")))
