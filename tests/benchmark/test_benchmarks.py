"""The benchmarks run, and what they have written says where it comes from."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.scripts import Script

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FIELDS = ("schema_version", "name", "question", "commit", "date", "machine", "versions", "settings")
SMOKE_S = 300.0


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark to its end; PyTorch is loaded when it begins."""
    pytest.importorskip("torch")
    with Script([str(BENCHMARKS / name), *arguments], os.environ, loaded="torch") as process:
        return process.finish(SMOKE_S)


def missing(result: dict[str, Any]) -> list[str]:
    """Return what a result does not say about where it comes from."""
    known = [field for field in FIELDS if result.get(field)]
    on = result.get("machine", {})
    facts = [f"machine.{fact}" for fact in ("cpu", "cores", "memory_bytes", "kernel") if not on.get(fact)]
    return [field for field in FIELDS if field not in known] + facts


PLAIN = ("-p", "no:randomly", "-p", "no:xdist")


def run_micro(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of microbenchmarks to its end."""
    argv = [sys.executable, "-m", "pytest", *PLAIN, "-m", "not long", str(BENCHMARKS / "micro" / module)]
    # As one process that is nobody's worker: pytest-benchmark times nothing in a worker of xdist.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run((*argv, *arguments), env=alone, capture_output=True, text=True, check=False, timeout=SMOKE_S)


def test_microbenchmarks_write_the_form_of_all_results(tmp_path: Path) -> None:
    """pytest-benchmark's figures become a result that says where it comes from, with ratios over the baseline."""
    done = run_micro("test_heap.py", "-k", "not threads", f"--benchmark-json={tmp_path}/heap.json")
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "heap.json").read_text())
    assert missing(result) == []
    libc, goes_back, stays = result["benchmarks"]
    assert goes_back["over_baseline"] == goes_back["ns"]["median"] / libc["ns"]["median"]
    assert [row["releases per pair"] for row in (goes_back, stays)] == [1, 0]
    assert "over C library" in (tmp_path / "heap.md").read_text()
    assert "over C library" in done.stdout


@pytest.mark.parametrize("module", ["pool", "heap", "scheduler", "planners", "plan_time", "startup"])
def test_microbenchmarks_reach_their_end(module: str) -> None:
    """Each function that is timed works when it is called once; of starts and hard instances a part."""
    pytest.importorskip("torch")
    hardest = "benchmarks/micro/test_planners.py::test_hard_instance[A]"
    chosen = {"startup": ("-k", "torch and run"), "planners": ("--deselect", hardest)}
    done = run_micro(f"test_{module}.py", "--benchmark-disable", *chosen.get(module, ()))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("swap.py", "flow / bound"),
        ("regions.py", "DCGAN"),
        ("torch_calls.py", "torch.empty"),
        ("zoo.py", "6,342,272"),
        ("marks.py", "beside another: H100, bfloat16"),
        ("held.py", "DCGAN"),
        ("forecast.py", "perceptron"),
        ("following.py", "planned allocation"),
        ("tiers.py", "file, page cache"),
        ("gist.py", "MaxPool2DWithIndices.self, Relu.result"),
        ("paging.py", "vDNN conv"),
    ],
)
def test_smoke_runs_about_plans_reach_their_end(script: str, said: str, tmp_path: Path) -> None:
    """Smoke runs of what measures planners, models and the following heap end well and say where they come from.

    Those about GPUs are parts of the rehearsal of a run there (``test_gpu_run.py``).
    """
    done = run_script(script, "--smoke", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = tmp_path / script
    assert missing(json.loads(result.with_suffix(".json").read_text())) == []
    assert said in result.with_suffix(".md").read_text()


def test_swap_host_smoke_compares_losses_and_times(tmp_path: Path) -> None:
    """A smoke run of swap_host.py ends with the same losses in less memory, and says what was moved."""
    done = run_script("swap_host.py", "--smoke", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "swap_host.json").read_text())
    assert missing(result) == []
    assert [case["out_bytes"] > 0 for case in result["cases"]] == [True]
    assert "losses of all runs are the same bits" in (tmp_path / "swap_host.md").read_text()


