"""What one iteration of a trace amounts to, as figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from zico.trace.classes import TensorClass, classify, last_reads
from zico.trace.events import NO_NAME, Kind
from zico.trace.lifetimes import live_after_steps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from zico.trace.classes import Labels
    from zico.trace.events import Trace
    from zico.trace.iterations import Iteration, Iterations
    from zico.trace.lifetimes import Lifetimes


# --------------------------------------------------------------------------------------------------
# What a job held while it was recorded, beside what was alive in it: what its allocator costs the
# other jobs.


class HeldFigures(Struct, frozen=True):
    """Regions held in one iteration, as it was."""

    peak_bytes: int
    peak_ratio: float
    """Most bytes of regions held over most bytes alive."""
    mean_ratio: float
    """Bytes of regions held over bytes alive, both integrated over time."""


def held_figures(trace: Trace, life: Lifetimes, begin: int, end: int) -> HeldFigures | None:
    """Return what was held between two events of a trace; ``None`` if it does not say, or nothing lived."""
    kind = trace.events["kind"]
    says = np.flatnonzero(kind == Kind.HELD)
    at = begin + np.flatnonzero(np.isin(kind[begin:end], (Kind.ALLOC, Kind.FREE, Kind.HELD)))
    if not len(says) or not len(at) or says[0] >= end:
        return None
    held = np.append(0, trace.events["size_bytes"][says])[np.searchsorted(says, at, side="right")]
    live = np.append(0, live_after_steps(life))[np.searchsorted(life.step_event, at, side="right")]
    last = trace.events["t_ns"][min(end, len(kind) - 1)]
    lasted_ns = np.diff(np.append(trace.events["t_ns"][at], last))
    alive = float((live * lasted_ns).sum())
    if alive <= 0:
        return None
    peak_bytes = int(held.max())
    return HeldFigures(peak_bytes, peak_bytes / int(live.max()), float((held * lasted_ns).sum()) / alive)


# --------------------------------------------------------------------------------------------------

SCHEMA = "zico.trace_summary.v1"
UNNAMED = "(unnamed)"
_TOP = 8
_NS_PER_S = 1e9


class ClassFigures(Struct, frozen=True):
    """What the tensors of one class amount to."""

    name: str
    tensors: int
    peak_bytes: int
    """Alive when all tensors together peak."""
    mean_lifetime_s: float
    """Weighted by bytes."""


class OperationFigures(Struct, frozen=True):
    """What one operation, by name, amounts to."""

    name: str
    count: int
    """Tensors alive at the peak, or runs."""
    peak_bytes: int = 0
    duration_s: float = 0.0


class TraceSummary(Struct, frozen=True):
    """An iteration's figures; additive changes only."""

    schema_version: str
    path: str
    job: str
    framework: str
    device: str
    source: str
    threshold_bytes: int
    parameters: int
    note: str
    events: int
    dropped: int
    """Events that the recorder could not write."""
    iterations: int
    typical_iterations: int
    found_by: str
    iteration: int
    repeats: bool
    duration_s: float
    steps: int
    """Allocations and frees."""
    tensors: int
    peak_bytes: int
    """The most bytes alive at once."""
    classes: tuple[ClassFigures, ...]
    classes_agree: float | None
    """Share of the peak's bytes with the same class by lifetime and by who reads them; ``None`` if nothing says who."""
    operations_by_bytes: tuple[OperationFigures, ...]
    """Those that asked for most of what is alive at the peak."""
    operations_by_time: tuple[OperationFigures, ...]
    held: HeldFigures | None = None
    """Regions, where Zico's own heap was recorded."""


