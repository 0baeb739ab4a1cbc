"""Figures of a GPU that documents quote are those that the raw files give."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
FIGURES = runpy.run_path(str(ROOT / "benchmarks" / "gpu" / "figures.py"))


@pytest.mark.parametrize("name", ["pairs", "resnets", "steps"])
def test_the_page_of_results_has_the_tables_of_its_raw_files(name: str) -> None:
    """Means of whole runs and gains stand there as they are worked out from what was recorded."""
    assert FIGURES["tables"]()[name] in (RESULTS / "README.md").read_text()


def test_gains_that_users_are_told_are_those_of_the_raw_files() -> None:
    """The guide's table has each pair's gain over one job after the other."""
    guide = (ROOT / "docs" / "gpu.md").read_text()
    rows = [line for line in guide.splitlines() if line.startswith(("| DCGAN", "| ResNet-50"))]
    told = [line.split("|")[-3].strip() for line in rows]
    assert told == [row[-1] for row in (*FIGURES["pair_rows"](), *FIGURES["resnet_rows"]())]


def test_a_job_alone_is_one_whose_neighbour_has_ended() -> None:
    """Times before the other's last iteration are none of a job alone."""
    first, second = [1.0, 2.0, 3.0], [2.5, 3.5, 4.0, 4.25]
    assert FIGURES["alone_ms"]([first, second]) == [500.0, 250.0]
