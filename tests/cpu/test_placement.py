"""Where a job starts on a machine of several devices: the choice, the queue over several pools, limits and names."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import pytest
from cpu.support.room_cases import ALWAYS_HIGH, JOBS, OTHER, REGION, record
from hypothesis import given
from hypothesis import strategies as st

from zico.base.errors import BrokerError, ConfigError, ProblemError
from zico.base.settings import DeviceMemory, Setting, device_of, devices_of, resolve
from zico.base.units import GIB, MIB
from zico.broker.protocol.messages import PoolReport, RefusedRequest, Report
from zico.broker.saving import Wish, wishes_of
from zico.cli import main
from zico.cli.room import RoomByFit, _load
from zico.job import joining
from zico.launch.devices import memory_of
from zico.launch.figures import JobOutcome, Outcome, run_report
from zico.launch.jobs import Command, split_commands
from zico.launch.placement import Offer, choose, largest
from zico.launch.queue import PoolNow, Queue, Unlimited
from zico.launch.sweep import SweepJob
from zico.report.files import markdown
from zico.report.model import JobFigures, PoolFigures, RunReport
from zico.report.table import attention_lines

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from zico.launch.queue import Room
    from zico.report.model import Record

OFFERS = st.dictionaries(
    st.integers(0, 5),
    st.builds(
        Offer,
        budget_bytes=st.integers(1, 8),
        free_bytes=st.integers(0, 8),
        jobs=st.integers(0, 3),
        unknown=st.integers(0, 3),
        may_start=st.booleans(),
        normalised=st.none() | st.floats(0, 1),
    ),
)


# -- the choice ------------------------------------------------------------------------------------


@given(OFFERS, st.dictionaries(st.integers(0, 5), st.integers(0, 9)))
def test_a_job_goes_where_it_may_and_nowhere_else(offers: dict[int, Offer], limits: dict[int, int]) -> None:
    """Never where it finds no place; somewhere if any pool can; each time the same, and to none that is worse."""
    can = {key for key, offer in offers.items() if offer.may_start and offer.budget_bytes >= limits.get(key, 0)}
    found = choose(offers, limits)
    assert (found in can) if can else (found is None)
    assert choose(dict(offers), limits) == found
    if found is not None:
        speed = offers[found].normalised or 0.0
        assert all((offers[key].normalised or 0.0) <= speed + 0.02 for key in can)
        without = {key: offer for key, offer in offers.items() if key == found or key not in can}
        assert choose(without, limits) == found


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"normalised": 0.9, "jobs": 3}, {"normalised": 0.8, "free_bytes": 9}),
        ({"normalised": 0.9, "jobs": 1}, {"normalised": 0.901, "jobs": 2, "free_bytes": 9}),
        ({"normalised": 0.9, "free_bytes": 9}, {"normalised": 0.9, "free_bytes": 8}),
        ({"normalised": 0.1, "jobs": 3}, {"unknown": 1}),
        ({"unknown": 1, "jobs": 2}, {"unknown": 2, "free_bytes": 9}),
        ({"unknown": 1, "jobs": 2, "free_bytes": 9}, {"unknown": 1, "free_bytes": 8}),
        ({"jobs": 1}, {"jobs": 2}),
        ({}, {}),
    ],
)
def test_what_counts_in_which_order(better: Mapping[str, float], worse: Mapping[str, float]) -> None:
    """Speed, then fewer jobs, then room; without a profile fewer unknown needs, then room; else the first device."""
    first, second = (Offer(**{"budget_bytes": 16} | dict(how)) for how in (better, worse))  # type: ignore[arg-type]
    assert choose({0: first, 1: second}) == 0
    if better:
        assert choose({0: second, 1: first}) == 1


def test_the_largest_pool_is_the_first_of_equal_ones() -> None:
    """Where a job runs alone again."""
    assert largest({}) is None
    assert largest({3: Offer(4), 1: Offer(8), 2: Offer(8)}) == 1


# -- a queue over several pools --------------------------------------------------------------------


def pools(*budgets: int, records: Mapping[int, Record | None] | None = None) -> dict[int, PoolNow]:
    """Return pools with such budgets in regions."""
    found = records or {}
    return {
        number: PoolNow(budget * REGION, budget * REGION, lambda number=number: found.get(number))  # type: ignore[misc]
        for number, budget in enumerate(budgets)
    }


def queue_of(jobs: list[SweepJob], at_most: int, room: Room, **owners: Command) -> Queue:
    """Return a queue of jobs."""
    return Queue(jobs, {}, at_most=at_most, room=room, owners=owners, ended=lambda _: None)


def start(queue: Queue, on: Mapping[int, PoolNow]) -> list[tuple[str, int]]:
    """Return the names of all that may start now, with their pools."""
    found = []
    while (one := asyncio.run(queue.next(on))) is not None:
        found.append((one[0].name, one[1]))
    return found


def end(queue: Queue, name: str, *, out_of_memory: bool = False) -> None:
    """Let a job end."""
    figures = JobFigures(name=name, command="true", exit_code=int(out_of_memory), wall_s=1.0)
    queue.ended(figures, told_out_of_memory=out_of_memory)


def test_at_most_counts_over_all_devices_and_second_tries_go_to_the_largest() -> None:
    """Three of four start, two of them in the pool with more room; what was out of memory runs alone in that one."""
    queue = queue_of(JOBS, 3, Unlimited())
    assert start(queue, pools(8, 16)) == [("x=0", 1), ("x=1", 0), ("x=2", 1)]
    end(queue, "x=1", out_of_memory=True)
    assert start(queue, pools(8, 16)) == [("x=3", 0)]
    for name in ("x=0", "x=2", "x=3"):
        assert start(queue, pools(8, 16)) == []
        end(queue, name)
    assert start(queue, pools(8, 16)) == [("x=1+again", 1)]


def test_a_limit_keeps_a_job_off_a_smaller_device() -> None:
    """A job that may hold ten regions waits for the device that has them; a share of a budget fits everywhere."""
    wishes = (Wish(limit_bytes=10 * REGION), Wish(limit_bytes=10 * REGION))
    jobs = [job_of(name) for name in "ab"]
    queue = queue_of(jobs, 4, Unlimited(), a=Command("a", (), "", wishes=wishes), b=Command("b", (), "", wishes=wishes))
    assert start(queue, pools(8, 16)) == [("a", 1), ("b", 1)]
    texts = {"limit": "a=50%"}
    of_each = [wishes_of(texts, {"limit": "--limit"}, ("a",), budget, ("host:1", 16)) for budget in (8, 16)]
    assert [wishes["a"].limit_bytes for wishes in of_each] == [4, 8]


def job_of(name: str) -> SweepJob:
    """Return a job of one letter."""
    return SweepJob(name, ("true",), owner=name)


def test_profiles_choose_the_device() -> None:
    """A job goes where it is not slowed; where it would only wait it does not start, and where nothing runs it does."""
    known = record({"x=0": ALWAYS_HIGH}, 11)
    both = {0: known, 1: record({}, 24)}
    room = RoomByFit([*JOBS, OTHER], "zico", [REGION, 2 * REGION])
    a, b, c, d = JOBS
    queue = queue_of([a, b, c, d], 4, room)
    first = asyncio.run(queue.next(pools(11, 9)))
    assert first is not None
    assert first[1] == 0
    assert start(queue, pools(11, 24, records=both)) == [("x=1", 1), ("x=2", 1), ("x=3", 1)]
    offers = asyncio.run(room.offers(a, pools(7, 24)))
    assert [(offer.may_start, offer.normalised) for offer in offers.values()] == [(False, 0.0), (True, 1.0)]
    coarse = RoomByFit(JOBS, "zico", [REGION, 16 * REGION])
    shown = {0: record({"x=0": ALWAYS_HIGH}, 24), 1: record({}, 24)}
    alike = {number: dataclasses.replace(pool, running=(a,)) for number, pool in pools(24, 24, records=shown).items()}
    offers = asyncio.run(coarse.offers(b, alike))
    assert [offer.may_start for offer in offers.values()] == [True, False]


def test_without_a_fitting_device_a_job_still_starts_on_the_largest() -> None:
    """A job that is known to need more than any has ends the wait when nothing runs: its own error says why."""
    room = RoomByFit(JOBS, "zico", [REGION, REGION])
    asyncio.run(room.offers(JOBS[1], pools(32, records={0: record({"x=0": ALWAYS_HIGH}, 32)})))
    queue = queue_of(JOBS[1:3], 2, room)
    assert start(queue, pools(4, 6)) == [("x=1", 1)]


# -- names, memory and refusals --------------------------------------------------------------------


def of_flag(text: str) -> dict[str, Setting[str]]:
    """Return a device as the command line gives it."""
    return {"device": Setting(text, "--device")}


def test_a_list_of_devices_and_their_memory() -> None:
    """Each has one name; pools on the host have equal parts of the machine; a command about one refuses two."""
    found = devices_of(of_flag("cuda, cuda:1,host:02"))
    assert [device.value for device in found] == ["cuda:0", "cuda:1", "host:2"]
    one, half = (memory_of(Setting("host:0", "--device"), shared_by=n).total_bytes for n in (1, 2))
    assert half == one // 2
    settings = resolve({}, DeviceMemory(GIB, GIB), ["zico"], device=found[2])
    assert (settings.device.value, settings.region_bytes.value) == ("host:2", 4 * MIB)
    with pytest.raises(ConfigError, match="--device: 3 devices are given, and this command is about one: give"):
        device_of(of_flag("cuda,cuda:1,host"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--device", "host:0,host:1", "--metrics", "9400", "broker start"],
            "--metrics: 2 brokers cannot serve metrics at one place: start them one after another, each with a port",
        ),
        (["--device", "host:0,gpu"], "--device: 'gpu' is not a device: give host, cuda or cuda:N"),
        (["--device", "cuda,cuda:0"], "--device: 'cuda,cuda:0' has cuda:0 twice: give each device once"),
        (["--device", ",".join(f"host:{n}" for n in range(17))], "--device: 17 devices are given: give at most 16"),
        (
            ["--device", "host:0,host:1", "--budget", "64MiB", "--limit", "true=80MiB"],
            "--limit: '80MiB' is 80 MiB, more than any device has: the largest budget is 64 MiB, of host:0: give",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started."""
    monkeypatch.delenv("ZICO_BUDGET", raising=False)
    command = ["broker", "start", *words[:-1]] if words[-1] == "broker start" else ["run", *words, "true"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


# -- the report ------------------------------------------------------------------------------------


def test_the_report_says_which_job_ran_where() -> None:
    """Each device has its figures, the run their sums, and the table a column; one device has neither."""
    settings = [
        resolve({"budget": Setting("64MiB", "--budget")}, DeviceMemory(GIB, GIB), ["zico"], device=Setting(name, ""))
        for name in ("host:0", "host:1")
    ]
    ended = [JobOutcome(command, 0, 3.0, 9.0) for command in split_commands(["python a.py", "python b.py"])]
    outcomes = (ended[0], dataclasses.replace(ended[1], pool=1))
    pool = PoolReport(region_bytes=4 * MIB, peak_granted_bytes=60 * MIB, stalls=1)
    report = run_report(Outcome(outcomes, (Report(pool=pool, jobs=(), jobs_left_out=0), None)), settings)
    assert (report.device, report.budget_bytes) == ("host:0,host:1", 128 * MIB)
    assert [(one.device, one.n_jobs, one.peak_granted_bytes) for one in report.pools] == [
        ("host:0", 1, 60 * MIB),
        ("host:1", 1, 0),
    ]
    assert (report.pool.peak_granted_bytes, report.pool.stalls) == (60 * MIB, 1)
    assert [(job.device, job.note.split(":")[0]) for job in report.jobs] == [
        ("host:0", "no framework was imported"),
        ("host:1", "there are no figures"),
    ]
    assert "| a | 0 | host:0 |" in markdown(report, pictures={})
    assert "device host:1, policy zico, budget 64 MiB" in markdown(report, pictures={})
    assert [job.name for job in report.on(1).jobs] == ["b"]
    assert "| a | 0 | 0 |" in markdown(report.on(0), pictures={})


def test_a_job_larger_than_its_device_is_told_which_is_the_largest() -> None:
    """The sentence has the budget that the job shared, not the sum of all."""
    pools_ = (PoolFigures(device="host:0", budget_bytes=64 * MIB), PoolFigures(device="host:1", budget_bytes=32 * MIB))
    large, small = (
        JobFigures(name=name, command="x", exit_code=1, wall_s=1.0, device=device, oom=RefusedRequest(70 * MIB, 0))
        for name, device in (("large", "host:0"), ("small", "host:1"))
    )
    both = {"device": "host:0,host:1", "policy": "zico", "budget_bytes": 96 * MIB, "pool": PoolFigures()}
    first, second = attention_lines(RunReport(**both, pools=pools_, jobs=(large, small)))
    assert first.startswith("large ran out of memory on host:0, and no device has a larger budget: ")
    assert second.startswith("small ran out of memory on host:1 (the largest budget is 64 MiB, of host:0): ")
    assert ("64 MiB" in first.partition(": ")[2], "32 MiB" in second.partition("host:0): ")[2]) == (True, True)


# -- a script that is started by hand --------------------------------------------------------------


def test_a_script_by_itself_takes_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework takes its first GPU, too; what is no device is said in one sentence."""
    asked: list[tuple[str, str | None]] = []

    def start_none(path: Path, device: str | None, _budget: str | None) -> bool:
        asked.append((path.name, device))
        raise BrokerError("none here")

    monkeypatch.setattr(joining, "_start", start_none)
    monkeypatch.setenv("ZICO_DEVICE", "host:3,host:4")
    with pytest.raises(BrokerError, match="none here"):
        joining._open_pool(None, None)
    assert asked == [("broker-host-3.sock", "host:3")]
    with pytest.raises(ConfigError, match="'gpu' is not a device"):
        joining._open_pool("gpu", None)


def test_a_record_without_a_curve_is_refused_as_a_problem() -> None:
    """The sweep then finds no room in that pool instead of ending."""
    with pytest.raises(ProblemError, match="0 points of a curve"):
        _load({"name": "a", "iteration_s": 1.0, "persistent_bytes": 0, "curve": []})
