"""Would selective checkpoints let segments save memory for less time than whole modules that run again?

Each block of the ResNet example and of the GPT runs under a mode that times every operation in this
thread. A way keeps the results of some operations, which then do not run again. What it saves is
what autograd saves inside the block, less what is kept. The time is that of the other operations.
Digests, attributes and generators cost every way the same, and are left out.

``masks`` cannot be had by PyTorch's contexts: on the host dropout draws and scales its mask in
place, and a result that changes after it was kept raises in the backward pass.
"""

from __future__ import annotations

import collections
import importlib
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import common
import gpt_job
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.append(str(common.ROOT / "examples"))
digits_resnet = importlib.import_module("digits_resnet")

QUESTION = "Would selective checkpoints let segments save memory for less time than whole modules that run again?"
PRODUCTS = ("convolution", "mm", "addmm", "bmm", "baddbmm")
MASKS = ("bernoulli_", "div_")
"""Dropout's: drawn, and scaled in place."""
WAYS = {
    "whole": (),
    "products": PRODUCTS,
    "products but bmm": tuple(name for name in PRODUCTS if name != "bmm"),
    "masks": MASKS,
}


def blocks() -> Iterator[tuple[str, nn.Module, tuple[torch.Tensor, ...]]]:
    """Yield blocks as the jobs of ``save_planners.py`` have them, with what they are given."""
    mask = torch.ones(256, 256, dtype=torch.bool).triu(1)
    yield "GPT block", gpt_job.Block(128, 4, 0.1), (torch.randn(16, 256, 128, requires_grad=True), mask)
    for channels, size in ((8, 16), (16, 8), (32, 4)):
        block = digits_resnet.BasicBlock(channels, channels, 1)
        yield f"ResNet block, {channels} channels", block, (torch.randn(384, channels, size, size, requires_grad=True),)


class Timed(TorchDispatchMode):  # type: ignore[misc] # torch has no types
    """Times operations, in processor time of this thread, by their order."""

    def __init__(self) -> None:
        """Begin without any."""
        super().__init__()
        self.took_ns: dict[tuple[int, str], list[int]] = collections.defaultdict(list)
        self.made_bytes: dict[tuple[int, str], int] = {}
        self._number = 0

    def begin(self) -> None:
        """Count operations from the first one again."""
        self._number = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        """Run an operation."""
        key = self._number, func.overloadpacket.__name__
        self._number += 1
        began_ns = time.thread_time_ns()
        result = func(*args, **(kwargs or {}))
        self.took_ns[key].append(time.thread_time_ns() - began_ns)
        first = result[0] if isinstance(result, tuple | list) else result
        self.made_bytes[key] = first.nbytes if isinstance(first, torch.Tensor) else 0
        return result


def saved_bytes(block: nn.Module, given: tuple[torch.Tensor, ...]) -> int:
    """Return what autograd saves inside a block, but for what it is given, its parameters and its result."""
    kept: list[torch.Tensor] = []

    def keep(each: torch.Tensor) -> torch.Tensor:
        kept.append(each)
        return each

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        result = block(*given)
    outside = {each.untyped_storage().data_ptr() for each in (*given, *block.parameters(), result)}
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    return sum(size for address, size in found.items() if address not in outside)


def measure(repeats: int) -> list[dict[str, Any]]:
    """Return a row for each block and way, and each block's operations."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for name, block, given in blocks():
        timed = Timed()
        for _ in range(repeats):
            timed.begin()
            with timed:
                block(*given)
        took_ns = {key: statistics.median(each) for key, each in timed.took_ns.items()}
        whole_bytes = saved_bytes(block, given)
        operations = [
            {"operation": key[1], "ns": took, "bytes": timed.made_bytes[key]} for key, took in took_ns.items()
        ]
        for way, names in WAYS.items():
            drawn = way == "masks"
            kept = sum(size for (_, one), size in timed.made_bytes.items() if one in (MASKS[:1] if drawn else names))
            again_ns = sum(took for (_, one), took in took_ns.items() if one not in names)
            rows.append(
                {"block": name, "way": way, "saved_bytes": whole_bytes - kept, "kept_bytes": kept, "again_ns": again_ns}
            )
        rows[-1]["operations"] = operations
    return rows


def text_of(result: dict[str, Any]) -> str:
    """Return the result as a table."""
    header = ["block", "kept", "MB saved", "MB kept", "ms again", "ns for a byte saved"]
    rows = [
        [
            row["block"],
            "nothing (whole)" if row["way"] == "whole" else row["way"],
            f"{row['saved_bytes'] / 1e6:.1f}",
            f"{row['kept_bytes'] / 1e6:.1f}",
            f"{row['again_ns'] / 1e6:.1f}",
            f"{row['again_ns'] / row['saved_bytes']:.2f}",
        ]
        for row in result["rows"]
    ]
    return common.table(header, rows)


def main() -> None:
    """Measure and write."""
    options = common.parser(__doc__).parse_args()
    repeats = 2 if options.smoke else 20
    result = common.document("selective", QUESTION, {"repeats": repeats})
    result["rows"] = measure(repeats)
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
