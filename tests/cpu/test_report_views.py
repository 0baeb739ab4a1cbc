"""The trace for Perfetto and the page: their forms, and that they say what the record says."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from cpu.support.report_cases import EVIL, Parsed, run

from zico.base.units import MIB
from zico.broker.protocol.messages import WaitKind
from zico.report.model import RunReport
from zico.report.page import LEFT, NOBODY, PART_COLOURS, RIGHT, page, waited_for_s, write_page
from zico.report.perfetto import ITERATIONS_TID, POOL_PID, WAIT_TIDS, events, write_trace
from zico.report.picture import draw
from zico.report.table import COLUMNS, TIME_COLUMNS, job_rows, time_rows

if TYPE_CHECKING:
    from pathlib import Path


# -- the trace -------------------------------------------------------------------------------------


def test_spans_of_a_track_are_apart_and_counters_only_tell_changes(tmp_path: Path) -> None:
    """The trace keeps the format's rules: known phases, names for all tracks, no overlap, no repeated value."""
    _, history = run()
    write_trace(history, tmp_path / "t.json")
    written = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["ph"] for event in written} == {"M", "X", "C"}
    tracks, counters = defaultdict(list), defaultdict(list)
    for event in written:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            counters[event["pid"], event["name"]].append((event["ts"], event["args"]["bytes"]))
    named = {(event["pid"], event["tid"]) for event in written if event["name"] == "thread_name"}
    assert set(tracks) <= named
    for spans in tracks.values():
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(sorted(spans)))
    for values in counters.values():
        assert all(a < c and b != d for (a, b), (c, d) in itertools.pairwise(values))
    assert counters[POOL_PID, "budget"] == [(0, 64 * MIB)]
    assert {name for _, name in counters} == {"budget", "physical", "held"}


def test_iterations_begin_after_their_wait_and_waits_name_whom_they_are_for() -> None:
    """An iteration is from the end of the wait at its boundary; what lies in a tier is a counter where there is any."""
    _, history = run()
    history = dataclasses.replace(history, out_bytes=np.tile([0, MIB], (len(history.t_s), 1)))
    written: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    for event in events(history):
        if event["ph"] == "X":
            end = round((event["ts"] + event["dur"]) / 1e6, 6)
            written[event["pid"] - POOL_PID - 1, event["tid"]].append((event["ts"] / 1e6, end, event["name"]))
    firsts = [(start, end) for start, end, _ in written[0, ITERATIONS_TID]]
    assert firsts == [(0.02, 1.0), (1.1, 2.0), (2.0, 3.0), (3.0, 4.0)]
    assert written[1, WAIT_TIDS[WaitKind.ALLOCATION]] == [(1.7, 1.8, "waits for a"), (1.8, 1.9, "waits for a")]
    assert written[1, WAIT_TIDS[WaitKind.BOUNDARY]] == [(2.5, 2.6, "waits")]
    (lies,) = [event for event in events(history) if event["name"] == "in a tier"]
    assert (lies["pid"], lies["args"]) == (POOL_PID + 2, {"bytes": MIB})


# -- the page --------------------------------------------------------------------------------------


def test_the_page_has_the_figures_and_tells_who_waited_for_whom() -> None:
    """Tables are those of the closing table, the figures lie in the page, and each wait has a tooltip."""
    report, history = run()
    found = Parsed(page(report, history))
    assert found.rows["jobs"] == [list(COLUMNS), *map(list, job_rows(report))]
    assert found.rows["saving"][1][:3] == ["b", "swap", "5 MiB"]
    assert msgspec.json.decode(found.script, type=RunReport) == report
    assert found.rows["waits"] == [
        ["job", "for a", "for b", NOBODY], ["a", "", "0.1 s", ""], ["b", "0.2 s", "", "0.1 s"]
    ]  # fmt: skip
    assert waited_for_s(history) == pytest.approx(np.array([[0, 0.1, 0], [0.25, 0, 0.1]]))
    assert "b waits inside an allocation, for a: 2 times, 0.250 s from 1.700 s" in found.titles
    assert "b waits to start an iteration: 0.100 s from 2.500 s" in found.titles


