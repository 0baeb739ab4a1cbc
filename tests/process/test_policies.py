"""Published policies in a real broker: it knows their names, and jobs train to their end.

Whom they let begin is shown in ``test_policies_published.py``.
"""

from __future__ import annotations

import pytest
from support.harness import Nursery, pool, until

REGIONS = 16
PEAK = 12
ITERATIONS = 20
FOR_EVER = 1_000_000


@pytest.mark.parametrize("policy", ["shift:poll=5ms,fallback=2", "salus:order=srtf,lanes=1"])
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
