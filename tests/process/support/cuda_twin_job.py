"""A job in a pool on the twin: ``cuda_twin_job.py SOCKET NAME``, then orders on stdin, an answer to each on stdout."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import numpy as np

from zico.broker.client import BrokerClient
from zico.device.cuda import bindings
from zico.pool import regions, results


class Job:
    """One member that maps regions where it likes."""

    def __init__(self, path: Path, name: str) -> None:
        """Join."""
        self._membership = BrokerClient(path).join(name, "twin")
        pool = self._pool = self._membership.map_pool()
        self._window = pool.driver.reserve(pool.memory.size_bytes)

    def joined(self) -> str:
        """Say what came: the place, the device, how many descriptors, and how many files may be open."""
        membership = self._membership
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{membership.job} {membership.device.name} {len(membership.memory_fds)} {soft}"

    def _address(self, region: int) -> int:
        """Map a region at its own place in the window."""
        size_bytes = self._pool.region_bytes
        place = region * size_bytes
        self._pool.driver.map(self._window, place, self._pool.memory, place, size_bytes)
        return self._window.handle + place

    def write(self, region: int, value: int) -> str:
        """Write a value into a region, as a kernel would."""
        bindings.default_api().write(self._address(region), value.to_bytes(8, "little"))
        return "written"

    def read(self, region: int) -> str:
        """Read it back."""
        return str(int.from_bytes(bindings.default_api().read(self._address(region), 8), "little"))

    def hold(self, count: int) -> str:
        """Acquire regions; 1 is success."""
        wanted = np.full(count, -1, np.int32)
        return str(int(regions.acquire(self._pool.member[0], wanted, count, regions.HOST_SLOT) == results.GRANTED))

    def leave(self) -> str:
        """Close the connection and live on."""
        self._membership.leave()
        return "left"


def main() -> None:
    """Serve until there are no more orders."""
    job = Job(Path(sys.argv[1]), sys.argv[2])
    answer = job.joined()
    while True:
        os.write(1, f"{answer}\n".encode())
        order = sys.stdin.readline().split()
        if not order:
            return
        answer = getattr(job, order[0])(*map(int, order[1:]))


if __name__ == "__main__":
    main()
