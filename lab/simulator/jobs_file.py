"""Jobs for the simulator from JSON: curves by hand, or recorded traces. Everything is checked before anything runs.

What comes out are loads whose regions are single bytes; ``in_regions`` makes larger ones of them.
The format is described in ``docs/simulate.md``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from zico.base.decoding import WRONG
from zico.base.errors import ConfigError, ZicoError
from zico.base.units import format_bytes, parse_size
from zico.lab.simulator.saving import OperatingPoint, SavingLoad
from zico.scheduler.curves import held_in_regions, profile_of, profile_of_points
from zico.scheduler.shares import floor_of
from zico.scheduler.simulate import LoadPhase, peak_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zico.scheduler.state import Profile
    from zico.trace.events import Trace


MOST_JOBS = 10_000
_LEAST_S, _MOST_S = 1e-6, 1e6
_MOST_BYTES = 1 << 60
_UNITS = 30  # bits: the sum of the jobs' peaks stays in the 32-bit curves of compiled policies
_NS_A_SECOND = 1e9
_SHOWN_CHARS = 40

GIVE = {
    "jobs": 'a list with at least one job: {"jobs": [...]}',
    "name": "text",
    "iteration_s": "seconds, at least a millionth and at most a million",
    "persistent_bytes": "whole bytes, 0 or more, or a size such as 3GiB",
    "curve": "a list of [seconds from the iteration's begin, bytes], with seconds that do not fall",
    "trace": "the path of a trace, relative to the jobs' file",
    "iterations": "a whole number above 0, or leave it out for a job that stays",
    "weight": "a number above 0",
    "priority": "a whole number",
    "slo": "by what share the job may be slower than alone, 0 or more: 0.1",
    "jitter": "by what share an iteration may be longer or shorter, from 0 to below 1",
    "arrive_s": "seconds, 0 or more",
    "phases": 'a list of later iterations: [{"after": 100, "iteration_s": ..., ...}]',
    "less": "a list of [bytes that it does with, seconds that an iteration takes then]",
    "after": "a whole number of iterations, above 0 and rising",
    "count": f"a whole number from 1 to {MOST_JOBS}",
}
"""What each field takes, as the errors say it."""

_MOST_ITERATIONS = 1 << 40
_MISSING = re.compile("missing required field `(.+?)`")
Bytes = int | float | str
PointsOf = Callable[["Trace", int], tuple[OperatingPoint, ...]]
"""Makes the operating points of a trace's job, in bytes, beside so many jobs, itself included."""


class ShapeEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an iteration does, as it is written."""

    iteration_s: float | None = None
    persistent_bytes: Bytes | None = None
    curve: list[tuple[float, Bytes]] | None = None
    trace: str | None = None


class PhaseEntry(ShapeEntry, frozen=True, kw_only=True):
    """What a job's iterations do later."""

    after: int


class JobEntry(ShapeEntry, frozen=True, kw_only=True):
    """One job as it is written."""

    name: str = ""
    iterations: int | None = None
    weight: float = 1.0
    priority: int = 0
    slo: float | None = None
    jitter: float = 0.0
    arrive_s: float = 0.0
    count: int = 1
    phases: list[Any] = []
    less: list[tuple[Bytes, float]] = []


Entry = TypeVar("Entry", bound=ShapeEntry)


def read_jobs(
    text: str | bytes, where: str, folder: Path, region_bytes: int = 1, points_of: PointsOf | None = None
) -> tuple[SavingLoad, ...]:
    """Return the jobs that a JSON text describes, in bytes: a region is a byte.

    Args:
        text: The JSON.
        where: What errors call it.
        folder: What the paths of traces are relative to.
        region_bytes: Into regions of which size tensors of a trace are laid; 1: their bytes alone
            count.
        points_of: Makes the points of a job with a trace that says nothing of ``less``; by default
            it has none.

    Raises:
        ConfigError: It is no JSON, or describes no jobs, or one that cannot be; the message says
            where and why.
    """
    try:
        content = msgspec.json.decode(text)
    except WRONG as error:
        raise ConfigError(f"{where}: is not JSON ({error}): give {GIVE['jobs']}") from None
    entries = content.get("jobs") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: has no jobs: give {GIVE['jobs']}")
    unknown = sorted(set(content) - {"jobs"})
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]!r} is not a field of it: give {GIVE['jobs']}")
    loads: list[SavingLoad] = []
    traced: dict[str, Path] = {}
    for number, raw in enumerate(entries, 1):
        made = _job(where, number, raw, folder, region_bytes)
        if isinstance(raw.get("trace"), str) and not raw.get("less"):
            traced |= {load.name: folder / raw["trace"] for load in made}
        loads += made
        if len(loads) > MOST_JOBS:
            raise ConfigError(f"{where}: describes more than {MOST_JOBS} jobs: give fewer")
    _check_together(loads, where)
    if points_of is None:
        return tuple(loads)
    from zico.trace.files import read_trace

    known = {path: points_of(read_trace(path), len(loads)) for path in dict.fromkeys(traced.values())}
    return tuple(
        dataclasses.replace(load, points=known[traced[load.name]]) if load.name in traced else load for load in loads
    )


