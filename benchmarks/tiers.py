"""How fast do payloads leave for each tier and come back, against a copy in memory?

Every turn copies the same payloads by ``memcpy`` and to each tier and back, one after the other, so
that a ratio is between neighbours in time. Payloads are what a layer behind a ReLU gives, and add
up to more than processors' caches.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import common
import numpy as np

from zico.base.units import MIB, format_bytes
from zico.tiers.destinations import TierWish
from zico.tiers.stack import TierStack

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

QUESTION = "How fast do payloads leave for each tier and come back, against a copy in memory?"
SIZES = (MIB, 2 * MIB, 32 * MIB)
"""The smallest that a swap plan moves, what a pager moves, a large feature map."""
TURN_BYTES = 128 * MIB
KINDS = ("memory, first time", "memory", "file", "file, page cache", "compressed")
COMPRESSED_SHARE = 8
"""By how much less a compressed tier gets in a turn: it takes as much longer."""


class Payloads:
    """Memory that leaves, and memory that it comes back to."""

    def __init__(self, size_bytes: int, total_bytes: int) -> None:
        """Fill both, so that every page is there."""
        self.size_bytes = size_bytes
        self.n = max(total_bytes // size_bytes, 1)
        tile = np.maximum(np.random.default_rng(0).standard_normal(MIB // 4, np.float32), 0)
        self.source = np.resize(tile, self.n * size_bytes // 4)
        self.target = np.ones_like(self.source)

    def addresses(self, array: np.ndarray[Any, Any]) -> range:
        """Return where each payload is in one of the two."""
        return range(array.ctypes.data, array.ctypes.data + array.nbytes, self.size_bytes)

    def speed(self, seconds: float, n: int) -> float:
        """Return bytes a second."""
        return n * self.size_bytes / seconds


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that something takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def by_memcpy(payloads: Payloads) -> float:
    """Return bytes a second of copies within memory."""
    pairs = list(zip(payloads.addresses(payloads.target), payloads.addresses(payloads.source), strict=True))
    return payloads.speed(timed(lambda: [ctypes.memmove(*pair, payloads.size_bytes) for pair in pairs]), payloads.n)


def by_tier(stack: TierStack, payloads: Payloads, n: int) -> tuple[float, float]:
    """Return bytes a second out and in; what came back must be what left."""
    tickets: list[int] = []
    sources = payloads.addresses(payloads.source)[:n]
    out_s = timed(lambda: tickets.extend(stack.put(address, payloads.size_bytes) for address in sources))
    payloads.target[:] = 1
    ways = list(zip(tickets, payloads.addresses(payloads.target)[:n], strict=True))
    in_s = timed(lambda: [stack.get(*way, payloads.size_bytes) for way in ways])
    for ticket in tickets:
        stack.drop(ticket)
    moved = n * payloads.size_bytes // payloads.source.itemsize
    if min(tickets) < 0 or not np.array_equal(payloads.source[:moved], payloads.target[:moved]):
        raise SystemExit(f"a payload did not come back as it left: {stack.usage()}")
    return payloads.speed(out_s, n), payloads.speed(in_s, n)


def make(kind: str, block_bytes: int, size_bytes: int) -> TierStack:
    """Return a stack of one tier; a file's page cache is left out unless it is asked for."""
    stack = TierStack.create((TierWish(kind.partition(",")[0], size_bytes),), block_bytes=block_bytes)
    if kind == "file, page cache":
        store = stack.record["tiers"][0][0]
        descriptor = int(store["descriptor"])
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
        store["direct"] = 0
    return stack


def measure(size_bytes: int, total_bytes: int, repeat: int) -> dict[str, Any]:
    """Return bytes a second of all turns, by kind and direction, and what each tier says of itself."""
    payloads = Payloads(size_bytes, total_bytes)
    block_bytes = min(size_bytes, 2 * MIB)
    tiers = {kind: make(kind, block_bytes, 2 * total_bytes) for kind in KINDS}
    direct = bool(tiers["file"].record["tiers"][0][0]["direct"])
    figures: dict[str, Any] = {kind: {"out": [], "in": []} for kind in KINDS}
    figures |= {"memcpy": [], "direct": direct}
    for turn in range(repeat):
        common.note(f"{format_bytes(size_bytes)}: turn {turn + 1} of {repeat}")
        for kind, stack in tiers.items():
            if kind == "memory, first time":
                stack.trim()  # twice: what was in use since the last call stays
                stack.trim()
            figures["memcpy"].append(by_memcpy(payloads))
            n = max(payloads.n // COMPRESSED_SHARE, 1) if kind == "compressed" else payloads.n
            for way, speed in zip(("out", "in"), by_tier(stack, payloads, n), strict=True):
                figures[kind][way].append((speed, speed / figures["memcpy"][-1]))
    for kind, stack in tiers.items():
        use = stack.usage()[0]
        figures[kind]["peak_share"] = use.peak_bytes / (use.out_bytes / repeat)
        figures[kind]["rates"] = [stack.rates()[0].out_bytes_per_s, stack.rates()[0].in_bytes_per_s]
        stack.close()
    return figures


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    parts = []
    for size, figures in result["sizes"].items():
        copied = statistics.median(figures["memcpy"])
        rows = []
        for kind in KINDS:
            ways = [figures[kind][way] for way in ("out", "in")]
            speeds = [f"{statistics.median(speed for speed, _ in way) / 2**30:.2f}" for way in ways]
            ratios = [f"{statistics.median(ratio for _, ratio in way):.2f}" for way in ways]
            rows.append((kind, *speeds, *ratios, f"{figures[kind]['peak_share']:.2f}"))
        header = (
            f"{size}, memcpy {copied / 2**30:.2f}",
            "out, GiB/s",
            "in, GiB/s",
            "out / memcpy",
            "in / memcpy",
            "space",
        )
        parts.append(common.table(header, rows))
    if not all(figures["direct"] for figures in result["sizes"].values()):
        parts.append("The file system has no `O_DIRECT`: both kinds of file go through the page cache.\n")
    parts.append("*space*: blocks in use over the payload in them.\n")
    return "\n".join(parts)


def options_of() -> argparse.Namespace:
    """Return what the command line says."""
    parser = common.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=15, help="turns, per size")
    options = parser.parse_args()
    options.sizes, options.turn_bytes = SIZES, TURN_BYTES
    if options.smoke:
        options.repeat, options.sizes, options.turn_bytes = 2, (MIB,), 8 * MIB
    return options


def main() -> None:
    """Measure, print, write."""
    options = options_of()
    settings = {"repeat": options.repeat, "sizes": list(options.sizes), "turn_bytes": options.turn_bytes}
    result = common.document("tiers", QUESTION, settings)
    result["sizes"] = {format_bytes(size): measure(size, options.turn_bytes, options.repeat) for size in options.sizes}
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
