"""Do other programs run in a pool on a GPU: CuPy, JAX, Numba, CUDA graphs, isolated jobs, compute-sanitizer?

Each program runs without Zico and under ``zico run``; what it prints of its iterations must be the
same bits. A library or a tool that is not installed is named; that is no pass. ``--smoke`` runs
NumPy and PyTorch on the host, to see that the script works. The result is written after each
program.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

QUESTION = "Do CuPy, JAX, Numba, CUDA graphs, isolated jobs and compute-sanitizer work in a pool on a GPU?"
DEADLINE_S = 120.0
SANITIZER = "compute-sanitizer"
_LOSS = re.compile(r"^(?:\S+ +\| )?(iteration \d+ loss \S+)$", re.MULTILINE)
_KEPT = 400
"""Characters of what a failed program said last."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and how it runs in a pool."""

    name: str
    arguments: tuple[str, ...]
    """Behind the interpreter."""
    needs: str = ""
    """A module."""
    told: tuple[str, ...] = ()
    """Options of ``zico run``."""
    before: tuple[str, ...] = ()
    """What stands before the interpreter in the pool."""
    tool: str = ""
    """A command that must be there."""


def programs(*, smoke: bool) -> list[Program]:
    """Return them in order."""
    kind, iterations = ("cpu", "3") if smoke else ("cuda", "20")
    arrays, graphs, job = (f"benchmarks/gpu/{name}.py" for name in ("array_job", "graph_job", "job"))
    libraries = ("numpy",) if smoke else ("cupy", "jax", "numba")
    trained = (job, "dcgan", "--batch", "4" if smoke else "64", "--device", kind, "--iterations", iterations)
    checked = (SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all")
    ways = () if smoke else ("captured", "callables", "compiled")
    return [
        *(Program(name, (arrays, name, "--iterations", iterations), needs=name) for name in libraries),
        *(Program(f"graphs, {way}", (graphs, way, "--iterations", iterations)) for way in ways),
        Program("isolated", trained, told=("--isolate",)),
        Program("compute-sanitizer", trained, before=() if smoke else checked, tool="" if smoke else SANITIZER),
    ]


@functools.cache
def run(argv: tuple[str, ...]) -> dict[str, Any]:
    """Run a command to its end or its deadline; returns its exit code, its losses, and what it said if it failed."""
    begun_s = time.monotonic()
    try:
        done = subprocess.run(
            argv,
            cwd=common.ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"exit_code": None, "said": f"longer than {DEADLINE_S:.0f} s", "losses": []}
    said = (done.stderr or done.stdout)[-_KEPT:].replace(str(common.ROOT), "ROOT") if done.returncode else ""
    found = {"exit_code": done.returncode, "said": said, "losses": _LOSS.findall(done.stdout)}
    return found | {"seconds": round(time.monotonic() - begun_s, 2)}


def measure(program: Program, device: str, budget: str) -> dict[str, Any]:
    """Return how a program went with and without Zico."""
    missing = program.tool if program.tool and not shutil.which(program.tool) else ""
    if program.needs and importlib.util.find_spec(program.needs) is None:
        missing = program.needs
    if missing:
        return {"passed": False, "why": f"{missing} is not installed"}
    own = (sys.executable, *program.arguments)
    plain = run(own)
    command = shlex.join((*program.before, *own))
    pooled = run((*common.ZICO, "run", "--device", device, "--budget", budget, *program.told, command))
    same = bool(plain["losses"]) and plain["losses"] == pooled["losses"]
    passed = same and plain["exit_code"] == pooled["exit_code"] == 0
    runs = {way: {**one, "losses": len(one["losses"])} for way, one in (("plain", plain), ("zico", pooled))}
    return {"passed": passed, "losses_equal": same, **runs}


def text_of(result: dict[str, Any]) -> str:
    """Return the table."""
    rows = []
    for name, found in result["programs"].items():
        codes = [str(found[way]["exit_code"]) if way in found else "-" for way in ("plain", "zico")]
        same = "-" if "why" in found else "same" if found["losses_equal"] else "DIFFER"
        rows.append((name, found.get("why", "passed" if found["passed"] else "FAILED"), *codes, same))
    return common.table(("program", "result", "exit code, plain", "with Zico", "losses"), rows)


def main() -> int:
    """Run, print, write; returns the exit code, 1 unless all programs passed."""
    parser = common.parser(__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:0; host with --smoke")
    parser.add_argument("--budget", default="none", help="of each program (default: all there is)")
    parser.add_argument("--only", action="append", metavar="NAME", help="only these programs")
    options = parser.parse_args()
    device = "host" if options.smoke else options.device
    result = common.document("gpu_programs", QUESTION, {"device": device})
    result["programs"] = {}
    directory = common.output_directory(options)
    for program in programs(smoke=options.smoke):
        if options.only and program.name not in options.only:
            continue
        result["programs"][program.name] = found = measure(program, device, options.budget)
        common.note(f"{program.name}: {found.get('why') or ('passed' if found['passed'] else 'FAILED')}")
        if directory is not None:
            common.save(result, text_of(result), directory)
    common.write(result, text_of(result), directory)
    return int(not all(found["passed"] for found in result["programs"].values()))


if __name__ == "__main__":
    sys.exit(main())
