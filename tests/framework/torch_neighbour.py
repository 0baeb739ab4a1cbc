"""Hold memory and end iterations as each line on stdin says; answers each."""

# ruff: noqa: T201 - a script that talks to its test

from __future__ import annotations

import sys

import torch

import zico

MIB = 1 << 20


def main() -> None:
    """Do so until there are no more lines: ``mark``, ``hold MIB`` or ``free``."""
    held: list[torch.Tensor] = []
    print("ready", flush=True)
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "mark":
            zico.step()
        elif word == "hold":
            held.append(torch.ones(int(numbers[0]) * MIB, dtype=torch.uint8))
        else:
            held.clear()
        print(word, flush=True)


if __name__ == "__main__":
    main()
