"""Train a Keras model with Adam for some steps when told to; prints the bits of losses, weights and optimizer."""

# ruff: noqa: T201 - a script that talks to its test

from __future__ import annotations

import hashlib
import sys

import keras
import numpy as np

WIDTH = 1024
BATCH = 64


def main() -> None:
    """Train as many steps as the argument says."""
    print("ready", flush=True)
    sys.stdin.readline()
    keras.utils.set_random_seed(1)
    layers = [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, "relu"), keras.layers.Dense(WIDTH)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(), "mse", jit_compile=False)
    inputs = np.random.default_rng(1).random((BATCH, WIDTH), np.float32)
    found = hashlib.sha256()
    for _ in range(int(sys.argv[1])):
        found.update(float(model.train_on_batch(inputs, inputs)).hex().encode())
    for variable in [*model.variables, *model.optimizer.variables]:
        found.update(np.asarray(variable).tobytes())
    print(found.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
