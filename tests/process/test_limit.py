"""Budgets, limits and shares that change while jobs run; jobs that come and go."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.harness import LightJob, Look, Nursery, Pool, pool, until

from zico.base.errors import ConfigError
from zico.base.programs import program
from zico.base.warming import BROKERS
from zico.broker.growth import WINDOW
from zico.broker.protocol.messages import Change, Share
from zico.cli import main
from zico.pool.layout import JobState

if TYPE_CHECKING:
    from collections.abc import Iterator

FOR_EVER = 1_000_000
PEAK = 6
MORE_ITERATIONS = 20


def trains(made: Pool, *jobs: LightJob) -> None:
    """Let jobs train for ever, and wait until each is known."""
    for job in jobs:
        job.tell(f"train {FOR_EVER} {PEAK}")
        go_on(made, job, iterations=3)


def go_on(made: Pool, *jobs: LightJob, iterations: int = MORE_ITERATIONS) -> None:
    """Wait until each of the jobs has ended so many more iterations."""
    places = [job.place for job in jobs]
    until(made.exceeds("iteration", places, made.jobs["iteration"][places] + iterations - 1), 20, "the jobs train")


def fits(regions: int) -> object:
    """Return a condition: what is granted, and what the kernel counts, fit in so many regions."""

    def condition(look: Look) -> bool:
        return look.granted <= regions and look.physical_bytes <= regions * int(look.header["region_bytes"])

    return condition


def test_a_budget_is_lowered_and_raised_while_jobs_train(nursery: Nursery) -> None:
    """Invariant 1: what is held only falls until it fits, jobs go on with less, and with more than in the beginning."""
    with (
        pool(regions=16, most=24) as made,
        nursery.job(made, "a") as first,
        nursery.job(made, "b") as second,
    ):
        trains(made, first, second)
        made.client.change(Change(budget_bytes=8 * made.region_bytes))
        before = made.look().granted
        while (now := made.look().granted) > 8:
            assert now <= before
            before = now
        made.settled(fits(8), "the memory came back").check()
        go_on(made, first, second, iterations=2)
        stalls = int(made.header["stalls"])  # a budget lowered inside iterations may leave no order in which all end
        go_on(made, first, second)
        made.look().check()
        assert made.header["stalls"] == stalls
        made.client.change(Change(budget_bytes=24 * made.region_bytes))
        go_on(made, first, second)
        made.look().check()
        assert made.client.status().budget_bytes == 24 * made.region_bytes
        with pytest.raises(ConfigError, match="--most"):
            made.client.change(Change(budget_bytes=25 * made.region_bytes))


def test_no_change_makes_the_broker_compile(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop answers at once: what it calls is compiled before it starts, for the types that it gives."""
    kept = [program(name).file for name in BROKERS]
    code = tmp_path / "cache" / "code"
    (tmp_path / "cache").mkdir(0o700)
    code.mkdir(0o700)
    for file in kept:
        shutil.copy(file, code)
    monkeypatch.setenv("ZICO_CACHE_DIR", str(code.parent))
    with pool(regions=16) as made, nursery.job(made, "a") as first, nursery.job(made, "b") as second:
        trains(made, first, second)
        for change in (
            Change(budget_bytes=10 * made.region_bytes),
            Change(job="a", limit_bytes=8 * made.region_bytes),
            Change(job="a", weight=2.0, priority=1, slo=0.1),
            Change(job="a", paused=True),
            Change(job="a", paused=True, move=True),
            Change(job="b", paused=True, move=True),
            Change(job="a", paused=False),
            Change(job="b", paused=False),
            Change(budget_bytes=16 * made.region_bytes),
        ):
            made.client.change(change)
        with nursery.job(made, "c") as third:
            trains(made, third)
            go_on(made, first, second)
        made.client.report()
    assert {file.name for file in code.glob("*.o")} == {file.name for file in kept}


def test_a_raised_budget_wakes_whoever_waits(nursery: Nursery) -> None:
    """A request that a lowered budget keeps waiting is granted when the budget is raised."""
    with pool(regions=16) as made, nursery.job(made, "holder") as holder, nursery.job(made, "other") as other:
        for job in (holder, other):
            assert job.ask("mark") == "began"
        assert holder.ask("hold 12") == "1"
        made.client.change(Change(budget_bytes=12 * made.region_bytes))
        other.tell("hold 4")
        made.waits_for_memory(other)
        made.client.change(Change(budget_bytes=16 * made.region_bytes))
        assert other.answer() == "1"
        assert made.look().held(other.place) == 4


@pytest.mark.parametrize("of_job", [False, True], ids=["budget", "limit"])
def test_what_no_longer_fits_goes_to_the_next_tier(nursery: Nursery, of_job: bool) -> None:  # noqa: FBT001 - a parameter
    """Invariant 8: a job inside its iteration is not killed by less memory: what it may not hold goes to a file."""
    with pool(regions=16) as made, nursery.job(made, "a") as job, nursery.job(made, "b") as other:
        for one in (job, other):
            assert one.ask("mark") == "began"
        assert job.ask("hold 6") == "1"
        size_bytes = 8 * made.region_bytes
        made.client.change(Change(job="a", limit_bytes=size_bytes) if of_job else Change(budget_bytes=size_bytes))
        assert job.ask("hold 4") == "1"
        assert made.look().held(job.place) == 6
        assert made.jobs[job.place]["spilled_bytes"] == 4 * made.region_bytes
        assert job.ask("hold 2") == "1"
        assert made.look().held(job.place) == 8
        if of_job:
            assert other.ask("hold 8") == "1"
            assert made.client.status().jobs[0].limit_bytes == size_bytes
        for _ in range(3):
            assert job.ask("free") == "freed"
        assert job.ask("mark") == "began"


