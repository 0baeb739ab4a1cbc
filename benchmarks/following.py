"""What does an allocation cost by plan, and what does recording it add?

An iteration like one of training (feature maps that are freed in reverse, temporaries beside them)
is replayed through the hooks that frameworks call, each call timed by itself; ``loops.py`` says how
the clock is kept out. First by learned classes, then by plan, then by plan while every event is
recorded and another thread reads. Then both examples run under ``zico trace``, every second
iteration recorded, and PyTorch's with ``--ops``, which records the operations of some.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import loops
import numpy as np
import together
from loops import BUDGET_BYTES, REGION_BYTES, joined_pool
from together import Job

from zico.base.units import KIB, MIB
from zico.heap import allocator, hooks
from zico.heap.layout import HEAP_RECORD
from zico.heap.plan_thread import Planning
from zico.trace.events import NO_NAME
from zico.trace.profile import RING_EVENTS
from zico.trace.ringfile import RingFile, RingReader

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

QUESTION = "What does an allocation cost by plan, and what does recording it add?"
Spreads = dict[str, dict[str, float]]

GOAL_PLANNED_NS = 60
GOAL_EVENT_NS = 30
GOAL_OPS = 0.05
NEIGHBOURS = 8
"""Iterations before a turn with operations, and behind it, that it is compared with."""
LAYERS = 250
EXAMPLES = (Job("resnet", "examples/digits_resnet.py"), Job("lm", "examples/stdlib_lm.py"))


def training_calls(layers: int, seed: int = 1) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return calls as rows (number of the tensor, bytes); 0 bytes frees it. About four tensors a layer."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(64 * KIB, MIB * 3 // 4, layers)
    calls: list[tuple[int, int]] = []
    temporary = layers
    for layer, size in enumerate(sizes):
        calls += [(layer, size), (temporary, 2 * size), (temporary, 0)]
        temporary += 1
    for layer in reversed(range(layers)):
        calls += [(temporary, int(sizes[layer])), (temporary + 1, 3 * int(sizes[layer]))]
        calls += [(temporary + 1, 0), (layer, 0), (temporary, 0)]
        temporary += 2
    return np.array(calls, np.int64)


def replayed(calls: np.ndarray[Any, np.dtype[np.int64]], iterations: int) -> dict[str, float]:
    """Return quantiles of nanoseconds per allocation and per free over some iterations."""
    functions = (int(hooks.posix_memalign.address), int(hooks.free.address))
    out, addresses = np.zeros(1, np.int64), np.zeros(int(calls[:, 0].max()) + 1, np.int64)
    times = np.zeros((iterations, len(calls)), np.int64)
    for row in times:
        loops.replay(*functions, out.ctypes.data, calls, addresses, row)
        allocator.mark(HEAP_RECORD[0])
    net = times - loops.clock_ns()
    is_allocation = calls[:, 1] > 0
    return {
        f"{kind}_{name}": float(np.percentile(net[:, mask], q))
        for kind, mask in (("allocation", is_allocation), ("free", ~is_allocation))
        for name, q in (("median_ns", 50), ("p99_ns", 99))
    }


def repeated(calls: np.ndarray[Any, np.dtype[np.int64]], options: Namespace, between: Callable[[], Any]) -> Spreads:
    """Return the spread over repeats of each quantile of ``replayed``; ``between`` runs before each repeat."""
    rows = []
    for _ in range(options.repeat):
        between()
        rows.append(replayed(calls, options.iterations))
    return {name: common.spread(row[name] for row in rows) for name in rows[0]}


def measure_calls(options: Namespace) -> dict[str, Any]:
    """Return what calls cost by classes, by plan, and by plan with recording."""
    calls = training_calls(LAYERS)
    figures: dict[str, Any] = {"tensors": int(np.count_nonzero(calls[:, 1]))}
    with joined_pool() as heap, tempfile.TemporaryDirectory() as directory:
        replayed(calls, 4)  # classes are learned
        figures["classes"] = repeated(calls, options, lambda: None)
        planning = Planning(heap)
        while HEAP_RECORD[0]["planning"]["followed"] == 0:
            replayed(calls, 1)
            if HEAP_RECORD[0]["planning"]["asked"] and not HEAP_RECORD[0]["planning"]["next_address"]:
                planning.plan_handed()
        replayed(calls, 2)
        figures["plan"] = repeated(calls, options, lambda: None)
        with RingReader(Path(directory) / "ring") as reader:
            writer = RingFile(reader.path, "benchmark", 0)
            figures["event_ns"] = common.spread(event_ns(writer, reader) for _ in range(options.repeat))
            HEAP_RECORD[0]["recording"]["op"], HEAP_RECORD[0]["ring_address"] = NO_NAME, writer.address
            figures["plan, recorded"] = repeated(calls, options, lambda: emptied(reader))
            HEAP_RECORD[0]["ring_address"] = 0
            figures["dropped"] = int(reader.header[0]["dropped"])
    return figures


def emptied(reader: RingReader) -> None:
    """Read until the ring is empty: a reader takes nothing before it knows the writer's clock."""
    deadline_s = time.monotonic() + 5
    while reader.header[0]["tail"] != reader.header[0]["head"]:
        reader.read()
        if time.monotonic() > deadline_s:
            message = "the ring was not emptied within 5 s"
            raise TimeoutError(message)


