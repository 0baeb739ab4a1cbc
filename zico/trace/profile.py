"""Memory curves: regions held against progress, recorded on the hot path and folded into a profile.

Theory of operation
    Progress counts allocations and frees of one iteration. A ``CURVE`` divides it into bins of
    ``2**shift`` events. When all bins are used, neighbours are merged and bins double. So an
    iteration of any length costs at most one clock reading per bin and fits a fixed space. Here
    bins of 2 events, 6 in use, become bins of 4::

        held   1 3 5 6 4 2          shift 1
        held   3   6   4            shift 2

    The profile is the envelope of recent iterations: the largest of the last two curves and a
    decayed old one. Layouts often take turns, since what lives across a boundary lies in one place
    after the other. An iteration whose number of events differs (validation in between) does not
    replace the profile until it comes twice.

Guarantees
    * A claim never falls below what the profile still expects from ``guard_of`` bins before the
      current one on.
    * Beyond the expected end of an iteration the claim is what earlier ones held there, or else the
      whole peak again: nothing is known there.
"""

from __future__ import annotations

from typing import Annotated, Any

from zico.base.compiled import compiled, inlined, keep_out_of_line
from zico.base.records import I4, I8, Numbers, Record, dtype_of

# -- the records of memory curves and of recorded events, as compiled code and Python see them -----

CURVE_BINS = 256
"""Points of a memory curve. An iteration of N events is kept in 128 to 256 bins of a power of two events each."""


class Curve(Record):
    """Regions held against progress, with times: one iteration, or the profile folded from several."""

    shift: I4  # a bin is 2**shift progress events wide
    n_bins: I4  # bins in use
    tail: I8  # of a profile: most regions held after its usual end, 0: not known
    n_events: I8  # progress at the iteration's end
    duration_ns: I8  # from admission to the end, waits for memory left out
    held: Annotated[Numbers, "i4", (CURVE_BINS,)]  # most regions held within the bin
    t_ns: Annotated[Numbers, "i8", (CURVE_BINS,)]  # when the bin began, from admission, waits for memory left out


CURVE = dtype_of(Curve)

RING_MAGIC = 0x5A49434F_52494E47  # "ZICORING"
RING_EVENTS = 1 << 16
"""Events that fit: at ten million a second they last for 6 ms, at what training does for a second or more."""
RING_NAME_BYTES = 1 << 18
"""Room for the names of operations, each ended by a zero byte."""


class Ring(Record):
    """The head of a file that a job writes events into and another process reads: RING, events, names."""

    magic: I8
    pid: I8  # of the one process that writes, 0 until there is one
    start_ticks: I8  # two readings of the same instant: zico.base.compiled.ticks
    start_ns: I8  # and CLOCK_MONOTONIC
    threshold_bytes: I8  # smaller tensors are not recorded
    framework: Annotated[bytes, "S32"]
    names_bytes: I8  # of the names that are there
    padding: Annotated[Numbers, "u1", (40,)]
    head: I8  # events ever written; alone on its cache line with what else the writer writes
    dropped: I8  # events that found no room
    writer_padding: Annotated[Numbers, "u1", (48,)]
    tail: I8  # events ever read
    reader_padding: Annotated[Numbers, "u1", (56,)]


RING = dtype_of(Ring)


# --------------------------------------------------------------------------------------------------

UNPROFILED_SHIFT = 40
"""Bin width of a profile that says only "at most so much, at any time"."""

_TYPICAL_SLACK_EVENTS = 8
SLACK_SHIFT = 4
"""Iterations of a kind differ by at most a sixteenth, or by ``_TYPICAL_SLACK_EVENTS``."""
_ALIKE_REGIONS = 2
"""Regions that a peak may lie beside another run's: threads reorder allocations."""
_DECAY_SHIFT = 3  # an eighth an iteration: a peak that does not come back is forgotten in about ten
_GUARD_SHIFT = 5
GUARD_BINS = (CURVE_BINS >> 1) >> _GUARD_SHIFT
"""A claim falls at most so many bins later than the profile says; see ``guard_of``."""


