"""The script for a run on a GPU: rehearsed, resumed by configuration, and with what hangs, fails or does not fit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from support.harness import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GPU = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
REHEARSAL_S = 1500.0
DEADLINE_S = 120.0

Key = tuple[str, str, int]


def run(out: Path, *options: str, deadline_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    """Run the script to its end."""
    argv = [sys.executable, str(GPU / "gpu_run.py"), "-o", str(out), *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=deadline_s, check=False)


def lines(out: Path) -> list[dict[str, Any]]:
    """Return what is in the results."""
    file = out / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def states(out: Path) -> dict[str, list[str]]:
    """Return the statuses of each configuration, in order."""
    found: dict[str, list[str]] = {}
    for line in lines(out):
        if line["part"] != "lease":
            found.setdefault(f"{line['part']}/{line['name']}", []).append(line["status"])
    return found


@pytest.mark.timeout(REHEARSAL_S)
def test_every_configuration_is_rehearsed(tmp_path: Path) -> None:
    """Each one leaves figures under its own name, no goal is judged, and a second call runs nothing."""
    pytest.importorskip("torch")
    listed = json.loads(run(tmp_path, "--list", "--json").stdout)
    done = run(tmp_path, "--twin", "--seconds", f"{REHEARSAL_S}", deadline_s=REHEARSAL_S)
    assert done.returncode == 0, done.stderr + (tmp_path / "log.txt").read_text()[-4000:]
    found = states(tmp_path)
    rehearsed = {f"{one['part']}/{one['name']}" for one in listed if one["rehearsal"] is not None}
    assert {key: found.get(key) for key in rehearsed} == {key: ["done"] for key in rehearsed}
    assert all(line["figures"] for line in lines(tmp_path))
    assert "MISSED" not in done.stderr
    assert ": met" not in done.stderr
    assert len(list(tmp_path.iterdir())) <= 8, "more files than come back from a machine that is lent"
    before = lines(tmp_path)
    again = run(tmp_path, "--twin")
    assert again.returncode == 0
    assert lines(tmp_path)[: len(before)] == before
    assert [line["part"] for line in lines(tmp_path)[len(before) :]] == ["lease"]


# -- with configurations of the tests' own ---------------------------------------------------------

TABLE = """
import sys
sys.path.insert(0, {gpu!r})
import gpu_run
import run_parts
from run_parts import Configuration, Goal, Part, mean
gpu_run.HANG_S = {hang_s}
gpu_run.SLOWER = 1.0
gpu_run.WARMING = ("-c", "")
run_parts.PARTS = (Part("p", "Does it work?", (Goal("most", mean("good", "value"), most=1.0),)),)
run_parts.CONFIGURATIONS = {table}
sys.exit(gpu_run.main())
"""

SCRIPT = """
import argparse, os, sys, time
sys.path.insert(0, {gpu!r})
import ready, record
parser = argparse.ArgumentParser()
record.add_options(parser)
ready.add_option(parser)
parser.add_argument("name")
parser.add_argument("do", nargs="?", default="pass")
options = parser.parse_args()
ready.wait(options.go)
def write(value, **told):
    record.append(options.result, "p", options.name, {{"value": value}}, seconds=0, turn=options.round, **told)
exec(options.do)
write(2)
"""


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., list[str]]:
    """Give a maker of command lines that run configurations: name, seconds, Python code and further fields of each."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(gpu=str(GPU)))

    def made(*rows: tuple[Any, ...], options: tuple[str, ...] = (), hang_s: float = 1.0) -> list[str]:
        told = ", ".join(
            f"Configuration('p', {name!r}, ({str(script)!r}, {name!r}, {code!r}), {seconds}, rehearsal=(), "
            f"order={number}{''.join(f', {key}={value!r}' for key, value in (more[0] if more else {}).items())})"
            for number, (name, seconds, code, *more) in enumerate(rows)
        )
        source = TABLE.format(gpu=str(GPU), table=f"({told},)", hang_s=hang_s)
        return [sys.executable, "-c", source, "-o", str(tmp_path / "out"), "--twin", *options]

    return made


