"""Whoever dies, stops or misbehaves: the others go on within one second, and the pool's invariants hold."""

from __future__ import annotations

import random
import select
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.harness import ANSWER_S, LIMIT_S, TRIES, LightJob, Look, Nursery, Pool, pool, until

from zico.pool.layout import NOBODY, JobState

if TYPE_CHECKING:
    from collections.abc import Callable

KILLS = 20
LOOKS = 400
FOR_EVER = 1_000_000


def ready(job: LightJob, regions: int = 0) -> LightJob:
    """Let a job end its first iteration and then hold so many regions."""
    assert job.ask("mark") == "began"
    if regions:
        assert job.ask(f"hold {regions}") == "1"
    return job


def exceeds(made: Pool, field: str, jobs: tuple[LightJob, ...], than: Any) -> Callable[[], bool]:  # noqa: ANN401 - one or many
    """Return a condition: a counter of each of the jobs is above a number, or above one for each."""
    return made.exceeds(field, [job.place for job in jobs], than)


def gone(made: Pool, job: LightJob) -> Callable[[Look], bool]:
    """Return a condition: the job has neither place nor regions."""
    return lambda look: made.jobs[job.place]["state"] == JobState.EMPTY and look.held(job.place) == 0


# -- SIGKILL ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["zico", "none"])
def test_memory_of_a_killed_idle_job_is_granted_to_whoever_waits_within_a_second(nursery: Nursery, policy: str) -> None:
    """Invariant 5: a job that holds memory and idles is killed, and the allocation that waits for it gets it."""
    assert any(idle_holders_death_s(nursery, policy) < LIMIT_S for _ in range(TRIES))


def idle_holders_death_s(nursery: Nursery, policy: str) -> float:
    """Kill the only holder of memory; returns how long the allocation that waits for it takes from then on."""
    with (
        pool(regions=16, policy=policy) as made,
        nursery.job(made, "victim") as victim,
        nursery.job(made, "o") as other,
    ):
        ready(other)
        ready(victim, 12)
        other.tell("hold 8")
        made.waits_for_memory(other)
        begin_s = time.monotonic()
        victim.kill()
        assert other.answer() == "1"
        took_s = time.monotonic() - begin_s
        made.settled(gone(made, victim), "the dead job's place is free").check()
        assert made.look().held(other.place) == 8
        return took_s


def test_a_job_killed_while_it_waits_for_memory_leaves_nothing_behind(nursery: Nursery) -> None:
    """Invariant 5: the one that waits is killed; no waiter is counted, it holds nothing, and the others go on."""
    with pool(regions=16) as made, nursery.job(made, "holder") as holder, nursery.job(made, "victim") as victim:
        ready(holder)
        ready(victim, 3)
        assert holder.ask("hold 12") == "1"
        victim.tell("hold 6")
        made.waits_for_memory(victim)
        victim.kill()
        made.settled(gone(made, victim), "the dead job's place is free").check()
        assert holder.ask("hold 4") == "1"
        assert (made.header["waiters"], made.granted) == (0, 16)


def test_of_two_that_wait_the_living_gets_the_memory(nursery: Nursery) -> None:
    """Two wait for the same memory, one of them is killed, and the other gets it as soon as it is free."""
    with (
        pool(regions=16) as made,
        nursery.job(made, "holder") as holder,
        nursery.job(made, "victim") as victim,
        nursery.job(made, "other") as other,
    ):
        for job in (holder, victim, other):
            ready(job)
        assert holder.ask("hold 12") == "1"
        for job in (victim, other):
            job.tell("hold 6")
            made.waits_for_memory(job)
        victim.kill()
        assert holder.ask("free") == "freed"
        assert other.answer() == "1"