@compiled
def begin(curve: Curve, shift: int, held: int) -> None:
    """Start an empty curve at the present height."""
    curve.shift = shift
    curve.n_bins = 1
    curve.n_events = 0
    curve.duration_ns = 0
    curve.held[0] = held
    curve.t_ns[0] = 0


@compiled
def halve(curve: Curve) -> None:
    """Merge neighbouring bins: the higher level, the earlier time."""
    keep_out_of_line()
    n_bins = (curve.n_bins + 1) // 2
    for i in range(n_bins):
        level = curve.held[2 * i]
        if 2 * i + 1 < curve.n_bins:
            level = max(level, curve.held[2 * i + 1])
        curve.held[i] = level
        curve.t_ns[i] = curve.t_ns[2 * i]
    curve.n_bins = n_bins
    curve.shift += 1


@compiled
def extend(curve: Curve, progress: int, held: int, t_ns: int) -> None:
    """Open bins up to the one of ``progress``, at the present height and time."""
    keep_out_of_line()
    while progress >> curve.shift >= CURVE_BINS:
        halve(curve)
    last = progress >> curve.shift
    # Waits are taken off, one thread's while others went on: time must not seem to run backwards
    # for that.
    t_ns = max(t_ns, curve.t_ns[curve.n_bins - 1])
    while curve.n_bins <= last:
        curve.held[curve.n_bins] = held
        curve.t_ns[curve.n_bins] = t_ns
        curve.n_bins += 1


@inlined
def raise_to(curve: Curve, held: int) -> None:
    """Note a new height within the current bin."""
    last = curve.n_bins - 1
    curve.held[last] = max(curve.held[last], held)


@compiled
def peak(curve: Curve) -> int:
    """Return the most regions held."""
    most = 0
    for i in range(curve.n_bins):
        most = max(most, curve.held[i])
    return most


@compiled
def flatten(profile: Curve, current: Curve) -> None:
    """Make a profile that knows only the peak, for an iteration that contained the job's set-up."""
    begin(profile, UNPROFILED_SHIFT, peak(current))
    profile.n_events = 1 << UNPROFILED_SHIFT
    profile.tail = 0
    profile.duration_ns = current.duration_ns


@inlined
def is_flat(profile: Curve) -> bool:
    """Tell whether the profile knows only the peak."""
    return profile.shift == UNPROFILED_SHIFT


@inlined
def expected_end(profile: Curve) -> int:
    """Return the event up to which an iteration may be the profile's: one that goes on is another one."""
    return profile.n_events + max(_TYPICAL_SLACK_EVENTS, profile.n_events >> SLACK_SHIFT)


@inlined
def is_outgrown(profile: Curve, progress: int, held: int, most: int) -> bool:
    """Tell whether an iteration has become longer and higher than any known: nobody can say what it comes to hold.

    Args:
        profile: What an iteration does.
        progress: Events of this one so far.
        held: Regions it holds, or asks for.
        most: Regions the job is known to hold at most.
    """
    return bool(held > max(most, profile.tail) and progress > expected_end(profile))


@inlined
def is_typical(profile: Curve, n_events: int) -> bool:
    """Tell whether an iteration of ``n_events`` is the one that the profile describes."""
    return abs(n_events - profile.n_events) <= expected_end(profile) - profile.n_events


@inlined
def is_above(most: int, held: int) -> bool:
    """Tell whether an iteration holds more than one that comes to hold ``most`` may."""
    return bool(held > most + max(_ALIKE_REGIONS, most >> SLACK_SHIFT))


@compiled
def is_alike(profile: Curve, current: Curve) -> bool:
    """Tell whether a finished iteration is the profile's by its length and by the most that it held."""
    expected, found = peak(profile), peak(current)
    return is_typical(profile, current.n_events) and not is_above(expected, found) and not is_above(found, expected)


@compiled
def replace(profile: Curve, current: Curve) -> None:
    """Take the finished iteration as the profile."""
    keep_out_of_line()
    profile.shift = current.shift
    profile.n_bins = current.n_bins
    profile.n_events = current.n_events
    profile.duration_ns = current.duration_ns
    for i in range(current.n_bins):
        profile.held[i] = current.held[i]
        profile.t_ns[i] = current.t_ns[i]


