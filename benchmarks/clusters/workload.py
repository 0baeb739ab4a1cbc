"""Which jobs come when: from a public trace that the user has, or generated from its published shape.

A trace is not part of this repository: neither its licence nor its size asks for a copy. What is
read of it: the second of each job's arrival, how long it ran, how many devices it had.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
from typing import TYPE_CHECKING

import numpy as np

from zico.base.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

LEAST_S, MOST_S = 60, 86_400
"""Jobs that ran for less or for longer are left out: they are no training, or services."""
WEEKS_S = 35 * 86_400
"""From the trace's end back: what came earlier are a few services."""


@dataclasses.dataclass(frozen=True, eq=False)
class Arrivals:
    """Jobs of one device each, in the order of their arrival."""

    source: str
    """Where they are from, in a sentence."""
    arrive_s: NDArray[np.float64]
    work_s: NDArray[np.float64]
    """How long each takes alone."""

    @property
    def load(self) -> float:
        """Return how many devices they keep busy, on the average over their arrivals."""
        return float(self.work_s.sum() / (self.arrive_s[-1] - self.arrive_s[0]))


def read_openb(path: Path) -> Arrivals:
    """Return the jobs of Alibaba's GPU trace of 2023 (``openb_pod_list_default.csv``).

    Raises:
        ConfigError: The file is not that trace.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = {"num_gpu", "creation_time", "scheduled_time", "deletion_time"}
    if not rows or not wanted <= rows[0].keys():
        raise ConfigError(f"{path} has no columns {', '.join(sorted(wanted))}: give openb_pod_list_default.csv")
    ran = [row for row in rows if int(row["num_gpu"]) and row["scheduled_time"]]
    devices = np.array([int(row["num_gpu"]) for row in ran])
    arrive_s = np.array([float(row["creation_time"]) for row in ran])
    work_s = np.array([float(row["deletion_time"]) - float(row["scheduled_time"]) for row in ran])
    usual = (work_s >= LEAST_S) & (work_s <= MOST_S) & (arrive_s >= arrive_s.max() - WEEKS_S)
    chosen = usual & (devices == 1)
    left_out = 1 - work_s[chosen].sum() / (work_s * devices)[usual].sum()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    source = (
        f"{path.name} (SHA-256 {digest}) of github.com/alibaba/clusterdata, cluster-trace-gpu-v2023: {chosen.sum()} of "
        f"{len(ran)} pods that had a GPU, those with one GPU, of {LEAST_S} s to {MOST_S // 3600} h, in the last "
        f"{WEEKS_S // 86_400} days; pods with several GPUs, left out, are {left_out:.0%} of the GPU time of that length"
    )
    order = np.argsort(arrive_s[chosen], kind="stable")
    return Arrivals(source, arrive_s[chosen][order], work_s[chosen][order])


def generated(jobs: int, seed: int) -> Arrivals:
    """Return jobs that no cluster has seen: Poisson arrivals, log-normal lengths with median 11 min and mean 45 min."""
    random = np.random.default_rng(seed)
    work_s = np.clip(random.lognormal(np.log(660), np.sqrt(2 * np.log(2700 / 660)), jobs), LEAST_S, MOST_S)
    arrive_s = np.cumsum(random.exponential(60.0, jobs))
    return Arrivals("generated, not a trace: Poisson arrivals, log-normal lengths", arrive_s, work_s)


CARMA_LENGTHS_MIN = (
    *(14.9, 44.9),
    *(42.0, 28.5, 27.5, 35.0, 32.6, 31.3, 29.5, 25.7, 25.4, 50.8, 46.7, 44.6, 49.9, 48.8, 47.6, 58.8, 51.3, 49.8),
    *(31.5, 112.1, 25.2),
    *(21.2, 53.0, 21.8, 54.5, 22.8, 57.0, 9.8, 24.5, 4.6, 11.5, 3.4, 8.5, 16.6, 41.5, 8.8, 22.0, 4.4, 11.0),
    *(19.0, 47.5, 10.0, 25.0, 6.2, 15.5),
)
"""How long the jobs with one device of CARMA's evaluation take alone: minutes of an epoch times epochs.

Source: the README of github.com/itu-rad/CARMA. In the order of its tables: text, pictures, CIFAR.
"""
_CARMA_SMALL = 24
"""The last so many, of CIFAR; half of its jobs are such."""
CARMA_MEAN_S = 30 * (
    sum(CARMA_LENGTHS_MIN[-_CARMA_SMALL:]) / _CARMA_SMALL
    + sum(CARMA_LENGTHS_MIN[:-_CARMA_SMALL]) / (len(CARMA_LENGTHS_MIN) - _CARMA_SMALL)
)


def like_carma(jobs: int, span_s: float, seed: int) -> Arrivals:
    """Return jobs of the lengths that CARMA's evaluation has, half of them of its small ones, at random times."""
    random = np.random.default_rng(seed)
    lengths_min = np.array(CARMA_LENGTHS_MIN)
    of_cifar = random.random(jobs) < 0.5
    small, large = lengths_min[-_CARMA_SMALL:], lengths_min[:-_CARMA_SMALL]
    work_s = 60 * np.where(of_cifar, random.choice(small, jobs), random.choice(large, jobs))
    return Arrivals("generated, not a trace", np.sort(random.uniform(0, span_s, jobs)), work_s)


def scaled(arrivals: Arrivals, devices: int, load: float, copies: int, seed: int) -> Arrivals:
    """Return so many copies of arrivals at once, so much faster that they would keep a share of the devices busy.

    Each copy begins at another place of the original, and goes on with its beginning at its end.

    Args:
        arrivals: The original.
        devices: Of the cluster.
        load: What share of them the jobs need, alone; more than 1: they come faster than they can end.
        copies: Of the original.
        seed: Of the places.
    """
    random = np.random.default_rng(seed)
    begin_s = arrivals.arrive_s[0]
    span_s = arrivals.arrive_s[-1] - begin_s
    shifts_s = np.append(0.0, random.uniform(0, span_s, copies - 1))
    moved_s = (arrivals.arrive_s - begin_s)[None, :] + shifts_s[:, None]
    arrive_s = np.where(moved_s > span_s, moved_s - span_s, moved_s).ravel()
    work_s = np.tile(arrivals.work_s, copies)
    order = np.argsort(arrive_s, kind="stable")
    faster = load * devices / (copies * arrivals.load)
    return Arrivals(arrivals.source, arrive_s[order] / faster, work_s[order])
