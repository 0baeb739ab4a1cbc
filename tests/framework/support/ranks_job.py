"""Train with PyTorch's data parallelism on the processor; run by ``test_ranks.py``.

    ranks_job.py LOSSES [spawn | fork | held | launched | workers | parent]

``spawn`` and ``fork`` start two ranks themselves; a rank that is forked imports nothing, not even
what its first optimizer loads. ``held`` forks them while it holds a tensor. ``launched`` is one that
torchrun has started. ``workers`` is one process that trains with a loader's worker. ``parent`` holds
a tensor, and starts a process that trains. Rank N writes the bits of its losses, its number and its
group to LOSSES.N.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

ITERATIONS = 8
WORLD = 2
FEATURES = 64
BATCH = 8192


class Numbers(Dataset[Any]):
    """Batches that workers make, larger than what is too small for the pool."""

    def __len__(self) -> int:
        """Return how many there are."""
        return ITERATIONS

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one, made anew."""
        return torch.full((BATCH, FEATURES), float(index))


def place() -> dict[str, Any]:
    """Return what the pool knows of this process."""
    from zico.job.session import current_here

    joined = current_here()
    if joined is None:
        return {"group": None, "pid": os.getpid()}
    return {"group": int(joined.record["group"]), "pid": os.getpid(), "pooled": int(joined.record["pooled_bytes"])}


def train(rank: int, losses: str, port_file: str = "") -> None:
    """Train as one of two ranks."""
    torch.set_num_threads(1)
    if port_file:
        torch.distributed.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=WORLD)
    else:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    layers = [layer for _ in range(6) for layer in (nn.Linear(FEATURES, FEATURES), nn.Tanh())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bits = []
    for _ in range(ITERATIONS):
        optimizer.zero_grad()
        loss = model(torch.randn(BATCH, FEATURES)).square().mean()
        loss.backward()
        optimizer.step()
        bits.append(loss.item().hex())
    write(losses, rank, bits, forked=sums_in_child(next(model.parameters())))
    torch.distributed.destroy_process_group()
    # DDP keeps gloo's threads alive. One that drops its last tensor while the interpreter ends aborts the process
    # (PyTorch, pull request 179291). So the process ends before the interpreter does.
    atexit._run_exitfuncs()
    os._exit(0)


def sums_in_child(tensor: torch.Tensor) -> bool:
    """Tell whether a child that is forked sees a tensor as it is."""
    expected = float(tensor.sum())
    child = os.fork()
    if not child:
        os._exit(float(tensor.sum()) != expected)
    return os.waitpid(child, 0)[1] == 0


def write(losses: str, rank: int, bits: list[str], *, forked: bool = True) -> None:
    """Write what is asked for."""
    Path(f"{losses}.{rank}").write_text(json.dumps({"losses": bits, "forked": forked} | place()))


def train_with_workers(losses: str) -> None:
    """Train alone, with a loader whose worker is started anew and imports PyTorch."""
    model = nn.Linear(FEATURES, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bits = []
    for batch in DataLoader(Numbers(), batch_size=None, num_workers=1, multiprocessing_context="spawn"):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        bits.append(loss.item().hex())
    write(losses, 0, bits)


def main(losses: str, how: str) -> None:
    """Train as it is asked for."""
    if how in ("spawn", "fork", "held"):
        kept = torch.ones(BATCH, FEATURES) if how == "held" else None
        method = "spawn" if how == "spawn" else "fork"
        if method == "fork":
            import_module("torch._dynamo")
        torch.multiprocessing.start_processes(train, (losses, f"{losses}.store"), nprocs=WORLD, start_method=method)
        assert kept is None or kept.all()
    elif how == "launched":
        train(0, losses)
    elif how == "parent":
        kept = torch.ones(BATCH, FEATURES)
        subprocess.run([sys.executable, __file__, losses, "workers"], check=True)
        assert kept.all()
    else:
        train_with_workers(losses)


if __name__ == "__main__":
    main(*sys.argv[1:])
