"""Train a perceptron with TensorFlow, without Keras, for some steps; prints the bits of losses and weights.

The forward pass keeps four results of 2 MiB a layer, three of which are cheap to make again.
"""

# ruff: noqa: T201 - a script that talks to its test

from __future__ import annotations

import hashlib
import sys

import numpy as np
import tensorflow as tf

import zico

BATCH = 1024
WIDTH = 512
LAYERS = 6

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.experimental.enable_op_determinism()
random = np.random.default_rng(1)
weights = [tf.Variable(random.normal(0, 0.04, (WIDTH, WIDTH)).astype("f4")) for _ in range(LAYERS)]
inputs = tf.constant(random.random((BATCH, WIDTH), np.float32))


@tf.function
def train(features: tf.Tensor) -> tf.Tensor:
    """Make one step of plain gradient descent; returns the loss."""
    with tf.GradientTape() as tape:
        for weight in weights:
            features = tf.nn.gelu(features @ weight)
        loss = tf.reduce_mean(tf.math.squared_difference(features, inputs))
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(0.1 * gradient)
    return loss


def main() -> None:
    """Train for the steps that are asked for."""
    found = hashlib.sha256()
    for _ in range(int(sys.argv[1])):
        found.update(train(inputs).numpy().tobytes())
        zico.step()
    for weight in weights:
        found.update(weight.numpy().tobytes())
    print(found.hexdigest())


if __name__ == "__main__":
    main()
