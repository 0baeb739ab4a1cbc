"""Train a chain of element-wise layers with PyTorch: memory like a deep network's, hardly any arithmetic."""

# ruff: noqa: T201 - a script that talks to its test

from __future__ import annotations

import argparse
import sys

import torch

FEATURES = 64
FLOATS_PER_MIB = 1 << 18


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--mib", type=float, default=1.0, help="size of a layer's feature map")
    parser.add_argument("--switch-at", type=int, default=1 << 30, help="iteration from which on the batch is another")
    parser.add_argument("--switch-mib", type=float, default=1.0)
    parser.add_argument("--pause-at", type=int, default=1 << 30, help="iteration that waits half-way for a line")
    parser.add_argument("--fail-at", type=int, default=1 << 30, help="iteration that raises half-way")
    parser.add_argument("--idle", action="store_true", help="after the iterations, hold a tensor until stdin ends")
    return parser.parse_args()


def main() -> None:
    """Train, and print the bits of each loss."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    scales = [torch.randn(FEATURES, generator=generator).requires_grad_() for _ in range(arguments.layers)]
    optimizer = torch.optim.SGD(scales, lr=0.1)
    for iteration in range(arguments.iterations):
        mib = arguments.switch_mib if iteration >= arguments.switch_at else arguments.mib
        features = torch.randn(int(mib * FLOATS_PER_MIB) // FEATURES, FEATURES, generator=generator)
        optimizer.zero_grad()
        for layer, scale in enumerate(scales):
            if iteration == arguments.pause_at and 2 * layer == len(scales):
                print("half-way", flush=True)
                sys.stdin.readline()
            features = torch.tanh(features * scale + 0.1)
        if iteration == arguments.fail_at:
            raise ValueError("half-way")
        loss = (features * features).mean()
        loss.backward()
        optimizer.step()
        print("loss", loss.item().hex(), flush=True)
    if arguments.idle:
        kept = torch.ones(FLOATS_PER_MIB)
        print("idle", flush=True)
        sys.stdin.read()
        print(float(kept.sum()))


if __name__ == "__main__":
    main()
