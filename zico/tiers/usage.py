"""What a tier holds and has moved, for reports."""

from __future__ import annotations

import dataclasses
from typing import Any

from zico.tiers.layout import KIND_NAMES

_NS = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class TierUse:
    """One tier since it was made."""

    kind: str
    """One of ``zico.tiers.layout.KIND_NAMES``."""
    capacity_bytes: int
    used_bytes: int
    """Whole blocks."""
    peak_bytes: int
    """The most that was in use at a time, whole blocks."""
    out_bytes: int
    """Payload that has come here, out of the device's budget."""
    in_bytes: int
    """Payload that has gone back."""
    out_s: float
    """How long copying it took."""
    in_s: float
    refused: int
    """Times there was no room."""


def use_of(shared: Any) -> TierUse:  # noqa: ANN401 - one SHARED record
    """Return what the tier's record says now."""
    block_bytes = int(shared["block_bytes"])
    return TierUse(
        KIND_NAMES[shared["kind"]],
        int(shared["n_blocks"]) * block_bytes,
        int(shared["used"]) * block_bytes,
        int(shared["peak"]) * block_bytes,
        int(shared["out_bytes"]),
        int(shared["in_bytes"]),
        float(shared["out_ns"] * _NS),
        float(shared["in_ns"] * _NS),
        int(shared["refused"]),
    )
