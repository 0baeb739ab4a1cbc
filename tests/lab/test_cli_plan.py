"""``zico plan``: answers as exit codes, judged figures, files; and what ``zico trace`` refuses to record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.planner_cases import crowd
from cpu.support.trace_cases import train

from zico.cli import main
from zico.lab.packing.compare import PLANNERS, ask, held
from zico.lab.packing.files import csv_text, read_csv
from zico.planning.packing.judge import judge
from zico.planning.packing.problem import Plan, Problem
from zico.trace.files import write_trace

if TYPE_CHECKING:
    from zico.planning.packing.problem import Int64s

# Never more than 8 bytes alive at once, and yet no placement within 8 exists (all of them were
# tried); one in 9 does.
LIVE_BYTES, LEAST_BYTES = 8, 9
TIGHT = """id,lower,upper,size
a,0,4,2
b,1,5,1
c,3,6,3
d,4,6,3
e,2,4,2
f,0,1,4
g,1,2,4
h,0,1,2
i,5,6,2
"""
QUICK = ("--deadline", "0.2")


@pytest.fixture
def tight(tmp_path: Path) -> str:
    """Return a file of lifetimes that need more than what is alive at once."""
    (tmp_path / "tight.csv").write_text(TIGHT)
    return str(tmp_path / "tight.csv")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Return a trace file."""
    write_trace(tmp_path / "job.zst", train(6))
    return str(tmp_path / "job.zst")


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code of a plan and what its JSON says."""
    code = main(["plan", *arguments, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


# -- does it fit? ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "planner", "code", "answer"),
    [
        (LEAST_BYTES, "exact", 0, "fits"),
        (LIVE_BYTES, "exact", 1, "does not fit"),
        (LIVE_BYTES - 1, "size-first", 1, "does not fit"),
        (LIVE_BYTES, "size-first", 2, "not known"),
        (LIVE_BYTES, "regions", 2, "not known"),
    ],
)
def test_no_is_said_only_if_it_is_proved(
    tight: str, capacity: int, planner: str, code: int, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0 if a plan fits, 1 if none can, and 2 if a planner found none without a proof."""
    found = report_of(capsys, tight, "--capacity", str(capacity), "--planner", planner, *QUICK)
    assert (found[0], found[1]["answer"]) == (code, answer)


