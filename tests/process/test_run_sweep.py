"""``zico run`` with a grid: jobs queue, start as others end, run again alone after out of memory, and are resumed."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.zico_process import ZicoRun, descendants, survivors
from support.harness import PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

JOB = PROCESS / "sweep_job.py"
REGIONS = 2
PEAK = "12MiB"
"""One region of 4 MiB more in each iteration."""


@pytest.fixture
def let_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Give what lets the job of a parameter x end; runs are started in a directory of their own."""
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as opened:
        ends = {}
        for x in "123":
            os.mkfifo(f"fifo{x}")
            ends[x] = os.open(f"fifo{x}", os.O_RDWR)
            opened.callback(os.close, ends[x])
        yield lambda x: (os.write(ends[x], b"\n"), None)[1]


def command(*arguments: str) -> str:
    """Return the command of the jobs."""
    return shlex.join([sys.executable, str(JOB), str(REGIONS), "fifo{x}", *arguments])


def running(run: ZicoRun) -> set[str]:
    """Return the parameters of the jobs that run now."""
    found = set()
    for pid in descendants(run.process.pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found |= {word.decode()[-1] for word in words if word.startswith(b"fifo")}
    return found


def results(path: str) -> dict[str, dict[str, Any]]:
    """Return what ``--json`` wrote, by job."""
    report = json.loads(Path(path).read_text())
    assert report["schema_version"] == "zico.sweep-results.v1"
    return {job["name"]: job for job in report["jobs"]}


def test_at_most_two_run_and_the_next_starts_when_one_ends(let_end: Callable[[str], None]) -> None:
    """Jobs start in their order; the figures of all are in the results."""
    with ZicoRun("--at-most", "2", "--grid", "x=1..3", "--json", "r.json", command()) as run:
        run.read_until("x=1 | begun")
        run.read_until("x=2 | begun")
        assert running(run) == {"1", "2"}
        let_end("2")
        run.read_until("x=3 | begun")
        assert running(run) == {"1", "3"}
        let_end("1")
        let_end("3")
        assert (run.finish(), run.leftovers) == (0, [])
        assert "3 of 3 jobs have ended, 0 of them failed" in run.stderr
    found = results("r.json")
    assert [found[f"x={x}"]["exit_code"] for x in "123"] == [0, 0, 0]
    assert {job["peak_bytes"] for job in found.values()} == {12 << 20}
    assert min(job["iterations"] for job in found.values()) > 0


def test_auto_starts_one_and_the_next_when_its_profile_is_known(let_end: Callable[[str], None]) -> None:
    """None starts beside it where the budget is one job's peak, though the next is known by then."""
    with ZicoRun("--grid", "x=1..3", command(), ZICO_BUDGET=PEAK) as run:
        run.read_until("x=1 | begun")
        assert running(run) == {"1"}
        let_end("1")
        run.read_until("x=2 | begun")
        assert running(run) == {"2"}
        let_end("2")
        let_end("3")
        assert run.finish() == 0
    if len(os.sched_getaffinity(0)) > 1:
        with ZicoRun("--grid", "x=1..2", command(), ZICO_BUDGET="64MiB") as run:
            run.read_until("x=2 | begun")
            assert running(run) == {"1", "2"}
            let_end("1")
            let_end("2")
            assert run.finish() == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="auto starts one job for each processor")
def test_auto_does_not_wait_for_a_profile_that_never_comes(let_end: Callable[[str], None]) -> None:
    """Once a job has ended without an iteration, those of its command count with its peak, and one line says so."""
    with ZicoRun("--grid", "x=1..3", command("--evaluate"), ZICO_BUDGET="16MiB") as run:
        run.read_until("x=1 | begun")
        assert running(run) == {"1"}
        let_end("1")
        run.read_until("x=3 | begun")
        assert running(run) == {"2", "3"}
        let_end("2")
        let_end("3")
        assert run.finish() == 0
    told = "x=1 has ended without a profile: jobs of its command count with the most that one has held, 8 MiB so far"
    assert run.stderr.count(told) == 1


