"""``zico simulate``: jobs, budgets and policies in simulated time, side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zico.base.errors import ConfigError, ProblemError
from zico.base.units import format_bytes, parse_size
from zico.cli.options import STDOUT, check_outputs, errors_end_with, json_option, write_file, write_json, writing_to
from zico.lab.simulator.points import NONE, SWAP, points_of
from zico.planning.saving.registry import SAVES
from zico.report.console import TextConsole
from zico.scheduler.policies import POLICIES, policy_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zico.lab.report.simulation import SimulatedRow, SimulationReport
    from zico.lab.simulator.compare import Horizon, Pool, Result
    from zico.lab.simulator.jobs_file import PointsOf
    from zico.lab.simulator.saving import SavingLoad
    from zico.scheduler.device_model import DeviceModel
    from zico.scheduler.packed import Compiled


# -- what ``zico simulate`` is asked: jobs, budgets, policies and a device, read and checked -------

ORACLE = "oracle"
AUTO = "auto"
_STDIN = "-"
_MOST_BYTES = 1 << 60
_LEAST_REGION = 1 << 10
_MOST_S = 1e8
_SHARE = re.compile(r"\d{1,6}(?:\.\d{0,9})?%")
# A comma may also part a policy's parameters: shift:poll=1ms,ramp=0.7,claims are two policies.
_NEXT_POLICY = re.compile(r",(?=[^,=:]*(?:[:,]|$))")


@dataclasses.dataclass(frozen=True)
class Budget:
    """One budget, as it was asked for and in bytes."""

    text: str
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Means:
    """How jobs may save."""

    policies: tuple[str, ...]
    save: str
    """One of ``SAVES``."""

    @property
    def need(self) -> Callable[[SavingLoad], int]:
        """Return what a job cannot do without: its peak, unless all policies let it go on with less."""
        from zico.lab.simulator.jobs_file import least_of
        from zico.scheduler.simulate import peak_of

        return least_of if set(self.policies) == {AUTO} else peak_of

    def points_of(self, copy_bytes_per_s: float) -> PointsOf | None:
        """Return what makes operating points of a trace over a link, ``None`` where nobody saves."""
        return points_of(self.save if AUTO in self.policies else NONE, copy_bytes_per_s)


@dataclasses.dataclass(frozen=True)
class Work:
    """What is simulated, whatever the policy and the budget."""

    loads: tuple[SavingLoad, ...]
    """In regions."""
    region_bytes: int
    device: DeviceModel
    device_model: str
    seconds: float | None
    seed: int

    def pool(self, budget: Budget) -> Pool:
        """Return what the jobs share."""
        from zico.lab.simulator.compare import Pool

        return Pool(budget.size_bytes // self.region_bytes, self.device, self.region_bytes)

    def horizon(self, policy: Compiled | None) -> Horizon:
        """Return how long to simulate the jobs under a policy."""
        from zico.lab.simulator.compare import horizon_of, round_ns_of

        return horizon_of(self.loads, self.seconds, round_ns_of(policy, len(self.loads)) if policy else 0)


def policies_of(text: str) -> tuple[str, ...]:
    """Return the policies that a list names, each once.

    Raises:
        ConfigError: One is not known; the message lists those that are.
    """
    names = tuple(dict.fromkeys(name.strip() for name in _NEXT_POLICY.split(text)))
    for name in names:
        if name not in {ORACLE, AUTO}:
            policy_named(name)
    return names


def is_to_be_compiled(text: str) -> bool:
    """Tell whether the simulator, or a policy of a list, has no machine code yet."""
    from zico.base.programs import program, program_of

    names = {name.strip().partition(":")[0] for name in _NEXT_POLICY.split(text)} & set(POLICIES)
    programs = {program("scheduler"), *(program_of(policy_named(name).function.__module__) for name in names)}
    return not all(one.is_kept for one in programs)


def region_bytes_of(text: str | None) -> int | None:
    """Return the size of a region, if one is asked for.

    Raises:
        ConfigError: It is no power of two, or too small.
    """
    if text is None:
        return None
    try:
        region_bytes = _size(text)
    except ConfigError:
        region_bytes = 0
    if region_bytes & (region_bytes - 1) or region_bytes < _LEAST_REGION:
        raise ConfigError(f"--region {text!r}: give a power of two, 1KiB or more")
    return region_bytes


def work_of(
    jobs: str,
    budget: str,
    region_bytes: int | None,
    seconds: float | None,
    seed: int,
    device_model: str,
    *,
    means: Means,
) -> tuple[Work, tuple[Budget, ...]]:
    """Read and check the jobs and the budgets; no job may need more than any of these."""
    from zico.lab.simulator.compare import check_fits, check_guarantees
    from zico.lab.simulator.device_models import device_model_named
    from zico.lab.simulator.jobs_file import finest_region, read_jobs
    from zico.lab.simulator.saving import loads_in_regions
    from zico.scheduler.shares import check
    from zico.scheduler.simulate import peak_of

    text, where, folder = _source(jobs)
    device = device_model_named(device_model)
    in_bytes = read_jobs(text, where, folder, region_bytes or 1, means.points_of(device.copy_bytes_per_s))
    check(in_bytes)
    whole_bytes = sum(map(peak_of, in_bytes))
    if whole_bytes == 0:
        raise ConfigError(f"{where}: no job holds memory: give a curve with bytes")
    budgets = _budgets(budget, whole_bytes)
    unit = region_bytes or finest_region(in_bytes)
    loads = loads_in_regions(in_bytes, unit, whole=region_bytes is not None)
    for one in budgets:
        if region_bytes is None:
            check_fits(in_bytes, one.size_bytes, 1, need=means.need)
        check_fits(loads, one.size_bytes // unit, unit, need=means.need)
        check_guarantees(loads, one.size_bytes // unit, unit, device.slowdown)
    if seconds is not None and not 0 < seconds <= _MOST_S:
        raise ConfigError(f"--seconds {seconds:g}: give a number above 0, at most {_MOST_S:g}")
    work = Work(loads, unit, device, device_model or device.name, seconds, seed)
    work.horizon(None)
    return work, budgets


def _source(jobs: str) -> tuple[str | bytes, str, Path]:
    """Return the text of the jobs, what to call it, and where its traces' paths begin."""
    if jobs.lstrip().startswith("{"):
        return jobs, "the jobs", Path()
    if jobs == _STDIN:
        return sys.stdin.buffer.read(), "stdin", Path()
    path = Path(jobs)
    try:
        return path.read_bytes(), jobs, path.parent
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        raise ConfigError(f"{jobs}: {said}: give a file of jobs, or {{...}} itself") from None


