"""Paged jobs beside others: two of them in one pool, and one in a pool that isolates its jobs."""

from __future__ import annotations

import pytest
from support.harness import ANSWER_S, Nursery, Pool, pool, until
from support.light_job import can_page

from zico.broker.protocol.messages import Change

pytestmark = pytest.mark.skipif(not can_page(), reason="this user may not serve page faults")

LIMIT = 6
NEEDS = 20
SLOW_S = 60.0


def limit(made: Pool, *names: str) -> None:
    """Let jobs hold ``LIMIT`` regions each."""
    for name in names:
        made.client.change(Change(job=name, limit_bytes=LIMIT * made.region_bytes))


def test_two_paged_jobs_have_a_pager_each(nursery: Nursery) -> None:
    """Invariants 1 and 4: each has its contents and keeps to its limit while both are paged, and after one is dead."""
    with pool(regions=16) as made, nursery.job(made, "paged1") as one, nursery.job(made, "paged2") as two:
        limit(made, "paged1", "paged2")
        for seed in (1000, 2000):
            for job, own in ((one, seed), (two, -seed)):
                job.tell(f"fill {NEEDS} {own}")
            assert [job.answer(SLOW_S) for job in (one, two)] == [str(NEEDS)] * 2
            made.look().check()
            assert [made.look().held(job.place) for job in (one, two)] == [LIMIT] * 2
            for job, own in ((one, seed), (two, -seed)):
                job.tell(f"verify {own}")
            assert [job.answer(SLOW_S) for job in (one, two)] == ["lost 0"] * 2
            if seed == 1000:
                assert [job.ask("empty") for job in (one, two)] == ["freed"] * 2
        one.kill()
        made.settled(lambda look: look.granted == LIMIT, "its regions are free")
        assert two.ask("verify -2000", SLOW_S) == "lost 0"


def test_a_paged_job_gives_regions_back_that_its_iterations_need_no_more(nursery: Nursery) -> None:
    """Regions beyond what lived at once in the last iteration are free soon after it, though nobody asks for them."""
    with pool(regions=16) as made, nursery.job(made, "paged") as job:
        assert job.ask("mark") == "began"
        assert job.ask("fill 12 1") == "12"
        assert made.look().held(job.place) == 12
        assert job.ask("empty") == "freed"
        assert job.ask("mark") == "began"
        assert job.ask("fill 5 2") == "5"
        assert made.look().held(job.place) == 12, "the iteration before needed them"
        assert job.ask("mark") == "began"
        made.settled(lambda look: look.held(job.place) == 5, "regions have come back", ANSWER_S)
        assert job.ask("verify 2") == "lost 0"


def test_a_paged_job_goes_on_without_regions_where_nobody_can(nursery: Nursery) -> None:
    """Invariant 7: it has a place for each tensor, whose blocks come and go; the other one is asked for nothing."""
    with pool(regions=16) as made, nursery.job(made, "other") as other, nursery.job(made, "paged") as job:
        assert job.ask("hold 4") == "1"
        assert other.ask("hold 9") == "1"
        other.tell("hold 7")
        until(lambda: made.jobs[other.place]["waiting_threads"] > 0, ANSWER_S, "the other waits")
        assert job.ask("fill 10 1", SLOW_S) == "10"
        assert made.look().held(job.place) <= 7
        assert made.jobs[job.place]["spilled_bytes"] == 0
        assert (made.jobs[other.place]["evictions"], other.has_answered()) == (0, False)
        assert job.ask("verify 1", SLOW_S) == "lost 0"
        assert [job.ask("empty"), job.ask("free")] == ["freed"] * 2
        assert other.answer(SLOW_S) == "1"


def test_a_paged_job_in_a_pool_that_isolates(nursery: Nursery) -> None:
    """Invariant 11: what a paged job wrote is in no region that another gets, and it pages as in any other pool."""
    with pool(regions=16, isolate=True) as made, nursery.job(made, "paged") as job, nursery.job(made, "other") as other:
        limit(made, "paged")
        assert job.ask(f"fill {NEEDS} 7", SLOW_S) == str(NEEDS)
        assert job.ask("verify 7", SLOW_S) == "lost 0"
        assert made.look().held(job.place) == LIMIT
        assert made.physical_bytes == 0, "the regions that it holds have no memory of their own"
        assert other.ask("hold 8") == "1"
        job.kill()
        made.settled(lambda look: look.held(job.place) == 0, "its regions are free")
        assert other.ask("hold 6") == "1"
        assert [other.ask("free"), other.ask("free")] == ["freed"] * 2
