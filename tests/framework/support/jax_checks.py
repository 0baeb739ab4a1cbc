"""What is true of JAX in a job on the host; run by ``test_jax.py``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from checking import assert_iterations, in_pool, record, run

import zico

if TYPE_CHECKING:
    from collections.abc import Callable

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


def loss_of(weights: jax.Array, batch: jax.Array) -> jax.Array:
    """Return a mean of squares."""
    return jnp.mean((batch @ weights) ** 2)


WEIGHTS = jnp.ones((512, 512)) / 512
BATCH = jnp.ones((256, 512))
LARGE_BATCH = jnp.ones((2048, 512))


def check_executions_of_a_training_step_are_iterations() -> None:
    """A jitted function that computes gradients counts; what initializes, predicts or evaluates does not."""

    @functools.partial(jax.jit, donate_argnums=0)
    def train(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss_of)(weights, batch)
        return weights - 0.1 * gradient, value

    start, predict = jax.jit(lambda: WEIGHTS * 2), jax.jit(lambda weights, batch: batch @ weights)
    evaluate = jax.jit(loss_of)

    def loop() -> None:
        weights = start()
        for i in range(30):
            weights, _ = train(weights, BATCH if i % 10 else BATCH[:128])
            evaluate(weights, BATCH)
            predict(weights, LARGE_BATCH)  # returns more than a step does
        assert train.lower(weights, BATCH).as_text()

    assert_iterations(30, loop)


def check_a_jitted_function_that_is_made_anew_counts() -> None:
    """What JAX has traced before is known, too, also as part of another function."""

    def train(weights: jax.Array) -> jax.Array:
        return weights - 0.1 * jax.grad(loss_of)(weights, BATCH)

    def loop() -> None:
        weights = WEIGHTS
        for _ in range(10):
            weights = jax.jit(train)(weights)

    assert_iterations(10, loop)
    inner = jax.jit(train)

    def outer(weights: jax.Array) -> jax.Array:
        return inner(weights) * 0.5

    assert_iterations(10, lambda: [jax.jit(outer)(WEIGHTS) for _ in range(10)])


def check_a_loop_without_jit_has_an_iteration_for_each_step() -> None:
    """The outermost gradient counts: eager, of a jitted loss, jitted itself, or nested in another."""
    jitted = jax.jit(loss_of)
    slope = lambda weights: jnp.sum(jax.grad(loss_of)(weights, BATCH) ** 2)  # noqa: E731 - said once
    ways = (
        lambda weights: jax.value_and_grad(loss_of)(weights, BATCH)[1],
        lambda weights: jax.grad(jitted)(weights, BATCH),
        jax.jit(lambda weights: jax.grad(loss_of)(weights, BATCH)),
        jax.grad(slope),
    )
    for number, gradient in enumerate(ways):

        def loop(gradient: Callable[[jax.Array], jax.Array] = gradient) -> None:
            weights = WEIGHTS
            for _ in range(10):
                weights = weights - 0.1 * gradient(weights)
                jitted(weights, LARGE_BATCH)

        assert_iterations(10, loop, number)


def check_two_steps_in_turn_are_one_iteration() -> None:
    """Where a generator and a discriminator step in turn, a pair of steps is one iteration."""
    sides = [jax.jit(lambda weights, k=k: weights - k * jax.grad(loss_of)(weights, BATCH)) for k in (0.1, 0.2)]
    assert_iterations(10, lambda: [side(WEIGHTS) for _ in range(10) for side in sides])


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
