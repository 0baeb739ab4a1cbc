"""Is the hot path of this checkout as fast as an older commit's?

The older commit is checked out under ``build``. Processes of both and of plain PyTorch take turns, so that what else the
machine does falls on all alike. Each process allocates and frees 1 MiB by the functions of PyTorch's own CPU allocator.
The job uses no module of ``zico`` but its public functions, so every commit runs the same job.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = "Is the hot path of this checkout as fast as an older commit's?"
PATHS = ("region goes back", "region stays")
TENSOR_BYTES = 1 << 20
PAIRS = 1024
ITERATIONS = 300
LEARNING = 20
"""Iterations left out: the heap learns in the first ones which tensors live briefly."""
START_S = 1800.0
"""The first process of a commit compiles."""
TURN_S = 120.0


def job(results: Path) -> None:
    """Time both paths in this process and write the median nanoseconds of a pair."""
    import numba
    import torch

    import zico

    allocator = ctypes.CDLL(str(Path(torch.__path__[0], "lib", "libc10.so")))
    take, give = allocator["_ZN3c109alloc_cpuEm"], allocator["_ZN3c108free_cpuEPv"]
    take.restype, take.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    give.restype, give.argtypes = None, (ctypes.c_void_p,)

    @numba.njit(nogil=True)
    def iteration(n: int, beside: int) -> None:
        """Allocate and free ``n`` times, while ``beside`` tensors keep their region."""
        if beside:
            kept = take(TENSOR_BYTES)
        for _ in range(n):
            give(take(TENSOR_BYTES))
        if beside:
            give(kept)

    figures: dict[str, Any] = {"zico": zico.__file__, "pooled": zico.status() is not None}
    for beside, path in enumerate(PATHS):
        timer = timeit.Timer(lambda beside=beside: iteration(PAIRS, beside), setup=zico.step)  # type: ignore[misc]
        times_s = timer.repeat(LEARNING + ITERATIONS, number=1)[LEARNING:]
        figures[path] = statistics.median(times_s) / PAIRS * 1e9
    results.write_text(json.dumps(figures))


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Check a commit out under ``build``, always at the same path, for which its machine code is cached."""
    git, tree = ("git", "-C", str(common.ROOT), "worktree"), common.ROOT / "build" / "compare"
    subprocess.run((*git, "remove", "--force", str(tree)), check=False, stderr=subprocess.DEVNULL)
    subprocess.run((*git, "add", "--quiet", "--detach", str(tree), commit), check=True)
    try:
        yield tree
    finally:
        subprocess.run((*git, "remove", "--force", str(tree)), check=True)


def turn(tree: Path, *, pooled: bool, deadline_s: float = TURN_S) -> dict[str, float]:
    """Return a process's figures; it imports ``zico`` from this tree."""
    path = f"{tree}/build/inplace:{common.ROOT}/benchmarks"
    environ = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": path, "ZICO_PLAN": "off"}
    run = (*common.ZICO, "run", "--quiet", "--budget", "1GiB", "--") if pooled else ()
    with tempfile.TemporaryDirectory(prefix="zico-compare-") as directory:
        results = Path(directory, "job.json")
        argv = (*run, sys.executable, __file__, "--job", str(results))
        subprocess.run(argv, env=environ, check=True, timeout=deadline_s, stderr=subprocess.DEVNULL)
        figures: dict[str, Any] = json.loads(results.read_text())
    if not Path(figures["zico"]).is_relative_to(tree) or figures["pooled"] is not pooled:
        raise RuntimeError(f"the job used {figures['zico']}, in a pool: {figures['pooled']}")
    return figures


def spreads(raw: dict[str, list[dict[str, float]]], path: str) -> dict[str, dict[str, float]]:
    """Return the spread of each kind's nanoseconds, and of new over old within each turn."""
    found = {kind: common.spread(one[path] for one in ones) for kind, ones in raw.items()}
    pairs = zip(raw["new"], raw["old"], strict=True)
    return found | {"new / old": common.spread(new[path] / old[path] for new, old in pairs)}


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    for path in PATHS:
        *kinds, ratio = result[path].values()
        span = f"{ratio['min']:.2f}-{ratio['max']:.2f}"
        rows.append((path, *(f"{kind['median']:.1f}" for kind in kinds), f"{ratio['median']:.3f}", span))
    return common.table(("1 MiB, ns per pair", "C library", "old", "new", "new / old", "min-max"), rows)


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("old", nargs="?", default="HEAD", help="the commit to compare with (default: HEAD)")
    parser.add_argument("--turns", type=int, default=15, help="processes of each kind")
    parser.add_argument("--job", type=Path, help="run as the job that is timed")
    options = parser.parse_args()
    if options.job:
        job(options.job)
        return
    turns = 1 if options.smoke else options.turns
    result = common.document("compare_commits", QUESTION, {"old": options.old, "turns": turns, "pairs": PAIRS})
    with checked_out(options.old) as old:
        kinds = {"C library": (common.ROOT, False), "old": (old, True), "new": (common.ROOT, True)}
        for tree in (old, common.ROOT):
            subprocess.run(("make", "--silent", "-C", str(tree), "inplace"), check=True)
            turn(tree, pooled=True, deadline_s=START_S)
        raw = result["raw"] = {kind: [] for kind in kinds}
        for index in range(turns):
            common.note(f"turn {index + 1} of {turns}")
            for kind in kinds if index % 2 == 0 else reversed(kinds):
                raw[kind].append(turn(kinds[kind][0], pooled=kinds[kind][1]))
    result |= {path: spreads(raw, path) for path in PATHS}
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
