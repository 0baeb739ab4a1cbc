"""Run jobs of ``job.py`` alone or together, with or without Zico, in as much of a GPU as they may have: one line.

``run_jobs.py --job dcgan:128:float32 --job gnmt:256:bfloat16 --way zico --mps --share 70 --ballast
--part headline --name "..." --result FILE``. A share is of what the jobs take without Zico, which
the lines of the part ``peaks`` say (``--peaks`` writes them):

* of ``footprint``: what PyTorch reserved at most, and the contexts. Zico's budget is that less the
  contexts, so that a run with Zico takes no more of the GPU than one without may.
* of ``reserved`` and of ``allocated``: of the tensors alone; ``allocated`` knows nothing of regions,
  so budgets with several sizes of region are the same.

Processes are started before ``--go``, and touch the device behind it. Zico's pool is there before,
where the device has room beside the run that is being measured; a run with a ballast but without
Zico, and one that measures a context, let nobody in (``Room``). Rates are taken while all jobs
train, by the jobs' own clocks. A job that runs out of memory is a result.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[0]))  # PYTHONSAFEPATH leaves it out
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import ready
import record
import together
from ballast import Ballast, device_use
from together import Job, Together

from zico.base.errors import ZicoError
from zico.base.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

IN_TURN = "in_turn"
"""Each job alone, one after the other, with all of the GPU and without Zico."""
WAYS = ("plain", "zico", IN_TURN)
FOOTPRINT = "footprint"
UNKNOWN_CONTEXT_BYTES = 600 * MIB
"""Of a context, where NVIDIA's management library did not tell what one took."""
UNIT_BYTES = 2 * MIB
"""What a GPU's memory comes in."""
ROOM_BYTES = 2 * GIB
"""Beside a pool: for contexts, and for what the run that is measured may still take."""
ROOM_S = 0.3
"""Between two questions for it, each of which takes calls of the driver beside the run that is measured."""
LOOK_S = 0.05
MARGIN_S = 15.0
"""Behind the expected time; then a run ends itself, and says why. The runner waits longer."""
NEVER_S = 1e9
KEPT_LOSSES = 400
TWIN_JOB = "dcgan:2:float32"
"""Stands for every job in a rehearsal."""
TWIN_SECONDS = 0.5
COUNTED = ("peak_bytes", "peak_tensor_bytes", "spilled_bytes", "waited_s", "maps", "pool_fraction", "oom", "saving")
"""What Zico's report says of a job and is kept."""
POOLED = ("peak_granted_bytes", "peak_physical_bytes", "region_bytes", "recoveries", "stalls")
"""What it says of the pool and is kept."""


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    ready.add_option(parser)
    parser.add_argument("--part", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--job", action="append", required=True, metavar="MODEL:BATCH:DTYPE")
    parser.add_argument("--way", choices=WAYS, default="plain")
    parser.add_argument("--mps", action="store_true", help="under MPS; without effect in a rehearsal")
    parser.add_argument("--share", type=int, metavar="PERCENT", help="what the jobs may have (default: all)")
    parser.add_argument("--of", choices=(FOOTPRINT, "reserved", "allocated"), default=FOOTPRINT)
    parser.add_argument("--ballast", action="store_true", help="have the rest of the GPU taken by another process")
    parser.add_argument("--half", action="store_true", help="limit each job to an equal part of the share")
    parser.add_argument("--policy", default="zico")
    parser.add_argument("--save", default="none")
    parser.add_argument("--limit", type=int, metavar="PERCENT", help="of its own peak, what each job may hold")
    parser.add_argument("--region", metavar="SIZE")
    parser.add_argument("--spacing", type=int, metavar="BYTES", help="freed on a stream between two marks")
    parser.add_argument("--seconds", type=float, default=4.0, help="each job trains behind its first iteration")
    parser.add_argument("--warm-up", type=int, default=together.WARM_UP, metavar="N", help="iterations left out")
    parser.add_argument("--expected", type=float, default=20.0, metavar="SECONDS", help="from the go to the end")
    parser.add_argument("--peaks", action="store_true", help="also write what the job takes, for others to read")
    parser.add_argument("--twin", action="store_true", help="rehearse: tiny jobs on the host")
    options = parser.parse_args(arguments)
    if options.twin:
        options.seconds, options.warm_up, options.mps, options.expected = TWIN_SECONDS, 1, False, 300.0
        options.region = None  # one of a GPU could hold all that a tiny job needs
    return options


# -- what jobs take, and may have ------------------------------------------------------------------


def peak_name(job: str) -> str:
    """Return the name of the line that says what a job takes alone."""
    return job.replace(":", " ")


def peaks_of(file: Path, jobs: Sequence[str]) -> list[dict[str, Any]]:
    """Return what each job takes alone.

    Raises:
        LookupError: It has not been measured.
    """
    found = []
    for job in jobs:
        figures = record.newest(file, record.PEAKS, peak_name(job))
        if figures is None:
            message = f"what {peak_name(job)} takes alone has not been measured"
            raise LookupError(message)
        found.append(figures)
    return found


def contexts_bytes(peaks: Sequence[dict[str, Any]]) -> int:
    """Return what the jobs' contexts take."""
    known = (peak.get("context_bytes") for peak in peaks)
    return sum(UNKNOWN_CONTEXT_BYTES if size is None else size for size in known)


def allowance_bytes(peaks: Sequence[dict[str, Any]], share: int, of: str) -> int:
    """Return what the jobs may take together: of a footprint with their contexts, else of tensors alone."""
    if of == FOOTPRINT:
        return share * (sum(peak["max_memory_reserved"] for peak in peaks) + contexts_bytes(peaks)) // 100
    return share * sum(peak[f"max_memory_{of}"] for peak in peaks) // 100


def budget_bytes(peaks: Sequence[dict[str, Any]], share: int, of: str) -> int:
    """Return the pool's budget for it, in whole granules."""
    size = allowance_bytes(peaks, share, of) - (contexts_bytes(peaks) if of == FOOTPRINT else 0)
    return max(size, 0) // UNIT_BYTES * UNIT_BYTES


# -- the device beside us --------------------------------------------------------------------------


def used_bytes() -> int | None:
    """Return what is used of the first GPU, by whomever; ``None`` where nobody knows."""
    use = device_use()
    return None if use is None else use.used_bytes


class Room:
    """The right to take memory of the device while another run is measured; one process has it at a time."""

    def __init__(self, result: Path) -> None:
        """Open the file that stands for it."""
        self._file = result.with_suffix(".room").open("a")

    def take(self) -> bool:
        """Take it unless another has it; it is kept until this process ends."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextlib.contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """Run an MPS daemon, and give what makes a process its client.

    Raises:
        ZicoError: There is none, or it does not start.
    """
    from zico.launch.mps import MpsDaemon
    from zico.launch.watchdog import Watchdog

    with tempfile.TemporaryDirectory(prefix="mps-") as folder, contextlib.ExitStack() as stack:
        guardian = Watchdog(Path(folder))
        stack.callback(guardian.close)
        daemon = MpsDaemon(Path(folder), os.environ)
        stack.callback(daemon.close, guardian)
        daemon.start(guardian)
        yield daemon.variables


# -- one run ---------------------------------------------------------------------------------------


class Run:
    """One run: what it is told, and what is noted while it goes on."""

    def __init__(self, options: argparse.Namespace, folder: Path, stack: contextlib.ExitStack) -> None:
        """Prepare; ``stack`` ends what is started.

        Raises:
            LookupError: What a job takes alone has not been measured.
        """
        self._options = options
        self._folder = folder
        self._stack = stack
        self._on_gpu = not options.twin
        self._go: Path | None = options.go
        self._starter = os.getppid()
        self._room = Room(options.result)
        needs_peaks = options.share is not None or options.limit is not None
        self._peaks = peaks_of(options.result, options.job) if needs_peaks else []
        idle = [peak["used_before_bytes"] for peak in self._peaks if peak.get("used_before_bytes") is not None]
        self._idle_bytes: int | None = min(idle, default=None)
        self._ballast = stack.enter_context(Ballast(twin=options.twin)) if options.ballast else None
        self._is_steady = False
        self.begun_s: float | None = None
        self.figures: dict[str, Any] = {}
        if options.share is not None:
            self.figures["allowance_bytes"] = allowance_bytes(self._peaks, options.share, options.of)

    # -- commands ----------------------------------------------------------------------------------

    def jobs(self) -> list[Job]:
        """Return the jobs' commands."""
        options = self._options
        found = []
        for number, spec in enumerate(options.job):
            model, batch, dtype = (TWIN_JOB if options.twin else spec).split(":")
            words = [model, "--batch", batch, "--dtype", dtype, "--device", "cuda" if self._on_gpu else "cpu"]
            words += ["--seconds", str(options.seconds), "--figures", str(self._figures_file(number))]
            words += ["--go", str(self._go_file(number))]
            words += ["--gauge"] * options.peaks
            if options.half:
                words += ["--at-most", str(self._part_bytes(number))]
            before = () if options.spacing is None else ("env", f"ZICO_SPACING={options.spacing}")
            found.append(Job(f"{spec.partition(':')[0]}-{number + 1}", "benchmarks/gpu/job.py", tuple(words), before))
        return found

    def _part_bytes(self, number: int) -> int:
        """Return what PyTorch may reserve in a job that has an equal part of the share, its context in it."""
        part_bytes: int = self.figures["allowance_bytes"] // len(self._peaks)
        return max(part_bytes - contexts_bytes(self._peaks[number : number + 1]), UNIT_BYTES)

    def _figures_file(self, number: int) -> Path:
        return self._folder / f"figures-{number}.json"

    def _go_file(self, number: int) -> Path:
        return self._folder / f"go-{number}"

    def _told(self, jobs: Sequence[Job]) -> tuple[str, list[str]]:
        """Return the budget, and further options of ``zico run``."""
        options = self._options
        budget = "none"
        if options.share is not None:
            self.figures["budget_bytes"] = budget_bytes(self._peaks, options.share, options.of)
            budget = f"{self.figures['budget_bytes']}B"
        told = ["--save", options.save, *(["--mps"] if options.mps else [])]
        told += ["--region", options.region] if options.region else []
        if options.limit is not None:
            for job, peak in zip(jobs, self._peaks, strict=True):
                told += ["--limit", f"{job.name}={options.limit * peak['max_memory_allocated'] // 100}B"]
        return budget, told

    # -- what happens meanwhile --------------------------------------------------------------------

    def watch(self, ends: dict[str, list[float]]) -> None:
        """Let the jobs go when this run may, and see to it that it ends in time.

        Raises:
            TimeoutError: It took too long.
        """
        now_s = time.monotonic()
        if self.begun_s is None:
            if self._is_told():
                self._begin()
        elif now_s > self.begun_s + self._options.expected + MARGIN_S:
            counts = ", ".join(f"{name} {len(times)}" for name, times in ends.items())
            message = f"not ended after {now_s - self.begun_s:.0f} s; iterations: {counts}"
            raise TimeoutError(message)
        elif not self._is_steady and all(len(times) > self._options.warm_up for times in ends.values()):
            self._is_steady = True
            self._settle()

    def _is_told(self) -> bool:
        """Tell whether this run may touch the device.

        Raises:
            TimeoutError: Nobody is left who could say so.
        """
        if self._go is not None and os.getppid() != self._starter:
            message = "whoever started this run has ended"
            raise TimeoutError(message)
        return self._go is None or self._go.exists()

    def _begin(self) -> None:
        """Have the rest of the device taken, and let the jobs go."""
        self.begun_s = time.monotonic()
        options = self._options
        if self._is_alone():
            self._room.take()
        if self._ballast is not None:
            used = used_bytes() if self._on_gpu else None
            own = self._own_bytes(used)
            told = self._ballast.leave(max(self.figures["allowance_bytes"] - own, 0))
            self.figures["ballast"] = {**told, "own_before_bytes": own}
            now = used_bytes() if self._on_gpu else None
            if used is not None and now is not None:
                self.figures["ballast"]["context_bytes"] = now - used - told["held_bytes"]
        for number in range(1 if options.way == IN_TURN else len(options.job)):
            self._go_file(number).touch()

    def _own_bytes(self, used: int | None) -> int:
        """Return what this run holds of the device before its jobs go: with Zico the pool."""
        if self._options.way != "zico":
            return 0
        pool: int = self.figures["budget_bytes"]
        return pool if used is None or self._idle_bytes is None else max(pool, used - self._idle_bytes)

    def _settle(self) -> None:
        """Note what is used once all jobs train; the ballast of jobs that a pool bounds makes room for the next run."""
        if self._on_gpu:
            self.figures["used_bytes"] = used = used_bytes()
            ballast = self.figures.get("ballast")
            if used is not None and ballast is not None and self._idle_bytes is not None:
                beside = self._idle_bytes + ballast["held_bytes"] + ballast.get("context_bytes", 0)
                self.figures["own_bytes"] = used - beside  # to be compared with the allowance
        if self._ballast is not None and self._options.way == "zico":
            self._ballast.release()

    def _is_alone(self) -> bool:
        """Tell whether nobody may take memory while this run is measured."""
        return self._options.peaks or (self._options.ballast and self._options.way != "zico")

    # -- running -----------------------------------------------------------------------------------

    def together(self) -> list[Together]:
        """Run; returns how the jobs went, together or, in turn, each by itself.

        Raises:
            CalledProcessError: A job failed.
            OSError, SubprocessError, ValueError, ZicoError: The run failed.
        """
        jobs = self.jobs()
        if self._options.way == "zico":
            return [self._with_zico(jobs)]
        if self._options.way == IN_TURN:
            return self._in_turn(jobs)
        environment = self._stack.enter_context(mps_daemon()) if self._options.mps else {}
        if self._is_alone():
            self._room.take()
        run_plain = functools.partial(together.run_plain, deadline_s=NEVER_S, watch=self.watch)
        return [run_plain(jobs, environment=environment)]

    def _in_turn(self, jobs: list[Job]) -> list[Together]:
        """Run each different job by itself; all are started at once, and one goes when the one before has ended."""
        done: list[Together] = []
        firsts = [self._options.job.index(spec) for spec in self._options.job]

        def watch(ends: dict[str, list[float]]) -> None:
            self.watch(ends)
            for number in sorted(set(firsts)):
                if self.begun_s is not None and not self._figures_file(number).exists():
                    self._go_file(number).touch()
                    return

        distinct = [jobs[number] for number in sorted(set(firsts))]
        found = together.run_plain(distinct, deadline_s=NEVER_S, watch=watch)
        for number, first in enumerate(firsts):
            if number != first:
                self._figures_file(number).write_text(self._figures_file(first).read_text())
            at = sorted(set(firsts)).index(first)
            done.append(Together((found.ends_s[at],), (found.losses[at],), None))
        return done

    def _with_zico(self, jobs: list[Job]) -> Together:
        options = self._options
        budget, told = self._told(jobs)
        self._wait_for_room()
        device = "cuda:0" if self._on_gpu else "host"
        where: dict[str, Any] = {"budget": budget, "device": device, "told": told, "policy": options.policy}
        try:
            return together.run_zico(jobs, **where, deadline_s=NEVER_S, watch=self.watch)
        except subprocess.CalledProcessError:
            if self.begun_s is not None:
                raise
        # Started too early: the run that was measured had taken what the pool needs.
        while not self._is_told():
            time.sleep(LOOK_S)
        return together.run_zico(jobs, **where, deadline_s=NEVER_S, watch=self.watch)

    def _wait_for_room(self) -> None:
        """Wait until the pool can be made beside the run that is measured, at most until this one is told to go."""
        wanted = self.figures.get("budget_bytes", float("inf")) + ROOM_BYTES
        while self._on_gpu and not self._is_told():
            if self._room.take() and (use := device_use()) is not None and use.free_bytes > wanted:
                return
            time.sleep(ROOM_S)

    # -- what it comes to --------------------------------------------------------------------------

    def result(self, runs: Sequence[Together]) -> dict[str, Any]:
        """Return the figures."""
        options = self._options
        raw = [json.loads(self._figures_file(number).read_text()) for number in range(len(options.job))]
        losses = [losses for run in runs for losses in run.losses]
        jobs = []
        for spec, one, found in zip(options.job, raw, losses, strict=True):
            jobs.append({"job": spec, **one, **self._compared(spec, found)})
        figures: dict[str, Any] = {**self.figures, "jobs": jobs}
        ends = [ends_of(one) for one in raw]
        if options.way == IN_TURN:
            figures["rates"] = [rate(end, options.warm_up) for end in ends]
        else:
            figures |= rates(ends, options.warm_up)
        report = runs[0].report
        if report is not None:
            figures["pool"] = {name: report["pool"].get(name) for name in POOLED}
            for job, told in zip(jobs, report["jobs"], strict=True):
                job["zico"] = {name: told.get(name) for name in COUNTED} | {"exit_code": told["exit_code"]}
        if options.peaks:
            self._write_peak(jobs[0], losses[0], figures["rates"][0])
        return figures

    def _compared(self, spec: str, found: Sequence[str]) -> dict[str, Any]:
        """Return whether the losses are those of the job alone without Zico, where those are known."""
        alone = record.newest(self._options.result, record.PEAKS, peak_name(spec)) or {"losses": []}
        shared = min(len(found), len(alone["losses"]))
        same = None if shared == 0 else list(found[:shared]) == alone["losses"][:shared]
        return {"losses_compared": shared, "losses_equal": same}

    def _write_peak(self, job: dict[str, Any], losses: Sequence[str], found: float | None) -> None:
        """Write what the job takes alone."""
        names = ("max_memory_reserved", "max_memory_allocated", "context_bytes", "used_before_bytes")
        peak = {name: job.get(name) for name in names}
        if not self._on_gpu:  # the host's allocator counts nothing; what Zico counts stands for it
            size = job["zico"]["peak_bytes"]
            peak |= {"max_memory_reserved": size, "max_memory_allocated": size, "context_bytes": 0}
        peak |= {"losses": list(losses[:KEPT_LOSSES]), "rate": found, "stages": job["stages"]}
        record.append(
            self._options.result, record.PEAKS, peak_name(job["job"]), peak, seconds=0.0, turn=self._options.round
        )


def ends_of(one: dict[str, Any]) -> tuple[float, ...]:
    """Return when a job's iterations ended, from what it wrote."""
    if one["first_end_s"] is None:
        return ()
    steps_s = np.cumsum([0, *one["steps_us"]]) / 1e6
    return tuple((one["first_end_s"] + steps_s).tolist())


def rate(ends_s: Sequence[float], warm_up: int) -> float | None:
    """Return a job's iterations per second behind its warm-up, ``None`` if it ended too soon."""
    own = Together((tuple(ends_s),), ((),), None)
    with contextlib.suppress(ValueError):
        return own.rates(warm_up)[0]
    return None


def rates(ends: Sequence[tuple[float, ...]], warm_up: int) -> dict[str, Any]:
    """Return the jobs' rates while all train; where one could not train, those of the others by themselves."""
    run = Together(tuple(ends), ((),) * len(ends), None)
    with contextlib.suppress(ValueError):
        begin_s, end_s = run.window_s(warm_up)
        return {"rates": run.rates(warm_up), "window_s": round(end_s - begin_s, 4)}
    return {"rates": [rate(one, warm_up) for one in ends], "window_s": None}


# -- the command -----------------------------------------------------------------------------------


def _told_to_end(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run, and append the line; returns 1 where the run failed."""
    options = parsed()
    if options.twin and options.peaks:
        options.way = "zico"
    signal.signal(signal.SIGTERM, _told_to_end)
    started_s = time.monotonic()
    run: Run | None = None
    status, figures = record.DONE, {}
    try:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zico-run-")))
            run = Run(options, folder, stack)
            figures = run.result(run.together())
    except KeyboardInterrupt:
        status, figures = record.KILLED, {**(run.figures if run else {}), "why": "told to end"}
    except (OSError, LookupError, ValueError, RuntimeError, subprocess.SubprocessError, ZicoError) as error:
        status, figures = record.FAILED, {**(run.figures if run else {}), "why": f"{type(error).__name__}: {error}"}
    begun_s = run.begun_s if run and run.begun_s is not None else started_s
    told = {"seconds": time.monotonic() - begun_s, "turn": options.round, "status": status}
    record.append(options.result, options.part, options.name, figures, **told)
    return int(status != record.DONE)


if __name__ == "__main__":
    sys.exit(main())
