"""The figures by which policies are compared: windows, the end of a simulation, fairness, memory over time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from cpu.support.scheduler_cases import Eager, _records

from zico.base.errors import ConfigError
from zico.lab.simulator.compare import (
    Horizon,
    Pool,
    check_guarantees,
    horizon_of,
    memory,
    possible,
    round_ns_of,
    simulate,
)
from zico.lab.simulator.device_models import device_model_named
from zico.lab.simulator.jobs_file import read_jobs
from zico.lab.simulator.oracle import Possible
from zico.scheduler.curves import in_regions
from zico.scheduler.layout import DECISION, SNAPSHOT
from zico.scheduler.policies import policy_named

if TYPE_CHECKING:
    from zico.scheduler.simulate import Load

SECOND = 1_000_000_000
HALF = {"name": "a", "iteration_s": 1, "persistent_bytes": 2, "curve": [[0, 10], [0.5, 2]]}
"""It holds 10 in the first half of its second, and what it keeps in the second one."""


def loads(*changes: dict[str, object]) -> tuple[Load, ...]:
    """Return jobs that hold 10 for half of each second, with these changes."""
    jobs = [HALF | {"name": name} | change for name, change in zip("abcdefgh", changes, strict=False)]
    return in_regions(read_jobs(json.dumps({"jobs": jobs}), "the jobs", Path()), 1, whole=True)


def pool(budget: int, device: str = "host") -> Pool:
    """Return a budget in bytes on a device."""
    return Pool(budget, device_model_named(device), 1)


def test_two_jobs_that_fit_into_each_other() -> None:
    """Claims let the halves alternate at full speed within 12 of 20; one after the other each gets half."""
    pair = loads({}, {})
    both = simulate(policy_named("claims"), pair, pool(12), horizon_of(pair))
    assert [job.normalised for job in both.jobs] == pytest.approx([1, 1], abs=0.02)
    assert [job.iterations_per_s for job in both.jobs] == pytest.approx([1, 1], abs=0.02)
    assert (both.peak, both.deadlocks) == (12, 0)
    one = simulate(policy_named("serial"), pair, pool(12), horizon_of(pair))
    assert [job.normalised for job in one.jobs] == pytest.approx([0.5, 0.5], abs=0.02)
    assert [job.waited_s for job in one.jobs] == pytest.approx([50, 50], abs=1.5)
    assert {job.reason for job in one.jobs} == {
        "its turn comes after b's iteration",
        "its turn comes after a's iteration",
    }


def test_jobs_that_leave_are_counted_while_they_are_there() -> None:
    """One after the other, of 10 and 20 iterations: the first leaves after 19 of 30 seconds."""
    pair = loads({"iterations": 10, "arrive_s": 1}, {"iterations": 20, "arrive_s": 1})
    horizon = horizon_of(pair)
    assert horizon.warm_up_ns == 0
    found = simulate(policy_named("serial"), pair, pool(20), horizon)
    assert [job.iterations for job in found.jobs] == [10, 20]
    assert (found.jobs[0].left_s, found.jobs[1].left_s, found.seconds) == (20, 31, 31)
    assert [job.normalised for job in found.jobs] == pytest.approx([10 / 19, 20 / 30])
    assert [job.waited_s for job in found.jobs] == pytest.approx([9, 10])


def test_a_job_is_counted_from_its_arrival() -> None:
    """One that comes after the warm-up and has the device to itself is as fast as alone, whatever the time before."""
    pair = loads({"iterations": 4}, {"arrive_s": 50})
    found = simulate(policy_named("zico"), pair, pool(10), Horizon(100 * SECOND, SECOND))
    assert [job.normalised for job in found.jobs] == pytest.approx([1, 1])
    assert (found.jobs[0].left_s, found.jobs[1].left_s) == (4, None)


def test_jain_is_one_for_equals_and_a_share_for_a_favourite() -> None:
    """Equal throughputs give 1, one job of four that has all gives a quarter, nobody having any gives 0."""
    one = simulate(policy_named("none"), loads({}), pool(10), Horizon(20 * SECOND, 0))

    def with_shares(*shares: float) -> float:
        jobs = tuple(msgspec.structs.replace(one.jobs[0], normalised=share) for share in shares)
        return dataclasses.replace(one, jobs=jobs).jain

    assert with_shares(0.3, 0.3, 0.3) == pytest.approx(1)
    assert with_shares(1, 0, 0, 0) == pytest.approx(0.25)
    assert with_shares(0.5, 1.0) == pytest.approx(0.9)
    assert with_shares(0, 0) == 0


def test_the_same_seed_gives_the_same_result() -> None:
    """All but the cost of a decision is the same again, and another seed's jitter is another's."""
    pair = loads({"jitter": 0.2}, {"jitter": 0.2})

    def found(seed: int) -> object:
        return dataclasses.replace(
            simulate(policy_named("claims"), pair, pool(12), horizon_of(pair), seed=seed), decision_us=0
        )

    assert found(1) == found(1)
    assert found(1) != found(2)


def test_decisions_cost_something() -> None:
    """A policy that decided has a cost, in microseconds, of less than a hundredth of a second."""
    pair = loads({}, {})
    assert 0 < simulate(policy_named("claims"), pair, pool(12), horizon_of(pair)).decision_us < 10_000


def test_the_horizon_is_the_jobs_or_what_is_asked() -> None:
    """By the longest job, all of the work, or seconds, of which the warm-up takes an eleventh at most."""
    assert horizon_of(loads({}, {"iteration_s": 2})) == Horizon(220 * SECOND, 20 * SECOND)
    assert horizon_of(loads({}, {"arrive_s": 7})) == Horizon(117 * SECOND, 10 * SECOND)
    assert horizon_of(loads({}, {}, {}, {})) == Horizon(220 * SECOND, 20 * SECOND)
    assert horizon_of(loads({}, {}), seconds=5.5) == Horizon(5 * SECOND + SECOND // 2, SECOND // 2)
    assert horizon_of(loads({"iterations": 3}), seconds=500.0) == Horizon(500 * SECOND, 10 * SECOND)
    with pytest.raises(ConfigError, match="job 'b' arrives at 7 s, but the simulation ends at 7 s: raise --seconds"):
        horizon_of(loads({}, {"arrive_s": 7}), seconds=7.0)


class Never(Eager):
    """A policy that starts nobody."""

    def _decide(self, snapshot_address: int) -> int:
        super()._decide(snapshot_address)
        snapshot = _records(snapshot_address, SNAPSHOT, 1)[0]
        _records(int(snapshot["decisions_address"]), DECISION, int(snapshot["n"]))["starts"] = 0
        return 0


def test_jobs_that_nobody_starts_do_not_last_for_ever() -> None:
    """After their first iterations, which need no leave, they count as stuck when all work could be done long ago."""
    pair = loads({"iterations": 5}, {"iterations": 5})
    found = simulate(Never(), pair, pool(20), horizon_of(pair))
    assert [(job.iterations, job.left_s) for job in found.jobs] == [(1, None), (1, None)]
    assert found.seconds == 40
    assert found.normalised == pytest.approx(1 / found.seconds)
    assert sum(job.waited_s for job in found.jobs) >= 2 * (found.seconds - 3)


def test_guarantees_that_contradict_each_other_are_refused() -> None:
    """Neither memory over time nor the device's speed can be promised twice; what can be kept is not refused."""
    three = loads(*[{"slo": 0.0}] * 3)
    check_guarantees(three, 18, 1, (1.0,))
    with pytest.raises(
        ConfigError, match=r"'a', 'b', 'c' cannot all hold: they would keep 18 B on the average, more than"
    ):
        check_guarantees(three, 17, 1, (1.0,))
    with pytest.raises(
        ConfigError, match=r"'a', 'b', 'c' add up to 3.00 of the device, which does at most 1.50 for jobs"
    ):
        check_guarantees(three, 18, 1, (1.0, 1.0, 1.4, 2.0))
    check_guarantees(loads(*[{"slo": 0.0, "iterations": 9}] * 3), 10, 1, (1.0,))


