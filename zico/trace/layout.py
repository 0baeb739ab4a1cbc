"""The record of a memory curve, as compiled code and Python see it."""

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
