"""What is true of TensorFlow and Keras in a job, with PyTorch beside them; run by ``test_tensorflow.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from checking import in_pool, marks, record, run

import zico
from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
BATCH, FEATURES = 64, 512
INPUTS = np.ones((3 * BATCH, FEATURES), np.float32)
TARGETS = np.ones((3 * BATCH, 1), np.float32)


def marks_of(work: Callable[[], object]) -> int:
    """Return how many marks there are while ``work`` runs: phases between them are iterations, too."""
    before = marks()
    work()
    return marks() - before


def small_model(kind: type[keras.Model] = keras.Model) -> keras.Model:
    """Return a compiled model with feature maps over the threshold."""
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(FEATURES, activation="relu")(inputs)
    model = kind(inputs, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse", jit_compile=False)
    return model


def address_of(tensor: tf.Tensor) -> int:
    """Return where a tensor's bytes are, without a copy."""
    return int(tensor._numpy().__array_interface__["data"][0])


def check_large_tensors_are_in_the_pool() -> None:
    """Results of operations, variables and constants over the threshold lie in the heap's window; small ones do not."""
    made = {
        "result": tf.random.uniform([MIB // 4]) * 2.0,
        "product": tf.linalg.matmul(tf.ones([512, 512]), tf.ones([512, 512])),
        "variable": tf.Variable(tf.zeros([MIB // 4])).read_value() + 1.0,
        "constant": tf.constant(np.arange(MIB // 4, dtype=np.float32).tolist()),
    }
    assert {name for name, tensor in made.items() if not in_pool(address_of(tensor))} == set()
    assert {address_of(tensor) % 64 for tensor in made.values()} == {0}
    assert not in_pool(address_of(tf.random.uniform([64]) * 2.0))


def check_tensors_come_and_go() -> None:
    """A tensor is counted from its birth to its death."""
    before = int(record()["live_bytes"])
    tensor = tf.random.uniform([MIB])
    assert int(record()["live_bytes"]) >= before + 4 * MIB
    del tensor
    assert int(record()["live_bytes"]) == before


def check_nearly_all_bytes_are_in_the_pool() -> None:
    """What the heap was asked for it also served."""
    assert record()["pooled_bytes"] >= 0.95 * record()["requested_bytes"] > 0


def check_fit_marks_each_batch() -> None:
    """Every batch of ``fit`` is an iteration; ``evaluate`` and ``predict`` are none."""
    model = small_model()
    assert marks_of(lambda: model.fit(INPUTS, TARGETS, batch_size=BATCH, epochs=2, verbose=0)) == 6
    assert marks_of(lambda: model.evaluate(INPUTS, TARGETS, batch_size=BATCH, verbose=0)) == 0
    assert marks_of(lambda: model.predict(INPUTS, batch_size=BATCH, verbose=0)) == 0


def check_train_on_batch_marks() -> None:
    """Each call of ``train_on_batch`` is an iteration, also after the model has been compiled anew."""
    model = small_model()
    once = lambda: model.train_on_batch(INPUTS[:BATCH], TARGETS[:BATCH])  # noqa: E731 - said three times
    assert [marks_of(once) for _ in range(2)] == [1, 1]
    model.compile("adam", "mse", jit_compile=False)
    assert marks_of(once) == 1


class Custom(keras.Model):
    """A model with a train step of its own."""

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, Any]:
        """Take one step of plain descent."""
        inputs, targets = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(inputs, targets, self(inputs, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def check_a_custom_train_step_marks() -> None:
    """A model with its own ``train_step`` has an iteration per batch too."""
    model = small_model(Custom)
    assert marks_of(lambda: model.fit(INPUTS, TARGETS, batch_size=BATCH, verbose=0)) == 3


def check_both_frameworks_in_one_process() -> None:
    """PyTorch imported after TensorFlow is served by the same heap, and each tensor ends where it began."""
    import torch

    joined = session.current()
    assert joined is not None
    assert set(joined.frameworks) == {"tensorflow", "keras", "torch"}
    before = int(record()["live_bytes"])
    ours, theirs = torch.ones(MIB), tf.random.uniform([MIB])
    assert in_pool(ours.data_ptr())
    assert in_pool(address_of(theirs))
    shared = torch.from_numpy(theirs.numpy())
    assert float(shared.sum()) == float(torch.from_numpy(theirs.numpy()).sum())
    del ours, theirs, shared
    assert int(record()["live_bytes"]) == before


def check_a_custom_loop_marks_by_hand() -> None:
    """A ``tf.function`` loop ends its iterations by ``zico.step()``; from then on Keras' own marks do not count."""
    weights = tf.Variable(tf.ones([FEATURES, FEATURES]))

    @tf.function
    def step(inputs: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(inputs @ weights))
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss

    def loop() -> None:
        for _ in range(4):
            step(tf.ones([BATCH, FEATURES]))
            zico.step()

    assert marks_of(loop) == 4
    assert marks_of(lambda: small_model().fit(INPUTS, TARGETS, batch_size=BATCH, verbose=0)) == 0


if __name__ == "__main__":
    run(dict(globals()))
    alive_at_exit = tf.random.uniform([MIB])
