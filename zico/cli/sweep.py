"""``zico run`` with ``--grid``, ``--jobs-file``, ``--at-most`` or ``--resume``: jobs that do not fit at once queue."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from zico.base.decoding import fields_for
from zico.base.errors import ConfigError
from zico.base.units import parse_time, parse_whole
from zico.cli.daemon import tell_settings
from zico.cli.display import Display
from zico.cli.options import AFTER_DASHES, WORDS
from zico.launch.figures import run_report
from zico.launch.jobs import MAX_COMMANDS, Command, name_commands, split_commands
from zico.launch.pools import Target
from zico.launch.queue import Queue, Unlimited
from zico.launch.supervisor import supervise
from zico.launch.sweep import MAX_JOBS, grid_jobs, parse_grids, read_jobs_file
from zico.launch.sweep_file import Sweep, SweepFile
from zico.report.files import RECORD_NAME, of_device
from zico.report.sweep import SweepReport, SweepRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import click

    from zico.base.settings import Settings
    from zico.cli.daemon import Found
    from zico.launch.figures import Outcome
    from zico.launch.queue import Room
    from zico.launch.sweep import SweepJob
    from zico.report.model import RunReport, Snapshot

AUTO = "auto"
SWEEP_FILE = "sweep.jsonl"
"""It lies in the directory of ``--report``."""
RESULTS_NAME = "sweep.json"
_SIGNALLED = 128


@dataclasses.dataclass(frozen=True)
class AtMost:
    """How many jobs run at once."""

    jobs: int
    by_memory: bool
    """Fewer, if memory has no room for so many."""


def parse_at_most(text: str | None) -> AtMost:
    """Return how many jobs may run at once: with ``auto``, one for each processor at the most.

    Raises:
        ConfigError: It is neither ``auto`` nor such a number.
    """
    if text in (None, AUTO):
        return AtMost(min(MAX_COMMANDS, len(os.sched_getaffinity(0))), by_memory=True)
    jobs = parse_whole(text, 1, MAX_COMMANDS)
    if jobs is None:
        raise ConfigError(f"--at-most {text!r}: give a whole number from 1 to {MAX_COMMANDS}, or {AUTO}")
    return AtMost(jobs, by_memory=False)


def new_sweep(ctx: click.Context) -> Sweep:
    """Return what a command line describes.

    Raises:
        ConfigError: It describes no jobs, or some that cannot be.
    """
    for word in (str(Path.cwd()), *ctx.meta[WORDS]):
        if not _is_utf8(word):
            raise ConfigError(f"{word!r} is not UTF-8, as the file of a sweep is: give words and a folder that are")
    return Sweep(directory=str(Path.cwd()), words=ctx.meta[WORDS], jobs=_jobs(ctx))


def refuse_beside(ctx: click.Context, what: str, *others: str) -> None:
    """Refuse options beside one that names a file which says which jobs there are.

    Raises:
        ConfigError: There is one.
    """
    called = {"jobs_file": "--jobs-file", "grids": "--grid", "names": "--name", "commands": "a command"}
    for name in others:
        if ctx.params[name] or (name == "commands" and AFTER_DASHES in ctx.meta):
            other = called[name]
            raise ConfigError(f"{what} and {other} are both given: the file of {what} has the jobs, leave {other} out")


def _jobs(ctx: click.Context) -> tuple[SweepJob, ...]:
    if ctx.params["jobs_file"] is not None:
        refuse_beside(ctx, "--jobs-file", "grids", "names", "commands")
        return read_jobs_file(ctx.params["jobs_file"])
    return grid_jobs(named_commands(ctx, MAX_JOBS), parse_grids(ctx.params["grids"]))


def named_commands(ctx: click.Context, most: int = MAX_COMMANDS) -> tuple[Command, ...]:
    """Return the commands of a command line, be they texts to split or one that is split already.

    Raises:
        ConfigError: There are both, none or too many, or one cannot be.
    """
    names, texts, after_dashes = ctx.params["names"], ctx.params["commands"], ctx.meta.get(AFTER_DASHES)
    if after_dashes is None:
        return split_commands(texts, names, most)
    if texts:
        raise ConfigError(f"{texts[0]!r} stands before --: give all commands before it, or one command after it")
    return name_commands([after_dashes] if after_dashes else [], names)


def create_file(sweep: Sweep, jobs_file: Path | None, report_dir: Path | None) -> SweepFile:
    """Return the new file of a sweep: in the report's directory, else here, named after the jobs.

    Raises:
        ConfigError: It cannot be written, or the report's directory has one.
    """
    if report_dir is None:
        stem = sweep.jobs[0].owner if jobs_file is None else jobs_file.stem
        return SweepFile.create_numbered(Path(), stem, sweep)
    path = report_dir / SWEEP_FILE
    try:
        return SweepFile.create(path, sweep)
    except FileExistsError:
        raise ConfigError(
            f"--report {report_dir}: has a sweep: go on with it by --resume {path}, or name another directory"
        ) from None


def resumed_words(file: SweepFile, now: Sequence[str]) -> list[str]:
    """Return the command line of a sweep with the options that are given with ``--resume`` added.

    Raises:
        ConfigError: This is not the directory in which the sweep was begun.
    """
    sweep = file.sweep
    if str(Path.cwd()) != sweep.directory:
        raise ConfigError(f"--resume {file.path}: was begun in {sweep.directory}: go there and resume it")
    then = list(sweep.words)
    at = then.index("--") if "--" in then else len(then)
    return [*then[:at], *_without_resume(now), *then[at:]]


def _without_resume(words: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        if not skip and word != "--resume" and not word.startswith("--resume="):
            kept.append(word)
        skip = not skip and word == "--resume"
    return kept


def owners_of(sweep: Sweep) -> tuple[Command, ...]:
    """Return the commands whose names ``--weight NAME=2`` and the like may say."""
    return tuple(Command(owner, (), "") for owner in dict.fromkeys(job.owner for job in sweep.jobs))


def run_sweep(  # noqa: PLR0913 - each has a name
    file: SweepFile,
    owners: Sequence[Command],
    daemons: Sequence[Found],
    devices: Sequence[Settings],
    at_most: AtMost,
    *,
    report_dir: Path | None,
    json_path: Path | None,
    quiet: bool,
    time_text: str | None,
) -> tuple[RunReport | None, SweepReport, int]:
    """Run the jobs that are left, and return the figures of this run, those of the whole sweep, and the exit code.

    No run, and so no figures of one, if nothing is left.
    """
    jobs = file.sweep.jobs
    report, outcome = None, None
    if file.left:
        of_owner = {owner.name: owner for owner in owners}
        with Display([job.name for job in jobs], quiet=quiet, json_path=json_path) as display:
            room: Room = Unlimited()
            if at_most.by_memory or len(devices) > 1:
                from zico.cli.room import RoomByFit

                regions = [settings.region_bytes.value for settings in devices]
                policy, by_memory = devices[0].policy.value, at_most.by_memory
                compute = {name: owner.share.compute for name, owner in of_owner.items()}
                room = RoomByFit(jobs, policy, regions, compute=compute, by_memory=by_memory, tell=display.message)
            queue = Queue(file.left, file.results, at_most=at_most.jobs, room=room, owners=of_owner, ended=file.add)
            tell_settings(display, daemons, devices)
            display.message(f"{len(file.left)} jobs, at most {at_most.jobs} at once; {file.path} says which have ended")
            joins = [found.joins for found in daemons]
            until = time_limit(time_text, display.problem)
            outcome = supervise((), targets_of(devices, report_dir, joins), display, queue=queue, until=until)
        report = run_report(outcome, devices)
    results = sweep_report(file, devices, at_most)
    if report is not None:
        results = msgspec.structs.replace(results, budget_bytes=report.budget_then_bytes)
    return report, results, _exit_code(results, outcome)


def time_limit(text: str | None, tell: Callable[[str], None]) -> Callable[[Snapshot], bool] | None:
    """Return what is true of a run's progress once its time is over, which is told; ``None``: there is no limit.

    Raises:
        ConfigError: The text is no time.
    """
    if text is None:
        return None
    end_s = time.monotonic() + parse_time(text)

    def is_over(_: Snapshot) -> bool:
        if time.monotonic() < end_s:
            return False
        tell(f"the {text} of --time are over: the jobs are ended")
        return True

    return is_over


def targets_of(devices: Sequence[Settings], report_dir: Path | None, joins: Sequence[Path | None]) -> list[Target]:
    """Return the devices as a run takes them, each with its record in the report's directory."""
    targets = []
    for settings, socket in zip(devices, joins, strict=True):
        name = of_device(RECORD_NAME, settings.device.value, several=len(devices) > 1)
        targets.append(Target(settings, socket, report_dir / name if report_dir else None))
    return targets