CLOCK = """
import os
import sys

if "run" in sys.orig_argv:
    from zico.cli.room import RoomByFit

    RoomByFit.__init__.__kwdefaults__["clock"] = lambda: 1000.0 * os.path.exists("later")
"""
"""A run's own process waits for a profile until there is a file called ``later``."""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="auto starts one job for each processor")
def test_auto_does_not_wait_for_a_job_that_ends_no_iteration(let_end: Callable[[str], None], tmp_path: Path) -> None:
    """After a while its peak so far counts, as its broker knows it, while it runs on."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(CLOCK)
    words = ("--grid", "x=1..2", command("--evaluate"))
    with ZicoRun(*words, ZICO_BUDGET="16MiB", PYTHONPATH=str(site)) as run:
        run.read_until("x=1 | begun")
        assert running(run) == {"1"}
        Path("later").touch()
        run.read_until("x=2 | begun")
        assert running(run) == {"1", "2"}
        let_end("1")
        let_end("2")
        assert run.finish() == 0
    told = "x=1 has no profile after 120 s: jobs of its command count with the most that one has held, 8 MiB so far"
    assert run.stderr.count(told) == 1


def test_a_signal_ends_a_sweep_cleanly_and_resume_runs_what_is_left(let_end: Callable[[str], None]) -> None:
    """What the signal has ended runs again, what had ended does not; a torn last line is no error."""
    with ZicoRun("--at-most", "1", "--grid", "x=1..3", "--json", "r.json", command()) as run:
        let_end("1")
        run.read_until("x=2 | begun")
        below = descendants(run.process.pid)
        run.process.send_signal(signal.SIGINT)
        code = run.finish()
        assert (code, survivors(below), run.leftovers) == (130, [], [])
        assert "2 are left: zico run --resume sweep_job.sweep.jsonl" in run.stderr
    assert [results("r.json")[f"x={x}"]["exit_code"] for x in "123"] == [0, None, None]
    with Path("sweep_job.sweep.jsonl").open("a") as torn:
        torn.write('{"name":"x=2","exit_co')
    let_end("2")
    let_end("3")
    with ZicoRun("--resume", "sweep_job.sweep.jsonl") as run:
        assert run.finish() == 0
        assert "x=1 | " not in run.stdout
    assert [results("r.json")[f"x={x}"]["exit_code"] for x in "123"] == [0, 0, 0]


def test_a_job_without_memory_runs_again_alone(let_end: Callable[[str], None]) -> None:
    """It waits until all others have ended, and the results say that it was tried again."""
    for x in "23":
        Path(f"marker{x}").touch()
    with ZicoRun("--at-most", "3", "--grid", "x=1..3", "--json", "r.json", command("marker{x}")) as run:
        run.read_until("x=1 ran out of memory: it runs again, alone, after all others")
        run.read_until("x=2 | begun")
        run.read_until("x=3 | begun")
        assert running(run) == {"2", "3"}
        let_end("2")
        run.read_until("x=2 ended with exit code 0")
        assert running(run) == {"3"}
        let_end("3")
        run.read_until("x=1+again | begun")
        assert running(run) == {"1"}
        let_end("1")
        assert run.finish() == 0
        assert "again, alone" in run.stderr
    found = results("r.json")
    assert [(found[f"x={x}"]["tries"], found[f"x={x}"]["alone"]) for x in "123"] == [(2, True), (1, False), (1, False)]


def test_what_jobs_log_is_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of each number is a column and in the figures; what is no number is left out."""
    monkeypatch.chdir(tmp_path)
    code = (
        "import zico; zico.log(loss=9); zico.log(loss={x} / 4, steps=3); print('zico.log best=nan worse', flush=True)"
    )
    options = ("--json=r.json", "--quiet", "--grid", "x=1,2")
    with ZicoRun(*options, shlex.join([sys.executable, "-c", code])) as run:
        assert run.finish() == 0, run.stderr
    assert {name: job["logged"] for name, job in results("r.json").items()} == {
        "x=1": {"loss": 0.25, "steps": 3},
        "x=2": {"loss": 0.5, "steps": 3},
    }
    header = next(line for line in run.stderr.splitlines() if "|job" in line)
    assert [word for word in header.replace("|", " ").split() if word in ("loss", "steps", "best")] == ["loss", "steps"]