def test_one_planners_proof_or_plan_decides_for_all(tight: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --compare a proof by one planner is an answer, whatever the others did not find."""
    code, found = report_of(capsys, tight, "--compare", "--capacity", str(LIVE_BYTES), *QUICK)
    assert code == 1
    assert {row["answer"] for row in found["rows"]} == {"does not fit", "not found", "out of time"}


def test_out_of_time_is_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A deadline too short to try anything is neither yes nor no."""
    problem = crowd(1, 900)
    (tmp_path / "crowd.csv").write_text(csv_text(problem))
    arguments = (str(tmp_path / "crowd.csv"), "--capacity", str(problem.peak_live_bytes), "--deadline", "0.01")
    code, found = report_of(capsys, *arguments, "--planner", "exact")
    assert (code, found["rows"][0]["answer"]) == (2, "out of time")


# -- figures ---------------------------------------------------------------------------------------


def test_the_table_compares_every_planner(tight: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--compare prints a judged row for each planner, the one for regions included once a region has a size."""
    assert main(["plan", tight, "--compare", *QUICK]) == 0
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert sorted(rows[1:]) == sorted(set(PLANNERS) - {"regions"})
    code, found = report_of(capsys, tight, "--compare", "--region", "4B", *QUICK)
    assert code == 0
    assert {row["planner"] for row in found["rows"]} == set(PLANNERS)
    assert all(row["held"]["peak_regions"] >= row["held"]["least_peak_regions"] == 2 for row in found["rows"])


def test_json_says_what_was_found(tight: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures in a file are those on stdout, and a table is printed beside the file only."""
    code, printed = report_of(capsys, tight, "--capacity", "1KiB")
    assert code == 0
    assert main(["plan", tight, "--capacity", "1KiB", "--json", str(tmp_path / "plan.json")]) == 0
    assert "exact" in capsys.readouterr().out
    written = json.loads((tmp_path / "plan.json").read_text())
    for report in (printed, written):
        report["rows"][0].pop("elapsed_s")
    assert printed == written
    assert printed["schema_version"] == "zico.plan.v1"
    assert (printed["tensors"], printed["live_peak_bytes"], printed["capacity_bytes"]) == (9, LIVE_BYTES, 1024)
    assert printed["rows"][0]["ratio"] == printed["rows"][0]["peak_bytes"] / LIVE_BYTES


def test_the_exact_planner_is_asked_by_default_and_the_regions_planner_for_regions(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --planner small problems get the exact planner, and --region the one whose objective that is."""
    rows = [report_of(capsys, trace, *options, *QUICK)[1]["rows"] for options in ((), ("--region", "4MiB"))]
    assert [[row["planner"] for row in found] for found in rows] == [["exact"], ["regions"]]
    assert (rows[0][0]["held"], rows[1][0]["held"]["region_bytes"]) == (None, 4 << 20)


class _Liar:
    """Answers with places that it was given."""

    name = "liar"

    def __init__(self, *offset_bytes: int) -> None:
        self._plan = Plan(np.array(offset_bytes), self.name, 0.0)
        self.asked: list[int] = []

    def plan(self, problem: Problem, deadline_s: float) -> Plan:
        """Return the places, whatever the problem."""
        del deadline_s
        self.asked.append(len(problem))
        return self._plan


def int64s(*values: int) -> Int64s:
    """Return an array."""
    return np.array(values, np.int64)


def test_a_plan_that_breaks_a_rule_is_none() -> None:
    """What the judge refuses is called by the rule, counts as no plan and has no figures of regions."""
    problem = Problem(int64s(0, 1), int64s(2, 3), int64s(4, 4))
    row, answer = ask(_Liar(0, 3), problem, 1.0, 4)
    assert (row.answer, row.held, answer) == ("breaks the rule 'overlap'", None, None)
    row, answer = ask(_Liar(0, 4), problem, 1.0, 4)
    assert (row.answer, row.peak_bytes, row.ratio, answer is not None) == ("placed", 8, 1.0, True)


def test_a_planner_is_asked_something_small_first() -> None:
    """Code is compiled or loaded by another problem than the one whose deadline counts."""
    planner = _Liar(0)
    ask(planner, Problem(int64s(0), int64s(1), int64s(1)), 1.0)
    assert planner.asked[0] > 1
    assert planner.asked[-1] == 1
    assert planner.asked.count(1) == 1


def test_regions_are_counted_while_somebody_lives_in_them() -> None:
    """Two tensors in one region, then a third in another: peak 2, mean weighted by time, slots ever used."""
    #   tick  0 1 2 3      regions of 4 bytes: [0, 4) holds a and b, [8, 12) holds c, [4, 8) nobody
    #   a     # #
    #   b       # #
    #   c           #
    problem = Problem(int64s(0, 1, 3), int64s(2, 3, 4), int64s(2, 2, 3), tick_ns=int64s(0, 10, 20, 30, 70))
    found = held(problem, Plan(int64s(0, 2, 8), "hand", 0.0), 4)
    assert (found.peak_regions, found.slots, found.least_peak_regions) == (1, 2, 1)
    live = 2 * 10 + 4 * 10 + 2 * 10 + 3 * 40
    assert found.mean_ratio == pytest.approx(4 * 70 / live)
    assert found.least_mean_ratio == pytest.approx(4 * 70 / live)
    assert found.peak_ratio == 1


# -- files -----------------------------------------------------------------------------------------


def test_written_places_are_a_good_plan_of_the_file(tight: str, tmp_path: Path) -> None:
    """-o writes the lifetimes with offsets, and the judge agrees with them."""
    assert main(["plan", tight, "-o", str(tmp_path / "plan.csv")]) == 0
    table = read_csv(tmp_path / "plan.csv")
    assert table.offset_bytes is not None
    assert table.problem.names == read_csv(tight).problem.names
    verdict = judge(table.problem, Plan(table.offset_bytes, "file", 0.0))
    assert (verdict.rule, verdict.peak_bytes) == (None, LEAST_BYTES)


@pytest.mark.parametrize("of", ["tight", "trace"])
def test_the_picture_is_a_png(of: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """--picture draws the places of lifetimes and of a trace, with and without regions."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    region = () if of == "tight" else ("--region", "4MiB")
    assert main(["plan", request.getfixturevalue(of), *region, *QUICK, "--picture", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_a_plan_no_file_is_written(tight: str, tmp_path: Path) -> None:
    """Where nothing fits there are no places to write or to draw."""
    outputs = [tmp_path / "plan.csv", tmp_path / "plan.png"]
    arguments = ["plan", tight, "--capacity", "1", "-o", str(outputs[0]), "--picture", str(outputs[1])]
    assert main(arguments) == 1
    assert not any(path.exists() for path in outputs)


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--planner", "best"], "--planner 'best' is unknown: give one of size-best, "),
        (["--capacity", "much"], "--capacity: 'much' is not a size: give "),
        (["--region", "-4MiB"], "--region: '-4MiB' is not a size: give "),
        (["-o", "missing/plan.csv"], "missing/plan.csv: cannot be written (No such file or directory)"),
    ],
)
def test_bad_options_are_one_line_and_no_answer(
    tight: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be done ends with code 3, which answers nothing, and one line that names it."""
    assert main(["plan", tight, *options]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.csv", None, "No such file"),
        ("bad.csv", "id,lower,upper,size\na,0,1,2\nb,3,3,1\n", ":3: tensor b lives from 3 to 3"),
        ("bad.zst", "{}", "bad.zst"),
    ],
)
def test_bad_files_are_named_and_are_no_answer(
    name: str, content: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is missing or damaged is one line that names it and its line, even when asked whether it fits."""
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    assert main(["plan", str(path), "--capacity", "1GiB"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert says in line


@pytest.mark.parametrize(
    "arguments",
    [[], ["--"], ["script.py"], ["--fake"], ["--fake", "--", "python", "a.py"], ["--fake", "a.py:f", "--", "python"]],
)
def test_a_recording_of_nothing_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``zico trace -o FILE`` wants a command after --, or a function with --fake, not both; else nothing is written."""
    assert main(["trace", "-o", str(tmp_path / "a.zst"), *arguments]) == 2
    assert "give -- CMD ARG ... to record a program, or --fake SCRIPT:function" in capsys.readouterr().err
    assert not any(Path(tmp_path).iterdir())
