"""Jobs on the driver's software twin that join as adapters do (``cuda_twin_trainer.py``)."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

from support.harness import PROCESS

if TYPE_CHECKING:
    from process.support.cuda_twin import Process

MIB = 1 << 20
REGION_BYTES = 2 * MIB
N_REGIONS = 16
TRAINER = str(PROCESS / "cuda_twin_trainer.py")
WITHOUT_KERNELS = {"COMPUTE_CAPABILITY_MAJOR": 6}
"""The twin runs no PTX: marks and waits are stream operations, as on a device too old for Zico's kernels."""


def becomes(job: Process, order: str, answer: str, within_s: float = 5.0) -> None:
    """Ask again and again until the answer is as expected."""
    end_s = time.monotonic() + within_s
    while (found := job.ask(order)) != answer:
        assert time.monotonic() < end_s, f"{order} still answers {found}"
        select.select([], [], [], 0.001)
