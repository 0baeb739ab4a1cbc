"""Train a small byte-level transformer on the source of Python's standard library, with Keras on TensorFlow.

The text is that of the ``.py`` files at the top of the running Python's standard library (some 4.5
MB, in sorted order); nothing is downloaded. With the defaults (batch 20, context 256, 4 layers of
width 128) one iteration holds about 370 MiB of feature maps at its peak, against 10 MiB of weights
and Adam moments, and takes about 0.5 seconds on one CPU core, after some eight seconds of start-up.
Memory rises layer by layer through the forward pass and falls through the backward pass.

    python stdlib_lm.py --iterations 20 --losses losses.json

The same seed gives the same losses to the last bit, given the same Python and number of threads.
"""

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's notes on its own build

import keras  # the settings above must come first
import numpy as np
import tensorflow as tf
from keras import layers

BYTES = 256


class AddPositions(layers.Layer):
    """Adds a trained vector for each position of the context."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.positions = self.add_weight(shape=input_shape[1:], initializer="random_normal", name="positions")

    def call(self, features: tf.Tensor) -> tf.Tensor:
        return features + self.positions


class Progress(keras.callbacks.Callback):
    """The losses so far, a line for each iteration, and the time limit.

    Args:
        seconds: Time limit, counted from the end of the first iteration; None for no limit.
        quiet: Whether to print nothing.
    """

    def __init__(self, seconds: float | None, *, quiet: bool) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.seconds = seconds
        self.quiet = quiet
        self.first_ended = 0.0
        self.last_ended = time.monotonic()

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Makes Keras report the loss of this batch, not the mean since the start."""
        self.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Notes the loss of the iteration that has just ended, and stops training when time is up."""
        now = time.monotonic()
        self.losses.append(float(logs["loss"]))
        if not self.quiet:
            rate = 1 / (now - self.last_ended)
            print(f"iteration {len(self.losses)}  loss {self.losses[-1]:.4f}  {rate:.1f} it/s", flush=True)
        if len(self.losses) == 1:
            self.first_ended = now
        self.last_ended = now
        if self.seconds is not None and now - self.first_ended >= self.seconds:
            self.model.stop_training = True

    def save(self, path: Path) -> None:
        """Writes the losses in hexadecimal, which keeps every bit."""
        path.write_text(json.dumps([loss.hex() for loss in self.losses]))


def parse_arguments() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=100, help="number of training steps")
    parser.add_argument("--seconds", type=float, help="stop this long after the first iteration")
    parser.add_argument("--batch", type=int, default=20, help="texts per iteration")
    parser.add_argument("--context", type=int, default=256, help="bytes per text")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers")
    parser.add_argument("--width", type=int, default=128, help="features per byte")
    parser.add_argument("--heads", type=int, default=4, help="attention heads, a divisor of --width")
    parser.add_argument("--threads", type=int, default=1, help="threads of TensorFlow (intra- and inter-op)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and shuffling")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write every loss here, as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    arguments = parser.parse_args()
    if arguments.iterations < 1:
        parser.error("--iterations must be at least 1")
    if arguments.width % arguments.heads:
        parser.error("--heads must divide --width")
    return arguments


def read_texts(context: int) -> np.ndarray:
    """Returns the standard library cut into rows of one byte more than the context."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
    rows = len(text) // (context + 1)
    return text[: rows * (context + 1)].reshape(rows, context + 1)


def make_dataset(arguments: argparse.Namespace) -> tf.data.Dataset:
    """Builds an endless stream of batches: texts, and the same texts one byte further on."""
    texts = read_texts(arguments.context)
    dataset = tf.data.Dataset.from_tensor_slices((texts[:, :-1], texts[:, 1:]))
    dataset = dataset.shuffle(len(texts), seed=arguments.seed).repeat()
    options = tf.data.Options()
    options.autotune.enabled = False  # its thread sleeps for up to a minute, and the end of training waits for it
    return dataset.batch(arguments.batch, drop_remainder=True).prefetch(1).with_options(options)


def transformer_layer(features: keras.KerasTensor, width: int, heads: int) -> keras.KerasTensor:
    """Applies causal self-attention and a two-layer perceptron, each on a residual branch."""
    attention = layers.MultiHeadAttention(heads, width // heads, use_bias=False)
    normal = layers.LayerNormalization()(features)
    features = features + attention(normal, normal, use_causal_mask=True)
    hidden = layers.Dense(4 * width, activation="gelu", use_bias=False)(layers.LayerNormalization()(features))
    return features + layers.Dense(width, use_bias=False)(hidden)


def build_model(arguments: argparse.Namespace) -> keras.Model:
    """Builds and compiles the language model."""
    text = keras.Input((arguments.context,), dtype="uint8")
    features = AddPositions()(layers.Embedding(BYTES, arguments.width)(text))
    for _ in range(arguments.layers):
        features = transformer_layer(features, arguments.width, arguments.heads)
    scores = layers.Dense(BYTES)(layers.LayerNormalization()(features))
    model = keras.Model(text, scores)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Compiling with XLA would take longer than a short training.
    model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    return model


def prepare_tensorflow(threads: int, seed: int) -> None:
    """Sets the threads and makes every run with the same seed the same to the last bit."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    keras.utils.set_random_seed(seed)
    tf.config.experimental.enable_op_determinism()


def train(arguments: argparse.Namespace, progress: Progress) -> None:
    """Trains the model until the iterations or the time are used up."""
    build_model(arguments).fit(
        make_dataset(arguments),
        steps_per_epoch=arguments.iterations,
        callbacks=[progress],
        shuffle=False,  # the data set shuffles
        verbose=0,
    )


def main() -> None:
    """Runs the training and saves the losses, also when it is interrupted."""
    arguments = parse_arguments()
    prepare_tensorflow(arguments.threads, arguments.seed)
    progress = Progress(arguments.seconds, quiet=arguments.quiet)
    try:
        train(arguments, progress)
    finally:
        if arguments.losses is not None:
            progress.save(arguments.losses)


if __name__ == "__main__":
    main()
