"""Training jobs that page: the same bits of losses in 60 % of their own peaks (invariant 6)."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import tempfile
from pathlib import Path

import pytest
from support.harness import ANSWER_S, EXAMPLES, MIB, PATIENCE_S, clean_environment, pool
from support.light_job import can_page
from support.scripts import Script, place_of

from zico.broker.saving import Wish
from zico.launch.jobs import job_environment

pytestmark = pytest.mark.skipif(not can_page(), reason="this user may not serve page faults")

ITERATIONS = 6
SHARE = 0.6
OPTIONS = {
    "digits_resnet": ("--depth", "20", "--batch", "256"),
    "stdlib_lm": ("--batch", "8", "--layers", "2"),
}


def arguments(name: str, losses: Path, *more: str) -> list[str]:
    """Return the command line of an example, after the interpreter; the last of equal options counts."""
    script = EXAMPLES / f"{name}.py"
    return [str(script), "--iterations", str(ITERATIONS), "--quiet", "--losses", str(losses), *OPTIONS[name], *more]


@functools.cache
def unpaged(name: str) -> tuple[list[str], int]:
    """Return the losses of an example that has the pool to itself, and its peak; they are those without Zico.

    That is what ``test_exactness.py`` shows.
    """
    with tempfile.TemporaryDirectory() as directory, pool(regions=512, region_bytes=MIB) as made:
        losses = Path(directory) / "losses"
        with Script(arguments(name, losses), job_environment(clean_environment(), made.socket, name)) as process:
            done = process.finish(2 * PATIENCE_S)
        assert (done.returncode, "zico:" in done.stderr) == (0, False), done.stderr
        return json.loads(losses.read_text()), made.client.report().jobs[-1].peak_bytes


@pytest.mark.timeout(4 * PATIENCE_S)
@pytest.mark.parametrize(("name", "system"), [("digits_resnet", ""), ("stdlib_lm", ""), ("digits_resnet", "sentinel")])
def test_invariant_6_a_job_that_pages_has_the_losses_that_it_has_alone(name: str, system: str, tmp_path: Path) -> None:
    """Invariant 6: to the last bit, in 60 % of its peak, with blocks that really come and go, and nothing spilled.

    Also as Sentinel, whose name the report has then.
    """
    expected, peak_bytes = unpaged(name)
    with pool(regions=512, region_bytes=MIB) as made:
        wish = Wish("page", int(SHARE * peak_bytes) // MIB * MIB, "memory:1GiB", planner=system)
        environment = job_environment(clean_environment(), made.socket, name, wish=wish)
        with Script(arguments(name, tmp_path / "losses"), environment) as process:
            done = process.finish(2 * PATIENCE_S)
        assert done.returncode == 0, done.stderr
        assert "zico:" not in done.stderr
        assert json.loads((tmp_path / "losses").read_text()) == expected
        (report,) = made.client.report().jobs
        assert report.peak_bytes <= SHARE * peak_bytes
        assert (report.saving.how, report.saving.planner) == ("page", system)
        assert report.saving.faults > 0
        assert report.saving.out_bytes > 0
        assert report.spilled_bytes == 0


@pytest.mark.timeout(6 * PATIENCE_S)
def test_jobs_that_leave_it_to_the_broker_train_together_in_half_of_their_peaks(tmp_path: Path) -> None:
    """Two TensorFlow jobs in what one of them needs: they page, with the losses that they have alone, nothing spilled.

    Invariant 6.
    """
    name, small = "stdlib_lm", ("--iterations", "4", "--layers", "1")
    with pool(regions=512, region_bytes=MIB) as made:
        with Script(
            arguments(name, tmp_path / "alone", *small), job_environment(clean_environment(), made.socket, name)
        ) as one:
            assert one.finish(2 * PATIENCE_S).returncode == 0
        peak_bytes = made.client.report().jobs[-1].peak_bytes
    wish = Wish("auto", tier="memory:1GiB")
    with pool(regions=peak_bytes // MIB, region_bytes=MIB) as made, contextlib.ExitStack() as owned:
        jobs = [
            owned.enter_context(
                Script(
                    arguments(name, tmp_path / which, *small),
                    job_environment(clean_environment(), made.socket, which, wish=wish),
                )
            )
            for which in ("first", "second")
        ]
        ended = [job.finish(3 * PATIENCE_S) for job in jobs]
        reports = made.client.report().jobs
    for which, done in zip(("first", "second"), ended, strict=True):
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / which).read_text()) == json.loads((tmp_path / "alone").read_text())
    assert [job.saving.how for job in reports] == ["page", "page"]
    assert [job.spilled_bytes for job in reports] == [0, 0]
    assert sum(job.saving.out_bytes for job in reports) > 0


@pytest.mark.timeout(4 * PATIENCE_S)
def test_invariant_5_a_paged_training_job_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """Invariant 5: killed while blocks come and go, it leaves no region and no page, and the pool serves the next."""
    with pool(regions=512, region_bytes=MIB) as made:
        for name in ("first", "next"):
            wanted = Wish("page", 32 * MIB, "memory:1GiB")
            environment = job_environment(clean_environment(), made.socket, name, wish=wanted)
            endless = arguments("digits_resnet", tmp_path / name, "--iterations", "100000")
            with Script(endless, environment) as process:
                place = place_of(made, name, process)
                process.until(lambda place=place: made.jobs[place]["faults"] > 50, "blocks come and go")
                process.process.kill()
                assert process.finish().returncode == -signal.SIGKILL
            look = made.settled(lambda look: look.granted == 0, "its regions are free", ANSWER_S)
            assert look.physical_bytes == 0


@pytest.mark.timeout(4 * PATIENCE_S)
def test_invariant_7_a_tier_that_is_full_ends_a_paged_training_job_in_an_error(tmp_path: Path) -> None:
    """Invariant 7: where limit and tier are too small together, the job ends out of memory, its losses so far right."""
    with pool(regions=512, region_bytes=MIB) as made:
        wanted = Wish("page", 24 * MIB, "memory:4MiB")
        environment = job_environment(clean_environment(), made.socket, "small", wish=wanted)
        environment["ZICO_WAIT_LIMIT_S"] = "2"
        with Script(arguments("digits_resnet", tmp_path / "losses"), environment) as process:
            done = process.finish(2 * PATIENCE_S)
        assert done.returncode > 0, done.stderr
        assert "memory" in done.stderr
    found = json.loads((tmp_path / "losses").read_text())
    assert found == unpaged("digits_resnet")[0][: len(found)]
