"""How much of each gap leaves, as the cheapest flow of equal parts through a network in time.

Each point of time (``zico/planners/swap/fluid.py``) is three nodes: parts that want out, parts elsewhere, and parts
that are back. A part goes round: out in its gap, back before the gap closes, and by the gap's own arc to where it
opened. The arcs between neighbouring points are time that passes::

    wants out    o -----> o -----> o -----> o        the slots of a link lead from one row to the next: begin and end
                   \ slot            \               of a transfer of one part, so that memory is held as it will be
    elsewhere    o -----> o =====> o =====> o        ===  at least so many parts as the load lies above the limit
                            \ slot            \
    back         o -----> o -----> o -----> o
                 ^---------- gap -----------'        from the row's end, at most the gap's parts

Slots are as many as there is time for. Further transfers at a point cost what everybody waits for them. As each arc
has whole capacities, so has the cheapest flow, and no part is cut.

Known limitations
    * The iteration is cut open where the fewest bytes of gaps pass; a gap that passes there is used on one side.
    * Waits for both directions at one point add up here, though they would overlap.
    * That a part that returns is the one that left is not seen here; the schedule looks after it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.planners.swap.circulation import UNBOUNDED, cheapest_circulation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.planners.swap.fluid import Fluid
    from zico.planners.swap.problem import Int64s, Link

_MOVED = 1  # ns that a part costs besides, so that none moves for nothing


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """A fluid cut open, with gaps that lie between the first and the last point."""

    fluid: Fluid
    cut: int
    """The point of the fluid that is the first one here."""
    opens: Int64s
    closes: Int64s
    point_ns: Int64s
    """Of each point, the last one included, from the first one on."""
    load_bytes: Int64s
    """Of each segment."""
    piece: Int64s
    """Which piece of its segment each segment here is; a wait is possible at the beginning of a first one only."""


@dataclasses.dataclass(frozen=True, eq=False)
class Shares:
    """How many parts of each gap leave, and where that takes time."""

    parts: Int64s
    wait_ns: Int64s
    """At each point of the line."""
    slope: float
    """By how many ns the waits would shrink for one byte more of limit; not positive."""


def cut_open(fluid: Fluid, piece_ns: int) -> Line:
    """Return a fluid on a line, with segments above the level cut into pieces of about ``piece_ns``."""
    n = fluid.n_segments
    passing = np.zeros(2 * n + 1, np.int64)
    np.add.at(passing, fluid.opens + 1, fluid.size_bytes)
    np.subtract.at(passing, fluid.closes, fluid.size_bytes)
    passing = np.cumsum(passing)
    cut = int(np.argmin(passing[:n] + passing[n : 2 * n]))
    opens = (fluid.opens - cut) % n
    closes = opens + fluid.closes - fluid.opens
    point_ns = np.concatenate([[0], np.cumsum(np.roll(fluid.duration_ns, -cut))])
    wraps = closes > n
    after = point_ns[closes[wraps] - n]
    keeps_end = fluid.returns[wraps] & (point_ns[-1] - point_ns[opens[wraps]] >= after)
    closes[wraps] = np.where(keeps_end, n, closes[wraps] - n)
    opens[wraps] = np.where(keeps_end, opens[wraps], 0)
    load = np.roll(fluid.load_bytes, -cut)
    pieces = np.where(load > 0, np.maximum(-(-np.diff(point_ns) // piece_ns), 1), 1)
    first = np.concatenate([[0], np.cumsum(pieces)])
    of = np.repeat(np.arange(n), pieces)
    part = np.arange(first[-1]) - first[of]
    inner_ns = point_ns[of] + np.diff(point_ns)[of] * part // pieces[of]
    return Line(fluid, cut, first[opens], first[closes], np.append(inner_ns, point_ns[-1]), load[of], part)


def shares_within(
    line: Line, part_bytes: int, limit_bytes: int, links: tuple[Link, Link], saved: float = 0.0
) -> Shares | None:
    """Return the shares with the least wait, ``None`` if no shares keep the limit.

    Args:
        line: From ``cut_open``.
        part_bytes: What leaves is multiples of it.
        limit_bytes: What may be in memory at once.
        links: Out and back.
        saved: The share of latencies that joining parts is expected to save.
    """
    n, n_points = len(line.load_bytes), len(line.point_ns)
    points = np.arange(n_points)
    wants, away, back = points, points + n_points, points + 2 * n_points
    need = np.maximum(-(-(line.load_bytes - limit_bytes) // part_bytes), 0) * (line.load_bytes > 0)
    none, many = np.zeros(n, np.int64), np.full(n, UNBOUNDED)
    rows = [(row[:-1], row[1:], none, many, none) for row in (wants, back)]
    rows.append((away[:-1], away[1:], need, many, none))
    out_ns, back_ns = (link.transfer_ns(part_bytes) - int(link.latency_ns * saved) for link in links)
    for begin, end, (first, last, count) in (
        (wants, away, _slots(line.point_ns, out_ns, from_end=False)),
        (away, back, _slots(line.point_ns, back_ns, from_end=True)),
    ):
        rows.append((begin[first], end[last], np.zeros_like(count), count, np.zeros_like(count)))
    zero, any_ = np.zeros(n_points, np.int64), np.where(np.append(line.piece, 0) == 0, UNBOUNDED, 0)
    extra = sum(len(row[0]) for row in rows)
    rows += [(wants, away, zero, any_, zero + out_ns), (away, back, zero, any_, zero + back_ns)]
    parts = line.fluid.size_bytes // part_bytes
    ends = np.where(line.fluid.returns, back[line.closes], away[line.closes])
    rows.append((ends, wants[line.opens], np.zeros_like(parts), parts, np.full_like(parts, _MOVED)))
    tail, head, least, most, cost = (np.concatenate(column) for column in zip(*rows, strict=True))
    found = cheapest_circulation(3 * n_points, (tail, head), (least, most), cost)
    if found.missing:
        return None
    waits = found.flow[extra : extra + 2 * n_points].reshape(2, n_points) * [[out_ns], [back_ns]]
    chain = slice(2 * n, 3 * n)
    price = found.potential[head[chain]] - found.potential[tail[chain]]
    return Shares(found.flow[-len(parts) :] if len(parts) else parts, waits.max(axis=0), -float(price.sum()) / part_bytes)


def _slots(point_ns: Int64s, part_ns: int, *, from_end: bool) -> tuple[Int64s, Int64s, Int64s]:
    """Return the points between which a link can move a part, and how many it can move between the same two."""
    total = int(point_ns[-1])
    begin_ns = np.arange(total // part_ns) * part_ns + (total % part_ns if from_end else 0)
    first = np.searchsorted(point_ns, begin_ns, side="right") - 1
    last = np.searchsorted(point_ns, begin_ns + part_ns, side="left")
    pair, count = np.unique(first * len(point_ns) + last, return_counts=True)
    return pair // len(point_ns), pair % len(point_ns), count
