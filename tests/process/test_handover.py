"""A broker dies, jobs go on, and the next broker takes their pool over from them."""

from __future__ import annotations

import contextlib
import random
import select
import signal
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest
from broker_process import PATIENCE_S, REGION_BYTES, Broker, job, kill, read_line, tell
from harness import ANSWER_S, LightJob, Nursery, Pool, pool, until

from zico.broker.notes import note_path, read_head
from zico.pool.layout import JobState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KILLS = 6
FOR_EVER = 1_000_000
REGIONS = 48


def places(made: Pool) -> dict[str, int]:
    """Return the jobs that the broker knows, with their places."""
    return {one.name: one.job for one in made.client.status().jobs}


@pytest.mark.parametrize("policy", ["zico", "serial"])
def test_brokers_killed_at_random_instants_leave_pool_and_jobs_to_the_next(
    nursery: Nursery, tmp_path: Path, policy: str
) -> None:
    """Invariants 1, 2, 5: jobs train on, one joins and one dies about each death, and each broker has all that live."""
    chance = random.Random(policy)  # noqa: S311 - for tests
    with contextlib.ExitStack() as owned:
        made = owned.enter_context(pool(tmp_path, policy=policy, regions=REGIONS))
        a, b = (owned.enter_context(nursery.job(made, name)) for name in "ab")
        a.tell(f"train {FOR_EVER} 20")
        b.tell("churn 99 2 60")  # it answers when it finds a byte that is not its own
        for number in range(KILLS):
            dies = owned.enter_context(nursery.job(made, f"dies{number}"))
            dies.tell(f"churn {number + 1} 2 60")
            begun = nursery.begin(made, f"joins{number}")
            select.select([], [], [], chance.uniform(0, 0.01))
            made.kill_broker()
            if number % 2:
                dies.kill()
            joins = LightJob(begun) if has_joined(begun) else None
            owned.callback(begun.close if joins is None else joins.close)
            made = owned.enter_context(Pool(tmp_path, "--policy", policy, regions=7, region_bytes=made.region_bytes))
            expected = {"a": a.place, "b": b.place}
            expected |= {} if number % 2 else {f"dies{number}": dies.place}
            expected |= {f"joins{number}": joins.place} if joins else {}
            # One that began to join, and could not, may take a moment to end.
            until(lambda made=made, expected=expected: places(made) == expected, ANSWER_S, "it has all that live")
            dies.kill()
            if joins is not None:
                joins.kill()
            made.settled(lambda look: (look.jobs["state"] != JobState.EMPTY).sum() == 2, "the dead have no place")
            done = made.jobs["iteration"][[a.place, b.place]].copy()
            until(made.exceeds("iteration", [a.place, b.place], done), ANSWER_S, "both go on")
            made.look().check()
        assert not a.has_answered(), a.answer()
        assert not b.has_answered(), b.answer()
        assert made.header["budget_regions"] == REGIONS


def has_joined(connection: socket.socket) -> bool:
    """Tell whether a job that has begun to join has a place; else it is dead."""
    assert select.select([connection], [], [], ANSWER_S)[0], "it has neither a place nor an end"
    return bool(connection.recv(1, socket.MSG_PEEK))


def test_what_jobs_wake_the_next_broker_by_arrives_there(nursery: Nursery, tmp_path: Path) -> None:
    """Jobs that were there before take turns: what they write is read by the broker that took them over."""
    with pool(tmp_path, policy="serial") as first, nursery.job(first, "a") as a, nursery.job(first, "b") as b:
        first.kill_broker()
        with Pool(tmp_path, "--policy", "serial", regions=7, region_bytes=first.region_bytes) as second:
            for one in (a, b):
                one.tell("train 50 10")
            assert [one.answer() for one in (a, b)] == ["lost 0"] * 2
            assert second.jobs["boundary_waited_ns"][[a.place, b.place]].all(), "they have waited for each other"
            until(lambda: not second.header["notified"], ANSWER_S, "the broker has read what was written")


def test_a_job_that_replaced_its_program_joins_the_next_broker_anew(start: Callable[..., Broker]) -> None:
    """It has the table open no more, so what it held is free, and its old place is nobody's."""
    first = start("--policy", "none")
    with job(first, "a", hold=3) as a:
        kill(first.process)
        first.client.close()
        second = start("--policy", "none")
        assert second.client.status().granted_bytes == 3 * REGION_BYTES
        tell(a, "exec")
        assert read_line(a).startswith("joined")
        status = second.client.status()
        assert [(one.name, one.held_bytes) for one in status.jobs] == [("a", 0)]
        assert status.granted_bytes == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_note_goes_with_the_last_job(start: Callable[..., Broker], number: int) -> None:
    """Where no job is left the next broker begins with a pool of its own, and leaves nothing."""
    first = start("--policy", "none")
    with job(first, "a", hold=3):
        first.end(number)
    second = start("--policy", "none")
    assert second.client.status().granted_bytes == 0
    assert second.names() == []
    assert second.end() == (0, "")
    assert list(second.socket.parent.iterdir()) == []


def test_a_pool_of_another_version_is_not_taken_over(start: Callable[..., Broker]) -> None:
    """One sentence names the job, which is undisturbed; when it has ended a new broker begins."""
    first = start("--policy", "none")
    with job(first, "a", hold=3) as a:
        kill(first.process)
        path = note_path(first.socket)
        note = msgspec.json.decode(path.read_bytes())
        path.write_bytes(msgspec.json.encode(note | {"zico": "99.0"}))
        second = start("--policy", "none", ready=False)
        _, errors = second.process.communicate(timeout=PATIENCE_S)
        assert second.process.returncode == 1
        assert errors.count("\n") == 1
        assert "is of another Zico (99.0, this is " in errors
        assert f"from a (process {a.pid}): wait until they end" in errors
        tell(a, "iterate")
        assert read_line(a) == "began"
    assert start("--policy", "none").names() == []


def test_a_note_that_is_none_is_no_obstacle(start: Callable[..., Broker]) -> None:
    """What is in its place, or of a process that has a dead one's number, is overwritten."""
    first = start("--policy", "none")
    with job(first, "a"):
        kill(first.process)
        head = read_head(first.socket)
        assert head is not None
        (named,) = head.jobs
        assert named.process.is_alive
        path = note_path(first.socket)
        text = path.read_text()
        path.write_text(text.replace(f'"started":{named.process.started}', f'"started":{named.process.started + 1}'))
        second = start("--policy", "none")
        assert second.names() == []
        kill(second.process)
        path.write_text("{")
        assert start("--policy", "none").names() == []
