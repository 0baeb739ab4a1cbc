"""A Keras model over PyTorch, with a frozen base that is the same for all, and a head that learns."""

# ruff: noqa: T201 - a script that talks to its test, and says first what Keras is to compute with
import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

from zico.job import session

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


def outside() -> int:
    """Return the bytes of frozen weights that lie outside the pool's window."""
    joined = session.current()
    if joined is None:
        return 0
    heap = joined.heap
    end = heap.base + int(heap.record[0]["window_bytes"])
    frozen = [one.value for one in tuned.non_trainable_weights if one.value.nbytes >= 1 << 16]
    return sum(one.nbytes for one in frozen if not heap.base <= one.data_ptr() < end)


tuned = model(int(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "step":
        rows = np.random.default_rng(0).standard_normal((32, WIDTH), np.float32)
        print(float(tuned.train_on_batch(rows, np.zeros((32, 4), np.float32))).hex(), flush=True)
    else:
        print(outside(), flush=True)
