"""Is the hot path of this checkout as fast as an older commit's?

Processes of the older commit, of this checkout and of plain PyTorch take turns, so that what else
the machine does falls on all alike. Each allocates and frees 1 MiB by PyTorch's own functions for
the CPU. It uses only public functions of ``zico``, so every commit runs the same job.
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
ITERATIONS, LEARNING = 300, 20
"""Those timed, and those before, in which the heap learns which tensors live briefly."""
START_S = 1800.0
"""For a process: the first one of a commit compiles."""


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


def turn(tree: Path, *, pooled: bool) -> list[float]:
    """Return a process's figure for each path; it imports ``zico`` from this tree."""
    path = f"{tree}/build/inplace:{common.ROOT}/benchmarks"
    environ = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": path, "ZICO_PLAN": "off"}
    run = (*common.ZICO, "run", "--quiet", "--budget", "1GiB", "--") if pooled else ()
    with tempfile.NamedTemporaryFile("r", suffix=".json") as results:
        argv = (*run, sys.executable, __file__, "--job", results.name)
        subprocess.run(argv, env=environ, check=True, timeout=START_S, stderr=subprocess.DEVNULL)
        figures: dict[str, Any] = json.load(results)
    if not Path(figures["zico"]).is_relative_to(tree / "build") or figures["pooled"] is not pooled:
        raise RuntimeError(f"the job used {figures['zico']}, in a pool: {figures['pooled']}")
    return [figures[path] for path in PATHS]


def measure(old: Path, turns: int) -> dict[str, list[list[float]]]:
    """Return the figures of all processes, by kind."""
    kinds = {"C library": (common.ROOT, False), "old": (old, True), "new": (common.ROOT, True)}
    for tree in (old, common.ROOT):
        turn(tree, pooled=True)  # compiles
    raw: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for index in range(turns):
        common.note(f"turn {index + 1} of {turns}")
        for kind in kinds if index % 2 == 0 else reversed(kinds):
            raw[kind].append(turn(kinds[kind][0], pooled=kinds[kind][1]))
    return raw


@contextlib.contextmanager
def older(commit: str) -> Iterator[Path]:
    """Check a commit out while the block runs, so that it and this checkout can be imported from ``build/inplace``."""
    git, old = ("git", "-C", str(common.ROOT), "worktree"), common.ROOT / "build" / "compare"
    subprocess.run((*git, "add", "--quiet", "--detach", str(old), commit), check=True)
    try:
        for tree in (old, common.ROOT):
            subprocess.run(("make", "--silent", "-C", str(tree), "inplace"), check=True)
        yield old
    finally:
        subprocess.run((*git, "remove", "--force", str(old)), check=True)


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("old", nargs="?", default="HEAD", help="the commit to compare with (default: HEAD)")
    parser.add_argument("--turns", type=int, default=15, help="processes of each kind")
    parser.add_argument("--job", type=Path, help="run as the job that is timed, and write its figures here")
    options = parser.parse_args()
    if options.job:
        job(options.job)
        return
    turns = 1 if options.smoke else options.turns
    result = common.document("compare_commits", QUESTION, {"old": options.old, "turns": turns, "pairs": PAIRS})
    with older(options.old) as old:
        raw = result["ns"] = measure(old, turns)
    rows = []
    for n, path in enumerate(PATHS):
        ratio = common.spread(new[n] / before[n] for new, before in zip(raw["new"], raw["old"], strict=True))
        medians = [f"{statistics.median(one[n] for one in ones):.1f}" for ones in raw.values()]
        rows.append((path, *medians, f"{ratio['median']:.3f}", f"{ratio['min']:.2f}-{ratio['max']:.2f}"))
    header = ("1 MiB, ns per pair", *raw, "new / old", "min-max")
    common.write(result, common.table(header, rows), common.output_directory(options))


if __name__ == "__main__":
    main()
