"""Jobs for the simulator: a model at a batch on a card, and how much slower several are together.

Two assumptions about jobs that work at the same time, between which the truth lies:

* ``apart``: each is as fast as alone; only memory makes anybody wait. No scheduler can do better.
* ``roofline``: processors and memory's bandwidth are shared out. Of the operations that meet, those
  that together want more than there is of either take longer by that factor; its mean, over
  operations met at random and weighted by their times, is the slowdown of so many jobs. Real
  kernels keep the device less busy than their roofline says, so that they lose less.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np
from paper.published import IDENTICAL, REGION_BYTES
from paper.work import work_of

from zico.lab.simulator.roofline import device_model
from zico.planning.packing.from_trace import iteration_problem
from zico.planning.packing.judge import live_bytes
from zico.scheduler.curves import profile_of
from zico.scheduler.simulate import Load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from paper.published import Identical

    from zico.scheduler.state import Profile

ASSUMPTIONS = ("apart", "roofline")
_DRAWS = 50_000


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
    """Draw orders of the jobs and an operation of each, and add up what the first two, three, ... of them want."""
    random = np.random.default_rng(1)
    met = np.stack([_met(*name, random) for name in names])
    order = random.permuted(np.tile(np.arange(len(names))[:, None], _DRAWS), axis=0)
    wanted = np.cumsum(np.take_along_axis(met, order[..., None], axis=0), axis=0)
    factors = np.maximum(1.0, wanted.max(axis=2)).mean(axis=1)
    return (1.0, 1.0, *factors[1:].tolist())


def _met(key: str, batch: int, card: str, random: np.random.Generator) -> NDArray[np.float64]:
    """Return how busy operations of a job that are met by chance keep processors and memory, a row for each."""
    times_ns, *shares = _busy(key, batch, card)
    return np.stack(shares, axis=1)[random.choice(len(times_ns), _DRAWS, p=times_ns / times_ns.sum())]


@functools.cache
def _busy(key: str, batch: int, card: str) -> NDArray[np.float64]:
    return work_of(IDENTICAL[key]).busy(batch, card)
