"""On which device of a run a job starts.

Each device's pool makes an offer for the job. The placement takes the best one and has no state.
What an offer says of a job's speed there is found by ``zico fit`` (``zico.cli.room``).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ALIKE = 0.01
"""Speeds are compared in steps of this share: what differs by less is the simulation's chance."""


@dataclasses.dataclass(frozen=True)
class Offer:
    """One pool, as a job would find it."""

    budget_bytes: int
    free_bytes: int = 0
    """Of the budget, beside the peaks of the jobs that are there."""
    jobs: int = 0
    """Jobs that are there."""
    unknown: int = 0
    """Of these, how many have needs that nobody knows yet."""
    may_start: bool = True
    """Whether memory has room for the job now."""
    normalised: float | None = None
    """The job's throughput there over its own alone; ``None`` if its needs or those of a neighbour are not known."""


def choose(offers: Mapping[int, Offer], limits: Mapping[int, int] | None = None) -> int | None:
    """Return the key of the offer that a job takes, ``None`` if it can start nowhere now.

    The job goes where it is slowed least. Then fewer jobs count, then more free memory. Where no
    offer says how fast the job would be, fewer jobs of unknown needs count first.

    Args:
        offers: Of each pool that is to be had; its order decides where all else is equal.
        limits: What the job may hold in each pool: none with a smaller budget is taken.
    """
    order = list(offers)
    limits = limits or {}
    open_ = [key for key in order if offers[key].may_start and offers[key].budget_bytes >= limits.get(key, 0)]
    is_known = any(offers[key].normalised is not None for key in open_)

    def rank(key: int) -> tuple[float, ...]:
        offer = offers[key]
        if is_known:
            return (-round((offer.normalised or 0.0) / ALIKE), offer.jobs, -offer.free_bytes, order.index(key))
        return (offer.unknown, -offer.free_bytes, offer.jobs, order.index(key))

    return min(open_, key=rank, default=None)


def largest(offers: Mapping[int, Offer]) -> int | None:
    """Return the key of the pool with the largest budget, the first of equal ones; ``None`` if there is no pool."""
    return max(offers, key=lambda key: offers[key].budget_bytes, default=None)
