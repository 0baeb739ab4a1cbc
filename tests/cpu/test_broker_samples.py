"""The bounded history: true instants, peaks kept, never more rows than room."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.broker.samples import History

rows = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 1000), st.dictionaries(st.integers(0, 9), st.integers(0, 50))),
    min_size=40,
    max_size=100,
)


def test_many_jobs_make_rows_fewer_and_the_peaks_stay() -> None:
    """A history never has more cells than it may: a sweep's broker does not grow with every job."""
    history = History(max_rows=16, period_ns=1, max_cells=64)
    for t in range(40):
        history.add(t, t, {t: 100 if t == 5 else 1})
        assert history._regions[..., 0].size <= 64 or len(history) <= 2
    t_ns, _, held, _ = history.rows()
    assert len(t_ns) == len(held) <= 2
    assert held.max() == 100


@settings(max_examples=40)
@given(rows)
def test_a_full_history_keeps_peaks_and_true_instants(given_rows: list[tuple[int, int, dict[int, int]]]) -> None:
    """However many rows come, the room is enough, each row was added as it is, and the peaks are still there."""
    history = History(max_rows=16, period_ns=10)
    t_ns = 0
    added = []
    for step_ns, physical_bytes, held in given_rows:
        t_ns += step_ns
        history.add(t_ns, physical_bytes, held)
        added.append((t_ns, tuple(held.get(job, 0) for job in range(10))))
    kept_ns, physical, held_kept, _out = history.rows()
    wide = np.zeros((len(kept_ns), 10), np.int64)
    wide[:, : held_kept.shape[1]] = held_kept
    assert len(history) == len(kept_ns) <= 16
    assert set(zip(kept_ns.tolist(), map(tuple, wide.tolist()), strict=True)) <= set(added)
    assert np.all(np.diff(kept_ns) >= 0)
    assert physical.max(initial=0) == max((row[1] for row in given_rows), default=0)
    assert wide.sum(axis=1).max(initial=0) == max((sum(held) for _, held in added), default=0)


def test_a_burst_of_events_shares_a_row() -> None:
    """Within one period the instant with the most regions stays, and the most physical bytes."""
    history = History(max_rows=8, period_ns=100)
    for t_ns, physical_bytes, regions in ((0, 5, 1), (10, 9, 4), (20, 7, 2), (100, 1, 1)):
        history.add(t_ns, physical_bytes, {0: regions})
    t_ns_kept, physical, held, _out = history.rows()
    assert t_ns_kept.tolist() == [10, 100]
    assert physical.tolist() == [9, 1]
    assert held.tolist() == [[4], [1]]


def test_a_job_that_comes_later_held_nothing_before() -> None:
    """New columns are zero in the rows before them."""
    history = History(max_rows=8, period_ns=1)
    history.add(0, 0, {0: 3})
    history.add(1, 0, {7: 2})
    assert history.rows()[2].tolist() == [[3, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 2]]


def test_what_lies_in_a_tier_stays_with_its_instant() -> None:
    """It is of the row whose regions are shown, also when the history is thinned or gets wider."""
    history = History(max_rows=4, period_ns=1)
    for t_ns in range(8):
        history.add(t_ns, 0, {t_ns: t_ns + 1}, {t_ns: 10 * (t_ns + 1)})
    _, _, held, out = history.rows()
    assert len(held) < 8
    assert (out == 10 * held).all()
