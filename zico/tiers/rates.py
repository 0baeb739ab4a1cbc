"""How fast a tier is: measured when it is made, and kept current by every copy.

A copy of ``n`` bytes takes ``latency + n / bandwidth``. The latency is what a page takes, measured once; the bandwidth
is that of the last copies, so that what others do to the same disk or memory shows in it. Copies are weighted by their
bytes and forgotten by the bytes since: what is ``WINDOW_BYTES`` ago counts for 1/e.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from zico.compiled import compiled

if TYPE_CHECKING:
    from zico.tiers.layout import Shared

WINDOW_BYTES = 256.0 * (1 << 20)
OUT = 0
IN = 1
_NS = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """What a copy takes: its latency, and its bytes over the bandwidth."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    out_latency_s: float
    in_latency_s: float

    def out_s(self, size_bytes: int) -> float:
        """Return the seconds that a payload takes to leave."""
        return self.out_latency_s + size_bytes / self.out_bytes_per_s

    def in_s(self, size_bytes: int) -> float:
        """Return the seconds that a payload takes to come back."""
        return self.in_latency_s + size_bytes / self.in_bytes_per_s


@compiled
def note(shared: Shared, direction: int, size_bytes: int, ns: int) -> None:
    """Let a copy count: its payload in bytes, and what it took."""
    if direction == OUT:
        shared.out_bytes += size_bytes
        shared.out_ns += ns
    else:
        shared.in_bytes += size_bytes
        shared.in_ns += ns
    kept = math.exp(-size_bytes / WINDOW_BYTES)
    shared.recent_bytes[direction] = shared.recent_bytes[direction] * kept + size_bytes
    shared.recent_ns[direction] = shared.recent_ns[direction] * kept + max(ns - shared.latency_ns[direction], 1.0)


def rates_of(shared: Any) -> Rates:  # noqa: ANN401 - one SHARED record
    """Return the rates of a tier with at least one copy in each direction, as its first measurement makes."""
    bandwidth = [float(shared["recent_bytes"][way] / shared["recent_ns"][way] / _NS) for way in (OUT, IN)]
    latency = [float(shared["latency_ns"][way] * _NS) for way in (OUT, IN)]
    return Rates(bandwidth[OUT], bandwidth[IN], latency[OUT], latency[IN])