def _budgets(text: str, whole_bytes: int) -> tuple[Budget, ...]:
    found: dict[int, str] = {}
    for one in text.split(","):
        found.setdefault(_budget_bytes(one.strip(), whole_bytes), one.strip())
    return tuple(Budget(one, size_bytes) for size_bytes, one in found.items())


def _budget_bytes(text: str, whole_bytes: int) -> int:
    is_share = _SHARE.fullmatch(text)
    try:
        size_bytes = int(float(text[:-1]) * whole_bytes / 100) if is_share else _size(text)
    except ConfigError:
        size_bytes = 0
    if not 0 < size_bytes <= _MOST_BYTES:
        raise ConfigError(
            f"--budget: {text!r} is not a budget: give a size such as 20GiB, or 70% of the sum of the peaks"
        )
    return size_bytes


def _size(text: str) -> int:
    """Return the bytes of a size; a share of something, or no limit, is none."""
    return 0 if text.endswith("%") or text.lower() == "none" else parse_size(text, whole_bytes=_MOST_BYTES)


# --------------------------------------------------------------------------------------------------

FAILED = 2
COMPILING = "zico: compiling; this takes up to a minute, once per machine"
JSON_NAME, TABLE_NAME, THROUGHPUT_NAME = "simulation.json", "table.md", "throughput.png"
SERIAL = "serial"
DEFAULT_POLICIES = tuple(name for name in ("zico", "shift", "claims", SERIAL, "none") if name in POLICIES)
_NS_A_SECOND = 1e9
_DRAWN_ITERATIONS = 6
"""Of the longest job, in a picture of memory."""


