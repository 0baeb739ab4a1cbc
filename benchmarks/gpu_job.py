"""Train a model of ``models/`` for a while: ``gpu_job.py resnet50 --batch 64 --seconds 8 --losses FILE``.

Iterations are told when the device has ended them, not when they were launched: the loss of an iteration is read while
the next ones are on their way, so that the processor runs ahead as it does in training that seldom looks at its loss.
The same seed gives the same losses to the last bit: PyTorch's deterministic algorithms are on.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

MODELS = {
    "resnet50": ("resnet", {}),
    "resnet110": ("resnet", {}),
    "bert_base": ("transformer", {"length": 128}),
    "gpt2": ("transformer", {"length": 512}),
    "gnmt": ("gnmt", {}),
    "dcgan": ("dcgan", {}),
}
"""Name -> module, and arguments that keep iterations short."""
AHEAD = 2
"""Iterations that are launched before the loss of one is read."""


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--iterations", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after the first iteration")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--losses", type=Path, help="write every loss here, in hexadecimal")
    return parser.parse_args()


def build(options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """Return the training step, on its device."""
    torch.set_default_device(options.device)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    module, arguments = MODELS[options.model]
    sys.path.insert(0, str(Path(__file__).with_name("models")))
    step: Callable[[], torch.Tensor] = getattr(importlib.import_module(module), options.model)(
        options.batch, **arguments
    )
    return step


class Launched:
    """An iteration that has been launched."""

    def __init__(self, loss: torch.Tensor) -> None:
        """Have its loss copied to the host once it has ended; waits for nothing."""
        self._event = torch.cuda.Event() if loss.is_cuda else None
        if self._event is None:
            self._loss = loss
        else:
            self._loss = torch.empty((), dtype=loss.dtype, device="cpu", pin_memory=True)
            self._loss.copy_(loss, non_blocking=True)
            self._event.record()

    def ended(self, number: int) -> float:
        """Wait until it has ended, say so, and return its loss; what was launched behind it goes on."""
        if self._event is not None:
            self._event.synchronize()
        value = float(self._loss.item())
        sys.stdout.write(f"iteration {number} loss {value:.4f}\n")
        sys.stdout.flush()
        return value


def train(step: Callable[[], torch.Tensor], options: argparse.Namespace) -> list[float]:
    """Train until the time or the iterations are used up; returns the losses."""
    losses: list[float] = []
    launched: collections.deque[Launched] = collections.deque()
    ends_s = float("inf")
    for n in range(options.iterations):
        launched.append(Launched(step()))
        if len(launched) > AHEAD or n == 0:
            losses.append(launched.popleft().ended(len(losses) + 1))
        if n == 0:
            ends_s = time.monotonic() + options.seconds
        if time.monotonic() > ends_s:
            break
    while launched:
        losses.append(launched.popleft().ended(len(losses) + 1))
    return losses


def main() -> None:
    """Train and write the losses."""
    options = parsed()
    losses = train(build(options), options)
    if options.losses:
        options.losses.write_text(json.dumps([loss.hex() for loss in losses]))


if __name__ == "__main__":
    main()
