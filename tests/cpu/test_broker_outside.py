"""What lies outside a pool on its GPU, told by a management library that says what a test likes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from cpu.support import fake_nvml
from cpu.support.fake_nvml import UUID, Library, Memory, Process

from zico.base.units import GIB, MIB
from zico.broker.outside import LOOK_NS, DeviceUse, Outside, OutsideFigures, use_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ABSENT_PID = 1 << 30
"""More than any process number (proc(5), pid_max)."""


@pytest.fixture(scope="module")
def others() -> Iterator[tuple[int, int]]:
    """Give the numbers of two other processes that live."""
    with contextlib.ExitStack() as ended:
        pids = []
        for _ in range(2):
            waiting = [sys.executable, "-IS", "-c", "import sys; sys.stdin.read()"]
            process = ended.enter_context(subprocess.Popen(waiting, stdin=subprocess.PIPE))
            ended.callback(process.kill)
            pids.append(process.pid)
        yield pids[0], pids[1]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, others: tuple[int, int]) -> Library:
    """Install a library of a GPU of 80 GiB with 20 GiB free, used by this process and two others."""
    processes = [Process(os.getpid(), GIB), Process(others[0], 2 * GIB), Process(others[1], 5 * GIB)]
    made = Library(Memory(80 * GIB, 20 * GIB), processes)
    made.install(monkeypatch)
    return made


def test_used_memory_is_pool_contexts_and_foreign(library: Library, others: tuple[int, int]) -> None:
    """What is used splits into the pool, what is listed for broker and jobs, and the rest, which is of others."""
    library.memory = Memory(80 * GIB, 22 * GIB)
    found = Outside(UUID, 50 * GIB).look({others[0]}, 0)
    assert found == OutsideFigures(context_bytes=3 * GIB, foreign_bytes=5 * GIB)
    assert library.memory.total - library.memory.free == 50 * GIB + sum(found)


def test_memory_that_no_process_is_listed_for_is_no_context_of_a_job(library: Library, others: tuple[int, int]) -> None:
    """Another pool, whose broker has no context, or what a dead process still holds, counts for others."""
    library.memory = Memory(80 * GIB, 2 * GIB)
    found = Outside(UUID, 50 * GIB).look({others[0]}, 0)
    assert found == OutsideFigures(context_bytes=3 * GIB, foreign_bytes=25 * GIB)


def test_what_the_driver_keeps_for_itself_is_nobodys(library: Library, others: tuple[int, int]) -> None:
    """Where the library tells it, memory for the system's own use is neither a context nor another's."""
    library.memory = Memory(80 * GIB, 20 * GIB, reserved=2 * GIB)
    found = Outside(UUID, 50 * GIB).look({others[0]}, 0)
    assert found == OutsideFigures(context_bytes=3 * GIB, foreign_bytes=5 * GIB)


def test_clients_of_mps_are_listed_apart_and_count_as_any_process(library: Library, others: tuple[int, int]) -> None:
    """A job under MPS has its context, though the list of processes names the server alone."""
    library.processes, library.mps = [Process(others[1], GIB)], [Process(others[0], 4 * GIB)]
    found = Outside(UUID, 50 * GIB).look({others[0]}, 0)
    assert found == OutsideFigures(context_bytes=4 * GIB, foreign_bytes=6 * GIB)


def test_regions_that_the_library_counts_for_who_has_mapped_them_are_no_context(
    library: Library, others: tuple[int, int]
) -> None:
    """Contexts are at most what is used beyond the pool and what others are listed for."""
    library.processes = [Process(others[0], 51 * GIB), Process(others[1], 5 * GIB)]
    found = Outside(UUID, 50 * GIB).look({others[0]}, 0)
    assert found == OutsideFigures(context_bytes=5 * GIB, foreign_bytes=5 * GIB)


def test_the_library_is_asked_at_most_once_a_second_and_opened_once(library: Library) -> None:
    """Looks in between return the last answer; every look closes what it opened."""
    look = Outside(UUID, 50 * GIB).look
    first = look(set(), 0)
    library.memory = Memory(80 * GIB, 10 * GIB)
    assert look(set(), LOOK_NS - 1) is first
    assert look(set(), LOOK_NS) != first
    assert (library.questions, library.open) == (2, 1)
    assert Outside(UUID, GIB).fault == ""


def test_less_used_than_the_pool_has_is_no_negative_context(library: Library) -> None:
    """Where the library counts less than the pool, contexts are 0, never negative."""
    library.memory = Memory(80 * GIB, 79 * GIB)
    found = Outside(UUID, 50 * GIB).look(set(), 0)
    assert found is not None
    assert found.context_bytes == 0


@pytest.mark.parametrize("processes", [[Process(ABSENT_PID, MIB)], [Process(os.getpid(), None)]])
def test_processes_that_cannot_be_told_leave_the_split_out(library: Library, processes: list[Process]) -> None:
    """A process of another pid namespace, or one without a figure: the free bytes are known, the split is not."""
    library.processes = processes
    use = use_of(UUID)
    assert use == DeviceUse(80 * GIB, 20 * GIB, None)
    assert use.holders == ""
    assert Outside(UUID, GIB).look(set(), 0) is None


@pytest.mark.parametrize(
    "failing", ["Init", "DeviceGetHandleByUUID", "DeviceGetMemoryInfo", "DeviceGetComputeRunningProcesses"]
)
def test_a_library_that_fails_is_as_good_as_none(library: Library, failing: str) -> None:
    """Whichever of its functions fails, nothing is known, and what was opened is closed."""
    library.failing = failing
    assert use_of(UUID) is None
    assert library.open == 0
    assert Outside(UUID, GIB).look(set(), 0) is None


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (6, "the driver does not find the GPU any more"),
        (15, "the GPU is lost"),
        (16, "the GPU must be reset"),
        (999, ""),
    ],
)
def test_a_gpu_that_is_lost_is_told(library: Library, status: int, says: str) -> None:
    """A GPU that was there and is no longer ends the pool; one that was never seen, or another error, says nothing."""
    seen, unseen = Outside(UUID, GIB), Outside(UUID, GIB)
    seen.look(set(), 0)
    assert seen.fault == ""
    library.lost = status
    for outside in (seen, unseen):
        outside.look(set(), LOOK_NS)
    library.lost = 0
    seen.look(set(), 2 * LOOK_NS)
    assert (seen.fault, unseen.fault) == (says, "")


def test_errors_of_the_gpus_memory_are_told(library: Library) -> None:
    """What could not be corrected since the pool was made ends it; what was before, or is not counted, does not."""
    library.errors = 2
    outside, uncounted = Outside(UUID, GIB), Outside(UUID, GIB)
    outside.look(set(), 0)
    assert outside.fault == ""
    library.errors = None
    uncounted.look(set(), 0)
    assert uncounted.fault == ""
    library.errors = 3
    outside.look(set(), LOOK_NS)
    assert outside.fault == "the GPU's memory has had errors (1) that could not be corrected"


def test_without_the_library_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is not installed, the answer is that nobody knows."""
    fake_nvml.uninstall(monkeypatch)
    assert use_of(UUID) is None
    assert Outside(UUID, GIB).look(set(), 0) is None


def test_the_biggest_holders_are_named(others: tuple[int, int]) -> None:
    """Those who hold most come first, by name and process, then how many more there are."""
    use = DeviceUse(GIB, 0, {os.getpid(): 3 * MIB, others[0]: 5 * MIB, others[1]: 4 * MIB, ABSENT_PID: MIB})
    names = use.holders.split(", ")
    assert [name.rpartition(" (process")[2] for name in names[:3]] == [
        f" {pid}) {size} MiB" for pid, size in ((others[0], 5), (others[1], 4), (os.getpid(), 3))
    ]
    assert names[3] == "1 more"
    assert DeviceUse(GIB, 0, {ABSENT_PID: MIB}).holders == f"somebody (process {ABSENT_PID}) 1 MiB"
