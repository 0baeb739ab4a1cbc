"""Fit a small network by hand, with CuPy, JAX, Numba or NumPy arrays: ``array_job.py cupy --iterations 20``.

Prints each iteration's loss in hexadecimal, so that a run with Zico and one without can be compared
to the last bit.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS, WIDTH = 4096, 1024
RATE = 1e-3


def inputs() -> list[Any]:
    """Return images, wanted values and two layers, the same in each run."""
    generator = np.random.default_rng(1)
    shapes = ((ROWS, WIDTH), (ROWS, 1), (WIDTH, WIDTH), (WIDTH, 1))
    return [generator.standard_normal(shape).astype(np.float32) / 32 for shape in shapes]


def by_hand(module: Any, iterations: int) -> Iterator[float]:  # noqa: ANN401 - NumPy or CuPy
    """Descend along the gradient, which is written out; yields losses."""
    x, wanted, first, second = (module.asarray(array) for array in inputs())
    for _ in range(iterations):
        hidden = module.tanh(x @ first)
        difference = hidden @ second - wanted
        yield float((difference * difference).mean())
        back = (difference @ second.T) * (1 - hidden * hidden)
        second = second - RATE * (hidden.T @ difference)
        first = first - RATE * (x.T @ back)


def with_jax(iterations: int) -> Iterator[float]:
    """Let JAX derive and compile the step; yields losses."""
    jax: Any = import_module("jax")
    module = jax.numpy
    x, wanted, first, second = (module.asarray(array) for array in inputs())

    def loss(layers: Any) -> Any:  # noqa: ANN401
        difference = module.tanh(x @ layers[0]) @ layers[1] - wanted
        return (difference * difference).mean()

    step = jax.jit(jax.value_and_grad(loss))
    layers = (first, second)
    for _ in range(iterations):
        value, slopes = step(layers)
        layers = tuple(layer - RATE * slope for layer, slope in zip(layers, slopes, strict=True))
        yield float(value)


def with_numba(iterations: int) -> Iterator[float]:
    """Add vectors on the device, in new arrays each time; yields sums."""
    if not hasattr(np, "row_stack"):  # numba-cuda 0.30 asks for it; NumPy 2.5 has it no more
        setattr(np, "row_stack", np.vstack)  # noqa: B010 - a name that NumPy's types do not know
    cuda: Any = import_module("numba.cuda")

    def add(a: Any, b: Any, out: Any) -> None:  # noqa: ANN401
        i = cuda.grid(1)
        if i < out.size:
            out[i] = a[i] + b[i]

    kernel: Any = cuda.jit(add)
    total = cuda.to_device(inputs()[0].ravel())
    one = cuda.to_device(np.ones(ROWS * WIDTH, np.float32))
    for _ in range(iterations):
        made = cuda.device_array(ROWS * WIDTH, np.float32)
        kernel[-(-made.size // 256), 256](total, one, made)
        total = made
        yield float(total.copy_to_host().sum(dtype=np.float64))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=("cupy", "jax", "numba", "numpy"))
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args()
    match options.library:
        case "jax":
            losses = with_jax(options.iterations)
        case "numba":
            losses = with_numba(options.iterations)
        case name:
            losses = by_hand(import_module(name), options.iterations)
    for number, loss in enumerate(losses, 1):
        sys.stdout.write(f"iteration {number} loss {loss.hex()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
