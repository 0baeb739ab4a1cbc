"""What does the first hour on a GPU answer? Runs the parts in order, each with its own deadline and exit code.

``DIR/summary.json`` is written anew after each part, and while a part measures; ``DIR/log.txt``
holds what the parts printed. A second run with the same DIR goes on with the parts that have no
result yet. The compile cache is filled beside the parts that need none of it.

``--twin`` rehearses every part with the same scripts, without a GPU: on the driver's software twin,
and on the host device where a framework computes, which it cannot on the twin. No figure of a
rehearsal is judged.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

sys.path.insert(0, str(Path(__file__).resolve().parents[0]))  # PYTHONSAFEPATH leaves it out
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import driver_facts
import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from typing import IO

QUESTION = "What does the first hour on a GPU answer?"
SCHEMA = "zico.first-hour.v1"
NO_GPU = "there is no GPU that Zico can use, and --twin was not given"
CHECK_S = 60.0
"""For the question whether there is a GPU."""
WARMING_S = 420.0
REAP_S = 10.0
LEAST_S = 5.0
"""A part is not begun with less time than this."""
GOAL_ALONE = 0.99
"""Throughput of a job alone with Zico, over that without."""
GOAL_TRACKING = 0.01
"""Share of a job's time that marks on the device may take."""
FEW_MAPS = 1.0
"""Regions mapped an iteration, below which a hand-over counts as one without calls of the driver."""

GPU = Path(__file__).resolve().parent
_ON_HOST = ("--smoke", "--device", "host")

Figures = dict[str, Any]
Expected = list[dict[str, Any]]


# -- what parts leave behind -----------------------------------------------------------------------


def _expect(figure: str, expected: object, found: object, *, met: bool | None) -> dict[str, Any]:
    return {"figure": figure, "expected": expected, "found": found, "met": met}


def _facts(work: Path, *, judged: bool) -> tuple[Figures, Expected]:
    """Return the driver's facts, which their script has judged."""
    del judged
    found = json.loads((work / "facts.json").read_text())
    return found["facts"], found["expected"]


