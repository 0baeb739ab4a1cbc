"""Published policies in a real broker: jobs begin in the order that the policy says, and train to their end."""

from __future__ import annotations

import pytest
from support.harness import LightJob, Nursery, Pool, pool, until

from zico.pool.layout import JobState

REGIONS = 16
PEAK = 12
ITERATIONS = 20
FOR_EVER = 1_000_000


def comes_to_its_boundary(made: Pool, job: LightJob) -> None:
    """Let a job end its iteration and wait until it waits for another, as the status says."""
    job.tell("mark")
    made.waits_at_boundary(job)
    until(lambda: made.jobs[job.place]["waits_for"] != 0, 5, "the policy has said for whom it waits")


@pytest.mark.parametrize("policy", ["shift", "shift:poll=5ms,fallback=2", "salus", "salus:order=srtf,lanes=1"])
def test_two_jobs_that_do_not_fit_together_train_to_their_end(nursery: Nursery, policy: str) -> None:
    """Both wait at boundaries, neither loses a byte or leaves the budget, and the status names the policy."""
    with pool(regions=REGIONS, policy=policy) as made, nursery.job(made, "a") as a, nursery.job(made, "b") as b:
        for job in (a, b):
            job.tell(f"train {ITERATIONS} {PEAK}")
        assert [job.answer(60) for job in (a, b)] == ["lost 0", "lost 0"]
        report = made.client.report()
        assert made.client.status().policy == policy.partition(":")[0]
        assert report.pool.peak_granted_bytes <= REGIONS * made.region_bytes
        assert [entry.iterations for entry in report.jobs] == [ITERATIONS] * 2
        assert [entry.spilled_bytes for entry in report.jobs] == [0, 0]
        assert sum(entry.boundary_waited_s for entry in report.jobs) > 0


def test_shift_lets_nobody_begin_beside_a_first_iteration(nursery: Nursery) -> None:
    """Who is known waits until the first iteration of another has ended, and goes first then; both fit together."""
    with pool(regions=REGIONS, policy="shift:profiling=600s") as made, nursery.job(made, "new") as new:
        assert new.ask("hold 2") == "1"
        with nursery.job(made, "other") as other:
            comes_to_its_boundary(made, other)
            assert made.jobs[other.place]["waits_for"] == 1 << new.place
            assert made.jobs[other.place]["state"] == JobState.BOUNDARY
            assert new.ask("free") == "freed"  # from here on it holds nothing, and keeps nobody waiting
            new.tell("mark")
            assert other.answer() == "began"
            assert new.answer() == "began"


@pytest.mark.parametrize(("order", "goes"), [("fifo", 0), ("pack", 1)])
def test_salus_chooses_who_of_a_lane_is_next(nursery: Nursery, order: str, goes: int) -> None:
    """Of two that wait for a third it is the one that joined first, or the one that has waited longer.

    All are there before any ends its first iteration, so none counts as standing still for as long
    again.
    """
    with (
        pool(regions=REGIONS, policy=f"salus:lanes=1,order={order}") as made,
        nursery.job(made, "runs") as runs,
        nursery.job(made, "first") as first,
        nursery.job(made, "second") as second,
    ):
        waiting = (first, second)
        for job in (*waiting, runs):
            assert job.ask("mark") == "began"
        comes_to_its_boundary(made, second)
        comes_to_its_boundary(made, first)
        runs.kill()
        assert waiting[goes].answer() == "began"
        assert made.jobs[waiting[1 - goes].place]["state"] == JobState.BOUNDARY


def test_who_needs_all_of_the_budget_has_its_turn_among_three(nursery: Nursery) -> None:
    """Two fit beside what the third keeps between iterations, it fits beside nobody: all get on, and lose nothing."""
    with (
        pool(regions=REGIONS, policy="zico") as made,
        nursery.job(made, "a") as a,
        nursery.job(made, "b") as b,
        nursery.job(made, "large") as large,
    ):
        for job, peak in ((a, PEAK), (b, PEAK), (large, REGIONS - 1)):
            assert job.ask("hold 1") == "1"
            job.tell(f"train {FOR_EVER} {peak}")
            until(made.exceeds("iteration", [job.place], 2), 20, "its iterations are known")
        spilled_bytes = made.jobs["spilled_bytes"][:3].tolist()
        for _ in range(5):
            done = made.jobs["iteration"][:3].copy()
            until(made.exceeds("iteration", [0, 1, 2], done + ITERATIONS), 10, "all three get on")
        assert made.jobs["spilled_bytes"][:3].tolist() == spilled_bytes
        made.look().check()