def event_ns(writer: RingFile, reader: RingReader) -> float:
    """Return the median over batches of nanoseconds per recorded event, into a ring that has been emptied before."""
    emptied(reader)
    batch = 256
    times = np.zeros(RING_EVENTS // batch // 2, np.int64)
    loops.events(writer.address, batch, times)
    return float(np.median(times - loops.clock_ns())) / batch


# -- the examples ----------------------------------------------------------------------------------


def measure_examples(options: Namespace) -> dict[str, Any]:
    """Return, per example, what each pair of neighbouring iterations took, one of them recorded."""
    figures: dict[str, Any] = {}
    for job in EXAMPLES:
        common.note(f"{job.name}: {options.seconds:.0f} s, every second iteration recorded")
        rows = _recorded_alternately(job, options.seconds)[options.warm_up // 2 * 2 :]
        figures[job.name] = {
            clock: _paired([(row[0], row[1 + index]) for row in rows]) for index, clock in enumerate(("wall", "cpu"))
        }
    return figures


def measure_ops(options: Namespace) -> dict[str, Any]:
    """Return how much longer PyTorch's example takes with ``--ops``: an iteration with operations, and all of them."""
    job = EXAMPLES[0]
    common.note(f"{job.name}: {options.seconds:.0f} s, with --ops")
    rows = _recorded_alternately(job, options.seconds, "--ops")
    is_on, took_s = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    begins = np.flatnonzero(is_on & ~np.append([True], is_on[:-1]))
    slower = []
    for begin in begins.tolist():
        near = slice(max(0, begin - NEIGHBOURS), begin + NEIGHBOURS + 2)
        turn = is_on[begin : begin + NEIGHBOURS].argmin() or len(is_on) - begin
        plain_s = np.median(took_s[near][~is_on[near]])
        slower += (took_s[begin : begin + turn] / plain_s - 1).tolist()
    ratio = float(np.median(slower))
    return {
        "iterations_s": took_s.tolist(),
        "with_operations": is_on.tolist(),
        "slower": slower,
        "slower_with_operations": ratio,
        "slower_in_all": ratio * float(np.mean(is_on)),
    }


def _recorded_alternately(job: Job, seconds: float, *flags: str) -> list[tuple[bool, float, float]]:
    """Run an example by ``alternating.py`` under ``zico trace``; returns its rows."""
    with tempfile.TemporaryDirectory() as directory:
        times = Path(directory) / "times.json"
        script = str(common.ROOT / job.script)
        arguments = (*job.arguments, "--iterations", "1000000", "--seconds", str(seconds))
        command = (sys.executable, str(Path(__file__).with_name("alternating.py")), str(times), script, *arguments)
        trace = ("trace", "--quiet", *flags, "-o", str(Path(directory) / "trace.zst"), "--", *command)
        deadline_s = seconds + together.MARGIN_S
        subprocess.run((*common.ZICO, *trace), check=True, stdout=subprocess.DEVNULL, timeout=deadline_s)
        rows: list[tuple[bool, float, float]] = json.loads(times.read_text())
        return rows


def _paired(rows: list[tuple[bool, float]]) -> dict[str, Any]:
    """Return both medians and the median of the pairs' ratios, with its 95 % interval (bootstrap, 2,000 draws)."""
    recorded = np.array([took for was, took in rows if was])
    plain = np.array([took for was, took in rows if not was])
    n = min(len(recorded), len(plain))
    slower = recorded[:n] / plain[:n] - 1
    draws = np.random.default_rng(1).choice(slower, (2000, n))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return {
        "recorded_s": recorded.tolist(),
        "not_recorded_s": plain.tolist(),
        "slower": {"median": float(np.median(slower)), "low": float(low), "high": float(high), "n": n},
    }


# -- what is shown ---------------------------------------------------------------------------------

_COLUMNS = ("allocation_median_ns", "allocation_p99_ns", "free_median_ns", "free_p99_ns")


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    calls = result["calls"]
    rows = [
        (name, *(f"{calls[name][column]['median']:.0f}" for column in _COLUMNS))
        for name in ("classes", "plan", "plan, recorded")
    ]
    header = (f"{calls['tensors']} tensors, ns", "allocation: median", "p99", "free: median", "p99")
    planned, event = calls["plan"]["allocation_median_ns"], calls["event_ns"]
    parts = [
        common.table(header, rows),
        f"* planned allocation: {_goal(planned, GOAL_PLANNED_NS)}",
        f"* an event: {_goal(event, GOAL_EVENT_NS)}",
        f"* {calls['dropped']} of the replay's events found the ring full\n",
    ]
    compared = []
    for name, clocks in result["examples"].items():
        for clock, figures in clocks.items():
            slower = figures["slower"]
            medians = [f"{statistics.median(figures[kind]) * 1e3:.1f}" for kind in ("not_recorded_s", "recorded_s")]
            interval = f"{slower['low']:+.2%} to {slower['high']:+.2%}"
            compared.append((name, f"{clock} ms", *medians, f"{slower['median']:+.2%}", interval, str(slower["n"])))
    titles = ("example", "per iteration", "not recorded", "recorded", "slower by (goal 1 %)", "95 %", "pairs")
    parts.append(common.table(titles, compared))
    return "\n".join(parts)


def ops_text(ops: dict[str, Any]) -> str:
    """Return what recording operations costs, as Markdown."""
    said = "reached" if ops["slower_in_all"] <= GOAL_OPS else "missed"
    return (
        f"* `--ops`: {sum(ops['with_operations'])} of {len(ops['with_operations'])} iterations have their operations "
        f"recorded and take {ops['slower_with_operations']:.1%} longer; all together {ops['slower_in_all']:.1%}, "
        f"goal {GOAL_OPS:.0%}: {said}\n"
    )


def _goal(figure: dict[str, float], goal_ns: float) -> str:
    said = "reached" if figure["median"] <= goal_ns else "missed"
    return f"{figure['median']:.1f} ns ({figure['min']:.1f} to {figure['max']:.1f}), goal {goal_ns}: {said}"


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--iterations", type=int, default=25, help="replays, per repeat: their events fit the ring")
    parser.add_argument("--repeat", type=int, default=20, help="repeats, per figure")
    parser.add_argument("--seconds", type=float, default=150.0, help="how long an example trains; 0: not at all")
    parser.add_argument("--warm-up", type=int, default=together.WARM_UP, help="iterations left out")
    parser.add_argument("--ops", action="store_true", help="only what --ops costs; the results are following-ops")
    options = parser.parse_args()
    if options.smoke:
        options.repeat, options.seconds = 3, 0.0
    settings = common.chosen(options, "iterations", "repeat", "seconds", "warm_up")
    settings |= {"budget_bytes": BUDGET_BYTES, "region_bytes": REGION_BYTES, "layers": LAYERS}
    directory = common.output_directory(options)
    if not options.ops:
        result = common.document("following", QUESTION, settings)
        result["calls"] = measure_calls(options)
        result["examples"] = measure_examples(options) if options.seconds else {}
        common.write(result, text_of(result), directory)
    if options.seconds:
        result = common.document("following-ops", QUESTION, settings)
        result["ops"] = measure_ops(options)
        common.write(result, ops_text(result["ops"]), directory)


if __name__ == "__main__":
    main()
