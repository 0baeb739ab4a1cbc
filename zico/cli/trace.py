"""``zico trace``: record what a program's iterations do to memory, and show it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from zico.base import laboratory
from zico.base.errors import ConfigError, TraceError
from zico.base.rundir import run_directory
from zico.base.settings import OPS_VARIABLE
from zico.base.units import format_bytes
from zico.cli.display import Display
from zico.cli.options import (
    AFTER_DASHES,
    DashesCommand,
    json_option,
    settings_with,
    told_as_json,
    whole_option,
    write_file,
    writing_to,
)
from zico.launch.jobs import name_commands
from zico.launch.pools import Target
from zico.launch.recording import Recording
from zico.launch.supervisor import supervise
from zico.report.console import TextConsole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zico.planning.packing.from_trace import IterationProblem
    from zico.trace.events import Trace
    from zico.trace.summary import OperationFigures, TraceSummary

# --------------------------------------------------------------------------------------------------
# ``zico trace -o FILE -- CMD``: run an unmodified program and record what its iterations do to
# memory.


def run_recorded(words: Sequence[str], output: Path, *, iterations: int | None, ops: bool, quiet: bool) -> int:
    """Run a command to its end with its memory recorded, write the trace, and return the command's exit code.

    Args:
        words: The command.
        output: The trace; it appears when the command has ended, whether it failed or not.
        iterations: How many to record; the command goes on after them. ``None``: all.
        ops: Record operations and what they read and write, too (PyTorch). It does so in the first
            iterations, then in two now and then: at most 5 % of the time in the long run.
        quiet: Show the command's output and problems only.

    Raises:
        TraceError: The file cannot be written, or no process of the command has joined: nothing is
            written.
    """
    (command,) = name_commands([tuple(words)], ())
    settings = settings_with(["--budget", "none"], n_jobs=1)
    with run_directory() as directory, Display([command.name], quiet=quiet) as display:
        with Recording(output, directory, command.name, iterations=iterations) as recording:
            environ = {**os.environ, **recording.environment, **({OPS_VARIABLE: "1"} if ops else {})}
            outcome = supervise([command], [Target(settings)], display, environ=environ)
        if not recording.has_begun:
            what = "nothing was recorded: no process of the command imported PyTorch or TensorFlow; see zico doctor"
            raise TraceError(str(output), 0, what)
        if recording.n_dropped:
            display.problem(f"{recording.n_dropped} events are missing: the recorder could not keep up")
        display.message(f"{recording.n_events} events in {output}; zico trace show {output}")
    return outcome.exit_code


# --------------------------------------------------------------------------------------------------
# ``zico trace show``: an iteration's figures as a table or JSON, its memory curve, and the trace in
# other formats.

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("file", type=_FILE)
@click.option("--iteration", type=int, metavar="N", help="The iteration (default: a typical one of median duration).")
@click.option(
    "-o", "picture", type=_FILE, metavar="PNG", help="Where to draw the memory curve (default: FILE with .png)."
)
@json_option
@click.option("--chrome", type=_FILE, metavar="FILE", help="Write the trace for Perfetto and chrome://tracing.")
@click.option("--snapshot", type=_FILE, metavar="FILE", help="Write the trace for pytorch.org/memory_viz.")
@click.option("--csv", type=_FILE, metavar="FILE", help="Write the iteration's lifetimes for minimalloc.")
@click.option("--allow-truncated", is_flag=True, help="Accept a file whose end is missing.")
@whole_option
def show(  # noqa: PLR0913 - one parameter per option
    *,
    file: Path,
    iteration: int | None,
    picture: Path | None,
    json_path: Path | None,
    chrome: Path | None,
    snapshot: Path | None,
    csv: Path | None,
    allow_truncated: bool,
    whole: bool,
) -> int:
    """Show an iteration of a trace.

    FILE is a trace of zico trace, a PyTorch memory snapshot, or of PyTorch's profiler a Chrome trace
    or a raw memory timeline. It may be compressed by gzip.
    """
    from zico.planning.packing.from_trace import iteration_problem
    from zico.trace.files import read_trace
    from zico.trace.summary import summarise

    trace = read_trace(file, allow_truncated=allow_truncated, whole=whole)
    found = iteration_problem(trace, iteration)
    summary = summarise(trace, found.life, found.iterations, found.iteration, found.classes)
    is_told = told_as_json(summary, json_path)
    if not is_told:
        _print(summary)
    written = _written(trace, found, chrome, snapshot, csv) + _drawn(summary, found, file, picture)
    if written and not is_told:
        click.echo(f"written: {', '.join(map(str, written))}")
    return 0


def _written(
    trace: Trace, found: IterationProblem, chrome: Path | None, snapshot: Path | None, csv: Path | None
) -> list[Path]:
    """Write the formats that were asked for; returns their paths."""
    from zico.trace.chrome import chrome_bytes
    from zico.trace.classes import TensorClass, classify_trace
    from zico.trace.snapshot import snapshot_bytes

    if chrome is not None or snapshot is not None:
        names = [kind.label for kind in TensorClass]
        classes = [names[label] for label in classify_trace(found.life, found.iterations).tolist()]
        for path, convert in ((chrome, chrome_bytes), (snapshot, snapshot_bytes)):
            if path is not None:
                write_file(path, convert([trace], [classes]))
    if csv is not None:
        csv_text = laboratory.part("packing.files", "csv_text", "zico trace show --csv")
        write_file(csv, csv_text(found.problem).encode())
    return [path for path in (chrome, snapshot, csv) if path is not None]


def _drawn(summary: TraceSummary, found: IterationProblem, file: Path, picture: Path | None) -> list[Path]:
    """Draw the memory curve; without matplotlib only if a picture was asked for."""
    from zico.report.picture import write_trace_picture
    from zico.trace.classes import TensorClass
    from zico.trace.iterations import live_bytes

    iteration = found.iteration
    bytes_of = [
        live_bytes(iteration.lower[mine], iteration.upper[mine], iteration.size_bytes[mine], iteration.n_ticks)
        for mine in (found.classes == kind for kind in TensorClass)
    ]
    path = picture or file.with_suffix(".png")
    title = f"{summary.job or file.name} on {summary.device}, iteration {summary.iteration}"
    try:
        with writing_to(path):
            labels = [kind.label for kind in TensorClass]
            write_trace_picture(title, iteration.tick_ns, np.array(bytes_of), labels, path)
    except ConfigError:
        if picture is not None:
            raise
        return []
    return [path]


def _print(summary: TraceSummary) -> None:
    from zico.trace.summary import UNNAMED

    console = TextConsole()
    for line in _lines(summary):
        console.say(line)
    if summary.dropped:
        text = f"{summary.dropped} events are missing: the recorder could not keep up, and the figures are too low"
        console.say(text, "yellow")
    classes = [
        (it.name, str(it.tensors), format_bytes(it.peak_bytes), format_seconds(it.mean_lifetime_s))
        for it in summary.classes
    ]
    _print_table(console, ("class", "tensors", "at the peak", "mean lifetime"), classes)
    for title, last, figures in (
        ("allocated by, of what is alive at the peak", "at the peak", summary.operations_by_bytes),
        ("operations that take longest", "time", summary.operations_by_time),
    ):
        if any(it.name != UNNAMED for it in figures):
            _print_table(console, (title, "count", last), [_row(it) for it in figures])


def _lines(summary: TraceSummary) -> Iterator[str]:
    """Yield what the tables do not say."""
    of = [summary.framework, f"on {summary.device}", f"({summary.source})"]
    yield f"{summary.job or summary.path}: {' '.join(filter(None, of))}" + (f", {summary.note}" if summary.note else "")
    yield (
        f"{summary.events} events, {summary.iterations} iterations {summary.found_by}, "
        f"{summary.typical_iterations} of them alike"
    )
    yield (
        f"iteration {summary.iteration}: {format_seconds(summary.duration_s)}, {summary.steps} allocations and frees, "
        f"{summary.tensors} tensors, peak {format_bytes(summary.peak_bytes)}"
    )
    if not summary.repeats:
        yield "no similar iteration follows: tensors that live across its ends are counted as they are"
    if summary.held is not None:
        held = summary.held
        yield (
            f"regions held: {format_bytes(held.peak_bytes)} at the peak, {held.peak_ratio:.3f} of what is alive; "
            f"over time {held.mean_ratio:.3f} of it"
        )
    if summary.threshold_bytes:
        yield f"tensors below {format_bytes(summary.threshold_bytes)} were not recorded"
    if summary.classes_agree is not None:
        yield f"the operations that read them give {summary.classes_agree:.0%} of the bytes at the peak the same class"


def _row(figures: OperationFigures) -> tuple[str, str, str]:
    last = format_bytes(figures.peak_bytes) if figures.peak_bytes else format_seconds(figures.duration_s)
    return figures.name, str(figures.count), last


def _print_table(console: TextConsole, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = console.table(columns[:1], columns[1:], overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def format_seconds(duration_s: float) -> str:
    """Return a duration in the unit that leaves at least one."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if duration_s >= factor:
            return f"{duration_s / factor:.3g} {unit}"
    return f"{duration_s * 1e9:.0f} ns"


