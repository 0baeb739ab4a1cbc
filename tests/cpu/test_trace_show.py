"""``zico trace show``: figures, picture, other formats, and errors of one line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.trace_cases import MIB, STEP_NS, Loop, train

from zico.cli import main
from zico.planning.packing.from_trace import iteration_problem
from zico.report.picture import MAX_COLUMNS, draw_trace, fullest_ticks
from zico.trace.events import Kind
from zico.trace.files import PARTIAL_SUFFIX, read_trace, write_trace
from zico.trace.summary import SCHEMA, summarise

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return a trace file."""
    write_trace(tmp_path / "t.zst", train(6))
    return tmp_path / "t.zst"


def test_the_figures_are_those_of_the_loop() -> None:
    """Peak, classes and operations of a loop that is known by heart."""
    trace = train(6)
    found = iteration_problem(trace)
    summary = summarise(trace, found.life, found.iterations, found.iteration, found.classes)
    flows, weights = sum(i + 3 for i in range(12)), sum(i + 1 for i in range(12))
    assert summary.peak_bytes == (flows + weights + 14) * MIB + 12 * 512 + 256
    assert (summary.iterations, summary.typical_iterations, summary.found_by) == (6, 6, "marked")
    assert summary.tensors == 12 + 12 + 12 + 12 + 6
    assert summary.steps == 2 * (12 + 12 + 12 + 6)
    assert summary.duration_s == pytest.approx((summary.steps + 2) * STEP_NS / 1e9)
    assert sum(it.peak_bytes for it in summary.classes) == summary.peak_bytes
    assert [(it.name, it.tensors) for it in summary.classes if it.name == "persistent"] == [("persistent", 12)]
    assert summary.operations_by_bytes[0].name == "init"
    assert summary.operations_by_bytes[0].peak_bytes == weights * MIB
    assert [(it.name, it.count, it.duration_s) for it in summary.operations_by_time] == [("forward", 1, 5e-7)]
    assert summary.classes_agree is None


def test_a_trace_is_shown(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The summary is printed, and the memory curve lies beside the trace."""
    pytest.importorskip("matplotlib")
    assert main(["trace", "show", str(recorded)]) == 0
    printed = capsys.readouterr().out
    for text in (
        "loop: test on host",
        "6 iterations marked, 6 of them alike",
        "peak 194 MiB",
        "feature map",
        "written:",
    ):
        assert text in printed
    assert recorded.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_json_is_the_summary_alone(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json stdout is one document with a version, of the iteration that was asked for."""
    assert main(["trace", "show", str(recorded), "--json", "--iteration", "2"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schema_version"], shown["iteration"], shown["path"]) == (SCHEMA, 2, str(recorded))


def test_other_formats_show_the_same(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What --chrome and --snapshot write is shown with the same peak; --csv holds the lifetimes."""
    written = {name: tmp_path / f"other.{name}" for name in ("chrome", "snapshot", "csv")}
    options = [option for name, path in written.items() for option in (f"--{name}", str(path))]
    assert main(["trace", "show", str(recorded), "-o", str(tmp_path / "curve.png"), *options]) == 0
    for name in ("chrome", "snapshot"):
        capsys.readouterr()
        assert main(["trace", "show", str(written[name]), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["peak_bytes"] == iteration_problem(train(6)).problem.peak_live_bytes
    problem = iteration_problem(train(6)).problem
    header, *rows = written["csv"].read_text().splitlines()
    assert header == "id,lower,upper,size"
    expected = np.stack([np.arange(len(problem)), problem.lower, problem.upper, problem.size_bytes], axis=1)
    assert [list(map(int, row.split(","))) for row in rows] == expected.tolist()


def test_missing_events_are_said_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace with dropped events is shown with a line that says so."""
    loop = Loop()
    for number in range(4):
        loop.event(Kind.BEGIN, number)
        loop.free(loop.allocate(9000))
    loop.event(Kind.DROPPED, size_bytes=17)
    write_trace(tmp_path / "t", loop.trace())
    assert main(["trace", "show", str(tmp_path / "t")]) == 0
    assert "17 events are missing: the recorder could not keep up" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["show", "missing"], 1, "missing: cannot be read (No such file"),
        (["show", "t.zst", "--iteration", "77"], 1, "has no iteration 77: give one of 0 to 5"),
        (["show", "t.zst", "-o", "none/x.png"], 1, "none/x.png: cannot be written (No such file"),
        (["show", "t.zst", "--csv", "none/x"], 1, "none/x: cannot be written"),
        (["show", "t.zst.partial"], 1, "--allow-truncated"),
        (["show"], 2, "Missing argument"),
        (["-o", "x.zst"], 2, "SCRIPT:function"),
    ],
)
def test_errors_are_one_line(
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    """Each wrong use ends with an exit code and a line on stderr, and leaves no file behind."""
    monkeypatch.chdir(recorded.parent)
    partial = recorded.with_name(recorded.name + PARTIAL_SUFFIX)
    partial.write_bytes(recorded.read_bytes()[:-30])
    before = {path.name for path in recorded.parent.iterdir()}
    assert main(["trace", *arguments]) == code
    assert says in capsys.readouterr().err
    assert {path.name for path in recorded.parent.iterdir()} - before <= {"t.png"}


def test_a_partial_trace_is_shown_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a killed recorder left is shown with --allow-truncated."""
    write_trace(tmp_path / "t.zst", train(6))
    from zstandard import ZstdDecompressor

    plain = ZstdDecompressor().stream_reader((tmp_path / "t.zst").read_bytes()).read()
    (tmp_path / "p").write_bytes(plain[: 5 * len(plain) // 6])
    assert main(["trace", "show", str(tmp_path / "p"), "--allow-truncated", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["events"] < len(read_trace(tmp_path / "t.zst").events)
    assert shown["peak_bytes"] == iteration_problem(train(6)).problem.peak_live_bytes


def test_the_picture_keeps_the_peak() -> None:
    """However many ticks there are, as many as pixels are drawn, and the fullest is among them."""
    pytest.importorskip("matplotlib")
    n_ticks = 50 * MAX_COLUMNS
    bytes_of = np.ones((2, n_ticks), np.int64)
    bytes_of[1, 12_345] = 9000
    drawn = fullest_ticks(bytes_of.sum(axis=0))
    assert (len(drawn), 12_345 in drawn) == (MAX_COLUMNS, True)
    figure = draw_trace("title", np.zeros(n_ticks + 1, np.int64), bytes_of, ("low", "high"))
    (axis,) = figure.axes
    assert axis.get_ylim()[1] * 1024 == pytest.approx(1.05 * 9001)
    assert axis.get_xlabel() == "allocations and frees"


def test_both_kinds_of_classes_are_compared() -> None:
    """Where the trace says who reads, the summary says on how much of the peak the classes agree."""
    loop = Loop()
    for number in range(4):
        loop.event(Kind.BEGIN, number)
        kept, unread = loop.allocate(300), loop.allocate(100)
        loop.event(Kind.WRITE, kept)
        loop.event(Kind.OP, name="forward")
        for _ in range(8):
            loop.free(loop.allocate(1))
        loop.event(Kind.READ, kept)
        loop.event(Kind.OP, name="backward")
        loop.free(unread, kept)
    trace = loop.trace()
    found = iteration_problem(trace)
    summary = summarise(trace, found.life, found.iterations, found.iteration, found.classes)
    assert summary.classes_agree == pytest.approx(301 / 401)