def summarise(
    trace: Trace, life: Lifetimes, iterations: Iterations, iteration: Iteration, labels: Labels
) -> TraceSummary:
    """Return the figures of one iteration."""
    live_bytes = iteration.live_bytes
    peak = int(np.argmax(live_bytes))
    at_peak = (iteration.lower <= peak) & (iteration.upper > peak)
    events = trace.events
    return TraceSummary(
        schema_version=SCHEMA,
        path=trace.path,
        job=trace.origin.job,
        framework=trace.origin.framework,
        device=trace.origin.device,
        source=trace.origin.source,
        threshold_bytes=trace.origin.threshold_bytes,
        parameters=trace.origin.parameters,
        note=trace.origin.note,
        events=len(events),
        dropped=int(events["size_bytes"][events["kind"] == Kind.DROPPED].sum()),
        iterations=len(iterations),
        typical_iterations=int(iterations.typical.sum()),
        found_by=iterations.how.value,
        iteration=iteration.number,
        repeats=iteration.repeats,
        duration_s=float(iteration.tick_ns[-1]) / _NS_PER_S,
        steps=iteration.n_ticks,
        tensors=len(iteration.row),
        peak_bytes=int(live_bytes[peak]),
        classes=tuple(_of_class(iteration, labels, at_peak, kind) for kind in TensorClass),
        classes_agree=_agreement(trace, life, iteration, labels, at_peak),
        operations_by_bytes=_by_bytes(trace, life, iteration, at_peak),
        operations_by_time=_by_time(trace, iterations, iteration),
        held=held_figures(trace, life, *iterations.events_of(iteration.number)),
    )


def _of_class(iteration: Iteration, labels: Labels, at_peak: NDArray[np.bool_], kind: TensorClass) -> ClassFigures:
    mine = labels == kind
    size_bytes = iteration.size_bytes
    lives_ns = iteration.tick_ns[iteration.upper[mine]] - iteration.tick_ns[iteration.lower[mine]]
    mean_ns = np.average(lives_ns, weights=size_bytes[mine]) if mine.any() else 0.0
    return ClassFigures(kind.label, int(mine.sum()), int(size_bytes[mine & at_peak].sum()), float(mean_ns) / _NS_PER_S)


def _agreement(
    trace: Trace, life: Lifetimes, iteration: Iteration, labels: Labels, at_peak: NDArray[np.bool_]
) -> float | None:
    reads = last_reads(trace, life, iteration)
    if reads is None:
        return None
    by_use = classify(iteration.lower, iteration.upper, iteration.size_bytes, iteration.n_ticks, reads)
    return float(np.average((by_use == labels)[at_peak], weights=iteration.size_bytes[at_peak]))


def _by_bytes(
    trace: Trace, life: Lifetimes, iteration: Iteration, at_peak: NDArray[np.bool_]
) -> tuple[OperationFigures, ...]:
    found = _grouped(life.name[iteration.row[at_peak]], iteration.size_bytes[at_peak])
    return tuple(OperationFigures(_name(trace, name), count, peak_bytes=total) for name, count, total in found)


def _by_time(trace: Trace, iterations: Iterations, iteration: Iteration) -> tuple[OperationFigures, ...]:
    begin, end = iterations.events_of(iteration.number)
    events = trace.events[begin:end]
    operations = events[events["kind"] == Kind.OP]
    found = _grouped(operations["name"], operations["size_bytes"])
    return tuple(OperationFigures(_name(trace, name), count, duration_s=ns / _NS_PER_S) for name, count, ns in found)


def _grouped(names: NDArray[np.int32], values: NDArray[np.int64]) -> Iterable[tuple[int, int, int]]:
    """Return the names with the largest totals, with their counts."""
    different, place, counts = np.unique(names, return_inverse=True, return_counts=True)
    totals = np.zeros(len(different), np.int64)
    np.add.at(totals, place, values)
    top = np.argsort(-totals, kind="stable")[:_TOP]
    return zip(different[top].tolist(), counts[top].tolist(), totals[top].tolist(), strict=True)


def _name(trace: Trace, name: int) -> str:
    return UNNAMED if name == NO_NAME else trace.names[name]
