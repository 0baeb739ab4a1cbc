"""Write a run as one page of HTML that needs no network and no script: picture, tables, figures.

The picture is SVG: memory of each job stacked over time under the budget, below it a lane per job.
A pointer that rests on a wait shows how long it was and for whom. The figures of the run lie in
the page as JSON, in the element ``report``.
"""

from __future__ import annotations

import dataclasses
import itertools
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from zico.base.decoding import to_json
from zico.base.units import GIB, MIB, format_bytes
from zico.broker.protocol.messages import WaitKind
from zico.report.attribution import PARTS, Attribution
from zico.report.files import write_atomically
from zico.report.picture import COLOURS, OUT_LABEL, WAIT_LABELS, fullest_rows, in_order, last_iterations, whole_span
from zico.report.table import (
    SAVING_COLUMNS,
    TIME_COLUMNS,
    attention_lines,
    columns_of,
    job_rows,
    pool_lines,
    saving_rows,
    time_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from zico.report.model import Floats, Ints, Record, RunReport
    from zico.report.picture import Span

WIDTH, HEIGHT = 1200, 280
"""A panel of memory has this size in units of the SVG, about a pixel each."""
LEFT, RIGHT, TOP = 150, 1180, 14
LANE, GAP, FOOT = 22, 12, 26
TICKS = 6
NARROWEST = 0.8
"""Waits that would be drawn closer together than this become one."""
MOST_CHARS = 18
"""Characters of a name beside its lane; a longer one is cut."""
NOBODY = "nobody seen"
WAITS_NOTE = (
    "A wait for two jobs counts for both. A wait inside an allocation is seen to end at the broker's next look, up to "
    "20 ms late, so these sums can exceed the table above."
)
TIME_NOTE = (
    "Iterations: their number times the job's own time for one. Page faults are an estimate. Slower computing is what "
    "remains: neighbours in the caches, at the memory or on the GPU."
)
_COLOURS_OF_PARTS = ("#009E73", "#F0E442", "#BBBBBB", "#444444", "#CC79A7", "#56B4E9", "#0072B2", "#D55E00", "#DDDDDD")
PART_COLOURS = dict(zip(PARTS, _COLOURS_OF_PARTS, strict=True))
_TITLE = "Report of a run"

# The policy keeps the page from loading anything, whatever stands in it.
_HEAD = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{_TITLE}</title>
<style>
:root {{ --ink: #222; --paper: #fff; --faint: #ddd; --boundary: #bbb; --allocation: #444; --physical: #7a0019 }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #ddd; --paper: #181818; --faint: #444; --boundary: #777; --allocation: #eee; --physical: #ff8fa3 }}
}}
body {{ margin: 1.5em auto; max-width: 1240px; padding: 0 1em; color: var(--ink); background: var(--paper);
  font: 15px/1.45 system-ui, sans-serif }}
svg {{ width: 100%; height: auto; display: block }}
svg text {{ fill: var(--ink); font-size: 13px }}
.budget {{ stroke: var(--ink); stroke-width: 1.6; stroke-dasharray: 6 3; fill: none }}
.physical {{ stroke: var(--physical); stroke-width: 0.8; fill: none }}
.grid {{ stroke: var(--faint); stroke-width: 0.6 }}
.ends {{ stroke: var(--ink); stroke-width: 0.9 }}
.boundary {{ fill: var(--boundary); background: var(--boundary) }}
.allocation {{ fill: var(--allocation); background: var(--allocation) }}
.out {{ opacity: 0.5 }}
.scroll {{ overflow-x: auto }}
table {{ border-collapse: collapse; margin: 0.5em 0 }}
th, td {{ padding: 0.15em 0.7em; text-align: right; border-bottom: 1px solid var(--faint); white-space: nowrap }}
th:first-child, td:first-child {{ text-align: left }}
.key span {{ margin-right: 1.4em; white-space: nowrap }}
.key i {{ display: inline-block; width: 0.9em; height: 0.9em; margin-right: 0.4em; vertical-align: -0.1em }}
</style>
</head>
<body>
"""


def write_page(report: RunReport, record: Record | None, path: Path) -> None:
    """Write the page to ``path``, atomically; without a record it has no picture."""
    write_atomically(path, page(report, record).encode())


def page(report: RunReport, record: Record | None) -> str:
    """Return the page. Nothing in it is taken for HTML that jobs or commands are called."""
    parts = [_HEAD, f"<h1>{_TITLE}</h1>"]
    if record is not None and len(record.t_s) and record.names:
        record = in_order(record, [job.name for job in report.jobs])
        parts += _pictures(record)
    else:
        record = None
        parts.append("<p>There is no picture, because no job joined the pool or its history is missing.</p>")
    parts += ["<h2>Jobs</h2>", _table("jobs", columns_of(report), job_rows(report))]
    if saved := list(saving_rows(report)):
        parts += ["<h2>Memory that left the budget</h2>", _table("saving", SAVING_COLUMNS, saved)]
    parts += _times(report)
    if record is not None and len(record.wait_job):
        parts += _waits_table(record)
    parts += ["<h2>Pool</h2>", _list([*pool_lines(report), *attention_lines(report)])]
    parts += ["<h2>Commands</h2>", _list(f"{job.name}: {job.command}, {job.wall_s:.1f} s" for job in report.jobs)]
    figures = to_json(report).decode().replace("<", "\\u003c")  # so that no text in it ends the element
    parts.append(f'<script type="application/json" id="report">\n{figures}</script>\n</body>\n</html>\n')
    return "\n".join(parts)


# -- the picture -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Scale:
    """Where a panel draws an instant and a number of bytes."""

    span: Span
    top_bytes: float
    bottom_bytes: float

    def x(self, t_s: Floats | float) -> Floats:
        share = (np.asarray(t_s, np.float64) - self.span.start_s) / (self.span.stop_s - self.span.start_s)
        return LEFT + np.clip(share, 0.0, 1.0) * (RIGHT - LEFT)

    def y(self, size_bytes: Ints | Floats | float) -> Floats:
        share = (self.top_bytes - np.asarray(size_bytes, np.float64)) / (self.top_bytes + self.bottom_bytes)
        return TOP + share * HEIGHT


def _pictures(record: Record) -> Iterator[str]:
    """Yield the whole run, its last iterations enlarged if there are many, and the key."""
    whole, last = whole_span(record), last_iterations(record)
    yield _panel(record, whole, "the whole run")
    if last is not None:
        yield _panel(record, last, "its last iterations")
    key = [_key(f"background:{_colour(job)}", label) for job, label in enumerate(_labels(record))]
    key.append(_key("border-top:2px dashed", f"budget {format_bytes(record.most_budget_bytes)}"))
    key.append(_key("border-top:2px solid var(--physical)", "physical, by the kernel"))
    if record.out_bytes.any():
        key.append(_key("border:1px dotted", f"{OUT_LABEL}: below the axis"))
    key += [_key(f"background:var(--{kind.name.lower()})", WAIT_LABELS[kind]) for kind in WaitKind]
    yield f'<p class="key">{" ".join(key)}</p>'


def _labels(record: Record) -> list[str]:
    pairs = zip(record.names, record.peak_bytes.tolist(), strict=True)
    return [f"{name} (peak {format_bytes(peak)})" for name, peak in pairs]


def _panel(record: Record, span: Span, title: str) -> str:
    """Return one SVG: memory, below it the lanes."""
    rows = fullest_rows(record, span)
    held, out = record.held_bytes[rows].T, record.out_bytes[rows].T
    top = 1.05 * max(record.most_budget_bytes, float(held.sum(axis=0).max()), float(record.physical_bytes[rows].max()))
    scale = _Scale(span, top, 1.05 * float(out.sum(axis=0).max()))
    t_s = np.append(record.t_s[rows], span.stop_s)
    lanes_at = TOP + HEIGHT + GAP
    foot = lanes_at + LANE * len(record.names)
    parts = [
        f"<h2>{title}</h2>",
        f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {foot + FOOT}" role="img" aria-label="Memory, {title}">',
        *_axes(scale, foot),
        *_stack(_labels(record), t_s, held, scale, sign=1),
        *(_stack([f"{name}: {OUT_LABEL}" for name in record.names], t_s, out, scale, sign=-1) if out.any() else ()),
        _line("physical", scale.x(t_s), scale.y(record.physical_bytes[rows])),
        _line("budget", scale.x(np.append(record.budget_t_s, span.stop_s)), scale.y(record.budget_bytes)),
    ]
    blockers = record.blockers()
    for job, name in enumerate(record.names):
        at = lanes_at + LANE * job
        parts.append(f'<text x="{LEFT - 8}" y="{at + 15}" text-anchor="end">{escape(_short(name))}</text>')
        parts += _lane(record, job, scale, at, blockers)
    return "\n".join([*parts, "</svg></div>"])


def _axes(scale: _Scale, foot: int) -> Iterator[str]:
    """Yield both axes' lines and labels."""
    unit_bytes, unit = (GIB, "GiB") if scale.top_bytes >= GIB else (MIB, "MiB")
    for value in _round_steps(-scale.bottom_bytes / unit_bytes, scale.top_bytes / unit_bytes):
        y = scale.y(value * unit_bytes)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{abs(value):g} {unit}</text>'
    for value in _round_steps(scale.span.start_s, scale.span.stop_s):
        x = scale.x(value)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{foot}"/>'
        yield f'<text x="{x:.1f}" y="{foot + 18}" text-anchor="middle">{value:g} s</text>'


def _round_steps(low: float, high: float) -> list[float]:
    """Return about ``TICKS`` round numbers from ``low`` to ``high``."""
    rough = (high - low) / TICKS
    power = 10.0 ** np.floor(np.log10(rough))
    step = float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough))
    steps = np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step
    return [round(value, 9) + 0.0 for value in steps.tolist()]  # never -0


