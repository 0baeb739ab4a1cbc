"""What compiled code does without Python."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support import members
from cpu.support.zico_process import HEADLESS

from zico.base import compiled, libc
from zico.base.processes import started_at
from zico.heap.layout import HEAP
from zico.pool import waits
from zico.pool.living import hold_life
from zico.pool.table import make_mutex

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE_S = 20.0
WAITED_FOR = 2
"""Of a mutex of a process: it is held, and somebody waits."""


@compiled.compiled
def now_ns() -> int:
    """Read the clock."""
    return libc.monotonic_ns()


@compiled.compiled
def is_gone(pid: int, started: int) -> bool:
    """Ask for a process."""
    return libc.process_is_gone(pid, started)


@compiled.compiled
def is_stopped(thread: int) -> bool:
    """Ask for a thread."""
    return libc.thread_is_stopped(thread)


@compiled.compiled
def is_locked(descriptor: int) -> bool:
    """Ask for a file's lock."""
    return libc.file_is_locked(descriptor)


@compiled.compiled
def state(number: int) -> tuple[int, int, int]:
    """Ask for a state, its threads, its start."""
    return libc.state_of(number)


@compiled.compiled
def enter(mutex: int, wait_ns: int) -> tuple[int, int]:
    """Lock a mutex, waiting for so long; returns what that gave and who is inside."""
    code = libc.mutex_lock_within(mutex, wait_ns) if wait_ns else libc.mutex_try_lock(mutex)
    return code, libc.mutex_owner(mutex)


@compiled.compiled
def leave(mutex: int) -> None:
    """Unlock it."""
    libc.mutex_unlock(mutex)


@compiled.compiled
def lock(heap: Any) -> None:  # noqa: ANN401 - a HEAP record
    """Enter the heap's critical section."""
    libc.private_lock(heap.mutex_address)


@compiled.compiled
def unlock(heap: Any) -> None:  # noqa: ANN401 - a HEAP record
    """Leave it."""
    libc.private_unlock(heap.mutex_address)


@compiled.compiled
def rest(address: int, expected: int, timespec: int) -> None:
    """Sleep on a word."""
    libc.futex_wait(address, expected, timespec)


@compiled.compiled
def wake(address: int) -> None:
    """Wake who sleeps on a word."""
    libc.futex_wake_all(address)


@compiled.compiled
def spread_if_positive(number: int) -> int:
    """Spread a number of which the compiler knows the sign."""
    return compiled.spread(number, 32) if number > 0 else -1


class Word:
    """A word to sleep on."""

    def __init__(self, timeout_s: float) -> None:
        """Start at zero."""
        self._words = np.zeros(1, "i4")
        self._timespec = np.array([int(timeout_s), int(timeout_s % 1 * 1e9)], "i8")

    def rest(self, expected: int = 0) -> None:
        """Sleep while the word is ``expected``."""
        rest(self._words.ctypes.data, expected, self._timespec.ctypes.data)

    def wake(self) -> None:
        """Change the word, then wake."""
        self._words[0] += 1
        wake(self._words.ctypes.data)


def test_a_hash_is_the_same_wherever_it_is_computed() -> None:
    """A product that overflows is cut off, also where the compiler could take it not to overflow."""
    for number in (1, 2, 3, 4, 1003, (1 << 31) - 1, (1 << 62) + 5):
        assert spread_if_positive(number) == (number * 0x9E3779B97F4A7C15) % (1 << 64) >> 32


def test_the_clock_is_pythons() -> None:
    """``monotonic_ns`` reads the clock of ``time.monotonic_ns``."""
    now_ns()
    before = time.monotonic_ns()
    inside = int(now_ns())
    assert before <= inside <= time.monotonic_ns()


def test_a_futex_wait_ends_by_itself() -> None:
    """Without anybody to wake it, a sleep ends after its time, not before."""
    word = Word(0.02)
    before = time.monotonic()
    word.rest()
    assert 0.015 < time.monotonic() - before < DEADLINE_S


