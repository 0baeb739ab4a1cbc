"""``zico simulate``: rows, JSON, pictures, and every bad argument refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zico.base.errors import ConfigError
from zico.base.units import GIB
from zico.cli import main
from zico.lab.cli.simulate import DEFAULT_POLICIES, policies_of
from zico.scheduler.policies import POLICIES

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "jobs").glob("*.json"))
HALF = {"name": "a", "iteration_s": 1, "persistent_bytes": "2GiB", "curve": [[0, "10GiB"], [0.5, "2GiB"]]}
PAIR = json.dumps({"jobs": [HALF, HALF | {"name": "b"}]})
PNG = b"\x89PNG\r\n\x1a\n"


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:  # noqa: ANN401 - JSON
    """Return the JSON that a simulation prints."""
    assert main(["simulate", *arguments, "--json", "-"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_json_says_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The schema by example: two jobs whose halves fit into each other, at full speed in 12 GiB and half serially."""
    found = simulated(capsys, PAIR, "--budget", "12GiB", "--policy", "claims,serial")
    assert found["schema_version"] == "zico.simulation.v1"
    claims, serial = found["rows"]
    assert (claims["policy"], claims["budget_bytes"], claims["deadlocks"]) == ("claims", 12 * GIB, 0)
    assert claims["normalised"] == pytest.approx(1, abs=0.02)
    assert claims["peak_granted_bytes"] == 12 * GIB
    assert claims["decisions"] > 100
    assert claims["decision_us"] > 0
    assert [job["name"] for job in claims["jobs"]] == ["a", "b"]
    assert [job["iterations_per_s"] for job in claims["jobs"]] == pytest.approx([1, 1], abs=0.02)
    assert [job["normalised"] for job in serial["jobs"]] == pytest.approx([0.5, 0.5], abs=0.02)
    assert [job["waited_s"] for job in serial["jobs"]] == pytest.approx([50, 50], abs=1.5)
    assert (serial["vs_serial"], claims["vs_serial"]) == (pytest.approx(1), pytest.approx(2, abs=0.05))
    assert (claims["jain"], claims["slowdown"]) == (pytest.approx(1), pytest.approx(1, abs=0.02))
    assert found["sum_of_peaks_bytes"] == 20 * GIB
    fields = {"iteration_s": 1.0, "peak_bytes": 10 * GIB, "persistent_bytes": 2 * GIB}
    assert found["jobs"] == [{"name": "a"} | fields, {"name": "b"} | fields]


SAVING = HALF | {"curve": [[0, "10GiB"]], "persistent_bytes": "1GiB", "less": [["8GiB", 1.05], ["5GiB", 1.25]]}


def test_auto_lets_jobs_go_on_with_less(capsys: pytest.CaptureFixture[str]) -> None:
    """Two jobs that could only take turns both run, at four fifths of their speed; a note says who does with what."""
    jobs = json.dumps({"jobs": [SAVING, SAVING | {"name": "b"}]})
    found = simulated(capsys, jobs, "--budget", "50%", "--policy", "serial,auto")
    serial, auto = found["rows"]
    assert auto["normalised"] == pytest.approx(0.8, abs=0.02)
    assert auto["vs_serial"] == pytest.approx(1.6, abs=0.1)
    assert auto["peak_granted_bytes"] == 10 * GIB
    assert (
        "auto at 10 GiB: b trains in 5 GiB with --save swap; alone, its iteration takes 1.25 times as long"
        in found["notes"]
    )
    small = simulated(capsys, jobs, "--budget", "6GiB", "--policy", "auto")
    assert small["rows"][0]["deadlocks"] == 0
    assert serial["normalised"] < auto["normalised"]


def test_rows_are_in_the_order_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """Policy by policy within each budget, as they were named, each once; a percentage is of the sum of peaks."""
    found = simulated(capsys, PAIR, "--budget", "75%,12GiB, 15GiB", "--policy", "serial,none,serial")
    rows = [(row["budget_bytes"] / GIB, row["policy"]) for row in found["rows"]]
    assert rows == [(15, "serial"), (15, "none"), (12, "serial"), (12, "none")]


