"""PyTorch's own out-of-memory error, thrown from compiled code through PyTorch's frames."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from support.harness import FRAMEWORK
from zico.adapters import torch_cuda

from zico.base.errors import HookError

if TYPE_CHECKING:
    from pathlib import Path

CHECKS = FRAMEWORK / "raising_checks.py"


def test_a_refused_allocation_raises_with_the_figures_and_the_process_goes_on() -> None:
    """The class is ``torch.OutOfMemoryError``, with symbols that every build of PyTorch exports.

    Sizes are in MiB, rounded up, and each failure has its digits. A refusal is no lack of memory.
    Later tensors work.
    """
    done = subprocess.run((sys.executable, str(CHECKS)), capture_output=True, text=True, check=True, timeout=120)
    text = [" ".join(line.split()) for line in done.stdout.splitlines()]
    remedy = "raise --budget, or --limit where it has one, or use a smaller batch"
    story = f"more while holding 3072 MiB, and may hold 4096 MiB: {remedy}"
    assert text == [
        f"OutOfMemoryError: CUDA out of memory. zico: needs 5120 MiB {story}",
        f"OutOfMemoryError: CUDA out of memory. zico: needs 1 MiB {story}",
        "RuntimeError: zico: not on this device",
        "1000",
    ]


def test_a_build_without_the_symbols_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """Without PyTorch's libraries there is nothing to raise, and the message says which PyTorch it was."""
    strange = SimpleNamespace(__file__=str(tmp_path / "__init__.py"), __version__="9.9")
    with pytest.raises(HookError, match=r"PyTorch 9\.9 has no exception that Zico could raise: .*libc10"):
        torch_cuda.prepare(strange)
    with pytest.raises(HookError, match=r"PyTorch 9\.9 has no exception that Zico could raise: .*libc10"):
        torch_cuda.prepare_refusals(strange, ("text",))