def test_compatibility_smoke_compares_losses_with_those_without_zico(tmp_path: Path) -> None:
    """A smoke run of compatibility.py prepares two scripts of its own; alone and as a pair they end as without Zico."""
    done = run_script("compatibility.py", "--smoke", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "compatibility.json").read_text())
    assert missing(result) == []
    assert sorted(result["alone"]) == ["tiny-1", "tiny-2"]
    (found,) = result["pairs"].values()
    assert found["summary"]["of_possible"] > 0
    told = (tmp_path / "compatibility.md").read_text()
    assert "| equal / equal |" in told
    assert "differ" not in told


def test_idle_jobs_smoke_compares_with_one_after_the_other(tmp_path: Path) -> None:
    """A smoke run of idle_jobs.py says of three jobs how many times as fast as one after the other they are."""
    done = run_script("idle_jobs.py", "--smoke", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "idle_jobs.json").read_text())
    assert missing(result) == []
    (group,) = result["groups"].values()
    (done_round,) = group["rounds"]
    together, alone = (
        {run["label"]: run["rates"] for run in done_round}[of] for of in ("zico 70 %", "one after the other")
    )
    expected = sum(rate / of for rate, of in zip(together, alone, strict=True))
    assert group["summary"]["zico 70 %"]["over_one_by_one"]["median"] == expected
    assert group["summary"]["zico 70 %"]["losses_equal"]


def test_frozen_smoke_holds_the_base_once(tmp_path: Path) -> None:
    """A smoke run of frozen.py ends with the losses alone, and both jobs had the base that the pool had once."""
    done = run_script("frozen.py", "--smoke", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "frozen.json").read_text())
    assert missing(result) == []
    shared, base = result["shared"], result["base_bytes"]
    assert base > 0
    assert shared["pool"]["peak_shared_bytes"] == base
    assert [one["shared_bytes"] for one in shared["jobs"]] == [base, base]
    assert [one["shared_bytes"] for one in result["not shared"]["jobs"]] == [0, 0]
    for way in (shared, result["not shared"]):
        assert [*map(list, way["losses"])] == result["alone_losses"]


@pytest.mark.parametrize("kind", ["notebook", "evaluating", "recurrent", "rl"])
def test_an_idle_job_does_as_many_iterations_as_it_is_told(kind: str, tmp_path: Path) -> None:
    """A cell, an epoch, a text or a rollout counts as one, however many batches and steps it has."""
    size = ("--depth", "8", "--batch", "16", "--pause", "0")
    done = run_script("idle_job.py", kind, *size, "--iterations", "2", "--losses", str(tmp_path / "losses"))
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "losses").read_text())) == 2
    assert done.stdout.count("iteration ") == 2


def test_threads_smoke_bounds_what_the_lock_costs(tmp_path: Path) -> None:
    """A smoke run of threads.py takes each pair of a job as dear as those of as many threads that do nothing else."""
    done = run_script("threads.py", "--smoke", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "threads.json").read_text())
    assert missing(result) == []
    loop = result["loop_ns"]["pool"]
    for job in result["jobs"].values():
        assert job["losses_equal"]
        assert job["allocations"] > 0
        pairs_per_s = job["allocations"] / sum(job["seconds"]["zico"])
        threads = 4 if job["kind"] == "loaders" else 2  # a third one trains, and three are not timed
        cores = min(threads, os.cpu_count() or 1)
        expected = pairs_per_s * max(0.0, loop[str(threads)] * cores - loop["1"]) / 1e9
        assert job["summary"]["bound"] == pytest.approx(expected)


