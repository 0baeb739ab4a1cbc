"""The picture: what it chooses to show, and that it is a picture."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from cpu.support.report_cases import record

from zico.base.errors import ConfigError
from zico.base.units import MIB
from zico.broker.protocol.messages import WaitKind
from zico.lab.simulator.jobs_file import read_jobs
from zico.report.files import write_jobs
from zico.report.model import PoolFigures, RunReport
from zico.report.picture import (
    MAX_COLUMNS,
    OUT_LABEL,
    Span,
    draw,
    fullest_rows,
    in_order,
    last_iterations,
    whole_span,
    write_picture,
)
from zico.scheduler.simulate import peak_of

REPORT = RunReport(device="host", policy="zico", budget_bytes=64 * MIB, pool=PoolFigures(), jobs=())


def test_what_lies_in_a_tier_hangs_below_the_axis() -> None:
    """As far as all of it together reaches, with an entry in the legend; without any the axis begins at 0."""
    pytest.importorskip("matplotlib")
    run = record(3)
    assert draw(REPORT, run).axes[0].get_ylim()[0] == 0
    out = dataclasses.replace(run, out_bytes=np.tile([3 * MIB, 7 * MIB], (len(run.t_s), 1)))
    figure = draw(REPORT, out)
    assert figure.axes[0].get_ylim()[0] == pytest.approx(-11)
    assert OUT_LABEL in [text.get_text() for text in figure.legends[0].get_texts()]
    assert in_order(out, ["b", "a"]).out_bytes[0].tolist() == [7 * MIB, 3 * MIB]


def test_a_picture_is_written(tmp_path: Path) -> None:
    """A run becomes a PNG file of a legible size."""
    pytest.importorskip("matplotlib")
    write_picture(REPORT, record(5), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_name_is_no_formula(tmp_path: Path) -> None:
    """Dollars and underscores in jobs' names stand in the picture as they are."""
    pytest.importorskip("matplotlib")
    run = dataclasses.replace(record(5), names=("$x^$", "_b"))
    legend = [text.get_text() for text in draw(REPORT, run).legends[0].get_texts()]
    assert [label.partition(" ")[0] for label in legend[:2]] == ["$x^$", "_b"]
    write_picture(REPORT, run, tmp_path / "p.png")


def test_jobs_are_written_as_their_profiles_were(tmp_path: Path) -> None:
    """Each job's curve is in the file, equal neighbours joined; one that never ended an iteration is not."""
    made = dataclasses.replace(
        record(5),
        profile_job=np.zeros(3, np.int64),
        profile_t_s=np.array([0.0, 0.25, 0.5]),
        profile_bytes=np.array([20, 20, 40]) * MIB,
    )
    assert write_jobs(made, tmp_path / "jobs.json")
    wanted = {"name": "a", "iteration_s": 1.0, "persistent_bytes": 0, "curve": [[0.0, 20 * MIB], [0.5, 40 * MIB]]}
    assert json.loads((tmp_path / "jobs.json").read_bytes()) == {"jobs": [wanted]}


def test_what_is_no_usual_iteration_becomes_a_phase(tmp_path: Path) -> None:
    """A job that evaluates in twice its usual peak in iterations 3 to 5 is simulated with that peak."""
    made = record(10)
    held = made.held_bytes.copy()
    held[150:300, 0] *= 2
    made = dataclasses.replace(made, held_bytes=held, profile_bytes=np.array([20, 40]) * MIB)
    assert write_jobs(made, tmp_path / "jobs.json")
    (load,) = read_jobs((tmp_path / "jobs.json").read_bytes(), "jobs.json", tmp_path)
    assert load.profile.peak == 40 * MIB
    assert [phase.after for phase in load.phases] == [3, 6]
    assert peak_of(load) == held[150:300, 0].max() > 78 * MIB
    assert load.phases[1].profile == load.profile


def test_without_a_profile_no_jobs_are_written(tmp_path: Path) -> None:
    """A run in which no iteration ended leaves no file that nobody could simulate."""
    assert not write_jobs(dataclasses.replace(record(1), iteration_s=np.zeros(2)), tmp_path / "jobs.json")
    assert not (tmp_path / "jobs.json").exists()


def test_long_runs_get_a_panel_of_their_last_iterations() -> None:
    """A run of many iterations has three panels, the middle one over about ten iterations; a short one has two."""
    pytest.importorskip("matplotlib")
    span = last_iterations(record(60))
    assert span is not None
    assert 9.5 < span.stop_s - span.start_s < 11
    assert len(draw(REPORT, record(60)).axes) == 3
    assert last_iterations(record(5)) is None
    assert len(draw(REPORT, record(5)).axes) == 2


def test_the_enlarged_panel_shows_a_time_in_which_all_trained() -> None:
    """If one job goes on alone, the enlarged panel ends where the other one ended."""
    both = record(60)
    keep = (both.boundary_job == 0) | (both.boundary_t_s < 30)
    cut = dataclasses.replace(both, boundary_job=both.boundary_job[keep], boundary_t_s=both.boundary_t_s[keep])
    span = last_iterations(cut)
    assert span is not None
    assert 29 < span.stop_s < 30


def test_no_peak_is_lost_when_instants_are_many() -> None:
    """Of more instants than columns the fullest of each column is drawn, so the highest is among them."""
    many = record(400)
    rows = fullest_rows(many, whole_span(many))
    totals = many.held_bytes.sum(axis=1)
    assert len(rows) == MAX_COLUMNS
    assert totals[rows].max() == totals.max()
    assert len(fullest_rows(record(2), Span(0.0, 1.0))) == 51


def test_jobs_are_drawn_in_the_order_of_the_table() -> None:
    """Reordering jobs keeps each one's profile, iterations and waits with it; who is left out blocks nobody."""
    before = record(5)
    after = in_order(before, ["b", "a"])
    assert after.names == ("b", "a")
    assert (after.held_bytes[:, 0] == before.held_bytes[:, 1]).all()
    assert after.boundaries_of(0).tolist() == before.boundaries_of(1).tolist()
    assert after.waits_of(0, WaitKind.ALLOCATION).tolist() == before.waits_of(1, WaitKind.ALLOCATION).tolist()
    assert after.peak_bytes.tolist() == before.peak_bytes[::-1].tolist()
    assert [len(after.curve_of(job)[0]) for job in (0, 1)] == [0, 2]
    alone = before.of([0])
    assert (alone.names, alone.wait_job.tolist(), alone.blockers()) == (("a",), [0], [()])


def test_an_empty_record_is_explained(tmp_path: Path) -> None:
    """A run in which nobody joined has no picture, and says why."""
    empty = dataclasses.replace(record(5), t_s=np.zeros(0))
    with pytest.raises(ConfigError, match="no job joined"):
        write_picture(REPORT, empty, tmp_path / "p.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_line_to_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where matplotlib is missing, the error says how to get it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'zico-memory\[plot\]'"):
        draw(REPORT, record(5))