def _stack(titles: Sequence[str], t_s: Floats, sizes: Ints, scale: _Scale, *, sign: int) -> Iterator[str]:
    """Yield an area for each job, each on those before it; ``sign`` -1 hangs them below the axis."""
    edges = np.vstack([np.zeros_like(sizes[:1]), np.cumsum(sizes, axis=0)]) * sign
    x = scale.x(t_s)
    for job, (below, above) in enumerate(itertools.pairwise(edges)):
        if (below != above).any():
            back = f"{_steps(x, scale.y(above))}L{_steps(x, scale.y(below), backwards=True)[1:]}Z"
            kind = "" if sign > 0 else ' class="out"'
            yield f'<path fill="{_colour(job)}"{kind} d="{back}"><title>{escape(titles[job])}</title></path>'


def _steps(x: Floats, y: Floats, *, backwards: bool = False) -> str:
    """Return a path that holds each ordinate until the next abscissa; there is one abscissa more than ordinates."""
    kept = np.flatnonzero(np.diff(y, prepend=np.nan) != 0)
    points = [(x[start], x[stop], y[start]) for start, stop in itertools.pairwise([*kept.tolist(), len(y)])]
    pairs = [pair for left, right, level in points for pair in ((left, level), (right, level))]
    return "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in (reversed(pairs) if backwards else pairs))