def test_what_is_possible_for_scripts_ends_with_the_shorter_one() -> None:
    """Two jobs of 10 s at half speed: the shorter of 10 and 20 s ends at 20 s, the other's last 10 s are its own."""
    code = "from compatibility import expected; print(expected([10, 10], [0.5, 0.5]), expected([10, 20], [0.5, 0.5]))"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=BENCHMARKS, capture_output=True, text=True, check=True, timeout=SMOKE_S)
    both, uneven = map(float, done.stdout.split())
    assert both == 0.5
    assert uneven == (10 / 20 + 20 / 30) / 2


def test_a_committed_result_is_simulated_again(tmp_path: Path) -> None:
    """What was real stays; beside it stand what was simulated then and what today's rules make of it."""
    done = run_script("agreement.py", "--form", "paced", "--again", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "agreement-paced-again.json").read_text())
    assert missing(result) == []
    rows = [row for pair in result["pairs"].values() for row in pair]
    assert all(0.9 < row[when] / row["real"] < 1.1 for row in rows for when in ("then", "now"))


def test_the_evaluation_is_of_the_scheduler_of_today(tmp_path: Path) -> None:
    """Rows of the committed results come out again, figure by figure; the one that was changed here does not.

    Where others differ, too, ``make evaluation`` writes results and page anew.
    """
    for name in ("paper-budget", "paper-identical", "paper-many"):
        result = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
        if name == "paper-budget":
            result["roofline"]["claims"]["periods"][1]["gap_ms"][0] += 1e-6
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    done = run_script("evaluation.py", "--check", "-o", str(tmp_path))
    assert done.returncode == 1, done.stderr
    first, *others = done.stdout.splitlines()
    assert first.startswith("1 of 40 rows"), done.stdout
    assert others == ["figure 10, claims, roofline"]


IN_A_CHECKOUT = """
import sys, pathlib, common
common.ROOT = pathlib.Path(sys.argv[1])
first = common.document("a", "?", {})["commit"]
(common.ROOT / "a.md").write_text("the first part's result")
print(len(first), first == common.document("b", "?", {})["commit"])
"""


def test_a_run_of_several_parts_names_the_tree_that_it_began_with(tmp_path: Path) -> None:
    """The first part's results make the tree differ; they are none of what the second one runs."""
    (tmp_path / "a.md").write_text("before")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "--quiet"), ("add", "a.md"), (*identity, "commit", "--quiet", "-m", "a")):
        subprocess.run(("git", "-C", str(tmp_path), *command), check=True, timeout=SMOKE_S)
    argv = [sys.executable, "-c", IN_A_CHECKOUT, str(tmp_path)]
    done = subprocess.run(argv, cwd=BENCHMARKS, capture_output=True, text=True, check=True, timeout=SMOKE_S)
    assert done.stdout == "40 True\n"


def test_a_smoke_run_that_is_told_no_place_writes_nothing() -> None:
    """Smoke figures never land among the published ones."""
    code = "import common; print(common.output_directory(common.parser('').parse_args(['--smoke'])))"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=BENCHMARKS, capture_output=True, text=True, check=True, timeout=SMOKE_S)
    assert done.stdout == "None\n"


def test_results_go_below_build_unless_a_place_is_named() -> None:
    """A benchmark that is told no place leaves the published figures alone; a relative place is one, too."""
    code = """
import os, common
os.chdir(common.ROOT)
parser = common.parser("")
assert common.output_directory(parser.parse_args([])) == common.ROOT / "build" / "benchmarks"
assert common.output_directory(parser.parse_args(["-o", "benchmarks/results"])) == common.RESULTS
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("keep", "place"), [("", "build/benchmarks"), ("1", "benchmarks/results")])
def test_make_writes_over_published_results_only_when_asked(keep: str, place: str) -> None:
    """Each benchmark of ``make bench-all`` writes below build/, and with ``KEEP=1`` over the published results."""
    targets = ("bench-all", "bench-compare", "bench-compare-pairs", "bench-ray", "bench-gpu")
    argv = ["make", "--dry-run", "--no-print-directory", *targets, f"KEEP={keep}", "OFFLINE="]
    done = subprocess.run(argv, cwd=BENCHMARKS.parent, capture_output=True, text=True, check=True, timeout=SMOKE_S)
    lines = [line for line in done.stdout.splitlines() if re.search(r"benchmarks/\S+\.py", line)]
    written = [line for line in lines if "evaluation.py" not in line]
    assert len(written) > 40
    assert [line for line in written if f"-o {place}" not in line and f"json={place}/" not in line] == []


@pytest.mark.parametrize(
    "script",
    [
        "torch_calls.py",
        "compare_commits.py",
        "compare_pairs.py",
        "colocation.py",
        "budget_change.py",
        "agreement.py",
        "page_host.py",
        "demo.py",
    ],
)
def test_each_script_says_how_to_use_it(script: str) -> None:
    """``--help`` works, and for those that measure it names the smoke mode; the others' smoke mode is run here."""
    done = run_script(script, "--help")
    assert done.returncode == 0, done.stderr
    assert ("--smoke" in done.stdout) == (script != "demo.py")


