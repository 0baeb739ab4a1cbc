"""The first measurement of a tier: a few copies of each size, some tens of milliseconds."""

from __future__ import annotations

import math
import mmap
import os
from typing import Any

import numpy as np

from zico.errors import ConfigError
from zico.tiers import stores
from zico.tiers.compressing import PIECE_BYTES
from zico.tiers.layout import ALIGNMENT_BYTES, COMPRESSED, FILE, KIND_NAMES, MEMORY
from zico.tiers.rates import IN, OUT
from zico.units import MIB

LARGE_BYTES = {MEMORY: 32 * MIB, FILE: 8 * MIB, COMPRESSED: 2 * MIB}
"""By kind: more than processors' caches keep where that matters."""
TIMES = 2
"""The first copy finds memory without pages and files without a history: the fastest counts, as later ones will be."""

_FEATURES = PIECE_BYTES // 4
"""Different numbers as of a layer behind a ReLU; compressed pieces know nothing of each other."""
_FIGURES = ("out_bytes", "in_bytes", "out_ns", "in_ns", "refused", "peak", "recent_peak", "error")


def measure(stack: Any, shared: Any) -> None:  # noqa: ANN401 - a STACK record, its SHARED records
    """Fill in the rates of all tiers, which nothing else uses yet; figures count from 0 afterwards.

    All that moves payloads is compiled or loaded when this returns.

    Bandwidth is measured with ``LARGE_BYTES``, or what the tier can hold.

    Raises:
        ConfigError: A tier cannot be written to, as where its disk is full.
    """
    largest = max(LARGE_BYTES[int(one["kind"])] for one in shared)
    source = np.frombuffer(mmap.mmap(-1, largest), np.float32)  # aligned, as what a pager moves is
    features = np.maximum(np.random.default_rng(0).standard_normal(_FEATURES, np.float32), 0)
    source.reshape(-1, _FEATURES)[:] = features
    for tier, one in enumerate(shared):
        large = min(LARGE_BYTES[int(one["kind"])], int(one["n_blocks"]) * int(one["block_bytes"]))
        small_ns = _fastest(stack, tier, one, source.ctypes.data, ALIGNMENT_BYTES)
        large_ns = _fastest(stack, tier, one, source.ctypes.data, large)
        for way in (OUT, IN):
            one["latency_ns"][way] = small_ns[way]
            one["recent_bytes"][way] = large
            one["recent_ns"][way] = max(large_ns[way] - small_ns[way], 1.0)
    if (ticket := int(stores.put(stack, source.ctypes.data, ALIGNMENT_BYTES))) >= 0:
        stores.drop(stack, ticket)
    for name in _FIGURES:
        shared[name] = 0
    stores.trim(stack)


def _fastest(stack: Any, tier: int, shared: Any, address: int, size_bytes: int) -> tuple[float, float]:  # noqa: ANN401
    """Return the least that a copy out and a copy in have taken, in ns."""
    best = [math.inf, math.inf]
    for _ in range(TIMES):
        before = (int(shared["out_ns"]), int(shared["in_ns"]))
        ticket = int(stores.put_into(stack, tier, address, size_bytes))
        if ticket < 0 or stores.get(stack, ticket, address, size_bytes) != 0:
            reason = os.strerror(int(shared["error"]))
            kind = KIND_NAMES[shared["kind"]]
            raise ConfigError(f"the {kind} tier cannot be used: {reason}. Free some space, or give another")
        stores.drop(stack, ticket)
        best[OUT] = min(best[OUT], float(shared["out_ns"] - before[OUT]))
        best[IN] = min(best[IN], float(shared["in_ns"] - before[IN]))
    return best[OUT], best[IN]