@click.command()
@click.argument("jobs", metavar="JOBS.json")
@click.option(
    "--budget", metavar="SIZE[,SIZE...]", required=True, help="Budgets: 20GiB, or 70% of the sum of the jobs' peaks."
)
@click.option(
    "--policy",
    metavar="NAME[,NAME...]",
    default=",".join(DEFAULT_POLICIES),
    show_default=True,
    help=f"Policies: {', '.join((*POLICIES, ORACLE, AUTO))}. NAME:KEY=VALUE sets a parameter.",
)
@click.option(
    "--device-model",
    metavar="NAME",
    default="",
    help="The device that the jobs share; it says how much they slow each other down (default: not at all).",
)
@click.option(
    "--save",
    type=click.Choice(SAVES),
    metavar="MODE",
    default=SWAP,
    show_default=True,
    help=f"How jobs train with less than their peak under the policy auto: {', '.join(SAVES)}. Needs traces with "
    "operations.",
)
@click.option(
    "--region", metavar="SIZE", help="Unit of memory, a power of two (default: so fine that rounding does not matter)."
)
@click.option("--seconds", type=float, metavar="S", help="Length of the simulation (default: by the jobs' iterations).")
@click.option("--seed", type=click.IntRange(0, 1 << 31), default=0, show_default=True, help="Seed of the jobs' jitter.")
@json_option
@click.option(
    "--report",
    "report_dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write pictures, a table and the figures to DIR.",
)
@click.option("--quiet", is_flag=True, help="Do not show progress.")
@errors_end_with(FAILED)
def simulate(  # noqa: PLR0913 - one parameter per option
    *,
    jobs: str,
    budget: str,
    policy: str,
    device_model: str,
    save: str,
    region: str | None,
    seconds: float | None,
    seed: int,
    json_path: Path | None,
    report_dir: Path | None,
    quiet: bool,
) -> int:
    """Simulate the jobs of JOBS.json under each budget and each policy.

    The simulator runs the scheduler's own code. JOBS.json may also be the JSON itself, {"jobs":
    [...]}, or - for stdin.
    """
    from zico.lab.report.simulation import write_simulation_table

    region_bytes = region_bytes_of(region)
    policies = policies_of(policy)
    means = Means(policies, save)
    work, budgets = work_of(jobs, budget, region_bytes, seconds, seed, device_model, means=means)
    check_outputs(json_path, report_dir)
    if not quiet and is_to_be_compiled(policy):
        click.echo(COMPILING, err=True)
    with _progress(len(budgets) * len(policies), quiet=quiet) as advance:
        report = _simulated(work, budgets, policies, advance)
    write_simulation_table(report, sys.stderr if json_path == STDOUT else sys.stdout)
    _write(report, work, budgets, json_path, report_dir)
    return 0


# -- what is simulated -----------------------------------------------------------------------------


def _simulated(
    work: Work, budgets: Sequence[Budget], policies: Sequence[str], advance: Callable[[str], None]
) -> SimulationReport:
    """Run everything, in the order in which it was asked for."""
    from zico.lab.report.simulation import SimulatedLoad, SimulationReport
    from zico.scheduler.simulate import peak_of

    rows: list[SimulatedRow] = []
    notes = [] if set(policies) == {AUTO} else list(_too_tight(work, budgets))
    for budget in budgets:
        results: dict[str, Result] = {}
        for name in policies:
            advance(f"{name}, {budget.text}")
            result = _saving(work, budget, notes) if name == AUTO else _result(work, name, budget)
            if isinstance(result, str):
                notes.append(f"{name} at {format_bytes(budget.size_bytes)}: {result}")
            else:
                results[name] = result
        rows += [_row(name, budget, result, results.get(SERIAL), work.region_bytes) for name, result in results.items()]
    return SimulationReport(
        rows=tuple(rows),
        jobs=tuple(
            SimulatedLoad(
                name=load.name,
                iteration_s=load.profile.duration_ns / _NS_A_SECOND,
                peak_bytes=peak_of(load) * work.region_bytes,
                persistent_bytes=load.persistent * work.region_bytes,
            )
            for load in work.loads
        ),
        sum_of_peaks_bytes=sum(map(peak_of, work.loads)) * work.region_bytes,
        region_bytes=work.region_bytes,
        device_model=work.device_model,
        seed=work.seed,
        notes=tuple(notes),
    )


def _too_tight(work: Work, budgets: Sequence[Budget]) -> Iterator[str]:
    """Yield which jobs no order makes fit: why memory overflows whatever the policy."""
    from zico.scheduler.simulate import peak_of

    kept = sum(load.persistent for load in work.loads if not load.iterations)
    needs = {load.name: peak_of(load) + kept - (0 if load.iterations else load.persistent) for load in work.loads}
    worst = max(needs, key=needs.__getitem__)
    least = needs[worst] * work.region_bytes
    for budget in budgets:
        if budget.size_bytes < least:
            yield (
                f"at {format_bytes(budget.size_bytes)}, {worst} does not fit beside what the other jobs keep between "
                f"iterations: together they need {format_bytes(least)}"
            )


def _result(work: Work, name: str, budget: Budget) -> Result | str:
    """Return what the jobs come to under a policy; for the oracle also why it cannot say."""
    from zico.lab.simulator.compare import possible
    from zico.lab.simulator.compare import simulate as simulate_policy

    pool = work.pool(budget)
    if name != ORACLE:
        policy = policy_named(name)
        return simulate_policy(policy, work.loads, pool, work.horizon(policy), seed=work.seed)
    from zico.lab.simulator.oracle import possible as best_possible

    try:
        found = best_possible(work.loads, pool.budget, pool.device.slowdown)
    except ProblemError as error:
        return str(error)
    return "no schedule lets all jobs train" if found is None else possible(found, work.loads, work.horizon(None))