def test_a_futex_wait_on_another_value_returns_at_once() -> None:
    """A word that has changed already is not slept on."""
    word = Word(1000)
    before = time.monotonic()
    word.rest(expected=5)
    assert time.monotonic() - before < DEADLINE_S


def test_a_sleeping_thread_holds_no_gil_and_is_woken() -> None:
    """While one thread sleeps on a word, Python goes on in another, which can wake it."""
    word = Word(1000)
    thread = threading.Thread(target=word.rest, daemon=True)
    thread.start()
    end = time.monotonic() + DEADLINE_S
    while thread.is_alive() and time.monotonic() < end:
        word.wake()
        thread.join(0.005)
    assert not thread.is_alive()


def test_a_wait_for_the_pool_ends_after_its_slice() -> None:
    """Invariant 7: a sleep for a change that never comes ends after one slice."""
    with members.make_pool(2) as pool, members.join(pool) as member:
        before = time.monotonic()
        waits.sleep_until_change(member.member[0], int(pool.header["sequence"]))
        assert time.monotonic() - before < DEADLINE_S


def test_a_mutex_keeps_others_out() -> None:
    """A thread gets the heap's mutex only when the thread that has it lets go."""
    record: Any = np.zeros(1, HEAP)
    record["mutex_address"] = record.ctypes.data + HEAP.fields["mutex"][1]
    inside = threading.Event()

    def enter() -> None:
        lock(record[0])
        inside.set()
        unlock(record[0])

    lock(record[0])
    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    end = time.monotonic() + DEADLINE_S
    while record[0]["mutex"] != WAITED_FOR and not inside.is_set():
        assert time.monotonic() < end, "nobody waits"
        thread.join(0.001)
    assert not inside.is_set()
    unlock(record[0])
    assert inside.wait(DEADLINE_S)
    thread.join(DEADLINE_S)


