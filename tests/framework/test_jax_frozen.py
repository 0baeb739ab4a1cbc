"""JAX jobs that hold equal constants once: the same bits, whoever dies, writes or donates."""

from __future__ import annotations

import importlib.util
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

JOB = FRAMEWORK / "jax_frozen_job.py"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")


@pytest.fixture
def made() -> Iterator[Pool]:
    """Give a pool."""
    with fresh() as one:
        yield one


def begin(made: Pool | None, *seeds: int) -> AbstractContextManager[list[Script]]:
    """Give jobs that are ready; an option is needed by none."""
    return frozen_pool.begin(made, JOB, *seeds, share=False, loaded="")


def test_two_jobs_hold_their_base_once_and_their_losses_are_those_alone(made: Pool) -> None:
    """Invariants 6 and 12: when they ask for it; the budget has it once."""
    with begin(None, 1, 2) as alone:
        assert [ask(job, "share") for job in alone] == ["0", "0"]
        losses = steps(*alone, n=3)
    with begin(made, 1, 2) as (a, b):
        assert steps(a, b) == [found[:1] for found in losses]
        assert [ask(job, "there") for job in (a, b)] == ["0", "0"]
        assert [ask(job, "share") for job in (a, b)] == [str(BASE)] * 2
        assert steps(a, b, n=2) == [found[1:] for found in losses]
        assert [ask(job, "there") for job in (a, b)] == [str(LAYERS)] * 2
        with BrokerClient(made.socket) as client:
            status = client.status()
        assert status.shared_bytes == BASE
        assert [job.shared_bytes for job in status.jobs] == [BASE, BASE]
        assert sum(job.held_bytes for job in status.jobs) <= 8 * MIB, "their own memory alone"
        assert ask(a, "share") == str(BASE), "a second time it is there"


def test_the_dead_leave_the_living_what_they_share(made: Pool) -> None:
    """Invariants 5 and 12: who made it dies; with the last one it goes."""
    with begin(made, 1, 2) as (a, b):
        for job in (a, b):
            ask(job, "share")
        before = ask(b, "sum")
        a.process.kill()
        a.process.wait(ANSWER_S)
        assert ask(b, "sum") == before
        steps(b)
        assert (ask(b, "there"), shared(made)) == (str(LAYERS), BASE)
    until(lambda: shared(made) == 0, ANSWER_S, "with the last job it goes")


def test_what_is_written_donated_or_learns_is_the_jobs_own(made: Pool) -> None:
    """Invariant 12: nobody else sees it; a donated array is gone, and what becomes of it lies in the pool."""
    with begin(made, 1, 2) as (a, b):
        for job in (a, b):
            ask(job, "share")
        before = ask(b, "sum")
        assert ask(a, "write") == "0.0"
        assert ask(b, "sum") == before
        assert ask(a, "donate") == "True False False"
        assert ask(a, "fine_tune") == str(LAYERS - 2)
        steps(a, b, n=2)
        assert (ask(b, "there"), ask(b, "sum")) == (str(LAYERS), before)
        with BrokerClient(made.socket) as client:
            found = {job.name: job.shared_bytes for job in client.status().jobs}
        assert found == {"job1": BASE - 8 * MIB, "job2": BASE}


def test_a_tree_of_all_kinds_of_leaves_is_what_it_was(made: Pool) -> None:
    """Invariant 6: types, shardings and references stay; what NumPy has another way stays where it is."""
    with begin(made, 1) as (job,):
        moved, stay = ("half", "small", "flags", "bound"), ("weak", "nibbles", "keys", "turned", "wide")
        assert ask(job, "kinds") == " ".join(f"{name}=True,{name in moved}" for name in (*moved, *stay))


def test_what_a_job_lets_go_is_given_back(made: Pool) -> None:
    """A base that is dropped leaves the budget while its job lives."""
    with begin(made, 1) as (job,):
        ask(job, "share")
        steps(job)
        ask(job, "drop")
        steps(job, n=2)
        assert shared(made) == 0


def test_what_it_cannot_share_is_said(made: Pool) -> None:
    """One sentence each, with the remedy."""
    with begin(made, 1) as (job,):
        assert ask(job, "wrong") == (
            "zico.share was given a str: give it a tree of JAX arrays | zico.share was called in a function that JAX "
            "traces, where no array has memory: call it outside, and pass what it returns as an argument"
        )
