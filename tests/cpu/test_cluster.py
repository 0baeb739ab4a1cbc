"""The simulation of a cluster: what holds of every run, and what one device may never be said to gain."""

from __future__ import annotations

import heapq
import itertools
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.scheduler_model import plateau, triangle
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import ConfigError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from clusters.events import FAILURE_S, Cluster, Run  # noqa: E402
from clusters.kinds import Kind, regions_of  # noqa: E402
from clusters.policies import ESTIMATES, MOST_JOBS, Carma, policies  # noqa: E402
from clusters.speeds import MEASURED_PAIR, Memory, Table, together  # noqa: E402
from clusters.text import ratio, text_of  # noqa: E402
from clusters.workload import generated, like_carma, read_openb, scaled  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cpu.support.scheduler_model import Work

SECONDS = st.integers(0, 50)


def kind(work: Work, idle: float = 0.0) -> Kind:
    """Return a kind of jobs that holds memory as a modelled job does."""
    load = work.load("A")
    return Kind("", load.profile, load.persistent, idle, 1.0)


KINDS = (
    kind(triangle(150), 0.5),
    kind(triangle(400), 0.1),
    kind(plateau(300, rise=0.1, fall=0.1, kept=20)),
    kind(triangle(600)),
)
"""Of 640 regions: some fit together, some take turns, the last fits with the first alone by turns."""
TABLES = {assumption: Table(Memory(KINDS), assumption) for assumption in ("slices", "idle-50")}


class Jobs:
    """Jobs in the order of their arrival."""

    def __init__(self, jobs: list[tuple[int, int, int, float]]) -> None:
        """Take for each job: seconds after the one before, seconds of work, kind, estimate."""
        self.arrive_s = np.cumsum([float(gap) for gap, *_ in jobs])
        self.work_s = np.array([float(work) for _, work, *_ in jobs])
        self.kind = np.array([kind for *_, kind, _ in jobs])
        self.estimate = np.array([estimate for *_, estimate in jobs])

    def run(self, policy: str, devices: int, assumption: str = "slices") -> Run:
        """Run them."""
        chosen = policies(TABLES[assumption])[policy]
        return Cluster(
            chosen,
            devices,
            arrive_s=self.arrive_s,
            work_s=self.work_s,
            kind=self.kind,
            estimate=self.estimate,
        ).run()


JOBS = st.lists(
    st.tuples(SECONDS, st.integers(1, 100), st.integers(0, len(KINDS) - 1), st.sampled_from(ESTIMATES)),
    min_size=1,
    max_size=25,
).map(Jobs)


def pieces(jobs: Jobs, run: Run, device: int) -> Iterator[tuple[float, list[int]]]:
    """Yield the lengths of the pieces of a device's time, each with the jobs that it then has."""
    mine = np.flatnonzero(run.device == device)
    times_s = np.unique(np.concatenate([run.start_s[mine], run.end_s[mine]]))
    for begin_s, end_s in itertools.pairwise(times_s):
        middle_s = (begin_s + end_s) / 2
        there = [int(job) for job in mine if run.start_s[job] < middle_s < run.end_s[job]]
        yield end_s - begin_s, sorted(there, key=lambda job: (jobs.kind[job], job))


# -- of every run ----------------------------------------------------------------------------------


@given(JOBS, st.integers(1, 4))
def test_exclusive_devices_are_a_queue_with_many_servers(jobs: Jobs, devices: int) -> None:
    """Each job starts when it has come and the earliest device is free: ten lines say the same."""
    free_s = [0.0] * devices
    ends_s = []
    for arrive_s, work_s in zip(jobs.arrive_s, jobs.work_s, strict=True):
        begin_s = max(arrive_s, heapq.heappop(free_s))
        ends_s.append(begin_s + work_s)
        heapq.heappush(free_s, begin_s + work_s)
    assert jobs.run("exclusive", devices).end_s == pytest.approx(ends_s)


