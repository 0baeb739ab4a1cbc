"""A training that swaps and something happens to it in mid-iteration; run by ``test_torch_saving_failures.py``.

    torch_saving_victims.py RESULTS [out | in | full | wait]

Trains twice as many iterations as it takes to follow a plan, the second half with 60 % of what the
first half took. In the last iteration, in a job: ``out`` and ``in`` die by SIGKILL with half of a
copy made, ``full`` may write no more to its file from the middle of the forward pass on. ``wait``
says so before the last iteration and waits for a line. Writes the bits of the losses.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch_saving_models import SHARE, Trained, blocks, images

from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Callable

ENOUGH_BYTES = 1 << 20
FEW = 3
"""Copies of the last iteration that are whole."""


def dies(tier: Any, name: str) -> None:  # noqa: ANN401 - a tier
    """Let one of the tier's copies be the process's last, half made."""
    whole: Callable[..., int] = getattr(tier, name)
    copies = 0

    def half(*arguments: int) -> int:
        nonlocal copies
        copies += 1
        if copies <= FEW:
            return whole(*arguments)
        whole(*arguments[:-1], arguments[-1] // 2)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("dead")

    setattr(tier, name, half)


def becomes_full(*_: object) -> None:
    """Let this process write to the beginnings of files only."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (ENOUGH_BYTES, resource.RLIM_INFINITY))


def main() -> None:
    """Train."""
    results, happens = Path(sys.argv[1]), (*sys.argv[2:], "")[0]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(*blocks(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    joined = session.current()
    losses = []
    for iteration in range(2 * Trained.iterations):
        is_last = iteration == 2 * Trained.iterations - 1
        if iteration == Trained.iterations and joined is not None:
            joined.pool.set_limit(joined.membership.job, int(SHARE * int(joined.record["peak_held"])))
        if is_last and happens == "wait":
            print("waits", flush=True)  # noqa: T201 - the test reads it
            sys.stdin.readline()
        if is_last and happens == "full":
            model[len(model) // 3].register_forward_hook(becomes_full)
        if is_last and happens in ("out", "in"):
            assert joined is not None
            dies(joined.swapper.tier, {"out": "put", "in": "get"}[happens])
        loss = model(images()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    kept = 0 if joined is None or joined.swapper is None else joined.swapper.figures.kept
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    results.write_text(json.dumps({"losses": losses, "kept": kept}))


if __name__ == "__main__":
    main()
