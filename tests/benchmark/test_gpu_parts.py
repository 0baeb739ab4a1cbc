"""What the parts of a run on a GPU are made of, where it does not need one: shares, rates, ballast, jobs, goals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.scripts import Script

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEADLINE_S = 300.0
FIND = f"import sys; sys.path[:0] = [{str(BENCHMARKS / 'gpu')!r}, {str(BENCHMARKS)!r}]\n"


def told(code: str, *arguments: str) -> Any:  # noqa: ANN401 - parsed JSON
    """Run code that finds the scripts, and return what it prints as JSON."""
    argv = [sys.executable, "-c", FIND + code, *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SHARES = """
import json, run_jobs
MIB = 1 << 20
one = {"max_memory_reserved": 1000 * MIB, "max_memory_allocated": 800 * MIB, "context_bytes": 500 * MIB}
pair = [one, one | {"context_bytes": None}]
ways = run_jobs.allowance_bytes, run_jobs.budget_bytes
print(json.dumps([[way(pair, 70, of) / MIB for way in ways] for of in ("footprint", "allocated")]))
"""


def test_a_share_of_a_footprint_has_contexts_in_it_and_the_budget_has_none() -> None:
    """70 % of two jobs with contexts is what they may take; the pool gets that less the contexts, in whole granules."""
    contexts = 500 + 600  # the second one is not known
    footprint, tensors = told(SHARES)
    assert footprint == [0.7 * (2000 + contexts), 0.7 * (2000 + contexts) - contexts]
    assert tensors == [0.7 * 1600, 0.7 * 1600]


RATES = """
import json, run_jobs
even, late = [float(n) for n in range(1, 21)], [10 + n / 2 for n in range(1, 11)]
print(json.dumps([run_jobs.rates([even, late], 8), run_jobs.rates([even, ()], 8)]))
"""


def test_rates_are_those_of_the_time_in_which_all_train() -> None:
    """Where one job never trained, the other has the rate that it had by itself."""
    both, one = told(RATES)
    assert both == {"rates": [1.0, 2.0], "window_s": 1.0}
    assert one == {"rates": [1.0, None], "window_s": None}


BALLAST = """
import json
from ballast import Ballast
with Ballast(twin=True) as ballast:
    print(json.dumps([ballast.leave(300 << 20), ballast.leave((1 << 30) + 1), ballast.release()]))
"""


def test_a_ballast_leaves_what_it_is_told() -> None:
    """It holds all but that, to a granule of 2 MiB; another number takes the place of the first; then all is free."""
    total_bytes = 4 << 30
    exact, rounded, nothing = told(BALLAST)
    assert exact == {"held_bytes": total_bytes - (300 << 20), "free_bytes": 300 << 20}
    assert rounded["free_bytes"] == (1 << 30) + (2 << 20)
    assert nothing == {"held_bytes": 0, "free_bytes": total_bytes}


ROOM = """
import json, pathlib, run_jobs
first, second = (run_jobs.Room(pathlib.Path(sys.argv[1])) for _ in range(2))
found = [first.take(), first.take(), second.take()]
del first
print(json.dumps([*found, second.take()]))
"""


def test_the_room_beside_a_measured_run_is_one_runs_at_a_time(tmp_path: Path) -> None:
    """Who has it keeps it, another gets none meanwhile, and gets it when the first has ended."""
    assert told(ROOM, str(tmp_path / "results.jsonl")) == [True, True, False, True]


MPS = """
import json, os
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import psutil, run_jobs
from process.support import fake_mps
notes = fake_mps.install(Path(sys.argv[2]))
os.environ["PATH"] = sys.argv[2] + os.pathsep + os.environ["PATH"]
with run_jobs.mps_daemon() as variables:
    said, pipes = notes.read_text().split(), Path(variables["CUDA_MPS_PIPE_DIRECTORY"])
    found = {"begins": said[0], "lives": Path("/proc", said[1]).exists(), "pipes": pipes.is_dir()}
lives = Path("/proc", said[1]).exists() and psutil.Process(int(said[1])).status() != psutil.STATUS_ZOMBIE
found |= {"ends": notes.read_text().split()[-1], "left": [lives, pipes.exists()]}
print(json.dumps(found))
"""


def test_a_plain_run_has_a_daemon_of_mps_of_its_own(tmp_path: Path) -> None:
    """It lives as long as the run, is told to quit, and leaves nothing."""
    found = told(MPS, str(BENCHMARKS.parent / "tests"), str(tmp_path))
    assert found == {"begins": "daemon", "lives": True, "pipes": True, "ends": "quit", "left": [False, False]}


COMMANDS = """
import json, run_jobs, run_parts
jobs = set()
for one in run_parts.CONFIGURATIONS:
    if one.command[0] == "run_jobs.py":
        options = run_jobs.parsed(["--result", "results", *one.command[1:]])
        assert (options.part, options.name) == (one.part, one.name), one
        assert options.share is not None or not (options.half or options.ballast), one
        jobs |= {job.split(":")[0] for job in options.job}