def test_a_job_killed_at_its_boundary_holds_nobody_up(nursery: Nursery) -> None:
    """With one iteration at a time, a job that is killed while it waits for its turn gives back what it kept."""
    with (
        pool(regions=16, policy="serial") as made,
        nursery.job(made, "running") as running,
        nursery.job(made, "victim") as victim,
        nursery.job(made, "other") as other,
    ):
        assert running.ask("mark") == "began"
        assert victim.ask("hold 5") == "1"
        for job in (victim, other):
            job.tell("mark")
            made.waits_at_boundary(job)
        victim.kill()
        made.settled(gone(made, victim), "the dead job's place is free").check()
        running.tell("mark")
        assert other.answer() == "began"
        assert other.ask("hold 14") == "1"


def test_whoever_waits_at_its_boundary_for_a_killed_job_starts_within_a_second(nursery: Nursery) -> None:
    """The running job is killed: the one whose turn comes next begins its iteration."""
    assert any(running_jobs_death_s(nursery) < LIMIT_S for _ in range(TRIES))


def running_jobs_death_s(nursery: Nursery) -> float:
    """Kill the only job that may run; returns how long it takes from then on until the next one begins."""
    with (
        pool(regions=16, policy="serial") as made,
        nursery.job(made, "victim") as victim,
        nursery.job(made, "other") as other,
    ):
        ready(victim, 10)
        other.tell("mark")
        made.waits_at_boundary(other)
        begin_s = time.monotonic()
        victim.kill()
        assert other.answer() == "began"
        return time.monotonic() - begin_s


@pytest.mark.parametrize("with_broker", [True, False], ids=["broker", "no broker"])
def test_whoever_is_stopped_inside_the_mutex_is_let_out_and_stopped_again(
    nursery: Nursery,
    with_broker: bool,  # noqa: FBT001 - a case
) -> None:
    """A job is stopped inside the table's mutex: the others go on, and it stays stopped until it is continued."""
    with pool(regions=16) as made, nursery.job(made, "stopped") as stopped, nursery.job(made, "other") as other:
        ready(other, 4)
        ready(stopped, 4)
        if not with_broker:
            made.kill_broker()
        stopped.tell("stop_inside")
        until(stopped.is_stopped, ANSWER_S, "it is stopped")
        assert other.ask("hold 4") == "1"
        until(stopped.is_stopped, ANSWER_S, "it is stopped again")
        assert other.ask("hold 2") == "1"
        assert stopped.is_stopped()
        stopped.send(signal.SIGCONT)
        assert stopped.answer() == "out"
        assert stopped.ask("hold 2") == "1"


@pytest.mark.parametrize("with_broker", [True, False], ids=["broker", "no broker"])
def test_a_death_inside_the_mutex_is_repaired(nursery: Nursery, with_broker: bool) -> None:  # noqa: FBT001 - a case
    """Invariant 5: a job dies in the middle of a grant, counters and list half changed, and the next repairs them."""
    assert any(death_inside_s(nursery, with_broker=with_broker) < LIMIT_S for _ in range(TRIES))


def death_inside_s(nursery: Nursery, *, with_broker: bool) -> float:
    """Let a job die inside the table's mutex; returns how long the next one takes to get its memory."""
    with pool(regions=16) as made, nursery.job(made, "victim") as victim, nursery.job(made, "other") as other:
        ready(other, 4)
        ready(victim, 4)
        if not with_broker:
            made.kill_broker()
        victim.tell("die_inside")
        victim.wait_dead()
        begin_s = time.monotonic()
        assert other.ask("hold 12") == "1"
        took_s = time.monotonic() - begin_s
        made.settled(gone(made, victim), "the dead job's place is free").check()
        assert made.header["recoveries"] == 1
        assert made.granted == 16
        return took_s


