"""Figures: JSON form, closing table, Markdown, progress, files."""

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from zico.base.decoding import to_json
from zico.base.errors import ConfigError
from zico.base.settings import DeviceMemory, Setting, resolve
from zico.base.units import GIB, MIB
from zico.broker.protocol import messages as m
from zico.broker.protocol.messages import JobReport, PoolReport, RefusedRequest, Report, Saving, Status, WaitKind
from zico.cli.display import live_table, memory_bar, plain_lines
from zico.launch.figures import JobOutcome, Outcome, run_report
from zico.launch.jobs import split_commands
from zico.report.files import markdown, write_atomically
from zico.report.model import (
    JobFigures,
    JobProgress,
    OutsideProcess,
    PoolFigures,
    PoolProgress,
    RunReport,
    Snapshot,
    owner_of,
    read_record,
    together,
)
from zico.report.table import attention_lines, pool_lines, saving_rows, write_table

PROMISED_JOB = {
    "name",
    "command",
    "exit_code",
    "iterations",
    "wall_s",
    "iterations_per_s",
    "waited_s",
    "peak_bytes",
    "peak_tensor_bytes",
    "persistent_bytes",
    "pool_fraction",
}
PROMISED_POOL = {"peak_granted_bytes", "peak_physical_bytes", "sum_of_job_peaks_bytes"}
SETTINGS = resolve({"budget": Setting("64MiB", "--budget")}, DeviceMemory(GIB, GIB), ["zico"])


def job_report(name: str, peak_bytes: int = 40 * MIB, oom: RefusedRequest | None = None) -> JobReport:
    """Return the broker's figures of a job."""
    return JobReport(
        job=0,
        name=name,
        pid=1,
        framework="torch",
        state="gone",
        iterations=10,
        iterations_per_s=2.0,
        waited_s=1.5,
        boundary_waited_s=1.0,
        peak_bytes=peak_bytes,
        peak_tensor_bytes=peak_bytes - MIB,
        persistent_bytes=8 * MIB,
        requested_bytes=100,
        pooled_bytes=99,
        spilled_bytes=0,
        pool_fraction=0.99,
        maps=3,
        oom=oom,
    )


def outcome(*members: JobReport, commands: tuple[str, ...] = ("python a.py", "python b.py")) -> Outcome:
    """Return how a run of two jobs ended."""
    pool = PoolReport(
        region_bytes=4 * MIB,
        peak_granted_bytes=60 * MIB,
        peak_physical_bytes=61 * MIB,
        recoveries=0,
        stalls=0,
    )
    ended = tuple(JobOutcome(command, 0, 3.0, 9.0) for command in split_commands(commands))
    return Outcome(ended, (Report(pool=pool, jobs=members, jobs_left_out=0),))


def test_the_json_has_every_promised_field_and_reads_back() -> None:
    """The report's JSON has the schema's fields under their names, and reading it gives the same report."""
    report = run_report(outcome(job_report("a"), job_report("b", 30 * MIB)), [SETTINGS])
    written = json.loads(to_json(report))
    assert written["schema_version"] == "zico.report.v1"
    assert {"device", "policy", "budget_bytes", "pool", "jobs"} <= set(written)
    assert set(written["pool"]) >= PROMISED_POOL
    assert all(set(job) >= PROMISED_JOB for job in written["jobs"])
    assert written["pool"]["sum_of_job_peaks_bytes"] == 70 * MIB
    assert msgspec.json.decode(to_json(report), type=RunReport) == report


