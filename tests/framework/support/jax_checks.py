"""What is true of JAX in a job on the host; run by ``test_jax.py``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from checking import in_pool, record, run

import zico

MIB = 1 << 20


def check_large_arrays_are_in_the_pool() -> None:
    """Results over the threshold lie in the heap's window; small ones do not."""
    made = jnp.ones((512, 512)) @ jnp.ones((512, 512))
    assert float(made[0, 0]) == 512.0
    assert in_pool(made.unsafe_buffer_pointer())
    assert not in_pool(jnp.ones(64).block_until_ready().unsafe_buffer_pointer())


def check_arrays_come_and_go() -> None:
    """An array is counted from its birth to its death."""
    before = int(record()["live_bytes"])
    array = jnp.ones(MIB).block_until_ready()
    assert int(record()["live_bytes"]) == before + 4 * MIB
    del array
    assert int(record()["live_bytes"]) == before


def check_executions_of_the_largest_function_are_iterations() -> None:
    """Nothing marks: each execution of the jitted function that returns most does, alone or within a loop."""
    step = jax.jit(lambda weights: weights * 0.5)
    loss = jax.jit(lambda weights: (step(weights) ** 2).sum())
    weights = jnp.ones((512, 512))
    before = int(record()["iteration"])
    for _ in range(3):
        weights = step(weights)
        loss(weights)
    assert int(record()["iteration"]) == before + 3
    assert step.lower(weights).as_text()
    assert jnp.array_equal(weights, jnp.full((512, 512), 0.125))


def check_steps_are_iterations() -> None:
    """Once a training loop marks its iterations by hand, no execution does."""
    zico.step()
    before = int(record()["iteration"])
    gradient = jax.jit(jax.grad(lambda weights: (weights**2).sum()))
    weights = jnp.ones((512, 512))
    for _ in range(3):
        weights = weights - 0.1 * gradient(weights)
        zico.step()
    assert int(record()["iteration"]) == before + 3


if __name__ == "__main__":
    run(dict(globals()))
