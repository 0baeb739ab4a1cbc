"""The records of memory curves and of recorded events, as compiled code and Python see them."""

from __future__ import annotations

from typing import Annotated

from zico.records import I4, I8, Numbers, Record, dtype_of

CURVE_BINS = 256
"""Points of a memory curve. An iteration of N events is kept in 128 to 256 bins of a power of two events each."""


class Curve(Record):
    """Regions held against progress, with times: one iteration, or the profile folded from several."""

    shift: I4  # a bin is 2**shift progress events wide
    n_bins: I4  # bins in use
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
    start_ticks: I8  # two readings of the same instant: zico.compiled.ticks
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
