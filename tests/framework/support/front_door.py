"""A plain training script: it imports an adapter, and says what it sees; run by ``test_front_door.py``.

    front_door.py FRAMEWORK

Each line of stdin asks for something; each answer is a line of JSON.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

FRAMEWORK = sys.argv[1]
import_module(f"zico.adapters.{FRAMEWORK}")  # the first line of such a script

import numpy as np  # noqa: E402 - as in that script

import zico  # noqa: E402


def torch_steps(n: int) -> list[str]:
    """Train, without an optimizer, whose import takes a second; returns the bits of the losses."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    losses = []
    for _ in range(n):
        model.zero_grad()
        loss = model(torch.ones(256, 256)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
        zico.step()
        losses.append(loss.item().hex())
    return losses


def keras_steps(n: int) -> list[str]:
    """Train; returns the bits of the losses."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(256) for _ in range(4)])
    model.compile(optimizer="sgd", loss="mse")
    data = np.ones((256, 256), np.float32)
    return [float(model.train_on_batch(data, data)).hex() for _ in range(n)]


def is_in_pool() -> bool:
    """Tell whether a new tensor lies in the pool's window."""
    import torch
    from checking import in_pool

    return in_pool(torch.ones(1 << 20).data_ptr())


def answer(word: str, *numbers: str) -> Any:  # noqa: ANN401 - JSON
    """Do what a line asks for."""
    if word == "train":
        return (torch_steps if FRAMEWORK == "torch" else keras_steps)(int(numbers[0]))
    if word == "enable":
        return import_module(f"zico.adapters.{FRAMEWORK}").enable() is not None
    if word == "in_pool":
        return is_in_pool()
    if word == "leave":
        return zico.leave()
    return zico.status()


for line in sys.stdin:
    sys.stdout.write(json.dumps(answer(*line.split())) + "\n")
    sys.stdout.flush()
