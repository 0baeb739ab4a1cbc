"""One more job of a sweep starts when ``zico fit`` finds room for it, by what jobs of the same command have shown."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from cpu.support.room_cases import ALWAYS_HIGH, JOBS, OTHER, REGION, record

from zico.broker.protocol.messages import JobReport
from zico.cli.room import PATIENCE_S, RoomByFit
from zico.launch.queue import PoolNow
from zico.report.model import JobFigures, Record

if TYPE_CHECKING:
    from zico.launch.sweep import SweepJob


def ask(
    room: RoomByFit, candidate: SweepJob, running: list[SweepJob], now: Record | None, others: int = 0, **peaks: int
) -> bool:
    """Ask whether the candidate may start, where others hold so many regions, and processes have held so many."""
    members = [
        JobReport(name=name.replace("_", "="), framework="test", job=0, state="running", peak_bytes=peak * REGION)
        for name, peak in peaks.items()
    ]
    pool = PoolNow(1, 1, lambda: now, tuple(running), others_bytes=others * REGION, members=lambda: members)
    return asyncio.run(room.offers(candidate, {0: pool}))[0].may_start


def room() -> RoomByFit:
    """Return room that knows nothing yet."""
    return RoomByFit([*JOBS, OTHER], "zico", [REGION])


LOW_AND_HIGH = [2, 2, 2, 2, 8, 2, 2, 2, 2, 2]


def test_nothing_starts_beside_a_job_without_a_profile() -> None:
    """Neither another of its command nor one of a command that is known; nor while the broker does not answer."""
    a, b, c, _ = JOBS
    asked = room()
    assert not ask(asked, b, [a], None)
    assert not ask(asked, b, [a], record({}, 100, joined=("x=0",)))
    assert ask(asked, b, [a], record({"x=0": [1, 2]}, 100))
    assert ask(asked, OTHER, [a, b], record({"x=0": [1, 2]}, 100))
    assert not ask(asked, c, [a, OTHER], record({"x=0": [1, 2]}, 100, joined=("other",)))


def test_a_job_starts_when_it_fits() -> None:
    """Three peaks of eight are within 24 regions and not four; the budget is the one of now."""
    a, b, c, d = JOBS
    asked = room()
    assert ask(asked, c, [a, b], record({"x=0": ALWAYS_HIGH}, 24))
    assert not ask(asked, d, [a, b, c], record({"x=0": ALWAYS_HIGH}, 24))
    assert ask(asked, d, [a, b, c], record({"x=0": ALWAYS_HIGH}, 32))


def test_what_others_have_held_is_no_room() -> None:
    """Of a daemon's 24 regions, jobs of others leave 16 for two of these, or nothing at all."""
    a, b, c, _ = JOBS
    now = record({"x=0": ALWAYS_HIGH}, 24)
    assert ask(room(), b, [a], now, others=8)
    assert not ask(room(), c, [a, b], now, others=8)
    assert not ask(room(), b, [a], now, others=9)
    assert not ask(room(), b, [a], now, others=40)


def test_a_profile_counts_for_jobs_with_the_same_share_of_the_processors() -> None:
    """With half of them an iteration takes longer: whoever gets that is waited for until it has shown itself."""
    whole, half = (msgspec.structs.replace(job, owner=owner) for job, owner in zip(JOBS, "wh", strict=False))
    asked = RoomByFit([whole, half], "zico", [REGION], compute={"w": 1.0, "h": 0.5})
    now = record({"x=0": [1, 2]}, 100, joined=("x=1",))
    assert not ask(asked, whole, [whole, half], now), "half is not known by what whole did"
    assert ask(asked, whole, [whole, half], record({"x=0": [1, 2], "x=1": [1, 2]}, 100))
    assert ask(RoomByFit([whole, half], "zico", [REGION]), whole, [whole, half], now)


def test_a_job_that_has_another_name_in_the_pool_is_known() -> None:
    """A daemon's pool may have its name already; its profile counts for its command all the same."""
    a, b, _, _ = JOBS
    renamed = msgspec.structs.replace(a, name="x=0-2")
    assert ask(room(), b, [renamed], record({"x=0-2": ALWAYS_HIGH}, 16))
    assert not ask(room(), b, [renamed], record({"x=0-2": ALWAYS_HIGH}, 15))


def test_a_job_that_would_only_wait_does_not_start() -> None:
    """Peaks that need not meet leave room for one more; those that last all or most of the time do not."""
    a, b, _, _ = JOBS
    assert ask(room(), b, [a], record({"x=0": LOW_AND_HIGH}, 11))
    assert ask(room(), b, [a], record({"x=0": [*[8] * 17, *[2] * 3]}, 11)), "20 in the time of 17"
    assert not ask(room(), b, [a], record({"x=0": ALWAYS_HIGH}, 11))


