"""A small net that JAX trains on one thread; writes the bits of its losses. Run by ``test_exactness.py``."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"  # sums in one order

import jax
import jax.numpy as jnp

LAYERS, WIDTH, BATCH = 10, 64, 1 << 15  # 8 MiB a layer


def loss(weights: jax.Array, batch: jax.Array, target: jax.Array) -> jax.Array:
    """Return the mean squared error of what the layers make of a batch."""
    for layer in range(LAYERS):
        batch = jnp.tanh(batch @ weights[layer])
    return jnp.mean((batch - target) ** 2)


@jax.jit
def train(weights: jax.Array, batch: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the weights after a step of SGD, and the loss before it."""
    value, gradient = jax.value_and_grad(loss)(weights, batch, target)
    return weights - 0.5 * gradient, value


def main() -> None:
    """Train, and write the losses in hexadecimal, which keeps every bit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--losses", type=Path, required=True)
    arguments = parser.parse_args()
    of_weights, of_data = jax.random.split(jax.random.key(0))
    weights = jax.random.normal(of_weights, (LAYERS, WIDTH, WIDTH)) / 8
    batch = jax.random.normal(of_data, (BATCH, WIDTH))
    target = jnp.roll(batch, 1, axis=1)
    losses = []
    for _ in range(arguments.iterations):
        weights, value = train(weights, batch, target)
        losses.append(float(value).hex())
    arguments.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