def _line(kind: str, x: Floats, y: Floats) -> str:
    return f'<path class="{kind}" d="{_steps(x, y)}"/>'


def _lane(record: Record, job: int, scale: _Scale, at: int, blockers: list[tuple[int, ...]]) -> Iterator[str]:
    """Yield a job's lane: when it was there, its waits, and where iterations ended."""
    held = record.t_s[record.held_bytes[:, job] > 0]
    if len(held):
        left, right = scale.x(held[[0, -1]])
        box = f'x="{left:.1f}" y="{at + 2}" width="{max(right - left, 0):.1f}" height="{LANE - 4}"'
        yield f'<rect fill="{_colour(job)}" opacity="0.3" {box}/>'
    for kind in WaitKind:
        for waits in _close_together(record, job, kind, scale):
            left, right = scale.x(record.wait_t_s[[waits[0], waits[-1]], [0, 1]])
            box = f'x="{left:.1f}" y="{at + 2}" width="{max(right - left, 0.5):.1f}" height="{LANE - 4}"'
            title = f"<title>{escape(_said(record, kind, waits, blockers))}</title>"
            yield f'<rect class="{kind.name.lower()}" {box}>{title}</rect>'
    ends = record.boundaries_of(job)
    ends = ends[(ends >= scale.span.start_s) & (ends <= scale.span.stop_s)]
    if len(ends):
        places = np.unique(np.round(scale.x(ends), 1))
        yield f'<path class="ends" d="{"".join(f"M{x:.1f} {at}v{LANE - 2}" for x in places.tolist())}"/>'


