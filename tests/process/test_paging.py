"""Jobs that may hold less than they need: their pages come and go, through a broker and without one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.harness import ANSWER_S, LightJob, Nursery, Pool, pool, until
from support.light_job import FIGURES, can_page

from zico.broker.protocol.messages import Change

pytestmark = pytest.mark.skipif(not can_page(), reason="this user may not serve page faults")

LIMIT = 6
NEEDS = 20
SLOW_S = 60.0


def limit(made: Pool, name: str, regions: int = LIMIT) -> None:
    """Let a job hold so many regions."""
    made.client.change(Change(job=name, limit_bytes=regions * made.region_bytes))


def figure(job: LightJob, name: str) -> int:
    """Return one of the figures of a job's paging."""
    return int(job.ask(f"figure {FIGURES.index(name)}"))


def pages_of(job: LightJob) -> int:
    """Return the bytes that the kernel says the job's window takes."""
    for entry in Path(f"/proc/{job.pid}/fd").iterdir():
        if "memfd:zico-pages" in str(entry.readlink()):
            return entry.stat().st_blocks * 512
    raise AssertionError("the job has no pages of its own")


def counted(made: Pool, job: LightJob) -> None:
    """Wait until the broker counts a job's own pages, too."""
    until(
        lambda: made.client.status().physical_bytes == made.physical_bytes + pages_of(job) > 0,
        ANSWER_S,
        "the broker counts the job's own pages",
    )


def test_a_job_that_needs_more_than_it_may_hold_goes_on(nursery: Nursery) -> None:
    """Invariants 1, 4 and 9: three times what the job may hold is as it was written, and what is there fits."""
    with pool(regions=16) as made, nursery.job(made, "paged") as job:
        limit(made, "paged")
        for seed in range(1000, 5000, 1000):
            assert job.ask(f"fill {NEEDS} {seed}", SLOW_S) == str(NEEDS)
            look = made.look()
            look.check()
            assert look.held(job.place) == LIMIT
            assert look.physical_bytes + pages_of(job) <= LIMIT * made.region_bytes
            assert job.ask(f"verify {seed}", SLOW_S) == "lost 0"
            assert job.ask("empty") == "freed"
            assert job.ask("mark") == "began"
        counted(made, job)
        (report,) = made.client.report().jobs
        assert report.saving.faults > NEEDS
        assert report.saving.out_bytes > report.saving.in_bytes / 2 > 0
        assert figure(job, "peak_resident") <= LIMIT
        assert report.spilled_bytes == 0


def test_invariant_5_a_paged_job_goes_on_when_the_broker_is_killed(nursery: Nursery, tmp_path: Path) -> None:
    """Invariants 5 and 9: a broker killed while blocks come and go costs no contents; the next one counts its pages."""
    with pool(tmp_path, regions=16) as made, nursery.job(made, "paged") as job:
        limit(made, "paged")
        assert job.ask(f"fill {NEEDS} 500", SLOW_S) == str(NEEDS)
        job.tell("verify 500")
        made.kill_broker()
        assert job.answer(SLOW_S) == "lost 0"
        assert job.ask("empty") == "freed"
        assert job.ask(f"fill {NEEDS} 700", SLOW_S) == str(NEEDS)
        assert job.ask("verify 700", SLOW_S) == "lost 0"
        assert made.look().held(job.place) == LIMIT
        with Pool(tmp_path, regions=7, region_bytes=made.region_bytes) as following:
            counted(following, job)


def test_invariant_5_a_killed_job_leaves_nothing(nursery: Nursery) -> None:
    """Invariant 5: a paged job killed at work leaves no region, no page and no descriptor behind, and others go on."""
    with pool(regions=16) as made, nursery.job(made, "other") as other:
        assert other.ask("mark") == "began"
        assert made.client.status().jobs  # a connection that stays
        before = len(os.listdir(f"/proc/{made.pid}/fd"))  # noqa: PTH208
        for _ in range(3):
            with nursery.job(made, "paged") as job:
                limit(made, "paged")
                job.tell(f"fill {NEEDS} 1")
                until(lambda job=job: made.look().held(job.place) == LIMIT, ANSWER_S, "the job is at work")
                job.kill()
                made.settled(lambda look: look.granted == 0, "its regions are free")
        until(lambda: len(os.listdir(f"/proc/{made.pid}/fd")) <= before, ANSWER_S, "descriptors are closed")  # noqa: PTH208
        assert other.ask("hold 12") == "1"
        made.look().check()


