"""A disk that becomes full while payloads move."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE_S = 170.0


LIMITED = """
import resource, sys
import numpy as np
from zico.tiers.stack import TierStack
from zico.tiers.destinations import TierWish

resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 16 << 20))
data = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)
with TierStack.create((TierWish("file", 64 << 20),), block_bytes=1 << 20, directory=sys.argv[1]) as stack:
    tickets = []
    while (last := stack.put(data.ctypes.data, data.nbytes)) >= 0:
        tickets.append(last)
    for ticket in tickets:
        back = np.zeros_like(data)
        assert stack.get(ticket, back.ctypes.data, back.nbytes) == 0
        assert np.array_equal(back, data)
    print(len(tickets), last, stack.usage()[0].used_bytes >> 20)
"""


def test_a_disk_that_becomes_full_loses_nothing(tmp_path: Path) -> None:
    """In a process that may write 8 MiB two payloads of 3 find room in a file of 64, and the third is refused."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stdout) == (0, "2 -1 6\n"), done.stderr
    assert list(tmp_path.iterdir()) == []
