"""``zico fit``: will these jobs fit into a budget together, and how much slower will each be?

Of traces it is computed. With ``--measure`` commands are run (``zico.cli.measure``). Of
``SCRIPT:function`` it is traced without computing, for the largest batch (``zico.lab.cli.forecast``).
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from zico.base import laboratory
from zico.base.errors import CommandError, ConfigError, ProblemError
from zico.base.settings import DEFAULT_POLICY, DEFAULT_REGION_BYTES, HOST, cuda_region_bytes
from zico.base.units import MIB, format_bytes, parse_size
from zico.cli.options import errors_end_with, json_option, told_as_json, whole_option
from zico.cli.trace import format_seconds
from zico.planning.saving.registry import SAVES
from zico.report.console import TextConsole
from zico.scheduler.policies import POLICIES, policy_named

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from zico.scheduler.fit import JobFit
    from zico.scheduler.simulate import Load
    from zico.trace.events import Trace

SCHEMA = "zico.fit.v1"
HOST_MODEL = "cpu-2core"
_LARGEST = 1 << 60
_LEAST_CUDA_REGION = 2 * MIB  # what CUDA maps at once
FITS, DOES_NOT_FIT, FAILED = range(3)


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``--json`` prints."""

    answer: str
    budget_bytes: int
    region_bytes: int
    policy: str
    peak_bytes: int
    reason: str
    jobs: tuple[JobFit, ...]
    schema_version: str = SCHEMA


@click.command()
@click.argument("given", nargs=-1, required=True, metavar="FILE... | SCRIPT:function")
@click.option("--budget", metavar="SIZE", help="Memory that all jobs share: 20GiB. Files need it.")
@click.option("--region", metavar="SIZE", help="Unit of memory (default: that of zico run on the device).")
@click.option(
    "--policy", metavar="NAME", default=DEFAULT_POLICY, show_default=True, help=f"The scheduler: {', '.join(POLICIES)}."
)
@click.option(
    "--save",
    type=click.Choice(SAVES),
    metavar="MODE",
    default="auto",
    show_default=True,
    help=f"What jobs that would wait may do instead: {', '.join(SAVES)}. Needs traces with operations.",
)
@click.option("--device-model", metavar="NAME", default="", help="The device; it says how fast memory moves.")
@whole_option
@click.option("--batch", "batches", metavar="A..B", help="Of SCRIPT:function: find the largest batch that fits.")
@click.option("--measure", is_flag=True, help="Run commands instead: alone, then together, each for some seconds.")
@click.option("--device", metavar="DEVICE", help="Where to measure: host, cuda or cuda:N.")
@click.option("--mps", is_flag=True, help="Measure under MPS, too.")
@click.option("--share-frozen", is_flag=True, help="Let measured jobs hold equal frozen weights once.")
@click.option("--seconds", type=float, metavar="S", help="How long iterations are counted in each run (default: 10).")
@click.option("--deadline", type=float, metavar="S", help="How long each run may take to get there (default: 600).")
@json_option
@click.pass_context
@errors_end_with(FAILED)
def fit(ctx: click.Context, /, **_given: object) -> int:
    """Tell whether jobs fit together into a budget, and how much slower each will be.

    Each FILE is the trace of one job. Name a FILE twice for two such jobs. The exit code is 0 if
    they fit, perhaps with waiting or with less memory, 1 if they do not, and 2 after an error.

    SCRIPT:function is a job that has not run yet, as for zico trace --fake. With --batch 8..512 the
    function takes a batch, and the answer is the largest one that fits. The exit code is 0 if one
    does, 1 if not even the least does, and 2 after an error.

    With --measure each FILE is a command: zico fit --measure "python a.py" "python b.py". They are
    run for real and ended by SIGTERM. The exit code is 0 if together they do more in a time than one
    after the other, else 1, and 2 after an error.
    """
    told, chosen = ctx.params, {name for name in ctx.params if ctx.get_parameter_source(name) != _DEFAULT}
    is_function = told["batches"] is not None or any(map(_is_function, told["given"]))
    wrong = sorted(chosen & (_OF_FILES | {"batches"} if told["measure"] else _OF_COMMANDS))
    if wrong:
        about = "files: leave it out with --measure" if told["measure"] else "commands: add --measure"
        raise ConfigError(f"{_option(wrong[0])} is about {about}")
    if told["measure"]:
        return _fit_commands(chosen, told)
    if told["budget"] is None:
        raise ConfigError("--budget: say how much memory the jobs share, as in --budget 20GiB")
    if is_function:
        return _fit_function(chosen, told)
    return _fit_files(tuple(map(Path, told["given"])), told)