@pytest.mark.parametrize("policy", ["zico", "serial"])
def test_twenty_jobs_killed_at_random_moments_of_a_tight_loop(nursery: Nursery, policy: str) -> None:
    """Invariants 1, 2, 4, 5: jobs that allocate, wait and iterate are killed anywhere, and the survivor never stops."""
    chance = random.Random(policy)  # noqa: S311 - for tests
    with pool(regions=48, policy=policy) as made, nursery.job(made, "survivor") as survivor:
        survivor.tell(f"churn {chance.getrandbits(60)} 2 60")
        for _ in range(KILLS):
            with nursery.job(made, "victim") as victim:
                victim.tell(f"churn {chance.getrandbits(60)} 2 60")
                target = chance.randrange(20, 2000)
                until(exceeds(made, "allocations", (victim,), target), 5, "the victim allocates")
                victim.kill()
                done = made.jobs[survivor.place]["allocations"].copy()
                until(exceeds(made, "allocations", (survivor,), done), ANSWER_S, "the survivor goes on")
                made.settled(gone(made, victim), "the dead job's place is free").check()
        assert not survivor.has_answered(), survivor.answer()
        assert made.header["peak_granted"] <= 48


# -- the broker ------------------------------------------------------------------------------------


def test_without_a_broker_jobs_go_on_and_take_back_what_the_dead_held(nursery: Nursery) -> None:
    """The broker is killed in mid-iteration: jobs iterate on, and one that dies then leaves its memory to the other."""
    with pool(regions=16) as made, nursery.job(made, "a") as a, nursery.job(made, "b") as b:
        for job in (a, b):
            job.tell(f"train {FOR_EVER} 10")
        until(exceeds(made, "iteration", (a, b), 10), 10, "both iterate")
        made.kill_broker()
        done = made.jobs["iteration"][:2].copy()
        until(exceeds(made, "iteration", (a, b), done + 5), 20, "both go on")
        made.look().check()
        a.kill()
        made.settled(gone(made, a), "the dead job's place is free")
        last = made.jobs["iteration"][b.place].copy()
        until(exceeds(made, "iteration", (b,), last + 5), ANSWER_S, "the other goes on")
        assert not b.has_answered()


def test_a_job_at_its_boundary_starts_without_a_broker(nursery: Nursery) -> None:
    """Nobody is left to admit it, so it admits itself."""
    with pool(regions=16, policy="serial") as made, nursery.job(made, "a") as a, nursery.job(made, "b") as b:
        ready(a)
        b.tell("mark")
        made.waits_at_boundary(b)
        made.kill_broker()
        assert b.answer() == "began"
        assert a.ask("mark") == "began"


# -- stopping, not fitting, not iterating ----------------------------------------------------------


def test_a_stopped_job_keeps_what_it_holds_and_the_other_trains_on_with_the_rest(nursery: Nursery) -> None:
    """SIGSTOP takes a job out of the game for as long as it lasts; after SIGCONT both end."""
    with pool(regions=16) as made, nursery.job(made, "stopped") as stopped, nursery.job(made, "other") as other:
        for job in (stopped, other):
            job.tell("train 5 10")
        assert [job.answer() for job in (stopped, other)] == ["lost 0", "lost 0"]
        assert stopped.ask("hold 6") == "1"
        stopped.send(signal.SIGSTOP)
        assert other.ask("train 50 10") == "lost 0"
        assert made.look().held(stopped.place) == 6
        made.look().check()
        stopped.tell("free")
        stopped.tell("train 20 10")
        other.tell("train 20 10")
        stopped.send(signal.SIGCONT)
        assert [stopped.answer(), stopped.answer(), other.answer()] == ["freed", "lost 0", "lost 0"]


def test_a_job_stopped_anywhere_in_its_iterations_costs_the_other_seconds_at_most(nursery: Nursery) -> None:
    """Wherever SIGSTOP hits a job that trains in a tight budget, the other gets on with what is free."""
    chance = random.Random(2)  # noqa: S311 - for tests
    with pool(regions=16) as made, nursery.job(made, "stopped") as stopped, nursery.job(made, "other") as other:
        for job in (stopped, other):
            job.tell(f"train {FOR_EVER} 8")
        for _ in range(3):
            done = made.jobs["iteration"][:2].copy()
            until(exceeds(made, "iteration", (stopped, other), done), 10, "both iterate")
            let_pass(chance.random() / 100)
            stopped.send(signal.SIGSTOP)
            let_pass(0.01)
            done = made.jobs["iteration"][other.place].copy()
            until(exceeds(made, "iteration", (other,), done + 2), 5, "the other goes on")
            stopped.send(signal.SIGCONT)


