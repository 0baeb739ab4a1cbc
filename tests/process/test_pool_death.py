"""Deaths inside the pool: whatever is killed wherever, the others go on (invariant 5)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.members import acquire, check_counters, free_list, grab, job_of, join, make_pool, owners
from process.support.pool_victims import OPERATIONS

from zico.base.processes import started_at
from zico.pool import boundaries, waits
from zico.pool.layout import NOBODY, JobState
from zico.pool.results import GRANTED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.pool.table import PoolTable

Record = Any
DEADLINE_S = 60.0
VICTIMS = "process.support.pool_victims"
TRIALS = 25
DEATHS_S = 2 * DEADLINE_S

VICTIM = """
import sys
import numpy as np
from zico.pool import boundaries, mutex, regions, results, waits
from zico.pool.table import PoolTable

memory_fd, table_fd, notify_fd, job = map(int, sys.argv[1:5])
member = PoolTable.join_pool(memory_fd, table_fd, notify_fd, job)
record = member.member[0]
wanted = np.full(3, -1, "i4")
assert regions.acquire(record, wanted, 3, regions.HOST_SLOT) == results.GRANTED
what = sys.argv[5]
if what == "inside":
    mutex.lock_for_python(record)
    member.header["granted"] = 77
    member.header["free_head"] = -1
    member.regions["next"] = 0
elif what == "waiting":
    waits.start_waiting(record, 5)
elif what == "boundary":
    boundaries.finish_iteration(record, 0)
print("ready", flush=True)
if what == "waiting":
    while True:
        waits.sleep_until_change(record, member.header["sequence"])
elif what == "boundary":
    boundaries.await_admission(record)
sys.stdin.read()
"""


@pytest.fixture
def pool() -> Iterator[PoolTable]:
    """Make a pool of eight regions in which nobody starts unasked."""
    with make_pool(8, unasked=False) as pool:
        yield pool


@contextlib.contextmanager
def victim(pool: PoolTable, what: str) -> Iterator[subprocess.Popen[str]]:
    """Start a job in a process of its own that holds three regions and comes to a certain place; kill it there."""
    job = pool.join(0, "victim")
    copies = [os.dup(fd) for fd in (pool.memory_fd, pool.table_fd, pool.notify_fd)]
    process = subprocess.Popen(
        [sys.executable, "-c", VICTIM, *map(str, copies), str(job), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=copies,
        text=True,
    )
    pool.jobs[job]["pid"], pool.jobs[job]["started"] = process.pid, started_at(process.pid)
    with process:
        try:
            for fd in copies:
                os.close(fd)
            guard = threading.Timer(DEADLINE_S, process.kill)
            guard.start()
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            guard.cancel()
            yield process
        finally:
            process.kill()


def _kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)


def _in_time(work: Record) -> None:
    """Run something that must not block for ever."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("what", ["idle", "inside", "waiting", "boundary"])
def test_what_a_killed_job_held_comes_back(pool: PoolTable, what: str) -> None:
    """Invariant 5: a job killed idle, inside the mutex, in a wait or at its boundary leaves nothing behind."""
    with join(pool) as other, victim(pool, what) as process:
        pool.header["alone_job"] = NOBODY
        _kill(process)
        _in_time(pool.snapshot)
        assert pool.header["recoveries"] == (1 if what == "inside" else 0)
        check_counters(pool)
        assert pool.header["granted"] == 3
        assert pool.reap(1) == 3
        assert len(free_list(pool)) == 8
        assert [int(pool.header[field]) for field in ("waiters", "boundary_waiters", "granted")] == [0, 0, 0]
        assert pool.jobs[1]["state"] == JobState.EMPTY
        grab(other, 8)


def test_a_waiting_allocation_survives_a_death_inside(pool: PoolTable) -> None:
    """Invariants 5 and 7: a thread that waits for memory gets what the dead held, although it died with the mutex."""
    with join(pool) as other, victim(pool, "inside") as process:
        pool.header["alone_job"] = NOBODY
        pool.header["use_claims"] = 0
        got: list[int] = []

        def wait_for_all() -> None:
            waits.start_waiting(other.member[0], 8)
            while not got:
                sequence = int(pool.header["sequence"])
                status, granted = acquire(other, [NOBODY] * 8)
                if status == GRANTED:
                    got.extend(granted)
                else:
                    waits.sleep_until_change(other.member[0], sequence)
            waits.stop_waiting(other.member[0])

        thread = threading.Thread(target=wait_for_all, daemon=True)
        thread.start()  # sleeps in the mutex or on the futex
        _kill(process)
        _in_time(lambda: pool.reap(1))
        thread.join(DEADLINE_S)
        assert sorted(got) == list(range(8))
        assert pool.header["waiters"] == 0


def test_jobs_go_on_when_the_broker_dies_inside(pool: PoolTable) -> None:
    """Invariants 5 and 7: with the broker killed in the mutex a job starts by itself and reaps the dead."""
    with join(pool) as member, victim(pool, "inside") as broker:
        pool.header["alone_job"] = NOBODY
        pool.resign()
        _kill(broker)
        assert not boundaries.finish_iteration(member.member[0], 0)
        _in_time(lambda: boundaries.await_admission(member.member[0]))
        assert pool.jobs[job_of(member)]["state"] == JobState.RUNNING
        assert pool.header["recoveries"] == 1
        check_counters(pool)
        assert owners(pool) == [NOBODY] * 8


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_death_at_any_instruction_harms_nobody(deaths: dict[str, dict[str, Any]], operation: str) -> None:
    """Invariant 5: killed after any of its instructions, an operation leaves a pool in which the others go on."""
    found = deaths[operation]
    assert found["fault"] is None, found["fault"]
    assert found["instructions"] > 100
    assert found["left"]["recoveries"] > 2, "most of an operation is inside the mutex"