def test_a_file_of_before_reads() -> None:
    """A ``zico.report.v1`` that lacks every field which was added to processes since reads as it was meant."""
    process = {"name": "a.2", "pid": 7, "framework": "torch", "iterations": 1, "iterations_per_s": 0.0} | {
        "waited_s": 0.5, "peak_bytes": MIB, "peak_tensor_bytes": 5, "persistent_bytes": 6, "pool_fraction": 0.25,
    }  # fmt: skip
    job = process | {"name": "a", "command": "x", "exit_code": 0, "wall_s": 2.0, "other_processes": [process]}
    old = {"device": "host", "policy": "zico", "budget_bytes": MIB, "pool": {"stalls": 3}, "jobs": [job]}
    report = msgspec.json.decode(json.dumps(old), type=RunReport)
    assert (report.pool.stalls, report.jobs[0].framework, report.jobs[0].wall_s) == (3, "torch", 2.0)
    assert (report.jobs[0].other_processes[0].name, report.jobs[0].other_processes[0].waited_s) == ("a.2", 0.5)


def test_a_jobs_first_process_stands_for_it_and_others_are_listed() -> None:
    """Further processes of a job become extra rows with numbers; a process of nobody's is left out of the jobs."""
    report = run_report(
        outcome(job_report("a"), job_report("a", 4 * MIB), job_report("b.2"), job_report("x")), [SETTINGS]
    )
    assert [process.name for process in report.jobs[0].other_processes] == ["a.2"]
    assert report.jobs[0].peak_bytes == 40 * MIB
    assert report.jobs[1].peak_bytes == 40 * MIB
    assert owner_of("x", {"a", "b"}) is None
    assert owner_of("a.b", {"a"}) is None


def test_without_the_brokers_figures_the_notes_say_so() -> None:
    """If the broker ended early, the commands' own figures are there, and the note says why the others are zero."""
    lost = Outcome(outcome().jobs, (None,))
    assert {job.note for job in run_report(lost, [SETTINGS]).jobs} == {
        "there are no figures: the broker did not answer"
    }
    early = Outcome(outcome().jobs, (None,), never_ready=frozenset({0}))
    assert {job.note for job in run_report(early, [SETTINGS]).jobs} == {"it ended before the broker was ready"}
    assert {job.note for job in run_report(outcome(), [SETTINGS]).jobs} == {"no framework was imported"}


def test_what_zico_said_inside_a_job_becomes_its_note() -> None:
    """Why a framework could not be shared is the note of a job that never joined."""
    (command,) = split_commands(["python a.py"])
    told = m.Outside(name="a", pid=7, framework="torch", reason="no such function")
    seen = (
        OutsideProcess(pid=7, framework="torch", reason="because", memory_bytes=3 * MIB),
        OutsideProcess(pid=8, framework="jax", reason="because"),
    )
    (brokers,) = outcome().reports
    assert brokers is not None
    ended = (JobOutcome(command, 0, 1.0, 1.0, outside=seen),)
    report = run_report(Outcome(ended, (msgspec.structs.replace(brokers, outside=(told,)),)), [SETTINGS])
    (job,) = report.jobs
    assert job.note == "process 7 uses torch outside the budget (it has had 3 MiB of memory): no such function"
    assert [(one.pid, one.reason) for one in job.outside] == [(7, "no such function"), (8, "because")]
    lines = list(attention_lines(report))
    assert [line for line in lines if "outside" in line] == [f"a: {one.text}" for one in job.outside]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"requested_bytes": 0}, "a: all its tensors are smaller than those of the pool (64 KiB, or ZICO_THRESHOLD)"),
        ({"requested_bytes": 0, "iterations": 0}, "a: Zico saw no iteration end, and all its tensors are smaller"),
        ({"requested_bytes": 1}, ""),
        ({"requested_bytes": 0, "oom": RefusedRequest(request_bytes=1, held_bytes=0)}, "a ran out of memory"),
    ],
)
def test_a_job_without_a_tensor_in_the_pool_has_a_line_that_says_why(fields: dict[str, Any], said: str) -> None:
    """A small net's tensors may all be below the threshold, and 0.0 % would look like a fault."""
    report = run_report(outcome(msgspec.structs.replace(job_report("a"), **fields)), [SETTINGS])
    lines = [line for line in attention_lines(report) if line.startswith("a")]
    assert len(lines) == bool(said)
    assert all(line.startswith(said) for line in lines)


