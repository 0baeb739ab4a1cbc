"""Train a job that leaves its device idle between stretches of work; ``KIND`` says why it does.

    input       a ResNet waits for each batch, as for far storage that no loader hides
    light       a small net of a sweep does the same with smaller batches
    recurrent   an LSTM goes through its text step by step, which one thread bounds
    notebook    a cell trains a ResNet for some iterations, then its author thinks
    evaluating  a ResNet is evaluated now and then, and its state is written to far storage
    rl          a policy waits for its simulator at each step of a rollout, then learns from it

Waits are sleeps, so their length has no noise. The same seed and threads give the same losses. What
it calls an iteration is a cell of ``notebook``, an epoch of ``evaluating``, a rollout of ``rl``.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
example: Any = importlib.import_module("digits_resnet")

STEPS_OF_A_CELL = 4
STEPS_OF_AN_EPOCH = 8
EVALUATED = 599
"""Images of a batch of the evaluation; a third of all."""
TOKENS, LENGTH, HIDDEN = 256, 64, 384
OBSERVED, ACTIONS, WORLDS, ROLLOUT, UPDATES = 64, 8, 256, 20, 4


class Images:
    """The digits, a batch at a time, each ``wait_s`` after it is asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Enlarge all images at once: a batch takes its wait and no more."""
        self._wait_s = options.wait
        digits = example.Digits()
        samples = [digits[index] for index in range(len(digits))]
        self.images = torch.stack([image for image, _ in samples])
        self.labels = torch.stack([label for _, label in samples])
        self._batches = iter(example.ShuffledBatches(len(digits), itertools.repeat(options.batch), options.seed))

    def next(self) -> tuple[Tensor, Tensor]:
        """Wait for the next batch and return it."""
        time.sleep(self._wait_s)
        at = next(self._batches)
        return self.images[at], self.labels[at]


def resnet(options: argparse.Namespace) -> tuple[Images, nn.Module, torch.optim.Optimizer]:
    """Return what a training of digits needs."""
    model = example.ResNet(options.depth, options.width)
    return Images(options), model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def input_bound(options: argparse.Namespace) -> Iterator[float]:
    """Yield the loss of each iteration, whose batch is waited for."""
    data, model, optimizer = resnet(options)
    while True:
        yield example.train_step(model, optimizer, *data.next())


def notebook(options: argparse.Namespace) -> Iterator[float]:
    """Yield the last loss of each cell, behind which ``--pause`` seconds pass."""
    data, model, optimizer = resnet(options)
    while True:
        losses = [example.train_step(model, optimizer, *data.next()) for _ in range(STEPS_OF_A_CELL)]
        yield losses[-1]
        time.sleep(options.pause)


def evaluating(options: argparse.Namespace) -> Iterator[float]:
    """Yield the last loss of each epoch, which ends with an evaluation and ``--pause`` seconds."""
    data, model, optimizer = resnet(options)
    while True:
        losses = [example.train_step(model, optimizer, *data.next()) for _ in range(STEPS_OF_AN_EPOCH)]
        model.eval()
        with torch.no_grad():
            for images, labels in zip(data.images.split(EVALUATED), data.labels.split(EVALUATED), strict=True):
                losses.append(functional.cross_entropy(model(images), labels).item())
        model.train()
        time.sleep(options.pause)
        yield losses[-1]


def recurrent(options: argparse.Namespace) -> Iterator[float]:
    """Yield the loss of each iteration over the source of this script's standard library."""
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))[:60]
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()
    embedding, cell, head = nn.Embedding(TOKENS, HIDDEN), nn.LSTMCell(HIDDEN, HIDDEN), nn.Linear(HIDDEN, TOKENS)
    optimizer = torch.optim.Adam([*embedding.parameters(), *cell.parameters(), *head.parameters()], lr=1e-3)
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        at = torch.randint(len(text) - LENGTH - 1, (options.batch, 1), generator=generator)
        rows = text[at + torch.arange(LENGTH + 1)]
        state, loss = None, torch.zeros(())
        optimizer.zero_grad()
        for step in range(LENGTH):
            state = cell(embedding(rows[:, step]), state)
            loss = loss + functional.cross_entropy(head(state[0]), rows[:, step + 1])
        loss.backward()
        optimizer.step()
        yield loss.item() / LENGTH


class Worlds:
    """Points that are to be moved to the origin; stepping all of them takes ``wait_s``."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Begin at random places."""
        self._wait_s = options.wait
        self._generator = torch.Generator().manual_seed(options.seed)
        self._moves = torch.randn(ACTIONS, OBSERVED, generator=self._generator)
        self.seen = torch.randn(WORLDS, OBSERVED, generator=self._generator)

    def step(self, actions: Tensor) -> Tensor:
        """Move each point by its action and return the rewards."""
        time.sleep(self._wait_s)
        before = self.seen.norm(dim=1)
        self.seen = self.seen + 0.1 * self._moves[actions]
        return before - self.seen.norm(dim=1)


def reinforcement(options: argparse.Namespace) -> Iterator[float]:
    """Yield the last loss of each rollout and the updates that follow it."""
    worlds = Worlds(options)
    wide = 2 * HIDDEN
    policy = nn.Sequential(
        nn.Linear(OBSERVED, wide), nn.Tanh(), nn.Linear(wide, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, ACTIONS)
    )
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    while True:
        seen, chosen, rewards = [], [], []
        with torch.no_grad():
            for _ in range(ROLLOUT):
                seen.append(worlds.seen)
                chosen.append(torch.distributions.Categorical(logits=policy(worlds.seen)).sample())
                rewards.append(worlds.step(chosen[-1]))
        returned = torch.stack(rewards).flip(0).cumsum(0).flip(0).flatten()
        gain = (returned - returned.mean()) / returned.std()
        for _ in range(UPDATES):
            optimizer.zero_grad()
            scores = functional.cross_entropy(policy(torch.cat(seen)), torch.cat(chosen), reduction="none")
            loss = (scores * gain).mean()
            loss.backward()
            optimizer.step()
        yield loss.item()


KINDS: dict[str, tuple[Callable[[argparse.Namespace], Iterator[float]], dict[str, Any]]] = {
    "input": (input_bound, {"wait": 0.6, "depth": 110, "batch": 384}),
    "light": (input_bound, {"wait": 0.25, "depth": 20, "batch": 128}),
    "recurrent": (recurrent, {"batch": 48}),
    "notebook": (notebook, {"pause": 1.5, "depth": 32, "batch": 384}),
    "evaluating": (evaluating, {"pause": 1.0, "depth": 32, "batch": 384}),
    "rl": (reinforcement, {"wait": 0.05}),
}
"""What each kind does, and its defaults."""


def main() -> None:
    """Train until the iterations or the time are used up, and save the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds for a batch, or a step of the simulator")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between cells or epochs")
    parser.add_argument("--depth", type=int, help="layers of the ResNet, 6n+2")
    parser.add_argument("--width", type=int, default=8, help="channels of its first stage")
    parser.add_argument("--batch", type=int, help="images or texts of an iteration")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--seconds", type=float, help="stop this long after the first iteration")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write every loss here, as JSON")
    found = parser.parse_known_args()[0]
    losses_of, defaults = KINDS[found.kind]
    parser.set_defaults(**defaults)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    progress = example.Progress(options.seconds, quiet=False)
    for number, loss in enumerate(losses_of(options), 1):
        if not progress.record(loss) or number == options.iterations:
            break
    if options.losses is not None:
        progress.save(options.losses)


if __name__ == "__main__":
    main()
