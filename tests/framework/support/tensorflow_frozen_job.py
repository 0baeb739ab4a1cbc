"""A job of Keras over TensorFlow with a frozen base and a head that learns; it does what it is told on stdin."""

import gc
import os
import sys

os.environ["KERAS_BACKEND"] = "tensorflow"

import jax.numpy as jnp
import keras
import numpy as np
import tensorflow as tf
from frozen_places import is_outside, obey

import zico
from zico.job import frozen

WIDTH, LAYERS = 1024, 6
WIDE = 16
"""So many times the width has statistics of batches that are large enough for the pool."""


def model(seed: int) -> keras.Model:
    """Return a base that is the same for all, 4 MiB a layer, and a head of this seed behind statistics of batches."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, use_bias=False, activation="tanh") for _ in range(LAYERS)]
    base = keras.Sequential([keras.layers.Input((WIDTH,)), *layers])
    base.trainable = False
    keras.utils.set_random_seed(seed)
    wide = [keras.layers.RepeatVector(WIDE), keras.layers.Flatten(), keras.layers.BatchNormalization()]
    made = keras.Sequential([keras.layers.Input((WIDTH,)), base, *wide, keras.layers.Dense(4)])
    made.compile(optimizer="sgd", loss="mse")
    return made


class Plain(tf.Module):
    """A module without Keras: a frozen weight of 4 MiB, and one that learns."""

    def __init__(self) -> None:
        """Make both."""
        super().__init__()
        ones = np.full((2 * WIDTH, WIDTH), 0.5)
        self.base = tf.Variable(tf.cast(ones, tf.bfloat16), trainable=False)
        self.head = tf.Variable(tf.ones((WIDTH, 4)))

    def step(self) -> None:
        """Train."""
        with tf.GradientTape() as tape:
            rows = tf.cast(tf.ones((4, 2 * WIDTH), tf.bfloat16) @ self.base, tf.float32)
            loss = tf.reduce_mean(tf.square(rows @ self.head))
        self.head.assign_sub(1e-9 * tape.gradient(loss, self.head))


def lies_outside(variable: tf.Variable) -> bool:
    """Tell whether a variable lies outside the pool."""
    return is_outside(variable.read_value()._numpy().ctypes.data)


class Job:
    """What can be asked of it."""

    def __init__(self, seed: int) -> None:
        """Make the model."""
        self.model = model(seed)
        self.base = self.model.layers[0]
        self.statistics = self.model.layers[3].non_trainable_variables
        self.rows = np.random.default_rng(seed).standard_normal((32, WIDTH), np.float32)

    @property
    def weights(self) -> list[tf.Variable]:
        """Return what is, or was, frozen."""
        return [layer.kernel.value for layer in self.base.layers]

    def step(self) -> str:
        """Train for an iteration; returns the loss and the statistics to the last bit."""
        loss = float(self.model.train_on_batch(self.rows, np.zeros((32, 4), np.float32)))
        return " ".join(number.hex() for number in (loss, *(float(np.sum(one.numpy())) for one in self.statistics)))

    def share(self) -> int:
        """Share the base now; returns what jobs have in common then."""
        assert zico.share(self.base) is self.base
        found = zico.status()
        return 0 if found is None else found.shared_bytes

    def share_all(self) -> str:
        """Share the whole model, its statistics as well."""
        zico.share(self.model)
        return self.where()

    def there(self) -> int:
        """Return how many of the base's layers lie outside the pool."""
        return sum(map(lies_outside, self.weights))

    def where(self) -> str:
        """Return how many of the base's layers lie outside the pool, and how many of the statistics."""
        return f"{self.there()} {sum(lies_outside(one.value) for one in self.statistics)}"

    def sum(self) -> str:
        """Return what the base has, to the last bit."""
        return " ".join(float(np.sum(one.numpy(), dtype=np.float64)).hex() for one in self.weights)

    def write(self) -> float:
        """Add to a weight of the base in place."""
        self.weights[0].assign_add(tf.ones((WIDTH, WIDTH)))
        return self.there()

    def scatter(self) -> float:
        """Write a single element of a weight."""
        self.weights[1].scatter_nd_update([[0, 0]], [7.0])
        return float(self.weights[1][0, 0])

    def restore(self) -> int:
        """Assign a weight what it has."""
        self.weights[2].assign(self.weights[2].numpy())
        return self.there()

    def race(self) -> str:
        """Share while a weight is written, as by another thread; tells whether the weight has what was written."""
        compare, weight = frozen.is_same, self.weights[0]

        def compare_and_write(*both: object) -> bool:
            weight.assign(tf.ones((WIDTH, WIDTH)))
            return compare(*both)

        frozen.is_same = compare_and_write
        zico.share([weight])
        return f"{self.there()} {float(tf.reduce_sum(weight))}"

    def both(self) -> int:
        """Have the same bytes in a variable and in an array of JAX that goes; returns what jobs have in common then."""
        array = zico.share(jnp.asarray(self.weights[0].numpy()))
        assert is_outside(array.unsafe_buffer_pointer())
        self.share()
        del array
        gc.collect()
        other = zico.share(jnp.ones((WIDTH, WIDTH)))  # which asks the broker after it was told what is gone
        return zico.status().shared_bytes - other.nbytes

    def unfreeze(self) -> None:
        """Let the last layer of the base learn, too."""
        self.base.layers[-1].trainable = True
        self.model.compile(optimizer="sgd", loss="mse")

    def gather(self) -> str:
        """Look up rows of a weight by its variable, and by a frozen embedding of Keras, which is shared after that."""
        tf.gather(self.weights[0], [0, 1])
        zico.share(self.base)
        words = keras.layers.Embedding(WIDTH, WIDTH)
        words.build()
        words.trainable = False
        zico.share(words)
        words(np.array([[1, 2]]))
        return f"{self.there()} {lies_outside(words.embeddings.value)}"

    def differentiate(self) -> str:
        """Share between the gradients and their use: no iteration ends."""
        head = self.model.layers[-1].kernel.value
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(head))
        gradient = tape.gradient(loss, head)
        before = zico.status().iterations
        zico.share(self.base)
        return f"{self.there()} {zico.status().iterations - before} {gradient is not None}"

    def plain(self) -> str:
        """Train a module without Keras; tells where it lies, whether its bits stay, and that a function reads them."""
        module = Plain()
        before = module.base.numpy().tobytes()
        module.step()
        module.step()
        total = tf.function(lambda: tf.reduce_sum(tf.cast(module.base, tf.float32)))()
        return f"{lies_outside(module.base)} {module.base.numpy().tobytes() == before} {float(total)}"

    def drop(self) -> None:
        """Let the model go."""
        keras.backend.clear_session()
        self.model = self.base = self.statistics = None
        gc.collect()

    def wrong(self) -> str:
        """Give ``zico.share`` what it does not know."""
        try:
            zico.share("base")
        except zico.base.errors.ConfigError as error:
            return str(error)
        return "nothing"


if __name__ == "__main__":
    obey(Job(int(sys.argv[1])))
