"""The script for the first hour on a GPU: rehearsed whole, resumed, and with parts that hang."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
REHEARSAL_S = 1800.0
DEADLINE_S = 300.0


def rehearse(out: Path, *options: str, deadline_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    """Run the script to its end, without a GPU."""
    argv = [sys.executable, str(GPU / "first_hour.py"), "--out", str(out), *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=deadline_s, check=False)


def parts_in(out: Path) -> dict[str, Any]:
    """Return what the summary says of each part."""
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())["parts"]
    return found


@pytest.mark.timeout(REHEARSAL_S)
def test_all_parts_are_rehearsed_on_the_twin(tmp_path: Path) -> None:
    """Each part ends well, leaves figures and says what would be judged; a second run repeats none."""
    pytest.importorskip("torch")
    done = rehearse(tmp_path, "--twin", deadline_s=REHEARSAL_S)
    assert done.returncode == 0, done.stderr + (tmp_path / "log.txt").read_text()[-4000:]
    parts = parts_in(tmp_path)
    assert list(parts) == ["a", "b", "c", "c-saving", "d", "e-marks", "e-spacing", "e-pairs", "f", "g", "g-cost"]
    assert {part["exit_code"] for part in parts.values()} == {0}
    assert all(part["figures"] for part in parts.values())
    judged = [one for part in parts.values() for one in part["expected"]]
    assert {one["met"] for one in judged} == {None}, "figures of a rehearsal are not judged"
    assert {"dcgan 4 float32: losses equal", "dcgan+dcgan at 70 %: throughput"} <= {one["figure"] for one in judged}
    again = rehearse(tmp_path, "--twin")
    assert again.returncode == 0
    assert again.stderr.rstrip().splitlines() == [f"  {name}: its result is there" for name in parts]


HANGING = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import first_hour
hangs = ("-c", "import os, time; os.fork(); open(os.environ['HELD'], 'a'); time.sleep(1000)")
part = first_hour.Part("Does it end?", 1, hangs, first_hour._facts, hangs, compiles=False)
ends = ("-c", "raise SystemExit(3)")
first_hour.PARTS = {"hangs": part, "fails": first_hour.dataclasses.replace(part, deadline_s=60, rehearsal=ends)}
first_hour.LEAST_S = 0
sys.exit(first_hour.main())
"""


def test_a_part_that_hangs_is_killed_with_all_it_started(tmp_path: Path) -> None:
    """The part's deadline ends it and its children; the next part runs, and both say how they ended."""
    import psutil

    argv = [sys.executable, "-c", HANGING, str(GPU), "--out", str(tmp_path), "--twin"]
    done = subprocess.run(
        argv, env={"HELD": str(tmp_path / "held")}, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 1, done.stderr
    parts = parts_in(tmp_path)
    assert (parts["hangs"]["state"], parts["hangs"]["exit_code"]) == ("killed", -9)
    assert (parts["fails"]["state"], parts["fails"]["exit_code"]) == ("failed", 3)
    assert "its figures could not be read" in parts["hangs"]["why"]
    deadline_s = time.monotonic() + DEADLINE_S
    while any("HELD" in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline_s, "something of the part still runs"


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    """Parts that cannot run are noted as such, with the reason, and a later run tries them again."""
    done = rehearse(tmp_path, "--part", "a")
    assert done.returncode == 1
    part = parts_in(tmp_path)["a"]
    assert part["state"] == "not run"
    assert part["why"].startswith("there is no GPU that Zico can use, and --twin was not given: ")


def test_a_rehearsal_and_the_hour_do_not_share_a_directory(tmp_path: Path) -> None:
    """Figures of the twin never stand among those of a GPU."""
    assert rehearse(tmp_path, "--twin", "--part", "e-marks").returncode == 0
    done = rehearse(tmp_path, "--part", "e-marks")
    assert done.returncode == 1
    assert done.stderr.strip() == f"{tmp_path} holds results of a rehearsal with --twin: choose another"