def _check_together(loads: Sequence[SavingLoad], where: str) -> None:
    seen: set[str] = set()
    for load in loads:
        if load.name in seen:
            raise ConfigError(f"{where}: two jobs are named {load.name!r}: give each its own name, or one job a count")
        seen.add(load.name)
    if sum(map(peak_of, loads)) > _MOST_BYTES:
        raise ConfigError(f"{where}: the jobs' peaks exceed {format_bytes(_MOST_BYTES)} together: give smaller curves")


class _Reader(Generic[Entry]):
    """Check what one job or phase says; every error names where it stands, the field, its value and what to give."""

    def __init__(self, where: str, raw: Any, kind: type[Entry]) -> None:  # noqa: ANN401 - any JSON
        self.where = where
        if not isinstance(raw, dict):
            raise ConfigError(f"{where} is {_shown(raw)}: give an object with fields")
        self._raw = raw
        unknown = sorted(set(raw) - set(kind.__struct_fields__))
        if unknown:
            raise ConfigError(f"{where}: {unknown[0]!r} is not a field: {', '.join(kind.__struct_fields__)} are")
        try:
            self.entry = msgspec.convert(raw, kind)
        except msgspec.ValidationError as error:
            missing = _MISSING.search(str(error))
            path = str(error).rpartition("`$.")[2].rstrip("`")
            raise self.error(missing[1] if missing else path.split("[")[0].split(".")[0]) from None
        self.check({"iteration_s": self.entry.iteration_s is None or _LEAST_S <= self.entry.iteration_s <= _MOST_S})

    def error(self, field: str, what: str = "", give: str = "") -> ConfigError:
        """Return the error about a field; by default its value is what is wrong."""
        said = what or (f"is {_shown(self._raw[field])}" if field in self._raw else "is missing")
        return ConfigError(f"{self.where}: {field} {said}: give {give or GIVE[field]}")

    def check(self, holds: Mapping[str, bool]) -> None:
        """Refuse the first field whose condition does not hold."""
        for field, is_right in holds.items():
            if not is_right:
                raise self.error(field)

    def shape(self, folder: Path, region_bytes: int) -> tuple[Profile, int]:
        """Return what an iteration holds, and what is kept after it, in bytes."""
        entry = self.entry
        if (entry.curve is None) == (entry.trace is None):
            has = "has neither a curve nor a trace" if entry.curve is None else "has both a curve and a trace"
            raise ConfigError(f"{self.where}: {has}: give one of them")
        return self._from_trace(folder, region_bytes) if entry.trace is not None else self._from_curve()

    def _from_trace(self, folder: Path, region_bytes: int) -> tuple[Profile, int]:
        entry = self.entry
        for field in ("iteration_s", "persistent_bytes"):
            if getattr(entry, field) is not None:
                raise ConfigError(f"{self.where}: has a trace and {field}, which the trace tells: leave {field} out")
        path = folder / (entry.trace or "")
        try:
            return _traced(path, region_bytes)
        except ZicoError as error:
            said = str(error)
            raise ConfigError(f"{self.where}: trace {said if str(path) in said else f'{path}: {said}'}") from None

    def _from_curve(self) -> tuple[Profile, int]:
        entry = self.entry
        if entry.iteration_s is None:
            raise self.error("iteration_s", "is missing beside the curve")
        t_s = [point[0] for point in entry.curve or ()]
        self._check_times(t_s)
        held = [self.bytes_of("curve", point[1]) for point in entry.curve or ()]
        kept = entry.persistent_bytes
        persistent = min(held) if kept is None else self.bytes_of("persistent_bytes", kept)
        duration_ns = round(entry.iteration_s * _NS_A_SECOND)
        return profile_of_points(t_s, held, duration_ns, persistent), persistent

    def _check_times(self, t_s: Sequence[float]) -> None:
        if not t_s:
            raise self.error("curve", "has no points")
        for before, after in itertools.pairwise(t_s):
            if after < before:
                raise self.error("curve", f"goes back in time, from {before:g} s to {after:g} s")
        if t_s[0] < 0:
            raise self.error("curve", f"begins at {t_s[0]:g} s, before the iteration does")
        end_s = self.entry.iteration_s or 0
        if round(t_s[-1] * _NS_A_SECOND) > round(end_s * _NS_A_SECOND):
            raise ConfigError(
                f"{self.where}: curve goes on at {t_s[-1]:g} s, but iteration_s is {end_s:g}: "
                "give earlier points or a longer iteration"
            )

    def bytes_of(self, field: str, value: Bytes | None) -> int:
        """Return a field's bytes, given as a number or a size."""
        if isinstance(value, str):
            try:
                return 0 if value.strip() in {"0", "0B"} else parse_size(value, whole_bytes=_MOST_BYTES)
            except ConfigError:
                raise self.error(field, f"has {_shown(value)} for bytes", GIVE["persistent_bytes"]) from None
        if value is None or not 0 <= value <= _MOST_BYTES or value != int(value):
            raise self.error(field, f"has {_shown(value)} for bytes", GIVE["persistent_bytes"])
        return int(value)


