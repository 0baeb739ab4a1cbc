"""What is true of TensorFlow and Keras in a job, with PyTorch beside them; run by ``test_tensorflow.py``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from checking import assert_iterations, in_pool, marks, record, run

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
    assert set(joined.frameworks) - {"jax"} == {"tensorflow", "keras", "torch"}  # others may import it where it is
    before = int(record()["live_bytes"])
    ours, theirs = torch.ones(MIB), tf.random.uniform([MIB])
    assert in_pool(ours.data_ptr())
    assert in_pool(address_of(theirs))
    shared = torch.from_numpy(theirs.numpy())
    assert float(shared.sum()) == float(torch.from_numpy(theirs.numpy()).sum())
    del ours, theirs, shared
    assert int(record()["live_bytes"]) == before


class Net:
    """Layers of plain TensorFlow, trained by hand; feature maps are over the threshold."""

    def __init__(self, layers: int = 3) -> None:
        """Make the weights."""
        self.weights = [tf.Variable(tf.random.normal([FEATURES, FEATURES]) / 32) for _ in range(layers)]

    def loss(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return the mean of the squares of what comes out."""
        for weights in self.weights:
            inputs = tf.nn.relu(inputs @ weights)
        return tf.reduce_mean(tf.square(inputs))

    def gradients(self, inputs: tf.Tensor) -> list[tf.Tensor]:
        """Return the gradients of the loss."""
        with tf.GradientTape() as tape:
            loss = self.loss(inputs)
        return tape.gradient(loss, self.weights)

    def apply(self, gradients: list[tf.Tensor]) -> None:
        """Take a step of plain descent."""
        for weights, gradient in zip(self.weights, gradients, strict=True):
            weights.assign_sub(0.1 * gradient)

    def train(self, inputs: tf.Tensor) -> None:
        """Take a step on a batch."""
        self.apply(self.gradients(inputs))


def batch(size: int = BATCH) -> tf.Tensor:
    """Return a batch."""
    return tf.ones([size, FEATURES])


def evaluated_between(train: Callable[[int], object], evaluate: Callable[[], object], steps: int = 30) -> None:
    """Train for some steps, and evaluate six times after each tenth one."""
    for i in range(steps):
        train(i)
        if i % 10 == 9:
            for _ in range(6):
                evaluate()


def check_a_custom_loop_has_an_iteration_for_each_step() -> None:
    """Each call of a training step is one, with its first trace, a last small batch, and an evaluation between."""
    net = Net()
    train, evaluate = tf.function(net.train), tf.function(net.loss)
    sizes = [BATCH if i % 10 else BATCH // 2 for i in range(30)]
    assert_iterations(30, lambda: evaluated_between(lambda i: train(batch(sizes[i])), lambda: evaluate(batch())))


def check_nested_functions_are_one_step() -> None:
    """The outermost function counts, though functions in it compute gradients and update."""
    net = Net()
    gradients, apply = tf.function(net.gradients), tf.function(net.apply)
    train = tf.function(lambda inputs: apply(gradients(inputs)))
    assert_iterations(10, lambda: [train(batch()) for _ in range(10)])


def check_a_loop_without_functions_has_an_iteration_for_each_step() -> None:
    """Without ``tf.function`` the first variable that is updated by new gradients ends an iteration."""
    net = Net()
    assert_iterations(10, lambda: [net.train(batch()) for _ in range(10)])


def check_gradients_of_one_function_and_updates_of_another_are_one_step() -> None:
    """So it is where a function computes gradients, and another or an assignment applies them."""
    for wrap in (tf.function, lambda function: function):
        net = Net()
        gradients, apply = tf.function(net.gradients), wrap(net.apply)
        assert_iterations(10, lambda: [apply(gradients(batch())) for _ in range(10)])  # noqa: B023 - called here


def check_a_target_network_ends_no_iteration() -> None:
    """What is written without new gradients is no step: a target network in a function or without one."""
    net, target = Net(), Net()
    train = tf.function(net.train)

    @tf.function
    def follow() -> None:
        for mine, its in zip(target.weights, net.weights, strict=True):
            mine.assign(0.9 * mine + 0.1 * its)

    def learn(_: int) -> None:
        train(batch())
        follow()
        target.weights[0].assign(net.weights[0])

    assert_iterations(30, lambda: evaluated_between(learn, lambda: target.loss(batch())))


def check_two_functions_of_an_iteration_are_one_step() -> None:
    """Where a generator and a discriminator step in turn, a pair of steps is one iteration."""
    sides = [tf.function(Net().train) for _ in range(2)]
    assert_iterations(10, lambda: [side(batch()) for _ in range(10) for side in sides])


def check_a_loop_with_an_optimizer_of_keras_has_an_iteration_for_each_step() -> None:
    """Each step of the optimizer is one, in a function or not; two optimizers in turn are one, too."""
    for wrap in (tf.function, lambda function: function):
        model = small_model()
        optimizers = [keras.optimizers.Adam() for _ in range(2)]

        def train(inputs: tf.Tensor, optimizer: Any, model: keras.Model = model) -> None:  # noqa: ANN401 - Keras'
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(inputs, training=True)))
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        one, two = (wrap(functools.partial(train, optimizer=optimizer)) for optimizer in optimizers)
        assert_iterations(10, lambda: [one(batch()) for _ in range(10)])  # noqa: B023 - called here
        if wrap is not tf.function:
            assert_iterations(10, lambda: [part(batch()) for _ in range(10) for part in (one, two)])  # noqa: B023


def check_evaluation_between_batches_of_keras_is_no_iteration() -> None:
    """``train_on_batch`` counts, ``test_on_batch``, ``predict_on_batch`` and ``evaluate`` between do not."""
    model = small_model()

    def evaluate() -> None:
        model.test_on_batch(INPUTS[:BATCH], TARGETS[:BATCH])
        model.predict_on_batch(INPUTS[:BATCH])
        model.evaluate(INPUTS, TARGETS, batch_size=BATCH, verbose=0)

    train = lambda _: model.train_on_batch(INPUTS[:BATCH], TARGETS[:BATCH])  # noqa: E731 - said once
    assert_iterations(30, lambda: evaluated_between(train, evaluate))


def check_steps_of_keras_without_graphs_are_iterations() -> None:
    """With ``run_eagerly`` a batch of ``fit`` is one iteration, whatever its optimizer does."""
    model = small_model()
    model.compile("adam", "mse", run_eagerly=True)
    assert_iterations(3, lambda: model.fit(INPUTS, TARGETS, batch_size=BATCH, verbose=0))


def check_rollouts_are_no_iterations() -> None:
    """A loop of reinforcement learning has an iteration for each update, however many passes lie between."""
    net = Net()
    act, train = tf.function(net.loss), tf.function(net.train)

    def learn() -> None:
        for _ in range(4):
            for _ in range(40):
                act(batch(8 * BATCH))
            for _ in range(5):
                train(batch())

    assert_iterations(20, learn)


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

    assert_iterations(4, loop)
    assert marks_of(lambda: small_model().fit(INPUTS, TARGETS, batch_size=BATCH, verbose=0)) == 0


if __name__ == "__main__":
    run(dict(globals()))
    alive_at_exit = tf.random.uniform([MIB])