_DEFAULT = ParameterSource.DEFAULT
_OF_FILES = {"save", "device_model", "whole"}
_OF_COMMANDS = {"device", "mps", "share_frozen", "seconds", "deadline"}
_NOT_OF_A_FUNCTION = {"policy", "save", "whole"}


def _option(name: str) -> str:
    return "--batch" if name == "batches" else f"--{name.replace('_', '-')}"


def _is_function(given: str) -> bool:
    script, _, function = given.rpartition(":")
    return script.endswith(".py") and function.isidentifier() and not Path(given).exists()


def _fit_function(chosen: AbstractSet[str], told: Mapping[str, Any]) -> int:
    """Forecast what a job needs that has not run; returns the exit code."""
    wrong = sorted(chosen & _NOT_OF_A_FUNCTION)
    if wrong:
        raise ConfigError(f"{_option(wrong[0])} is about traces: leave it out for SCRIPT:function")
    if len(told["given"]) != 1:
        given = " ".join(told["given"])
        raise ConfigError(f"{given!r}: give one SCRIPT:function, or a trace of each by zico trace --fake")
    asked = "zico fit SCRIPT:function"
    run_forecast = laboratory.part("cli.forecast", "run_forecast", asked)
    model = laboratory.part("simulator.roofline", "device_model", asked)(told["device_model"] or HOST_MODEL)
    budget_bytes = _size("--budget", told["budget"])
    region_bytes = _region(told["region"], budget_bytes, [model.name])
    fits = run_forecast(told["given"][0], told["batches"], model, budget_bytes, region_bytes, told["json_path"])
    return FITS if fits else DOES_NOT_FIT


def _fit_commands(chosen: Collection[str], told: Mapping[str, Any]) -> int:
    """Measure commands; returns the exit code."""
    from zico.cli import measure

    if "," in (told["device"] or ""):
        raise ConfigError(f"--device: jobs are measured on one device: give one of {told['device']}")
    words = [f"--{name}={told[name]}" for name in ("device", "budget", "region", "policy") if name in chosen]
    times_s = {}
    for name, default_s in (("seconds", measure.SECONDS), ("deadline", measure.DEADLINE_S)):
        times_s[name] = default_s if told[name] is None else told[name]
        if not 0 < times_s[name] <= measure.MOST_S:
            raise ConfigError(f"--{name} {told[name]:g}: give seconds above 0, and at most {measure.MOST_S:g}")
    return measure.run_measured(
        told["given"],
        words,
        mps=told["mps"],
        share_frozen=told["share_frozen"],
        seconds=times_s["seconds"],
        deadline_s=times_s["deadline"],
        json_path=told["json_path"],
    )


