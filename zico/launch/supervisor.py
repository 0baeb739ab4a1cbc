"""Run jobs beside one broker, from the first process to the last.

Theory of operation: one asyncio loop in the main thread. Each job is a task that ends when nothing
of the job's session is left. Signals are forwarded to all jobs, then followed by SIGTERM and
SIGKILL as each deadline passes; a second signal kills at once. Of a sweep, a queue says which job
starts next; it is asked whenever one has ended, and once in a while. Whatever way ``supervise`` is left,
every process is dead and the run directory is gone; if this process itself is killed, the guardian
does the same.

Known limitations: a job's process that makes a session of its own (``setsid``) is not followed.
While our own standard output is blocked by its reader, nothing here runs; a third signal breaks
that.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec

from zico.base.paths import CACHE_VARIABLE, cache_root
from zico.base.rundir import run_directory
from zico.base.settings import HOST, STARTING_VARIABLE
from zico.broker.protocol.messages import ProcessFigures, Report
from zico.launch.broker import READY_S, BrokerProcess, JoinedBroker
from zico.launch.devices import device_variables
from zico.launch.jobs import NOT_EXECUTABLE_CODE, NOT_FOUND_CODE, Job, Listener, Stream, job_environment
from zico.launch.queue import tells_out_of_memory
from zico.launch.watchdog import Watchdog
from zico.report.model import (
    JobFigures,
    JobProgress,
    PoolFigures,
    RunReport,
    Snapshot,
    jain_index,
    owner_of,
    read_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import FrameType

    from zico.base.settings import Settings
    from zico.broker.protocol.messages import JobReport, PoolReport, Status
    from zico.launch.broker import RunBroker
    from zico.launch.jobs import Command
    from zico.launch.queue import Queue
    from zico.report.model import Record


# -- join what the supervisor saw of each command with the broker's figures ------------------------

NEVER_JOINED = "no framework was imported"
NEVER_ITERATED = "Zico saw no iteration end"
NOT_STARTED = "was not started"
BROKER_GONE = "there are no figures: the broker did not answer"


def run_report(outcome: Outcome, settings: Settings) -> RunReport:
    """Return the figures of a run that has ended. The first process of a job that joined stands for the job."""
    members = outcome.report.jobs if outcome.report else ()
    names = {job.command.name for job in outcome.jobs}
    missing = NEVER_JOINED if outcome.report else BROKER_GONE
    jobs = tuple(
        _job_figures(job, [member for member in members if owner_of(member.name, names) == job.command.name], missing)
        for job in outcome.jobs
    )
    return RunReport(
        device=settings.device.value,
        policy=settings.policy.value,
        budget_bytes=settings.budget_bytes.value,
        budget_origin=settings.budget_bytes.origin,
        pool=_pool_figures(outcome.report.pool if outcome.report else None, members, settings),
        jobs=jobs,
    )


def _job_figures(job: JobOutcome, members: Sequence[JobReport], missing: str) -> JobFigures:
    name, command = job.command.name, job.command.text
    if not members:
        not_started = job.wall_s == 0.0 and job.exit_code in {NOT_FOUND_CODE, NOT_EXECUTABLE_CODE}
        note = NOT_STARTED if not_started else job.complaint or missing
        return JobFigures(name=name, command=command, exit_code=job.exit_code, wall_s=job.wall_s, note=note)
    first, *others = members
    return JobFigures(
        **_figures(first) | {"name": name},
        command=command,
        exit_code=job.exit_code,
        wall_s=job.wall_s,
        weight=first.share.weight,
        priority=first.share.priority,
        slo=first.share.slo,
        note="" if first.iterations else NEVER_ITERATED,
        other_processes=tuple(
            ProcessFigures(**_figures(other) | {"name": f"{name}.{number}"}) for number, other in enumerate(others, 2)
        ),
    )


def _figures(member: JobReport) -> dict[str, Any]:
    """Return what a run's report tells of a member as the broker tells it."""
    return {field: getattr(member, field) for field in ProcessFigures.__struct_fields__}


def _pool_figures(pool: PoolReport | None, members: Sequence[JobReport], settings: Settings) -> PoolFigures:
    if pool is None:
        return PoolFigures(region_bytes=settings.region_bytes.value)
    return PoolFigures(
        **msgspec.structs.asdict(pool),
        sum_of_job_peaks_bytes=sum(member.peak_bytes for member in members),
        jain_index=_fairness(members),
    )