def test_a_newcomers_first_iteration_is_its_own(nursery: Nursery) -> None:
    """Invariant 1: while a job of which nothing is known grows, the others stand at boundaries, then they go on."""
    with (
        pool(regions=16) as made,
        nursery.job(made, "a") as first,
        nursery.job(made, "b") as second,
        nursery.job(made, "new") as newcomer,
    ):
        trains(made, first, second)
        assert newcomer.ask("hold 10") == "1"
        places = [first.place, second.place]
        made.settled(
            lambda look: bool((look.jobs["state"][places] == JobState.BOUNDARY).all()), "the others stand still"
        ).check()
        assert newcomer.ask("free") == "freed"
        assert newcomer.ask("mark") == "began"
        go_on(made, first, second)
        made.look().check()


def test_who_leaves_hands_its_share_on(nursery: Nursery) -> None:
    """Of two that do not fit together one leaves, and the other never waits at a boundary or for memory again."""
    with pool(regions=8) as made, nursery.job(made, "a") as stays:
        with nursery.job(made, "b") as leaves:
            trains(made, stays, leaves)
        made.settled(lambda look: look.jobs["state"][leaves.place] == JobState.EMPTY, "its place is free", 5)
        go_on(made, stays, iterations=2)
        before = waited_ns(made, stays)
        go_on(made, stays)
        assert waited_ns(made, stays) == before
        made.look().check()


def waited_ns(made: Pool, job: LightJob) -> int:
    """Return how long a job has waited in all."""
    record = made.jobs[job.place]
    return int(record["boundary_waited_ns"]) + int(record["need_waited_ns"])


def test_shares_come_with_a_job_and_change(nursery: Nursery) -> None:
    """What a job says of itself when it joins is in the status, and what an observer says later."""
    with pool() as made, nursery.job(made, "usual"):
        member = made.client.join("mine", "light", Share(weight=2.0, priority=-1, slo=0.1))
        made.client.change(Change(job="mine", weight=3.0, slo=None))
        assert [job.share for job in made.client.status().jobs] == [Share(), Share(weight=3.0, priority=-1)]
        member.leave()
        member.close_descriptors()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "nothing to change"),
        (["--weight", "2"], "name it with --job"),
        (["12 parsecs"], "is not a size"),
        (["1000G"], "--most"),
        (["1B"], "below one region"),
        (["9000000T"], "'9000000T' is 9000000 TiB, more than"),
        (["1G", "--job", "nobody"], "no job is called 'nobody'"),
        (["--job", "a", "--weight", "0"], "'0' is not a weight"),
    ],
)
def test_the_command_refuses_in_a_sentence(
    shared_pool: Pool, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    """Each bad input ends with code 2 and one line that says what is wrong; nothing changes."""
    before = shared_pool.client.status().budget_bytes
    assert main(["limit", "--socket", str(shared_pool.socket), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert shared_pool.client.status().budget_bytes == before


def test_the_command_changes_what_the_status_shows(shared_pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    """A share is one of the first budget, whatever the present one; ``none`` is all that there is. All users see it."""
    socket = ("--socket", str(shared_pool.socket))
    budgets, shown = [], []
    for size in ("50%", "50%", "none", "16"):
        text = f"{16 * shared_pool.region_bytes}B" if size == "16" else size
        assert main(["limit", *socket, text]) == 0
        budgets.append(shared_pool.client.status().budget_bytes // shared_pool.region_bytes)
        shown.append(Path(f"/proc/{shared_pool.pid}/comm").read_text())
        assert main(["status", *socket]) == 0
    assert shown == ["zico 2MiB\n", "zico 2MiB\n", "zico 6MiB\n", "zico 4MiB\n"]
    assert budgets == [8, 8, 24, 16]
    assert "can be raised to 6 MiB" in capsys.readouterr().out


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[Pool]:
    """Give a pool of 16 regions, of 24 at most, without jobs."""
    with pool(regions=16, most=24) as made:
        yield made


def test_a_job_that_keeps_more_after_each_iteration_is_told(nursery: Nursery) -> None:
    """What a region more after each iteration comes to stands in the status; a job beside it does not grow."""
    with (
        pool(regions=WINDOW + PEAK + 4) as made,
        nursery.job(made, "leaks") as leaks,
        nursery.job(made, "even") as even,
    ):
        for _ in range(WINDOW + 1):
            assert leaks.ask("hold 1") == "1"
            assert leaks.ask("mark") == even.ask("mark") == "began"
            found = {one.name: one.growth_bytes for one in made.client.status().jobs}
        assert found == {"leaks": made.region_bytes, "even": 0}
