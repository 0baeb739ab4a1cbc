"""PyTorch in a pool: what a script sees of it, and what happens when jobs fail, grow or lose their broker."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import pytest
from support.harness import FRAMEWORK, MIB, Pool, pool
from support.scripts import Script, alone, checks_in, job, place_of, run_checks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHECKS = FRAMEWORK / "torch_checks.py"
OTHER_DOOR = FRAMEWORK / "torch_other_door.py"
WITHOUT_OPTIMIZER = FRAMEWORK / "torch_without_optimizer.py"
JOB = FRAMEWORK / "torch_job.py"
BEGINNING = FRAMEWORK / "torch_beginning.py"
OF_PROFILER = re.compile(r"^USDT:|^ERROR:.* gpuGetDeviceCount failed")
"""Lines of PyTorch's profiler; its build for CUDA misses a GPU."""
SWITCH_AT = 4
GROWING = ("--iterations", 10, "--switch-at", SWITCH_AT, "--switch-mib", 2)


@pytest.fixture(scope="module")
def roomy() -> Iterator[Pool]:
    """Give a pool in which nobody has to wait."""
    with pool(regions=128, region_bytes=MIB) as made:
        yield made


@functools.cache
def checked(made: Pool, script: Path) -> dict[str, Any]:
    """Run a script of checks as a job of the pool, once; one of them imports PyTorch itself."""
    return run_checks(script, functools.partial(job, made, script.stem, fresh=script != WITHOUT_OPTIMIZER))


def losses(process: Script) -> list[str]:
    """Return the bits of the losses of a job that ends well."""
    done = process.finish()
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("loss")]


@functools.cache
def losses_alone(*arguments: object) -> list[str]:
    """Return the bits of the losses without Zico."""
    with alone(JOB, *arguments) as process:
        return losses(process)


# -- a script in a pool ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", checks_in(CHECKS))
def test_in_a_job(roomy: Pool, name: str) -> None:
    """What the check's docstring says is true of PyTorch in a job."""
    found = checked(roomy, CHECKS)
    assert found[name] == "ok", found[name]


@pytest.mark.parametrize("name", checks_in(CHECKS))
def test_in_a_job_whose_build_imports_no_c_allocator(roomy: Pool, name: str) -> None:
    """The same is true where PyTorch gets another allocator (``zico.adapters.torch_cpu``)."""
    found = checked(roomy, OTHER_DOOR)
    assert found[name] == "ok", found[name]


@pytest.mark.parametrize("name", checks_in(WITHOUT_OPTIMIZER))
def test_a_loop_without_an_optimizer_has_iterations(roomy: Pool, name: str) -> None:
    """What the check's docstring says is true of loops without ``torch.optim``."""
    found = checked(roomy, WITHOUT_OPTIMIZER)[name]
    assert found == "ok", found


@pytest.mark.parametrize("script", [CHECKS, OTHER_DOOR, WITHOUT_OPTIMIZER])
def test_the_end_is_clean(roomy: Pool, script: Path) -> None:
    """A process that ends with live tensors ends with 0 and says nothing."""
    end = checked(roomy, script)["exit"]
    own = [line for line in end["stderr"].splitlines() if not OF_PROFILER.search(line)]
    assert (end["code"], own) == (0, [])


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regions", "limit_bytes", "said"),
    [
        (16, 0, "the whole budget is 16 MiB: raise --budget to at least"),
        (64, 16 * MIB, "its limit is 16 MiB: raise --limit to at least"),
    ],
)
def test_a_job_that_does_not_fit_and_may_not_save_ends_with_its_need_and_the_other_goes_on(
    regions: int, limit_bytes: int, said: str
) -> None:
    """PyTorch raises its own error; stderr names need, budget or limit, and remedy; the neighbour's losses stay."""
    with (
        pool(regions=regions, region_bytes=MIB) as made,
        job(made, "other", JOB, "--mib", 0.5) as other,
        job(made, "large", JOB, "--mib", 3, save="none", limit_bytes=limit_bytes) as large,
    ):
        done = large.finish()
        assert done.returncode == 1
        assert "DefaultCPUAllocator: can't allocate memory" in done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("zico: out of memory: needs ")
        assert said in last
        assert losses(other) == losses_alone("--mib", 0.5)
        report = {entry.name: entry for entry in made.client.report().jobs}
        assert report["large"].oom is not None
        assert report["large"].oom.request_bytes + report["large"].oom.held_bytes > 16 * MIB
        assert report["large"].spilled_bytes == 0
        assert report["other"].oom is None


BEGINS = re.compile(
    r"zico: large needs \d+ MiB and the budget is 16 MiB: "
    r"from now on it saves memory by swapping, as with --save auto; "
    r"with --save none it ends out of memory"
)


