"""Write a run as a trace that ui.perfetto.dev opens: Chrome's JSON form of trace events.

Each job is a process with three tracks, iterations and both kinds of waits, and counters of its
bytes. The pool is a process, too, with counters of the budget and of physical memory. Times are
microseconds since the broker began.

Source: Trace Event Format, Google, 2016. Spans of one track must not overlap in part.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from zico.broker.protocol.messages import WaitKind
from zico.report.files import write_atomically
from zico.report.picture import WAIT_LABELS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from zico.report.model import Floats, Ints, Record

POOL_PID = 1
"""Jobs have the numbers after it, in their order."""
ITERATIONS_TID = 1
WAIT_TIDS = {WaitKind.BOUNDARY: 2, WaitKind.ALLOCATION: 3}
_US = 1e6
_DIGITS = 3

Event = dict[str, Any]


def write_trace(record: Record, path: Path) -> None:
    """Write the run to ``path``, atomically."""
    content = {"traceEvents": list(events(record)), "displayTimeUnit": "ms"}
    write_atomically(path, msgspec.json.encode(content) + b"\n")


def events(record: Record) -> Iterator[Event]:
    """Yield the trace's events: names of tracks, then each process's own."""
    yield _name(POOL_PID, 0, "process_name", "pool")
    yield from _counter(POOL_PID, "budget", record.budget_t_s, record.budget_bytes)
    yield from _counter(POOL_PID, "physical", record.t_s, record.physical_bytes)
    blockers = record.blockers()
    for job, name in enumerate(record.names):
        pid = POOL_PID + 1 + job
        yield _name(pid, 0, "process_name", name)
        yield _name(pid, ITERATIONS_TID, "thread_name", "iterations")
        yield from _iterations(record, job, pid)
        for kind, tid in WAIT_TIDS.items():
            yield _name(pid, tid, "thread_name", WAIT_LABELS[kind])
            yield from _waits(record, job, kind, blockers)
        yield from _counter(pid, "held", record.t_s, record.held_bytes[:, job])
        if record.out_bytes[:, job].any():
            yield from _counter(pid, "in a tier", record.t_s, record.out_bytes[:, job])


def _iterations(record: Record, job: int, pid: int) -> Iterator[Event]:
    """Yield a span for each iteration: from the last one's end, or the end of the wait at that boundary."""
    ends = np.sort(record.boundaries_of(job))
    began = np.sort(record.waits_of(job, WaitKind.BOUNDARY)[:, 1])
    held = record.t_s[record.held_bytes[:, job] > 0]
    before_s = min(float(held[0]), float(ends[0])) if len(held) and len(ends) else 0.0
    for end_s in ends.tolist():
        woke = began[np.searchsorted(began, before_s) : np.searchsorted(began, end_s, side="right")]
        start_s = float(woke[-1]) if len(woke) else before_s
        yield _span(pid, ITERATIONS_TID, "iteration", start_s, end_s)
        before_s = end_s


def _waits(record: Record, job: int, kind: WaitKind, blockers: list[tuple[int, ...]]) -> Iterator[Event]:
    """Yield a span for each wait of a kind, which names the jobs that it was for."""
    those = np.flatnonzero((record.wait_job == job) & (record.wait_kind == kind))
    those = those[np.argsort(record.wait_t_s[those, 0], kind="stable")]
    for wait, after in itertools.zip_longest(those.tolist(), those[1:].tolist()):
        start_s, end_s = record.wait_t_s[wait].tolist()
        if after is not None:
            end_s = min(end_s, float(record.wait_t_s[after, 0]))
        names = [record.names[other] for other in blockers[wait]]
        title = f"waits for {', '.join(names)}" if names else "waits"
        yield _span(POOL_PID + 1 + job, WAIT_TIDS[kind], title, start_s, end_s) | {"args": {"for": names}}


def _counter(pid: int, name: str, t_s: Floats, values: Ints) -> Iterator[Event]:
    """Yield a counter's value where it changes."""
    for at in np.flatnonzero(np.diff(values, prepend=-1)).tolist():
        ts = round(float(t_s[at]) * _US, _DIGITS)
        yield {"ph": "C", "pid": pid, "ts": ts, "name": name, "args": {"bytes": int(values[at])}}


def _span(pid: int, tid: int, name: str, start_s: float, end_s: float) -> Event:
    # Both ends are rounded before they are subtracted, so that neighbours touch and never overlap.
    ts, end = round(start_s * _US, _DIGITS), round(end_s * _US, _DIGITS)
    return {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": round(max(end - ts, 0.0), _DIGITS), "name": name}


def _name(pid: int, tid: int, what: str, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": {"name": name}}
