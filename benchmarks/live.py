"""Training jobs that run on while what they may have changes: one budget after the other, or one job stopped.

A machine's speed drifts by a third within minutes, and a run's figures with it. Where the *same
processes* go through one condition after the other, seconds apart, again and again, a condition's
figure over that of its neighbour in time says what the condition did.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import common
import numpy as np
import together

from zico.base.errors import ZicoError
from zico.broker.client import BrokerClient
from zico.report.files import RECORD_NAME
from zico.report.model import Record, read_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from together import Job

_LOOK_S = 0.2
_STEAL = 7  # the column of /proc/stat (proc(5)): time that the hypervisor gave to others


class LiveRun:
    """One ``zico run`` of some jobs with a socket of its own, whose budget is changed as it goes."""

    def __init__(
        self,
        jobs: Sequence[Job],
        budgets: Sequence[str],
        seconds: float,
        warm_up: int,
        policy: str = "zico",
        region: str = "4MiB",
    ) -> None:
        """Start nothing yet.

        Args:
            jobs: To run together.
            budgets: One after the other, as for ``--budget``.
            seconds: How long each budget lasts; the first one from when the jobs are warm.
            warm_up: Iterations after which a job is warm.
            policy: That decides who starts.
            region: Size of the pool's regions.
        """
        self._jobs = jobs
        self._budgets = budgets
        self._seconds, self._warm_up, self._policy = seconds, warm_up, policy
        self._region = region
        self.stolen: list[float] = []
        """Of the processors' time under each budget, what the machine's neighbours had."""
        self._deadline_s = time.monotonic() + len(budgets) * seconds + together.MARGIN_S

    def record_to(self, report: Path) -> Record:
        """Run it and return the record, which with the report lies in ``report`` then."""
        with contextlib.ExitStack() as stack:
            runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zb-")))
            process = stack.enter_context(self._started(runtime, report))
            socket = self._await(process, lambda: next(iter(runtime.glob("zico/run-*/*.sock")), None))
            with BrokerClient(socket) as client:
                self._await(process, lambda: self._is_warm(client))
            for index, budget in enumerate(self._budgets):
                if index:
                    self._limit(socket, budget)
                before = _processor_ticks()
                self._pass(process, self._seconds)
                ticks = _processor_ticks() - before
                self.stolen.append(float(ticks[_STEAL] / ticks.sum()))
            process.terminate()
            process.wait(timeout=together.END_S + together.MARGIN_S)
        return read_record(report / RECORD_NAME)

    @contextlib.contextmanager
    def _started(self, runtime: Path, report: Path) -> Iterator[subprocess.Popen[bytes]]:
        names = [option for job in self._jobs for option in ("--name", job.name)]
        commands = [shlex.join(job.argv(None, *together.ENDLESS)) for job in self._jobs]
        options = ("--policy", self._policy, "--region", self._region, "--budget", self._budgets[0])
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                (*common.ZICO, "run", "--quiet", "--report", str(report), *options, *names, *commands),
                cwd=common.ROOT,
                env=os.environ | {"XDG_RUNTIME_DIR": str(runtime), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            try:
                yield process
            except BaseException:
                errors.seek(0)
                sys.stderr.buffer.write(errors.read())
                raise
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=together.END_S)
                process.kill()

    def _await(self, process: subprocess.Popen[bytes], look: Any) -> Any:  # noqa: ANN401 - what it looks for
        """Return the first truthy answer."""
        while not (found := look()):
            if time.monotonic() > self._deadline_s:
                message = "the jobs were not warm in time"
                raise TimeoutError(message)
            self._pass(process, _LOOK_S)
        return found

    def _pass(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        """Let time pass; the run must not end meanwhile."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=seconds)
            raise subprocess.CalledProcessError(code, process.args)

    def _is_warm(self, client: BrokerClient) -> bool:
        with contextlib.suppress(ZicoError, OSError):
            jobs = client.status().jobs
            return len(jobs) == len(self._jobs) and min(job.iterations for job in jobs) >= self._warm_up
        return False

    @staticmethod
    def _limit(socket: Path, budget: str) -> None:
        command = (*common.ZICO, "limit", "--socket", str(socket), budget)
        subprocess.run(command, cwd=common.ROOT, check=True, timeout=together.END_S, stderr=subprocess.DEVNULL)


def _processor_ticks() -> NDArray[np.int64]:
    """Return how long all processors were used for what since the start, as ``/proc/stat`` has it."""
    first = Path("/proc/stat").read_text().splitlines()[0]
    return np.array(first.split()[1 : 2 + _STEAL], np.int64)


class Beside(NamedTuple):
    """Iterations per second of each job, once for each time that the condition came round."""

    together: list[list[float]]
    alone: list[list[float]]


def alone_and_together(jobs: Sequence[Job], seconds: float, settle_s: float, rounds: int, warm_up: int) -> Beside:
    """Run the jobs as plain processes, without Zico: all of them, then each with the others stopped, again and again.

    Args:
        jobs: To run.
        seconds: How long each condition lasts.
        settle_s: Of that, left out at its beginning.
        rounds: How often each condition comes round.
        warm_up: Iterations of each job before the first one.
    """
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_plain(job)) for job in jobs]
        lines = _Lines(processes)
        lines.read_until(lambda: min(map(len, lines.ends_s)) >= warm_up, together.MARGIN_S)
        beside = Beside([], [])
        for _ in range(rounds):
            beside.together.append(lines.rates(seconds, settle_s))
            alone = []
            for i, process in enumerate(processes):
                others = [other for other in processes if other is not process]
                for other in others:
                    other.send_signal(signal.SIGSTOP)
                alone.append(lines.rates(seconds, settle_s)[i])
                for other in others:
                    other.send_signal(signal.SIGCONT)
            beside.alone.append(alone)
        return beside


@contextlib.contextmanager
def _plain(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        job.argv(None, *together.ENDLESS),
        cwd=common.ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=together.END_S)
        cast("IO[bytes]", process.stdout).close()


class _Lines:
    """Notes when each process said that an iteration has ended."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.ends_s: list[list[float]] = [[] for _ in processes]
        self._rest = [b"" for _ in processes]
        self._selector = selectors.DefaultSelector()
        for i, process in enumerate(processes):
            self._selector.register(cast("IO[bytes]", process.stdout), selectors.EVENT_READ, i)

    def read_until(self, ended: Any, within_s: float) -> None:  # noqa: ANN401 - tells whether it is enough
        deadline_s = time.monotonic() + within_s
        while not ended():
            if time.monotonic() > deadline_s:
                message = f"the jobs did not get so far within {within_s:.0f} s"
                raise TimeoutError(message)
            for key, _ in self._selector.select(_LOOK_S):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    message = "a job ended too early"
                    raise ValueError(message)
                *lines, self._rest[key.data] = (self._rest[key.data] + chunk).split(b"\n")
                self.ends_s[key.data] += [time.monotonic()] * sum(map(together.tells_end, lines))

    def rates(self, seconds: float, settle_s: float) -> list[float]:
        """Let the jobs run for so long and return their rates; 0 for one that stands still."""
        begin_s, end_s = time.monotonic() + settle_s, time.monotonic() + seconds
        self.read_until(lambda: time.monotonic() >= end_s, 2 * seconds)
        return [rate_of(ends, begin_s, end_s) for ends in self.ends_s]


def rate_of(ends_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """Return iterations per second between the first and the last that ended in a span of time; 0 if too few did."""
    inside = [t_s for t_s in ends_s if begin_s <= t_s < end_s]
    return (len(inside) - 1) / float(np.ptp(inside)) if len(inside) > 1 else 0.0
