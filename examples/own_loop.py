"""Train a small network on handwritten digits with PyTorch, but without an optimizer of ``torch.optim``.

The loop says itself where its iterations end. Without Zico it trains all the same:
``zico.iteration()`` then does nothing.

    python own_loop.py --iterations 20
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn import functional

import zico


def train(iterations: int, width: int) -> None:
    """Trains two layers by plain gradient descent on copies of all images."""
    images, labels = (torch.tensor(data) for data in load_digits(return_X_y=True))
    images, labels = images.float().repeat(8, 1) / 16, labels.repeat(8)
    weights = [torch.randn(64, width) / 8, torch.randn(width, 10) / width**0.5]
    for weight in weights:
        weight.requires_grad_()
    for number in range(1, iterations + 1):
        with zico.iteration():
            loss = functional.cross_entropy(functional.relu(images @ weights[0]) @ weights[1], labels)
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.data -= 0.1 * gradient
        print(f"iteration {number}  loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=20, help="number of training steps")
    parser.add_argument("--width", type=int, default=2048, help="features of the hidden layer")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train(arguments.iterations, arguments.width)


if __name__ == "__main__":
    main()