def test_a_framework_that_was_loaded_is_not_said_to_be_missing() -> None:
    """A launcher whose processes all ended before they joined has imported one."""
    (command,) = split_commands(["python a.py"])
    (job,) = run_report(
        Outcome((JobOutcome(command, 0, 1.0, 1.0, loaded="torch"),), outcome().reports), [SETTINGS]
    ).jobs
    assert job.note == "torch was imported, but no process joined the pool"


def test_a_process_in_the_pool_is_not_reported_as_outside() -> None:
    """One that was seen before it joined counts as what it is in the end."""
    (command,) = split_commands(["python a.py"])
    seen = (OutsideProcess(pid=job_report("a").pid, framework="torch", reason="because"),)
    ended = (JobOutcome(command, 0, 1.0, 1.0, outside=seen),)
    (job,) = run_report(Outcome(ended, outcome(job_report("a")).reports), [SETTINGS]).jobs
    assert job.outside == ()


def test_the_table_is_plain_where_there_is_no_terminal() -> None:
    """The closing table has every figure, no escape sequence and no character beyond ASCII in a file."""
    out = io.StringIO()
    write_table(run_report(outcome(job_report("a"), job_report("a.2")), [SETTINGS]), out)
    text = out.getvalue()
    assert text.isascii()
    assert "\x1b" not in text
    row = next(line for line in text.splitlines() if line.startswith("|a "))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "a", "0", "10", "2.00", "1.5 s", "40 MiB", "39 MiB", "8 MiB", "99.0%",
    ]  # fmt: skip
    assert "|  a.2" in text
    assert "peak granted 60 MiB, peak physical by the kernel 61 MiB, sum of the jobs' own peaks 80 MiB" in text
    assert "budget 64 MiB (--budget)" in text


def test_evaluations_and_parts_have_columns_where_there_are_any() -> None:
    """The closing table and Markdown tell iterations, evaluations and parts apart, of every process."""
    second = msgspec.structs.replace(job_report("a.2"), evaluations=5, parts=3)
    report = run_report(outcome(job_report("a"), second), [SETTINGS])
    assert "evaluations" not in markdown(run_report(outcome(job_report("a")), [SETTINGS]), pictures={})
    lines = markdown(report, pictures={}).splitlines()
    assert "| job | exit | iterations | evaluations | parts | it/s |" in lines[2]
    assert [line.split("|")[3:6] for line in lines[4:6]] == [[" 10 ", " 0 ", " 0 "], [" 10 ", " 5 ", " 3 "]]
    out = io.StringIO()
    write_table(report, out)
    assert re.search(r"iterations\s*\|\s*evaluations\s*\|\s*parts\s*\|", out.getvalue())


@pytest.mark.parametrize(
    ("last_bytes", "told"),
    [
        (0, ["budget 64 MiB (--budget)", "is 91% of the sum of the jobs' own peaks"]),
        (64 * MIB, ["budget 64 MiB (--budget)", "is 91% of the sum of the jobs' own peaks"]),
        (
            35 * MIB,
            ["budget 64 MiB (--budget), 35 MiB in the end", "is 50% of the sum of the jobs' own peaks"],
        ),
        (GIB, ["budget 64 MiB (--budget), 1 GiB in the end", "holds all jobs' own peaks at the same time"]),
    ],
)
def test_the_budget_is_told_as_it_was_in_the_end(last_bytes: int, told: list[str]) -> None:
    """Also beside the peaks, which it may hold several times over, and to a job that was out of memory."""
    refused = RefusedRequest(request_bytes=40 * MIB, held_bytes=1100 * MIB)
    ended = outcome(job_report("a", 40 * MIB, refused), job_report("b", 30 * MIB))
    pool = msgspec.structs.replace(ended.reports[0].pool, last_budget_bytes=last_bytes)  # type: ignore[union-attr]
    report = run_report(Outcome(ended.jobs, (msgspec.structs.replace(ended.reports[0], pool=pool),)), [SETTINGS])
    lines = list(pool_lines(report))
    assert [lines[0].partition("zico, ")[2], lines[-1].removeprefix("the budget ")] == told
    budget = told[0].partition(", ")[2].removesuffix(" in the end") or "64 MiB"
    assert any(f"the whole budget is {budget}: " in line for line in attention_lines(report))
    several = msgspec.structs.replace(report, pool=together([*report.pools] * 2, 1.0), pools=(*report.pools,) * 2)
    assert several.budget_then_bytes == 2 * (last_bytes or 64 * MIB)


