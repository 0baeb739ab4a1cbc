"""PyTorch jobs that hold equal frozen weights once: the same bits, counted once, whoever dies, writes or forks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from framework.support.frozen_pool import BASE, LAYERS, REGIONS, ask, begin, fresh, shared, start, steps
from support.harness import ANSWER_S, FRAMEWORK, MIB, Pool, compile_once, pool, until

from zico.broker.client import BrokerClient

if TYPE_CHECKING:
    from collections.abc import Iterator

JOB = FRAMEWORK / "frozen_job.py"
LIBRARIES = [("peft_job.py", "peft", 2 * 4 * MIB), ("keras_frozen_job.py", "keras", 6 * MIB)]
"""Script, what it needs, and how much of its base is in large frozen weights at least."""


@pytest.fixture
def made() -> Iterator[Pool]:
    """Give a pool of 64 MiB."""
    with fresh() as one:
        yield one


def test_two_jobs_hold_their_base_once_and_their_losses_are_those_alone(made: Pool) -> None:
    """Invariants 6 and 12: shared with the first iteration; the budget has it once."""
    alone = []
    for seed in (1, 2):
        with start(None, JOB, seed) as job:
            assert job.line() == "ready"
            alone.append([ask(job, "step") for _ in range(3)])
    with begin(made, JOB, 1, 2) as (a, b):
        assert steps(a, b, n=3) == alone
        assert [ask(job, "there") for job in (a, b)] == [str(LAYERS)] * 2
        with BrokerClient(made.socket) as client:
            status = client.status()
        assert status.shared_bytes == BASE
        assert [job.shared_bytes for job in status.jobs] == [BASE, BASE]
        assert made.header["shared"] * MIB == BASE
        assert status.budget_bytes == REGIONS * MIB
        assert status.peak_granted_bytes <= REGIONS * MIB
        assert status.physical_bytes >= BASE
        held = sum(job.held_bytes for job in status.jobs)
        assert held <= 8 * MIB, "their own memory alone"


@pytest.mark.parametrize(("script", "needs", "least"), LIBRARIES, ids=["peft", "keras"])
def test_libraries_fine_tunings_hold_their_base_once(made: Pool, script: str, needs: str, least: int) -> None:
    """Two jobs hold the base of a library's model once, and their losses are those alone."""
    pytest.importorskip(needs, reason="make test installs it")
    path = FRAMEWORK / script
    with begin(None, path, 1, 2) as alone:
        losses = steps(*alone, n=3)
    with begin(made, path, 1, 2) as (a, b):
        assert steps(a, b, n=3) == losses
        base = int(ask(a, "outside"))
        assert base >= least
        assert ask(b, "outside") == str(base)
        assert base <= shared(made) < base + 2 * MIB


def test_the_dead_leave_the_living_what_they_share(made: Pool) -> None:
    """Invariants 5 and 12: who made it dies, another one joins; with the last one it goes."""
    with begin(made, JOB, 1, 2) as (a, b):
        steps(a, b, n=3)
        before = ask(b, "sum")
        a.process.kill()
        a.process.wait(ANSWER_S)
        until(lambda: len(made.look().jobs) >= 1 and shared(made) == BASE, ANSWER_S, "it stays")
        assert ask(b, "sum") == before
        with begin(made, JOB, 3) as (c,):
            steps(b, c, n=3)
            assert (ask(c, "there"), ask(c, "sum")) == (str(LAYERS), before)
            b.process.kill()
            b.process.wait(ANSWER_S)
            assert ask(c, "sum") == before
    until(lambda: shared(made) == 0, ANSWER_S, "with the last job it goes")
    assert made.header["budget_regions"] == REGIONS


def test_who_writes_has_memory_of_its_own_again(made: Pool) -> None:
    """Invariant 12: nobody else sees it, and from the next boundary on it counts as the writer's."""
    with begin(made, JOB, 1, 2) as (a, b):
        steps(a, b, n=3)
        before = ask(b, "sum")
        assert ask(a, "write") == "7.0"
        assert ask(b, "sum") == before
        steps(a, b)
        assert (ask(a, "there"), ask(b, "there")) == (str(LAYERS - 1), str(LAYERS))
        assert ask(a, "sum") != before
        ask(a, "unfreeze")
        steps(a, b, n=2)
        assert ask(a, "there") == str(LAYERS - 2)
        assert ask(b, "sum") == before
        with BrokerClient(made.socket) as client:
            status = client.status()
        assert {job.name: job.shared_bytes for job in status.jobs} == {"job1": BASE - 8 * MIB, "job2": BASE}
        assert status.shared_bytes == BASE


