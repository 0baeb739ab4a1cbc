"""Run a benchmark that writes a document, or tests, and append what came of it to a run's results as one line.

``as_line.py --result FILE --part P --name N SCRIPT ...`` runs a script of this folder with ``-o``,
and takes the figures from the JSON that it wrote; ``... tests/gpu ...`` runs pytest and counts. A
script that is told to end early (SIGTERM) gives what it had written by then.
"""

from __future__ import annotations

import argparse
import json
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
import record

if TYPE_CHECKING:
    from types import FrameType

GPU = Path(__file__).resolve().parent
ABOUT = ("schema_version", "name", "question", "commit", "date", "machine", "versions")
"""Of a document, what a run's header says once."""
END_S = 3.0
"""For the script's end, once this one was told to end."""


def figures_of_document(work: Path) -> dict[str, Any]:
    """Return the figures of what a script wrote."""
    found: dict[str, Any] = {}
    for file in sorted(work.glob("*.json")):
        found |= json.loads(file.read_text())
    return {key: value for key, value in found.items() if key not in ABOUT}


def figures_of_tests(file: Path) -> dict[str, Any]:
    """Return how many tests there were, and the names of those that failed."""
    cases = list(ET.parse(file).getroot().iter("testcase"))  # noqa: S314 - written by the tests just run
    failed = [str(case.get("name")) for case in cases if {"failure", "error"} & {one.tag for one in case}]
    return {"tests": len(cases), "failed": failed}


def command(what: list[str], work: Path, junit: Path) -> list[str]:
    """Return the command line of a script or of tests."""
    if what[0].startswith("tests/"):
        return [sys.executable, "-m", "pytest", "--verbose", "--tb=short", f"--junitxml={junit}", *what]
    out = work / "facts.json" if what[0] == "driver_facts.py" else work
    return [sys.executable, str(GPU / what[0]), *what[1:], "-o", str(out)]


def _told_to_end(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run it and append its line; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    parser.add_argument("--part", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("what", nargs=argparse.REMAINDER, help="a script of this folder, or tests, with its arguments")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _told_to_end)
    begun_s = time.monotonic()
    is_tests = options.what[0].startswith("tests/")
    with tempfile.TemporaryDirectory() as folder:
        # Beside the results, so that what a test printed is there to be read.
        junit = options.result.with_name(f"{options.part}-{options.round}.xml") if is_tests else Path(folder)
        process = subprocess.Popen(command(options.what, Path(folder), junit), cwd=common.ROOT)
        try:
            status = record.FAILED if process.wait() else record.DONE
        except KeyboardInterrupt:
            status = record.KILLED
            process.send_signal(signal.SIGINT if is_tests else signal.SIGTERM)  # pytest then writes what it has
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
        try:
            figures = figures_of_tests(junit) if is_tests else figures_of_document(Path(folder))
        except (OSError, ValueError, ET.ParseError) as error:
            figures = {"why": f"{type(error).__name__}: nothing was written that can be read"}
    seconds = time.monotonic() - begun_s
    told = {"seconds": seconds, "turn": options.round, "status": status}
    record.append(options.result, options.part, options.name, figures | {"exit_code": process.returncode}, **told)
    return process.returncode or 0


if __name__ == "__main__":
    sys.exit(main())
