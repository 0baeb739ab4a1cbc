"""A broker dies, jobs go on, and the next broker takes their pool over from them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import socket
from typing import TYPE_CHECKING, cast

import pytest
from process.support.broker_process import Broker, job, read_line, tell
from support.harness import ANSWER_S, PATIENCE_S, LightJob, Nursery, Pool, pool, until

from zico.base.processes import started_at
from zico.broker.notes import note_path
from zico.launch.broker import JoinedBroker
from zico.pool.layout import JobState
from zico.report.files import jobs_of

if TYPE_CHECKING:
    from pathlib import Path

KILLS = int(os.environ.get("TAKEOVERS", "6"))
"""Of brokers, for each policy: ``TAKEOVERS=50`` takes some minutes."""
FOR_EVER = 1_000_000
TRAIN = "train 200 20"
REGIONS = 48


def places(made: Pool) -> dict[str, int]:
    """Return the jobs that the broker knows, with their places."""
    return {one.name: one.job for one in made.client.status().jobs}


@pytest.mark.parametrize("policy", ["zico", "serial"])
def test_brokers_killed_at_random_instants_leave_pool_and_jobs_to_the_next(
    nursery: Nursery, tmp_path: Path, policy: str
) -> None:
    """Invariants 1, 2, 5: jobs train on, one joins and one dies about each death, and each broker has all that live.

    In the end four jobs have found every byte as they wrote it.
    """
    chance = random.Random(policy)  # noqa: S311 - for tests
    with contextlib.ExitStack() as owned:
        made = owned.enter_context(pool(tmp_path, policy=policy, regions=REGIONS))
        stay = {name: owned.enter_context(nursery.job(made, name)) for name in "abcd"}
        a, b, c, d = stay.values()
        for one in (a, c):
            one.tell(TRAIN)
        for one in (b, d):
            one.tell("churn 99 2 60")  # it answers when it finds a byte that is not its own
        stay_at = [one.place for one in stay.values()]
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
            expected = {name: one.place for name, one in stay.items()}
            expected |= {} if number % 2 else {f"dies{number}": dies.place}
            expected |= {f"joins{number}": joins.place} if joins else {}
            # One that began to join, and could not, may take a moment to end.
            until(lambda made=made, expected=expected: places(made) == expected, ANSWER_S, "it has all that live")
            dies.kill()
            if joins is not None:
                joins.kill()
            made.settled(lambda look: (look.jobs["state"] != JobState.EMPTY).sum() == 4, "the dead have no place")
            done = made.jobs["allocations"][stay_at].copy()
            exceeds = made.exceeds("allocations", stay_at, done)
            until(lambda exceeds=exceeds: train_on(a, c) and exceeds(), ANSWER_S, "all go on")
            made.look().check()
        assert [one.answer(PATIENCE_S) for one in (a, c)] == ["lost 0"] * 2
        for one in (b, d):
            assert not one.has_answered(), one.answer()
        assert made.header["budget_regions"] == REGIONS


def train_on(*jobs: LightJob) -> bool:
    """Let jobs that have trained train again; they have lost nothing."""
    for one in jobs:
        if one.has_answered():
            assert one.answer() == "lost 0"
            one.tell(TRAIN)
    return True


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


def test_a_job_that_replaced_its_program_joins_the_next_broker_anew(tmp_path: Path) -> None:
    """It has the table open no more, so what it held is free, and its old place is nobody's."""
    with pool(tmp_path, policy="none", regions=8) as first, job(cast("Broker", first), "a", hold=3) as a:
        first.kill_broker()
        with Pool(tmp_path, "--policy", "none", regions=7, region_bytes=first.region_bytes) as second:
            assert second.granted == 3
            tell(a, "exec")
            assert read_line(a).startswith("joined")
            assert places(second) == {"a": 0}
            assert second.granted == 0


def test_a_pool_without_living_jobs_is_not_taken_over(nursery: Nursery, tmp_path: Path) -> None:
    """The next broker has a pool of its own: where the job is dead, another process has its number, or no note is."""

    def next_regions() -> int:
        with Pool(tmp_path, "--policy", "none", regions=7, region_bytes=first.region_bytes) as following:
            assert places(following) == {}
            return int(following.header["n_regions"])

    with pool(tmp_path, policy="none", regions=8) as first, nursery.job(first, "a") as a:
        first.kill_broker()
        path = note_path(first.socket)
        note = path.read_text()
        started = started_at(a.pid)
        path.write_text(note.replace(f'"started":{started}', f'"started":{(started or 0) + 1}'))
        assert next_regions() == 7
        path.write_text("{")
        assert next_regions() == 7
        a.kill()
        path.write_text(note)
        assert next_regions() == 7


def test_a_run_that_joins_a_pool_reports_its_own_jobs(nursery: Nursery, tmp_path: Path) -> None:
    """A job is the run's own by the run that started it, whatever its name; the pool goes on when the run hangs up."""
    with pool(regions=8) as made, nursery.job(made, "other") as other:
        other.tell(f"train {FOR_EVER} 3")
        until(lambda: bool(made.jobs["profiled"][other.place]), ANSWER_S, "its profile is known")
        joined = JoinedBroker(tmp_path, made.socket, "a1")
        assert joined.others == 1
        with nursery.job(made, "own", "b2"), nursery.job(made, "own", "a1") as own:
            record = joined.look()
            assert record is not None
            assert (record.names, jobs_of(record)) == (("own",), [])
            own.tell(f"train {FOR_EVER} 2")
            until(lambda: bool(made.jobs["profiled"][own.place]), ANSWER_S, "its profile is known")
            record = joined.look()
            assert record is not None
            (profile,) = jobs_of(record)
            assert (profile["name"], max(held for _, held in profile["curve"])) == ("own", 2 * made.region_bytes)
            assert record.budget_bytes.tolist() == [8 * made.region_bytes]
            report = joined.report()
            assert report is not None
            assert [(one.name, one.pid) for one in report.jobs] == [("own", own.pid)]
            status = joined.status()
            assert status is not None
            assert [(one.name, one.run) for one in status.jobs] == [("other", ""), ("own", "b2"), ("own", "a1")]
        asyncio.run(joined.end())
        until(lambda: places(made) == {"other": 0}, ANSWER_S, "the other one is still there")
