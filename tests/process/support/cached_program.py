"""A program with one compiled function: calls it, and says where its machine code is kept.

An argument is what the function multiplies by.
"""

from __future__ import annotations

import sys

from zico.base.compiled import entry
from zico.base.programs import program_of

FACTOR = int(sys.argv[1]) if len(sys.argv) > 1 else 2


@entry(int)
def scaled(number: int) -> int:
    """Multiply a number."""
    return FACTOR * number


if __name__ == "__main__":
    print(scaled(21))  # noqa: T201 - the test reads it
    print(program_of("__main__").file)  # noqa: T201
