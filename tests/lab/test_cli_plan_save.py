"""``zico plan --save``: figures, exit codes, files, and what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from cpu.support.trace_cases import MIB, Loop, train

from zico.cli import main
from zico.lab.saving.files import PlanFile
from zico.trace.events import Kind
from zico.trace.files import write_trace

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 6
ROOMY = "100TiB"
"""A bandwidth with which no transfer takes long: the test's operations take microseconds."""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Return a file in which six activations of 8 MiB are idle until backward needs them in reverse."""
    loop = Loop()
    for number in range(4):
        loop.event(Kind.BEGIN, number)
        kept = [loop.allocate(8 * MIB, f"forward {i}") for i in range(1)]
        _run(loop, "forward 0", [], kept)
        for i in range(1, LAYERS):
            kept.append(loop.allocate(8 * MIB, f"forward {i}"))
            _run(loop, f"forward {i}", kept[-2:-1], kept[-1:])
        while kept:
            _run(loop, f"backward {len(kept)}", kept[-1:], [])
            loop.free(kept.pop())
    loop.event(Kind.END, 3)
    write_trace(tmp_path / "layers.zst", loop.trace())
    return str(tmp_path / "layers.zst")


def _run(loop: Loop, name: str, reads: list[int], writes: list[int]) -> None:
    for kind, tensors in ((Kind.READ, reads), (Kind.WRITE, writes)):
        for tensor in tensors:
            loop.event(kind, tensor, name=name)
    loop.event(Kind.OP, size_bytes=900, name=name)


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code of a plan and what its JSON says."""
    by = () if "--save" in arguments else ("--save", "swdoa")
    code = main(["plan", *arguments, *by, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def test_a_limit_is_planned_for(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The row has the judge's figures; plan file and picture are there; the plan file says the same."""
    plan, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = ("--limit", "70%", "--bandwidth", ROOMY, "-o", str(plan), "--picture", str(picture))
    code, report = report_of(capsys, trace, *arguments)
    assert (code, report["peak_bytes"], report["limit_bytes"]) == (0, 48 * MIB, int(48 * MIB * 0.7))
    without, row = report["rows"]
    assert (without["planner"], without["packed_bytes"], without["swaps"]) == ("(none)", 48 * MIB, 0)
    assert (row["planner"], row["answer"]) == ("swdoa", "planned")
    assert row["peak_bytes"] <= report["limit_bytes"] <= row["packed_bytes"] + 8 * MIB
    assert row["moved_bytes"] == 2 * 8 * MIB * row["swaps"]
    written = msgspec.json.decode(plan.read_bytes(), type=PlanFile)
    assert (len(written.swaps), written.limit_bytes) == (row["swaps"], report["limit_bytes"])
    assert {asked.op.split()[0] for asked in written.out} == {"forward"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_a_limit_the_lowest_one_is_found(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """More overhead allowed, no higher limit; with links out of all proportion slow nothing can leave for nothing."""
    codes, reports = zip(
        *(report_of(capsys, trace, "--bandwidth", "8GiB", "--overhead", share) for share in ("0%", "0.5", "99999%")),
        strict=True,
    )
    assert codes == (0, 0, 0)
    limits = [report["rows"][1]["limit_bytes"] for report in reports]
    assert limits[0] == 48 * MIB > limits[2]
    assert sorted(limits, reverse=True) == limits
    assert all(report["rows"][1]["overhead"] <= report["allowed_overhead"] for report in reports)


def test_a_limit_that_nothing_keeps_says_the_least_one(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and the bytes that an operation needs at once."""
    assert main(["plan", trace, "--save", "zico", "--limit", "1MiB"]) == 1
    assert f"an operation needs {16 * MIB} bytes at once: give that limit or a higher one" in capsys.readouterr().out


def test_a_limit_that_nothing_can_keep_is_refused_once(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All planners would say the same: one row and one sentence."""
    assert main(["plan", trace, "--save", "zico", "--compare", "--limit", "8MiB"]) == 1
    out = capsys.readouterr().out
    assert out.count("does not fit") == 2
    assert out.count("(any): does not fit: an operation needs 16777216 bytes at once") == 1


def test_every_planner_can_be_compared(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A row each, judged."""
    code, report = report_of(capsys, trace, "--compare", "--limit", "80%", "--bandwidth", ROOMY)
    assert code == 0
    assert {"doa", "aoa", "wdoa", "swdoa", "bayes"} <= {row["planner"] for row in report["rows"]}
    answers = {row["planner"]: row["answer"] for row in report["rows"][1:]}
    assert {"zico", "capuchin", "checkmate", "tflms", "flashneuron"} <= set(answers)
    without = {name for name, answer in answers.items() if answer != "planned"}
    assert without <= {"vdnn", "superneurons"}, "nothing here is made by a convolution or a product"


def test_results_can_be_recomputed_instead(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing moves, operations run again; it needs a limit."""
    code, report = report_of(capsys, trace, "--limit", "70%", "--save", "checkmate")
    without, row = report["rows"]
    assert (code, row["answer"], row["moved_bytes"], row["swaps"]) == (0, "planned", 0, 0)
    assert row["peak_bytes"] <= report["limit_bytes"]
    assert row["runs_again"] > 0
    assert row["iteration_ms"] - without["iteration_ms"] == pytest.approx(row["runs_again"] * 900e-6)
    assert main(["plan", trace, "--save", "dtr"]) == 3
    assert "--save dtr needs a limit: give --limit SIZE, too" in capsys.readouterr().err


def test_what_runs_again_is_in_the_plan_file(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its operations are those of the iteration with repeats; swaps and events of the trace go by them."""
    plan, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    arguments = ("--limit", "70%", "--save", "zico", "--bandwidth", "1GiB", "-o", str(plan), "--picture", str(picture))
    code, report = report_of(capsys, trace, *arguments)
    written = msgspec.json.decode(plan.read_bytes(), type=PlanFile)
    assert (code, len(written.again)) == (0, report["rows"][1]["runs_again"])
    assert len(written.again) > 0
    assert written.operations == report["operations"] + len(written.again)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_no_plan_beats_the_bound(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--bound`` the report has the least limit, or with a limit the least overhead; the plan is not below."""
    _, report = report_of(capsys, trace, "--bound", "--bandwidth", ROOMY)
    assert 16 * MIB <= report["bound"] <= report["rows"][1]["limit_bytes"]
    _, report = report_of(capsys, trace, "--bound", "--limit", "70%", "--bandwidth", "8GiB")
    assert 0 < report["bound"] <= report["rows"][1]["overhead"]


def test_a_table_for_people(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Peak before and after, overhead, bytes moved, swaps."""
    assert main(["plan", trace, "--save", "doa", "--limit", "40MiB", "--bandwidth", ROOMY]) == 0
    out = capsys.readouterr().out
    assert "at most 48 MiB alive at once, at least 16 MiB needed at once, limit 40 MiB; 100 TiB/s out" in out
    assert "(none)" in out
    assert "40 MiB |     83.3%" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--limit", "1GiB"), "--limit needs --save: give --save NAME, too"),
        (
            ("--save", "swdoa", "--limit", "lots"),
            "--limit 'lots': give a size such as 8GiB, or a share of the peak such as 70%",
        ),
        (
            ("--save", "swdoa", "--limit", "70%", "--overhead", "5%"),
            "--overhead finds the lowest limit: give --overhead or",
        ),
        (("--save", "swdoa", "--overhead", "-1%"), "--overhead '-1%': give a share such as 10% or 0.1"),
        (
            ("--save", "swdoa", "--bandwidth", "1,2,3"),
            "--bandwidth '1,2,3': give bytes per second such as 12GiB, or OUT,BACK",
        ),
        (("--save", "best of all"), "--save: 'best of all' is no planner: give one of zico"),
        (("--save", "swdoa", "--planner", "none"), "--planner 'none' is unknown: give one of"),
        (("--save", "swdoa", "--capacity", "1GiB"), "--region and --capacity plan addresses of a trace"),
    ],
)
def test_options_without_meaning_are_refused(
    trace: str, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, and one sentence that says what to give."""
    assert main(["plan", trace, *arguments]) == 3
    assert message in capsys.readouterr().err


def test_a_trace_without_accesses_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the options that record them."""
    write_trace(tmp_path / "plain.zst", train(4))
    assert main(["plan", str(tmp_path / "plain.zst"), "--save", "zico", "--limit", "70%"]) == 3
    assert "trace with --fake, or record with --ops" in capsys.readouterr().err