def ended(argv: list[str]) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    return subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@contextlib.contextmanager
def started(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start, and kill what is left."""
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def alive(text: str) -> list[int]:
    """Return the processes whose command line has a text."""
    return [one.pid for one in psutil.process_iter(["cmdline"]) if text in " ".join(one.info["cmdline"] or ())]


HANGS = """
import subprocess
record.append(options.result, 'p', 'half', {'value': 1}, seconds=0)
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)', str(options.result)], start_new_session=True)
time.sleep(1000)
"""


def test_what_hangs_is_killed_and_counts_as_done(tmp_path: Path, table: Callable[..., list[str]]) -> None:
    """It ends with all that it started, in other sessions too; what it had written stays; no later call runs it."""
    argv = table(("hangs", 5, HANGS), ("good", 60, ""))
    done = ended(argv)
    assert done.returncode == 1, done.stderr
    found = {"p/half": ["done"], "p/hangs": ["killed"], "p/good": ["done"]}
    assert states(tmp_path / "out") == found
    assert alive(str(tmp_path / "out" / "results.jsonl")) == []
    assert "p: most: 2, at most 1: not judged in a rehearsal" in done.stderr
    ended(argv)
    assert states(tmp_path / "out") == found


ORPHAN = """
import subprocess
starts = 'import subprocess, sys; print(subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.DEVNULL).pid)'
orphan = subprocess.run([sys.executable, '-c', starts], stdout=subprocess.PIPE, check=True).stdout
while os.path.exists(f'/proc/{int(orphan)}'): time.sleep(0.01)
"""


def test_an_orphan_that_has_ended_is_gone(tmp_path: Path, table: Callable[..., list[str]]) -> None:
    """Its number is free while the configuration runs: whoever waits for its end, a broker for example, sees it."""
    done = ended(table(("leaves", 15, ORPHAN)))
    assert states(tmp_path / "out") == {"p/leaves": ["done"]}, done.stderr


def test_what_failed_is_tried_again_last(tmp_path: Path, table: Callable[..., list[str]]) -> None:
    """A failure is one line with its exit code; a later call runs what was never tried before it."""
    fails = "sys.exit(3) if not os.path.exists(str(options.result) + '.mended') else None"
    rows = (("fails", 60, fails), ("new", 60, ""))
    assert ended(table(*rows[:1])).returncode == 1
    assert lines(tmp_path / "out")[-1]["figures"] == {"why": "exit code 3"}
    (tmp_path / "out" / "results.jsonl.mended").touch()
    assert ended(table(*rows)).returncode == 0
    assert states(tmp_path / "out") == {"p/fails": ["failed", "done"], "p/new": ["done"]}
    assert [line["name"] for line in lines(tmp_path / "out")] == ["1", "fails", "2", "new", "fails"]


def test_what_does_not_fit_gives_way(tmp_path: Path, table: Callable[..., list[str]]) -> None:
    """The most valuable that fits into the seconds left is run; the rest, and what needs it, is named as not run."""
    rows = (
        ("long", 900, ""),
        ("needs", 50, "", {"needs": ("p/long",)}),
        ("first", 50, ""),
        ("last", 50, ""),
    )
    done = ended(table(*rows, options=("--seconds", "800")))
    assert [line["name"] for line in lines(tmp_path / "out")[1:]] == ["first", "last"]
    assert "not run: p/long, round 1; p/needs, round 1" in done.stderr


def test_a_call_that_ends_first_cuts_and_a_later_one_goes_on(tmp_path: Path, table: Callable[..., list[str]]) -> None:
    """What the call's own end cut off has no result, and the next call runs it."""
    quick = tmp_path / "quick"
    slow = f"time.sleep(0 if os.path.exists({str(quick)!r}) else 1000)"
    first = ended(table(("slow", 1, slow), options=("--seconds", "14"), hang_s=1000.0))
    assert states(tmp_path / "out") == {"p/slow": ["cut"]}, first.stderr
    quick.touch()
    assert ended(table(("slow", 60, slow))).returncode == 0
    assert states(tmp_path / "out") == {"p/slow": ["cut", "done"]}


