"""Jobs that die while a GPU may still do their work: their regions are kept from others until their context has ended.

On the twin a named pipe stands for the driver's files, and a process for the device: it does what
is queued as long as somebody has the pipe open.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from process.support.cuda_twin import Process, compile_once, environment
from process.support.cuda_twin_broker import Broker
from process.support.cuda_twin_trainers import MIB, N_REGIONS, REGION_BYTES, TRAINER, WITHOUT_KERNELS, becomes

if TYPE_CHECKING:
    from collections.abc import Iterator

PYTHON, C_CODE = 0, 1
DEADLINE_S = 20.0
N_FILES = 200
QUICK = "from zico.broker import lingering; lingering.LINGER_NS = 300_000_000"


@contextlib.contextmanager
def started(more: str = "") -> Iterator[Broker]:
    """Give a broker of 16 regions whose processes run ``more`` first."""
    compile_once()
    with tempfile.TemporaryDirectory(prefix="zt-") as directory:
        site = Path(directory) / "site"
        environ = environment(site, more, total_bytes=256 * MIB, attributes=WITHOUT_KERNELS)
        made = Broker(Path(directory), environ, "--budget-bytes", str(N_REGIONS * REGION_BYTES))
        with made.process, made.client:
            assert made.process.line() == "ready"
            yield made


@contextlib.contextmanager
def job_with_worker(broker: Broker, how: int, **more: str) -> Iterator[tuple[Process, int, Path]]:
    """Give a job that holds three regions and has forked a child that lives on; and what stands for its device."""
    device = broker.directory / "device"
    os.mkfifo(device)
    environ = {"ZICO_SOCKET": str(broker.socket), "ZICO_JOB": "a", "DEVICE_FILE": str(device), **more}
    with Process(TRAINER, **broker.environ, **environ) as job:
        assert job.line() == "joined"
        assert job.ask("alloc 3 7") == "allocated"
        becomes(job, "is_done", "True")
        worker = int(job.ask(f"fork_worker {how}"))
        try:
            yield job, worker, device
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def appears(path: Path) -> None:
    """Wait until there is a file."""
    end_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end_s, f"no {path.name}: {list(path.parent.iterdir())}"
        select.select([], [], [], 0.002)


def test_regions_are_kept_while_a_child_holds_the_context() -> None:
    """Invariant 5: work queued by a dead job comes to its own regions; they are free when its context has ended."""
    with started() as broker, job_with_worker(broker, C_CODE) as (job, worker, device):
        assert job.ask("queue 9 500") == "queued"
        job.process.kill()
        status = broker.status(lambda status: status.jobs[0].state == "leaving", within_s=8)
        assert status.granted_bytes == 3 * REGION_BYTES
        appears(device.with_name("device-written"))
        assert broker.client.status().granted_bytes == 3 * REGION_BYTES
        os.kill(worker, signal.SIGKILL)
        assert broker.status(lambda status: not status.jobs, within_s=8).granted_bytes == 0


def test_a_child_forked_by_python_lets_go_of_the_context() -> None:
    """Invariant 5: loader workers close the driver's files, so the dead job's context and queued work end with it."""
    with started() as broker, job_with_worker(broker, PYTHON) as (job, worker, device):
        assert job.ask("queue 9 10000") == "queued"
        job.process.kill()
        assert broker.status(lambda status: not status.jobs, within_s=8).granted_bytes == 0
        os.kill(worker, 0)
        appears(device.with_name("device-dropped"))


def test_regions_are_kept_while_a_child_has_the_drivers_memory_mapped() -> None:
    """Invariant 5: a loader worker with a mapping of the driver's files keeps the connection, and so the regions."""
    with started() as broker:
        mapped = broker.directory / "mapped"
        mapped.write_bytes(bytes(mmap.PAGESIZE))
        with job_with_worker(broker, PYTHON, MAPPED_FILE=str(mapped)) as (job, worker, _):
            job.process.kill()
            status = broker.status(lambda status: status.jobs[0].state == "leaving", within_s=8)
            assert status.granted_bytes == 3 * REGION_BYTES
            os.kill(worker, signal.SIGKILL)
            assert broker.status(lambda status: not status.jobs, within_s=8).granted_bytes == 0


