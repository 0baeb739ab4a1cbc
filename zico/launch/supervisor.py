"""Run jobs beside one broker, from the first process to the last.

Theory of operation: one asyncio loop in the main thread. Each job is a task that ends when nothing of the job's session
is left. Signals are forwarded to all jobs, then followed by SIGTERM and SIGKILL as each deadline passes; a second
signal kills at once. Whatever way ``supervise`` is left, every process is dead and the run directory is gone; if this
process itself is killed, the guardian does the same.

Known limitations: a job's process that makes a session of its own (``setsid``) is not followed. While our own standard
output is blocked by its reader, nothing here runs; a third signal breaks that.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any, cast

from zico.broker.lingering import daemon_at
from zico.config import HOST
from zico.errors import CommandError
from zico.launch import signals
from zico.launch.broker import BrokerProcess
from zico.launch.devices import device_variables
from zico.launch.environment import job_environment
from zico.launch.jobs import Job
from zico.launch.listener import Listener, Stream
from zico.launch.mps import MpsDaemon
from zico.launch.processes import FIRST_EXIT_CODE_OF_A_SIGNAL
from zico.launch.rundir import run_directory
from zico.launch.ward import Ward
from zico.paths import CACHE_VARIABLE, cache_root
from zico.report.model import JobProgress, Snapshot

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from pathlib import Path

    from zico.broker.messages import Report, Status
    from zico.config import Settings
    from zico.launch.commands import Command

TICK_S = 0.25
COMPLAINT_PREFIX = b"zico: "
"""How Zico inside a job begins its lines (``zico.autoload.complain``)."""
_MAY_PAGE = ("page", "auto")
TIME_SLICES = "the jobs take turns on the GPU; with --mps their kernels overlap"
TERM_S = 2.0
"""How long a job may take after the SIGTERM that follows an unheeded SIGINT."""


@dataclasses.dataclass(frozen=True)
class JobOutcome:
    """How one command ended."""

    command: Command
    exit_code: int
    wall_s: float
    ended_s: float
    """On the monotonic clock."""
    complaint: str = ""
    """What Zico inside the job last said to its standard error, why it is not active for instance."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    jobs: tuple[JobOutcome, ...]
    report: Report | None
    """The broker's figures; ``None`` if it had ended before."""

    @property
    def exit_code(self) -> int:
        """Return 0 if every job's is, else that of the job which failed first."""
        failed = [job for job in self.jobs if job.exit_code != 0]
        return min(failed, key=lambda job: job.ended_s).exit_code if failed else 0


def supervise(
    commands: Sequence[Command],
    settings: Settings,
    listener: Listener,
    *,
    environ: Mapping[str, str] | None = None,
    record_to: Path | None = None,
) -> Outcome:
    """Run all commands to their ends and return how they ended. Call it in the main thread.

    Args:
        commands: At least one.
        settings: Checked settings.
        listener: Is told of output, messages and progress.
        environ: The jobs' environment before Zico adds to it; ours by default.
        record_to: Where to copy the broker's record, if it wrote one.

    Raises:
        CommandError: The broker or the MPS daemon could not start, or a signal came before the jobs were started.
        ConfigError: There is no MPS here, or no directory for machine code.
    """
    with run_directory() as run_dir:
        supervisor = Supervisor(commands, settings, listener, os.environ if environ is None else environ)
        outcome = asyncio.run(supervisor.run(run_dir))
        record = supervisor.record
        if record_to is not None and record is not None and record.exists():
            shutil.copyfile(record, record_to)
        return outcome


