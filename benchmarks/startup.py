"""What does ``zico run`` add to the start of a job?

From the start of the command to the first line of user code after the framework's import, with and without Zico, taking
turns. Both ends are read from CLOCK_MONOTONIC, which all processes share. A probe inside one job then says where the
time goes, and one start with an empty cache says what the first one on a machine costs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

QUESTION = "What does zico run add to the start of a job?"
FRAMEWORKS = ("torch", "tensorflow")
GOAL_ADDED_S = 2.0
DEADLINE_S = 300.0
PROBE = Path(__file__).with_name("startup_probe.py")
_RUN = (*common.ZICO, "run", "--quiet", "--budget", "1GiB", "--")
_CODE = "import time; began = time.monotonic(); import {0}; print(began, time.monotonic())"


def start(framework: str, prefix: Sequence[str] = (), **environ: str) -> dict[str, float]:
    """Start Python once; return seconds until its first statement, of the import, and until user code is ready."""
    began_s = time.monotonic()
    words = _output((*prefix, sys.executable, "-c", _CODE.format(framework)), environ).split()
    first_s, ready_s = (float(word) for word in words[-2:])
    return {"launch_s": first_s - began_s, "import_s": ready_s - first_s, "ready_s": ready_s - began_s}


def _output(argv: Sequence[str], environ: dict[str, str]) -> str:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=DEADLINE_S, env=os.environ | quiet | environ
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return done.stdout


def measure(framework: str, repeats: int) -> dict[str, Any]:
    """Return every start, without and with Zico in turns, and what is added to each part."""
    start(framework, _RUN)  # from here on machine code and files are in their caches
    raw: dict[str, list[dict[str, float]]] = {"plain": [], "zico": []}
    for index in range(repeats):
        turns = [("plain", ()), ("zico", _RUN)]
        for kind, prefix in turns if index % 2 == 0 else turns[::-1]:
            raw[kind].append(start(framework, prefix))
        common.note(f"{framework}: start {index + 1} of {repeats}")
    added = {
        part: common.spread(ours[part] - plain[part] for ours, plain in zip(raw["zico"], raw["plain"], strict=True))
        for part in ("launch_s", "import_s", "ready_s")
    }
    return {"raw": raw, "added": added, "inside": probe(framework, repeats)}


def probe(framework: str, repeats: int) -> dict[str, float]:
    """Return the median seconds of each step that a job takes to join the pool after its framework's import."""
    steps: dict[str, list[float]] = {}
    for _ in range(repeats):
        for line in _output((*_RUN, sys.executable, str(PROBE), framework), {}).splitlines():
            name, bar, seconds = line.rpartition(": ")
            if bar:
                steps.setdefault(name.rpartition(" | ")[2], []).append(float(seconds))
    return {name: statistics.median(values) for name, values in steps.items()}


def first_start() -> float:
    """Return the seconds of a start that finds no compiled code."""
    with tempfile.TemporaryDirectory(prefix="zico-cache-") as cache:
        began_s = time.monotonic()
        _output((*_RUN, sys.executable, "-c", "pass"), {"ZICO_CACHE_DIR": cache})
        return time.monotonic() - began_s


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    header = ("seconds (median)", "plain", "under zico run", "added", "min-max", "of it: before the job", "in the job")
    inside = [f"Inside a job, `import {name}` done: {_steps(result[name]['inside'])}.\n" for name in _measured(result)]
    compiling = result["first_start_s"]
    once = "" if compiling is None else f"The first start of all, which compiles: {compiling:.1f} s, once.\n"
    goal = f"Goal: at most {GOAL_ADDED_S:.0f} s added.\n"
    return "\n".join((common.table(header, _rows(result)), goal, *inside, once))


def _measured(result: dict[str, Any]) -> list[str]:
    return [name for name in FRAMEWORKS if name in result]


def _rows(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name in _measured(result):
        raw, added = result[name]["raw"], result[name]["added"]
        medians = [statistics.median(one["ready_s"] for one in raw[kind]) for kind in ("plain", "zico")]
        parts = [added[part]["median"] for part in ("launch_s", "import_s")]
        numbers = [f"{value:.2f}" for value in (*medians, added["ready_s"]["median"])]
        span = f"{added['ready_s']['min']:.2f}-{added['ready_s']['max']:.2f}"
        yield (name, *numbers, span, *(f"{value:.2f}" for value in parts))


def _steps(inside: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in inside.items())


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=9, help="starts of each kind")
    parser.add_argument("--framework", choices=FRAMEWORKS, action="append", help="only this one")
    parser.add_argument("--no-compile", action="store_true", help="leave out the start with an empty cache")
    options = parser.parse_args()
    frameworks = options.framework or (FRAMEWORKS[:1] if options.smoke else FRAMEWORKS)
    repeats = 1 if options.smoke else options.repeat
    result = common.document("startup", QUESTION, {"repeat": repeats, "frameworks": list(frameworks)})
    for framework in frameworks:
        result[framework] = measure(framework, repeats)
    result["first_start_s"] = None if options.smoke or options.no_compile else first_start()
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
