"""Tensors leave a real GPU by a side stream and come back by another, while a neighbour has their memory."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from zico.heap.cuda import on_stream
from zico.swap.device_tier import DeviceTier
from zico.tiers.destinations import TierWish

MIB = 1 << 20
TURNS = 8
WISHES = {
    "memory": (TierWish("memory", 64 * MIB),),
    "compressed": (TierWish("compressed", 64 * MIB),),
}


@pytest.mark.parametrize("kind", sorted(WISHES))
def test_bytes_leave_and_return_while_a_neighbour_has_the_memory(two_jobs: tuple[Any, Any], kind: str) -> None:
    """All of the budget is filled, leaves, is filled by the neighbour, and comes back; the job reads what it wrote."""
    job, neighbour = two_jobs
    size_bytes = int(job.member.header["budget_regions"]) * job.member.region_bytes
    with contextlib.ExitStack() as undo:
        tier = DeviceTier(job.heap, WISHES[kind], block_bytes=1 << 18)
        undo.callback(tier.close)
        for turn in range(1, TURNS + 1):
            address = job.allocate(size_bytes)
            assert address > 0
            job.fill(address, turn, size_bytes)
            ticket = tier.put(address, size_bytes, 0)
            assert ticket >= 0
            job.free(address)
            on_stream.settle(job.record[0])
            taken = neighbour.allocate(size_bytes)
            assert taken > 0
            neighbour.fill(taken, 255 - turn, size_bytes)
            neighbour.free(taken)
            on_stream.settle(neighbour.record[0])
            back = int(on_stream.allocate_on(job.record[0], size_bytes, tier.incoming))
            assert back > 0
            assert tier.get(ticket, back, size_bytes) == 0
            on_stream.record_stream(job.record[0], back, job.stream)
            tier.follow(job.stream, tier.fence_of(ticket))
            assert (job.read(back, size_bytes) == turn).all()
            on_stream.free_on(job.record[0], back, tier.incoming)
            on_stream.settle(job.record[0])
            tier.drop(ticket)
        for one in two_jobs:
            assert one.record[0]["streams"]["failures"] == one.record[0]["bad_frees"] == 0
        assert job.member.header["peak_granted"] == job.member.header["budget_regions"]


def test_rates_are_those_of_the_bus(two_jobs: tuple[Any, Any]) -> None:
    """Pinned memory is copied at a rate that a bus can have, in either direction."""
    job, _ = two_jobs
    with contextlib.ExitStack() as undo:
        tier = DeviceTier(job.heap, WISHES["memory"])
        undo.callback(tier.close)
        (rates,) = tier.rates()
    for bytes_per_s in (rates.out_bytes_per_s, rates.in_bytes_per_s):
        assert 1e8 < bytes_per_s < 1e12
    assert 0 < max(rates.out_latency_s, rates.in_latency_s) < 1
