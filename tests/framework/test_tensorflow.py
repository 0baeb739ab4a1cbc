"""TensorFlow and Keras in a pool."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import pytest
from support.harness import ANSWER_S, FRAMEWORK, MIB, Nursery, pool, until
from support.scripts import checks_in, job, place_of, run_checks

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKS = FRAMEWORK / "tensorflow_checks.py"
MEMORY = FRAMEWORK / "tensorflow_memory.py"
BEGINS = re.compile(
    r"zico: tf needs \d+ MiB and the budget is 40 MiB: from now on what exceeds it lies in the next tier, which is "
    r"slower; --save page moves what is needed least, with --save none the job ends out of memory"
)


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """Give what the script of checks found as a job in a pool in which nobody has to wait."""
    with pool(regions=128, region_bytes=MIB) as made:
        yield run_checks(CHECKS, functools.partial(job, made, "checks", fresh=True))


@pytest.mark.parametrize("name", checks_in(CHECKS))
def test_in_a_job(found: dict[str, Any], name: str) -> None:
    """What the check's docstring says is true of TensorFlow in a job."""
    assert found[name] == "ok", found[name]


def test_the_end_is_clean(found: dict[str, Any]) -> None:
    """A process that ends with live tensors ends with 0."""
    assert found["exit"]["code"] == 0, found["exit"]["stderr"]


def test_a_conversion_waits_with_the_gil_held_and_a_request_that_never_fits_is_refused() -> None:
    """Invariant 7: while ``tf.constant`` waits, its process runs no Python, and the memory comes all the same.

    And more than the budget raises TensorFlow's own error, which stderr explains, while the other
    goes on.
    """
    nursery = Nursery()
    try:
        with pool(regions=40, region_bytes=MIB) as made, nursery.job(made, "holder") as holder:
            assert holder.ask("hold 15") == "1"
            assert holder.ask("hold 15") == "1"
            with job(made, "tf", MEMORY, save="none") as process:
                assert process.line() == "ready"
                place = place_of(made, "tf", process)
                process.tell("convert")
                process.until(lambda: made.jobs[place]["waiting_threads"] > 0, "the conversion waits", 20)
                assert holder.ask("free") == "freed"
                until(lambda: made.jobs[place]["held"] >= 12, ANSWER_S, "it has its memory")
                assert holder.ask("free") == "freed"
                assert process.line() == "converted True"
                process.tell("too much")
                assert process.line() == "refused ResourceExhaustedError"
                assert holder.ask("train 20 10") == "lost 0"
                done = process.finish()
            assert done.returncode == 1
            assert done.stderr.splitlines()[-1].startswith("zico: out of memory: needs 64 MiB more while holding ")
            assert "the whole budget is 40 MiB" in done.stderr
    finally:
        nursery.close()


def test_what_exceeds_the_budget_alone_lies_in_the_next_tier() -> None:
    """Without an option a job that needs more than there will ever be goes on, and one line says how."""
    with pool(regions=40, region_bytes=MIB) as made, job(made, "tf", MEMORY) as process:
        for _ in range(2):
            process.tell("go on")
        done = process.finish()
        assert done.stdout.splitlines()[-1] == f"went on {float(64 << 18)}"
        assert done.returncode == 0, done.stderr
        assert BEGINS.fullmatch(done.stderr.strip()), done.stderr
        (report,) = made.client.report().jobs
        assert report.oom is None
        assert report.spilled_bytes >= 64 * MIB
        assert report.peak_bytes <= 40 * MIB
