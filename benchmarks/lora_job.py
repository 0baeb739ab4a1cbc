"""Fine-tune a frozen GPT by low-rank adapters (LoRA, Hu et al., arXiv:2106.09685), with PyTorch.

The base is the same for every seed, as if it were loaded from one file. Adapters, data and their
order follow the seed. The same seed gives the same losses.
"""

import argparse
import json
from pathlib import Path

import gpt_job
import torch
from torch import Tensor, nn
from torch.nn import functional

RANK = 8


class Adapted(nn.Module):  # type: ignore[misc] # torch has no types
    """A frozen linear layer and a product of two thin ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        """Begin as the base alone: the second factor is zero."""
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        return self.base(x) + self.up(self.down(x))


def base_of(options: argparse.Namespace) -> gpt_job.GPT:
    """Return the frozen model, the same for all."""
    torch.manual_seed(0)
    model = gpt_job.GPT(options.length, options.width, 8, options.layers, 0.0)
    return model.requires_grad_(requires_grad=False)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = base_of(options)
    torch.manual_seed(options.seed)
    for block in model.blocks:
        block.qkv, block.proj = Adapted(block.qkv), Adapted(block.proj)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4)
    data, losses = gpt_job.text(), []
    for i in range(options.iterations):
        at = torch.randint(len(data) - options.length - 1, (options.batch,))
        rows = torch.stack([data[begin : begin + options.length + 1] for begin in at.tolist()])
        logits = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.reshape(-1, gpt_job.TOKENS), rows[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        print(f"iteration {i + 1} loss {loss.item():.4f}", flush=True)
    if options.losses is not None:
        options.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
