"""How many marks does a job put on its GPU's stream, and what share of an iteration would that take?

An iteration of each model of the zoo is replayed through the heap that jobs on a GPU have, on a
device of software whose streams are done at once: alone in its pool, alone in a pool that hardly
holds its peak, and with a second job beside it, at several spacings. The heap counts its marks.

Further two jobs of a model take turns, call by call, half an iteration apart, in pools of several
shares of the sum of their peaks. An allocation that finds no memory counts as a wait: for a mark, if
the other job's thread that marks for who waits is enough to end it, else for memory.
What they cost is predicted: marks times ``--mark-ns``, over the least time that the iteration can
take by a device's data sheet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING, Any

import common
import numpy as np
import zoo
from numba import types

from zico.base.compiled import array_at, callback
from zico.base.units import GIB, MIB
from zico.heap import allocator
from zico.heap.build import Heap
from zico.heap.cuda import on_stream
from zico.heap.cuda.timeline import ALONE_BYTES, BESIDE_BYTES, Timeline
from zico.heap.layout import HEAP
from zico.heap.plan_thread import Planning
from zico.lab.simulator.roofline import device_model
from zico.planning.packing.from_trace import iteration_problem
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from zico.lab.simulator.roofline import DeviceModel
    from zico.planning.packing.problem import Problem

QUESTION = "How many marks does a job put on its GPU's stream, and what share of an iteration would that take?"
REGION_BYTES = 64 * MIB
BUDGET_BYTES = 72 * GIB
TIGHT = 1.05
"""The tight pool's regions over the most that the job holds in the roomy one."""
SPACINGS = {"default": None, "0": 0, "64 MiB": 64 * MIB, "256 MiB": 256 * MIB, "1 GiB": GIB, "8 GiB": 8 * GIB}
COMPANIES = ("alone", "alone, tight", "beside another")
MOST_ITERATIONS = 12
"""Until the job follows a plan of its own; some never do."""
SHARES = (200, 100, 85, 70)
"""Percent of the sum of the peaks of two jobs that train, in regions."""
TOGETHER = ("0", "default")
"""Spacings at which two jobs train."""
COUNTED = 3
"""Iterations of two jobs that are counted, after as many as a job may need to follow a plan."""
MARK_NS = 3000.0
GOAL = 0.01
STREAM = 1
_I64 = types.int64
_I8 = np.dtype("i8")


# -- the replay ------------------------------------------------------------------------------------


@callback(_I64(_I64, _I64, _I64, _I64))
def mark_at_once(_context: int, _stream: int, counter: int, value: int) -> int:
    """Be a stream that is done with everything: the mark comes at once."""
    array_at(counter, 1, _I8)[0] = value
    return 0


@callback(_I64(_I64, _I64, _I64, _I64))
def go_on(_context: int, _stream: int, _counter: int, _value: int) -> int:
    """Wait for what has come."""
    return 0


@callback(_I64(_I64))
def be_done(_context: int) -> int:
    """Wait for everything, all of which has come."""
    return 0


@callback(_I64(_I64, _I64, _I64))
def leave_pages(_address: int, _size_bytes: int, _advice: int) -> int:
    """Make no page resident: nobody touches what is allocated, and a model's memory may exceed the machine's."""
    return 0


def replay(heap: Any, calls: Any, addresses: Any) -> int:  # noqa: ANN401 - a record and arrays
    """Make calls (number of the tensor, bytes; 0 bytes frees it); returns how many allocations were refused."""
    refused = 0
    for tensor, size_bytes in calls.tolist():
        if size_bytes > 0:
            addresses[tensor] = on_stream.allocate_on(heap, size_bytes, STREAM)
            if addresses[tensor] <= 0:
                refused += 1
        elif addresses[tensor] > 0:
            on_stream.free_on(heap, int(addresses[tensor]), STREAM)
    return refused


