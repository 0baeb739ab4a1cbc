"""``zico run``: start jobs beside a broker, show them, and report."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zico.base.errors import ConfigError, sentence_of
from zico.base.mps import daemon_at
from zico.base.settings import HOST, fitting_name, kind_of
from zico.broker.saving import MODES, check_device, wishes_of
from zico.broker.shares import shares_of
from zico.cli.daemon import find_daemons, renamed, tell_settings
from zico.cli.detached import runs_begun, wait_for
from zico.cli.display import Display
from zico.cli.options import WORDS, DashesCommand, check_outputs, json_option, pool_options, setting, write_json
from zico.cli.sweep import (
    RESULTS_NAME,
    create_file,
    named_commands,
    new_sweep,
    owners_of,
    parse_at_most,
    refuse_beside,
    resumed_words,
    run_sweep,
    targets_of,
    time_limit,
)
from zico.launch.detached import named, note_begun, start
from zico.launch.figures import run_report
from zico.launch.supervisor import supervise
from zico.launch.sweep import MAX_JOBS
from zico.launch.sweep_file import Sweep, SweepFile
from zico.report.files import (
    JOBS_NAME,
    JSON_NAME,
    MARKDOWN_NAME,
    PAGE_NAME,
    PICTURE_NAME,
    RECORD_NAME,
    TRACE_NAME,
    markdown,
    of_device,
    write_atomically,
    write_jobs,
)
from zico.report.model import RunReport, read_record
from zico.report.sweep import write_sweep_table
from zico.report.table import write_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zico.base.settings import Setting, Settings
    from zico.cli.daemon import Found
    from zico.launch.jobs import Command
    from zico.report.model import Record

EPILOG = """A single command may also follow --: zico run -- CMD ARG ...