def sweep_report(file: SweepFile, devices: Sequence[Settings], at_most: AtMost) -> SweepReport:
    """Return how every job of a sweep has ended so far."""
    return SweepReport(
        file=str(file.path),
        device=",".join(settings.device.value for settings in devices),
        policy=devices[0].policy.value,
        budget_bytes=sum(settings.budget_bytes.value for settings in devices),
        at_most=at_most.jobs,
        jobs=tuple(_row(job, file) for job in file.sweep.jobs),
    )


def _row(job: SweepJob, file: SweepFile) -> SweepRow:
    row = SweepRow(name=job.name, parameters=job.parameters, command=job.text)
    result = file.results.get(job.name)
    if result is None:
        return row
    exit_code = None if result.again else result.exit_code
    return msgspec.structs.replace(row, **fields_for(SweepRow, result) | {"exit_code": exit_code})


def _exit_code(report: SweepReport, outcome: Outcome | None) -> int:
    failed = [row.exit_code for row in report.jobs if row.exit_code]
    if failed:
        return failed[0]
    if not report.left:
        return 0
    return _SIGNALLED + outcome.signum if outcome is not None and outcome.signum else 1


def _is_utf8(text: str) -> bool:
    """Tell whether a text can be written as UTF-8: words of a command line are any bytes."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
