"""A paused job's memory leaves a real GPU and comes back: a whole heap, and a neighbour that takes the budget."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from gpu.test_next_tier import OLDEST
from support.harness import until

from zico.heap import allocator

PATIENCE_S = 20.0


def test_a_paused_jobs_memory_is_anothers_meanwhile(two_jobs: tuple[Any, Any]) -> None:
    """All bytes are at their addresses afterwards, and the neighbour had all of the budget."""
    job, neighbour = two_jobs
    if job.driver.facts.driver_version < OLDEST:
        pytest.xfail("the driver is older than CUDA 12.2")
    header, region_bytes = job.member.header, job.member.region_bytes
    sizes = (3 * region_bytes, 70_000, 100)
    addresses = [job.allocate(size_bytes) for size_bytes in sizes]
    for byte, (address, size_bytes) in enumerate(zip(addresses, sizes, strict=True), 1):
        job.fill(address, byte, size_bytes)
    place = int(job.member.member[0]["job"])
    record = job.member.jobs[place]
    n = int(record["held"])
    neighbour.member.pause(place, move=True)
    thread = threading.Thread(target=allocator.mark, args=(job.record[0],))
    thread.start()
    try:
        until(lambda: int(record["evicted"]) == n, PATIENCE_S, "everything is away")
        assert int(record["held"]) == 0
        taken = neighbour.allocate(int(header["budget_regions"]) * region_bytes)
        neighbour.fill(taken, 255, int(header["budget_regions"]) * region_bytes)
        assert taken > 0
        neighbour.free(taken)
    finally:
        neighbour.member.resume(place)
        until(lambda: neighbour.member.admit(place) or not thread.is_alive(), PATIENCE_S, "the job goes on")
        thread.join(PATIENCE_S)
    assert (int(record["evicted"]), int(record["held"])) == (0, n)
    for byte, (address, size_bytes) in enumerate(zip(addresses, sizes, strict=True), 1):
        assert (job.read(address, size_bytes) == byte).all()
    for address in addresses:
        job.free(address)
    assert (job.record[0]["streams"]["failures"], job.record[0]["bad_frees"]) == (0, 0)