# --------------------------------------------------------------------------------------------------

RECORD = "record"


class _RecordByDefault(click.Group):
    """A group in which ``zico trace -o FILE ...`` means ``zico trace record -o FILE ...``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the command's name in where none stands."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [RECORD, *args]
        return super().parse_args(ctx, args)


@click.group(cls=_RecordByDefault, subcommand_metavar="[record] -o FILE ... | show FILE")
def trace() -> None:
    """Record what a program's iterations do to memory, or show a recording."""


@trace.command(RECORD, cls=DashesCommand, options_metavar="-o FILE [OPTIONS]")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The trace to write.")
@click.option("--fake", is_flag=True, help="Trace a PyTorch training step without computing: SCRIPT:function.")
@click.option(
    "--device-model",
    metavar="NAME",
    default="A100-40GB",
    show_default=True,
    help="With --fake: the device whose speed and memory to assume.",
)
@click.option("--iterations", type=click.IntRange(min=1), metavar="N", help="Record only the first N iterations.")
@click.option(
    "--ops", is_flag=True, help="PyTorch: record the operations of some iterations, too. Costs at most 5 % of the time."
)
@click.option("--quiet", is_flag=True, help="Show only the program's output and problems.")
@click.argument("target", metavar="[SCRIPT:function | -- CMD ARG ...]", required=False)
@click.pass_context
def record(  # noqa: PLR0913 - one parameter per option
    ctx: click.Context,
    *,
    output: Path,
    fake: bool,
    device_model: str,
    iterations: int | None,
    ops: bool,
    quiet: bool,
    target: str | None,
) -> int:
    """Record the memory of a program: zico trace -o FILE -- python train.py."""
    words = ctx.meta.get(AFTER_DASHES)
    if fake and target is not None and not words:
        run_fake = laboratory.part("cli.fake", "run_fake", "zico trace --fake")
        return int(run_fake(target, output, device_model))
    if fake or target is not None or not words:
        raise click.UsageError("give -- CMD ARG ... to record a program, or --fake SCRIPT:function")

    return run_recorded(words, output, iterations=iterations, ops=ops, quiet=quiet)


trace.add_command(show)