def test_a_process_is_gone_when_it_has_ended_although_nobody_has_reaped_it() -> None:
    """A living process is there; a zombie, a free number and a later process's are gone, in Python and compiled."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        began = started_at(child.pid)
        assert began is not None
        assert not is_gone(child.pid, began)
        assert is_gone(child.pid, began - 1), "its number was an earlier process's"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(child.pid, began)
        assert started_at(child.pid) is None
    finally:
        child.communicate(timeout=DEADLINE_S)
    assert is_gone(child.pid, began)
    assert started_at(child.pid) is None


def test_a_lock_lasts_as_long_as_the_open_file_that_has_it() -> None:
    """Whoever has the file open otherwise sees it; where nobody can tell, the file counts as locked."""
    file = os.memfd_create("locked")
    try:
        assert not is_locked(file)
        life = hold_life(file)
        assert is_locked(file)
        assert not is_locked(life), "it is no obstacle to itself"
        second = hold_life(file)
        os.close(life)
        assert is_locked(file)
        os.close(second)
        assert not is_locked(file)
    finally:
        os.close(file)
    assert is_locked(-1)


def test_a_process_lives_whose_first_thread_has_ended() -> None:
    """The kernel calls it a zombie, but its other threads run on, and may use what is the process's."""
    with subprocess.Popen([sys.executable, "-c", HEADLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.read(1) == b"."
        began = started_at(child.pid)
        assert state(child.pid)[:2] == (ord("Z"), 2)
        assert began is not None
        assert not is_gone(child.pid, began)
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(child.pid, began)
        assert started_at(child.pid) is None


def test_a_state_is_what_the_kernel_says_of_a_process_and_a_thread() -> None:
    """Its letter, its threads and its start are told, also of one that nobody has reaped; of a free number, that."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        began = started_at(child.pid)
        assert began is not None
        assert state(child.pid)[1:] == (1, began)
        assert chr(state(child.pid)[0]) in "RSD"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert state(child.pid) == (ord("Z"), 1, began), "nobody has reaped it"
    finally:
        child.communicate(timeout=DEADLINE_S)
    assert state(child.pid) == (libc.NO_PROCESS, 0, 0)
    assert state(os.getpid())[1:] == (len(os.listdir("/proc/self/task")), started_at(os.getpid()))  # noqa: PTH208 - counted
    assert state(threading.get_native_id())[0] == ord("R")


def test_a_state_that_cannot_be_read_is_no_death() -> None:
    """A process that may open no file cannot tell, and takes nobody for dead."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    state(os.getpid())
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found = state(os.getpid()), state(1 << 22)
        with pytest.raises(OSError, match="Too many open files"):
            started_at(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == ((libc.CANNOT_TELL, 0, 0), (libc.NO_PROCESS, 0, 0)), "no process has a number above 2**22"


def test_a_thread_is_stopped_by_job_control_only() -> None:
    """Not while it sleeps or after its end; a name in brackets with a state in it does not count."""
    program = "import sys; open('/proc/self/comm', 'w').write('a) T (b'); print(); input()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert not is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert is_stopped(child.pid)
        child.send_signal(signal.SIGCONT)
        os.waitpid(child.pid, os.WCONTINUED)
        assert not is_stopped(child.pid)
    finally:
        child.send_signal(signal.SIGCONT)
        child.communicate(b"\n", timeout=DEADLINE_S)
    assert not is_stopped(child.pid)
    assert not is_stopped(os.getpid())


SET_BACK = """
import ctypes, sys, threading, time
import llvmlite.binding
import numpy as np

class Timespec(ctypes.Structure):
    _fields_ = [("s", ctypes.c_int64), ("ns", ctypes.c_int64)]

real = ctypes.CDLL(None).clock_gettime

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(Timespec))
def ahead(number, found):
    code = real(number, found)
    if number == time.CLOCK_REALTIME:
        found.contents.s += 3600
    return code

llvmlite.binding.add_symbol("clock_gettime", ctypes.cast(ahead, ctypes.c_void_p).value)

from zico.base import libc
from zico.base.compiled import compiled
from zico.pool.table import make_mutex

@compiled
def enter(mutex, wait_ns):
    return libc.mutex_lock_within(mutex, wait_ns)

mutex = np.zeros(8, "i8")
make_mutex(mutex.ctypes.data)
assert enter(mutex.ctypes.data, 1) == 0
for clocklock in (libc._CLOCKLOCK[0], 0):
    libc._CLOCKLOCK[0] = clocklock
    found = []
    thread = threading.Thread(target=lambda: found.append(enter(mutex.ctypes.data, 20_000_000)), daemon=True)
    thread.start()
    thread.join(20)
    print(found)
"""


def test_a_wall_clock_that_is_set_back_makes_no_wait_for_a_mutex_longer(tmp_path: Path) -> None:
    """A clock that is an hour ahead when a wait begins changes nothing, also on a C library that is old."""
    script = tmp_path / "set_back.py"
    script.write_text(SET_BACK)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * DEADLINE_S, check=False)
    assert (done.stdout, done.returncode) == (f"[{libc.ETIMEDOUT}]\n" * 2, 0), done.stderr


def test_a_mutex_is_waited_for_so_long_and_says_who_is_inside() -> None:
    """Nobody, this thread, and then for another thread still this one until it has left."""
    mutex = np.zeros(8, "i8")
    make_mutex(mutex.ctypes.data)
    address = mutex.ctypes.data
    found = []
    assert enter(address, 0) == (0, threading.get_native_id())
    for wait_ns in (0, 1, 20_000_000):
        thread = threading.Thread(target=lambda wait_ns=wait_ns: found.append(enter(address, wait_ns)))
        begin_ns = time.monotonic_ns()
        thread.start()
        thread.join(DEADLINE_S)
        assert time.monotonic_ns() - begin_ns >= wait_ns
    assert found == [(code, threading.get_native_id()) for code in (libc.EBUSY, *[libc.ETIMEDOUT] * 2)]
    leave(address)
    assert enter(address, 1) == (0, threading.get_native_id())
    leave(address)


def test_an_unknown_name_of_the_c_library_is_an_error() -> None:
    """A function that the C library does not have is an ``AttributeError``, not an address."""
    assert libc.libc_address("free") > 0
    with pytest.raises(AttributeError):
        libc.libc_address("zico_has_no_such_function")