def _saving(work: Work, budget: Budget, notes: list[str]) -> Result:
    """Return what the jobs come to by turns or with their shares of the budget; says who saves."""
    from zico.lab.simulator.saving import limited, simulate_saving

    result, points = simulate_saving(work.loads, work.pool(budget), work.horizon(None), seed=work.seed)
    for load, point in zip(work.loads, points, strict=True):
        if point is not None:
            longer = limited(load, point).profile.duration_ns / load.profile.duration_ns
            limit = format_bytes(point.limit * work.region_bytes)
            notes.append(
                f"{AUTO} at {format_bytes(budget.size_bytes)}: {load.name} trains in {limit} with --save {point.how}; "
                f"alone, its iteration takes {longer:.2f} times as long"
            )
    return result


def _row(name: str, budget: Budget, result: Result, serial: Result | None, region_bytes: int) -> SimulatedRow:
    from zico.lab.report.simulation import SimulatedRow

    times = [job.slowdown for job in result.jobs if job.slowdown is not None]
    return SimulatedRow(
        policy=name,
        budget_bytes=budget.size_bytes,
        normalised=result.normalised,
        peak_granted_bytes=result.peak * region_bytes,
        deadlocks=result.deadlocks,
        decisions=result.decisions,
        decision_us=result.decision_us,
        jobs=result.jobs,
        jain=result.jain,
        slowdown=max(times) if len(times) == len(result.jobs) else None,
        vs_serial=_mean_ratio(result, serial),
        seconds=result.seconds,
        warm_up_s=result.warm_up_s,
    )


def _mean_ratio(result: Result, other: Result | None) -> float | None:
    """Return the mean over the jobs of their throughput over the other's, as the paper compares with Temporal."""
    if other is None or any(job.normalised <= 0 for job in other.jobs):
        return None
    ratios = [job.normalised / base.normalised for job, base in zip(result.jobs, other.jobs, strict=True)]
    return sum(ratios) / len(ratios)


@contextlib.contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being simulated; yields what is called before each of ``total`` rows."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = TextConsole(sys.stderr)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("", total=total, completed=-1)

        def advance(what: str) -> None:
            progress.update(task, advance=1, description=what)

        yield advance


# -- what is written -------------------------------------------------------------------------------


def _write(
    report: SimulationReport, work: Work, budgets: Sequence[Budget], json_path: Path | None, report_dir: Path | None
) -> None:
    """Write what was asked for."""
    from zico.lab.report.simulation import simulation_markdown

    if json_path is not None:
        with writing_to(json_path):
            write_json(report, json_path)
    if report_dir is not None:
        with writing_to(report_dir):
            write_json(report, report_dir / JSON_NAME)
            pictures = _draw(report, work, budgets, report_dir)
            write_file(report_dir / TABLE_NAME, simulation_markdown(report, pictures).encode())
        click.echo(f"zico: report in {report_dir}", err=True)


def _draw(report: SimulationReport, work: Work, budgets: Sequence[Budget], report_dir: Path) -> dict[str, str]:
    """Draw the pictures and return their file names by what they show; say why if they cannot be drawn."""
    from zico.lab.report.simulation import write_throughput

    try:
        write_throughput(report, report_dir / THROUGHPUT_NAME)
        pictures = {"Throughput of each policy against the budget": THROUGHPUT_NAME}
        for budget in budgets:
            for name in report.policies:
                if name not in {ORACLE, AUTO}:
                    pictures |= _draw_memory(work, name, budget, report_dir)
    except ConfigError as error:
        click.echo(f"zico: no pictures: {error}", err=True)
        return {}
    return pictures


def _draw_memory(work: Work, name: str, budget: Budget, report_dir: Path) -> dict[str, str]:
    """Draw what the jobs hold over a few iterations."""
    from zico.lab.report.simulation import write_memory
    from zico.lab.simulator.compare import memory

    policy = policy_named(name)
    held = memory(policy, work.loads, work.pool(budget), _span_ns(work, policy), seed=work.seed)
    file_name = f"memory-{_as_name(name)}-{_as_name(budget.text)}.png"
    title = f"Policy {name}, budget {format_bytes(budget.size_bytes)}"
    names = [load.name for load in work.loads]
    write_memory(title, names, held.t_s, held.regions * work.region_bytes, budget.size_bytes, report_dir / file_name)
    return {title: file_name}


def _span_ns(work: Work, policy: Compiled) -> tuple[int, int]:
    """Return a time after the warm-up, and after the last arrival, in which the longest job has some iterations."""
    horizon = work.horizon(policy)
    begin_ns = max(horizon.warm_up_ns, *(load.arrive_ns for load in work.loads))
    length_ns = _DRAWN_ITERATIONS * max(load.profile.duration_ns for load in work.loads)
    return begin_ns, min(begin_ns + length_ns, horizon.until_ns)


def _as_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text.replace("%", "pct")).strip("-")
