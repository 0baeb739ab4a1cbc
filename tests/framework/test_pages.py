"""Python on the pages: every block that stands for a whole runs as it stands, in a job."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from support.harness import ANSWER_S, PATIENCE_S, clean_environment, compile_once, until
from support.scripts import zico_run

ROOT = Path(__file__).parents[2]
LOOP = """
import torch
data = [torch.full((256, 1024), float(n)) for n in range(4)]
train_on = lambda batch: batch.mul(2).sum().item()
"""
"""Behind the import of the adapter: what the loop of a page needs."""
TOLD = """
print(zico.status().name, zico.status().iterations)
"""
WAITING = "import sys, torch, zico\nzico.step()\nprint(len(sys.stdin.readline()))"
"""A job that is there until it is told to end."""


def blocks(page: str) -> list[str]:
    """Return the Python of a page, block by block."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def python(code: str, directory: Path) -> list[str]:
    """Run code outside any pool, in an empty directory below its runtime directory; returns the lines it prints."""
    compile_once()
    work = directory / "work"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment() | {"XDG_RUNTIME_DIR": str(directory), "ZICO": ""},
        cwd=work,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_loops_figures_and_the_end_of_training_run_in_one_job(tmp_path: Path) -> None:
    """README's loop, a logged number of the sweeps' page, and both recipes of the cookbook."""
    adapter, loop = blocks("README.md")
    (logged,) = blocks("docs/sweeps.md")
    leave, figures = blocks("docs/cookbook.md")
    (tmp_path / "train.py").write_text(f"{adapter}{LOOP}{loop}{logged}{figures}{leave}{loop}")
    report, done = zico_run(tmp_path, "--budget", "64MiB", commands={"train": ("train.py",)})
    (job,) = report["jobs"]
    assert job["iterations"] == 4, "those behind zico.leave are no more"
    said = done.stdout.splitlines()
    assert any("zico.log loss=0.31 accuracy=0.9" in line for line in said), said
    assert any(re.search(r"\b4 \d+ \d", line) for line in said), said


def test_a_script_shares_memory_without_zico_run() -> None:
    """The Python page's import, ``zico.join`` and loop, in their order and the other way round."""
    adapter, join, loop, _ = blocks("docs/python.md")
    with tempfile.TemporaryDirectory(prefix="zr-") as runtime:
        told = python(join + adapter + LOOP + loop + TOLD, Path(runtime))
        sockets = Path(runtime, "zico")
        until(lambda: not list(sockets.iterdir()), ANSWER_S, "the broker ends after the script")
    assert told[-1] == "small 4"


def test_jobs_are_run_and_a_daemon_is_changed_from_python() -> None:
    """The Python page's ``zico.run`` and ``zico.Pool``, with a daemon in which a job is called as there."""
    _, _, _, both = blocks("docs/python.md")
    run, of_pool = both.split("\n\n", 2)[1:]
    with tempfile.TemporaryDirectory(prefix="zr-") as runtime:
        directory = Path(runtime)
        (directory / "work").mkdir()
        for name in "ab":
            (directory / "work" / f"{name}.py").write_text("import zico\nfor _ in range(3):\n    zico.step()\n")
        path = str(Path(sys.executable).parent)
        told = python(f"import os, zico\nos.environ['PATH'] = {path!r} + ':' + os.environ['PATH']\n{run}", directory)
        assert re.fullmatch(r"\[\('a', 0, [\d.]+\), \('b', 0, [\d.]+\)\]", told[-1]), told
        zico = shlex.join([sys.executable, "-m", "zico"])
        changed = f"""
import os, subprocess, sys, time
import zico
end_s = time.monotonic() + {PATIENCE_S / 3}
subprocess.run({zico!r}.split() + ["broker", "start", "--budget", "8GiB"], check=True)
try:
    with subprocess.Popen(
        {zico!r}.split() + ["run", "--quiet", "--name", "a", "--", sys.executable, "-c", {WAITING!r}],
        stdin=subprocess.PIPE, text=True,
    ) as job:
        pool = zico.Pool()
        while not [one for one in pool.status().jobs if one.iterations]:
            assert job.poll() is None and time.monotonic() < end_s
{"".join(f"        {line}" for line in of_pool.splitlines(keepends=True))}
        print([(one.name, one.state) for one in pool.status().jobs], pool.status().budget_bytes >> 20)
        pool.resume("a")
        job.communicate("go\\n", timeout=30)
finally:
    subprocess.run({zico!r}.split() + ["broker", "stop"], check=True)
"""
        told = python(changed, directory)
    assert any(re.fullmatch(r"\[\('a', '(?:pausing|paused)'\)\] 6144", line) for line in told), told


def test_what_is_planned_before_it_runs(tmp_path: Path) -> None:
    """The traces' page's ``build``, as a file that ``zico trace --fake`` reads."""
    (build,) = blocks("docs/traces.md")
    (tmp_path / "train.py").write_text(build)
    words = [sys.executable, "-m", "zico", "trace", "--fake", "-o", "step.zst", "train.py:build"]
    done = subprocess.run(
        words, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "step.zst").stat().st_size > 0
