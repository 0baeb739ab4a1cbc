"""Jobs from JSON: what is accepted, what comes out, and that everything else is refused in one sentence."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.trace_cases import train
from hypothesis import given
from hypothesis import strategies as st

from zico.base.errors import ConfigError
from zico.base.units import GIB, MIB
from zico.lab.simulator.jobs_file import finest_region, read_jobs
from zico.scheduler.curves import in_regions, profile_of_curve
from zico.scheduler.simulate import peak_of
from zico.trace.files import write_trace

if TYPE_CHECKING:
    from pathlib import Path

    from zico.scheduler.simulate import Load

LEFT_OUT = object()


def job(**changes: object) -> dict[str, Any]:
    """Return a job that is right but for the changes."""
    fields = {"name": "a", "iteration_s": 1, "persistent_bytes": 2, "curve": [[0, 4], [0.5, 10]]} | changes
    return {field: value for field, value in fields.items() if value is not LEFT_OUT}


def read(*jobs: object, folder: Path | None = None, region_bytes: int = 1) -> tuple[Load, ...]:
    """Return the jobs that are written so."""
    from pathlib import Path

    return read_jobs(json.dumps({"jobs": jobs}), "the jobs", folder or Path(), region_bytes)


def levels(load: Load) -> list[tuple[int, int]]:
    """Return when what a job holds changes, in nanoseconds."""
    steps = list(zip(load.profile.t_ns, load.profile.held, strict=True))
    return [steps[0]] + [b for a, b in itertools.pairwise(steps) if a[1] != b[1]]


def test_a_curve_is_held_from_each_point_to_the_next() -> None:
    """Seconds become nanoseconds, sizes bytes, and the last step goes on to the iteration's end."""
    (load,) = read(job(iteration_s=0.4, persistent_bytes="1GiB", curve=[[0, "2GiB"], [0.1, 3 * GIB], [0.3, "1.5GiB"]]))
    assert levels(load) == [(0, 2 * GIB), (100_000_000, 3 * GIB), (300_000_000, 3 * GIB // 2)]
    assert load.profile.duration_ns == 400_000_000
    assert load.persistent == GIB


def test_at_its_end_an_iteration_holds_what_it_keeps() -> None:
    """A curve may come down to nothing at the very end; what is persistent stays all the same."""
    (load,) = read(job(curve=[[0, 0], [0.5, 9], [0.75, 1], [1, 0]]))
    assert load.persistent == 2
    assert load.profile.held[0] == 0
    assert load.profile.held[-1] == 2


def test_what_is_never_given_back_is_persistent_unless_said() -> None:
    """A job that does not say what it keeps keeps the least that its curve ever holds."""
    (load,) = read(job(persistent_bytes=LEFT_OUT, curve=[[0, 4], [0.5, 10], [0.75, 3]]))
    assert load.persistent == 3


def test_what_comes_before_the_first_point_is_persistent() -> None:
    """A curve that begins later than the iteration holds only what is kept until then."""
    (load,) = read(job(curve=[[0.25, 8]]))
    assert levels(load) == [(0, 2), (250_000_000, 8)]


def test_recorded_curves_are_taken_as_they_are() -> None:
    """What happened within a nanosecond keeps its peak, the end's own level is none, and gradients may be missing."""
    (load,) = read(job(curve=[[0, 1], [0.5, 9], [0.5, 3], [1, 8]]))
    assert levels(load) == [(0, 1), (500_000_000, 9), (500_000_001, 3)]
    assert (load.profile.duration_ns, load.persistent) == (1_000_000_000, 2)


def test_all_other_fields_arrive() -> None:
    """Weight, priority, guarantee, jitter, arrival and length of stay are those of the file; copies get numbers."""
    (first, second) = read(job(iterations=7, weight=2.5, priority=-1, slo=0.25, jitter=0.2, arrive_s=1.5, count=2))
    assert (first.name, second.name) == ("a-1", "a-2")
    for load in (first, second):
        assert (load.iterations, load.weight, load.priority) == (7, 2.5, -1)
        assert (load.floor, load.jitter, load.arrive_ns) == (0.8, 0.2, 1_500_000_000)


def test_what_is_left_out_is_nothing_special() -> None:
    """A job with its curve alone stays for ever, weighs 1, is owed nothing, and is called by its place."""
    (load,) = read(job(name=LEFT_OUT))
    assert (load.name, load.iterations, load.weight, load.priority, load.floor) == ("job-1", 0, 1.0, 0, 0.0)
    assert (load.jitter, load.arrive_ns, load.believed) == (0.0, 0, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a trace of a training loop."""
    (tmp_path / "traces").mkdir()
    write_trace(tmp_path / "traces" / "loop.ztrace", train(6))
    return tmp_path


def test_a_trace_is_found_beside_the_file(folder: Path) -> None:
    """Its typical iteration is the job's, in bytes; it gives its name; larger regions never hold less."""
    (load,) = read({"trace": "traces/loop.ztrace"}, folder=folder)
    assert load.name == "loop"
    assert 0 < load.persistent < load.profile.peak
    assert load.persistent == min(load.profile.held)
    (laid,) = read({"trace": "traces/loop.ztrace"}, folder=folder, region_bytes=MIB)
    assert laid.profile.peak % MIB == 0
    assert load.profile.peak <= laid.profile.peak <= 2 * load.profile.peak


WRONG = [
    (job(curve=[[0, 2], [0.5, 9], [0.4, 3]]), "curve goes back in time, from 0.5 s to 0.4 s: give a list of"),
    (job(curve=[[0, 2], [0.5, -10]]), "curve has -10 for bytes: give whole bytes, 0 or more, or a size such as 3GiB"),
    (job(curve=[[0, "lots"]]), 'curve has "lots" for bytes: give whole bytes'),
    (job(curve=[[0, 2.5]]), "curve has 2.5 for bytes: give whole bytes"),
    (job(curve=[[-1, 4]]), "curve begins at -1 s, before the iteration does: give"),
    (job(curve=[[0, 2], [1.5, 9]]), "curve goes on at 1.5 s, but iteration_s is 1: give earlier points or a longer"),
    (job(curve=[]), "curve has no points: give a list of [seconds"),
    (job(curve=[[0, 1, 2]]), "curve is [[0,1,2]]: give a list of [seconds"),
    (job(curve=LEFT_OUT), "has neither a curve nor a trace: give one of them"),
    (job(trace="x.zst"), "has both a curve and a trace: give one of them"),
    (job(trace="x.zst", curve=LEFT_OUT), "has a trace and iteration_s, which the trace tells: leave iteration_s out"),
    (job(iteration_s=0), "iteration_s is 0: give seconds, at least a millionth and at most a million"),
    (job(iteration_s=LEFT_OUT), "iteration_s is missing beside the curve: give seconds"),
    (job(persistent_bytes=-5), "persistent_bytes has -5 for bytes: give whole bytes"),
    (job(weight=0), "weight is 0: give a number above 0"),
    (job(weight=-1), "weight is -1: give a number above 0"),
    (job(weight="x"), 'weight is "x": give a number above 0'),
    (job(iterations=0), "iterations is 0: give a whole number above 0, or leave it out for a job that stays"),
    (job(priority=1.5), "priority is 1.5: give a whole number"),
    (job(slo=-0.1), "slo is -0.1: give by what share the job may be slower than alone"),
    (job(jitter=1), "jitter is 1: give by what share an iteration may be longer or shorter, from 0 to below 1"),
    (job(arrive_s=-1), "arrive_s is -1: give seconds, 0 or more"),
    (job(count=0), "count is 0: give a whole number from 1 to 10000"),
    (job(phases=5), "phases is 5: give a list of later iterations"),
    (job(wieght=2), "'wieght' is not a field: iteration_s, persistent_bytes, curve, trace, name"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_a_job_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    """The one sentence names the place, the job, the field, its value, and what to give."""
    with pytest.raises(ConfigError) as caught:
        read(wrong)
    assert str(caught.value).startswith(f"the jobs: job 'a': {message}")
    assert "\n" not in str(caught.value)


LATER = {"after": 10, "iteration_s": 2, "persistent_bytes": "1KiB", "curve": [[0, "4KiB"]]}


def test_later_phases_are_read_as_jobs_are() -> None:
    """Each has its own curve and what it keeps from one of the iterations on; their peaks count."""
    (load,) = read(job(phases=[LATER, LATER | {"after": 20, "curve": [[0, 9999]]}]))
    assert [(phase.after, phase.profile.peak, phase.persistent) for phase in load.phases] == [
        (10, 4096, 1024),
        (20, 9999, 1024),
    ]
    assert peak_of(load) == 9999
    (counted,) = in_regions([load], 1024, whole=True)
    assert [(phase.profile.peak, phase.persistent) for phase in counted.phases] == [(4, 1), (10, 1)]


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([5], "phase 1 is 5: give an object with fields"),
        ([{}], "phase 1: after is missing: give a whole number of iterations, above 0 and rising"),
        ([LATER | {"after": 0}], "phase 1: after is 0: give a whole number of iterations, above 0 and rising"),
        ([LATER, LATER], "phase 2: after is 10: give a whole number of iterations, above 0 and rising"),
        ([LATER | {"curve": [[0, -1]]}], "phase 1: curve has -1 for bytes: give whole bytes"),
        (
            [LATER | {"count": 2}],
            "phase 1: 'count' is not a field: iteration_s, persistent_bytes, curve, trace, after are",
        ),
    ],
)
def test_a_phase_that_cannot_be_is_refused(phases: list[object], message: str) -> None:
    """The sentence names the phase, too."""
    with pytest.raises(ConfigError) as caught:
        read(job(phases=phases))
    assert str(caught.value).startswith(f"the jobs: job 'a', {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON (Input data was truncated): give a list with at least one job"),
        ('{"jobs": [', "is not JSON (Input data was truncated): give a list"),
        ('{"jobs": [{"weight": NaN}]}', "is not JSON (JSON is malformed: invalid character (byte 21)): give a list"),
        ('{"jobs": [{"weight": 1e999}]}', "is not JSON (Number out of range"),
        ("[]", "has no jobs: give a list with at least one job"),
        ('{"jobs": []}', "has no jobs: give a list with at least one job"),
        ('{"jobs": 5}', "has no jobs: give a list with at least one job"),
        ('{"jobs": [5]}', "job 1 is 5: give an object with fields"),
        ('{"jobs": [{}], "seed": 1}', "'seed' is not a field of it: give a list"),
        (json.dumps({"jobs": [job(), job()]}), "two jobs are named 'a': give each its own name, or one job a count"),
        (json.dumps({"jobs": [job(count=9999), job(count=9999)]}), "describes more than 10000 jobs: give fewer"),
    ],
)
def test_what_is_no_list_of_jobs_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """The one sentence names the place, what is wrong there, and what to give."""
    with pytest.raises(ConfigError) as caught:
        read_jobs(text, "jobs.json", tmp_path)
    assert str(caught.value).startswith(f"jobs.json: {message}")


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The sentence names the job and the whole path."""
    with pytest.raises(ConfigError, match=r"job 'a': trace .*nowhere\.zst: .*No such file"):
        read({"name": "a", "trace": "nowhere.zst"}, folder=tmp_path)


CURVES = st.lists(st.integers(0, 1000), min_size=1, max_size=600).flatmap(
    lambda held: st.tuples(
        st.just(held),
        st.sets(st.integers(1, 1_000_000), min_size=len(held) - 1, max_size=len(held) - 1).map(sorted),
        st.integers(1, 50_000),
    )
)


@given(CURVES)
def test_a_profile_of_a_curve_is_nowhere_lower(curve: tuple[list[int], list[int], int]) -> None:
    """Its bins rise in time and cover the curve; a curve of no more steps than a profile has bins is met exactly."""
    held, later, rest = curve
    t_ns = [0, *later]
    profile = profile_of_curve(t_ns, held, t_ns[-1] + rest)
    assert len(profile.t_ns) == len(profile.held) <= 256
    assert profile.n_events == len(profile.held) << profile.shift
    assert (np.diff([*profile.t_ns, profile.duration_ns]) > 0).all()
    at = np.union1d(t_ns, profile.t_ns)
    of_curve = np.array(held)[np.searchsorted(t_ns, at, side="right") - 1]
    of_profile = np.array(profile.held)[np.searchsorted(profile.t_ns, at, side="right") - 1]
    assert (of_profile >= of_curve).all()
    assert profile.peak == max(held)
    if len(held) <= 256:
        assert (of_profile == of_curve).all()


@given(st.lists(st.integers(1, 1 << 50), min_size=1, max_size=8), st.integers(1, 1 << 53))
def test_what_fits_in_bytes_fits_in_units(peaks: list[int], budget: int) -> None:
    """Peaks that are within a budget in bytes are so in the finest units, of which all together are under 2**30."""
    jobs = [job(name=str(i), persistent_bytes=0, curve=[[0, peak]]) for i, peak in enumerate(peaks)]
    loads = read(*jobs)
    unit = finest_region(loads)
    counted = in_regions(loads, unit, whole=False)
    assert sum(load.profile.peak for load in counted) < 1 << 30
    if sum(peaks) <= budget:
        assert sum(load.profile.peak for load in counted) <= budget // unit
    whole = in_regions(loads, 64, whole=True)
    assert [load.profile.peak for load in whole] == [-(-peak // 64) for peak in peaks]


def test_copies_share_their_profile() -> None:
    """A thousand copies of a job are one curve in memory."""
    loads = in_regions(read(job(count=1000)), 2, whole=True)
    assert len({id(load.profile) for load in loads}) == 1
