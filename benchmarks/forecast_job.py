"""Train one of the small models (``models/small.py``) for some steps, as a job of its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "models"))

import small


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--optimizer", choices=small.OPTIMIZERS, required=True)
    parser.add_argument("--checkpoint", action="store_true", help="compute blocks again for the backward pass")
    parser.add_argument("--compile", action="store_true", help="by torch.compile")
    parser.add_argument("--iterations", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    how = {"checkpointing": options.checkpoint, "compiles": options.compile}
    step = small.build(options.model, options.batch, options.optimizer, **how)
    for _ in range(options.iterations):
        step()


if __name__ == "__main__":
    main()
