"""What a job did in an earlier run: whose it is, what is read from disk, and what the pool makes of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.members import Tenant, acquire, give_profile, grab, job_of, joined, make_pool, tenants
from hypothesis import given
from hypothesis import strategies as st

from zico.broker.views import ProfileCache, pool_view
from zico.heap.layout import GRANULE_BYTES
from zico.job import remembered
from zico.job.remembered import key_of
from zico.pool import regions
from zico.pool.layout import NOBODY
from zico.pool.results import MUST_WAIT
from zico.trace import profile
from zico.trace.profile import CURVE, UNPROFILED_SHIFT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNIT = GRANULE_BYTES  # a region, so that every tensor shows in what is held
ROOM = 64
WEIGHTS, LAYERS = 3, 12
COMMAND = ["-u", "/srv/a/train.py", "--batch=32", "--out=/tmp/run-1/loss.json"]


def sound(peak: int = 9, n: int = 4) -> Any:  # noqa: ANN401 - two CURVE records
    """Return two curves that rise to a peak."""
    curves = np.zeros(2, CURVE)
    for curve in curves:
        curve["n_bins"], curve["n_events"], curve["duration_ns"] = n, n, 10 * n
        curve["held"][:n] = np.linspace(1, peak, n)
        curve["t_ns"][:n] = 10 * np.arange(n)
    return curves


# -- which job it is -------------------------------------------------------------------------------


def test_runs_of_a_command_in_other_directories_are_the_same_job() -> None:
    """Neither where the script is nor where it writes says what it does to memory."""
    elsewhere = ["-u", "train.py", "--batch=32", "--out=loss.json"]
    assert key_of(COMMAND, b"script", "torch", 4) == key_of(elsewhere, b"script", "torch", 4) != ""


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((COMMAND, b"script 2", "torch", 4), id="script"),
        pytest.param(([*COMMAND[:2], "--batch=64", COMMAND[3]], b"script", "torch", 4), id="argument"),
        pytest.param((COMMAND, b"script", "torch", 8), id="facts"),
        pytest.param((["-c", "x = 6/2"], b"", "torch", 4), id="code"),
    ],
)
def test_what_differs_is_another_job(other: tuple[Any, ...]) -> None:
    """A changed script, another argument and other sizes have keys of their own."""
    keys = {key_of(COMMAND, b"script", "torch", 4), key_of(*other), key_of(["-c", "x = 8/2"], b"", "torch", 4)}
    assert len(keys) == 3
    assert "" not in keys


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["-m", "ipykernel_launcher", "-f", "k.json"], b"script"),
        (["-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"], b""),
        ([], b""),
    ],
)
def test_a_process_whose_command_says_nothing_remembers_nothing(command: list[str], script: bytes) -> None:
    """Notebooks all have one command, spawned processes one for each start."""
    assert key_of(command, script) == ""


# -- files -----------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Both curves come back, in a folder that is made for them, unless the budget has become too small for them."""
    path = tmp_path / "profiles" / "k"
    assert remembered.read(path, 9) is None
    remembered.write(path, sound(peak=9))
    found = remembered.read(path, 9)
    assert found is not None
    assert found.tobytes() == sound(peak=9).tobytes()
    assert remembered.read(path, 8) is None


