"""``zico run --compute`` on the host: real jobs, and the processors that they find."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
from cpu.support.zico_process import ZicoRun, customised, fifos, python
from rich.console import Console

from zico.cli.top_screen import frame
from zico.launch.client import Pool
from zico.launch.processors import Processors

HERE = Processors.usable()
SHOW = "import os; print('has', *sorted(os.sched_getaffinity(0)), flush=True)"
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"
JOINS = f"from zico.job.session import attach; attach('test'); {SHOW}; open('fifo{{}}').readline()"
REFUSES = """
import os
def refuse(*_):
    raise PermissionError(1, "Operation not permitted")
os.sched_setaffinity = refuse
"""
two_processors = pytest.mark.skipif(HERE.count < 2, reason="two jobs are to have different processors")


def processors_of(run: ZicoRun, name: str) -> set[int]:
    """Return the processors that a job has found."""
    (line,) = (line for line in run.stdout.splitlines() if f"{name} | has " in line)
    return set(map(int, line.partition(" has ")[2].split()))


@two_processors
def test_jobs_with_shares_have_processors_of_their_own(tmp_path: Path) -> None:
    """Half each, and different ones, also for what they start; who has no share has all. The pool and figures tell."""
    jobs = [python(JOINS.format(1)), python(CHILD.format(SHOW)), python(SHOW)]
    options = ("--compute", "a=50%", "--compute", "b=50%", "--name", "a", "--name", "b", "--name", "c")
    with fifos(tmp_path, "1") as ends, ZicoRun(*options, "--json", "r.json", *jobs) as run:
        for name in "abc":
            run.read_until(f"{name} | has ")
        a, b, c = (processors_of(run, name) for name in "abc")
        (socket,) = run.runtime.glob("zico/run-*/*.sock")
        status = Pool(socket=socket).status()
        os.write(ends["1"], b"\n")
        assert run.finish() == 0, run.stderr
        figures = json.loads(Path("r.json").read_text())["jobs"]
    half = HERE.count // 2
    assert (len(a), len(b), a & b, c) == (half, half, set(), set(HERE.numbers))
    assert [job.share.compute for job in status.jobs] == [half / HERE.count]
    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(frame([(socket, status)], 160))
    assert f"{half / HERE.count:.0%}" in console.export_text().splitlines()[-1]
    assert [job["compute"] for job in figures] == [half / HERE.count] * 2 + [1.0], "b never joined"


def test_what_is_no_whole_processor_is_said(tmp_path: Path) -> None:
    """One line has what the job gets instead, which is what figures have."""
    options = ("--compute", "a=1%", "--name", "a", "--json", "r.json")
    with contextlib.chdir(tmp_path), ZicoRun(*options, python(SHOW)) as run:
        assert run.finish() == 0, run.stderr
        (job,) = json.loads(Path("r.json").read_text())["jobs"]
    assert len(processors_of(run, "a")) == 1
    has = 1 / HERE.count
    assert f"a gets 1 of {HERE.count} processors, {has:.0%} and not 1%: a share is in whole ones" in run.stderr
    assert job["compute"] == has


def test_a_kernel_that_refuses_ends_no_job(tmp_path: Path) -> None:
    """One line says that the job runs on all processors, and its figures say so."""
    site = customised(tmp_path / "site", REFUSES)
    options = ("--compute", "a=1%", "--name", "a", "--json", "r.json")
    with contextlib.chdir(tmp_path), ZicoRun(*options, python(SHOW), **site) as run:
        assert run.finish() == 0, run.stderr
        (job,) = json.loads(Path("r.json").read_text())["jobs"]
    assert processors_of(run, "a") == set(HERE.numbers)
    assert "zico: a runs on all processors: the kernel does not limit it (Operation not permitted)" in run.stderr
    assert job["compute"] == 1.0


@two_processors
def test_jobs_of_a_sweep_have_their_owners_share(tmp_path: Path) -> None:
    """Each time one ends, the next one gets its processors."""
    job = python(f"{SHOW}; print({{x}})")
    options = ("--grid", "x=1..3", "--at-most", "1", "--name", "a", "--compute", "a=50%")
    with contextlib.chdir(tmp_path), ZicoRun(*options, job) as run:
        assert run.finish() == 0, run.stderr
    got = [processors_of(run, f"x={x}") for x in (1, 2, 3)]
    assert got == [set(HERE.numbers[: HERE.count // 2])] * 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--compute", "30%"), "--compute: '30%' is not NAME=VALUE: give the job's name too, such as a=30%"),
        (("--compute", "b=30%"), "--compute: no job is called 'b': there are a"),
        (
            ("--compute", "a=0%"),
            "--compute: '0%' is not a share of the processors: give one above 0%, at most 100%, such as 30%",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(words: tuple[str, ...], says: str) -> None:
    """Exit code 2, and nothing has started."""
    with ZicoRun(*words, "--name", "a", python("print('ran')")) as run:
        assert (run.finish(), run.stdout, run.leftovers) == (2, "", [])
    assert run.stderr == f"zico: {says}\n"