def test_a_job_out_of_memory_gets_its_peak_the_budget_and_a_remedy() -> None:
    """The closing line of a job that did not fit names its peak, the budget and what to do."""
    refused = RefusedRequest(request_bytes=40 * MIB, held_bytes=60 * MIB)
    report = run_report(outcome(job_report("a", 60 * MIB, refused)), [SETTINGS])
    (line,) = (line for line in attention_lines(report) if "ran out of memory" in line)
    assert "its peak was 60 MiB" in line
    assert "the whole budget is 64 MiB" in line
    assert "raise --budget to at least 100 MiB, use a smaller batch, or try --save auto" in line


def test_markdown_has_a_row_per_job_and_the_picture() -> None:
    """The Markdown table has as many cells as its head in every row, also if a name contains a bar."""
    report = RunReport(
        device="host",
        policy="zico",
        budget_bytes=64 * MIB,
        pool=PoolFigures(),
        jobs=(JobFigures(name="a|b", command="x", exit_code=0, wall_s=1.0),),
    )
    text = markdown(report, pictures={"host": "report.png"})
    rows = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert "![Memory of each job over time](report.png)" in text
    assert "![" not in markdown(report, pictures={})


def test_a_job_that_saves_has_a_row_of_its_own() -> None:
    """What it moved and what that cost is shown below the jobs, in the table and in Markdown; else nothing is."""
    saving = Saving(
        how="swap", out_bytes=3 * MIB, in_bytes=2 * MIB, hidden_s=1.5, waited_s=0.25, late=4, dropped_bytes=MIB
    )
    job = JobFigures(name="a", command="x", exit_code=0, wall_s=1.0, saving=saving)
    report = RunReport(device="host", policy="zico", budget_bytes=64 * MIB, pool=PoolFigures(), jobs=(job,))
    assert list(saving_rows(report)) == [("a", "swap", "3 MiB", "2 MiB", "1.5 s", "0.2 s", "0", "4", "1 MiB", "0.0 s")]
    assert "| a | swap | 3 MiB |" in markdown(report, pictures={})
    written = io.StringIO()
    write_table(report, written)
    assert "time hidden" in written.getvalue()
    idle = msgspec.structs.replace(report, jobs=(msgspec.structs.replace(job, saving=Saving()),))
    assert "swap" not in markdown(idle, pictures={})


def member(job: int, name: str, **changes: object) -> JobReport:
    """Return a member of the pool as the broker shows it."""
    figures = {"iterations": 7, "held_bytes": 16 * MIB, "need_bytes": 0, "waiting_s": 0.0, "waits_for": ()} | changes
    return JobReport(
        job=job,
        name=name,
        pid=1,
        framework="torch",
        state="running",
        iterations_per_s=1.25,
        peak_bytes=0,
        live_tensor_bytes=0,
        waited_s=0.0,
        **figures,  # type: ignore[arg-type]
    )


def snapshot(*members: JobReport) -> Snapshot:
    """Return a run of jobs a and b in progress."""
    status = Status(
        schema_version="zico.status.v1",
        policy="zico",
        uptime_s=1.0,
        region_bytes=4 * MIB,
        budget_bytes=64 * MIB,
        granted_bytes=0,
        physical_bytes=0,
        peak_granted_bytes=0,
        peak_physical_bytes=0,
        jobs=members,
    )
    jobs = (JobProgress("a", None), JobProgress("b", 3))
    return Snapshot(elapsed_s=1.0, pools=(PoolProgress("host", 64 * MIB, status),), jobs=jobs)


