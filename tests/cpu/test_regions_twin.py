"""How regions come into a job's window on the software twin: by which calls, and what a refused one leaves."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.driver_contract import open_descriptors
from cpu.support.twin_tenant import TwinTenant
from cpu.support.twin_world import REGION_BYTES, World

from zico.heap.cuda import on_stream
from zico.pool import regions
from zico.pool.results import GRANTED

if TYPE_CHECKING:
    import collections
    from collections.abc import Iterator

N = 6
FD_SETSIZE = 1024
"""``select(2)`` takes only descriptors below it."""
IMPORT = "cuMemImportFromShareableHandle"


@contextlib.contextmanager
def jobs(n_regions: int, count: int) -> Iterator[tuple[World, list[TwinTenant]]]:
    """Make a device, a pool and jobs."""
    with World(n_regions) as world, contextlib.ExitStack() as stack:
        yield world, [stack.enter_context(TwinTenant(world)) for _ in range(count)]


def use_and_free(job: TwinTenant, n: int) -> collections.Counter[str]:
    """Allocate a tensor of ``n`` regions, free it, let the device finish with it; returns the calls that were made."""
    before = job.world.twin.counts.copy()
    tensor = job.allocate(n * REGION_BYTES)
    assert tensor is not None
    job.free(tensor)
    job.settle()
    job.driver.synchronize(job.handles[0])
    return job.world.twin.counts - before


# -- mapping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("taken", "ranges"),
    [((), 0), ((2,), 1), ((2, 3), 1), ((0, 2, 3, 5), 3), ((0, 1, 2, 3, 4, 5), 1)],
)
def test_regions_side_by_side_are_opened_by_one_call(taken: tuple[int, ...], ranges: int) -> None:
    """A tensor's new regions are mapped one by one, and each range of them is opened at once."""
    with jobs(2 * N, 2) as (world, (job, other)):
        counts = use_and_free(job, N)
        assert (counts["cuMemMap"], counts["cuMemSetAccess"]) == (N, 1)
        mine = job.heap.slots["mapped"][job.heap.slots["mapped"] >= 0]
        wanted = mine[list(taken)].astype("i4")
        assert not taken or regions.acquire(other.member.member[0], wanted, len(taken), 0) == GRANTED
        assert wanted.tolist() == mine[list(taken)].tolist()
        counts = use_and_free(job, N)
        assert (counts["cuMemMap"], counts["cuMemSetAccess"]) == (len(taken), ranges)
        if taken:
            regions.release(other.member.member[0], wanted, len(taken))
        assert not world.faults


class _FromOneOn(dict[str, str]):
    """Let one call that maps fail, and all behind it."""

    def __init__(self, first: int) -> None:
        """Let so many of them pass before."""
        super().__init__()
        self.left = first

    def pop(self, key: str, *_default: Any) -> Any:  # noqa: ANN401 - as a dict's
        """Return a status for a call that is to fail."""
        if key not in {IMPORT, "cuMemMap", "cuMemSetAccess"}:
            return None
        self.left -= 1
        return "UNKNOWN" if self.left < 0 else None


def test_a_grant_that_the_driver_refuses_half_way_leaves_nothing_mapped() -> None:
    """From whichever call on the driver refuses, nothing stays mapped or owned, and later the tensor is served."""
    for first in range(2 * N):  # an import and a map of each region but the first, its map, and the access
        with jobs(N, 1) as (world, (job,)):
            record, stream = job.record[0], job.handles[0]
            world.twin._failing = _FromOneOn(first)
            assert on_stream.allocate_on(record, N * REGION_BYTES, stream) <= 0
            assert "mappings" not in world.twin.leaks()
            assert world.pool.header["granted"] == 0
            world.twin._failing = {}
            use_and_free(job, N)
            job.leave()
            assert not world.faults


# -- imports ---------------------------------------------------------------------------------------


def test_a_jobs_start_and_end_do_not_depend_on_regions_that_it_never_maps() -> None:
    """A job of a pool of many regions makes as many calls, by name, as one of a pool of few."""
    made = []
    for n in (N, 8 * N):
        with World(n) as world:
            before = world.twin.counts.copy()
            with TwinTenant(world) as job:
                assert (world.twin.counts - before)[IMPORT] == 1
                assert use_and_free(job, 2)[IMPORT] <= 2
                job.leave()
            counts = world.twin.counts - before
            counts["cuCtxGetCurrent"] -= counts.pop("cuMemExportToShareableHandle")  # the broker's, made once for all
            made.append(counts)
    assert made[0] == made[1]


def test_a_region_is_imported_once_and_its_descriptor_closed_then() -> None:
    """Each region's descriptor stays open until it is mapped first; nobody inherits one, and none outlives the job."""
    with World(N) as world:
        before = open_descriptors()
        with TwinTenant(world) as job:
            use_and_free(job, 1)
            kept = [int(one) for one in job.member.memory.descriptors if one >= 0]
            assert len(kept) in (N - 1, N - 2), "of all but the first one, and the one that the tensor had"
            for descriptor in kept:
                assert Path(f"/proc/self/fd/{descriptor}").readlink().name.startswith("memfd:")
                assert not os.get_inheritable(descriptor)
            assert min(kept) >= FD_SETSIZE, "low numbers are left to the program"
            use_and_free(job, N)
            assert use_and_free(job, N)[IMPORT] == 0
            assert (job.member.memory.descriptors < 0).all()
            job.leave()
        assert open_descriptors() <= before
