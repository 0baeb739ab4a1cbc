"""How fast jobs work together, found from what a broker sees of them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.broker_looks import Watched
from hypothesis import given
from hypothesis import strategies as st

from zico.broker.speeds import AGAIN_NS, MOST_JOBS, NOTICEABLE, Look, Speeds
from zico.pool.layout import JobState
from zico.scheduler.policies import policy_named
from zico.scheduler.simulate import Load
from zico.scheduler.state import JobView, PoolView, Profile

if TYPE_CHECKING:
    from collections.abc import Sequence

MS = 1_000_000
S = 1_000_000_000


def profile(peak: int, n: int, step_ns: int, slower_to: float = 1.0) -> Profile:
    """Return a triangle of regions whose last steps take so many times as long as its first ones."""
    levels = [3 + round(peak * min(i, n - i) / (n / 2)) for i in range(n)]
    ends_ns = np.cumsum(step_ns * np.linspace(1, slower_to, n)).astype(np.int64).tolist()
    return Profile(tuple(levels), (0, *ends_ns[:-1]), ends_ns[-1], 4, n << 4)


def long_and_short(slower_to: float = 1.0, jitter: float = 0.0) -> list[Load]:
    """Return two jobs of different lengths and sizes."""
    profiles = (profile(60, 100, 3 * MS, slower_to), profile(30, 64, 2 * MS, slower_to))
    return [Load(f"job{number}", each, 3, jitter=jitter) for number, each in enumerate(profiles)]


def measured(loads: Sequence[Load], slowdown: Sequence[float], seconds: int, budget: int = 75) -> Speeds:
    """Return what was measured of jobs that are really so much slower together."""
    speeds = Speeds()
    Watched(policy_named("zico"), loads, budget, slowdown).shown_to(speeds, seconds * S)
    return speeds


def view_of(loads: Sequence[Load], **slower: float) -> PoolView:
    """Return jobs whose profiles were learned while each was so many times slower than alone."""
    jobs = []
    for number, load in enumerate(loads):
        factor = slower.get(load.name, 1.0)
        learned = dataclasses.replace(
            load.profile,
            t_ns=tuple(round(factor * t_ns) for t_ns in load.profile.t_ns),
            duration_ns=round(factor * load.profile.duration_ns),
        )
        jobs.append(
            JobView(
                job=number,
                name=load.name,
                phase=JobState.RUNNING,
                held=3,
                persistent=3,
                claim=3,
                kept=3,
                profile=learned,
                iteration=9,
            )
        )
    return PoolView(0, 75, tuple(jobs))


@pytest.mark.parametrize(("together", "slower_to"), [(1.4, 1.0), (1.4, 2.0), (2.0, 1.0)])
def test_exact_times_give_the_slowdown(together: float, slower_to: float) -> None:
    """Within 5 % after some tens of iterations, be progress even over time or not."""
    speeds = measured(long_and_short(slower_to), (1, 1, together), 20)
    assert speeds.slowdown == pytest.approx((1, 1, together), rel=0.05)
    assert speeds.measured == speeds.measured_last == pytest.approx((together,), rel=0.05)


def test_times_that_vary_give_it_a_little_later() -> None:
    """With a tenth of jitter it is within 10 %, and the error is believed to be below that."""
    assert measured(long_and_short(jitter=0.1), (1, 1, 1.4), 40).slowdown[2] == pytest.approx(1.4, rel=0.1)


@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_how_much_times_vary_is_told(jitter: float) -> None:
    """By what share iterations are longer or shorter, also of jobs that do not slow each other; at first nothing."""
    loads = long_and_short(jitter=jitter)
    first, later = (measured(loads, (1, 1, 1), seconds).noted(view_of(loads)) for seconds in (2, 40))
    assert [job.jitter for job in first.jobs] == [0, 0]
    assert [job.jitter for job in later.jobs] == pytest.approx([jitter, jitter], rel=0.25)


def test_jobs_that_do_not_slow_each_other_leave_everything_as_it_is() -> None:
    """It is known that they do not, and the view is the very one."""
    loads = long_and_short()
    speeds = measured(loads, (1,), 20)
    assert speeds.measured == (1.0,)
    view = view_of(loads)
    assert speeds.noted(view) is view


def test_a_profile_that_was_learned_in_company_gets_the_times_of_a_job_alone() -> None:
    """However much slower it was, its iteration then takes what it takes alone; its levels stay."""
    loads = long_and_short(slower_to=2.0)
    speeds = measured(loads, (1, 1, 1.4), 20)
    noted = speeds.noted(view_of(loads, job0=1.35, job1=1.1))
    assert noted.slowdown == speeds.slowdown
    for job, load in zip(noted.jobs, loads, strict=True):
        assert job.profile is not None
        assert job.profile.duration_ns == pytest.approx(load.profile.duration_ns, rel=0.03)
        assert job.profile.t_ns == pytest.approx(load.profile.t_ns, abs=0.04 * load.profile.duration_ns)
        assert job.profile.held == load.profile.held
    assert speeds.noted(noted).jobs[0].profile is not noted.jobs[0].profile
    again = view_of(loads)
    assert speeds.noted(again).jobs[0].profile is speeds.noted(again).jobs[0].profile


# -- looks one by one ------------------------------------------------------------------------------


def look(now_ns: int, iteration: int = 0, began_ns: int = 0, n_events: int = 100, **changes: object) -> Look:
    """Return a job inside an iteration that alone takes 100 ms."""
    done = min(1.0, (now_ns - began_ns) / (100 * MS))
    made = Look(iteration, True, began_ns, began_ns, 0, 0, done, n_events)  # noqa: FBT003 - in the order of its fields
    return made._replace(**changes)


def alternate(speeds: Speeds, rounds: int, together: float, since: int = 0, **changes: object) -> list[float]:
    """Let one job iterate alone and then beside another that does as well, by turns; returns what is told after each.

    All rounds take 100 ms of work, the first one is number ``since``, and none takes longer than
    300 ms.
    """
    told, ended_ns = [], since * 300 * MS
    for n in range(since, since + rounds):
        now_ns = n * 300 * MS
        took_ns = round(100 * MS * (together if n % 2 else 1.0))
        for k in range(11):
            at_ns, done = now_ns + k * took_ns // 10, k / 10
            inside = look(0, n, now_ns, done=done, ended_ns=ended_ns, **changes)
            speeds.observe(at_ns, {0: inside, 1: inside._replace(inside=n % 2 == 1)})
        ended_ns = now_ns + took_ns
        told.append(speeds.slowdown[-1])
    return told


def test_looks_alone_say_it() -> None:
    """One job that does now an iteration alone and now one beside another is compared with itself."""
    speeds = Speeds()
    alternate(speeds, 60, 1.5)
    assert speeds.slowdown == pytest.approx((1, 1, 1.5), rel=0.01)


def test_what_is_told_changes_noticeably_and_seldom() -> None:
    """When the device becomes another one, changes are ten seconds apart and of more than 5 %, until they are made."""
    speeds = Speeds()
    told = [1.0, *alternate(speeds, 100, 1.5), *alternate(speeds, 1000, 2.5, since=100)]
    changes = [n for n in range(1, len(told)) if told[n] != told[n - 1]]
    assert len(changes) > 3
    assert told[-1] == pytest.approx(2.5, rel=0.06)
    assert all(after - before >= AGAIN_NS // (300 * MS) for before, after in itertools.pairwise(changes))
    assert all(abs(told[n] / told[n - 1] - 1) > NOTICEABLE for n in changes)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"n_events": 0}, id="no profile"),
        pytest.param({"typical": False}, id="another iteration than usual"),
    ],
)
def test_what_says_nothing_is_left_out(changes: dict[str, object]) -> None:
    """First iterations and those that the profile does not describe are not learned from."""
    speeds = Speeds()
    alternate(speeds, 60, 1.5, **changes)
    assert speeds.measured == ()


def test_other_jobs_begin_anew() -> None:
    """What was measured of jobs says nothing of others; the report still has it."""
    speeds = Speeds()
    alternate(speeds, 60, 1.5)
    known = speeds.measured
    speeds.observe(60 * S, {0: look(60 * S), 2: look(60 * S)})
    assert speeds.slowdown == (1, 1, 1)
    assert (speeds.measured, speeds.measured_last) == ((), known)


def together_by_turns(speeds: Speeds, factors: Sequence[float]) -> None:
    """Let three jobs iterate, in every round as many as there are factors for, by turns."""
    now_ns = 0
    for n in range(90):
        working = n % len(factors)
        took_ns = round(100 * MS * factors[working])
        for k in range(11):
            inside = look(0, n, now_ns, done=k / 10)
            looks = {job: inside._replace(inside=job <= working) for job in range(3)}
            speeds.observe(now_ns + k * took_ns // 10, looks)
        now_ns += took_ns


def test_each_number_of_jobs_has_its_slowdown() -> None:
    """Two and three jobs are compared with smaller company; what was not seen lies on the line through the others."""
    speeds = Speeds()
    together_by_turns(speeds, (1.0, 1.2, 1.9))
    assert speeds.slowdown == pytest.approx((1, 1, 1.2, 1.9), rel=0.01)


def test_company_that_is_compared_with_unknown_company_alone_stays_unknown() -> None:
    """Where nobody ever works alone, two and three jobs are compared with each other and with nothing that is known."""
    speeds = Speeds()
    for n in range(60):
        for k in range(11):
            at_ns = (n * 10 + k) * 10 * MS
            inside = look(at_ns, n, n * 100 * MS)
            speeds.observe(at_ns, {0: inside, 1: inside, 2: inside._replace(inside=n % 2 == 1)})
    assert speeds.measured == ()


def test_a_pause_is_no_slowness() -> None:
    """An iteration that takes ten times as long, as a checkpoint makes it, changes nothing."""
    speeds = Speeds()
    alternate(speeds, 60, 1.5)
    known = speeds.slowdown
    now_ns = 100 * S
    speeds.observe(now_ns, {0: look(0, 60, now_ns, done=0.0), 1: look(0, 60, now_ns, inside=False)})
    speeds.observe(now_ns + S, {0: look(0, 60, now_ns, done=0.9), 1: look(0, 60, now_ns, inside=False)})
    speeds.observe(now_ns + 20 * S, {0: look(0, 61, now_ns + S), 1: look(0, 60, now_ns, inside=False)})
    assert speeds.slowdown == known


@given(st.data())
def test_any_looks_give_slowdowns_that_plans_can_use(data: st.DataObject) -> None:
    """Whatever the table says, even nonsense, slowdowns are at least 1, finite, and rise with the number of jobs."""
    speeds, now_ns = Speeds(), 0
    numbers = st.integers(0, 3 * S)
    looks = st.builds(
        Look, st.integers(0, 9), st.booleans(), numbers, numbers, numbers, numbers, st.floats(0, 1), st.integers(0, 99)
    )
    for _ in range(data.draw(st.integers(1, 30))):
        now_ns += data.draw(st.integers(0, S))
        speeds.observe(now_ns, data.draw(st.dictionaries(st.integers(0, 2), looks, max_size=3)))
        assert np.isfinite(speeds.slowdown).all()
        assert speeds.slowdown[:2] == (1, 1)
        assert list(speeds.slowdown) == sorted(speeds.slowdown)


def test_so_many_jobs_are_not_measured() -> None:
    """Beyond those that are planned for there is nothing to know."""
    speeds = Speeds()
    for now_ns in range(0, 4 * S, 20 * MS):
        speeds.observe(now_ns, {job: look(now_ns) for job in range(MOST_JOBS + 1)})
    assert (speeds.measured, speeds.slowdown) == ((), (1.0, 1.0))
