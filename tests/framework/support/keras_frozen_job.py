"""A Keras model over PyTorch, with a frozen base that is the same for all, and a head that learns."""

# ruff: noqa: T201 - a script that talks to its test, and says first what Keras is to compute with
import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from frozen_places import outside

WIDTH, LAYERS = 512, 6


def model(seed: int) -> keras.Model:
    """Return a base of 1 MiB a layer, and a head of this seed."""
    keras.utils.set_random_seed(0)
    base = keras.Sequential([keras.layers.Input((WIDTH,)), *(keras.layers.Dense(WIDTH) for _ in range(LAYERS))])
    base.trainable = False
    keras.utils.set_random_seed(seed)
    made = keras.Sequential([keras.layers.Input((WIDTH,)), base, keras.layers.Dense(4)])
    made.compile(optimizer="sgd", loss="mse")
    return made


tuned = model(int(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "step":
        rows = np.random.default_rng(0).standard_normal((32, WIDTH), np.float32)
        print(float(tuned.train_on_batch(rows, np.zeros((32, 4), np.float32))).hex(), flush=True)
    else:
        print(outside(one.value for one in tuned.non_trainable_weights), flush=True)
