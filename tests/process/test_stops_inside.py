"""Whoever is stopped or killed inside the table's mutex, at whatever instruction: the others go on."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
from typing import TYPE_CHECKING

from support.harness import ANSWER_S, PATIENCE_S, LightJob, Nursery, Pool, pool, until

if TYPE_CHECKING:
    from collections.abc import Sequence

STOPS = int(os.environ.get("STOPS", "6"))
"""Of holders of the mutex: ``STOPS=200`` takes some minutes."""
OWNER = 0x3FFFFFFF
"""Of a robust mutex's word: the number of the thread inside."""
INSIDE_FOR_LONG_S = 0.05


def stopped_inside(made: Pool, jobs: Sequence[LightJob]) -> LightJob:
    """Stop a job while it is inside the mutex; one that is out by the time that it stands is continued."""
    word = made.header["mutex"][:4].view("i4")
    by_pid = {job.pid: job for job in jobs}

    def caught() -> LightJob | None:
        inside = None
        for _ in range(1000):
            if inside := by_pid.get(int(word[0]) & OWNER):
                break
        if inside is None:
            return None
        inside.send(signal.SIGSTOP)
        until(inside.is_stopped, ANSWER_S, "it stands")
        if int(word[0]) & OWNER == inside.pid:
            return inside
        inside.send(signal.SIGCONT)
        return None

    found = until(caught, PATIENCE_S, "one is stopped inside")
    assert found is not None
    return found


def goes_on(jobs: Sequence[LightJob]) -> bool:
    """Continue whoever stands: the pool may stop a job again a moment after its user has let it go on."""
    for job in jobs:
        if job.is_stopped():
            job.send(signal.SIGCONT)
    return True


def test_holders_of_the_mutex_are_stopped_and_killed_at_random(nursery: Nursery) -> None:
    """Invariants 1, 2, 5: the others go on while one stands there, after it went on, and after it was killed there."""
    chance = random.Random(3)  # noqa: S311 - for tests
    with contextlib.ExitStack() as owned:
        made = owned.enter_context(pool(regions=240))  # room for all: they wait for the mutex alone

        def begin(name: str) -> LightJob:
            job = owned.enter_context(nursery.job(made, name))
            job.tell(f"churn {chance.getrandbits(60)} 2 200")
            return job

        jobs = [begin(name) for name in "abcd"]
        killed = 0
        for number in range(STOPS):
            inside = stopped_inside(made, jobs)
            others = [job for job in jobs if job is not inside]
            if number % 3 == 1:
                inside.kill()
                killed += 1
                jobs[jobs.index(inside)] = begin(f"{number}")
            elif number % 3 == 0:  # whoever waits for 50 ms continues it until it is out
                done = made.jobs["allocations"][[job.place for job in others]].copy()
                exceeds = made.exceeds("allocations", [job.place for job in others], done)
                until(lambda exceeds=exceeds, others=others: goes_on(others) and exceeds(), ANSWER_S, "others go on")
                until(inside.is_stopped, ANSWER_S, "it stands again")
            else:
                select.select([], [], [], chance.uniform(0, 2 * INSIDE_FOR_LONG_S))
            places = [job.place for job in jobs]
            exceeds = made.exceeds("allocations", places, made.jobs["allocations"][places].copy())
            until(lambda exceeds=exceeds: goes_on(jobs) and exceeds(), ANSWER_S, "all go on")
        made.look().check()
        for job in jobs:
            assert not job.has_answered(), job.answer()
        assert killed
        assert made.header["recoveries"] >= 1