@settings(max_examples=60, deadline=None)
@given(
    JOBS, st.integers(1, 3), st.sampled_from(["packing", "carma", "zico", "zico-gain"]), st.sampled_from(list(TABLES))
)
def test_what_holds_of_every_policy(jobs: Jobs, devices: int, policy: str, assumption: str) -> None:
    """Jobs run once, after they came; no device is over its memory; speeds over time are the work.

    Memory and work are added up anew from when and where jobs ran.
    """
    run = jobs.run(policy, devices, assumption)
    assert (run.start_s >= jobs.arrive_s).all()
    assert (run.end_s - run.start_s >= jobs.work_s * (1 - 1e-9)).all()
    assert ((run.device >= 0) & (run.device < devices)).all()
    usual = run.failures == 0
    assert (np.diff(run.start_s[usual]) >= 0).all(), "somebody has overtaken"
    table = TABLES[assumption]
    done_s = np.zeros(len(jobs.work_s))
    busy_s = 0.0
    for device in range(devices):
        for length_s, there in pieces(jobs, run, device):
            members = tuple(int(jobs.kind[job]) for job in there)
            assert len(there) <= MOST_JOBS
            speeds = policies(table)[policy].speeds(members)
            assert speeds is not None
            if there:
                peaks = sum(KINDS[member].profile.peak for member in members)
                kept = sum(KINDS[member].keeps for member in members)
                least = kept + max(KINDS[member].profile.peak - KINDS[member].keeps for member in members)
                assert (least if policy.startswith("zico") else peaks) <= regions_of(len(members))
                busy_s += length_s
            done_s[there] += length_s * np.array(speeds)
    assert done_s.sum() == pytest.approx(jobs.work_s.sum())
    assert run.device_s == pytest.approx(busy_s)


def test_jobs_of_other_kinds_each_do_their_own_work() -> None:
    """Where one job of each kind shares a device, each one's speed over its time is its work."""
    jobs = Jobs([(0, 40, 0, 1.0), (1, 30, 1, 1.0), (1, 50, 2, 1.0)])
    run = jobs.run("zico", 1)
    done_s = np.zeros(3)
    for length_s, there in pieces(jobs, run, 0):
        speeds = TABLES["slices"].of(tuple(int(jobs.kind[job]) for job in there))
        assert speeds is not None
        done_s[there] += length_s * np.array(speeds)
    assert done_s == pytest.approx(jobs.work_s)


@pytest.mark.parametrize(("peak", "failures"), [(300, 0), (330, 1)])
def test_a_job_that_runs_out_of_memory_comes_back_to_a_device_of_its_own(peak: int, failures: int) -> None:
    """CARMA adds a job whose estimate is too low: of 640 regions, two jobs of 300 find room, two of 330 do not."""
    carma = Carma(Table(Memory((kind(triangle(peak), 0.9),)), "slices"))
    jobs = Jobs([(0, 100, 0, 1.0), (10, 50, 0, 0.85), (110, 20, 0, 0.85)])
    found = Cluster(
        *(carma, 1), arrive_s=jobs.arrive_s, work_s=jobs.work_s, kind=jobs.kind, estimate=jobs.estimate
    ).run()
    assert found.failures.tolist() == [0, failures, 0]
    if failures:
        assert 10 + FAILURE_S < 100
        assert found.start_s.tolist() == [0, 100, 150], "nobody joins who has failed"


def test_a_job_that_fits_no_device_is_an_error() -> None:
    """The message names the job and its kind."""
    packing = policies(Table(Memory((kind(triangle(700)),)), "slices"))["packing"]
    jobs = Jobs([(0, 1, 0, 1.0)])
    with pytest.raises(ValueError, match="job 0 of kind 0 fits no device"):
        Cluster(packing, 1, arrive_s=jobs.arrive_s, work_s=jobs.work_s, kind=jobs.kind).run()


# -- one device ------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 0.95), min_size=1, max_size=4))
def test_time_slices_give_no_more_than_the_time_that_is_idle(idle: list[float]) -> None:
    """Jobs that never idle do what one does; others at most fill the device; a measured pair does less."""
    assert together([0.0] * len(idle), "slices") == 1
    mean = sum(idle) / len(idle)
    assert 1 <= together(idle, "slices") <= min(len(idle), 1 / (1 - mean)) * (1 + 1e-9)
    assert together([0.3, 0.5], "slices") == pytest.approx(1.4)
    assert together([0.3, 0.5], "measured") == pytest.approx(1.4 * MEASURED_PAIR)
    assert together([0.0, 0.0], "idle-25") == 1.25


def test_what_others_keep_between_iterations_counts() -> None:
    """A job of 60 regions that keeps 10 needs 80 beside one that keeps 20 and takes 30 more for a while: no fewer."""
    kinds = (kind(plateau(60, rise=0.1, fall=0.1, kept=10)), kind(plateau(50, rise=0.1, fall=0.1, kept=20)))
    for regions, runs in ((80, True), (79, False)):
        memory = Memory(kinds, regions=lambda _, regions=regions: regions)  # type: ignore[misc]
        assert memory.can_run((0, 1)) is runs
        assert (memory.speeds((0, 1), "slices") is not None) is runs


