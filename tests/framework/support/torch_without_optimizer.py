"""A loop in which nothing marks an iteration: the period of its allocations is found; run by ``test_torch.py``."""

from __future__ import annotations

import torch
from checking import record, run

ROUNDS = 40


def check_period_detection() -> None:
    """Of a loop without an optimizer, about one iteration is found for each time round."""
    weights = [torch.randn(64, 64) for _ in range(6)]
    with torch.inference_mode():
        for _ in range(ROUNDS):
            features = torch.ones(2048, 64)
            for number, weight in enumerate(weights):
                features = torch.relu(features @ weight)[: 2000 - 80 * number].clone()
    assert ROUNDS // 2 <= record()["iteration"] <= ROUNDS


if __name__ == "__main__":
    run(dict(globals()))