def _fit_files(files: tuple[Path, ...], told: Mapping[str, Any]) -> int:
    """Compute whether traces fit; returns the exit code."""
    from zico.scheduler.fit import Answer
    from zico.scheduler.fit import fit as fit_together
    from zico.trace.files import read_trace

    budget, save, policy = told["budget"], told["save"], policy_named(told["policy"])
    budget_bytes = _size("--budget", budget)
    trace_of = {file: read_trace(file, whole=told["whole"]) for file in dict.fromkeys(files)}
    region_bytes = _region(told["region"], budget_bytes, [trace.origin.device for trace in trace_of.values()])
    budget_regions = budget_bytes // region_bytes
    whole_bytes = budget_regions * region_bytes
    if whole_bytes != budget_bytes:
        click.echo(
            f"zico: of --budget {budget}, {format_bytes(whole_bytes)} are whole regions of "
            f"{format_bytes(region_bytes)}: give a smaller --region to use the rest",
            err=True,
        )
    load_of = {file: _load(file, trace, region_bytes) for file, trace in trace_of.items()}
    loads = [dataclasses.replace(load_of[file], name=name) for file, name in zip(files, _names(files), strict=True)]
    points_of, asked = None, "zico fit without --save none"
    if save != "none" or told["device_model"]:
        points_of = laboratory.part("simulator.points", "points_on", asked)(told["device_model"], save)
    found = fit_together(loads, budget_regions, policy, region_bytes)
    if points_of is not None and found.answer is not Answer.FITS:
        fit_saving = laboratory.part("simulator.saving", "fit_saving", asked)
        known = {}
        for file, trace in trace_of.items():
            if sys.stderr.isatty():
                click.echo(f"zico: planning how {file.name} could do with less", err=True)
            known[file] = points_of(trace, len(files))  # takes half a minute
        points = [known[file] for file in files]
        found = fit_saving(found, loads, points, budget_regions, policy, region_bytes)
    peak_bytes = found.peak * region_bytes
    report = Report(found.answer.value, whole_bytes, region_bytes, told["policy"], peak_bytes, found.reason, found.jobs)
    if not told_as_json(report, told["json_path"]):
        _show(report)
    return DOES_NOT_FIT if found.answer is Answer.NO else FITS


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text, whole_bytes=_LARGEST)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _region(region: str | None, budget_bytes: int, devices: Sequence[str]) -> int:
    """Return the bytes of a region: as given, or as ``zico run`` would take them for jobs of these devices."""
    if region is None:
        on_host = all(device == HOST or device.startswith("cpu") for device in devices)
        return DEFAULT_REGION_BYTES if on_host else max(cuda_region_bytes(budget_bytes), _LEAST_CUDA_REGION)
    region_bytes = _size("--region", region)
    if region_bytes & (region_bytes - 1) or region_bytes < MIB // 16:
        raise ConfigError(f"--region {region!r}: give a power of two, 64KiB or more")
    return region_bytes


def _names(files: Sequence[Path]) -> list[str]:
    """Return the files' own names, numbered where two are alike."""
    stems = [file.name.split(".")[0] or file.name for file in files]
    seen: dict[str, int] = {}
    names = []
    for stem in stems:
        seen[stem] = seen.get(stem, 0) + 1
        names.append(f"{stem}-{seen[stem]}" if stems.count(stem) > 1 else stem)
    return names


def _load(file: Path, trace: Trace, region_bytes: int) -> Load:
    """Return a trace's iteration in regions, as a plan for regions lays it out."""
    from zico.planning.packing.from_trace import iteration_problem
    from zico.scheduler.curves import held_in_regions, profile_of
    from zico.scheduler.simulate import Load

    problem = iteration_problem(trace).problem
    if problem.tick_ns is None or problem.tick_ns[-1] <= problem.tick_ns[0]:
        raise CommandError(f"{file}: the trace has no times: record it with zico trace", exit_code=FAILED)
    try:
        held = held_in_regions(problem, region_bytes)
    except ProblemError as error:
        raise CommandError(f"{file}: {error}", exit_code=FAILED) from error
    return Load(file.name, profile_of(held, problem.tick_ns[: len(held) + 1]), int(held.min()))


def _show(report: Report) -> None:
    console = TextConsole()
    table = console.table(("job", "peak alone", "persistent", "iteration", "delay", "slower by"), no_wrap=True)
    table.add_column("reason")
    for job in report.jobs:
        slower = f"{(1 / job.normalised - 1) * 100:.0f} %" if job.normalised else "-"
        table.add_row(
            job.name,
            format_bytes(job.peak_bytes),
            format_bytes(job.persistent_bytes),
            format_seconds(job.iteration_s),
            format_seconds(job.delay_s) if job.normalised else "-",
            slower,
            job.reason,
        )
    console.print(table)
    peak = "at least" if not any(job.normalised for job in report.jobs) else "peak"
    console.say(
        f"{report.answer}: {report.reason} ({peak} {format_bytes(report.peak_bytes)} of "
        f"{format_bytes(report.budget_bytes)}, policy {report.policy})"
    )
