"""Branches of layers, each on a stream of its own: more streams than a job of Zico has places for."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from training import Step

_BRANCHES = 17
_WIDTH = 512
_LAYERS = 4


def branches(batch: int = 1024) -> Step:
    """Build the branches; on a device without streams they run one after the other."""
    made = nn.ModuleList(
        nn.Sequential(*(layer for _ in range(_LAYERS) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.GELU())))
        for _ in range(_BRANCHES)
    )
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    on_gpu = next(made.parameters()).is_cuda
    streams: list[Any] = [torch.cuda.Stream() if on_gpu else None for _ in made]

    def step() -> torch.Tensor:
        inputs = torch.randn(batch, _WIDTH)
        optimizer.zero_grad()
        outputs = []
        for branch, stream in zip(made, streams, strict=True):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
                inputs.record_stream(stream)
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                outputs.append(branch(inputs).square().mean())
        for output, stream in zip(outputs, streams, strict=True):
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
                output.record_stream(torch.cuda.current_stream())
        loss = torch.stack(outputs).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