def test_a_job_stopped_in_a_tight_loop_cannot_stop_the_others_for_long(nursery: Nursery) -> None:
    """Stopped and continued at random moments, a job costs the other time and nothing else."""
    chance = random.Random(1)  # noqa: S311 - for tests
    with pool(regions=40) as made, nursery.job(made, "stopped") as stopped, nursery.job(made, "other") as other:
        for job in (stopped, other):
            job.tell(f"churn {chance.getrandbits(60)} 2 200")
        for _ in range(20):
            done = made.jobs["allocations"][:2].copy()
            until(exceeds(made, "allocations", (stopped, other), done), 5, "both allocate")
            stopped.send(signal.SIGSTOP)
            let_pass(chance.random() / 100)
            stopped.send(signal.SIGCONT)
        done = made.jobs["allocations"][:2].copy()
        until(exceeds(made, "allocations", (stopped, other), done), 5, "both go on")
        made.look().check()
        assert not stopped.has_answered()
        assert not other.has_answered()


def test_a_job_stopped_while_it_waits_for_memory_stops_nobody(nursery: Nursery) -> None:
    """Invariant 7: the others go on within seconds, although the stopped one lacks the least and cannot."""
    chance = random.Random(3)  # noqa: S311 - for tests
    with (
        pool(regions=16) as made,
        nursery.job(made, "a") as a,
        nursery.job(made, "b") as b,
        nursery.job(made, "c") as c,
    ):
        jobs = (a, b, c)
        for job in jobs:
            job.tell(f"vary {FOR_EVER} {chance.getrandbits(60)}")
        for _ in range(4):
            done = made.jobs["iteration"][:3].copy()
            until(exceeds(made, "iteration", jobs, done + 2), 20, "all iterate")
            victim = until(lambda: _stopped_in_its_wait(made, jobs), 20, "one was stopped while it waits for memory")
            others = tuple(job for job in jobs if job is not victim)
            done = made.jobs["iteration"][[job.place for job in others]].copy()
            until(exceeds(made, "iteration", others, done + 2), 12, "the others go on")
            victim.send(signal.SIGCONT)
        assert not any(job.has_answered() for job in jobs)


def _stopped_in_its_wait(made: Pool, jobs: tuple[LightJob, ...]) -> LightJob | None:
    """Stop a job that waits in an allocation; ``None``: none does, or its wait has ended before it was stopped."""
    for job in jobs:
        if made.jobs[job.place]["need"] == 0:
            continue
        job.send(signal.SIGSTOP)
        until(job.is_stopped, ANSWER_S, "it is stopped")
        record = made.jobs[job.place]
        if record["need"] > 0 and record["state"] == JobState.RUNNING:
            return job
        job.send(signal.SIGCONT)
    return None


# -- signals ---------------------------------------------------------------------------------------


def holder_and_waiter(holder: LightJob, waiter: LightJob) -> None:
    """Let one job know its iteration, and another hold most of the budget in its first one, for as long as it likes."""
    assert waiter.ask("train 3 12") == "lost 0"
    assert waiter.ask("heed") == "heeds"
    assert holder.ask("hold 12") == "1"


def test_a_job_that_waits_for_memory_handles_its_signals(nursery: Nursery) -> None:
    """A handler that returns leaves the wait as it is, Ctrl-C ends it: the tensor is placed, and Python raises."""
    with pool(regions=16) as made, nursery.job(made, "holder") as holder, nursery.job(made, "waiter") as waiter:
        holder_and_waiter(holder, waiter)
        waiter.tell("hold 8")
        made.waits_for_memory(waiter)
        for _ in range(3):
            until(waiter.sleeps, ANSWER_S, "it sleeps in its wait")
            waiter.send(signal.SIGTERM)
            assert waiter.answer(5) == "handled"
        assert made.jobs[waiter.place]["waiting_threads"] == 1
        until(waiter.sleeps, ANSWER_S, "it sleeps in its wait")
        waiter.send(signal.SIGINT)
        assert waiter.answer(5) == "interrupted"
        assert made.jobs[waiter.place]["spilled_bytes"] == 8 * made.region_bytes
        waiter.tell("hold 8")
        made.waits_for_memory(waiter)
        assert holder.ask("free") == "freed"
        assert waiter.answer(5) == "1", "what was raised once ends no later wait"