def test_the_next_one_makes_ready_while_one_is_measured(tmp_path: Path, table: Callable[..., list[str]]) -> None:
    """It is started before the first one ends, and goes on only when that has ended."""
    waits_for_it = "while not list(__import__('pathlib').Path({!r}).glob('*/go-*.ready')): time.sleep(0.01)"
    folder = tmp_path / "temporary"
    folder.mkdir()
    argv = table(("first", 60, waits_for_it.format(str(folder))), ("second", 60, "", {"waits": True}))
    done = subprocess.run(
        argv, env=os.environ | {"TMPDIR": str(folder)}, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line["name"] for line in lines(tmp_path / "out")[1:]] == ["first", "second"]


def test_a_call_that_is_told_to_end_leaves_whole_results(tmp_path: Path, table: Callable[..., list[str]]) -> None:
    """SIGTERM ends what runs and what was started early; each line is whole, and the next call goes on."""
    rows = (("good", 60, ""), ("stays", 60, "time.sleep(1000)"), ("early", 60, "", {"waits": True}))
    with started(table(*rows)) as process:
        until(
            lambda: "p/good" in states(tmp_path / "out") and len(alive(str(tmp_path / "script.py"))) > 2,
            DEADLINE_S,
            "one is measured, and the next one has been started",
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 130
        assert alive(str(tmp_path / "script.py")) == []
    assert states(tmp_path / "out") == {"p/good": ["done"]}


def test_results_of_an_earlier_lease_count(tmp_path: Path, table: Callable[..., list[str]]) -> None:
    """A call in another directory begins with them, and leaves out a last line that was cut off."""
    rows = (("good", 60, ""), ("other", 60, ""))
    ended(table(rows[0]))
    earlier = (tmp_path / "out").rename(tmp_path / "earlier") / "results.jsonl"
    earlier.write_text(earlier.read_text() + '{"part": "p", "name": "oth')
    assert ended(table(*rows, options=("--earlier", str(earlier)))).returncode == 0
    text = (tmp_path / "out" / "results.jsonl").read_text()
    names = [re.findall('"name": "([a-z0-9]*)', line)[:1] for line in text.splitlines()]
    assert names == [["1"], ["good"], ["oth"], ["2"], ["other"]]


def test_a_goal_is_judged_by_its_bounds() -> None:
    """A figure is the mean of the rounds that have it; one that is not there is none; bounds count as within."""
    script = f"""
import sys
sys.path.insert(0, {str(GPU)!r})
from run_parts import Goal, mean
goal = Goal("f", mean("a", "x", "y"), least=1.0, most=2.0)
print(goal.value({{"a": [{{"x": {{"y": 1}}}}, {{"x": {{"y": 2}}}}, {{}}]}}), goal.value({{}}))
print([goal.is_met(value) for value in (0.9, 1.0, 2.0, 2.1)])
"""
    assert ended([sys.executable, "-c", script]).stdout == "1.5 None\n[False, True, True, False]\n"


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    """One sentence says why, and no line is written."""
    done = run(tmp_path)
    assert done.returncode == 1
    assert "there is no GPU that Zico can use (--twin rehearses without one): " in done.stderr
    assert lines(tmp_path) == []


def test_a_rehearsal_and_a_run_do_not_share_a_file(tmp_path: Path, table: Callable[..., list[str]]) -> None:
    """Figures of the twin never stand among those of a GPU."""
    ended(table(("good", 60, "")))
    done = run(tmp_path / "out")
    assert done.returncode == 1
    assert "holds results of a rehearsal with --twin: move it" in done.stderr