def test_a_child_reads_what_its_parent_shares_and_writes_to_itself(made: Pool) -> None:
    """Invariants 10 and 12."""
    with begin(made, JOB, 1, 2) as (a, b):
        steps(a, b, n=3)
        before = ask(b, "sum")
        assert ask(a, "fork") == before
        assert (ask(a, "sum"), ask(b, "sum")) == (before, before)
        assert shared(made) == BASE


def test_a_child_that_computes_first_shares_nothing(made: Pool) -> None:
    """Invariant 10: its parent's place in the pool is not the child's."""
    with begin(made, JOB, 1) as (job,):
        assert ask(job, "fork_first") == "0"
        steps(job)
        assert ask(job, "there") == str(LAYERS)
        assert "no more frozen memory" not in job.finish().stderr, "the child does not ask"


def test_memory_with_another_reference_stays_where_it_is(made: Pool) -> None:
    """An alias would not move with it."""
    with begin(made, JOB, 1) as (job,):
        ask(job, "keep")
        ask(job, "step")
        assert ask(job, "there") == str(LAYERS - 1)


def test_equal_tensors_of_one_job_are_written_apart(made: Pool) -> None:
    """Invariant 12: each has a mapping of its own."""
    with begin(made, JOB, 1) as (job,):
        steps(job, n=2)
        before = ask(job, "sum")
        assert ask(job, "copy") == before


def test_an_alias_sees_what_is_written_after_it_was_shared(made: Pool) -> None:
    """A parameter to which an alias refers stays where it is, written or not."""
    with begin(made, JOB, 1) as (job,):
        steps(job, n=2)
        assert ask(job, "alias") == "True"


def test_a_write_that_changes_no_version_is_found(made: Pool) -> None:
    """Invariant 12: by the process's pages, at the end of an iteration soon after."""
    with begin(made, JOB, 1) as (job,):
        steps(job)
        ask(job, "data")
        steps(job, n=3)
        assert ask(job, "there") == str(LAYERS - 1)


@pytest.mark.parametrize(("what", "says"), [("infer", f"False {LAYERS}"), ("elsewhere", str(BASE)), ("compiled", None)])
def test_a_job_begins_in_another_mode(made: Pool, what: str, says: str | None) -> None:
    """Inference mode, a default device, a graph: parameters stay ordinary ones, and shared they are soon."""
    with begin(made, JOB, 1) as (job,):
        said = ask(job, what)
        assert says in (None, said)
        steps(job, n=3)
        assert ask(job, "there") == str(LAYERS - (what == "infer"))


def test_what_a_job_lets_go_is_given_back(made: Pool) -> None:
    """A base that is dropped leaves the budget while its job lives."""
    with begin(made, JOB, 1) as (job,):
        ask(job, "step")
        assert shared(made) == BASE
        ask(job, "drop")
        ask(job, "step")
        ask(job, "step")
        assert shared(made) <= 4 * MIB


def test_a_job_shares_when_it_asks_for_it(made: Pool) -> None:
    """``zico.share`` does it at once, and only where the option was not given; outside a pool it does nothing."""
    with start(None, JOB, 1) as job:
        assert job.line() == "ready"
        assert ask(job, "share") == "0"
    with start(made, JOB, 1, share=False) as job:
        assert job.line() == "ready"
        ask(job, "step")
        assert (ask(job, "there"), shared(made)) == ("0", 0)
        assert ask(job, "share") == str(BASE)
        assert (ask(job, "there"), shared(made)) == (str(LAYERS), BASE)
        assert ask(job, "share") == str(BASE)


def test_without_room_in_the_budget_a_job_keeps_its_own() -> None:
    """Invariant 1: the base is shared as far as there is room while both copies are there."""
    compile_once()
    with pool(regions=LAYERS * 4 + 3, region_bytes=MIB) as made, begin(made, JOB, 1) as (job,):
        losses = [ask(job, "step") for _ in range(2)]
        assert ask(job, "there") != str(LAYERS)
        assert made.header["peak_granted"] <= LAYERS * 4 + 3
    with start(None, JOB, 1) as job:
        assert job.line() == "ready"
        assert [ask(job, "step") for _ in range(2)] == losses


def test_a_dead_broker_changes_nothing(made: Pool) -> None:
    """Invariants 5 and 12: what is shared stays mapped, and nothing more is."""
    with begin(made, JOB, 1, 2) as (a, b):
        ask(a, "share")
        before = ask(a, "sum")
        made.kill_broker()
        assert ask(a, "sum") == before
        steps(a, b, n=2)
        assert (ask(a, "there"), ask(b, "there"), ask(b, "sum")) == (str(LAYERS), "0", before)