class Supervisor:
    """One run in progress."""

    def __init__(
        self, commands: Sequence[Command], settings: Settings, listener: Listener, environ: Mapping[str, str]
    ) -> None:
        """Start nothing yet."""
        self.record: Path | None = None
        self._settings = settings
        self._listener = listener
        # Jobs get the directory that passed the check, so that a refusal is reported once and not by every job.
        self._environ = {**environ, **device_variables(settings), CACHE_VARIABLE: str(cache_root())}
        self._jobs = [Job(command) for command in commands]
        self._complaints: dict[str, str] = {}
        self._signal: signal.Signals | None = None
        self._interrupted = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._started_s = time.monotonic()

    async def run(self, run_dir: Path) -> Outcome:
        """Run everything; see ``supervise``."""
        with signals.forwarded_to(self._heard), contextlib.ExitStack() as stack:
            ward = Ward(run_dir)
            stack.callback(ward.close)
            mps_pipes = self._share_device(run_dir, ward, stack)
            pages = any(job.command.wish.save in _MAY_PAGE for job in self._jobs)
            broker = BrokerProcess(
                run_dir, self._settings, ward, self._listener.problem, pages=pages, mps_pipes=mps_pipes
            )
            self.record = broker.record
            stack.callback(broker.close, ward)
            stack.callback(self._kill, ward)
            await self._unless_interrupted(broker.wait_ready())
            report = await self._run_jobs(broker, ward)
            await broker.end()
        return Outcome(tuple(self._outcome(job) for job in self._jobs), report)

    def _share_device(self, run_dir: Path, ward: Ward, stack: contextlib.ExitStack) -> Path | None:
        """Let the jobs' kernels overlap on a GPU if that is wanted; say how they share it otherwise.

        Returns:
            The directory of the MPS daemon that was started for the jobs, if one was.
        """
        if self._settings.mps.value:
            daemon = MpsDaemon(run_dir, self._environ)
            stack.callback(daemon.close, ward)
            daemon.start(ward)
            self._environ |= daemon.variables
            return daemon.pipes
        if self._settings.device.value != HOST:
            found = daemon_at(self._environ)
            self._listener.message(TIME_SLICES if found is None else f"jobs share the GPU by the MPS daemon at {found}")
        return None

    async def _run_jobs(self, broker: BrokerProcess, ward: Ward) -> Report | None:
        """Run all jobs to their ends and return the broker's figures of them."""
        self._start(broker.socket, ward)
        self._begin_ending()
        helpers = [asyncio.create_task(self._tick(broker)), asyncio.create_task(self._watch(broker))]
        try:
            grace_s = self._settings.grace_s.value
            async with asyncio.TaskGroup() as group:
                for job in self._jobs:
                    if job.living:
                        group.create_task(self._run_one(job, ward, grace_s))
        finally:
            await _cancelled([*helpers, self._ending])
        self._listener.progress(self._snapshot(broker.status()))
        return broker.report()

    def _start(self, socket: Path, ward: Ward) -> None:
        alone = len(self._jobs) == 1
        for job in self._jobs:
            environ = job_environment(self._environ, socket, job.command.name, job.command.share, job.command.wish)
            problem = job.start(environ, takes_input=alone)
            if problem is not None:
                self._listener.problem(problem)
            elif job.child is not None:
                ward.add(job.child.pid)

    async def _run_one(self, job: Job, ward: Ward, grace_s: float) -> None:
        left = await job.run(self._pass_on, ward, grace_s)
        name = job.command.name
        if left:
            self._listener.problem(f"{name} left {left} processes behind; Zico has ended them")
        self._listener.message(f"{name} ended with exit code {job.exit_code} after {job.wall_s:.1f} s")

    async def _tick(self, broker: BrokerProcess) -> None:
        """Show progress and pass held output on, until cancelled."""
        due_s = 0.0
        while True:
            for job in self._jobs:
                job.expire_output()
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + self._listener.interval_s
                self._listener.progress(self._snapshot(broker.status()))
            await asyncio.sleep(TICK_S)

    async def _watch(self, broker: BrokerProcess) -> None:
        """Say so if the broker ends before the jobs do, until cancelled."""
        await broker.ended()
        self._listener.problem("the broker has ended: the jobs keep their memory and run on without coordination")

    def _snapshot(self, status: Status | None) -> Snapshot:
        elapsed_s = time.monotonic() - self._started_s
        jobs = tuple(JobProgress(job.command.name, job.exit_code) for job in self._jobs)
        return Snapshot(elapsed_s=elapsed_s, budget_bytes=self._settings.budget_bytes.value, jobs=jobs, status=status)

    async def _unless_interrupted(self, work: Coroutine[Any, Any, None]) -> None:
        """Await ``work``, or raise as soon as a signal comes."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._interrupted.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._signal is not None:
                raise CommandError(f"ended by {self._signal.name}", FIRST_EXIT_CODE_OF_A_SIGNAL + self._signal)
            tasks[0].result()
        finally:
            await _cancelled(tasks)

    def _outcome(self, job: Job) -> JobOutcome:
        complaint = self._complaints.get(job.command.name, "")
        return JobOutcome(job.command, cast("int", job.exit_code), job.wall_s, job.ended_s, complaint)

    def _heard(self, signum: signal.Signals) -> None:
        """Begin to end the jobs; the second time, kill them."""
        if self._signal is not None:
            self._send(signal.SIGKILL)
            return
        self._signal = signum
        self._interrupted.set()
        self._begin_ending()

    def _begin_ending(self) -> None:
        """End the jobs if a signal has come, be it before they were started."""
        if self._signal is not None and self._ending is None and any(job.living for job in self._jobs):
            self._listener.message(f"{self._signal.name}: ending the jobs; a second signal kills them")
            self._ending = asyncio.create_task(self._end_jobs(self._signal))

    def _pass_on(self, name: str, stream: Stream, lines: list[bytes]) -> None:
        """Give a job's lines to the listener; end the run if nobody reads them any more."""
        for line in lines:
            if stream is Stream.STDERR and line.startswith(COMPLAINT_PREFIX):
                self._complaints[name] = line.removeprefix(COMPLAINT_PREFIX).decode(errors="replace")
        try:
            self._listener.output(name, stream, lines)
        except BrokenPipeError:
            if self._signal is None:
                self._heard(signal.SIGTERM)

    async def _end_jobs(self, signum: signal.Signals) -> None:
        """Forward ``signum``; what has not ended by its deadline gets SIGTERM, then SIGKILL."""
        self._send(signum)
        await asyncio.sleep(self._settings.grace_s.value)
        if signum != signal.SIGTERM:
            self._send(signal.SIGTERM)
            await asyncio.sleep(TERM_S)
        self._send(signal.SIGKILL)

    def _send(self, signum: int) -> None:
        for job in self._jobs:
            if job.child is not None and job.living:
                job.child.send(signum)

    def _kill(self, ward: Ward) -> None:
        """Kill what still lives; normally nothing does."""
        for job in self._jobs:
            if job.child is not None and job.living:
                ward.remove(job.child.pid)
                job.child.kill()


async def _cancelled(tasks: Sequence[asyncio.Future[Any] | None]) -> None:
    """Cancel the tasks and wait until they have noticed."""
    found = [task for task in tasks if task is not None]
    for task in found:
        task.cancel()
    await asyncio.gather(*found, return_exceptions=True)