def test_a_stopped_broker_delays_no_fault(nursery: Nursery) -> None:
    """Invariant 7: while the broker stands still, a paged job's blocks come and go."""
    with pool(regions=16) as made, nursery.job(made, "paged") as job:
        limit(made, "paged")
        assert job.ask(f"fill {NEEDS} 1", SLOW_S) == str(NEEDS)
        os.kill(made.pid, signal.SIGSTOP)
        try:
            assert job.ask("verify 1", SLOW_S) == "lost 0"
        finally:
            os.kill(made.pid, signal.SIGCONT)


def test_a_stopped_job_gives_back_when_it_goes_on(nursery: Nursery) -> None:
    """Invariant 1: a limit that was lowered while the job was stopped is kept to after that, and nothing is lost."""
    with pool(regions=16) as made, nursery.job(made, "paged") as job:
        assert job.ask("fill 14 9", SLOW_S) == "14"
        job.send(signal.SIGSTOP)
        until(job.is_stopped, ANSWER_S, "the job is stopped")
        limit(made, "paged")
        job.tell("verify 9")
        assert made.look().held(job.place) == 14
        job.send(signal.SIGCONT)
        assert job.answer(SLOW_S) == "lost 0"
        made.settled(lambda look: look.held(job.place) == LIMIT, "regions have come back")


def test_invariant_10_a_child_keeps_none_of_a_paged_jobs_memory(nursery: Nursery) -> None:
    """Invariants 5 and 10: no mapping or descriptor of a child has pages or tiers, which end with a killed parent."""
    with pool(regions=16) as made, nursery.job(made, "paged") as job:
        assert job.ask("fill 10 3", SLOW_S) == "10"
        child = int(job.ask("leave_child"))
        try:
            found = [str(entry.readlink()) for entry in Path(f"/proc/{child}/fd").iterdir()]
            found += Path(f"/proc/{child}/maps").read_text().splitlines()
            job.kill()
            made.settled(lambda look: look.granted == 0, "its regions are free")
            assert Path(f"/proc/{child}").exists(), "the child lives"
        finally:
            os.kill(child, signal.SIGKILL)
        assert not [name for name in found for kind in ("zico-pages", "zico-tiers", "userfault") if kind in name]


def test_what_neither_limit_nor_tier_has_room_for_is_refused(nursery: Nursery) -> None:
    """A tier that is full ends in a refusal, and everything that was there before is as it was."""
    with pool(regions=16) as made, nursery.job(made, "paged") as job:
        limit(made, "paged")
        most = LIMIT + (16 << 20) // made.region_bytes - 1
        assert job.ask(f"fill {most + 5} 3", SLOW_S) == str(most)
        assert job.ask("verify 3", SLOW_S) == "lost 0"
        assert made.jobs[job.place]["oom_count"] == 1


def test_invariant_10_a_child_sees_what_is_out(nursery: Nursery) -> None:
    """Invariant 10: a forked child finds all contents, resident or not, and what it writes reaches nobody."""
    with pool(regions=16) as made, nursery.job(made, "paged") as job:
        limit(made, "paged")
        assert job.ask(f"fill {NEEDS} 40", SLOW_S) == str(NEEDS)
        assert job.ask("fork 40", SLOW_S) == "lost 0 0"
        assert job.ask("verify 40", SLOW_S) == "lost 0"


def test_a_lower_limit_is_kept_to_in_the_middle_of_an_iteration(nursery: Nursery) -> None:
    """Invariant 1: regions that the job may not hold any more come back while its tensors live on."""
    with pool(regions=16) as made, nursery.job(made, "paged") as job:
        assert job.ask("fill 14 9", SLOW_S) == "14"
        assert made.look().held(job.place) == 14
        limit(made, "paged")
        made.settled(lambda look: look.held(job.place) == LIMIT, "regions have come back", ANSWER_S)
        assert job.ask("verify 9", SLOW_S) == "lost 0"
        assert pages_of(job) <= LIMIT * made.region_bytes
