"""Overflow into pinned memory of the host on a real GPU: a whole heap, and a neighbour that holds the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

OLDEST = 12020
"""``cuDriverGetVersion`` of the oldest driver that maps memory of the host."""


@pytest.fixture
def jobs(two_jobs: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Return a job and a neighbour that holds all of the budget."""
    _, neighbour = two_jobs
    taken = neighbour.allocate(int(neighbour.member.header["budget_regions"]) * neighbour.member.region_bytes)
    assert taken > 0
    yield two_jobs
    neighbour.free(taken)


def test_a_job_that_nobody_can_help_goes_on(jobs: tuple[Any, Any]) -> None:
    """Its tensors are written and read by the device in the next tier, which takes nothing of the budget."""
    job, _ = jobs
    if job.driver.facts.driver_version < OLDEST:
        pytest.xfail("the driver is older than CUDA 12.2")
    assert job.heap.no_next_tier == ""
    sizes = (3 * job.member.region_bytes, 70_000, 100)
    addresses = [job.allocate(size_bytes) for size_bytes in sizes]
    assert min(addresses) - job.heap.base >= job.record[0]["spill_offset"]
    for byte, (address, size_bytes) in enumerate(zip(addresses, sizes, strict=True), 1):
        job.fill(address, byte, size_bytes)
    for byte, (address, size_bytes) in enumerate(zip(addresses, sizes, strict=True), 1):
        assert (job.read(address, size_bytes) == byte).all()
    for address in addresses:
        job.free(address)
    record = job.record[0]
    assert (record["spill"]["live_bytes"], record["streams"]["failures"], record["bad_frees"]) == (0, 0, 0)
    header = job.member.header
    assert header["peak_granted"] == header["budget_regions"]