def test_a_job_that_does_not_fit_begins_to_save() -> None:
    """Without any option a job whose peak exceeds the budget trains to its end, with the bits of alone.

    One line says how. Its neighbour fits, and says and moves nothing.
    """
    with (
        pool(regions=64, region_bytes=MIB // 4) as made,
        job(made, "other", JOB, "--mib", 0.25) as other,
        job(made, "large", JOB, "--mib", 2, "--iterations", 40) as large,
    ):
        done = large.finish()
        assert done.returncode == 0, done.stderr
        assert BEGINS.fullmatch(done.stderr.strip()), done.stderr
        assert [line.split()[1] for line in done.stdout.splitlines()] == losses_alone("--mib", 2, "--iterations", 40)
        quiet = other.finish()
        assert (quiet.returncode, quiet.stderr) == (0, "")
        report = {entry.name: entry for entry in made.client.report().jobs}
        assert report["large"].oom is None
        assert report["large"].peak_bytes <= 16 * MIB
        assert report["large"].saving.how == "swap"
        assert report["large"].saving.in_bytes > 0
        assert (report["other"].saving.how, report["other"].saving.out_bytes) == ("none", 0)


def test_hooks_of_the_user_stay_the_users_when_a_job_begins_to_save() -> None:
    """A job that runs out of memory inside such hooks, or where there may be none, saves from the next boundary on."""
    with pool(regions=64, region_bytes=MIB // 4) as made, job(made, "large", BEGINNING) as process:
        done = process.finish()
        assert done.returncode == 0, done.stderr
        assert done.stdout == "ok\n"
        assert len(done.stderr.splitlines()) == 1


def test_a_job_that_fails_half_way_gives_everything_back() -> None:
    """An exception in mid-iteration ends that job as ever, and the other has the whole budget to itself."""
    with (
        pool(regions=20, region_bytes=MIB) as made,
        job(made, "failing", JOB, "--fail-at", 3) as failing,
        job(made, "other", JOB) as other,
    ):
        done = failing.finish()
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == "ValueError: half-way"
        assert losses(other) == losses_alone()
        made.settled(lambda look: look.granted == 0, "everything is free")


def test_a_job_that_never_iterates_does_not_block_one_that_trains() -> None:
    """A process that only holds a tensor lets the other train in the rest, and its tensor stays as it is."""
    with pool(regions=20, region_bytes=MIB) as made, job(made, "idle", JOB, "--iterations", 0, "--idle") as idle:
        assert idle.line() == "idle"
        with job(made, "trains", JOB) as trains:
            assert losses(trains) == losses_alone()
        done = idle.finish()
        assert (done.returncode, done.stdout) == (0, f"{float(MIB // 4)}\n")


def test_two_jobs_that_double_their_batch_in_a_tight_budget_have_the_same_losses() -> None:
    """Invariant 8: profiles become wrong in mid-run, both want more than there is, and no number changes."""
    with (
        pool(regions=34, region_bytes=MIB) as made,
        job(made, "a", JOB, *GROWING) as a,
        job(made, "b", JOB, *GROWING) as b,
    ):
        assert losses(a) == losses(b) == losses_alone(*GROWING)
        report = made.client.report()
        assert report.pool.peak_granted_bytes <= 34 * MIB < sum(entry.peak_bytes for entry in report.jobs)


def test_jobs_that_grow_into_each_other_evict_and_have_the_same_losses() -> None:
    """Invariants 6 and 8: both stand half-way in the iteration that outgrows their profiles, and neither can end it.

    Twice 12 MiB are known and fit, so neither waits for the other before; half-way each holds 10 of
    the 24 that it needs in truth. Nobody is killed, and no number changes.
    """
    arguments = (*GROWING, "--pause-at", SWITCH_AT)
    with (
        pool(regions=28, region_bytes=MIB) as made,
        job(made, "a", JOB, *arguments) as a,
        job(made, "b", JOB, *arguments) as b,
    ):
        before = [until_half_way(script) for script in (a, b)]
        assert (made.jobs["held"][:2] > 28 - 24).all(), "what is left beside either is less than the other needs"
        for script in (a, b):
            script.tell("go on")
        assert [first + losses(script) for first, script in zip(before, (a, b), strict=True)] == [
            losses_alone(*GROWING)
        ] * 2
        report = made.client.report()
        assert sum(entry.evicted_bytes for entry in report.jobs) > 0
        assert report.pool.stalls > 0
        assert report.pool.peak_granted_bytes <= 28 * MIB


def until_half_way(script: Script) -> list[str]:
    """Return the losses that a job says before it waits half-way."""
    found = []
    while (line := script.line()) != "half-way":
        found.append(line.split()[1])
    return found


def test_without_their_broker_jobs_end_with_the_same_losses() -> None:
    """The broker is killed while both train in three quarters of their peaks; nobody notices but by the time."""
    with pool(regions=24, region_bytes=MIB) as made, job(made, "a", JOB) as a, job(made, "b", JOB) as b:
        places = [place_of(made, name, script) for name, script in (("a", a), ("b", b))]
        a.until(made.exceeds("iteration", places, 1), "both iterate")
        made.kill_broker()
        assert losses(a) == losses(b) == losses_alone()
        assert made.header["peak_granted"] <= 24
