"""A broker on a GPU of the driver's software twin, in a process of its own."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from process.support.cuda_twin import Process

from support.harness import PROCESS
from zico.broker.client import BrokerClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from zico.broker.protocol.messages import Status

MIB = 1 << 20
REGION_BYTES = 2 * MIB
N_REGIONS = 300
JOB = str(PROCESS / "cuda_twin_job.py")
SETTINGS = {"total_bytes": 1024 * MIB}


class Broker:
    """A broker on ``cuda:0`` of a twin."""

    def __init__(self, directory: Path, environ: dict[str, str], *options: str) -> None:
        """Start it."""
        self.directory = directory
        self.socket = directory / "s"
        self.environ = environ
        self.process = Process(
            "-m", "zico.broker", "--no-warm", "--policy", "none", "--device", "cuda:0", "--socket", str(self.socket),
            "--budget-bytes", str(N_REGIONS * REGION_BYTES), "--region-bytes", str(REGION_BYTES), *options,
            **environ,
        )  # fmt: skip
        self.client = BrokerClient(self.socket, 20)

    def status(self, condition: Callable[[Status], bool], within_s: float) -> Status:
        """Return the first status that meets the condition."""
        end_s = time.monotonic() + within_s
        while not condition(status := self.client.status()):
            assert time.monotonic() < end_s, f"still {status}"
        return status

    @staticmethod
    def has_moved(status: Status, name: str) -> bool:
        """Tell whether a paused job of a name has moved all that it keeps."""
        return any(job.name == name and job.away_bytes > 0 and job.held_bytes == 0 for job in status.jobs)

    @contextlib.contextmanager
    def job(self, name: str) -> Iterator[tuple[Process, str]]:
        """Give a job with what it says when it has joined."""
        with Process(JOB, str(self.socket), name, **self.environ) as job:
            yield job, job.line()
