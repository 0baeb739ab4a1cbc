"""What does a job on a GPU hold over its live tensors, from its first iteration on, by the size of regions?

A model's trace is replayed from its first allocation on, and then its last iteration again and
again, through the heap that jobs on a GPU have, on a device of software whose streams are done at
once. With the second iteration a tensor comes to stay, as a library's workspace does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import common
import zoo
from marks import STREAM, heaps_in_pool

from zico.base.units import GIB, MIB, format_bytes
from zico.heap import allocator
from zico.heap.cuda import on_stream
from zico.heap.plan_thread import Planning
from zico.lab.simulator.held import REPEATED, again, parts_of
from zico.trace.events import Kind

if TYPE_CHECKING:
    from zico.heap.build import Heap

QUESTION = "What does a job on a GPU hold over its live tensors, from its first iteration on, by the size of regions?"
REGIONS = (64 * MIB, 16 * MIB, 4 * MIB)
BUDGET_BYTES = 72 * GIB
WORKSPACE_BYTES = 32 * MIB
"""By so much a DCGAN had more alive on an H200 (benchmarks/results/gpu/gpu_pairs.json) than its trace has."""
MODELS = ("DCGAN", "U-Net", "MobileNetV2", "ResNet-110")
_WORKSPACE = ("workspace", 0)


class Replay:
    """A heap, and what an iteration of it has held so far."""

    def __init__(self, heap: Heap) -> None:
        """Begin with nothing allocated."""
        self._heap, self._record = heap, heap.record[0]
        self._job = heap.pool.jobs[int(heap.pool.member[0]["job"])]
        self._planning = Planning(heap)
        self._addresses: dict[Any, int] = {}
        self._held = self._live_bytes = 0
        self._sums = [0, 0]
        self.iterations: list[dict[str, Any]] = []

    def do(self, kind: int, tensor: Any, size_bytes: int) -> None:  # noqa: ANN401 - any name
        """Allocate or free a tensor."""
        if kind == Kind.ALLOC:
            self._addresses[tensor] = int(on_stream.allocate_on(self._record, size_bytes, STREAM))
            if self._addresses[tensor] <= 0:
                raise SystemExit(f"held.py: the pool of {format_bytes(BUDGET_BYTES)} is too small for this model")
        elif tensor in self._addresses:
            on_stream.free_on(self._record, self._addresses.pop(tensor), STREAM)
        held, live_bytes = int(self._job["held"]), int(self._job["live_bytes"])
        self._held, self._live_bytes = max(self._held, held), max(self._live_bytes, live_bytes)
        self._sums[0] += held * self._heap.pool.region_bytes
        self._sums[1] += live_bytes

    def end_iteration(self) -> None:
        """Take a boundary, let the job have the plan that it has asked for, and note what it held."""
        allocator.mark(self._record)
        if self._record["planning"]["asked"] and not self._record["planning"]["next_address"]:
            self._planning.plan_handed()
        mean = self._sums[0] / max(self._sums[1], 1)
        figures = {"held": self._held, "live_bytes": self._live_bytes, "mean": mean}
        self.iterations.append(figures | {"plans": int(self._record["planning"]["followed"])})
        self._held, self._live_bytes, self._sums = 0, 0, [0, 0]

    def close(self) -> None:
        """Ask for no more plans."""
        self._planning.close()


def measure(model: zoo.Model, region_bytes: int) -> list[dict[str, Any]]:
    """Return what each iteration held."""
    parts = parts_of(zoo.zoo_trace(model))
    with heaps_in_pool(BUDGET_BYTES // region_bytes, None, beside=False, region_bytes=region_bytes) as (heap,):
        replay = Replay(heap)
        for number, part in enumerate([*parts, *(again(parts[-1], turn) for turn in range(REPEATED))]):
            if number == 1:
                replay.do(Kind.ALLOC, _WORKSPACE, WORKSPACE_BYTES)
            for event in part:
                replay.do(*event)
            replay.end_iteration()
        replay.close()
        return replay.iterations


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    for name, by_region in result["models"].items():
        for region, iterations in by_region.items():
            region_bytes = int(region)
            live_bytes = max(one["live_bytes"] for one in iterations)
            peak, last = max(one["held"] for one in iterations), iterations[-1]
            rows.append(
                (
                    *(name, format_bytes(region_bytes), f"{live_bytes / MIB:.0f}", str(-(-live_bytes // region_bytes))),
                    *(f"{peak} ({peak * region_bytes / live_bytes:.3f})", " ".join(str(o["held"]) for o in iterations)),
                    *(f"{last['held']} ({last['held'] * region_bytes / live_bytes:.3f})", f"{last['mean']:.3f}"),
                )
            )
    header = ("model", "regions", "live MiB", "least", "peak", "each iteration", "last iteration", "mean of the last")
    return "\n".join([common.table(header, rows), _TEXT])


_TEXT = """
*Replayed, not run on a GPU.* Regions held, in brackets over the most bytes alive; the mean is over events. The first
iteration is a program's beginning and its first step. Traces have no workspaces of cuDNN's.
"""


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", choices=zoo.ZOO, action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    names = options.model or (MODELS[:1] if options.smoke else MODELS)
    settings = {"budget_bytes": BUDGET_BYTES, "workspace_bytes": WORKSPACE_BYTES, "repeated": REPEATED}
    result = common.document("held", QUESTION, settings)
    result["models"] = {}
    for name in names:
        common.note(name)
        regions = REGIONS[: 1 if options.smoke else None]
        result["models"][name] = {str(one): measure(zoo.ZOO[name], one) for one in regions}
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
