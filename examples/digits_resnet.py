"""Train a CIFAR-style ResNet-110 on scikit-learn's bundled handwritten digits, with PyTorch.

The data are the 1797 grey 8x8 images of ``sklearn.datasets.load_digits``, enlarged to 16x16;
nothing is downloaded. With the defaults (depth 110, width 8, batch 384) one iteration holds about
390 MiB of feature maps at its peak, against 5 MiB of weights, gradients and momentum, and takes
about 0.8 seconds on one CPU core. Memory rises layer by layer through the forward pass and falls
through the backward pass.

    python digits_resnet.py --iterations 20 --losses losses.json

The same seed and number of threads give the same losses to the last bit, whatever the number of
loader workers.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Sampler

IMAGE_SIZE = 16
CLASSES = 10


class Digits(Dataset):
    """The bundled digits, normalised, each enlarged to ``IMAGE_SIZE`` when it is asked for."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)
        self.images = (self.images - self.images.mean()) / self.images.std()
        self.labels = torch.tensor(labels, dtype=torch.long)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = functional.interpolate(self.images[index : index + 1], size=IMAGE_SIZE, mode="bilinear")
        return image[0], self.labels[index]


class ShuffledBatches(Sampler):
    """Index batches of given sizes, drawn from one shuffled pass over the data after another.

    A batch may run across the end of a pass, so that no iteration has a smaller batch than asked
    for.

    Args:
        length: Number of samples in the data set.
        sizes: The size of each batch, in order.
        seed: Seed of the shuffling.
    """

    def __init__(self, length: int, sizes: list[int], seed: int) -> None:
        self.length = length
        self.sizes = sizes
        self.seed = seed

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator of its own: the order must not depend on what else draws random numbers.
        generator = torch.Generator().manual_seed(self.seed)
        waiting: list[int] = []
        for size in self.sizes:
            while len(waiting) < size:
                waiting += torch.randperm(self.length, generator=generator).tolist()
            yield waiting[:size]
            del waiting[:size]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation, added to a shortcut without parameters."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.stride = stride
        self.new_channels = channels_out - channels_in

    def shortcut(self, features: Tensor) -> Tensor:
        """Subsamples and zero-pads the input to the shape of the output (option A of the ResNet paper)."""
        if self.stride == 1 and not self.new_channels:
            return features
        features = features[:, :, :: self.stride, :: self.stride]
        return functional.pad(features, (0, 0, 0, 0, 0, self.new_channels))

    def forward(self, features: Tensor) -> Tensor:
        residual = functional.relu(self.norm1(self.conv1(features)), inplace=True)
        residual = self.norm2(self.conv2(residual))
        return functional.relu(residual + self.shortcut(features), inplace=True)


class ResNet(nn.Module):
    """The CIFAR ResNet of 6n+2 layers: three stages of n blocks, of width, 2*width and 4*width channels.

    Args:
        depth: Number of layers, 6n+2.
        width: Channels of the first stage.
    """

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        blocks_per_stage = (depth - 2) // 6
        stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        blocks = []
        channels = width
        for stage in range(3):
            for position in range(blocks_per_stage):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(BasicBlock(channels, width << stage, stride))
                channels = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.stem(images))
        return self.classifier(features.mean(dim=(2, 3)))


class Progress:
    """The losses so far, a line for each iteration, and the time limit.

    Args:
        seconds: Time limit, counted from the end of the first iteration; None for no limit.
        quiet: Whether to print nothing.
    """

    def __init__(self, seconds: float | None, *, quiet: bool) -> None:
        self.losses: list[float] = []
        self.seconds = seconds
        self.quiet = quiet
        self.first_ended = 0.0
        self.last_ended = time.monotonic()

    def record(self, loss: float) -> bool:
        """Notes the loss of the iteration that has just ended; returns whether training is to go on."""
        now = time.monotonic()
        self.losses.append(loss)
        if not self.quiet:
            rate = 1 / (now - self.last_ended)
            print(f"iteration {len(self.losses)}  loss {loss:.4f}  {rate:.1f} it/s", flush=True)
        if len(self.losses) == 1:
            self.first_ended = now
        self.last_ended = now
        return self.seconds is None or now - self.first_ended < self.seconds

    def save(self, path: Path) -> None:
        """Writes the losses in hexadecimal, which keeps every bit."""
        path.write_text(json.dumps([loss.hex() for loss in self.losses]))


def parse_arguments() -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=100, help="number of training steps")
    parser.add_argument("--seconds", type=float, help="stop this long after the first iteration")
    parser.add_argument("--batch", type=int, default=384, help="images per iteration")
    parser.add_argument("--depth", type=int, default=110, help="layers of the network, 6n+2")
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    parser.add_argument("--workers", type=int, default=0, help="forked processes that load the data")
    parser.add_argument("--switch-batch-at", type=int, metavar="ITER", help="when to change the batch")
    parser.add_argument("--switch-batch", type=int, metavar="N", help="batch after ITER iterations")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and shuffling")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write every loss here, as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    arguments = parser.parse_args()
    if arguments.iterations < 1:
        parser.error("--iterations must be at least 1")
    if arguments.depth < 8 or arguments.depth % 6 != 2:
        parser.error("--depth must be 6n+2, for instance 20, 56 or 110")
    if (arguments.switch_batch_at is None) != (arguments.switch_batch is None):
        parser.error("--switch-batch-at and --switch-batch go together")
    return arguments


def batch_sizes(arguments: argparse.Namespace) -> list[int]:
    """Returns the batch size of every iteration."""
    if arguments.switch_batch is None:
        return [arguments.batch] * arguments.iterations
    before = min(arguments.switch_batch_at, arguments.iterations)
    return [arguments.batch] * before + [arguments.switch_batch] * (arguments.iterations - before)


def make_loader(arguments: argparse.Namespace) -> DataLoader:
    """Builds the loader that yields one batch for every iteration."""
    digits = Digits()
    batches = ShuffledBatches(len(digits), batch_sizes(arguments), arguments.seed)
    context = "fork" if arguments.workers else None
    return DataLoader(digits, batch_sampler=batches, num_workers=arguments.workers, multiprocessing_context=context)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    """Takes one optimisation step and returns its loss."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(arguments: argparse.Namespace, progress: Progress) -> None:
    """Trains the network until the iterations or the time are used up."""
    torch.manual_seed(arguments.seed)
    model = ResNet(arguments.depth, arguments.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    for images, labels in make_loader(arguments):
        if not progress.record(train_step(model, optimizer, images, labels)):
            break


def main() -> None:
    """Runs the training and saves the losses, also when it is interrupted."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    progress = Progress(arguments.seconds, quiet=arguments.quiet)
    try:
        train(arguments, progress)
    finally:
        if arguments.losses is not None:
            progress.save(arguments.losses)


if __name__ == "__main__":
    main()
