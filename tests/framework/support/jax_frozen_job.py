"""A JAX job with a frozen base and a head that learns; it does what it is told on stdin, line by line."""

import ctypes
import sys

import jax
import jax.numpy as jnp
import numpy as np
from frozen_places import is_outside, obey
from jax.experimental.layout import Format, Layout

import zico
from zico.base.errors import ConfigError
from zico.job import frozen

WIDTH, LAYERS = 1024, 6


def loss_of(head: jax.Array, base: list[jax.Array], rows: jax.Array) -> jax.Array:
    """Return the loss."""
    for weight in base:
        rows = jnp.tanh(rows @ weight)
    return jnp.mean((rows @ head) ** 2)


@jax.jit
def step(head: jax.Array, base: list[jax.Array], rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Train."""
    loss, gradient = jax.value_and_grad(loss_of)(head, base, rows)
    return head - 0.1 * gradient, loss


def lies_outside(array: jax.Array) -> bool:
    """Tell whether an array lies outside the pool."""
    return is_outside(array.unsafe_buffer_pointer())


class Job:
    """What can be asked of it."""

    def __init__(self, seed: int) -> None:
        """Make the base, which is the same for all, 4 MiB a layer, and the rest of this seed."""
        keys = jax.random.split(jax.random.key(0), LAYERS)
        self.base = [0.03 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]
        self.head = jax.random.normal(jax.random.key(seed), (WIDTH, 4))
        self.rows = jax.random.normal(jax.random.key(seed + 100), (32, WIDTH))

    def step(self) -> str:
        """Train for an iteration; returns the loss to the last bit."""
        self.head, loss = step(self.head, self.base, self.rows)
        return float(loss).hex()

    def share(self) -> int:
        """Share the base now, one by one, so that each goes before the next; returns what jobs have in common then."""
        for i in range(LAYERS):
            self.base[i] = zico.share(self.base[i])
        found = zico.status()
        return 0 if found is None else found.shared_bytes

    def there(self) -> int:
        """Return how many of the base's layers lie outside the pool."""
        return sum(map(lies_outside, self.base))

    def sum(self) -> str:
        """Return what the base has, to the last bit."""
        return " ".join(float(np.sum(np.asarray(one), dtype=np.float64)).hex() for one in self.base)

    def write(self) -> str:
        """Write to a weight past JAX, as a library of C could."""
        ctypes.memset(self.base[0].unsafe_buffer_pointer(), 0, 64)
        return str(float(self.base[0][0, 0]))

    def donate(self) -> str:
        """Donate a weight; tells whether it is gone, and where what was made of it lies."""
        weight = self.base[0]
        address = weight.unsafe_buffer_pointer()
        made = jax.jit(lambda one: 2 * one, donate_argnums=0)(weight)
        self.base[0] = made
        return f"{weight.is_deleted()} {made.unsafe_buffer_pointer() == address} {lies_outside(made)}"

    def fine_tune(self) -> str:
        """Let the last weight learn, as one that is frozen no more."""
        of_base = jax.jit(jax.grad(loss_of, argnums=1))(self.head, self.base, self.rows)
        self.base[-1] -= 0.1 * of_base[-1]
        return str(self.there())

    def kinds(self) -> str:
        """Share a tree of all kinds of leaves; tells of each whether it is equal to what it was, and lies outside."""
        ones = jnp.asarray(np.random.default_rng(0).integers(0, 2, (512, 1024)), jnp.float32)
        with jax.enable_x64(True):  # noqa: FBT003 - as JAX'
            wide = jnp.asarray(np.full((512, 1024), 1 / 3))
        tree = {
            "half": ones.astype(jnp.bfloat16),
            "small": ones.astype(jnp.float8_e4m3fn),
            "flags": ones.astype(bool),
            "bound": jax.device_put(ones + 1, jax.devices()[0]),
            "weak": jax.jit(lambda: jnp.broadcast_to(1.0, (512, 1024)))(),
            "nibbles": ones[1:].astype(jnp.int4),
            "keys": jax.random.split(jax.random.key(0), 1 << 15),
            "turned": jax.device_put(ones, Format(Layout((1, 0)), ones.sharding)),
            "wide": wide,
            "host": np.ones((512, 1024)),
            "none": None,
            "text": "text",
        }
        tree["tied"] = tree["half"]
        read, digest = [], frozen.digest
        frozen.digest = lambda address, size_bytes: read.append(size_bytes) or digest(address, size_bytes)
        found = zico.share(tree)
        assert tree["nibbles"].nbytes not in read, "which are more bytes than it has"
        assert found["tied"] is found["half"]
        assert found["host"] is tree["host"]
        assert found["text"] == "text"
        said = []
        for name in ("half", "small", "flags", "bound", "weak", "nibbles", "keys", "turned", "wide"):
            one, other = tree[name], found[name]
            facts = ("dtype", "weak_type", "sharding", "committed")
            is_equal = all(getattr(one, fact, None) == getattr(other, fact, None) for fact in facts)
            said.append(f"{name}={is_equal and bool((one == other).all())},{one is not other}")
        return " ".join(said)

    def drop(self) -> None:
        """Let the base go."""
        self.base = []

    def wrong(self) -> str:
        """Give ``zico.share`` what it does not know, and call it where JAX traces."""
        said = []
        for call in (lambda: zico.share("base"), lambda: jax.jit(zico.share)(self.base)):
            try:
                call()
            except ConfigError as error:
                said.append(str(error))
        return " | ".join(said)


if __name__ == "__main__":
    obey(Job(int(sys.argv[1])))