@given(st.data())
def test_a_damaged_file_is_none(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever became of a file, what is read from it is nothing or a sound profile."""
    path = tmp_path_factory.mktemp("p") / "k"
    remembered.write(path, sound())
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    found = remembered.read(path, 9)
    assert found is None or all(remembered.is_sound(curve, 9) for curve in found)
    path.write_bytes(b"")
    assert remembered.read(path, 9) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_bins", 0),
        ("n_bins", 257),
        ("shift", -1),
        ("shift", UNPROFILED_SHIFT),
        ("n_events", 0),
        ("n_events", 1 << 40),
        ("duration_ns", 29),
        ("duration_ns", 1 << 61),
        ("tail", 10),
        ("held", -1),
        ("t_ns", -1),
    ],
)
def test_a_record_that_is_no_profile_is_not_sound(field: str, value: int) -> None:
    """Each number of a curve is within what an iteration of that pool can have."""
    (curve, _) = sound()
    assert remembered.is_sound(curve, 9)
    curve[field] = value
    assert not remembered.is_sound(curve, 9)


def test_a_folder_keeps_what_was_written_last(tmp_path: Path) -> None:
    """Of more than ``MOST_FILES`` files those written longest ago go."""
    for number in range(remembered.MOST_FILES + 2):
        (tmp_path / str(number)).touch()
        os.utime(tmp_path / str(number), ns=(number, number))
    remembered.write(tmp_path / "0", sound())
    assert {path.name for path in tmp_path.iterdir()} == {"0", *map(str, range(3, remembered.MOST_FILES + 2))}


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """Nothing is left half-written, and no part beside it."""
    remembered.write(tmp_path / "k", sound())
    before = (tmp_path / "k").read_bytes()
    (tmp_path / f".k.{os.getpid()}").mkdir()
    with pytest.raises(OSError, match="directory"):
        remembered.write(tmp_path / "k", sound(peak=7))
    assert (tmp_path / "k").read_bytes() == before


# -- in the pool -----------------------------------------------------------------------------------


@pytest.fixture
def tenant() -> Iterator[Tenant]:
    """Return a job that is alone in a pool."""
    with tenants(ROOM) as (alone,):
        yield alone


def train(tenant: Tenant, layers: int = LAYERS) -> None:
    """End an iteration that comes to hold so many layers beside the weights."""
    for address in [tenant.allocate(UNIT) for _ in range(layers)]:
        tenant.free(address)
    tenant.mark()


def learned_by(iterations: int, layers: int = LAYERS) -> Any:  # noqa: ANN401 - two CURVE records
    """Return what a job has learned that sets itself up and ends so many iterations."""
    with tenants(ROOM) as (job,):
        held = [job.allocate(UNIT) for _ in range(WEIGHTS)]
        for _ in range(iterations):
            train(job, layers)
        assert len(held) == WEIGHTS
        return job.member.learned


def test_what_a_job_has_learned_is_its_first_iteration_and_its_profile() -> None:
    """The first one contains set-up; the profile is of those after it, and flat until one of these has ended."""
    first, usual = learned_by(4)
    assert first["n_events"] == usual["n_events"] + WEIGHTS
    assert profile.peak(first) == profile.peak(usual) == WEIGHTS + LAYERS
    assert learned_by(1)[1]["shift"] == UNPROFILED_SHIFT


def test_a_job_that_does_the_same_again_is_known_from_its_start(tenant: Tenant) -> None:
    """Its claims fall within its first iteration, and its second one is what others were before."""
    tenant.member.remember(learned_by(4))
    assert (tenant.job["profiled"], tenant.job["remembered"]) == (1, 1)
    for _ in range(WEIGHTS):
        tenant.allocate(UNIT)
    assert regions.claim_of(tenant.job) == WEIGHTS + LAYERS
    held = [tenant.allocate(UNIT) for _ in range(LAYERS)]
    for address in held:
        tenant.free(address)
    assert regions.claim_of(tenant.job) < WEIGHTS + LAYERS
    tenant.mark()
    assert tenant.job["remembered"] == 0
    assert not profile.is_flat(tenant.job["profile"])
    assert tenant.job["profile"]["n_events"] == 2 * LAYERS
    train(tenant)
    assert tenant.job["claim_peak"] == WEIGHTS + LAYERS
    assert tenant.job["atypical"] == 0


@pytest.mark.parametrize("layers", [LAYERS - 4, LAYERS + 4])
def test_a_job_that_does_something_else_begins_as_one_that_remembers_nothing(tenant: Tenant, layers: int) -> None:
    """A first iteration that is shorter or longer than remembered leaves a profile of its peak alone."""
    tenant.member.remember(learned_by(4))
    for _ in range(WEIGHTS):
        tenant.allocate(UNIT)
    train(tenant, layers)
    assert tenant.job["remembered"] == 0
    assert profile.is_flat(tenant.job["profile"])
    assert tenant.job["claim_peak"] == WEIGHTS + layers
    train(tenant, layers)
    assert tenant.job["profile"]["n_events"] == 2 * layers


def test_a_peak_counts_as_the_length_does(tenant: Tenant) -> None:
    """As many events that hold less are another job's."""
    tenant.member.remember(learned_by(4))
    for _ in range(WEIGHTS + LAYERS):
        tenant.free(tenant.allocate(UNIT))
    tenant.mark()
    assert profile.is_flat(tenant.job["profile"])


def test_a_first_iteration_is_followed_and_not_planned_for() -> None:
    """Policies see the first curve while it is in use, and no plan is for it: plans are for usual iterations."""
    with make_pool(30) as pool, joined(pool, 1) as (a,):
        (unknown,) = pool_view(*pool.snapshot(), 0, ProfileCache()).jobs
        assert (unknown.profile, unknown.in_main_phase) == (None, True)
        a.remember(sound(peak=4))
        (known,) = pool_view(*pool.snapshot(), 0, ProfileCache()).jobs
        assert known.profile is not None
        assert (known.profile.peak, known.in_main_phase) == (4, False)


def test_nobody_relies_on_a_job_that_holds_more_than_it_remembers() -> None:
    """Invariant 3: from the first region too many it is like a job of which nothing is known: it grows alone."""
    with make_pool(30) as pool, joined(pool, 2) as (a, b):
        a.remember(sound(peak=4))
        grab(a, 6)
        assert not pool.jobs[job_of(a)]["outgrown"], "threads reorder allocations"
        give_profile(pool.jobs[job_of(b)], [20])
        grab(a, 1)
        assert pool.jobs[job_of(a)]["outgrown"]
        assert pool.header["alone_job"] == job_of(a)
        grab(b, 15)
        assert acquire(a, [NOBODY] * 4)[0] == MUST_WAIT, "b may need all that is left"
        grab(b, 5)


def test_two_that_remember_grow_beside_each_other() -> None:
    """Where first iterations fit by what is remembered nobody waits, as the second of two unknown jobs does."""
    with make_pool(10) as pool, joined(pool, 2) as (a, b):
        grab(a, 1)
        assert acquire(b, [NOBODY])[0] == MUST_WAIT
    with make_pool(10) as pool, joined(pool, 2) as (a, b):
        for member in (a, b):
            member.remember(sound(peak=5))
        for _ in range(5):
            grab(a, 1)
            grab(b, 1)
