"""Two jobs hold equal frozen memory once on a real GPU: mapped to be read, and a job's own before it writes."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.frozen_membership import session_of

from zico.broker.frozen import FrozenMemory
from zico.job.frozen import Bytes
from zico.job.frozen_device import DeviceSharing


def test_equal_memory_is_held_once_and_written_by_one(two_jobs: tuple[Any, Any]) -> None:
    """The driver maps regions to be read; what is written is another region at the same address."""
    region_bytes = two_jobs[0].member.region_bytes
    size_bytes = region_bytes - 100
    expected = np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)
    shared = FrozenMemory(two_jobs[0].member)
    parts: list[Any] = []
    sharings = []
    for job in two_jobs:
        place = int(job.member.member[0]["job"])
        sharing = DeviceSharing(session_of(shared, place, job.heap, job.member))
        sharings.append(sharing)
        address = job.allocate(size_bytes)
        job.driver.put(address, expected.ctypes.data, size_bytes)

        def move(bytes_: Bytes, part: Any, job: Any = job) -> bool:  # noqa: ANN401 - a Part and a Job
            parts.append(part)
            job.free(bytes_.address)
            return True

        sharing.share([Bytes(address, size_bytes, None)], move)
    assert len(parts) == 2, "both share"
    one, other = parts
    assert one.content.held.regions == other.content.held.regions
    assert shared.regions == 1
    reading = [job.read(part.address, size_bytes) for job, part in zip(two_jobs, parts, strict=True)]
    assert all((found == expected).all() for found in reading)
    assert one.content.own()
    two_jobs[0].fill(one.address, 7, size_bytes)
    assert (two_jobs[0].read(one.address, size_bytes) == 7).all()
    assert (two_jobs[1].read(other.address, size_bytes) == expected).all()
    assert shared.regions == 2
    del one, other
    parts.clear()
    for sharing in sharings:
        sharing.tell()
    assert shared.regions == 0
