"""Convert a large array while the pool is full, then ask for more than there ever will be; line by line."""

# ruff: noqa: T201 - a script that talks to its test

from __future__ import annotations

import sys

import numpy as np
import tensorflow as tf

FLOATS_PER_MIB = 1 << 18


def main() -> None:
    """Do one thing for each line on stdin."""
    array = np.arange(12 * FLOATS_PER_MIB, dtype=np.float32)
    print("ready", flush=True)
    sys.stdin.readline()
    tensor = tf.constant(array, shape=[12, FLOATS_PER_MIB])  # allocates with the GIL held
    doubled = tensor + 0.0
    print("converted", bool((doubled.numpy().ravel() == array).all()), flush=True)
    del tensor, doubled
    sys.stdin.readline()
    try:
        tf.random.uniform([64 * FLOATS_PER_MIB])
    except tf.errors.ResourceExhaustedError as error:
        print("refused", type(error).__name__, flush=True)
    ones = tf.ones([64 * FLOATS_PER_MIB])
    print("went on", float(tf.reduce_sum(ones)), flush=True)


if __name__ == "__main__":
    main()