def _close_together(record: Record, job: int, kind: WaitKind, scale: _Scale) -> Iterator[list[int]]:
    """Yield the waits of a kind that lie in the span, those in one group that could not be told apart."""
    start_s, end_s = record.wait_t_s.T
    inside = (end_s > scale.span.start_s) & (start_s < scale.span.stop_s)
    those = np.flatnonzero((record.wait_job == job) & (record.wait_kind == kind) & inside)
    those = those[np.argsort(start_s[those], kind="stable")]
    apart = np.flatnonzero(scale.x(start_s[those[1:]]) - scale.x(end_s[those[:-1]]) > NARROWEST)
    yield from (group.tolist() for group in np.split(those, apart + 1) if len(group))


def _said(record: Record, kind: WaitKind, waits: list[int], blockers: list[tuple[int, ...]]) -> str:
    """Return what is to be read of waits."""
    start_s, end_s = record.wait_t_s[waits].T
    those = sorted({job for wait in waits for job in blockers[wait]})
    count = f"{len(waits)} times, " if len(waits) > 1 else ""
    whom = f", for {', '.join(record.names[job] for job in those)}" if those else ""
    name = record.names[record.wait_job[waits[0]]]
    return f"{name} {WAIT_LABELS[kind]}{whom}: {count}{(end_s - start_s).sum():.3f} s from {start_s[0]:.3f} s"


def _times(report: RunReport) -> Iterator[str]:
    """Yield where the jobs' time went: a bar for each job, the key, and the table."""
    times = [(job.name, job.attribution) for job in report.jobs if isinstance(job.attribution, Attribution)]
    if not times:
        return
    longest_s = max(time.elapsed_s for _, time in times) or 1.0
    yield "<h2>Where the time went</h2>"
    yield f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {LANE * len(times)}" role="img" aria-label="Time by cause">'
    for number, (name, time) in enumerate(times):
        at, left = LANE * number, float(LEFT)
        yield f'<text x="{LEFT - 8}" y="{at + 15}" text-anchor="end">{escape(_short(name))}</text>'
        for part, label in PARTS.items():
            seconds = getattr(time, part) or 0.0
            width = seconds / longest_s * (RIGHT - LEFT)
            box = f'x="{left:.1f}" y="{at + 2}" width="{width:.1f}" height="{LANE - 4}"'
            title = f"<title>{escape(name)}, {label}: {seconds:.3f} s</title>"
            yield f'<rect fill="{PART_COLOURS[part]}" {box}>{title}</rect>'
            left += width
    yield "</svg></div>"
    keys = (_key(f"background:{PART_COLOURS[part]}", label) for part, label in PARTS.items())
    yield f'<p class="key">{" ".join(keys)}</p>'
    yield _table("times", TIME_COLUMNS, time_rows(report))
    yield f"<p>{TIME_NOTE}</p>"


# -- tables and lists ------------------------------------------------------------------------------


def _waits_table(record: Record) -> Iterator[str]:
    """Yield how long each job waited for each other one."""
    seconds = waited_for_s(record)
    rows = [
        (name, *(f"{value:.1f} s" if value else "" for value in row))
        for name, row in zip(record.names, seconds.tolist(), strict=True)
    ]
    yield "<h2>Who waited for whom</h2>"
    yield _table("waits", ("job", *(f"for {name}" for name in record.names), NOBODY), rows)
    yield f"<p>{WAITS_NOTE}</p>"


def waited_for_s(record: Record) -> NDArray[np.float64]:
    """Return seconds by job that waited and job that the wait was for; in the last column waits for nobody seen."""
    m = len(record.names)
    seconds = np.zeros((m, m + 1))
    for wait, blockers in enumerate(record.blockers()):
        for other in blockers or (m,):
            seconds[record.wait_job[wait], other] += record.wait_t_s[wait, 1] - record.wait_t_s[wait, 0]
    return seconds


def _table(name: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    table = f'<table id="{name}">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _list(lines: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(line)}</li>" for line in lines) + "\n</ul>"


def _key(style: str, label: str) -> str:
    return f'<span><i style="{style}"></i>{escape(label)}</span>'


def _colour(job: int) -> str:
    return COLOURS[job % len(COLOURS)]


def _short(name: str) -> str:
    return name if len(name) <= MOST_CHARS else name[: MOST_CHARS - 1] + "…"
