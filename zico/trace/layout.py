"""The records of memory curves and of recorded events, as compiled code and Python see them."""

from __future__ import annotations

import numpy as np

CURVE_BINS = 256
"""Points of a memory curve. An iteration of N events is kept in 128 to 256 bins of a power of two events each."""

CURVE = np.dtype(
    [
        ("shift", "i4"),  # a bin is 2**shift progress events wide
        ("n_bins", "i4"),  # bins in use
        ("n_events", "i8"),  # progress at the iteration's end
        ("duration_ns", "i8"),  # from admission to the end, waits for memory left out
        ("held", "i4", (CURVE_BINS,)),  # most regions held within the bin
        ("t_ns", "i8", (CURVE_BINS,)),  # when the bin began, from admission, waits for memory left out
    ],
    align=True,
)
"""Regions held against progress, with times: one iteration, or the profile folded from several."""

RING_MAGIC = 0x5A49434F_52494E47  # "ZICORING"
RING_EVENTS = 1 << 16
"""Events that fit: at ten million a second they last for 6 ms, at what training does for a second or more."""
RING_NAME_BYTES = 1 << 18
"""Room for the names of operations, each ended by a zero byte."""

RING = np.dtype(
    [
        ("magic", "i8"),
        ("pid", "i8"),  # of the one process that writes, 0 until there is one
        ("start_ticks", "i8"),  # two readings of the same instant: zico.compiled.ticks
        ("start_ns", "i8"),  # and CLOCK_MONOTONIC
        ("threshold_bytes", "i8"),  # smaller tensors are not recorded
        ("framework", "S32"),
        ("names_bytes", "i8"),  # of the names that are there
        ("padding", "u1", (40,)),
        ("head", "i8"),  # events ever written; alone on its cache line with what else the writer writes
        ("dropped", "i8"),  # events that found no room
        ("writer_padding", "u1", (48,)),
        ("tail", "i8"),  # events ever read
        ("reader_padding", "u1", (56,)),
    ],
    align=True,
)
"""The head of a file that a job writes events into and another process reads: RING, events, names."""
