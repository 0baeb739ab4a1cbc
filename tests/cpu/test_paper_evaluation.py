"""The published evaluation, simulated: what its figures are made of."""

from __future__ import annotations

import json
import re
import string
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.planning.packing.judge import held_regions
from zico.planning.packing.problem import Plan, Problem
from zico.trace.events import EVENT, Kind

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from paper import page, published, tables  # noqa: E402
from paper.work import KERNEL_NS, Work  # noqa: E402

_REGION = 8
_KEPT, _MAP = 0, 1


def _work() -> Work:
    """Return two iterations, each: a map is made by an operation, read by another and freed; 100 bytes stay."""
    rows = [(0, _KEPT, 0, Kind.ALLOC), (0, 0, 0, Kind.BEGIN)]
    for number in (0, 1):
        tensor = _MAP + number
        rows += [(0, tensor, 0, Kind.ALLOC), (0, -1, 0, Kind.OP), (0, -1, 0, Kind.OP), (0, tensor, 0, Kind.FREE)]
        rows += [(0, number, 0, Kind.END) if number else (0, 1, 0, Kind.BEGIN)]
    events = np.array([(t, tensor, size, -1, 0, kind, 0) for t, tensor, size, kind in rows], EVENT)
    sizes = np.zeros((len(events), 2))
    sizes[events["kind"] == Kind.ALLOC] = [(100, 0), (10, 50), (10, 50)]
    operations = [(0, 4e9, 0, 0), (0, 0, 0, 9e6)]  # the first computes, the second moves memory
    return Work("", events, sizes, np.array(2 * operations), 4 * ((4, False),))


def test_a_step_at_any_batch_is_affine_in_it() -> None:
    """Sizes and the peak grow by what a sample takes, and the batch for a peak is found."""
    work = _work()
    trace = work.trace(7, "v100-32gb")
    assert trace.events["size_bytes"][trace.events["kind"] == Kind.ALLOC].tolist() == [100, 360, 360]
    assert work.peak_bytes(7) == 460
    assert [work.batch_for(peak_bytes) for peak_bytes in (1, 460, 484, 486, 1e6)] == [1, 7, 7, 8, 19998]


def test_times_are_rooflines_of_the_device_and_never_less_than_a_kernel() -> None:
    """On a V100 (15.7e12 operations and 900e9 bytes a second) either work takes a second's share of that."""
    durations_ns = _work().durations_ns(10, "v100-32gb").tolist()
    assert durations_ns[:2] == [
        pytest.approx(4e10 / 15.7e12 * 1e9, rel=1e-5),
        pytest.approx(9e7 / 900e9 * 1e9, rel=1e-4),
    ]
    assert durations_ns[2:] == durations_ns[:2]
    assert _work().durations_ns(0, "v100-32gb").tolist()[1] == KERNEL_NS


def test_an_operation_is_busy_with_what_it_waits_for() -> None:
    """Its share of processors or bandwidth is one, of the other nothing."""
    times_ns, processors, memory = _work().busy(10, "v100-32gb")
    assert len(times_ns) == 2
    assert processors == pytest.approx([1, 0], abs=1e-4)
    assert memory == pytest.approx([0, 1], abs=1e-4)


def _model_turnover(problem: Problem, offsets: np.ndarray) -> int:
    """Count region by region and tick by tick."""
    count = 0
    for region in range(64):
        held = np.zeros(problem.n_ticks, bool)
        for i in range(len(problem)):
            if offsets[i] // _REGION <= region <= (offsets[i] + problem.size_bytes[i] - 1) // _REGION:
                held[problem.lower[i] : problem.upper[i]] = True
        count += int((held & ~np.roll(held, 1)).sum())
    return count


@settings(max_examples=200, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 5), st.integers(1, 40), st.integers(0, 80)), min_size=1, max_size=9
    )
)
def test_turnover_counts_what_a_model_counts(tensors: list[tuple[int, int, int, int]]) -> None:
    """Regions held are the judge's, and each beginning is counted once, none at the end of the circle."""
    lower, length, size, offset = (np.array(column) for column in zip(*tensors, strict=True))
    problem = Problem(lower, lower + length, size)
    acquired, held = tables.turnover(problem, offset, _REGION)
    assert held.tolist() == held_regions(problem, Plan(offset, "", 0.0), _REGION).tolist()
    assert acquired == _model_turnover(problem, offset)


def test_memory_that_is_free_at_the_next_mark_only_costs_memory() -> None:
    """Marks after each operation give the live peak; a mark too rare to come keeps everything."""
    events = _work().trace(1, "v100-32gb").events
    assert tables.tracked(events, 0) == {"marks": 2, "peak_bytes": 160}
    assert tables.tracked(events, 1 << 40) == {"marks": 0, "peak_bytes": 220}


def test_published_means_agree_with_published_bars() -> None:
    """Figure 8 as read off gives the means that the text prints, within what reading off costs."""
    for group, said in published.PAIR_GAINS.items():
        bars = [np.mean(pair.zico) for pair in published.PAIRS if (pair.first, pair.second) == group]
        assert np.mean(bars) == pytest.approx(1 + said, abs=0.02)


def test_the_page_is_written_from_the_results_that_are_there() -> None:
    """Page, prose and results agree: writing it again changes nothing."""
    results = {
        name: json.loads((page.common.RESULTS / f"{module.NAME}.json").read_text())
        for name, module in page.MODULES.items()
    }
    host = [json.loads((page.common.RESULTS / f"{name}.json").read_text()) for name in page.HOST]
    assert page.PAGE.read_text() == page.page_of(results, *host)


def test_every_picture_of_the_page_is_there() -> None:
    """No picture is named that is not in the repository."""
    named = re.findall(r"\((images/[^)]+)\)", (ROOT / "docs" / "evaluation.md").read_text())
    assert len(named) == 7
    assert all((ROOT / "docs" / name).exists() for name in named)
    assert "$" not in string.Template((ROOT / "docs" / "evaluation.md").read_text()).template