keys = [one.key for one in run_parts.CONFIGURATIONS]
measured = [one for one in run_parts.CONFIGURATIONS if "--peaks" in one.command]
written = {f"peaks/{run_jobs.peak_name(job)}" for one in measured for job in one.command if job.count(":") == 2}
needed = {need for one in run_parts.CONFIGURATIONS for need in one.needs}
unknown = sorted(needed - set(keys) - written)
print(json.dumps({"jobs": sorted(jobs), "unknown": unknown, "twice": len(keys) - len(set(keys))}))
"""


def test_every_configuration_is_a_command_that_can_be_run() -> None:
    """Its words are known, it appends under its own name, and what it needs is measured by another one."""
    found = told(COMMANDS)
    assert found["unknown"] == []
    assert found["twice"] == 0
    assert found["jobs"] == ["bert_base", "dcgan", "gnmt", "gpt2", "resnet50"]


GOALS = """
import json, run_parts
pair = "DCGAN x 2"
lines = {f"{pair}: {way}": [{"rates": rates}] for way, rates in (
    (run_parts.IN_TURN, [100.0, 100.0]), (run_parts.ZICO_MPS, [80.0, 80.0]), (run_parts.ZICO_SERIAL, [50.0, 50.0]),
    (run_parts.PLAIN_MPS, [100.0, None]))}
lines[f"{pair}: {run_parts.ZICO_MPS}{run_parts.AGAIN}"] = [{"rates": [60.0, 60.0]}]
headline = next(part for part in run_parts.PARTS if part.name == "headline")
print(json.dumps([(goal.figure, goal.value(lines)) for goal in headline.goals]))
"""


def test_goals_compare_what_jobs_do_together_with_one_after_the_other() -> None:
    """Turns are averaged, a job that never trained counts nothing, and what was not measured has no value."""
    found = dict(told(GOALS))
    assert found["DCGAN x 2: Zico MPS over one after the other"] == pytest.approx(1.4)
    assert found["DCGAN x 2: Zico MPS over plain MPS, no ballast"] == pytest.approx(1.4)
    assert found["DCGAN x 2: Zico MPS over Zico serial"] == pytest.approx(1.4)
    assert found["GNMT x 2: Zico MPS over one after the other"] is None


MODELS = """
import torch  # Script loads it
import json, sys
import job, sweep
named = {*sweep.MODELS, *json.loads(sys.argv[1])}
assert named <= set(job.MODELS), named - set(job.MODELS)
options = lambda model: sys.argv.__setitem__(slice(1, None), [model, "--batch", "2", "--device", "cpu"]) or job.parsed()
for model in (*sweep.MODELS, "branches"):
    loss = job.build(options(model))()
    assert loss.isfinite(), model
print("stepped")
"""


def test_models_of_a_run_are_known_and_the_small_ones_step(tmp_path: Path) -> None:
    """Each job of the table is one of ``job.py``, and those that no other benchmark trains make a step."""
    pytest.importorskip("torch")
    script = tmp_path / "models.py"
    script.write_text(FIND + MODELS)
    jobs = json.dumps(["bert_base", "dcgan", "gnmt", "gpt2", "resnet50"])
    with Script([str(script), jobs], os.environ, loaded="torch") as process:
        done = process.finish(DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("stepped\n")


def test_a_job_that_is_out_of_memory_says_so_and_ends_well(tmp_path: Path) -> None:
    """A batch of terabytes is a result: no iteration, and why; the times of what went before are there."""
    pytest.importorskip("torch")
    figures = tmp_path / "figures.json"
    words = ["dcgan", "--batch", "100000000", "--device", "cpu", "--figures", str(figures)]
    with Script([str(BENCHMARKS / "gpu" / "job.py"), *words], os.environ, loaded="torch") as process:
        done = process.finish(DEADLINE_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert "allocate memory" in found["out_of_memory"]
    assert found["iterations"] == 0
    assert {"python_s", "import_s", "first_call_s", "build_s"} <= set(found["stages"])
