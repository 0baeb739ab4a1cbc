"""A job that holds what another one held, and when, and waits where that one computed.

On a shared machine a processor is taken away for half a second now and then, and iterations of
equal work take from one to two times as long. Waiting does not: so what the broker, the allocator
and the scheduler make of certain jobs is measured apart from what the machine's neighbours do.
Processes, requests and memory are real, only work is not.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

import zico

if TYPE_CHECKING:
    from collections.abc import Iterator

SPARE_BYTES = 4096
"""Of a region: what a tensor carries besides its elements."""
_BLOCKED_S = 0.001  # what takes longer than this was a wait; everything else is part of the iteration's work


class Paced:
    """Tensors of a region each, as many as a curve says; it falls behind only where it is made to wait."""

    def __init__(self, region_bytes: int) -> None:
        """Hold nothing yet."""
        self._bytes = region_bytes - SPARE_BYTES
        self._held: list[torch.Tensor] = []
        self._due_s = time.monotonic()

    def hold(self, regions: int) -> None:
        """Hold so many; waits until there is memory."""
        del self._held[regions:]
        with self.waiting():
            for _ in range(regions - len(self._held)):
                self._held.append(torch.empty(self._bytes, dtype=torch.uint8))

    def work(self, seconds: float) -> None:
        """Let so much of the iteration go by."""
        self._due_s += seconds
        time.sleep(max(0.0, self._due_s - time.monotonic()))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Put off everything behind it by as long as the body is made to wait."""
        began_s = time.monotonic()
        yield
        waited_s = time.monotonic() - began_s
        if waited_s > _BLOCKED_S:
            self._due_s += waited_s


def main() -> None:
    """Go through the curve again and again, a line for each iteration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "job", type=Path, help="JSON: region_bytes; curve, [seconds, regions] rows; iteration_s; jitter"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop this long after the start")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write an empty list here: there are none")
    options = parser.parse_args()
    job = json.loads(options.job.read_text())
    ends_s = [t_s for t_s, _ in job["curve"][1:]] + [job["iteration_s"]]
    steps = [(regions, end_s - t_s) for (t_s, regions), end_s in zip(job["curve"], ends_s, strict=True)]
    uneven = np.random.default_rng(options.seed)
    paced = Paced(job["region_bytes"])
    until_s = time.monotonic() + options.seconds
    for number in itertools.count(1):
        factor = uneven.uniform(1 - job["jitter"], 1 + job["jitter"])
        for regions, seconds in steps:
            paced.hold(regions)
            paced.work(seconds * factor)
        paced.hold(job["persistent"])
        with paced.waiting():
            zico.step()
        print(f"iteration {number} ", flush=True)
        if number == options.iterations or time.monotonic() >= until_s:
            break
    if options.losses:
        options.losses.write_text("[]")


if __name__ == "__main__":
    main()