def _fairness(members: Sequence[JobReport]) -> float | msgspec.UnsetType:
    shares = [member.normalised for member in members]
    known = [share for share in shares if isinstance(share, float)]
    return jain_index(known) if known and len(known) == len(shares) else msgspec.UNSET


# -- signals as events of the running loop, put back as they were afterwards -----------------------

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_UNHEARD = 2
"""More signals than this while the loop does not run (a blocked terminal, say) break it by ``KeyboardInterrupt``."""


@contextmanager
def forwarded_to(heard: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call ``heard`` in the running loop for each signal; those that are ignored stay so (``nohup``)."""
    loop = asyncio.get_running_loop()
    unheard = 0

    def deliver(signum: signal.Signals) -> None:
        nonlocal unheard
        unheard -= 1
        heard(signum)

    def caught(number: int, _frame: FrameType | None) -> None:
        nonlocal unheard
        unheard += 1
        if unheard > MAX_UNHEARD:
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(deliver, signal.Signals(number))

    before = {signum: signal.getsignal(signum) for signum in FORWARDED}
    installed = [signum for signum, handler in before.items() if handler is not signal.SIG_IGN]
    for signum in installed:
        signal.signal(signum, caught)
    try:
        yield
    finally:
        for signum in installed:
            signal.signal(signum, before[signum])


# --------------------------------------------------------------------------------------------------

TICK_S = 0.25
LOOK_S = 2.0
"""How often the queue of a sweep is asked while nothing has ended: a profile may have become known."""
LOOKING_SHARE = 0.02
"""Of the time, that looking at the record may take: the broker writes all of it, and it grows with the run."""
COMPLAINT_PREFIX = b"zico: "
"""How Zico inside a job begins its lines (``zico.job.autoload.complain``)."""
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
    signum: int = 0
    """The signal that ended the run; 0: none did."""

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
    queue: Queue | None = None,
    joins: Path | None = None,
) -> Outcome:
    """Run all commands to their ends and return how they ended. Call it in the main thread.

    Args:
        commands: At least one; none with a queue.
        settings: Checked settings.
        listener: Is told of output, messages and progress.
        environ: The jobs' environment before Zico adds to it; ours by default.
        record_to: Where to copy the broker's record, if it wrote one.
        queue: Gives the commands instead, and is told how each ended, unless a signal ends the run.
        joins: The socket of a daemon, whose pool the jobs join instead of one of their own; not
            with a queue.

    Raises:
        CommandError: The broker or the MPS daemon could not start; the jobs have been ended.
        ConfigError: There is no MPS here, or no directory for machine code.
    """
    with run_directory() as run_dir:
        supervisor = Supervisor(commands, settings, listener, os.environ if environ is None else environ, queue, joins)
        outcome = asyncio.run(supervisor.run(run_dir))
        record = supervisor.record
        if record_to is not None and record is not None and record.exists():
            shutil.copyfile(record, record_to)
        return outcome


class Supervisor:
    """One run in progress."""

    def __init__(
        self,
        commands: Sequence[Command],
        settings: Settings,
        listener: Listener,
        environ: Mapping[str, str],
        queue: Queue | None = None,
        joins: Path | None = None,
    ) -> None:
        """Start nothing yet."""
        self._joins = joins
        self.record: Path | None = None
        self._queue = queue
        self._settings = settings
        self._listener = listener
        # Jobs get the directory that passed the check, so that a refusal is reported once and not
        # by every job.
        self._environ = {**environ, **device_variables(settings), CACHE_VARIABLE: str(cache_root())}
        self._jobs = [Job(command) for command in commands]
        self._complaints: dict[str, str] = {}
        self._out_of_memory: set[str] = set()
        """Names of the jobs whose output says so."""
        self._members: dict[tuple[str, int, int], JobReport] = {}
        """All that have been in the pool: the broker reports the latest ones only."""
        self._broker_gone = False
        self._looked: Record | None = None
        self._look_again_s = 0.0
        self._signal: signal.Signals | None = None
        self._interrupted = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._started_s = time.monotonic()

    async def run(self, run_dir: Path) -> Outcome:
        """Run everything; see ``supervise``."""
        with forwarded_to(self._heard), contextlib.ExitStack() as stack:
            guardian = Watchdog(run_dir)
            stack.callback(guardian.close)
            mps_pipes = self._share_device(run_dir, guardian, stack)
            wishes = [job.command.wish for job in self._jobs] + list(self._queue.wishes if self._queue else ())
            pages = any(wish.save in _MAY_PAGE for wish in wishes)
            broker: RunBroker = (
                JoinedBroker(self._joins)
                if self._joins is not None
                else BrokerProcess(
                    run_dir, self._settings, guardian, self._listener.problem, pages=pages, mps_pipes=mps_pipes
                )
            )
            self.record = broker.record
            stack.callback(broker.close, guardian)
            stack.callback(self._kill, guardian)
            report = await self._run_jobs(broker, guardian)
            await broker.end()
        return Outcome(tuple(self._outcome(job) for job in self._jobs), report, self._signal or 0)

    def _share_device(self, run_dir: Path, guardian: Watchdog, stack: contextlib.ExitStack) -> Path | None:
        """Let the jobs' kernels overlap on a GPU if that is wanted; say how they share it otherwise.

        Returns:
            The directory of the MPS daemon that was started for the jobs, if one was.
        """
        if self._settings.device.value == HOST:
            return None
        from zico.broker.lingering import daemon_at  # with Numba: a run on the host starts sooner without
        from zico.launch.mps import MpsDaemon

        if self._settings.mps.value:
            daemon = MpsDaemon(run_dir, self._environ)
            stack.callback(daemon.close, guardian)
            daemon.start(guardian)
            self._environ |= daemon.variables
            return daemon.pipes
        found = daemon_at(self._environ)
        self._listener.message(TIME_SLICES if found is None else f"jobs share the GPU by the MPS daemon at {found}")
        return None

    async def _run_jobs(self, broker: RunBroker, guardian: Watchdog) -> Report | None:
        """Run all jobs to their ends and return the broker's figures of them.

        Jobs import their frameworks while the broker starts, and wait for it where they join.
        """
        for job in self._jobs:
            self._start(job, broker.socket, guardian, takes_input=len(self._jobs) == 1)
        self._begin_ending()
        ready = asyncio.create_task(self._until_ready(broker))
        ends = [asyncio.create_task(self._run_one(job, guardian)) for job in self._jobs if job.living]
        if self._queue is not None:
            ends.append(asyncio.create_task(self._run_queue(self._queue, broker, guardian)))
        helpers = [asyncio.create_task(self._tick(broker)), asyncio.create_task(self._watch(broker, ready))]
        try:
            done, _ = await asyncio.wait([ready, *ends], return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            await _cancelled([*helpers, ready, *ends, self._ending])
        self._listener.progress(self._snapshot(broker.status()))
        return self._reported(broker)

    def _start(self, job: Job, socket: Path, guardian: Watchdog, *, takes_input: bool) -> None:
        command = job.command
        environ = job_environment(self._environ, socket, command.name, command.share, command.wish)
        environ[STARTING_VARIABLE] = f"{READY_S:g}"
        problem = job.start(environ, takes_input=takes_input)
        if problem is not None:
            self._listener.problem(problem)
        elif job.child is not None:
            guardian.add(job.child.pid)

    async def _run_queue(self, queue: Queue, broker: RunBroker, guardian: Watchdog) -> None:
        """Start jobs as the queue lets them until none is left, or a signal or the broker's end stops it."""
        running: dict[asyncio.Task[None], Job] = {}
        try:
            while True:
                while (command := await self._next(queue, broker)) is not None:
                    job = Job(command)
                    self._jobs.append(job)
                    self._start(job, broker.socket, guardian, takes_input=False)
                    if job.living:
                        running[asyncio.create_task(self._run_one(job, guardian))] = job
                    else:
                        self._tell(queue, job, broker)
                if not running:
                    return
                done, _ = await asyncio.wait(running, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                    self._tell(queue, running.pop(task), broker)
        finally:
            await _cancelled(list(running))

    async def _next(self, queue: Queue, broker: RunBroker) -> Command | None:
        """Return the queue's next command, ``None`` also when no more may start."""
        if self._stopped:
            return None
        command = await queue.next(partial(self._look, broker))
        return None if self._stopped else command

    def _look(self, broker: RunBroker) -> Record | None:
        """Return the broker's record, an older one if looking took long; ``None`` if the broker does not answer."""
        began_s = time.monotonic()
        if began_s >= self._look_again_s:
            self._looked = None if broker.report() is None or not broker.record else read_record(broker.record)
            now_s = time.monotonic()
            self._look_again_s = now_s + (now_s - began_s) / LOOKING_SHARE
        return self._looked

    @property
    def _stopped(self) -> bool:
        return self._signal is not None or self._broker_gone

    def _tell(self, queue: Queue, job: Job, broker: RunBroker) -> None:
        """Tell the queue how a job has ended; one that a signal may have ended is left for another run."""
        report = self._reported(broker, record=False)
        if self._signal is not None:
            return
        names = {one.command.name for one in self._jobs}
        members = [one for one in report.jobs if owner_of(one.name, names) == job.command.name] if report else []
        missing = BROKER_GONE if report is None and broker.is_ready else NEVER_JOINED
        figures = _job_figures(self._outcome(job), members, missing)
        result = queue.ended(figures, told_out_of_memory=job.command.name in self._out_of_memory)
        if result.again:
            self._listener.problem(f"{result.name} ran out of memory: it runs again, alone, after all others")

    def _reported(self, broker: RunBroker, *, record: bool = True) -> Report | None:
        """Return the broker's figures; of a sweep all of its jobs, and not only the latest."""
        report = broker.report(record=record)
        if report is None or self._queue is None:
            return report
        self._members |= {(one.name, one.pid, one.job): one for one in report.jobs}
        return Report(pool=report.pool, jobs=tuple(self._members.values()), jobs_left_out=0)

    async def _run_one(self, job: Job, guardian: Watchdog) -> None:
        left = await job.run(self._pass_on, guardian, self._settings.grace_s.value)
        name = job.command.name
        if left:
            self._listener.problem(f"{name} left {left} processes behind; Zico has ended them")
        self._listener.message(f"{name} ended with exit code {job.exit_code} after {job.wall_s:.1f} s")

    async def _tick(self, broker: RunBroker) -> None:
        """Show progress and pass held output on, until cancelled."""
        due_s = 0.0
        while True:
            for job in self._jobs:
                if job.living:
                    job.expire_output()
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + self._listener.interval_s
                self._listener.progress(self._snapshot(broker.status()))
            await asyncio.sleep(TICK_S)

    async def _until_ready(self, broker: RunBroker) -> None:
        """Wait until the broker is ready, or a signal comes."""
        tasks = [asyncio.ensure_future(broker.wait_ready()), asyncio.ensure_future(self._interrupted.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _cancelled(tasks)

    async def _watch(self, broker: RunBroker, ready: asyncio.Task[None]) -> None:
        """Say so if the broker ends after it was ready and before the jobs do, until cancelled."""
        await asyncio.wait([ready])
        if not broker.is_ready:
            return
        await broker.ended()
        self._broker_gone = True
        if self._joins is None:
            broker.socket.touch()  # a job that comes to join now is refused, and does not wait for a start
        self._listener.problem("the broker has ended: the jobs keep their memory and run on without coordination")

    def _snapshot(self, status: Status | None) -> Snapshot:
        elapsed_s = time.monotonic() - self._started_s
        shown = [job for job in self._jobs if self._queue is None or job.living]
        jobs = tuple(JobProgress(job.command.name, job.exit_code) for job in shown)
        return Snapshot(elapsed_s=elapsed_s, budget_bytes=self._settings.budget_bytes.value, jobs=jobs, status=status)

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
        if self._queue is not None and tells_out_of_memory(stream, lines):
            self._out_of_memory.add(name)
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

    def _kill(self, guardian: Watchdog) -> None:
        """Kill what still lives; normally nothing does."""
        for job in self._jobs:
            if job.child is not None and job.living:
                guardian.remove(job.child.pid)
                job.child.kill()


async def _cancelled(tasks: Sequence[asyncio.Future[Any] | None]) -> None:
    """Cancel the tasks and wait until they have noticed."""
    found = [task for task in tasks if task is not None]
    for task in found:
        task.cancel()
    await asyncio.gather(*found, return_exceptions=True)