def _tests(work: Path, *, judged: bool) -> tuple[Figures, Expected]:
    """Return how many tests there were, and the names of those that failed."""
    root = ET.parse(work / "tests.xml").getroot()  # noqa: S314 - written by the part itself
    cases = list(root.iter("testcase"))
    failed = [str(case.get("name")) for case in cases if {"failure", "error"} & {one.tag for one in case}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    figures = {"tests": len(cases), "failed": failed, "skipped": skipped}
    met = bool(cases) and not failed if judged else None
    return figures, [_expect("tests that failed", 0, len(failed), met=met)]


def _alone(work: Path, *, judged: bool) -> tuple[Figures, Expected]:
    """Return what ``alone.py`` has measured so far, and what of it is as expected."""
    found = json.loads((work / "gpu_alone.json").read_text())
    said = []
    for name, case in found["cases"].items():
        if "failed" in case:
            said.append(_expect(f"{name}: runs that failed", 0, len(case["failed"]), met=False if judged else None))
            continue
        ratio, same = case["ratio"], case["losses_equal"]
        said.append(_expect(f"{name}: speed", GOAL_ALONE, ratio, met=ratio >= GOAL_ALONE if judged else None))
        if name != "cudnn.benchmark":  # which may choose another algorithm in each run
            said.append(_expect(f"{name}: losses equal", expected=True, found=same, met=same if judged else None))
        counted = next(run["counted"] for run in case["runs"] if run["way"] == "zico")
        maps = counted["maps"] / max(counted["iterations"], 1)
        said.append(_expect(f"{name}: maps an iteration", FEW_MAPS, maps, met=maps < FEW_MAPS if judged else None))
        refused = counted["failures"]
        said.append(_expect(f"{name}: marks refused", 0, refused, met=refused == 0 if judged else None))
        if name == "out of memory":
            error = counted["refused_by"]
            met = error == "OutOfMemoryError" if judged else None
            said.append(_expect(f"{name}: error raised", "OutOfMemoryError", error, met=met))
    return {key: found[key] for key in ("cases", "torch") if key in found}, said


def _pairs(name: str) -> Callable[..., tuple[Figures, Expected]]:
    """Gather what ``pairs.py`` has measured so far, and what of it is as expected."""

    def gather(work: Path, *, judged: bool) -> tuple[Figures, Expected]:
        import pairs

        found = json.loads((work / f"{name}.json").read_text())
        share, goal = pairs.GOAL
        said = []
        for pair, figures in found["pairs"].items():
            summary = figures["summary"]
            ours = summary.get(f"zico {share} %", {}).get("throughput", {}).get("median")
            met = ours is not None and ours >= goal
            said.append(_expect(f"{pair} at {share} %: throughput", goal, ours, met=met if judged else None))
            same = all(one.get("losses_equal", True) for one in summary.values())
            said.append(_expect(f"{pair}: losses equal", expected=True, found=same, met=same if judged else None))
            for peer in ("without Zico", "MPS, none no budget", f"serial {share} %"):
                if peer in summary:
                    theirs = summary[peer]["throughput"]["median"]
                    met = ours is not None and ours > theirs
                    said.append(_expect(f"{pair}: above {peer}", theirs, ours, met=met if judged else None))
        if "killed" in found:
            same = bool(found["killed"].get("losses_equal"))
            what = "one job killed: the other's losses"
            said.append(_expect(what, expected=True, found=same, met=same if judged else None))
        return {key: found[key] for key in ("pairs", "killed") if key in found}, said

    return gather


def _programs(work: Path, *, judged: bool) -> tuple[Figures, Expected]:
    """Return which programs passed."""
    found = json.loads((work / "gpu_programs.json").read_text())["programs"]
    said = [
        _expect(name, expected=True, found=one.get("why", one["passed"]), met=one["passed"] if judged else None)
        for name, one in found.items()
    ]
    return {"programs": found}, said


def _marks(work: Path, *, judged: bool) -> tuple[Figures, Expected]:
    """Return what marks cost, and the share of a job's time that the spacing by default takes."""
    found = json.loads((work / "gpu_spacing.json").read_text())["cases"]
    first: dict[str, Any] = next(iter(found.values()), {})
    cost = 1 - first["ratio"] if "ratio" in first else None
    met = cost is not None and cost <= GOAL_TRACKING
    return {"cases": found}, [_expect("share of time", GOAL_TRACKING, cost, met=met if judged else None)]


def _result(name: str, *keys: str) -> Callable[..., tuple[Figures, Expected]]:
    """Gather the result of a benchmark for which no figure is expected."""

    def gather(work: Path, *, judged: bool) -> tuple[Figures, Expected]:
        del judged
        found = json.loads((work / f"{name}.json").read_text())
        return {key: found[key] for key in keys or found if key in found}, []

    return gather


# -- the parts -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the hour."""

    question: str
    deadline_s: float
    command: tuple[str, ...]
    """Behind the interpreter; ``{work}`` is a folder of the part's own."""
    gather: Callable[..., tuple[Figures, Expected]]
    """Takes that folder, also when the part was killed; returns figures and expected figures."""
    rehearsal: tuple[str, ...]
    """The command with ``--twin``."""
    compiles: bool = True
    """Whether it needs the compile cache."""


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(GPU / name), *arguments, "-o", "{work}")


def _pytest(folder: str) -> tuple[str, ...]:
    return ("-m", "pytest", folder, "--quiet", "--junitxml={work}/tests.xml")


_FACTS = (str(GPU / "driver_facts.py"), "-o", "{work}/facts.json")
_KEPT = ("--deselect", "tests/gpu/test_managed.py")

PARTS: dict[str, Part] = {
    "a": Part(driver_facts.QUESTION, 300, _FACTS, _facts, (*_FACTS, "--twin"), compiles=False),
    "b": Part(
        "Do kernels, driver and next tier keep their contracts?",
        *(480, (*_pytest("tests/gpu"), *_KEPT), _tests, (*_pytest("tests/gpu/test_driver.py"), "--twin")),
    ),
    "c": Part(
        "What does Zico cost a job that has the GPU to itself?",
        *(590, _script("alone.py"), _alone, _script("alone.py", *_ON_HOST)),
    ),
    "c-saving": Part(
        "What does a job lose that may hold less than its peak?",
        *(
            300,
            _script("alone.py", "--saving"),
            _result("gpu_saving", "cases"),
            _script("alone.py", "--saving", *_ON_HOST),
        ),
    ),
    "d": Part(
        "What do pairs gain, and what becomes of one when the other is killed?",
        *(590, _script("pairs.py"), _pairs("gpu_pairs"), _script("pairs.py", *_ON_HOST)),
    ),
    "e-marks": Part(
        "What does a mark on the device cost, by kernel, by stream operation and by event?",
        *(120, _script("progress.py"), _result("progress", "device", "ways"), _script("progress.py", "--smoke")),
    ),
    "e-spacing": Part(
        "What do marks cost a job alone, at several distances?",
        *(360, _script("alone.py", "--spacing"), _marks, _script("alone.py", "--spacing", *_ON_HOST)),
    ),
    "e-pairs": Part(
        "What do the paper's kinds of pairs gain?",
        *(590, _script("pairs.py", "--paper"), _pairs("gpu_pairs_paper"), _script("pairs.py", "--paper", *_ON_HOST)),
    ),
    "f": Part(
        "Do CuPy, JAX, Numba, CUDA graphs, isolated jobs and compute-sanitizer work in a pool?",
        *(480, _script("programs.py"), _programs, _script("programs.py", "--smoke")),
    ),
    "g": Part(
        "Does managed memory keep its contract? Last, and at most half of what is free.",
        *(240, _pytest("tests/gpu/test_managed.py"), _tests, (*_pytest("tests/gpu/test_managed.py"), "--twin")),
    ),
    "g-cost": Part(
        "What does paging in managed memory cost?",
        *(480, _script("managed.py"), _result("gpu_paging"), _script("managed.py", "--smoke")),
    ),
}
"""In the order in which they run."""