def test_memory_over_time_is_what_the_curve_says() -> None:
    """A job alone holds its curve in each iteration; two come to the budget and never exceed it."""
    held = memory(policy_named("none"), loads({}), pool(10), (2 * SECOND, 39 * SECOND // 10))
    assert held.t_s.tolist() == [2, 2.5, 3, 3.5, 3.9]
    assert held.regions.tolist() == [[10, 2, 10, 2, 2]]
    pair = memory(policy_named("claims"), loads({}, {}), pool(12), (10 * SECOND, 20 * SECOND))
    together = pair.regions.sum(axis=0)
    assert together.max() == 12
    assert (np.diff(pair.t_s) >= 0).all()
    assert (pair.t_s[0], pair.t_s[-1]) == (10, 20)


def test_the_oracle_decides_nothing() -> None:
    """What it says of throughput becomes a result without waits or decisions."""
    best = Possible((1.0, 0.5), 0.75, 11)
    found = possible(best, loads({}, {"iteration_s": 2}), Horizon(10 * SECOND, 0))
    assert [job.iterations_per_s for job in found.jobs] == [1.0, 0.25]
    assert (found.normalised, found.peak, found.decisions) == (0.75, 11, 0)


def test_a_device_that_jobs_share_slows_them() -> None:
    """Of a device of which each uses all, two jobs that run together get half each, though memory lets both run."""
    pair = loads({}, {})
    found = simulate(policy_named("none"), pair, pool(20, "v100-32gb:utilisation=1"), horizon_of(pair))
    assert [job.normalised for job in found.jobs] == pytest.approx([0.5, 0.5], abs=0.02)


def test_a_later_phase_is_another_job() -> None:
    """After its phase an iteration takes twice as long: iterations per second fall, what is normalised does not."""
    (load,) = loads({"phases": [{"after": 10, "iteration_s": 2, "persistent_bytes": 1, "curve": [[0, 30]]}]})
    horizon = horizon_of([load])
    assert horizon == Horizon(230 * SECOND, 20 * SECOND)
    found = simulate(policy_named("claims"), [load], pool(30), horizon)
    assert (found.jobs[0].normalised, found.peak) == (pytest.approx(1, abs=0.02), 30)
    assert found.jobs[0].iterations_per_s == pytest.approx(0.5, abs=0.02)
    left = simulate(
        policy_named("none"), [dataclasses.replace(load, iterations=15)], pool(30), Horizon(SECOND * 99, SECOND * 50)
    )
    assert (left.jobs[0].left_s, left.jobs[0].normalised) == (20, pytest.approx(1))


def test_time_slices_are_simulated_for_some_rounds() -> None:
    """A policy that gives each job ten seconds is counted over ten rounds after the first; others need none."""
    pair = loads({}, {})
    nvshare = policy_named("nvshare:quantum=10s")
    assert (round_ns_of(nvshare, 2), round_ns_of(policy_named("shift"), 2)) == (20 * SECOND, 0)
    horizon = horizon_of(pair, round_ns=20 * SECOND)
    assert horizon == Horizon(220 * SECOND, 20 * SECOND)
    found = simulate(nvshare, pair, pool(20), horizon)
    assert [job.normalised for job in found.jobs] == pytest.approx([0.5, 0.5], abs=0.03)