def test_a_job_that_waits_at_its_boundary_handles_its_signals(nursery: Nursery) -> None:
    """In compiled code, where an unmarked iteration ends: handlers run, and Ctrl-C raises."""
    with pool(regions=16) as made, nursery.job(made, "holder") as holder, nursery.job(made, "waiter") as waiter:
        holder_and_waiter(holder, waiter)
        waiter.tell("mark")
        made.waits_at_boundary(waiter)
        until(waiter.sleeps, ANSWER_S, "it sleeps there")
        waiter.send(signal.SIGTERM)
        assert waiter.answer(5) == "handled"
        until(waiter.sleeps, ANSWER_S, "it sleeps there")
        waiter.send(signal.SIGINT)
        assert waiter.answer(5) == "interrupted"
        record = made.jobs[waiter.place]
        assert record["state"] == JobState.BOUNDARY
        ended = int(record["iteration"])
        assert holder.ask("free") == "freed"
        until(lambda: record["state"] == JobState.RUNNING, ANSWER_S, "it may begin")  # a view of the table
        assert waiter.ask("mark") == "began"
        assert record["iteration"] == ended, "what has not begun does not end"


def test_a_request_that_never_fits_is_refused_and_the_other_goes_on(nursery: Nursery) -> None:
    """More than the whole budget is refused with the request and the holding noted; nobody else notices."""
    with pool(regions=16) as made, nursery.job(made, "large") as large, nursery.job(made, "other") as other:
        ready(other)
        ready(large, 2)
        other.tell(f"train {FOR_EVER} 4")
        assert large.ask("hold 15") == "0"
        record = made.jobs[large.place]
        assert (record["oom_count"], record["oom_request_bytes"], record["oom_held"]) == (1, 15 * made.region_bytes, 2)
        done = made.jobs["iteration"][other.place].copy()
        until(exceeds(made, "iteration", (other,), done), ANSWER_S, "the other iterates")
        assert large.ask("hold 3") == "1"
        made.look().check()


@pytest.mark.parametrize("policy", ["zico", "serial", "none"])
def test_a_job_that_has_trained_and_idles_does_not_hold_up_another(nursery: Nursery, policy: str) -> None:
    """A notebook at its prompt after training costs what it holds; the other's iterations begin and end."""
    with pool(regions=16, policy=policy) as made, nursery.job(made, "idle") as idle, nursery.job(made, "o") as other:
        for job in (idle, other):
            job.tell("train 5 10")
        assert [job.answer() for job in (idle, other)] == ["lost 0", "lost 0"]
        assert other.ask("train 50 12") == "lost 0"


@pytest.mark.parametrize("policy", ["zico", "serial"])
def test_a_job_that_never_iterates_does_not_hold_up_those_that_do(nursery: Nursery, policy: str) -> None:
    """A notebook that holds some tensors and sleeps costs its tensors and nothing else, however tight the rest is."""
    with (
        pool(regions=16, policy=policy) as made,
        nursery.job(made, "sleeper") as sleeper,
        nursery.job(made, "a") as a,
        nursery.job(made, "b") as b,
    ):
        assert sleeper.ask("hold 3") == "1"
        assert sleeper.ask("hold 1") == "1"
        for job in (a, b):
            job.tell(f"train {FOR_EVER} 8")
        until(exceeds(made, "iteration", (a, b), 2), 20, "both iterate")
        assert sleeper.ask("free") == "freed"
        assert made.look().held(sleeper.place) == 3


