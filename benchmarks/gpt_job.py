"""Train a small GPT on the bytes of Python's standard library, with PyTorch and plain attention.

Attention is two matrix products and a softmax, as scripts wrote it before fused kernels, so an
iteration keeps many tensors of sequence times sequence. The same seed gives the same losses.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS = 256


class Block(nn.Module):  # type: ignore[misc] # torch has no types
    """Causal self-attention and a feed-forward layer, each behind a layer norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        """Make the layers of one block."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop1, self.drop2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def attention(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return what each position reads from those before it."""
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        weights = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(key.size(-1)))
        weights = functional.softmax(weights.masked_fill(mask, float("-inf")), dim=-1)
        read = self.drop1(weights) @ value
        return self.proj(read.transpose(1, 2).contiguous().view(batch, length, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return what the block makes of each position."""
        x = x + self.attention(self.norm1(x), mask)
        return x + self.drop2(self.down(functional.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):  # type: ignore[misc] # torch has no types
    """Embeddings, blocks, and a classifier over bytes."""

    def __init__(self, length: int, width: int, heads: int, layers: int, dropout: float) -> None:
        """Make the whole model."""
        super().__init__()
        self.embed, self.place = nn.Embedding(TOKENS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS)
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return how likely each next byte is."""
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


def text() -> Tensor:
    """Return some of the standard library's source as bytes."""
    files = sorted(Path(json.__file__).parent.parent.glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(options.length, options.width, 4, options.layers, options.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data, generator, losses = text(), torch.Generator().manual_seed(0), []
    for i in range(options.iterations):
        at = torch.randint(len(data) - options.length - 1, (options.batch,), generator=generator)
        rows = torch.stack([data[begin : begin + options.length + 1] for begin in at.tolist()])
        logits = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.reshape(-1, TOKENS), rows[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not options.quiet:
            print(f"iteration {i + 1}, loss {losses[-1]:.4f}", flush=True)
    if options.losses is not None:
        options.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
