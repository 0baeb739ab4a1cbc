"""Jobs for the simulator: a model at a batch on a card, and how much slower several are together.

Two assumptions about jobs that work at the same time, between which the truth lies:

* ``apart``: each is as fast as alone; only memory makes anybody wait. No scheduler can do better.
* ``roofline``: processors and memory's bandwidth are shared out. Of the operations that meet, those that together want
  more than there is of either take longer by that factor; its mean, over operations met at random and weighted by
  their times, is the slowdown of so many jobs. Real kernels keep the device less busy than their roofline says, so
  that they lose less.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np
from paper.published import IDENTICAL, REGION_BYTES
from paper.work import work_of

from zico.planners.from_trace import iteration_problem
from zico.planners.judge import live_bytes
from zico.scheduler.from_problem import profile_of
from zico.scheduler.simulate import Load
from zico.trace.roofline import device_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from paper.published import Identical

    from zico.scheduler.state import Profile

ASSUMPTIONS = ("apart", "roofline")
_DRAWS = 200_000


@dataclasses.dataclass(frozen=True)
class Job:
    """A model at a batch on a card."""

    model: Identical
    batch: int
    card: str
    profile: Profile
    """Bytes alive, in whole regions."""
    keeps: int
    """Regions, between iterations."""
    peak_bytes: int

    @property
    def iteration_s(self) -> float:
        """Return how long an iteration takes alone."""
        return self.profile.duration_ns / 1e9

    def load(self, number: int = 0) -> Load:
        """Return what the simulator takes; the number tells copies apart."""
        return Load(f"{self.model.key}{number}", self.profile, self.keeps)


@functools.cache
def job_of(key: str, batch: int, card: str) -> Job:
    """Return a model's job."""
    work = work_of(IDENTICAL[key])
    problem = iteration_problem(work.trace(batch, card)).problem
    assert problem.tick_ns is not None  # noqa: S101 - a trace has times
    alive = live_bytes(problem)
    held = -(-alive // REGION_BYTES)
    profile = profile_of(held, problem.tick_ns[: len(held) + 1])
    return Job(IDENTICAL[key], batch, card, profile, int(held.min()), int(alive.max()))


def job_of_size(key: str, peak_bytes: float, card: str) -> Job:
    """Return a model's job at the batch whose peak is nearest to some bytes."""
    return job_of(key, work_of(IDENTICAL[key]).batch_for(peak_bytes), card)


def regions_of(card: str) -> int:
    """Return the regions that the card's memory has."""
    return device_model(card).memory_bytes // REGION_BYTES


def slowdown(jobs: Sequence[Job], assumption: str) -> tuple[float, ...]:
    """Return by what factor each of 0, 1, 2, ... of these jobs is slower than alone while they work together."""
    if assumption == "apart":
        return (1.0,)
    return _roofline(tuple((job.model.key, job.batch, job.card) for job in jobs))


@functools.cache
def _roofline(names: tuple[tuple[str, int, str], ...]) -> tuple[float, ...]:
    jobs = [job_of(*name) for name in names]
    random = np.random.default_rng(1)
    factors = [1.0, 1.0]
    for n in range(2, len(jobs) + 1):
        wanted = np.zeros((2, _DRAWS))
        chosen = random.permuted(np.tile(np.arange(len(jobs)), (_DRAWS, 1)), axis=1)[:, :n]
        for column in chosen.T:
            wanted += _met(jobs, column, random)
        factors.append(float(np.maximum(1.0, wanted.max(axis=0)).mean()))
    return tuple(factors)


def _met(jobs: Sequence[Job], chosen: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.float64]:
    """Return how busy an operation of each chosen job keeps processors and memory, by chance."""
    found = np.empty((2, len(chosen)))
    for i, job in enumerate(jobs):
        here = chosen == i
        times, *shares = work_of(job.model).busy(job.batch, job.card)
        met = random.choice(len(times), int(here.sum()), p=times / times.sum())
        found[:, here] = np.array(shares)[:, met]
    return found