# -- right and wrong profiles ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["zico", "serial"])
def test_with_right_profiles_every_state_is_safe(nursery: Nursery, policy: str) -> None:
    """Invariant 3: while two regular jobs train in three quarters of their peaks, each state can be finished."""
    with pool(regions=18, policy=policy) as made, nursery.job(made, "a") as a, nursery.job(made, "b") as b:
        for job in (a, b):
            job.tell("train 20 12")
        until(exceeds(made, "iteration", (a, b), 3), 10, "both have learned")
        for _ in range(LOOKS):
            look = made.look()
            look.check()
            look.check_safe(lambda job: 12 if job["progress"] < 12 else 0)
            for job in (a, b):
                if job.has_answered():  # however few looks there were until then
                    assert job.answer() == "lost 0"
                    job.tell("train 20 12")
        assert [a.answer(), b.answer()] == ["lost 0", "lost 0"]
        assert made.header["stalls"] == 0
        assert made.jobs["spilled_bytes"][:2].tolist() == [0, 0]


@pytest.mark.parametrize("isolate", [False, True], ids=["", "isolated"])
def test_two_jobs_that_both_grow_beyond_their_profiles_end_by_eviction(nursery: Nursery, *, isolate: bool) -> None:
    """Invariant 8: each holds half and wants more than is left; one gets what the other evicts, and nothing is lost."""
    with pool(regions=16, isolate=isolate) as made, nursery.job(made, "a") as a, nursery.job(made, "b") as b:
        for job in (a, b):
            assert job.ask("hold 1") == "1"
            assert job.ask("mark") == "began"
        for job in (a, b):
            assert job.ask("hold 6") == "1"
        for job in (a, b):
            job.tell("train 3 6")
        until(lambda: a.has_answered() or b.has_answered(), 30, "one has ended")
        assert made.header["stalls"] > 0
        assert made.jobs["evictions"][:2].sum() > 0
        assert made.jobs["spilled_bytes"][:2].sum() == 0
        first, last = (a, b) if a.has_answered() else (b, a)
        assert first.answer() == "lost 0"
        assert [first.ask("free"), first.ask("free")] == ["freed", "freed"]
        first.kill()
        assert last.answer() == "lost 0"
        assert [last.ask("free"), last.ask("free")] == ["freed", "freed"]


def test_two_unprofiled_jobs_that_start_together_in_a_tight_budget_both_train(nursery: Nursery) -> None:
    """The first iteration of one runs alone, then the other's; both end, without the next tier."""
    with pool(regions=16) as made, nursery.job(made, "a") as a, nursery.job(made, "b") as b:
        for job in (a, b):
            job.tell("train 20 12")
        assert [job.answer(60) for job in (a, b)] == ["lost 0", "lost 0"]
        assert made.header["peak_granted"] <= 16
        assert made.jobs["spilled_bytes"][:2].sum() == 0


def test_guards_see_what_they_guard_against(nursery: Nursery) -> None:
    """The checks fail on a region of a dead owner, a wrong counter, a broken list and an unsafe state."""
    with pool(regions=8) as made, nursery.job(made, "a") as job:
        ready(job, 2)
        good = made.look()
        free = int(np.flatnonzero(good.regions["owner"] == NOBODY)[0])

        def broken(change: Callable[[Look], None]) -> None:
            look = made.look()
            change(look)
            with pytest.raises(AssertionError):
                look.check()

        broken(lambda look: look.regions["owner"].__setitem__(free, 5))
        broken(lambda look: look.header.__setitem__("granted", 3))
        broken(lambda look: look.header.__setitem__("budget_regions", 1))
        broken(lambda look: look.header.__setitem__("free_head", NOBODY))
        broken(lambda look: look.jobs["held"].__setitem__(0, 1))
        with pytest.raises(AssertionError, match="invariant 3"):
            good.check_safe(lambda _: 9)


def let_pass(seconds: float) -> None:
    """Let a random little time pass: the moment of a fault, not a way to wait for anything."""
    select.select([], [], [], seconds)
