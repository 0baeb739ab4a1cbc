"""What jobs of any framework do to fill a pool in turns: each writes values that are its own, and reads them back."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from zico import step
from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
TURNS = 40
PIECE_BYTES = 4 * MIB
READY, GOING = "ready", "going"


def take(put: Callable[[Any], Any], get: Callable[[Any], Any]) -> dict[str, Any]:
    """Fill five eighths of the budget, read it back and give it up, again and again; begins when stdin has a line.

    Args:
        put: Makes a tensor on the device of an array.
        get: Returns a tensor's values as an array.
    """
    pieces = _status()["budget_bytes"] * 5 // 8 // PIECE_BYTES
    values = np.random.default_rng(os.getpid()).integers(1 << 62, size=PIECE_BYTES // 8)
    say(READY)
    sys.stdin.readline()
    say(GOING)
    begun_s = time.monotonic()
    is_equal = []
    for number in range(TURNS):
        written = [values + number * pieces + piece for piece in range(pieces)]
        tensors = [put(each) for each in written]
        is_equal += [bool((get(tensors.pop(0)) == each).all()) for each in written]
        step()
    status = _status()
    return {
        "is_equal": all(is_equal),
        "read": len(is_equal),
        "iterations": status["iterations"],
        "peak_bytes": status["peak_bytes"],
        "waited_s": status["waited_s"],
        "span_s": [begun_s, time.monotonic()],
    }


def say(word: str) -> None:
    """Print a word at once."""
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def _status() -> dict[str, Any]:
    found = session.status()
    assert found is not None
    return found