def test_a_bar_shows_where_the_time_went() -> None:
    """Each part is as wide as its share, one after the other; the table says what is not known of it."""
    report, history = run()
    found = Parsed(page(report, history))
    assert found.rows["times"] == [list(TIME_COLUMNS), *map(list, time_rows(report))]
    assert found.rows["times"][1][:5] == ["a", "4.0 s", "2.0 s", "0.5 s", "0.1 s"]
    assert found.rows["times"][1][-5:] == ["0.2 s", "1.0 s", "0.500 s (best)", "not known", "not known"]
    bars = [found for tag, found in found.elements if tag == "rect" and found.get("fill") in PART_COLOURS.values()]
    spans = [(float(str(bar["x"])), float(str(bar["width"]))) for bar in bars if "opacity" not in bar]
    assert [width / (RIGHT - LEFT) * 4 for _, width in spans] == pytest.approx(
        [2.0, 0.5, 0.1, 0, 0, 0, 0.2, 0.2, 1.0], abs=0.01
    )
    assert spans[0][0] == LEFT
    assert all(x + width == pytest.approx(then, abs=0.2) for (x, width), (then, _) in itertools.pairwise(spans))
    assert "a, waits for a processor: 0.200 s" in found.titles


def test_a_peak_is_one_number_wherever_it_stands() -> None:
    """The table's, also where no instant of the history shows it: in the key, at the curve and in the picture."""
    report, history = run()
    assert history.held_bytes[:, 0].max() < history.peak_bytes[0]
    history = dataclasses.replace(history, peak_bytes=np.array([job.peak_bytes for job in report.jobs]))
    text = page(report, history)
    assert Parsed(text).titles.count("a (peak 40 MiB)") == 1
    assert "</i>a (peak 40 MiB)</span>" in text
    assert set(re.findall(r"peak [\d.]+ \w+", text)) == {"peak 40 MiB", "peak 0 B"}
    pytest.importorskip("matplotlib")
    legend = {words.get_text() for words in draw(report, history).legends[0].get_texts()}
    assert "a (peak 40 MiB)" in legend


def test_names_and_commands_are_text_and_nothing_is_loaded() -> None:
    """Whatever a job is called, the page has no element of it, no script that runs and no address to load from."""
    report, history = run(EVIL)
    text = page(report, history)
    found = Parsed(text)
    assert not any(attributes.get("id") == "evil" for _, attributes in found.elements)
    assert found.rows["jobs"][1][0] == EVIL
    assert msgspec.json.decode(found.script, type=RunReport).jobs[0].name == EVIL
    assert [attributes for tag, attributes in found.elements if tag == "script"] == [
        {"type": "application/json", "id": "report"}
    ]
    loads = [value for _, attributes in found.elements for key, value in attributes.items() if key in ("src", "href")]
    assert loads == ["data:,"]


def test_the_jobs_are_in_the_order_of_the_commands() -> None:
    """The broker's order is that of joining; colours, lanes and waits follow the commands."""
    report, history = run()
    turned = msgspec.structs.replace(report, jobs=report.jobs[::-1])
    rows: Any = Parsed(page(turned, history)).rows["waits"]
    assert rows == [["job", "for b", "for a", NOBODY], ["b", "", "0.2 s", "0.1 s"], ["a", "0.1 s", "", ""]]


def test_close_waits_become_one_and_a_budget_that_changes_is_drawn() -> None:
    """A long run has no more shapes than can be told apart; each budget has its step."""
    report, history = run()
    n = 5000
    starts = np.linspace(0.5, 4.5, n)
    many = dataclasses.replace(
        history,
        wait_job=np.zeros(n, np.int64), wait_kind=np.ones(n, np.int64), wait_t_s=np.stack([starts, starts + 1e-5], 1),
        blocker_wait=np.arange(n), blocker_job=np.ones(n, np.int64),
        budget_t_s=np.array([0.0, 2.0]), budget_bytes=np.array([64, 32]) * MIB,
    )  # fmt: skip
    found = Parsed(page(report, many))
    waits = [title for title in found.titles if "waits" in title]
    assert 0 < len(waits) < 1200
    assert sum(int(title.partition(": ")[2].split()[0]) for title in waits if " times" in title) == n
    (budget,) = [attributes["d"] for _, attributes in found.elements if attributes.get("class") == "budget"]
    assert len({point.split()[1] for point in str(budget)[1:].split("L")}) == 2


def pictures(found: Parsed) -> list[str | None]:
    """Return what the page's pictures are called."""
    return [attributes["aria-label"] for tag, attributes in found.elements if tag == "svg"]


def test_a_run_without_a_history_has_a_page_without_a_picture(tmp_path: Path) -> None:
    """The broker may have died: tables, figures and bars are there."""
    report, history = run()
    write_page(report, None, tmp_path / "r.html")
    found = Parsed((tmp_path / "r.html").read_text())
    assert pictures(found) == ["Time by cause"]
    assert found.rows["jobs"][1][0] == "a"
    empty = dataclasses.replace(
        history, t_s=np.zeros(0), held_bytes=history.held_bytes[:0], out_bytes=history.out_bytes[:0]
    )
    assert pictures(Parsed(page(report, empty))) == ["Time by cause"]
