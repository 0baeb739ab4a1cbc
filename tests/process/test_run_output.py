"""What ``zico run`` passes on and what it ends with."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cpu.support.zico_process import ZicoRun, python

from zico.cli import main
from zico.report.attribution import PARTS

TO_BOTH = "import sys; print('to out'); print('to err', file=sys.stderr)"
NO_TEXT = r"import os; os.write(1, b'\xff\xfe\n'); os.write(1, b'no end')"
REDRAWN = r"import sys; [sys.stderr.write(f'\rat {i}') for i in range(1000)]; sys.stderr.write('\rdone\n')"
JOIN = """
import os
from zico.broker.client import BrokerClient
from zico.job.session import socket_to_join
client = BrokerClient(socket_to_join())
members = [client.join(os.environ["ZICO_JOB"], "fake") for _ in range(2)]
print(client.status().jobs[0].name)
"""
JOBS = {
    "a": python(TO_BOTH),
    "long": python(TO_BOTH),
    "bytes": python(NO_TEXT),
    "redrawn": python(REDRAWN),
    "idle": python("pass"),
    "pair": python(JOIN),
    "missing": "no-such-program --x",
    "killed": python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
}


class Ran(NamedTuple):
    """A run of all these jobs that has ended, and its report."""

    run: ZicoRun
    code: int
    folder: Path
    report: dict[str, Any]
    jobs: dict[str, dict[str, Any]]

    def lines(self, stream: str, name: str) -> list[str]:
        """Return what a job has written there."""
        return [line.partition("| ")[2] for line in stream.splitlines() if line.startswith(f"{name:<7} | ")]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run all these jobs, once."""
    folder = tmp_path_factory.mktemp("ran") / "r"
    names = [word for name in JOBS for word in ("--name", name)]
    with ZicoRun("--report", str(folder), *names, *JOBS.values()) as run:
        code = run.finish()
    report = json.loads((folder / "report.json").read_text())
    return Ran(run, code, folder, report, {job["name"]: job for job in report["jobs"]})


def test_lines_carry_the_jobs_name_and_stay_in_their_stream(ran: Ran) -> None:
    """A job's stdout comes out on stdout, its stderr on stderr, each line with the job's name before it."""
    for name in ("a", "long"):
        assert ran.lines(ran.run.stdout, name) == ["to out"]
        assert ran.lines(ran.run.stderr, name) == ["to err"]
    assert "zico:" not in ran.run.stdout


def test_figures_on_stdout_are_alone_there() -> None:
    """With ``--json -`` what jobs print goes to stderr, a word that is no UTF-8 is an escape, and stdout is JSON."""
    with ZicoRun("--quiet", "--json", "-", "--name", "a", f"{python(TO_BOTH)} \udcff") as run:
        assert run.finish() == 0
        assert {"a | to out", "a | to err"} <= set(run.stderr.splitlines())
        (job,) = json.loads(run.stdout)["jobs"]
        assert job["command"].endswith(r"'\udcff'")


def test_bytes_that_are_no_text_and_a_line_without_end_arrive_unchanged(ran: Ran) -> None:
    """Undecodable bytes are passed on as they are; text after the last line end is a line too."""
    assert ran.lines(ran.run.stdout, "bytes") == ["\udcff\udcfe", "no end"]


def test_of_a_redrawn_line_the_last_state_arrives(ran: Ran) -> None:
    """Of a progress bar redrawn a thousand times in an instant, hardly any state but the last is passed on."""
    lines = ran.lines(ran.run.stderr, "redrawn")
    assert lines[-1] == "done"
    assert len(lines) < 10


def test_everything_after_dashes_is_one_command() -> None:
    """After ``--`` nothing is split or taken for an option, and the exit code is the job's own."""
    code = "import sys; print(sys.argv[1:]); sys.exit(7)"
    with ZicoRun("--quiet", "--", sys.executable, "-c", code, "--budget", "a b") as run:
        assert run.finish() == 7
        assert "['--budget', 'a b']" in run.stdout


def test_a_missing_program_is_one_line_and_127_and_the_others_run(ran: Ran) -> None:
    """A command that does not exist is reported with 127, and does not keep the others from running."""
    assert (ran.code, ran.jobs["missing"]["exit_code"]) == (127, 127)
    assert ran.run.stderr.count("the program 'no-such-program' does not exist") == 1
    assert "Traceback" not in ran.run.stderr