@compiled
def learn_tail(profile: Curve, current: Curve) -> None:
    """Note what an iteration held that went on after its usual end: the most of it and of what earlier ones held."""
    keep_out_of_line()
    first = expected_end(profile) >> current.shift
    most = 0
    for i in range(first, current.n_bins):
        most = max(most, current.held[i])
    profile.tail = max(most, profile.tail - max(1, profile.tail >> _DECAY_SHIFT))


@compiled
def copy(target: Curve, source: Curve) -> None:
    """Take over a whole profile."""
    keep_out_of_line()
    replace(target, source)
    target.tail = source.tail


@compiled
def merge(profile: Curve, current: Curve) -> None:
    """Fold a typical iteration in: envelope of levels with decay, mean of old and new times.

    Changes ``current`` to the common bin width.
    """
    keep_out_of_line()
    while profile.shift < current.shift:
        halve(profile)
    while current.shift < profile.shift:
        halve(current)
    shared = min(profile.n_bins, current.n_bins)
    for i in range(current.n_bins):
        if i < shared:
            old = profile.held[i]
            profile.held[i] = max(current.held[i], old - max(1, old >> _DECAY_SHIFT))
            profile.t_ns[i] = (profile.t_ns[i] + current.t_ns[i]) // 2
        else:
            profile.held[i] = current.held[i]
            profile.t_ns[i] = current.t_ns[i]
    for i in range(current.n_bins, profile.n_bins):
        profile.held[i] -= max(1, profile.held[i] >> _DECAY_SHIFT)
    # What an iteration that ended early has not shown is forgotten only once it has decayed to
    # where that one ended.
    profile.n_bins = max(profile.n_bins, current.n_bins)
    while profile.n_bins > current.n_bins and profile.held[profile.n_bins - 1] <= current.held[current.n_bins - 1]:
        profile.n_bins -= 1
    for i in range(1, profile.n_bins):
        profile.t_ns[i] = max(profile.t_ns[i], profile.t_ns[i - 1])  # a mean may meet a time of one iteration alone
    profile.n_events = (profile.n_events + current.n_events) // 2
    profile.duration_ns = (profile.duration_ns + current.duration_ns) // 2


@compiled
def cover(profile: Curve, other: Curve) -> None:
    """Raise a profile to the levels of an iteration of the same bins or finer ones, which are merged.

    ``n_bins`` 0: there is no such iteration.
    """
    keep_out_of_line()
    while other.n_bins > 0 and other.shift < profile.shift:
        halve(other)
    for i in range(min(profile.n_bins, other.n_bins)):
        profile.held[i] = max(profile.held[i], other.held[i])


@compiled
def suffix_maximum(profile: Curve, claims: Any) -> int:  # noqa: ANN401 - an int32 array
    """Write for each bin the most regions held from it on; returns the peak."""
    most = 0
    for i in range(profile.n_bins - 1, -1, -1):
        most = max(most, profile.held[i])
        claims[i] = most
    return most


@inlined
def guard_of(profile: Curve) -> int:
    """Return by how many bins a claim falls later than the profile says: a thirty-second of an iteration, 1 to 4 bins.

    Levels vary by a region or two from one iteration to the next, and threads reorder allocations a
    little.
    """
    return max(1, min(profile.n_bins >> _GUARD_SHIFT, GUARD_BINS))


@inlined
def claim_at(profile: Curve, claims: Any, progress: int) -> int:  # noqa: ANN401 - an int32 array
    """Return the most regions that the rest of the iteration may hold, by the profile.

    Args:
        profile: What an iteration does.
        claims: For each of its bins the most regions held from it on.
        progress: Events of the iteration so far.
    """
    if progress > expected_end(profile):
        return profile.tail if profile.tail > 0 else claims[0]
    index = (progress >> profile.shift) - guard_of(profile)
    return claims[max(0, min(index, profile.n_bins - 1))]
