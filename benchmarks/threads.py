"""What does the one lock of a job's allocator cost jobs whose threads allocate?

Two processes of each job take turns, one in a pool and one with the C library's allocator, so that
what else the machine does falls on both alike. The ratio is taken within each turn. What one thread
gives says what else the pool costs or saves.

A bound stands beside it: the pairs of allocation and free that the job does in a second, each taken
as dear as those of as many threads that do nothing but allocate and free 1 MiB. Such a loop is
timed here, too.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import timeit
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import loops
import numpy as np
import threads_job
import torch_calls

from zico.base.libc import libc_address
from zico.base.units import MIB
from zico.heap import allocator, hooks
from zico.heap.layout import HEAP_RECORD

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

QUESTION = "What does the one lock of a job's allocator cost jobs whose threads allocate?"
LIMIT = 0.01
"""Below this share of a job's time the lock is left as it is."""
PAIRS = 20_000
"""Of each thread, for one reading of the clock."""
LOOPS = 20
LOOP_THREADS = (1, 2, 4)
END_S = 60.0
WARM_UP = 6
"""Iterations before the first turn: the heap learns its classes, and follows a plan."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A job, and how much of it."""

    name: str
    kind: str
    threads: int
    """Of operators, loaders or copies; ``loaders`` have the thread that trains beside them."""
    depth: int
    batch: int = 384

    @property
    def allocating(self) -> int:
        """Threads that may allocate at the same time."""
        return self.threads + (self.kind == "loaders")

    def argv(self) -> tuple[str, ...]:
        """Return what the process is told behind its device."""
        return (self.kind, *map(str, (self.threads, self.depth, self.batch)))


def jobs(*, smoke: bool) -> list[Job]:
    """Return the jobs; a smoke run has one of each kind, and they are tiny."""
    if smoke:
        return [Job(kind, kind, 2, 8, 96) for kind in threads_job.KINDS]
    return [
        Job("one thread", "operators", 1, 56),
        Job("operators in two threads", "operators", 2, 56),
        Job("operators in four threads", "operators", 4, 56),
        Job("two threads load", "loaders", 2, 20),
        Job("two threads train", "replicas", 2, 56),
    ]


# -- a bound ---------------------------------------------------------------------------------------


def loop_ns(count: int) -> dict[str, dict[int, float]]:
    """Return the median nanoseconds of a pair, over the pairs of all threads, by allocator and threads."""
    functions = {
        "C library": (libc_address("posix_memalign"), libc_address("free")),
        "pool": (int(hooks.posix_memalign.address), int(hooks.free.address)),
    }
    with loops.joined_pool():
        return {
            name: {threads: _loop_ns(of, threads, count) for threads in LOOP_THREADS} for name, of in functions.items()
        }


def _loop_ns(functions: tuple[int, int], threads: int, count: int) -> float:
    def pairs(_: int) -> None:
        out = np.zeros(1, np.int64)
        loops.heap_pairs(*functions, out.ctypes.data, MIB, PAIRS)

    with ThreadPoolExecutor(threads) as executor:

        def together() -> None:
            list(executor.map(pairs, range(threads), timeout=END_S))

        timer = timeit.Timer(together, setup=lambda: allocator.mark(HEAP_RECORD[0]))
        times_s = timer.repeat(2 + count, number=1)[2:]  # the first ones compile, and learn the class
    return statistics.median(times_s) / (threads * PAIRS) * 1e9


def added_ns(loop: dict[int, float], threads: int) -> float:
    """Return what a pair takes of a processor more than one of a single thread, where so many do nothing else."""
    at = min(known for known in LOOP_THREADS if known >= threads)
    return max(0.0, loop[at] * min(at, os.cpu_count() or 1) - loop[1])


# -- jobs in turns ---------------------------------------------------------------------------------


def trained(connection: Connection, iterations: int) -> tuple[float, int, list[str]]:
    """Return the seconds that so many iterations took, their allocations in the pool, and their losses."""
    connection.send(iterations)
    found: tuple[float, int, list[str]] = torch_calls.answer(connection)
    return found