def test_the_first_failure_decides_the_exit_code(tmp_path: Path) -> None:
    """The exit code is that of the job which failed first in time, not the first in the list."""
    fifo = tmp_path / "go"
    late = (
        f"import os, sys; os.mkfifo({str(fifo)!r}); print('made', flush=True); open({str(fifo)!r}).read(); sys.exit(3)"
    )
    early = (
        f"import os, sys, time\nwhile not os.path.exists({str(fifo)!r}): time.sleep(.01)\n"
        f"import subprocess; subprocess.Popen(['sh', '-c', 'sleep 0.5; echo > {fifo}'], start_new_session=True,"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\nsys.exit(4)"
    )
    with ZicoRun("--quiet", python(late), python(early)) as run:
        assert run.finish() == 4


def test_a_job_killed_by_a_signal_counts_128_more(ran: Ran) -> None:
    """A job that signal N ended has exit code 128 + N."""
    assert ran.jobs["killed"]["exit_code"] == 128 + 11


def test_a_job_without_a_framework_is_reported_with_zeros(ran: Ran) -> None:
    """The JSON has the promised fields, zeros and a note for a job that imported no framework."""
    assert ran.report["schema_version"] == "zico.report.v1"
    assert (ran.report["device"], ran.report["policy"], ran.report["budget_bytes"]) == ("host", "zico", 64 << 20)
    assert {"peak_granted_bytes", "peak_physical_bytes", "sum_of_job_peaks_bytes"} <= set(ran.report["pool"])
    job = ran.jobs["idle"]
    assert shlex.split(job["command"]) == [sys.executable, "-c", "pass"]
    assert (job["exit_code"], job["iterations"], job["peak_bytes"], job["pool_fraction"]) == (0, 0, 0, 0.0)
    assert job["note"] == "no framework was imported"
    assert job["wall_s"] > 0


def test_the_first_process_that_joins_is_the_job_and_others_are_listed_below_it(ran: Ran) -> None:
    """Of two members of one job the first gives the job's figures, the second is an extra row."""
    assert ran.jobs["pair"]["framework"] == "fake"
    assert [process["name"] for process in ran.jobs["pair"]["other_processes"]] == ["pair.2"]


ITERATIONS, LEAST_S = 130, 0.01
ITERATE = f"""
import time
from zico.heap import allocator
from zico.job.session import attach
session = attach("test")
record, region_bytes = session.heap.record[0], session.membership.region_bytes
for _ in range({ITERATIONS}):
    block = allocator.allocate(record, 8 * region_bytes, 64)
    began_s = time.thread_time()
    while time.thread_time() - began_s < {LEAST_S}:
        pass
    allocator.free(record, block)
    allocator.mark(record)
"""


def test_what_a_jobs_time_went_to_adds_up_to_it(tmp_path: Path) -> None:
    """So it does of two jobs that take turns: each waits for the other, and the kernel tells of both."""
    target = tmp_path / "report.json"
    options = ("--quiet", "--policy", "serial", "--json", str(target))
    with ZicoRun(*options, "--name", "a", "--name", "b", python(ITERATE), python(ITERATE)) as run:
        assert run.finish() == 0, run.stderr
    for job in json.loads(target.read_text())["jobs"]:
        time = job["attribution"]
        assert sum(time[part] for part in PARTS) == pytest.approx(time["elapsed_s"])
        assert min(time[part] for part in PARTS) >= 0
        assert 0 < time["elapsed_s"] <= job["wall_s"]
        assert time["own_iteration_is"] in {"alone", "best"}
        assert time["iterations_s"] >= 0.9 * ITERATIONS * LEAST_S
        assert time["boundary_waited_s"] > 0
        assert time["minor_faults"] >= 0


def test_a_report_directory_gets_all_files(ran: Ran) -> None:
    """``--report`` leaves JSON, Markdown and the record; the picture's absence is explained if nothing was held."""
    names = {path.name for path in ran.folder.iterdir()}
    assert {"report.json", "report.md", "record.npz"} <= names
    assert "report.png" in names or "no picture" in ran.run.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--budget", "0", "true"], "more than zero"),
        (["--json", "/no/such/directory/x.json", "true"], "does not exist"),
        ([], "no command"),
        (["true", "--", "true"], "stands before --"),
    ],
)
def test_nonsense_is_refused_before_anything_starts(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A setting that cannot be used ends the command with 2 and a line that says what can."""
    assert main(["run", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
