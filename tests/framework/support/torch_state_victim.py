"""Train until the optimizer's state is away, say so, and wait to be killed."""

# ruff: noqa: T201 - a script that talks to its test

from __future__ import annotations

import sys

from torch_state_checks import Training, away


def main() -> None:
    """Do so."""
    with away(Training()):
        print("away", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