def test_what_needs_a_gpu_says_so_where_there_is_none() -> None:
    """Without a driver there is one sentence and a failure, not a table of something else."""
    argv = [sys.executable, str(BENCHMARKS / "gpu" / "progress.py")]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, env=hidden, capture_output=True, text=True, check=False, timeout=SMOKE_S)
    assert done.returncode == 1
    assert "progress.py measures on a CUDA device, and there is none that Zico can use: " in done.stderr


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


def test_save_nets_smoke_has_a_row_for_each_share(tmp_path: Path) -> None:
    """A smoke run of save_nets.py judges some planners, and says where ours is ahead or behind."""
    done = run_script("save_nets.py", "--smoke", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "save_nets.json").read_text())
    assert missing(result) == []
    rows = result["nets"]["stand-in"]["rows"]
    assert [row["share"] for row in rows] == [0.8, 0.65, 0.5, 0.4]
    assert all(row["overhead"][name] == 0 for row in rows for name in ("zico", "portfolio")), "its links are fast"


def test_job_planner_smoke_has_a_row_for_each_share(tmp_path: Path) -> None:
    """A smoke run of job_planner.py judges both planners, and says how often the one in jobs is behind."""
    done = run_script("job_planner.py", "--smoke", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "job_planner.json").read_text())
    assert missing(result) == []
    rows = result["iterations"]["stand-in"]["rows"]
    assert [row["share"] for row in rows] == [0.6, 0.5, 0.4]
    assert all(row["planner"]["duration_ns"] <= row["portfolio"]["duration_ns"] for row in rows)


def test_batch_factors_smoke_finds_larger_batches(tmp_path: Path) -> None:
    """A smoke run of batch_factors.py asks two planners for the largest batch of a small net."""
    done = run_script("batch_factors.py", "--smoke", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "batch_factors.json").read_text())
    assert missing(result) == []
    (row,) = result["batches"]
    found = row["batches"]
    assert row["plain"] < found["capuchin"]["batch"] <= found["zico"]["batch"] <= row["most"]


@pytest.mark.parametrize("script", ["save_nets.py", "rounding.py", "batch_factors.py"])
def test_the_text_of_committed_figures_is_that_of_the_script(script: str, tmp_path: Path) -> None:
    """``--again`` measures nothing, and writes the files that are there."""
    done = run_script(script, "--again", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for written in tmp_path.iterdir():
        assert written.read_text() == (BENCHMARKS / "results" / written.name).read_text(), written.name


def test_save_planners_smoke_compares_losses(tmp_path: Path) -> None:
    """A smoke run of save_planners.py has the losses of the job alone by each name; one drops tensors, one pages."""
    done = run_script("save_planners.py", "--smoke", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (job,) = json.loads((tmp_path / "save_planners.json").read_text())["jobs"]
    assert [row["planner"] for row in job["rows"]] == ["swdoa", "echo", "sentinel"]
    assert job["rows"][1]["rounds"][0]["dropped_bytes"] > 0
    assert job["rows"][2]["rounds"][0]["saving"]["planner"] == "sentinel"