def calls_of(problem: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return what a job allocates once, and the calls of each iteration."""
    n_ticks = int(problem.upper.max())
    persists = (problem.lower == 0) & (problem.upper == n_ticks)
    kept, own = np.flatnonzero(persists), np.flatnonzero(~persists)
    births = np.stack([problem.lower[own], np.ones(len(own), np.int64), own, problem.size_bytes[own]], axis=1)
    deaths = np.stack([problem.upper[own], np.zeros(len(own), np.int64), own, np.zeros(len(own), np.int64)], axis=1)
    rows = np.concatenate([births, deaths])
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]  # at one tick frees come first
    return np.stack([kept, problem.size_bytes[kept]], axis=1), np.ascontiguousarray(rows[:, 2:])


@contextlib.contextmanager
def heaps_in_pool(
    n_regions: int,
    spacing_bytes: int | None,
    n_heaps: int = 1,
    *,
    beside: bool,
    region_bytes: int = REGION_BYTES,
) -> Iterator[list[Heap]]:
    """Make a pool and heaps of jobs in it; ``beside``: with one job more, that does nothing."""
    with contextlib.ExitStack() as stack:
        made = PoolTable.create(
            budget_bytes=n_regions * region_bytes,
            region_bytes=region_bytes,
            use_claims=False,  # nobody is there who would admit a job at its boundary
            self_admit=True,
            on_timeline=True,
        )
        pool = stack.enter_context(made)
        heaps = [stack.enter_context(_heap_in(pool, spacing_bytes)) for _ in range(n_heaps)]
        if beside:
            pool.join(os.getpid(), "another")
        yield heaps


@contextlib.contextmanager
def _heap_in(pool: PoolTable, spacing_bytes: int | None) -> Iterator[Heap]:
    """Make the heap of one more job in a pool."""
    job = pool.join(os.getpid(), "benchmark")
    memory_fd, table_fd, notify_fd = map(os.dup, (pool.memory_fd, pool.table_fd, pool.notify_fd))
    with PoolTable.join_pool(memory_fd, table_fd, notify_fd, job) as member:
        names = ("spacing_bytes", "alone_bytes", "beside_bytes")
        spacing = {} if spacing_bytes is None else dict.fromkeys(names, spacing_bytes)
        counters = int(member.member[0]["counters_address"])
        timeline = Timeline(mark_at_once.address, go_on.address, be_done.address, counters, **spacing)
        heap = Heap(member, np.zeros(1, HEAP), timeline=timeline, wait_limit_s=0.0)
        heap.device[0]["madvise"] = leave_pages.address
        with contextlib.closing(heap):
            yield heap


def counted(problem: Problem, n_regions: int, spacing_bytes: int | None, *, beside: bool) -> dict[str, Any]:
    """Return what one iteration does once the job follows a plan of its own."""
    kept, calls = calls_of(problem)
    addresses = np.zeros(len(problem), np.int64)
    with heaps_in_pool(n_regions, spacing_bytes, beside=beside) as (heap,):
        record = heap.record[0]
        job = heap.pool.jobs[int(heap.pool.member[0]["job"])]
        planning = Planning(heap)
        refused = replay(record, kept, addresses)
        allocator.mark(record)
        for _ in range(MOST_ITERATIONS):
            refused += replay(record, calls, addresses)
            allocator.mark(record)
            if record["planning"]["asked"] and not record["planning"]["next_address"]:
                planning.plan_handed()
            if record["planning"]["followed"]:
                break
        refused += replay(record, calls, addresses)  # the first that follows it
        allocator.mark(record)
        marks, maps = int(record["streams"]["marks"]), int(job["maps"])
        refused += replay(record, calls, addresses)
        allocator.mark(record)
        figures = {
            "marks": int(record["streams"]["marks"]) - marks,
            "maps": int(job["maps"]) - maps,
            "plans": int(record["planning"]["followed"]),
            "refused": int(refused),
            "peak_regions": int(job["peak_held"]),
        }
        planning.close()
        return figures


# -- two jobs that train ---------------------------------------------------------------------------


class Trainer:
    """A job that makes one call at a time, iteration after iteration."""

    def __init__(self, heap: Heap, problem: Problem) -> None:
        """Allocate what it keeps."""
        self._heap = heap
        self._kept, self._calls = calls_of(problem)
        self._addresses = np.zeros(len(problem), np.int64)
        self._planning = Planning(heap)
        self._at = 0
        self.waits_for = ""
        """What its next call finds missing: nothing, a ``mark`` or ``memory``."""
        self.waits = {"mark": 0, "memory": 0}
        self.iterations = 0
        if replay(heap.record[0], self._kept, self._addresses):
            raise MemoryError("the pool has no room for what both jobs keep")
        allocator.mark(heap.record[0])

    @property
    def marks(self) -> int:
        """Return how many marks it has put on its stream."""
        return int(self._heap.record[0]["streams"]["marks"])

    @property
    def length(self) -> int:
        """Return the calls of an iteration."""
        return len(self._calls)

    def go_on(self, other: Trainer) -> bool:
        """Make the next call; false if it has to wait, for the ``other`` job."""
        refused = self._call()
        if refused and not self.waits_for:
            header = self._heap.pool.header
            header["waiters"] += 1
            on_stream.mark_for_others(other._heap.record[0])
            refused = self._call()
            self.waits_for = "memory" if refused else "mark"
            self.waits[self.waits_for] += 1
        if refused:
            return False
        if self.waits_for:
            self.stop_waiting()
        self._at += 1
        if self._at == self.length:
            self._end_iteration()
        return True

    def stop_waiting(self) -> None:
        """Wait no longer."""
        self._heap.pool.header["waiters"] -= int(bool(self.waits_for))
        self.waits_for = ""

    def _call(self) -> int:
        return replay(self._heap.record[0], self._calls[self._at : self._at + 1], self._addresses)

    def _end_iteration(self) -> None:
        record = self._heap.record[0]
        allocator.mark(record)
        if record["planning"]["asked"] and not record["planning"]["next_address"]:
            self._planning.plan_handed()
        self._at = 0
        self.iterations += 1

    def give_up(self) -> None:
        """Free what the iteration has allocated, and begin it anew: neither job could go on."""
        self.stop_waiting()
        made = self._calls[: self._at]
        is_birth = made[:, 1] > 0
        for tensor in np.setdiff1d(made[is_birth, 0], made[~is_birth, 0]).tolist():
            on_stream.free_on(self._heap.record[0], int(self._addresses[tensor]), STREAM)
        self._at = 0

    def close(self) -> None:
        """Ask for no more plans."""
        self._planning.close()


def together(problem: Problem, n_regions: int, spacing_bytes: int | None) -> dict[str, Any]:
    """Return what two jobs do in an iteration each, on average; they have taken turns for a while before."""
    with heaps_in_pool(n_regions, spacing_bytes, 2, beside=False) as heaps, contextlib.ExitStack() as stack:
        first, second = jobs = [stack.enter_context(contextlib.closing(Trainer(heap, problem))) for heap in heaps]
        for _ in range(first.length // 2):
            first.go_on(second)
        stuck = marks = iterations = 0
        while first.iterations < MOST_ITERATIONS + COUNTED:
            if first.iterations < MOST_ITERATIONS:
                marks, iterations = first.marks + second.marks, first.iterations + second.iterations
                for job in jobs:
                    job.waits = dict.fromkeys(job.waits, 0)
                stuck = 0
            moved = first.go_on(second)
            moved = second.go_on(first) or moved
            if not moved:
                stuck += 1
                second.give_up()
        iterations = first.iterations + second.iterations - iterations
        for job in jobs:
            job.stop_waiting()
        figures = {"marks": (first.marks + second.marks - marks) / iterations}
        for what in ("mark", "memory"):
            figures[f"waits for {what}"] = sum(job.waits[what] for job in jobs) / iterations
        return figures | {"stuck": stuck / iterations}


# -- the time --------------------------------------------------------------------------------------


def devices() -> dict[str, DeviceModel]:
    """Return the devices whose iterations are compared, by what is said of them.

    In bfloat16 every operation has the peak of half precision and moves half of the bytes: less
    time than any real iteration, whose sums and optimizer stay in single precision.
    """
    h100 = device_model("h100-sxm")
    half = dataclasses.replace(h100, fp32=h100.fp16, tf32=h100.fp16, bandwidth=2 * h100.bandwidth)
    return {"V100, float32": device_model("v100-32gb"), "H100, float32": h100, "H100, bfloat16": half}


def least_s(model: zoo.Model, device: DeviceModel) -> float:
    """Return the least seconds of an iteration by a device's data sheet."""
    trace = zoo.fake_trace(model.build(), device)
    return float(iteration_problem(trace).iteration.tick_ns[-1]) / 1e9


def measure(model: zoo.Model, *, smoke: bool) -> dict[str, Any]:
    """Return the marks and times of one model."""
    problem = iteration_problem(zoo.zoo_trace(model)).problem
    roomy = BUDGET_BYTES // REGION_BYTES
    peak = counted(problem, roomy, None, beside=False)["peak_regions"]
    pools = dict(zip(COMPANIES, (roomy, int(peak * TIGHT) + 1, roomy), strict=True))
    spacings = dict(list(SPACINGS.items())[: 2 if smoke else None])
    ways = {
        company: {
            spacing: counted(problem, n_regions, n_bytes, beside=company == COMPANIES[2])
            for spacing, n_bytes in spacings.items()
        }
        for company, n_regions in pools.items()
    }
    two = {
        str(share): {
            spacing: together(problem, max(2 * peak * share // 100, peak + 1), SPACINGS[spacing])
            for spacing in TOGETHER
        }
        for share in SHARES[: 1 if smoke else None]
    }
    chosen = list(devices().items())[-1 if smoke else 0 :]
    return {"ways": ways, "together": two, "least_s": {name: least_s(model, device) for name, device in chosen}}


# -- what is shown ---------------------------------------------------------------------------------


def share(row: dict[str, Any], company: str, spacing: str, device: str, mark_ns: float) -> float:
    """Return which share of an iteration the marks take."""
    found: float = row["ways"][company][spacing]["marks"] * mark_ns / 1e9 / row["least_s"][device]
    return found


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    models, mark_ns = result["models"], result["settings"]["mark_ns"]
    spacings = list(next(iter(models.values()))["ways"][COMPANIES[0]])
    parts = []
    for company in COMPANIES:
        rows = [
            (name, *(str(row["ways"][company][spacing]["marks"]) for spacing in spacings))
            for name, row in models.items()
        ]
        parts += [f"Marks an iteration, {company}:\n", common.table((f"{company}, spacing", *spacings), rows)]
    parts += [_together_text(models), _TOGETHER_TEXT]
    names = list(next(iter(models.values()))["least_s"])
    header = ("model, default spacing", *(f"{company}: {name}" for company in COMPANIES for name in names), "alone")
    rows = []
    for name, row in models.items():
        shares = [share(row, company, "default", device, mark_ns) for company in COMPANIES for device in names]
        is_met = max(shares[: len(names)]) <= GOAL
        rows.append((name, *(f"{one:.2%}" for one in shares), "met" if is_met else "missed"))
    parts += [
        f"Predicted share of an iteration at {mark_ns:.0f} ns a mark; the goal alone is at most {GOAL:.0%}:\n",
        common.table(header, rows),
        _TEXT.format(mark_ns=mark_ns, alone=ALONE_BYTES // MIB, beside=BESIDE_BYTES // MIB, tight=TIGHT),
    ]
    return "\n".join(parts)


def _together_text(models: dict[str, Any]) -> str:
    """Return what two jobs that train do, in every pool at both spacings."""
    whats = ("marks", "waits for mark", "waits for memory", "stuck")
    rows = [
        (name, f"{share} %", *(" to ".join(f"{found[spacing][what]:.3g}" for spacing in TOGETHER) for what in whats))
        for name, row in models.items()
        for share, found in row["together"].items()
    ]
    header = ("two jobs", "pool", *whats)
    return (
        f"Two jobs that train, each figure an iteration, with spacing 0 to the default:\n\n{common.table(header, rows)}"
    )


_TOGETHER_TEXT = """
Both jobs train the model, half an iteration apart, one call after the other, in pools of a share of the sum of their
peaks. *Waits for mark*: allocations that found free memory without marks alone. The other job's thread then marks it.
*Stuck*: neither job could go on, and one began its iteration anew; no policy admits iterations here.
"""
_TEXT = """
*Predicted, not measured on a GPU.* A mark asks for the current context and whether the stream captures, and launches a
kernel. {mark_ns:.0f} ns of a processor for that is an estimate: launches are commonly said to take 2 to 3 us.
`gpu/progress.py` measures it. The times are lower bounds by data sheets, so real shares are smaller. In bfloat16 every
operation has the peak of half precision and half of its bytes, while marks are counted for tensors of single precision.
A program whose processor runs ahead of its GPU hides the marks altogether.

The default spacing is {alone} MiB alone and {beside} MiB beside another job, at most each job's share of half of what
is free. While a job waits every release is marked.
The tight pool has {tight} times the regions that the job holds at its peak. Regions have 64 MiB, so a spacing of 64 MiB
is as 0. All tensors are on one stream.
"""


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", choices=zoo.ZOO, action="append", help="only this one; may be repeated")
    parser.add_argument("--mark-ns", type=float, default=MARK_NS, help="nanoseconds of a mark (gpu/progress.py)")
    options = parser.parse_args()
    names = options.model or (["DCGAN"] if options.smoke else list(zoo.ZOO))
    settings = {"region_bytes": REGION_BYTES, "budget_bytes": BUDGET_BYTES, "tight": TIGHT, "mark_ns": options.mark_ns}
    result = common.document("marks", QUESTION, settings)
    result["models"] = {}
    for name in names:
        common.note(name)
        result["models"][name] = measure(zoo.ZOO[name], smoke=options.smoke)
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