def test_a_job_that_never_fits_does_not_start() -> None:
    """What two jobs keep and what one more needs is 15 regions."""
    a, b, _, _ = JOBS
    assert not ask(room(), b, [a], record({"x=0": [8, 7]}, 14))


def test_the_job_that_held_most_stands_for_its_command() -> None:
    """Also when it has ended, whatever later ones hold; all its processes count."""
    a, b, _, _ = JOBS
    asked = room()
    assert not ask(asked, b, [a], record({"x=3": ALWAYS_HIGH, "x=0": [1, 1]}, 15))
    rank = [6, 6, 6, 6, 6, 6, 6, 6, 6, 2]
    ranks = {"x=0": rank, "x=0.2": rank}
    assert not ask(room(), b, [a], record(ranks, 15))
    assert ask(room(), b, [a], record(ranks, 24))


def test_jobs_that_never_join_need_no_room() -> None:
    """When one of a command has ended without joining, others of it start as processors allow."""
    a, b, c, _ = JOBS
    asked = room()
    assert not ask(asked, b, [a], record({}, 4))
    assert ask(asked, c, [b], record({}, 4))


# -- a profile that never comes --------------------------------------------------------------------


def ended(room: RoomByFit, job: SweepJob, peak: int, code: int = 0, framework: str = "test") -> None:
    """Let a job end that has held so many regions."""
    figures = JobFigures(
        name=job.name, framework=framework, command="", exit_code=code, wall_s=1.0, peak_bytes=peak * REGION
    )
    room.ended(job, 0, figures)


def test_after_a_job_without_a_profile_its_peak_counts() -> None:
    """Once the record is younger than its end; from then on as many start as fit, and one line says so."""
    a, b, c, d = JOBS
    told: list[str] = []
    asked = RoomByFit(JOBS, "zico", [REGION], tell=told.append)
    before = record({}, 24, joined=("x=0",))
    assert not ask(asked, b, [a], before)
    ended(asked, a, 8)
    assert not ask(asked, c, [b], before)
    after = record({}, 24, joined=("x=0", "x=1"))
    assert ask(asked, c, [b], after)
    assert ask(asked, d, [b, c], after)
    assert not ask(asked, d, [b, c], after, others=1)
    counts = "jobs of its command count with the most that one has held, 8 MiB so far"
    assert told == [f"x=0 has ended without a profile: {counts}"]
    assert not ask(asked, d, [b, c], after, x_1=9)
    assert ask(asked, d, [b, c], record({"x=1": [2, 1]}, 24, joined=("x=0",)))


def test_a_job_that_failed_or_has_left_a_profile_is_no_reason_to_count_peaks() -> None:
    """A failed one may have held less than others will."""
    a, b, c, _ = JOBS
    told: list[str] = []
    asked = RoomByFit(JOBS, "zico", [REGION], tell=told.append)
    ended(asked, a, 1, code=1)
    assert not ask(asked, c, [b], record({}, 24, joined=("x=0", "x=1")))
    ended(asked, a, 8)
    assert ask(asked, c, [b], record({"x=0": ALWAYS_HIGH}, 24))
    assert told == []


def test_a_job_without_a_profile_is_not_waited_for_for_ever() -> None:
    """After so long its peak so far counts, all its processes; a job of another command then starts beside it, too."""
    a, b, c, _ = JOBS
    told: list[str] = []
    now_s = [0.0]
    asked = RoomByFit([*JOBS, OTHER], "zico", [REGION], tell=told.append, clock=lambda: now_s[0])
    now = record({}, 24, joined=("x=0",))
    assert not ask(asked, b, [a], now, x_0=8)
    now_s[0] = PATIENCE_S - 1
    assert not ask(asked, b, [a], now, x_0=8)
    now_s[0] = PATIENCE_S
    assert not ask(asked, b, [a], now, x_0=8, **{"x_0.2": 5})
    assert ask(asked, OTHER, [a], now)
    counts = "jobs of its command count with the most that one has held, 13 MiB so far"
    assert told == [f"x=0 has no profile after 120 s: {counts}"]
    assert ask(asked, b, [a], record({}, 26, joined=("x=0",)))
    assert not ask(asked, c, [a, OTHER], now)


def test_peaks_and_profiles_count_together() -> None:
    """Beside a job that counts with its peak, one with a profile starts if what is left has room for it."""
    a, b, c, _ = JOBS
    for budget, starts in ((16, True), (15, False)):
        asked = room()
        ended(asked, b, 8)
        now = record({"other": ALWAYS_HIGH}, budget, joined=("x=1",))
        assert ask(asked, OTHER, [a], now) == starts
        assert ask(asked, c, [OTHER], now) == starts
