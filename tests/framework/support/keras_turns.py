"""Train a Keras model with Adam until told to stop, or for some numbers of steps.

Prints ``STEPS BITS``: a hash of losses, weights and optimizer after so many steps.
"""

# ruff: noqa: T201 - a script that talks to its test

from __future__ import annotations

import hashlib
import itertools
import select
import sys

import keras
import numpy as np

WIDTH = 1024
BATCH = 64


def main() -> None:
    """Print the bits after each number of steps that is given; else where it stops."""
    wanted = [int(steps) for steps in sys.argv[1:]]
    keras.utils.set_random_seed(1)
    layers = [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, "relu"), keras.layers.Dense(WIDTH)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(), "mse", jit_compile=False)
    inputs = np.random.default_rng(1).random((BATCH, WIDTH), np.float32)
    losses = []
    for step in itertools.count(1):
        losses.append(float(model.train_on_batch(inputs, inputs)).hex())
        is_over = not wanted and bool(select.select([sys.stdin], [], [], 0)[0])
        if is_over or step in wanted:
            found = hashlib.sha256("".join(losses).encode())
            for variable in [*model.variables, *model.optimizer.variables]:
                found.update(np.asarray(variable).tobytes())
            print(step, found.hexdigest(), flush=True)
        if is_over or step == max(wanted, default=0):
            break


if __name__ == "__main__":
    main()
