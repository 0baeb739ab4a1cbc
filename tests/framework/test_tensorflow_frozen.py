"""TensorFlow jobs that hold equal frozen variables once, with Keras and without: the same bits, whoever writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from framework.support import frozen_pool
from framework.support.frozen_pool import BASE, LAYERS, ask, fresh, shared, steps
from support.harness import ANSWER_S, FRAMEWORK, MIB, Pool, until

from zico.broker.client import BrokerClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from support.scripts import Script

JOB = FRAMEWORK / "tensorflow_frozen_job.py"


@pytest.fixture
def made() -> Iterator[Pool]:
    """Give a pool."""
    with fresh() as one:
        yield one


def begin(made: Pool | None, *seeds: int, share: bool = True) -> AbstractContextManager[list[Script]]:
    """Give jobs that are ready."""
    return frozen_pool.begin(made, JOB, *seeds, share=share, loaded="tensorflow")


def test_two_jobs_hold_their_base_once_and_all_figures_are_those_alone(made: Pool) -> None:
    """Invariants 6 and 12: before the first iteration; statistics of batches are each job's, and change as alone."""
    alone = []
    for seed in (1, 2):
        with begin(None, seed) as (job,):
            alone += steps(job, n=3)
    with begin(made, 1, 2) as (a, b):
        assert steps(a, b) == [found[:1] for found in alone]
        assert [ask(job, "where") for job in (a, b)] == [f"{LAYERS} 0"] * 2
        assert steps(a, b, n=2) == [found[1:] for found in alone]
        assert [ask(job, "where") for job in (a, b)] == [f"{LAYERS} 0"] * 2, "what was written is not offered again"
        with BrokerClient(made.socket) as client:
            status = client.status()
        assert status.shared_bytes == BASE
        assert [job.shared_bytes for job in status.jobs] == [BASE, BASE]
        assert sum(job.held_bytes for job in status.jobs) <= 16 * MIB, "their own memory alone"


def test_who_writes_has_memory_of_its_own_at_once(made: Pool) -> None:
    """Invariant 12: nobody else sees it, and it counts as the writer's."""
    with begin(made, 1, 2) as (a, b):
        steps(a, b, n=2)
        before = ask(b, "sum")
        assert ask(a, "write") == str(LAYERS - 1)
        assert ask(a, "scatter") == "7.0"
        assert ask(a, "restore") == str(LAYERS - 3)
        steps(a, b, n=2)
        assert (ask(a, "there"), ask(b, "there")) == (str(LAYERS - 3), str(LAYERS))
        assert ask(a, "sum") != before
        assert ask(b, "sum") == before
        with BrokerClient(made.socket) as client:
            found = {job.name: job.shared_bytes for job in client.status().jobs}
        assert found == {"job1": BASE - 12 * MIB, "job2": BASE}


def test_a_layer_that_learns_after_all_learns_as_alone(made: Pool) -> None:
    """Invariants 6 and 12: unfrozen, a layer moves when the optimizer writes it."""
    found = []
    for pool in (None, made):
        with begin(pool, 1) as (job,):
            found.append(steps(job, n=2)[0])
            ask(job, "unfreeze")
            found[-1] += steps(job, n=3)[0]
            found[-1].append(ask(job, "sum"))
            assert ask(job, "there") == str(LAYERS - 1 if pool else 0)
    assert found[0] == found[1]


def test_the_dead_leave_the_living_what_they_share(made: Pool) -> None:
    """Invariants 5 and 12: who made it dies, another one joins; with the last one it goes."""
    with begin(made, 1, 2) as (a, b):
        steps(a, b)
        before = ask(b, "sum")
        a.process.kill()
        a.process.wait(ANSWER_S)
        assert ask(b, "sum") == before
        with begin(made, 3) as (c,):
            steps(b, c, n=2)
            assert (ask(c, "there"), ask(c, "sum")) == (str(LAYERS), before)
            b.process.kill()
            b.process.wait(ANSWER_S)
            assert ask(c, "sum") == before
    until(lambda: shared(made) == 0, ANSWER_S, "with the last job it goes")


def test_a_job_shares_when_it_asks_for_it(made: Pool) -> None:
    """``zico.share`` does it at once, statistics as well, which leave with the first iteration; in no pool nothing."""
    with begin(None, 1) as (job,):
        assert ask(job, "share") == "0"
        alone = steps(job, n=2)
    with begin(made, 1, share=False) as (job,):
        assert ask(job, "there") == "0"
        assert ask(job, "share") == str(BASE)
        assert ask(job, "share_all") == f"{LAYERS} 2"
        assert steps(job, n=2) == alone
        assert ask(job, "where") == f"{LAYERS} 0"
        assert shared(made) == BASE


def test_a_module_without_keras(made: Pool) -> None:
    """Of 16 bits an element, shared when the first tape begins."""
    with begin(made, 1) as (job,):
        assert ask(job, "plain") == f"True True {float(1 << 20)}"


def test_what_reads_by_the_variable_takes_it_back_and_keras_embeddings_do_not(made: Pool) -> None:
    """A known limit: such a variable stays the job's own from then on."""
    with begin(made, 1) as (job,):
        ask(job, "share")
        assert ask(job, "gather") == f"{LAYERS - 1} True"


def test_what_is_written_while_it_is_shared_stays(made: Pool) -> None:
    """Invariant 12: such a variable is not moved."""
    with begin(made, 1, share=False) as (job,):
        assert ask(job, "race") == f"0 {float(1 << 20)}"


def test_two_frameworks_of_a_job_have_a_content_together(made: Pool) -> None:
    """Invariant 12: it is the job's until neither has it."""
    pytest.importorskip("jax", reason="JAX is not installed")
    with begin(made, 1) as (job,):
        assert ask(job, "both") == str(BASE)


def test_sharing_ends_no_iteration(made: Pool) -> None:
    """Assignments between gradients and their use are no step of the job."""
    with begin(made, 1, share=False) as (job,):
        assert ask(job, "differentiate") == f"{LAYERS} 0 True"


def test_what_a_job_lets_go_is_given_back(made: Pool) -> None:
    """A base that is dropped leaves the budget while its job lives; of one that has trained TensorFlow keeps it."""
    with begin(made, 1) as (job,):
        assert ask(job, "share") == str(BASE)
        ask(job, "drop")
        ask(job, "plain")
        assert shared(made) <= 4 * MIB


def test_what_it_cannot_share_is_said(made: Pool) -> None:
    """One sentence, with what can be given."""
    with begin(made, 1) as (job,):
        says = "zico.share was given a str: give it a model or layer of Keras, a tf.Module, or a list of TensorFlow's "
        assert ask(job, "wrong").startswith(f"{says}variables")
