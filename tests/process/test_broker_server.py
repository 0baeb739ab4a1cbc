"""A real broker process and real jobs: joining, dying, asking."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from process.support.broker_process import (
    BUDGET_BYTES,
    N_REGIONS,
    REGION_BYTES,
    Broker,
    close_all,
    job,
    read_line,
    tell,
)
from support.harness import ANSWER_S

from zico.base.errors import BrokerError, LocalProtocolError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator


# -- joining and asking ----------------------------------------------------------------------------


def test_a_job_joins_and_gets_memory_table_and_pipe(broker: Broker) -> None:
    """The welcome tells the pool's sizes, and the three descriptors are its memory, its table and its pipe."""
    membership = broker.client.join("first", "torch")
    assert (membership.job, membership.policy) == (0, "none")
    assert (membership.region_bytes, membership.n_regions) == (REGION_BYTES, N_REGIONS)
    assert membership.budget_bytes == os.fstat(membership.memory_fd).st_size == BUDGET_BYTES
    assert "memfd" in str(Path(f"/proc/self/fd/{membership.table_fd}").readlink())
    assert "pipe" in str(Path(f"/proc/self/fd/{membership.notify_fd}").readlink())
    (status,) = broker.client.status().jobs
    assert (status.name, status.pid, status.framework, status.state) == ("first", os.getpid(), "torch", "running")
    close_all(membership)


def test_a_member_that_leaves_and_lives_keeps_its_place_as_leaving(broker: Broker) -> None:
    """Goodbye ends the connection, not the use of memory: regions come back only with the process's end."""
    with job(broker, "a", hold=3) as process:
        tell(process, "leave")
        assert read_line(process) == "left"
        status = broker.until(lambda status: status.jobs[0].state == "leaving", ANSWER_S)
        assert status.granted_bytes == 3 * REGION_BYTES
        process.kill()
        status = broker.until(lambda status: not status.jobs, ANSWER_S)
    assert status.granted_bytes == 0
    (report,) = broker.client.report().jobs
    assert (report.name, report.peak_bytes) == ("a", 3 * REGION_BYTES)


def test_a_process_that_replaces_its_program_gives_up_what_the_old_one_held(broker: Broker) -> None:
    """After exec the old program's regions are nobody's, and the new one joins afresh."""
    with job(broker, "a", hold=3) as process:
        tell(process, "exec")
        assert read_line(process).startswith("joined")
        status = broker.until(lambda status: [job.state for job in status.jobs] == ["running"], ANSWER_S)
        assert status.granted_bytes == 0


def test_a_forked_child_does_not_say_goodbye_for_its_parent(broker: Broker) -> None:
    """Leaving in a forked child closes only the child's copy of the connection."""
    membership = broker.client.join("parent", "torch")
    child = os.fork()
    if not child:
        membership.leave()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [job.state for job in broker.client.status().jobs] == ["running"]
    close_all(membership)


@pytest.mark.parametrize("name", ["\N{SNOWMAN}" * 17, "x" * 49, "", "a\x1bb"])
def test_a_name_that_the_table_cannot_hold_is_refused(undisturbed: Broker, name: str) -> None:
    """Too many bytes, too many characters, none at all and control characters are refused on one side or the other."""
    with pytest.raises((BrokerError, LocalProtocolError)):
        undisturbed.client.join(name, "torch")
    assert name not in undisturbed.names()


def test_when_all_places_are_taken_the_next_is_refused(broker: Broker) -> None:
    """The 65th member is told so and the others stay."""
    with contextlib.ExitStack() as members:
        for number in range(64):
            members.callback(close_all, broker.client.join(f"job {number}", "torch"))
        with pytest.raises(BrokerError, match="all 64 places"):
            broker.client.join("one more", "torch")
        assert len(broker.names()) == 64


# -- deaths ----------------------------------------------------------------------------------------


def test_a_killed_members_place_and_regions_come_back(broker: Broker) -> None:
    """After SIGKILL the other member stays, and what the dead one held is free."""
    with job(broker, "victim", hold=5) as victim, job(broker, "other", hold=2):
        assert broker.client.status().granted_bytes == 7 * REGION_BYTES
        victim.kill()
        status = broker.until(lambda status: len(status.jobs) == 1, ANSWER_S)
        assert (status.jobs[0].name, status.granted_bytes) == ("other", 2 * REGION_BYTES)
    victim_report = broker.client.report().jobs[0]
    assert (victim_report.name, victim_report.peak_bytes) == ("victim", 5 * REGION_BYTES)


def test_a_dead_member_is_noticed_though_its_child_keeps_the_connection(broker: Broker) -> None:
    """A forked data loader that outlives its killed parent does not keep the parent's place."""
    with job(broker, "parent", hold=5) as parent:
        tell(parent, "fork")
        child = int(read_line(parent).split()[1])
        try:
            parent.kill()
            status = broker.until(lambda status: not status.jobs, ANSWER_S)
        finally:
            os.kill(child, signal.SIGKILL)
    assert status.granted_bytes == 0


# -- boundaries ------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_runs_one_waits(broker: Broker) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """Run two jobs until the first is inside its second iteration and the other waits for it at its boundary."""
    with job(broker, "a") as a, job(broker, "b") as b:
        tell(a, "iterate")
        assert [read_line(a), read_line(a)] == ["boundary", "began"]
        tell(b, "iterate")
        assert read_line(b) == "boundary"
        broker.until(lambda status: status.jobs[1].waits_for == (0,), ANSWER_S)
        yield a, b


def test_under_serial_one_iterates_while_the_other_waits_and_then_they_change(start: Callable[..., Broker]) -> None:
    """A job at its boundary starts when the running one reaches its own: a pipe and a futex wake them."""
    broker = start("--policy", "serial")
    with one_runs_one_waits(broker) as (a, b):
        waiting = broker.client.status().jobs[1]
        assert (waiting.state, waiting.iterations) == ("boundary", 1)
        for running, waiter in ((a, b), (b, a), (a, b)):
            tell(running, "iterate")
            assert read_line(running) == "boundary"
            assert read_line(waiter) == "began"
        report = broker.client.report()
    assert [entry.iterations for entry in report.jobs] == [3, 2]
    assert all(entry.boundary_waited_s > 0 for entry in report.jobs)
    with np.load(broker.record, allow_pickle=False) as record:
        assert sorted(set(record["wait_job"].tolist())) == [0, 1]
        assert set(record["wait_kind"].tolist()) == {0}
        assert np.bincount(record["boundary_job"]).tolist() == [3, 2]


def test_a_write_to_the_pipe_is_taken_in(broker: Broker) -> None:
    """After a wake-up the pipe is empty again, so that the broker sleeps until the next one."""
    membership = broker.client.join("a", "torch")
    os.write(membership.notify_fd, bytes(8))
    end_s = time.monotonic() + ANSWER_S
    while select.select([membership.notify_fd], [], [], 0)[0]:
        assert time.monotonic() < end_s
    close_all(membership)


def test_a_job_that_waits_for_a_killed_one_starts(start: Callable[..., Broker]) -> None:
    """Whoever waits at its boundary for a job that dies goes on."""
    with one_runs_one_waits(start("--policy", "serial")) as (a, b):
        a.kill()
        assert read_line(b) == "began"