def test_the_simulator_says_no_gain_where_time_slices_give_none() -> None:
    """Jobs whose peaks do not fit, and that never idle, do one job's work together; idle ones do more."""
    memory = Memory((kind(triangle(400)), kind(plateau(300, rise=0.1, fall=0.1, kept=20))))
    assert not memory.peaks_fit((0, 1))
    for assumption, least, most in (("slices", 0.97, 1.01), ("idle-50", 1.2, 1.5)):
        speeds = memory.speeds((0, 1), assumption)
        assert speeds is not None
        assert least <= sum(speeds) <= most


# -- arrivals --------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 1000), st.floats(0.1, 3))
def test_scaled_arrivals_ask_for_the_load(copies: int, devices: int, load: float) -> None:
    """As many jobs as copies have, in order, whose work is that share of what the devices can do."""
    original = generated(50, 1)
    found = scaled(original, devices, load, copies, 2)
    assert len(found.arrive_s) == 50 * copies
    assert (np.diff(found.arrive_s) >= 0).all()
    span_s = (original.arrive_s[-1] - original.arrive_s[0]) * original.load * copies / (load * devices)
    assert found.work_s.sum() / span_s == pytest.approx(load * devices)
    assert found.arrive_s[-1] == pytest.approx(span_s), "the copy that is not moved ends where it ended"


def test_a_trace_is_cut_to_jobs_of_one_device(tmp_path: Path) -> None:
    """Pods without a GPU, with several, never scheduled, too short, too long or too early are left out."""
    day = 86_400
    rows = [
        ("a", 1, 40 * day, 40 * day + 10, 40 * day + 1010),
        ("none", 0, 40 * day, 40 * day, 40 * day + 1000),
        ("two", 2, 40 * day, 40 * day, 40 * day + 1000),
        ("pending", 1, 40 * day, "", 40 * day + 1000),
        ("short", 1, 40 * day, 40 * day, 40 * day + 59),
        ("long", 1, 40 * day, 40 * day, 42 * day),
        ("early", 1, 0, 0, 1000),
        ("b", 1, 39 * day, 39 * day, 39 * day + 60),
    ]
    path = tmp_path / "trace.csv"
    header = "name,num_gpu,creation_time,scheduled_time,deletion_time"
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]))
    found = read_openb(path)
    assert found.arrive_s.tolist() == [39 * day, 40 * day]
    assert found.work_s.tolist() == [60, 1000]
    assert "2 of 6 pods" in found.source
    path.write_text("name\nx\n")
    with pytest.raises(ConfigError, match="has no columns"):
        read_openb(path)


def test_jobs_like_carmas_have_its_lengths() -> None:
    """Sixty jobs within the span, each of a printed length."""
    found = like_carma(60, 13_767.0, 3)
    assert len(found.arrive_s) == 60
    assert found.arrive_s.max() <= 13_767.0
    assert 60 * 3.4 <= found.work_s.min() <= found.work_s.max() <= 60 * 112.1


# -- what is published -----------------------------------------------------------------------------


def test_the_page_says_what_the_result_says() -> None:
    """The committed table is what the result gives, and the page's first table has its figures."""
    result = json.loads((ROOT / "benchmarks" / "results" / "cluster.json").read_text())
    assert text_of(result) in (ROOT / "benchmarks" / "results" / "cluster.md").read_text()
    columns = (("mixed", "packing"), ("mixed", "carma"), ("mixed", "zico"), ("large", "packing"), ("large", "zico"))
    rows = {
        (row["mix"], row["policy"], row["assumption"]): row
        for row in result["rows"]
        if (row["devices"], row["load"]) == (100, 2.0)
    }
    page = (ROOT / "docs" / "cluster.md").read_text()
    said = re.findall(r"^\| `([\w-]+)` \| ((?:\d\.\d\d / \d\.\d\d(?: \| )?){5})", page, re.MULTILINE)
    assert [assumption for assumption, _ in said] == ["measured", "slices", "idle-25", "idle-50", "idle-75"]
    for assumption, cells in said:
        for (mix, policy), cell in zip(columns, cells.split(" | "), strict=False):
            row = rows[mix, policy, assumption]
            found = [ratio(result["rows"], row, field) for field in ("makespan_s", "mean_completion_s")]
            assert cell.strip(" |") == f"{found[0]:.2f} / {found[1]:.2f}"
