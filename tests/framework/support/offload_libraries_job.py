"""Train with a library that shards or offloads; run by ``test_torch_offload_libraries.py``.

    offload_libraries_job.py RESULT fsdp WORLD
    offload_libraries_job.py RESULT deepspeed STAGE DEVICE [WORLD]

Ranks are started as jobs are, by ``spawn``, or are forked where ``RANKS=fork`` is in the environment,
which spares them the import of PyTorch.

Rank N writes to RESULT.N the bits of its losses, its iterations, and how many slots of optimizer
state Zico has moved out.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

ITERATIONS = 6
FEATURES = 512
BATCH = 2048
LAYERS = 6
BUCKET = 600_000
"""Numbers in each of DeepSpeed's buffers: a little more than a layer has."""


def model() -> nn.Sequential:
    """Return the same model in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(LAYERS)))


def batches(rank: int) -> list[torch.Tensor]:
    """Return a rank's batches."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(BATCH, FEATURES, generator=generator) for _ in range(ITERATIONS)]


def write(result: str, rank: int, bits: list[str]) -> None:
    """Write what is asked for."""
    from zico.job.session import current_here

    joined = current_here()
    told: dict[str, Any] = {"losses": bits}
    if joined is not None:
        told["iterations"] = int(joined.record["iteration"])
        told["left"] = int(joined.heap.record[0]["optimizer"]["left"])
    Path(f"{result}.{rank}").write_text(json.dumps(told))


def train_fsdp(rank: int, result: str, world: int) -> None:
    """Train as a rank of FSDP2 with CPU offload."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{result}.store", rank=rank, world_size=world)
    sharded = model()
    for part in (*sharded, sharded):
        fully_shard(part, mesh=init_device_mesh("cpu", (world,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.Adam(sharded.parameters(), lr=1e-3)
    bits = []
    for batch in batches(rank):
        loss = sharded(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bits.append(loss.item().hex())
    write(result, rank, bits)
    torch.distributed.destroy_process_group()


def train_deepspeed(rank: int, result: str, stage: int, device: str, world: int) -> None:
    """Train a rank with ZeRO, two groups of parameters, and the optimizer's state offloaded to a device or ``none``.

    The state that is worth moving is that of the second group.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed

    if world > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{result}.store", rank=rank, world_size=world)

    made = model()
    groups = [
        {"params": [one for one in made.parameters() if one.ndim == 1], "weight_decay": 0.0},
        {"params": [one for one in made.parameters() if one.ndim > 1], "weight_decay": 0.1},
    ]
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": BUCKET, "stage3_max_live_parameters": BUCKET}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
    }
    with tempfile.TemporaryDirectory() as directory:
        if device != "none":
            path = {"nvme_path": directory} if device == "nvme" else {}
            zero["offload_optimizer"] = {"device": device, "pin_memory": False, **path}
        engine = deepspeed.initialize(model=made, model_parameters=groups, config=config)[0]
        bits = []
        for batch in batches(rank):
            loss = engine(batch).square().mean()
            engine.backward(loss)
            engine.step()
            bits.append(loss.item().hex())
    write(result, rank, bits)


def start(train: Callable[..., None], arguments: tuple[object, ...], world: int) -> None:
    """Start ranks and wait for their ends."""
    how = os.environ.get("RANKS", "spawn")
    torch.multiprocessing.start_processes(train, arguments, nprocs=world, start_method=how)


def main(result: str, library: str, first: str, device: str = "", world: str = "1") -> None:
    """Train as it is asked for."""
    if library == "deepspeed":
        if int(world) == 1:
            train_deepspeed(0, result, int(first), device, 1)
        else:
            arguments = (result, int(first), device, int(world))
            start(train_deepspeed, arguments, int(world))
    elif int(first) == 1:
        train_fsdp(0, result, 1)
    else:
        start(train_fsdp, (result, int(first)), int(first))


if __name__ == "__main__":
    main(*sys.argv[1:])