def turns(job: Job, rounds: int, turn_s: float) -> dict[str, Any]:
    """Return what each turn of a job took in both processes, in seconds; a turn has as many iterations in each."""
    script = Path(threads_job.__file__)
    with (
        torch_calls.worker(script, *job.argv(), pooled=False) as plain,
        torch_calls.worker(script, *job.argv(), pooled=True, budget="none") as pooled,
    ):
        ends = [("plain", plain), ("zico", pooled)]
        warm = {name: trained(connection, WARM_UP) for name, connection in ends}
        iterations = max(1, round(turn_s / (trained(plain, WARM_UP)[0] / WARM_UP)))
        trained(pooled, WARM_UP)
        seconds: dict[str, list[float]] = {name: [] for name, _ in ends}
        allocations, equal = 0, warm["plain"][2] == warm["zico"][2]
        for index in range(rounds):
            losses = {}
            for name, connection in ends if index % 2 == 0 else reversed(ends):
                took_s, served, losses[name] = trained(connection, iterations)
                seconds[name].append(took_s)
                allocations += served
            equal = equal and losses["plain"] == losses["zico"]
    return {
        **dataclasses.asdict(job),
        "iterations": iterations,
        "seconds": seconds,
        "allocations": allocations,
        "losses_equal": equal,
    }


def summary(job: Job, raw: dict[str, Any], loop: dict[int, float]) -> dict[str, Any]:
    """Return the time in the pool over that with the C library, and the most that the lock may take of it."""
    seconds = raw["seconds"]
    pairs_per_s = raw["allocations"] / sum(seconds["zico"])
    return {
        "ratio": common.spread(ours / theirs for ours, theirs in zip(seconds["zico"], seconds["plain"], strict=True)),
        "pairs_per_s": pairs_per_s,
        "held": pairs_per_s * loop[1] / 1e9,
        "bound": pairs_per_s * added_ns(loop, job.allocating) / 1e9,
    }


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown, and whether the lock is worth a change."""
    loop = common.table(
        ("1 MiB, ns of a pair over all threads' pairs", *(f"threads: {threads}" for threads in LOOP_THREADS)),
        [(name, *(f"{loop[threads]:.0f}" for threads in LOOP_THREADS)) for name, loop in result["loop_ns"].items()],
    )
    rows, most = [], 0.0
    for name, job in result["jobs"].items():
        found, ratio = job["summary"], job["summary"]["ratio"]
        most = max(most, found["bound"])
        rows.append(
            (
                name,
                f"{found['pairs_per_s']:,.0f}",
                f"{found['held']:.3%}",
                f"{found['bound']:.3%}",
                f"{ratio['median']:.3f} ({ratio['min']:.2f}-{ratio['max']:.2f})",
                "same" if job["losses_equal"] else "DIFFER",
            )
        )
    header = ("job", "pairs a second", "lock held at most", "bound", "time over C library's", "losses")
    verdict = "not worth a change" if most <= LIMIT else "worth per-thread caches"
    return "\n".join((loop, common.table(header, rows), f"At most {most:.2%} of a job's time: {verdict}.\n"))


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="turns of the two processes of each job")
    options = parser.parse_args()
    rounds, turn_s, count = (2, 0.1, 1) if options.smoke else (options.rounds, 1.0, LOOPS)
    result = common.document("threads", QUESTION, {"rounds": rounds, "turn_s": turn_s, "pairs": PAIRS, "loops": count})
    result["loop_ns"] = loop_ns(count)
    result["jobs"] = {}
    for job in jobs(smoke=options.smoke):
        raw = turns(job, rounds, turn_s)
        raw["summary"] = summary(job, raw, result["loop_ns"]["pool"])
        common.note(f"{job.name}: {raw['summary']['ratio']['median']:.3f}")
        result["jobs"][job.name] = raw
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