def test_progress_says_who_waits_for_whom() -> None:
    """A waiting job's line names the jobs it waits for; one that has failed says so; one unknown is not guessed."""
    waiting = member(0, "a", waiting_s=2.0, waits_for=(1, 9), need_bytes=4 * MIB)
    lines = list(plain_lines(snapshot(waiting, member(1, "b"))))
    assert lines[0] == (
        "a: waits for memory, 7 iterations, 1.25 it/s, holds 16 MiB of 64 MiB, waiting 2.0 s for b, job 9"
    )
    assert lines[1].startswith("b: failed (3)")
    halved = msgspec.structs.replace(snapshot(waiting).pools[0], first_budget_bytes=128 * MIB)
    after = list(plain_lines(msgspec.structs.replace(snapshot(waiting), pools=(halved,))))
    assert "holds 16 MiB of 64 MiB" in after[0]  # what zico limit made of it
    gone = msgspec.structs.replace(halved, status=None)
    assert gone.budget_bytes == 128 * MIB
    assert next(plain_lines(snapshot())) == "a: no framework imported yet"
    silent = msgspec.structs.replace(snapshot(), pools=(gone,))
    assert list(plain_lines(silent)) == ["a: not known, as the broker does not answer", "b: failed (3)"]


def test_the_planner_in_force_is_named_and_why() -> None:
    """It stands in the job's line of progress and in the table, and why it is not the one asked for, below that."""
    note = "chen found no plan for 2 MiB (no schedule holds 2 MiB, 2097152 bytes, or less); longest is used instead"
    saving = Saving(how="swap", planner="longest", planner_note=note)
    line, _ = plain_lines(snapshot(member(0, "a", saving=saving)))
    assert line == "a: running, 7 iterations, 1.25 it/s, holds 16 MiB of 64 MiB, saves by longest"
    job = JobFigures(name="a", command="x", exit_code=0, wall_s=1.0, saving=saving)
    report = RunReport(device="host", policy="zico", budget_bytes=MIB, pool=PoolFigures(), jobs=(job,))
    (row,) = saving_rows(report)
    assert row[:2] == ("a", "swap (longest)")
    assert f"a: {note}" in list(attention_lines(report))


def test_progress_leaves_out_anothers_job_of_the_same_name() -> None:
    """In a daemon's pool, a process is the run's own by the run that started it; whom it waits for may be another's."""
    own = member(0, "a", waiting_s=2.0, waits_for=(1,), run="a1")
    seen = snapshot(own, member(1, "a", iterations=99, run="b2"))
    joined = msgspec.structs.replace(seen, pools=(msgspec.structs.replace(seen.pools[0], run="a1"),))
    line, failed = plain_lines(joined)
    assert line.startswith("a: waits to start, 7 iterations")
    assert line.endswith("for a")
    assert failed.startswith("b: failed (3)")
    assert len(list(plain_lines(seen))) == 3


def test_progress_on_several_devices_names_them() -> None:
    """A job waits for those of its own pool, whatever the places in the other one are called."""
    one = snapshot(member(0, "a", waiting_s=2.0, waits_for=(1,), need_bytes=4 * MIB), member(1, "x")).pools[0]
    other = snapshot(member(0, "b"), member(1, "c")).pools[0]
    pools = (msgspec.structs.replace(one, device="host:0"), msgspec.structs.replace(other, device="host:1"))
    jobs = (JobProgress("a", None, 0), JobProgress("b", None, 1), JobProgress("d", None, 1))
    seen = Snapshot(elapsed_s=1.0, pools=pools, jobs=jobs)
    a, b, d = plain_lines(seen)
    assert a.startswith("a on host:0: waits for memory")
    assert a.endswith("for x")
    assert b.startswith("b on host:1: ")
    assert d == "d on host:1: no framework imported yet"
    assert [column.header for column in live_table(seen).columns][4] == "device"


