"""Train a model of ``models/`` for a while: ``job.py resnet50 --batch 64 --seconds 8 --losses FILE``.

Iterations are told when the device has ended them, not when they were launched: the loss of an
iteration is read while the next ones are on their way, so that the processor runs ahead as it does
in training that seldom looks at its loss. The same seed gives the same losses to the last bit:
PyTorch's deterministic algorithms are on.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
LOADED_FLOATS = 1 << 20
"""In a batch that a data loader's worker makes."""
TOO_MANY_BYTES = 1 << 45
"""More than any device has."""


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
    parser.add_argument("--figures", type=Path, help="write here what was counted: iterations, marks, failures")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: by autocast")
    parser.add_argument("--benchmark", action="store_true", help="let cuDNN time its algorithms")
    parser.add_argument("--workers", type=int, default=0, help="of a data loader, one batch an iteration")
    parser.add_argument("--oom", action="store_true", help="first ask for more than any device has, then train")
    parser.add_argument("--killed-at", type=int, default=0, help="end by SIGKILL when so many are launched")
    return parser.parse_args()


def build(options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """Return the training step, on its device."""
    torch.set_default_device(options.device)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(mode=not options.benchmark, warn_only=True)
    torch.backends.cudnn.benchmark = options.benchmark
    module, arguments = MODELS[options.model]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
    step: Callable[[], torch.Tensor] = getattr(importlib.import_module(module), options.model)(
        options.batch, **arguments
    )
    if options.dtype == "bfloat16":
        step = torch.autocast(options.device, dtype=torch.bfloat16)(step)
    return step


class Batches(IterableDataset):  # type: ignore[misc] # torch has no types
    """Endless batches of floats, made in the workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield them."""
        generator = np.random.default_rng(1)
        while True:
            yield torch.from_numpy(generator.random(LOADED_FLOATS, np.float32))


def loaded(step: Callable[[], torch.Tensor], options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """Return the step with a batch of a data loader's workers brought to the device in each iteration."""
    batches = iter(DataLoader(Batches(), batch_size=None, num_workers=options.workers))

    def both() -> torch.Tensor:
        brought = next(batches).to(options.device)
        loss = step()
        return loss + 0 * brought.sum()

    return both


def refused(options: argparse.Namespace) -> str:
    """Ask for more than any device has; returns the name of the error."""
    try:
        torch.empty(TOO_MANY_BYTES, dtype=torch.uint8, device=options.device)
    except (RuntimeError, MemoryError) as error:  # PyTorch's error on a GPU is a RuntimeError
        return type(error).__name__
    return ""


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
        if n + 1 == options.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)  # what was launched may still run
        if len(launched) > AHEAD or n == 0:
            losses.append(launched.popleft().ended(len(losses) + 1))
        if n == 0:
            ends_s = time.monotonic() + options.seconds
        if time.monotonic() > ends_s:
            break
    while launched:
        losses.append(launched.popleft().ended(len(losses) + 1))
    return losses


def counted() -> dict[str, int]:
    """Return what Zico's heap has counted, zeros for a job without one."""
    session = importlib.import_module("zico.job.session").current() if "zico.job.session" in sys.modules else None
    record: Any = {} if session is None else session.heap.record[0]
    return {name: 0 if session is None else int(record["streams"][name]) for name in ("marks", "failures")}


def main() -> None:
    """Train and write the losses."""
    options = parsed()
    error = refused(options) if options.oom else ""
    step = build(options)
    losses = train(loaded(step, options) if options.workers else step, options)
    if options.figures:
        figures = {"iterations": len(losses), "refused_by": error, **counted()}
        options.figures.write_text(json.dumps(figures))
    if options.losses:
        options.losses.write_text(json.dumps([loss.hex() for loss in losses]))


if __name__ == "__main__":
    main()
