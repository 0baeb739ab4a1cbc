"""A broker process, and processes that are members of its pool."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from zico.broker.client import BrokerClient, Membership

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from zico.broker.protocol import messages as m

MIB = 1 << 20
REGION_BYTES = 4 * MIB
N_REGIONS = 16
BUDGET_BYTES = N_REGIONS * REGION_BYTES
PATIENCE_S = 300
"""For compiling on a machine that has never run this; seconds otherwise."""


# -- the broker ------------------------------------------------------------------------------------


class Broker:
    """A broker process on a socket of its own."""

    def __init__(self, directory: Path, *options: str, under: Sequence[str] = ()) -> None:
        """Start it, by a command if one is given; ``wait_ready`` says when it listens."""
        self.socket = directory / "zico" / "s"
        self.record = directory / "record.npz"
        self.process = start_python(
            "-m", "zico.broker",
            "--socket", str(self.socket),
            "--budget-bytes", str(BUDGET_BYTES),
            "--region-bytes", str(REGION_BYTES),
            "--record", str(self.record),
            "--no-warm",
            *options,
            under=under,
        )  # fmt: skip
        self.client = BrokerClient(self.socket, deadline_s=20)

    def wait_ready(self) -> None:
        """Wait until it has said that it listens."""
        assert read_line(self.process) == "ready"

    def until(self, condition: Callable[[m.Status], bool], within_s: float) -> m.Status:
        """Return the first status that meets the condition; fail if none does in time."""
        end_s = time.monotonic() + within_s
        while not condition(status := self.client.status()):
            assert time.monotonic() < end_s, f"still {status}"
        return status

    def names(self) -> list[str]:
        """Return the members' names."""
        return [job.name for job in self.client.status().jobs]

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send the signal; return the exit code and what it wrote on stderr."""
        self.client.close()
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors


def start_python(*arguments: str, under: Sequence[str] = (), **variables: str) -> subprocess.Popen[str]:
    """Start Python, its three streams piped, with these variables in its environment."""
    return subprocess.Popen(
        [*under, sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )


def read_line(process: subprocess.Popen[str]) -> str:
    """Return the process's next line; fail with its stderr if it ends or says nothing in time."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    line = b""
    while not line.endswith(b"\n"):  # byte by byte: what a stream has read ahead, ``select`` does not see
        byte = os.read(descriptor, 1) if select.select([descriptor], [], [], PATIENCE_S)[0] else b""
        if not byte:
            process.kill()
            pytest.fail(f"said nothing: {process.communicate()[1]}")
        line += byte
    return line.decode().strip()


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Write a line to the process's stdin."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def kill(process: subprocess.Popen[str]) -> None:
    """End the process and close its streams."""
    process.kill()
    process.communicate(timeout=20)


# -- jobs ------------------------------------------------------------------------------------------


JOB_SCRIPT = """
import os, sys
from pathlib import Path
import numpy as np
from zico.broker.client import BrokerClient
from zico.pool import boundaries, regions, results
from zico.pool.table import PoolTable

def say(*words):
    print(*words, flush=True)

membership = BrokerClient(Path(sys.argv[1])).join(sys.argv[2], "torch")
pool = PoolTable.join_pool(membership.memory_fd, membership.table_fd, membership.notify_fd, membership.job)
me = pool.member[0]
say("joined", membership.job)
for line in sys.stdin:
    command, *numbers = line.split()
    if command == "hold":
        wanted = np.full(int(numbers[0]), -1, np.int32)
        say("held", int(regions.acquire(me, wanted, len(wanted), regions.HOST_SLOT) == results.GRANTED))
    elif command == "iterate":
        if not boundaries.finish_iteration(me, 0):
            say("boundary")
            while boundaries.await_admission(me) != results.ADMITTED:
                pass
        boundaries.begin_iteration(me)
        say("began")
    elif command == "fork":
        child = os.fork()
        if not child:
            sys.stdin.read()
            os._exit(0)
        say("child", child)
    elif command == "exec":
        os.execv(sys.executable, [sys.executable, "-c", os.environ["JOB_SCRIPT"], *sys.argv[1:]])
    elif command == "leave":
        membership.leave()
        say("left")
"""


@contextlib.contextmanager
def job(broker: Broker, name: str, hold: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Run a job that holds so many regions; it is killed on the way out."""
    process = start_python("-c", JOB_SCRIPT, str(broker.socket), name, JOB_SCRIPT=JOB_SCRIPT)
    try:
        assert read_line(process).startswith("joined")
        if hold:
            tell(process, f"hold {hold}")
            assert read_line(process) == "held 1"
        yield process
    finally:
        kill(process)


def close_all(membership: Membership) -> None:
    """Leave and close what came with the membership."""
    membership.leave()
    for fd in (membership.memory_fd, membership.table_fd, membership.notify_fd):
        os.close(fd)