def test_the_live_table_has_a_row_per_process() -> None:
    """Each member of a job is a row; a job with none has one too."""
    assert live_table(snapshot(member(0, "a"), member(2, "a.2"))).row_count == 3
    assert live_table(snapshot()).row_count == 2


def test_the_bar_is_full_at_the_budget_and_never_fuller() -> None:
    """The bar shows the share of the budget in a fixed number of cells."""
    assert memory_bar(32, 64).count("█") == 10
    assert memory_bar(640, 64) == "█" * 20
    assert memory_bar(0, 64) == "·" * 20


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """A failed write leaves the old content and no other file."""
    target = tmp_path / "f"
    write_atomically(target, b"old")
    with pytest.raises(TypeError):
        write_atomically(target, "no bytes")  # type: ignore[arg-type]
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def record_fields() -> dict[str, Any]:
    """Return the fields of a record of one job and three instants."""
    return {
        "names": np.array(["a"]),
        "peak_bytes": np.array([MIB]),
        "budget_t_s": np.zeros(1),
        "budget_bytes": np.array([64 * MIB]),
        "t_s": np.array([0.0, 1.0, 2.0]),
        "held_bytes": np.array([[0], [MIB], [0]]),
        "out_bytes": np.zeros((3, 1), np.int64),
        "physical_bytes": np.array([0, MIB, MIB]),
        "boundary_job": np.array([0]),
        "boundary_t_s": np.array([2.0]),
        "wait_job": np.array([0]),
        "wait_t_s": np.array([[0.5, 1.0]]),
        "wait_kind": np.array([1]),
        "blocker_wait": np.array([0]),
        "blocker_job": np.array([0]),
        "iteration_s": np.array([1.0]),
        "persistent_bytes": np.array([0]),
        "profile_job": np.array([0, 0]),
        "profile_t_s": np.array([0.0, 0.5]),
        "profile_bytes": np.array([0, MIB]),
    }


def test_a_record_reads_back(tmp_path: Path) -> None:
    """What a broker writes is what is read."""
    np.savez(tmp_path / "r.npz", **record_fields())
    record = read_record(tmp_path / "r.npz")
    assert record.names == ("a",)
    assert record.boundaries_of(0).tolist() == [2.0]
    assert [len(record.waits_of(0, kind)) for kind in WaitKind] == [0, 1]


@pytest.mark.parametrize(
    "broken", ["names", "peak_bytes", "held_bytes", "out_bytes", "boundary_t_s", "wait_t_s", "blocker_job", None]
)
def test_a_record_that_does_not_fit_together_is_refused(tmp_path: Path, broken: str | None) -> None:
    """A missing file, a missing field and lengths that do not match are refused with the file's name."""
    path = tmp_path / "r.npz"
    if broken is not None:
        fields = record_fields()
        if broken == "names":
            del fields[broken]
        else:
            fields[broken] = fields[broken][:0]
        np.savez(path, **fields)
    with pytest.raises(ConfigError, match=r"r\.npz") as refused:
        read_record(path)
    assert broken is None or broken in str(refused.value)


def test_a_wait_for_a_job_that_there_is_not_is_refused(tmp_path: Path) -> None:
    """Whom a wait was for is one of the names."""
    np.savez(tmp_path / "r.npz", **record_fields() | {"blocker_job": np.array([1])})
    with pytest.raises(ConfigError, match="the length of blocker_job"):
        read_record(tmp_path / "r.npz")


def test_a_record_that_would_fill_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its fields have without compression is read from the archive's list before any of them is unpacked."""
    path = tmp_path / "r.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("names.npy", "w") as file:
        for _ in range(20):
            file.write(bytes(1 << 20))
    monkeypatch.setattr("zico.report.model.MAX_RECORD_BYTES", 10 << 20)
    with pytest.raises(ConfigError, match="it has 20971520 bytes, more than 10485760"):
        read_record(path)