All options but --name, --json, --report, --quiet, --grid, --jobs-file, --at-most, --resume, --time, --after and
--detach can also be set by an environment variable, such as ZICO_BUDGET for --budget, or in
~/.config/zico/config.toml. The command line wins, then the variable, then the file.
"""


@click.command(cls=DashesCommand, options_metavar="[OPTIONS]", epilog=EPILOG)
@pool_options
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="Name of a job; once for each CMD, in order (default: its script).",
)
@setting("--weight", multiple=True, metavar="NAME=W", help="How much a job's throughput counts (default: 1).")
@setting(
    "--priority",
    multiple=True,
    metavar="NAME=N",
    help="Jobs of a higher priority start first (default: 0).",
)
@setting("--slo", multiple=True, metavar="NAME=10%", help="By how much a job may be slower than alone.")
@setting(
    "--compute",
    multiple=True,
    metavar="NAME=30%",
    help="The most that a job may use of the processors: of the host's, or, with --mps, of a GPU's.",
)
@setting(
    "--save",
    multiple=True,
    metavar="MODE",
    help=f"How a job trains that is larger than its limit: {', '.join(MODES)}. NAME=MODE is for one job.",
)
@setting(
    "--limit",
    multiple=True,
    metavar="NAME=SIZE",
    help="The most that a job may hold: 2GiB, or 60% of the budget.",
)
@setting(
    "--share-frozen",
    flag_value="1",
    help="Hold frozen weights once that several jobs have, such as the base of fine-tunings (GPU: PyTorch).",
)
@setting("--tier", metavar="TIERS", help="Where memory goes that leaves the budget: memory, file, or memory:2GiB,file.")
@json_option
@click.option(
    "--report",
    "report_dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write a page with picture and tables, the figures, and a trace for ui.perfetto.dev to DIR.",
)
@setting("--mps", flag_value="1", help="Let the jobs' kernels overlap on the GPU, by a private MPS daemon.")
@setting("--grace", metavar="SECONDS", help="How long a job may take to end after a signal (default: 5).")
@click.option(
    "--grid",
    "grids",
    multiple=True,
    metavar="NAME=V,V",
    help="A job for each value, put where CMD has {NAME}: lr=0.1,0.01 or seed=1..4. Several make all combinations.",
)
@click.option(
    "--jobs-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Run the jobs that a JSON file describes.",
)
@click.option(
    "--at-most",
    metavar="N",
    help="Run N jobs at once, and let others queue; auto: as many as memory and processors allow "
    "(default with --grid and --jobs-file).",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Run what is left of a sweep, with its options; FILE is what that run has written.",
)
@click.option("--time", "time_limit", metavar="TIME", help="End the jobs after so long: 8h, 90m or 1h30m.")
@click.option("--after", metavar="RUN", shell_complete=runs_begun, help="Wait until this detached run has ended.")
@click.option("--detach", is_flag=True, help="Go on without this terminal; see zico logs, attach and stop.")
@click.option("--quiet", is_flag=True, help="Show only the jobs' output, problems and the closing table.")
@click.argument("commands", nargs=-1, metavar='"CMD" ["CMD" ...]')
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    json_path: Path | None,
    report_dir: Path | None,
    quiet: bool,
    **_others: object,
) -> int:
    """Run each CMD as a job. All jobs share one memory budget.

    Several devices (--device cuda:0,cuda:1) have a pool each, and each job goes to one of them.

    If a broker of the device runs already (zico broker start, or that of a script), the jobs join
    its pool. With --budget or another option of a pool they get a pool of their own.

    Zico splits a CMD into words as a shell does, but starts no shell. The exit code is 0 if every
    job ended with 0, else that of the job that failed first. It is 128 + N if signal N ended that
    job.
    """
    if ctx.params["detach"]:
        return _detach(ctx)
    if ctx.params["after"] is not None:
        wait_for(ctx.params["after"])
    if ctx.params["resume"] is not None:
        return _resume(ctx)
    if any(ctx.params[name] for name in ("grids", "jobs_file", "at_most")):
        return _sweep(ctx, new_sweep(ctx), None)
    named = named_commands(ctx)
    daemons, devices = find_daemons(ctx, len(named))
    taken = {job.name for found in daemons if found.status is not None for job in found.status.jobs}
    wanted = renamed(_with_shares(named, daemons, devices), taken)
    _prepare(json_path, report_dir, devices)
    with Display([command.name for command in wanted], quiet=quiet, json_path=json_path) as display:
        tell_settings(display, daemons, devices)
        joins = [found.joins for found in daemons]
        until = time_limit(ctx.params["time_limit"], display.problem)
        outcome = supervise(wanted, targets_of(devices, report_dir, joins), display, until=until)
    report, code = run_report(outcome, devices), outcome.exit_code
    write_table(report, sys.stderr)
    return _written(code, lambda: write_json(report, json_path), lambda: _write_report(report, report_dir))


def _detach(ctx: click.Context) -> int:
    """Start the same run without its terminal, named as its first job or its file."""
    file = ctx.params["resume"] or ctx.params["jobs_file"]
    name = fitting_name(file.stem) if file is not None else named_commands(ctx, MAX_JOBS)[0].name
    if ctx.params["after"] is not None:
        named(ctx.params["after"])
    time_limit(ctx.params["time_limit"], click.echo)
    words = ctx.meta[WORDS]
    at = words.index("--detach")
    start(name, [*words[:at], *words[at + 1 :]])
    click.echo(f"zico: {name} goes on by itself: zico logs {name}, zico attach {name}, zico stop {name}", err=True)
    return 0


def _resume(ctx: click.Context) -> int:
    refuse_beside(ctx, "--resume", "jobs_file", "grids", "names", "commands")
    with SweepFile.resume(ctx.params["resume"]) as file:
        words = resumed_words(file, ctx.meta[WORDS])
        with ctx.command.make_context(ctx.info_name, words, parent=ctx.parent) as then:
            return _sweep(then, file.sweep, file)


def _sweep(ctx: click.Context, sweep: Sweep, file: SweepFile | None) -> int:
    """Run a sweep; without a file it is new, and gets one when everything has been checked."""
    json_path, report_dir = ctx.params["json_path"], ctx.params["report_dir"]
    at_most = parse_at_most(ctx.params["at_most"])
    daemons, devices = find_daemons(ctx, min(at_most.jobs, len(sweep.jobs)))
    owners = _with_shares(owners_of(sweep), daemons, devices)
    _prepare(json_path, report_dir, devices)
    with file or create_file(sweep, ctx.params["jobs_file"], report_dir) as used:
        report, results, code = run_sweep(
            *(used, owners, daemons, devices, at_most),
            report_dir=report_dir,
            json_path=json_path,
            quiet=ctx.params["quiet"],
            time_text=ctx.params["time_limit"],
        )
    return _written(
        code,
        lambda: _write_report(report, report_dir),
        lambda: write_sweep_table(results, sys.stderr),
        lambda: write_json(results, json_path),
        lambda: write_json(results, report_dir and report_dir / RESULTS_NAME),
    )


def _with_shares(
    commands: tuple[Command, ...], daemons: Sequence[Found], devices: Sequence[Settings]
) -> tuple[Command, ...]:
    """Return the commands with what each is to get, and how it is to go on with less on each device."""
    names = tuple(command.name for command in commands)
    first, *others = devices
    shares = shares_of(*_told(first.shares), names)
    if any(share.compute < 1 for share in shares.values()):
        _check_mps(first.shares["compute"].origin, daemons, devices)
    most = max(devices, key=lambda settings: settings.budget_bytes.value)
    largest = (most.device.value, most.budget_bytes.value) if others else None
    on_each = []
    for settings in devices:
        wishes = wishes_of(*_told(settings.saving), names, settings.budget_bytes.value, largest)
        check_device(kind_of(settings.device.value), wishes, _told(settings.saving)[1])
        on_each.append(wishes)
    return tuple(
        dataclasses.replace(
            command,
            share=shares[command.name],
            wish=on_each[0][command.name],
            wishes=tuple(wishes[command.name] for wishes in on_each),
        )
        for command in commands
    )


def _check_mps(origin: str, daemons: Sequence[Found], devices: Sequence[Settings]) -> None:
    """Refuse shares of a GPU's processors where no MPS divides them.

    Raises:
        ConfigError: Jobs on one of the devices will take turns.
    """
    for found, settings in zip(daemons, devices, strict=True):
        has_mps = (settings.mps.value and found.joins is None) or daemon_at(os.environ) is not None
        if kind_of(settings.device.value) != HOST and not has_mps:
            raise ConfigError(
                f"{origin}: jobs on {settings.device.value} take turns, each with all its processors: "
                "give --mps, or leave it out"
            )


def _told(chosen: Mapping[str, Setting[str]]) -> tuple[dict[str, str], dict[str, str]]:
    texts = {field: setting.value for field, setting in chosen.items()}
    return texts, {field: setting.origin for field, setting in chosen.items()}


def _prepare(json_path: Path | None, report_dir: Path | None, devices: Sequence[Settings]) -> None:
    """Refuse outputs that could not be written, and remove those of an earlier run that this one may not write."""
    check_outputs(json_path, report_dir)
    note_begun()
    if report_dir is None:
        return
    try:
        for name in (RECORD_NAME, PICTURE_NAME, PAGE_NAME, TRACE_NAME, JOBS_NAME):
            for settings in devices:
                found = of_device(name, settings.device.value, several=len(devices) > 1)
                (report_dir / found).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--report: cannot write to {str(report_dir)!r}: {error.strerror}") from None


def _written(code: int, *writers: Callable[[], None]) -> int:
    """Write all that can be written, and say what cannot; returns the exit code, which is then not 0."""
    for write in writers:
        try:
            write()
        except OSError as error:
            click.echo(f"zico: {sentence_of(error)}", err=True)
            code = code or 1
    return code


def _write_report(report: RunReport | None, report_dir: Path | None) -> None:
    if report is not None and report_dir is not None:
        from zico.report.page import write_page

        write_json(report, report_dir / JSON_NAME)
        several, pictures = report.has_several_devices, {}
        for of_one in map(report.on, range(len(report.pools))):
            record = _history(of_one, report_dir, several=several)
            picture = None if record is None else _picture(of_one, record, report_dir, several=several)
            if picture is not None:
                pictures[of_one.device] = picture
            write_page(of_one, record, report_dir / of_device(PAGE_NAME, of_one.device, several=several))
        write_atomically(report_dir / MARKDOWN_NAME, markdown(report, pictures=pictures).encode())
        click.echo(f"zico: report in {report_dir}", err=True)


def _history(report: RunReport, report_dir: Path, *, several: bool) -> Record | None:
    """Return what happened on a device, and write it for other programs; say why if there is nothing."""
    from zico.report.perfetto import write_trace

    record_name, jobs_name, trace_name = (
        of_device(name, report.device, several=several) for name in (RECORD_NAME, JOBS_NAME, TRACE_NAME)
    )
    try:
        record = read_record(report_dir / record_name)
    except ConfigError as error:
        _no_picture(report, error, several=several)
        return None
    write_jobs(record, report_dir / jobs_name)
    write_trace(record, report_dir / trace_name)
    return record


def _picture(report: RunReport, record: Record, report_dir: Path, *, several: bool) -> str | None:
    """Draw the picture of a device; return its file name, or say why there is none."""
    from zico.report.picture import write_picture

    name = of_device(PICTURE_NAME, report.device, several=several)
    try:
        write_picture(report, record, report_dir / name)
    except ConfigError as error:
        _no_picture(report, error, several=several)
        return None
    return name


def _no_picture(report: RunReport, error: ConfigError, *, several: bool) -> None:
    where = f" of {report.device}" if several else ""
    click.echo(f"zico: no picture{where}: {error}", err=True)