def test_a_process_whose_pidfd_says_that_it_is_dead_has_closed_its_files() -> None:
    """What the broker takes for a death comes after all closing, for many threads and files, whatever their order."""
    code = "import threading, signal; [threading.Thread(target=signal.pause, daemon=True).start() for _ in range(8)]; "
    for _ in range(5):
        pipes = [os.pipe() for _ in range(N_FILES)]
        command = [sys.executable, "-c", code + "print(flush=True); signal.pause()"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[writing for _, writing in pipes]) as process:
            for _, writing in pipes:
                os.close(writing)
            assert process.stdout is not None
            assert process.stdout.read(1) == b"\n"
            pidfd = os.pidfd_open(process.pid)
            process.kill()
            dead, _, _ = select.select([pidfd], [], [], DEADLINE_S)
            closed, _, _ = select.select([reading for reading, _ in pipes], [], [], 0)
            for one in (pidfd, *(reading for reading, _ in pipes)):
                os.close(one)
        assert (len(dead), len(closed)) == (1, N_FILES)


def test_regions_are_taken_back_at_the_deadline_with_a_sentence() -> None:
    """Invariant 7: a context that never ends keeps the memory for ``LINGER_NS``, and the broker says why."""
    with started(QUICK) as broker, job_with_worker(broker, C_CODE) as (job, worker, _):
        job.process.kill()
        assert broker.status(lambda status: not status.jobs, within_s=8).granted_bytes == 0
        os.kill(worker, 0)
        broker.process.process.terminate()
        _, errors = broker.process.finish()
    assert f"a (process {job.pid}) has ended, but a process that it has forked has its files open" in errors
    assert "its 6 MiB stay held until that ends, 0.3 s at most" in errors


def test_a_place_is_given_away_only_when_its_context_has_ended() -> None:
    """Invariant 5: a context that outlives the deadline may still set its job's counters, so nobody gets these."""

    def place() -> str:
        with Process(TRAINER, **broker.environ, ZICO_SOCKET=str(broker.socket), ZICO_JOB="b") as other:
            assert other.line() == "joined"
            return other.ask("place")

    with started(QUICK) as broker, job_with_worker(broker, C_CODE) as (job, worker, _):
        job.process.kill()
        assert broker.status(lambda status: not status.jobs, within_s=8).granted_bytes == 0
        assert place() == "1"
        os.kill(worker, signal.SIGKILL)
        assert place() == "0"


def test_a_buried_jobs_place_is_not_given_away() -> None:
    """While its regions are kept, another job trains beside it; it gets all of the memory afterwards."""
    with started() as broker, job_with_worker(broker, C_CODE) as (job, worker, _):
        job.process.kill()
        broker.status(lambda status: status.jobs[0].state == "leaving", within_s=8)
        with Process(TRAINER, **broker.environ, ZICO_SOCKET=str(broker.socket), ZICO_JOB="b") as other:
            assert other.line() == "joined"
            assert other.ask(f"alloc {N_REGIONS - 3} 1") == "allocated"
            os.kill(worker, signal.SIGKILL)
            assert other.ask("alloc 3 2") == "allocated"
            assert [job.name for job in broker.client.status().jobs] == ["b"]


@pytest.mark.parametrize("how", [PYTHON, C_CODE])
def test_a_job_that_ends_by_itself_is_no_other_case(how: int) -> None:
    """A clean end closes the process's own files; only a child that kept them keeps the regions."""
    with started() as broker, job_with_worker(broker, how) as (job, worker, _):
        assert job.process.stdin is not None
        job.process.stdin.close()
        job.process.stdin = None
        assert job.process.wait(timeout=DEADLINE_S) == 0
        if how == C_CODE:
            status = broker.status(lambda status: status.jobs[0].state == "leaving", within_s=8)
            assert status.granted_bytes == 3 * REGION_BYTES
            os.kill(worker, signal.SIGKILL)
        assert broker.status(lambda status: not status.jobs, within_s=8).granted_bytes == 0