def test_a_file_its_text_and_stdin_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the cost of a decision is equal, whichever way the jobs are given."""
    import io
    import sys
    import types

    path = tmp_path / "jobs.json"
    path.write_text(PAIR)
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(PAIR.encode())))
    found = [simulated(capsys, jobs, "--budget", "60%", "--policy", "claims") for jobs in (str(path), PAIR, "-")]
    for one in found:
        one["rows"][0]["decision_us"] = 0
    assert found[0] == found[1] == found[2]


def test_the_table_has_a_row_for_each_policy_and_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """Its rows name budget and policy, and no line is longer than it is wide without a terminal."""
    assert main(["simulate", PAIR, "--budget", "12GiB,100%", "--policy", "claims,serial"]) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    assert [row[:2] for row in rows[1:]] == [
        ["12 GiB (60%)", "claims"],
        ["12 GiB (60%)", "serial"],
        ["20 GiB (100%)", "claims"],
        ["20 GiB (100%)", "serial"],
    ]
    assert rows[2][2:5] == ["0.500", "0.50 0.50", "1.00"]
    assert max(map(len, out.splitlines())) <= 160
    assert out.splitlines()[-1].startswith("2 jobs, sum of peaks 20 GiB; 110 s simulated of which 10 s do not count;")


def test_with_json_on_stdout_the_table_is_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever reads the JSON from a pipe still sees the table."""
    assert main(["simulate", PAIR, "--budget", "12GiB", "--policy", "claims", "--json", "-"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)
    assert "| claims |" in said.err


def test_a_report_holds_figures_table_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder is made; the pictures are PNG, and the table links to each of them."""
    folder = tmp_path / "new" / "report"
    arguments = ["--budget", "60%,15GiB", "--policy", "claims,none", "--report", str(folder)]
    assert main(["simulate", PAIR, *arguments]) == 0
    assert f"report in {folder}" in capsys.readouterr().err
    memory = {f"memory-{policy}-{budget}.png" for policy in ("claims", "none") for budget in ("60pct", "15GiB")}
    assert {path.name for path in folder.iterdir()} == {"simulation.json", "table.md", "throughput.png", *memory}
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(PNG)
        assert f"]({path.name})" in (folder / "table.md").read_text()
    assert json.loads((folder / "simulation.json").read_text())["rows"][3]["policy"] == "none"


def test_strange_names_do_not_break_the_report(tmp_path: Path) -> None:
    """Names that are formulas to matplotlib, columns to Markdown or markup to the terminal are shown as they are."""
    jobs = json.dumps({"jobs": [HALF | {"name": "$\\frac{|[red]"}, HALF | {"name": "b$", "count": 13}]})
    arguments = ["--budget", "60%", "--policy", "none", "--seconds", "5", "--report", str(tmp_path)]
    assert main(["simulate", jobs, *arguments]) == 0
    assert "$\\frac{\\|[red]" in (tmp_path / "table.md").read_text()


def test_real_regions_are_taken_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """With a region of 4 GiB, 10 GiB are three of them, and three are all that 15 GiB can be."""
    found = simulated(capsys, PAIR, "--budget", "15GiB", "--region", "4GiB", "--policy", "serial")
    assert found["jobs"][0]["peak_bytes"] == found["rows"][0]["peak_granted_bytes"] == 12 * GIB
    assert main(["simulate", PAIR, "--budget", "11GiB", "--region", "4GiB"]) == 2
    assert "job 'a' needs 12 GiB, more than the budget of 8 GiB" in capsys.readouterr().err


def test_jobs_that_never_fit_beside_each_other_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Where memory overflows under any policy, the last line says which job and what it takes."""
    wide = json.dumps({"jobs": [HALF | {"persistent_bytes": "2GiB", "count": 4}]})
    found = simulated(capsys, wide, "--budget", "15GiB", "--policy", "claims")
    assert found["rows"][0]["deadlocks"] > 0
    (note,) = found["notes"]
    assert (
        note
        == "at 15 GiB, a-1 does not fit beside what the other jobs keep between iterations: together they need 16 GiB"
    )
    leaving = json.dumps({"jobs": [HALF | {"count": 4, "iterations": 3}]})
    assert simulated(capsys, leaving, "--budget", "15GiB", "--policy", "serial")["notes"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([json.dumps({"jobs": [SAVING]}), "--budget", "9GiB"], "job 'a' needs 10 GiB, more than the budget of 9 GiB"),
        ([json.dumps({"jobs": [SAVING]}), "--budget", "4GiB", "--policy", "auto"], "job 'a' needs 5 GiB, more than"),
        (
            [json.dumps({"jobs": [SAVING | {"less": [["8GiB", 0]]}]}), "--budget", "9GiB"],
            "the jobs: job 'a': less has 0 for seconds: give",
        ),
        (
            [json.dumps({"jobs": [SAVING | {"less": [["x", 1]]}]}), "--budget", "9GiB"],
            "the jobs: job 'a': less has \"x\" for bytes: give",
        ),
        (
            [json.dumps({"jobs": [SAVING | {"less": 3}]}), "--budget", "9GiB"],
            "the jobs: job 'a': less is 3: give a list of [bytes that",
        ),
        ([PAIR, "--budget", "9GiB"], "job 'a' needs 10 GiB, more than the budget of 9 GiB: raise --budget or give a"),
        ([PAIR, "--budget", "20GiB,9GiB"], "job 'a' needs 10 GiB, more than the budget of 9 GiB: raise --budget"),
        (
            [PAIR, "--budget", "lots"],
            "--budget: 'lots' is not a budget: give a size such as 20GiB, or 70% of the sum",
        ),
        ([PAIR, "--budget", "70%,"], "--budget: '' is not a budget: give a size such as 20GiB"),
        ([PAIR, "--budget", "0%"], "--budget: '0%' is not a budget"),
        ([PAIR, "--budget", "none"], "--budget: 'none' is not a budget"),
        ([PAIR, "--budget", "70%", "--policy", "fifo"], f"'fifo' is not a policy: choose one of {', '.join(POLICIES)}"),
        ([PAIR, "--budget", "70%", "--policy", ""], "'' is not a policy: choose one of"),
        (
            [PAIR, "--budget", "70%", "--device-model", "abacus"],
            "'abacus' is not a device model: give one of v100-16gb, v100",
        ),
        ([PAIR, "--budget", "70%", "--policy", "shift:pol=1ms"], "shift has no parameter 'pol': it has poll="),
        ([PAIR, "--budget", "70%", "--region", "3KiB"], "--region '3KiB': give a power of two, 1KiB or more"),
        ([PAIR, "--budget", "70%", "--region", "50%"], "--region '50%': give a power of two, 1KiB or more"),
        ([PAIR, "--budget", "70%", "--seconds", "0"], "--seconds 0: give a number above 0"),
        ([PAIR, "--budget", "70%", "--seconds", "nan"], "--seconds nan: give a number above 0"),
        ([PAIR, "--budget", "70%", "--seconds", "1e300"], "--seconds 1e+300: give a number above 0, at most 1e+08"),
        ([PAIR, "--budget", "70%", "--json=/nowhere/x"], "--json: the directory '/nowhere' does not exist"),
        ([PAIR, "--budget", "70%", "--report", "/proc/x"], "--report: cannot write to '/proc/x'"),
        (["nowhere.json", "--budget", "70%"], "nowhere.json: no such file or directory: give a file of jobs, or {...}"),
        (['{"jobs": []}', "--budget", "70%"], "the jobs: has no jobs: give a list with at least one job"),
        (['{"jobs": [{"name": "x"}]}', "--budget", "70%"], "the jobs: job 'x': has neither a curve nor a trace: give"),
        (
            [json.dumps({"jobs": [HALF | {"slo": 0}, HALF | {"name": "b", "priority": 1}]}), "--budget", "70%"],
            "a is guaranteed its speed, but b of higher priority may take it: give it their priority, or no guarantee",
        ),
        (
            [json.dumps({"jobs": [HALF | {"slo": 0, "count": 3}]}), "--budget", "16GiB"],
            "the guarantees of 'a-1', 'a-2', 'a-3' cannot all hold: they would keep 18 GiB on the average",
        ),
    ],
    ids=lambda value: None if isinstance(value, list) else value[:40],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is one sentence on stderr, nothing on stdout, and code 2."""
    assert main(["simulate", "--quiet", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"zico: {message}")
    assert said.err.count("\n") == 1
    assert not said.out


def test_compiling_is_announced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no machine code is kept yet one line on stderr says so, unless quiet, and none where it is."""
    arguments = ["simulate", PAIR, "--budget", "12GiB", "--policy", "claims"]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main(arguments) == 0
    assert not capsys.readouterr().err
    monkeypatch.setattr("zico.base.programs.code_directory", lambda: tmp_path)
    assert main(arguments) == 0
    assert capsys.readouterr().err == "zico: compiling; this takes up to a minute, once per machine\n"
    assert main([*arguments, "--quiet"]) == 0
    assert not capsys.readouterr().err


def test_a_comma_may_part_the_parameters_of_a_policy() -> None:
    """What has an equals sign before any colon belongs to the policy before it."""
    assert policies_of("zico,claims , serial") == ("zico", "claims", "serial")
    assert policies_of("shift:poll=1ms,ramp=0.7,claims") == ("shift:poll=1ms,ramp=0.7", "claims")
    with pytest.raises(ConfigError, match="'ramp=0' is not a policy"):
        policies_of("ramp=0,claims")


def test_the_oracle_is_a_row_like_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Where halves fit into each other it has both at full speed; what it cannot search is a line below the table."""
    found = simulated(capsys, PAIR, "--budget", "12GiB", "--policy", "oracle,serial")
    oracle = found["rows"][0]
    assert (oracle["policy"], oracle["decisions"], oracle["deadlocks"]) == ("oracle", 0, 0)
    assert [job["normalised"] for job in oracle["jobs"]] == pytest.approx([1, 1], abs=0.02)
    assert oracle["peak_granted_bytes"] <= 12 * GIB
    five = json.dumps({"jobs": [HALF | {"count": 5}]})
    found = simulated(capsys, five, "--budget", "30GiB", "--policy", "oracle,serial")
    assert [row["policy"] for row in found["rows"]] == ["serial"]
    assert found["notes"] == ["oracle at 30 GiB: the best of all schedules is found for 1 to 4 jobs, not 5"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_can_be_simulated(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file in examples/jobs runs under the default policies without a deadlock where memory is coordinated."""
    found = simulated(capsys, str(path), "--budget", "75%")
    assert [row["policy"] for row in found["rows"]] == list(DEFAULT_POLICIES)
    assert {row["deadlocks"] for row in found["rows"] if row["policy"] in {"zico", "claims", "serial"}} == {0}


def test_a_narrow_terminal_shows_fewer_columns() -> None:
    """What a terminal of 80 columns cannot hold is left out as a whole; budget, policy and throughput stay."""
    import io

    from zico.lab.report.simulation import SimulatedRow, SimulationReport, write_simulation_table

    row = SimulatedRow(
        policy="claims",
        budget_bytes=12 * GIB,
        normalised=0.9,
        peak_granted_bytes=GIB,
        deadlocks=0,
        decisions=12345,
        decision_us=1.5,
        jobs=(),
        jain=1.0,
        slowdown=1.1,
        vs_serial=None,
        seconds=44.0,
        warm_up_s=0.0,
    )
    report = SimulationReport(rows=(row,), jobs=(), sum_of_peaks_bytes=GIB, region_bytes=1, device_model="any", seed=0)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.setenv("TERM", "dumb")
        narrow = Terminal()
        write_simulation_table(report, narrow)
    said = narrow.getvalue()
    assert max(map(len, said.splitlines()[:-1])) <= 80
    assert "claims" in said
    assert "0.900" in said
    assert "us each" not in said