# -- processes -------------------------------------------------------------------------------------


def start(arguments: Sequence[str], log: IO[str]) -> subprocess.Popen[str]:
    """Start a part in a session of its own; what it prints goes to the log."""
    paths = [str(common.ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=common.ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        text=True,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """End a part with all that it started, also what has left its process group."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in family:
        with contextlib.suppress(psutil.Error):
            one.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs may keep it
        process.wait(REAP_S)


def finish(process: subprocess.Popen[str], deadline_s: float) -> str:
    """Wait for a part's end and leave nothing of it; returns ``passed``, ``failed`` or ``killed``."""
    try:
        return "failed" if process.wait(deadline_s) else "passed"
    except subprocess.TimeoutExpired:
        return "killed"
    finally:
        kill(process)


# -- the hour --------------------------------------------------------------------------------------


class Hour:
    """The results in one directory, and the run that adds to them."""

    def __init__(self, directory: Path, *, twin: bool, minutes: float) -> None:
        """Read what the directory has, or begin.

        Raises:
            SystemExit: The directory holds the results of the other mode.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / "summary.json"
        self._log = directory / "log.txt"
        self._twin = twin
        self._end_s = time.monotonic() + 60 * minutes
        self._warming: tuple[subprocess.Popen[str], float] | None = None
        self.summary: dict[str, Any] = {"schema_version": SCHEMA, "question": QUESTION, "twin": twin}
        self.summary |= {"runs": [], "parts": {}}
        if self._file.exists():
            self.summary = json.loads(self._file.read_text())
        if self.summary["twin"] != twin:
            sys.exit(f"{directory} holds results {'without' if twin else 'of a rehearsal with'} --twin: choose another")

    def begin(self) -> str:
        """Describe this run and its machine; returns why nothing can run here, or nothing."""
        described = common.document("first_hour", QUESTION, {"twin": self._twin})
        run = {key: described[key] for key in ("commit", "date", "machine", "versions")}
        argv = [sys.executable, str(GPU / "driver_facts.py"), "--fact", "device"]
        argv += ["--twin"] * self._twin
        why = ""
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=CHECK_S)
            run["device"] = json.loads(done.stdout) if done.returncode == 0 else None
            why = (done.stderr.strip().splitlines() or ["no answer"])[-1] if done.returncode else ""
        except subprocess.TimeoutExpired:
            run["device"], why = None, f"the driver did not answer within {CHECK_S:.0f} s"
        self.summary["runs"].append(run)
        self.write()
        return f"{NO_GPU}: {why}" if why else ""

    def write(self) -> None:
        """Write the summary; the file is whole whenever it is there, and names no path of this machine."""
        text = json.dumps(self.summary, indent=1).replace(sys.executable, "python").replace(f"{common.ROOT}/", "")
        part = self._file.with_name("summary.json.part")
        part.write_text(text + "\n")
        part.replace(self._file)

    def has_result(self, name: str) -> bool:
        """Tell whether a part has run; one that could not be run has no result."""
        return self.summary["parts"].get(name, {}).get("state") in ("passed", "failed", "killed")

    def cannot_run(self, name: str, why: str) -> None:
        """Note that a part did not run; that is a failure, and a later run tries again."""
        note = {"question": PARTS[name].question, "state": "not run", "why": why, "exit_code": None}
        self.summary["parts"][name] = note | {"run": len(self.summary["runs"]) - 1}
        self.write()
        common.note(f"{name}: not run: {why}")

    def warm(self) -> None:
        """Let the compile cache be filled beside the parts that do not need it."""
        with self._log.open("a") as log:
            self._warming = start(["-m", "zico.base.warming"], log), time.monotonic()

    def _wait_for_cache(self) -> None:
        """Wait until the compile cache is filled; a failure is noted, and parts then compile for themselves."""
        if self._warming is not None:
            (process, begun_s), self._warming = self._warming, None
            state = finish(process, min(WARMING_S, self._left_s()))
            seconds = round(time.monotonic() - begun_s, 1)
            self.summary["runs"][-1]["warming"] = {"state": state, "seconds": seconds}
            self.write()
            common.note(f"compile cache: {state}, {seconds:.0f} s")

    def _left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def run(self, name: str) -> None:
        """Run one part and write its result."""
        part = PARTS[name]
        command = part.rehearsal if self._twin else part.command
        if part.compiles:
            self._wait_for_cache()
        deadline_s = min(part.deadline_s, self._left_s())
        if deadline_s < LEAST_S:
            self.cannot_run(name, "no time was left: run again with the same directory")
            return
        common.note(f"{name}: {part.question} (at most {deadline_s:.0f} s)")
        with tempfile.TemporaryDirectory() as folder:
            argv = [argument.replace("{work}", folder) for argument in command]
            result = self._measure(part, argv, Path(folder), deadline_s)
        told = [argument.replace("{work}", "WORK") for argument in command]
        self.summary["parts"][name] = result | {"command": " ".join(["python", *told])}
        self.write()
        self._tell(name, result)

    def _measure(self, part: Part, argv: Sequence[str], work: Path, deadline_s: float) -> dict[str, Any]:
        """Run a part's command to its end or its deadline, and gather what it has left."""
        begun_s = time.monotonic()
        with self._log.open("a") as log:
            log.write(f"\n== {part.question}\n")
            log.flush()
            process = start(argv, log)
            state = finish(process, deadline_s)
        result: dict[str, Any] = {"question": part.question, "state": state, "exit_code": process.returncode}
        result |= {"seconds": round(time.monotonic() - begun_s, 1), "deadline_s": round(deadline_s, 1)}
        result |= {"date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")}
        result |= {"run": len(self.summary["runs"]) - 1, "figures": {}, "expected": []}
        try:
            result["figures"], result["expected"] = part.gather(work, judged=not self._twin)
        except Exception as error:  # noqa: BLE001 - whatever a part left half done costs only its own figures
            result["why"] = f"its figures could not be read: {type(error).__name__}: {error}".replace(str(work), "WORK")
            result["state"] = "failed" if state == "passed" else state
        return result

    def _tell(self, name: str, result: dict[str, Any]) -> None:
        """Say how a part ended, and for each expected figure whether it was met."""
        common.note(f"{name}: {result['state']}, exit code {result['exit_code']}, {result['seconds']:.0f} s")
        for one in result["expected"]:
            word = {None: "not judged in a rehearsal", True: "met", False: "MISSED"}[one["met"]]
            common.note(f"   {one['figure']}: {one['found']}, expected {one['expected']}: {word}")

    def close(self) -> None:
        """End what still runs."""
        if self._warming is not None:
            kill(self._warming[0])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="where results are and go")
    parser.add_argument("--twin", action="store_true", help="rehearse without a GPU; no figure is judged")
    parser.add_argument("--part", action="append", choices=PARTS, help="only these (default: all)")
    parser.add_argument("--again", action="store_true", help="also parts whose result is there")
    parser.add_argument("--minutes", type=float, default=60.0, help="of all parts together (default: %(default)g)")
    return parser.parse_args()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run the parts; returns 0 if each chosen one passed, 130 if interrupted, else 1."""
    options = _options()
    signal.signal(signal.SIGTERM, _interrupt)
    hour = Hour(options.out, twin=options.twin, minutes=options.minutes)
    chosen = [name for name in PARTS if name in (options.part or PARTS)]
    todo = [name for name in chosen if options.again or not hour.has_result(name)]
    for name in chosen:
        if name not in todo:
            common.note(f"{name}: its result is there")
    try:
        why = hour.begin() if todo else ""
        if not why and any(PARTS[name].compiles for name in todo):
            hour.warm()
        for name in todo:
            if why:
                hour.cannot_run(name, why)
            else:
                hour.run(name)
    except KeyboardInterrupt:
        common.note("interrupted: the parts so far are in the summary")
        return 130
    finally:
        hour.close()
    return int(any(hour.summary["parts"][name]["state"] != "passed" for name in chosen))


if __name__ == "__main__":
    sys.exit(main())
