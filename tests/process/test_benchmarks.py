"""The benchmarks run, and what they have written says where it comes from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FIELDS = ("schema_version", "name", "question", "commit", "date", "machine", "versions", "settings")
SMOKE_S = 150.0


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark to its end."""
    argv = [sys.executable, str(BENCHMARKS / name), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=SMOKE_S)


def missing(result: dict[str, Any]) -> list[str]:
    """Return what a result does not say about where it comes from."""
    known = [field for field in FIELDS if result.get(field)]
    on = result.get("machine", {})
    facts = [f"machine.{fact}" for fact in ("cpu", "cores", "memory_bytes", "kernel") if not on.get(fact)]
    return [field for field in FIELDS if field not in known] + facts


def test_heap_smoke_reaches_its_end_and_writes_where_it_is_told(tmp_path: Path) -> None:
    """A smoke run of heap.py measures every part and its result says where it comes from."""
    pytest.importorskip("torch")
    done = run_script("heap.py", "--smoke", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "heap.json").read_text())
    assert missing(result) == []
    assert result["compiled"]["region_turns_over"]["releases_per_pair"] == 1
    assert result["compiled"]["region_stays"]["releases_per_pair"] == 0
    assert "torch.empty" in (tmp_path / "heap.md").read_text()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("planners.py", "PyTorch's caching"),
        ("swap.py", "flow / bound"),
        ("plan_time.py", "* flow:"),
        ("regions.py", "DCGAN"),
        ("zoo.py", "6,342,272"),
        ("following.py", "planned allocation"),
        ("scheduler.py", "a decision with 64 jobs"),
        ("tiers.py", "file, page cache"),
        ("paging.py", "vDNN conv"),
        ("gpu_paging.py", "over the bus, learned prefetch"),
    ],
)
def test_smoke_runs_about_plans_reach_their_end(script: str, said: str, tmp_path: Path) -> None:
    """Smoke runs of what measures planners, models and the following heap end well and say where they come from."""
    if script in ("regions.py", "zoo.py"):
        pytest.importorskip("torch")
    done = run_script(script, "--smoke", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    name = script.removesuffix(".py")
    assert missing(json.loads((tmp_path / f"{name}.json").read_text())) == []
    assert said in (tmp_path / f"{name}.md").read_text()


def test_swap_host_smoke_compares_losses_and_times(tmp_path: Path) -> None:
    """A smoke run of swap_host.py ends with the same losses in less memory, and says what was moved."""
    pytest.importorskip("torch")
    done = run_script("swap_host.py", "--smoke", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "swap_host.json").read_text())
    assert missing(result) == []
    assert [case["out_bytes"] > 0 for case in result["cases"]] == [True]
    assert "losses of all runs are the same bits" in (tmp_path / "swap_host.md").read_text()


def test_a_smoke_run_that_is_told_no_place_writes_nothing() -> None:
    """Smoke figures never land among the published ones."""
    code = "import common; print(common.output_directory(common.parser('').parse_args(['--smoke'])))"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=BENCHMARKS, capture_output=True, text=True, check=True, timeout=SMOKE_S)
    assert done.stdout == "None\n"


SCRIPTS = (
    *("heap", "startup", "colocation", "budget_change", "agreement", "scheduler", "planners"),
    *("regions", "zoo", "following", "tiers", "paging", "swap_host", "page_host", "progress", "gpu", "demo"),
)


@pytest.mark.parametrize("script", [f"{name}.py" for name in SCRIPTS])
def test_each_script_says_how_to_use_it(script: str) -> None:
    """``--help`` works, and for those that measure it names the smoke mode."""
    done = run_script(script, "--help")
    assert done.returncode == 0, done.stderr
    assert ("--smoke" in done.stdout) == (script != "demo.py")


@pytest.mark.parametrize("script", ["gpu.py", "progress.py"])
def test_what_needs_a_gpu_says_so_where_there_is_none(script: str) -> None:
    """Without a driver there is one sentence and a failure, not a table of something else."""
    argv = [sys.executable, str(BENCHMARKS / script), "--smoke"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, env=hidden, capture_output=True, text=True, check=False, timeout=SMOKE_S)
    assert done.returncode == 1
    assert f"{script} measures on a CUDA device, and there is none that Zico can use: " in done.stderr


ON_THE_TWIN = """
from zico.driver.cuda import bindings
from zico.driver.twin.twin import Twin
twin = Twin(total_bytes=8 << 30)
bindings.use(twin)
import gpu
found = gpu.driver_operations()
print(*found["microseconds"], twin.leaks())
twin.close()
"""


def test_driver_operations_are_timed_one_by_one_and_undone() -> None:
    """Over the driver's software twin: each operation has its times, and nothing is left behind."""
    argv = [sys.executable, "-c", ON_THE_TWIN]
    done = subprocess.run(argv, cwd=BENCHMARKS, capture_output=True, text=True, check=True, timeout=SMOKE_S)
    assert done.stdout == "reserve create export import map unmap {}\n"


def test_published_results_say_commit_and_machine() -> None:
    """Every result file carries its commit, its machine and the versions it was measured with."""
    wanting = {path.name: missing(json.loads(path.read_text())) for path in (BENCHMARKS / "results").glob("*.json")}
    assert not any(wanting.values()), wanting


def test_a_result_without_its_origin_is_noticed() -> None:
    """The guard above fails for a result that does not say where it comes from."""
    result = {field: {"python": "3"} for field in FIELDS} | {"machine": {"cpu": "x", "cores": 2, "memory_bytes": 1}}
    assert missing(result) == ["machine.kernel"]
    assert "commit" in missing(result | {"commit": ""})


RATES = """
import together
ends = (tuple(range(1, 21)), tuple(10 + n / 2 for n in range(1, 11)))
run = together.Together(ends, ((), ()), None)
print(run.window_s(), run.rates())
"""


def test_rates_are_taken_where_all_jobs_iterate() -> None:
    """A job's rate counts its iterations between the last warm-up's end and the first job's end."""
    argv = [sys.executable, "-c", RATES]
    done = subprocess.run(argv, cwd=BENCHMARKS, capture_output=True, text=True, check=True, timeout=SMOKE_S)
    assert done.stdout.strip() == "(14.0, 15.0) [1.0, 2.0]"


def test_the_first_hour_is_rehearsed_and_resumed_on_the_twin(tmp_path: Path) -> None:
    """A part leaves its figures and exit code in the summary, and a second run does not repeat it."""
    script = [sys.executable, str(BENCHMARKS / "first_hour.py"), "--out", str(tmp_path), "--twin", "--part", "a"]
    first = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert first.returncode == 0, first.stderr
    part = json.loads((tmp_path / "summary.json").read_text())["parts"]["a"]
    assert (part["state"], part["exit_code"]) == ("passed", 0)
    assert part["figures"]["killed_with_forked_child"]
    assert all(one["met"] is None for one in part["expected"]), "figures of a rehearsal are not judged"
    again = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0
    assert again.stderr.strip() == "a: its result is there"
