"""Run jobs beside one broker for each device, from the first process to the last.

Theory of operation: one asyncio loop in the main thread. Each job is a task that ends when nothing
of the job's session is left. Signals are forwarded to all jobs, then followed by SIGTERM and
SIGKILL as each deadline passes; a second signal kills at once. Each job that starts is placed on a
device (``zico.launch.placement``). Of a sweep, a queue says which job starts next, and where; it is
asked whenever one has ended, and once in a while. Whatever way ``supervise`` is left, every process
is dead and the run directory is gone. If this process itself is killed, the guardian does the same.

Known limitations: a job's process that makes a session of its own (``setsid``) is not followed.
While our own standard output is blocked by its reader, nothing here runs; a third signal breaks
that.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import secrets
import signal
import time
from typing import TYPE_CHECKING, Any, cast

import msgspec

from zico.base.logged import MOST_NAMES, values_in
from zico.base.paths import CACHE_VARIABLE, cache_root
from zico.base.rundir import PRIVATE_MODE, run_directory
from zico.base.settings import HOST, STARTING_VARIABLE, kind_of
from zico.launch.broker import READY_S
from zico.launch.figures import JobOutcome, Outcome, job_figures
from zico.launch.jobs import Job, Listener, Stream, job_environment
from zico.launch.outsiders import Outsiders
from zico.launch.placement import Offer, choose
from zico.launch.pools import Metrics, Pool
from zico.launch.processes import readable, within
from zico.launch.processors import Processors, limited_to
from zico.launch.queue import PoolNow, tells_out_of_memory
from zico.launch.watchdog import BEGIN_S, Watchdog, send
from zico.report.model import JobProgress, PoolProgress, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import FrameType

    from zico.broker.protocol.messages import Report, Share, Status
    from zico.launch.jobs import Command
    from zico.launch.pools import Target
    from zico.launch.queue import Queue

TICK_S = 0.25
LOOK_S = 2.0
"""How often the queue of a sweep is asked while nothing has ended: a profile may have become known."""
_MAY_PAGE = ("page", "auto")
_NOTABLE = 0.005  # a share that differs by so much looks otherwise in whole percents
TERM_S = 2.0
"""How long a job may take after the SIGTERM that follows an unheeded SIGINT."""


def supervise(
    commands: Sequence[Command],
    targets: Sequence[Target],
    listener: Listener,
    *,
    environ: Mapping[str, str] | None = None,
    queue: Queue | None = None,
    until: Callable[[Snapshot], bool] | None = None,
) -> Outcome:
    """Run all commands to their ends and return how they ended. Call it in the main thread.

    Args:
        commands: At least one; none with a queue.
        targets: The devices to run on, at least one.
        listener: Is told of output, messages and progress.
        environ: The jobs' environment before Zico adds to it; ours by default.
        queue: Gives the commands instead, and is told how each ended, unless a signal ends the run.
        until: The jobs are ended as by SIGTERM once this is true of a run's progress.

    Raises:
        CommandError: A broker or an MPS daemon could not start; the jobs have been ended.
        ConfigError: There is no MPS here, no directory for machine code, or metrics cannot be served
            where they should.
    """
    with run_directory() as run_dir, _held_back() as mask:
        supervisor = Supervisor(commands, targets, listener, os.environ if environ is None else environ, queue, until)
        outcome = asyncio.run(supervisor.run(run_dir, mask))
        for pool in supervisor.pools:
            if reason := pool.keep_record():
                listener.problem(reason)
        return outcome


class Supervisor:
    """One run in progress."""

    def __init__(
        self,
        commands: Sequence[Command],
        targets: Sequence[Target],
        listener: Listener,
        environ: Mapping[str, str],
        queue: Queue | None = None,
        until: Callable[[Snapshot], bool] | None = None,
    ) -> None:
        self._queue = queue
        self._until = until
        self._listener = listener
        self._grace_s = targets[0].settings.grace_s.value
        # Jobs get the directory that passed the check, so that a refusal is reported once and not
        # by every job.
        environ = {**environ, CACHE_VARIABLE: str(cache_root())}
        run = secrets.token_hex(8)
        self.pools = [Pool(target, environ, run, sweeps=queue is not None) for target in targets]
        self._jobs = [Job(command) for command in commands]
        self._placed: dict[str, int] = {}
        """The number of each started job's pool, by the job's name."""
        self._outsiders = Outsiders(self._told)
        self._logged: dict[str, dict[str, float]] = {}
        self._out_of_memory: set[str] = set()
        """Names of the jobs whose output says so."""
        self._signal: signal.Signals | None = None
        self._interrupted = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._started_s = time.monotonic()

    async def run(self, run_dir: Path, mask: set[int]) -> Outcome:
        """Run everything under a mask of signals; see ``supervise``."""
        with _forwarded_to(self._heard, mask), contextlib.ExitStack() as stack:
            guardian = Watchdog(run_dir)
            stack.callback(guardian.close)
            wishes = [job.command.wish for job in self._jobs] + list(self._queue.wishes if self._queue else ())
            pages = any(wish.save in _MAY_PAGE for wish in wishes)
            metrics = Metrics(self.pools, self._listener, stack)
            told: list[str] = []
            for number, pool in enumerate(self.pools):
                directory = run_dir
                if len(self.pools) > 1:
                    directory = run_dir / str(number)
                    directory.mkdir(mode=PRIVATE_MODE)
                told.append(
                    pool.start(directory, guardian, self._listener, stack, pages=pages, metrics=metrics.of_broker)
                )
            metrics.serve()
            for text in dict.fromkeys(filter(None, told)):
                self._listener.message(text)
            stack.callback(self._kill, guardian)
            reports = await self._run_jobs(guardian)
            await asyncio.gather(*(pool.broker.end() for pool in self.pools))
        never_ready = frozenset(number for number, pool in enumerate(self.pools) if not pool.broker.is_ready)
        return Outcome(tuple(self._outcome(job) for job in self._jobs), reports, self._signal or 0, never_ready)

    async def _run_jobs(self, guardian: Watchdog) -> tuple[Report | None, ...]:
        """Run all jobs to their ends and return each broker's figures of them.

        Jobs import their frameworks while the brokers start, and wait for them where they join. A
        broker that still compiles when all jobs have ended is not waited for.
        """
        for job in self._jobs:
            self._start(job, self._place(job.command), guardian, takes_input=len(self._jobs) == 1)
        self._begin_ending()
        ready = asyncio.create_task(self._until_ready())
        ends = [asyncio.create_task(self._run_one(job, guardian)) for job in self._jobs if job.living]
        if self._queue is not None:
            ends.append(asyncio.create_task(self._run_queue(self._queue, guardian)))
        helpers = [asyncio.create_task(self._tick()), asyncio.create_task(self._watch_guardian(guardian))]
        helpers += [asyncio.create_task(self._watch(pool, ready)) for pool in self.pools]
        try:
            needless = asyncio.create_task(self._until_needless(ends))
            helpers.append(needless)
            left = {ready, needless, *ends}
            while not needless.done() and left != {needless}:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await _cancelled([*helpers, ready, *ends, self._ending])
        self._listener.progress(self._snapshot())
        return tuple(pool.report() for pool in self.pools)

    def _place(self, command: Command) -> int:
        """Return the number of the pool in which a command starts of which nothing is known."""
        if len(self.pools) == 1:
            return 0
        here = collections.Counter(self._placed.values())
        offers = {
            number: Offer(pool.budget_bytes, pool.free_bytes, jobs=jobs, unknown=jobs)
            for number, pool in enumerate(self.pools)
            for jobs in [here[number] + pool.others]
        }
        number = choose(offers, {number: command.wish_on(number).limit_bytes for number in offers})
        return 0 if number is None else number

    def _start(self, job: Job, number: int, guardian: Watchdog, *, takes_input: bool) -> None:
        command, pool = job.command, self.pools[number]
        self._placed[command.name] = number
        if len(self.pools) > 1:
            self._listener.message(f"{command.name} starts on {pool.device}")
        with contextlib.ExitStack() as starting:
            share = self._limited(job, pool, starting)
            job.command = dataclasses.replace(command, share=share)
            environ = job_environment(
                *(pool.environ_for(share), pool.broker.socket, command.name, share, command.wish_on(number)),
                run=pool.run,
            )
            environ[STARTING_VARIABLE] = f"{READY_S:g}"
            problem = job.start(environ, takes_input=takes_input)
        if problem is not None:
            self._listener.problem(problem)
        elif job.child is not None:
            guardian.add(job.child.pid)

    def _limited(self, job: Job, pool: Pool, starting: contextlib.ExitStack) -> Share:
        """Limit this thread to the processors of the host that a job may use; return what the job then has."""
        name, share = job.command.name, job.command.share
        if share.compute == 1 or kind_of(pool.device) != HOST:
            return share
        usable = Processors.usable()
        chosen = usable.chosen(share.compute, (one.processors for one in self._jobs if one.living))
        try:
            starting.enter_context(limited_to(chosen))
        except OSError as error:
            self._listener.problem(f"{name} runs on all processors: the kernel does not limit it ({error.strerror})")
            return msgspec.structs.replace(share, compute=1.0)
        job.processors = chosen
        has = min(1.0, len(chosen) / usable.count)
        if abs(has - share.compute) >= _NOTABLE:
            self._listener.message(
                f"{name} gets {len(chosen)} of {usable.count} processors, {has:.0%} and not {share.compute:.0%}: "
                "a share is in whole ones"
            )
        return msgspec.structs.replace(share, compute=has)

    async def _run_queue(self, queue: Queue, guardian: Watchdog) -> None:
        """Start jobs as the queue lets them until none is left, or a signal or the brokers' end stops it."""
        running: dict[asyncio.Task[None], Job] = {}
        try:
            while True:
                while (found := await self._next(queue)) is not None:
                    command, number = found
                    job = Job(command)
                    self._jobs.append(job)
                    self._start(job, number, guardian, takes_input=False)
                    if job.living:
                        running[asyncio.create_task(self._run_one(job, guardian))] = job
                    else:
                        self._tell(queue, job)
                if not running:
                    return
                done, _ = await asyncio.wait(running, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                    self._tell(queue, running.pop(task))
        finally:
            await _cancelled(list(running))

    async def _next(self, queue: Queue) -> tuple[Command, int] | None:
        """Return the queue's next command and its pool, ``None`` also when no more may start."""
        if self._stopped:
            return None
        pools = {number: self._pool_now(pool) for number, pool in enumerate(self.pools) if not pool.is_gone}
        found = await queue.next(pools)
        return None if self._stopped else found

    def _pool_now(self, pool: Pool) -> PoolNow:
        """Return a pool as the queue sees it."""
        others = pool.others_now()
        return PoolNow(
            pool.budget_bytes,
            pool.free_bytes if len(self.pools) > 1 else 0,
            pool.look,
            others_bytes=sum(job.peak_bytes for job in others),
            taken=frozenset(job.name for job in others),
            members=pool.own_now,
        )

    @property
    def _stopped(self) -> bool:
        return self._signal is not None or all(pool.is_gone for pool in self.pools)

    def _tell(self, queue: Queue, job: Job) -> None:
        """Tell the queue how a job has ended; one that a signal may have ended is left for another run."""
        pool = self.pools[self._placed[job.command.name]]
        report = pool.report(record=False)
        if self._signal is not None:
            return
        names = {one.command.name for one in self._jobs}
        figures = job_figures(self._outcome(job), report, names, was_ready=pool.broker.is_ready)
        figures = msgspec.structs.replace(figures, device=pool.device)
        result = queue.ended(figures, told_out_of_memory=job.command.name in self._out_of_memory)
        if result.again:
            self._listener.problem(f"{result.name} ran out of memory: it runs again, alone, after all others")

    async def _run_one(self, job: Job, guardian: Watchdog) -> None:
        left = await job.run(self._pass_on, guardian, self._grace_s)
        name = job.command.name
        if left:
            self._listener.problem(f"{name} left {left} processes behind; Zico has ended them")
        self._listener.message(f"{name} ended with exit code {job.exit_code} after {job.wall_s:.1f} s")

    async def _tick(self) -> None:
        """Show progress and pass held output on, until cancelled."""
        due_s = 0.0
        while True:
            for job in self._jobs:
                if job.living:
                    job.expire_output()
            self._look_for_outsiders()
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + self._listener.interval_s
                snapshot = self._snapshot()
                self._listener.progress(snapshot)
                if self._until is not None and self._ending is None and self._until(snapshot):
                    self._ending = asyncio.create_task(self._end_jobs(signal.SIGTERM))
            await asyncio.sleep(min(TICK_S, self._listener.interval_s))

    def _look_for_outsiders(self) -> None:
        """Say at once which processes of the jobs compute outside the budget."""
        sessions = {job.child.pid: job.command.name for job in self._jobs if job.child is not None and job.living}
        for name, process in self._outsiders.look(sessions, time.monotonic()):
            self._listener.problem(f"{name}: {process.text}")

    def _told(self) -> tuple[Sequence[Status], Sequence[Report]]:
        """Return what the brokers say of their members, and of those that are none; nothing unless all are ready."""
        statuses = [pool.broker.status() for pool in self.pools]
        reports = [pool.broker.report(record=False) for pool in self.pools]
        if None in statuses or None in reports:
            return (), ()
        return cast("list[Status]", statuses), cast("list[Report]", reports)

    async def _until_ready(self) -> None:
        """Wait until the brokers are ready, or a signal comes."""
        all_ready = asyncio.gather(*(pool.broker.wait_ready() for pool in self.pools))
        tasks: list[asyncio.Future[Any]] = [all_ready, asyncio.ensure_future(self._interrupted.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _cancelled(tasks)

    async def _until_needless(self, ends: Sequence[asyncio.Task[None]]) -> None:
        """Wait until all jobs have ended while a broker compiles."""
        if ends:
            await asyncio.wait(ends)
        compiling = [asyncio.create_task(pool.broker.compiles.wait()) for pool in self.pools]
        try:
            await asyncio.wait(compiling, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancelled(compiling)

    async def _watch_guardian(self, guardian: Watchdog) -> None:
        """Say so if the guardian does not begin, or ends before the jobs do, until cancelled."""
        fault = f"it has not begun within {BEGIN_S:g} s"
        with contextlib.suppress(TimeoutError):
            await within(BEGIN_S, readable(guardian.said.fileno()))
            while not (fault := guardian.fault()):
                await readable(guardian.said.fileno())
        self._listener.problem(
            f"if zico run is killed by SIGKILL, its jobs go on: the process that would end them has failed: {fault}"
        )

    async def _watch(self, pool: Pool, ready: asyncio.Task[None]) -> None:
        """Say so if a broker ends after it was ready and before the jobs do, until cancelled."""
        await asyncio.wait([ready])
        if not pool.broker.is_ready:
            return
        await pool.broker.ended()
        pool.is_gone = True
        if not pool.is_joined:
            pool.broker.socket.touch()  # a job that comes to join now is refused, and does not wait for a start
        which = "" if len(self.pools) == 1 else f" of {pool.device}"
        self._listener.problem(
            f"the broker{which} has ended: the jobs keep their memory and run on without coordination"
        )

    def _snapshot(self) -> Snapshot:
        elapsed_s = time.monotonic() - self._started_s
        shown = [job for job in self._jobs if self._queue is None or job.living]
        jobs = tuple(
            JobProgress(
                job.command.name,
                job.exit_code,
                self._placed.get(job.command.name, 0),
                bool(self._outsiders.of(job.command.name)),
            )
            for job in shown
        )
        pools = tuple(
            PoolProgress(pool.device, pool.first_budget_bytes, pool.broker.status(), pool.run if pool.is_joined else "")
            for pool in self.pools
        )
        return Snapshot(elapsed_s=elapsed_s, pools=pools, jobs=jobs)

    def _outcome(self, job: Job) -> JobOutcome:
        name = job.command.name
        pool = self._placed.get(name, 0)
        return JobOutcome(
            job.command,
            cast("int", job.exit_code),
            job.wall_s,
            job.ended_s,
            pool,
            self._outsiders.of(name, ended_well=job.exit_code == 0),
            self._outsiders.loaded.get(name, ""),
            self._logged.get(name, {}),
        )

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
        if stream is Stream.STDOUT:
            self._note_logged(name, lines)
        try:
            self._listener.output(name, stream, lines)
        except BrokenPipeError:
            if self._signal is None:
                self._heard(signal.SIGTERM)

    def _note_logged(self, name: str, lines: list[bytes]) -> None:
        """Keep the numbers that a job logs, as many as a table has room for."""
        logged = self._logged.setdefault(name, {})
        for line in lines:
            for number, value in values_in(line).items():
                if number in logged or len(logged) < MOST_NAMES:
                    logged[number] = value

    async def _end_jobs(self, signum: signal.Signals) -> None:
        """Forward ``signum``; what has not ended by its deadline gets SIGTERM, then SIGKILL."""
        self._send(signum)
        await asyncio.sleep(self._grace_s)
        if signum != signal.SIGTERM:
            self._send(signal.SIGTERM)
            await asyncio.sleep(TERM_S)
        self._send(signal.SIGKILL)

    def _send(self, signum: int) -> None:
        """Signal all processes of the jobs; a daemon of MPS that does not answer holds the run up for ``mps.END_S``."""
        send([job.child.pid for job in self._jobs if job.child is not None and job.living], signum)

    def _kill(self, guardian: Watchdog) -> None:
        """Kill what still lives; normally nothing does."""
        for job in self._jobs:
            if job.child is not None and job.living:
                guardian.remove(job.child.pid)
                job.child.kill()


async def _cancelled(tasks: Sequence[asyncio.Future[Any] | None]) -> None:
    found = [task for task in tasks if task is not None]
    for task in found:
        task.cancel()
    await asyncio.gather(*found, return_exceptions=True)


# -- signals as events of the running loop ----------------------------------------------------------


_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MAX_UNHEARD = 2
"""More signals than this while the loop does not run (a blocked terminal, say) break it by ``KeyboardInterrupt``."""


@contextlib.contextmanager
def _held_back() -> Iterator[set[int]]:
    """Hold signals back while the loop begins or ends, which they would break; gives the mask from before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _forwarded_to(heard: Callable[[signal.Signals], None], mask: set[int]) -> Iterator[None]:
    """Call ``heard`` in the running loop for each signal; those that are ignored stay so (``nohup``).

    ``mask`` holds meanwhile: signals that were held back come now.
    SIGCHLD gets its default, for jobs, too: whoever ignores it cannot wait for children.
    """
    loop = asyncio.get_running_loop()
    unheard = 0

    def deliver(signum: signal.Signals) -> None:
        nonlocal unheard
        unheard -= 1
        heard(signum)

    def caught(number: int, _frame: FrameType | None) -> None:
        nonlocal unheard
        unheard += 1
        if unheard > _MAX_UNHEARD:
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(deliver, signal.Signals(number))

    heeded = [signum for signum in _FORWARDED if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, caught) for signum in heeded}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    held = signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        for signum, handler in before.items():
            signal.signal(signum, handler)