def _job(where: str, number: int, raw: Any, folder: Path, region_bytes: int) -> list[SavingLoad]:  # noqa: ANN401 - any JSON
    """Return one job, as often as it says."""
    name = raw.get("name") if isinstance(raw, dict) else None
    called = repr(name) if isinstance(name, str) and name else str(number)
    reader = _Reader(f"{where}: job {called}", raw, JobEntry)
    entry = reader.entry
    reader.check(_job_holds(entry))
    profile, persistent = reader.shape(folder, region_bytes)
    load = SavingLoad(
        entry.name or (Path(entry.trace).name.split(".")[0] if entry.trace else f"job-{number}"),
        profile,
        persistent,
        jitter=entry.jitter,
        arrive_ns=round(entry.arrive_s * _NS_A_SECOND),
        iterations=entry.iterations or 0,
        floor=0.0 if entry.slo is None else floor_of(entry.slo),
        weight=entry.weight,
        priority=entry.priority,
        phases=tuple(_phases(reader.where, entry.phases, folder, region_bytes)),
        points=tuple(_points(reader)),
    )
    if entry.count == 1:
        return [load]
    return [dataclasses.replace(load, name=f"{load.name}-{i}") for i in range(1, entry.count + 1)]


def _job_holds(entry: JobEntry) -> dict[str, bool]:
    return {
        "weight": 0 < entry.weight < math.inf,
        "slo": entry.slo is None or 0 <= entry.slo < math.inf,
        "jitter": 0 <= entry.jitter < 1,
        "arrive_s": 0 <= entry.arrive_s <= _MOST_S,
        "iterations": entry.iterations is None or 0 < entry.iterations < _MOST_ITERATIONS,
        "count": 1 <= entry.count <= MOST_JOBS,
        "priority": abs(entry.priority) < 1 << 31,
    }


def _points(reader: _Reader[JobEntry]) -> Iterator[OperatingPoint]:
    for limit, iteration_s in reader.entry.less:
        if not _LEAST_S <= iteration_s <= _MOST_S:
            raise reader.error("less", f"has {iteration_s:g} for seconds", GIVE["iteration_s"])
        yield OperatingPoint("swap", reader.bytes_of("less", limit), round(iteration_s * _NS_A_SECOND))


def _phases(where: str, raws: Sequence[Any], folder: Path, region_bytes: int) -> Iterator[LoadPhase]:
    before = 0
    for number, raw in enumerate(raws, 1):
        reader = _Reader(f"{where}, phase {number}", raw, PhaseEntry)
        after = reader.entry.after
        reader.check({"after": before < after < _MOST_ITERATIONS})
        before = after
        yield LoadPhase(after, *reader.shape(folder, region_bytes))


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def _traced(path: Path, region_bytes: int) -> tuple[Profile, int]:
    """Return a trace's typical iteration and what it keeps, in bytes."""
    from zico.planning.packing.from_trace import iteration_problem
    from zico.trace.files import read_trace

    found = iteration_problem(read_trace(path))
    tick_ns = found.problem.tick_ns
    if tick_ns is None or tick_ns[-1] <= tick_ns[0]:
        raise ConfigError("has no times: record it with zico trace")
    held = found.iteration.live_bytes if region_bytes == 1 else held_in_regions(found.problem, region_bytes)
    held = held[: len(tick_ns) - 1] * (1 if region_bytes == 1 else region_bytes)
    return profile_of(held, tick_ns[: len(held) + 1]), int(held.min())


def least_of(load: SavingLoad) -> int:
    """Return the fewest regions with which a job can go on."""
    return min([peak_of(load), *(point.limit for point in load.points)])


def finest_region(loads: Sequence[SavingLoad]) -> int:
    """Return the least power of two of bytes in which compiled policies can count all that the jobs hold."""
    together = sum(map(peak_of, loads))
    return int(1 << max(0, together.bit_length() - _UNITS))
