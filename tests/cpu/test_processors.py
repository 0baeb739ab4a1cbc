"""Which processors of the host a job with a share of them gets, and how many count."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zico.launch.processors import Processors, limited_to

if TYPE_CHECKING:
    from pathlib import Path

HERE = os.sched_getaffinity(0)
EIGHT = Processors(tuple(range(8)), 8)
OLD = {"cpu__a__cpu-cfs_period_us": "100000\n"}
"""A file of version 1."""


def usable(tmp_path: Path, group: str = "0::/a/b\n", **files: str) -> Processors:
    """Return what may be used in a control group; a ``/`` in the name of one of its files is written ``__``."""
    (tmp_path / "self").write_text(group)
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/").replace("-", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Processors.usable(tmp_path, tmp_path / "self", tmp_path / "cpu")


# -- how many there are ----------------------------------------------------------------------------


def test_those_count_that_this_process_may_use(tmp_path: Path) -> None:
    """Neighbours lie together: processors of a core, then of a package, by number where the kernel says nothing."""
    assert usable(tmp_path) == Processors(tuple(sorted(HERE)), len(HERE))
    cores = {number: len(HERE) - place for place, number in enumerate(sorted(HERE))}
    for number, core in cores.items():
        files = {f"cpu__cpu{number}__topology__{name}": str(text) for name, text in
                 (("physical_package_id", 0), ("core_id", core))}  # fmt: skip
        found = usable(tmp_path, **files)
    assert found.numbers == tuple(sorted(HERE, reverse=True))


@pytest.mark.parametrize(
    ("group", "files", "allowed"),
    [
        ("0::/a/b\n", {"a__b__cpu-max": "50000 100000\n"}, 1),
        ("0::/a/b\n", {"a__cpu-max": "110000 100000\n", "a__b__cpu-max": "max 100000\n"}, 2),
        ("0::/a/b\n", {"a__b__cpu-max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a__b__cpu-max": "nonsense"}, None),
        ("2:memory:/m\n1:cpu,cpuacct:/a\n0::/\n", OLD | {"cpu__a__cpu-cfs_quota_us": "100000\n"}, 1),
        ("1:cpu:/a\n", OLD | {"cpu__a__cpu-cfs_quota_us": "-1\n"}, None),
    ],
)  # fmt: skip
def test_a_control_group_may_allow_fewer(
    tmp_path: Path, group: str, files: dict[str, str], allowed: int | None
) -> None:
    """Of both versions, the tightest group on the way up counts; a part of a processor is one."""
    assert usable(tmp_path, group, **files).count == min(len(HERE), allowed or len(HERE))


# -- which a job gets ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "count", "wanted"),
    [(0.5, 8, 4), (0.3, 10, 3), (0.29, 100, 29), (0.3, 8, 2), (0.99, 8, 7), (0.01, 8, 1), (0.3, 2, 1), (0.5, 1, 1)],
)
def test_a_share_is_whole_processors_and_one_at_least(share: float, count: int, wanted: int) -> None:
    """Never more than was asked for, but for that one."""
    assert len(Processors(tuple(range(128)), count).chosen(share, ())) == wanted


def test_jobs_get_different_processors_until_there_are_no_more() -> None:
    """Then those that fewest have; what a job had that has ended is free."""
    first = EIGHT.chosen(0.5, ())
    second = EIGHT.chosen(0.25, (first,))
    assert (first, second) == ({0, 1, 2, 3}, {4, 5})
    assert EIGHT.chosen(0.5, (first, second)) == {6, 7, 0, 1}
    assert EIGHT.chosen(0.5, (second,)) == {0, 1, 2, 3}


@given(st.integers(1, 64), st.lists(st.integers(1, 100), max_size=12))
def test_no_two_jobs_meet_if_there_is_enough(count: int, percents: list[int]) -> None:
    """Shares that add up to at most all, each of them worth a processor, have no processor in common."""
    percents = [percent for percent in percents if percent * count >= 100]
    kept = [percent for percent, before in zip(percents, itertools.accumulate(percents), strict=True) if before <= 100]
    got: list[frozenset[int]] = []
    for percent in kept:
        got.append(Processors(tuple(range(count)), count).chosen(percent / 100, got))
    assert sum(map(len, got)) == len(frozenset().union(*got))


def test_what_is_started_meanwhile_is_limited_from_its_beginning() -> None:
    """And this thread is not, afterwards; nothing has changed where the kernel refuses."""
    one = {min(HERE)}
    with limited_to(one):
        code = "import os; print(*os.sched_getaffinity(0))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(min(HERE))]
    assert os.sched_getaffinity(0) == HERE
    with pytest.raises(OSError, match="Invalid argument"), limited_to({1 << 14}):
        pass
    assert os.sched_getaffinity(0) == HERE
