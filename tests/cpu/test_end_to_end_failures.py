"""The whole of Zico on the software twin where a call of the driver fails: who is hit, and who goes on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from cpu.support.twin_tenant import TwinTenant
from cpu.support.twin_world import REGION_BYTES, World

from zico.base.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_LIMIT_S = 1.0
"""Only a refused call makes a job wait for so long, and a twin's threads on a busy machine need some of it."""


class Script:
    """Two jobs that take turns with all the memory there is; a job to which an error comes dies, the other goes on."""

    def __init__(self, world: World) -> None:
        """Start without jobs."""
        self.world = world
        self.jobs: dict[str, TwinTenant] = {}
        self.errors: list[DriverError] = []
        self.refused = 0

    @contextlib.contextmanager
    def turn(self, name: str) -> Iterator[TwinTenant | None]:
        """Let a job do something, if it is there and has not failed."""
        try:
            yield self.jobs.get(name)
        except DriverError as error:
            self.errors.append(error)
            if name in self.jobs:
                self.jobs.pop(name).die()

    def join(self, name: str) -> None:
        """Let a job join."""
        with self.turn(name):
            self.jobs[name] = TwinTenant(self.world, name=name, wait_limit_s=WAIT_LIMIT_S)

    def work(self, name: str) -> None:
        """Let a job use all memory for its iteration, on two streams."""
        with self.turn(name) as job:
            if job is not None:
                tensors = [job.allocate(size_bytes) for size_bytes in (100, 3 * REGION_BYTES)]
                self.refused += None in tensors
                for tensor in filter(None, tensors):
                    job.use_on(tensor, 1)
                    job.free(tensor)
                job.end_iteration()

    def leave(self, name: str) -> None:
        """Let a job end in order."""
        with self.turn(name) as job:
            if job is not None:
                job.leave()
                del self.jobs[name]

    def run(self) -> None:
        """Do it all; afterwards nobody is there any more."""
        for name in "ab":
            self.join(name)
        for name in "aba":
            self.work(name)
        before = self.refused
        self.world.twin.fail_at = 0
        for job in self.jobs.values():
            job.settle()  # what the device has refused to wait for stays until the job's next call
        for name in "ba":
            self.work(name)
        assert self.refused == before, "whoever is left has all the memory"
        for name in "ab":
            self.leave(name)


def test_failure_of_every_driver_call_costs_one_job_at_most() -> None:
    """Whichever call of the driver fails, at most one job ends, with one sentence; the other goes on, nothing leaks."""
    fail_at, raised, survived = 0, 0, 0
    while True:
        fail_at += 1
        try:
            world = World(4, fail_at=fail_at)
        except DriverError as error:
            check_sentence(error)
            raised += 1
            continue
        with world:
            script = Script(world)
            script.run()
            is_hit = world.twin.calls >= fail_at
            assert len(script.errors) + script.refused <= is_hit
            assert not world.faults
            assert world.pool.header["granted"] == 0
            raised += len(script.errors)
            survived += is_hit and len(script.errors) + script.refused == 0
            for error in script.errors:
                check_sentence(error)
        if not is_hit:
            break
    assert min(raised, survived) > 50


def check_sentence(error: DriverError) -> None:
    """Check that an error is one sentence which says what failed."""
    said = str(error)
    assert "\n" not in said
    assert len(said) < 300
    assert said.startswith("cu")
    assert "CUDA_ERROR_UNKNOWN" in said


class _Always(dict[str, str]):
    """Failures that do not end."""

    def pop(self, key: str, *default: Any) -> Any:  # noqa: ANN401 - as a dict's
        """Keep them."""
        return self.get(key, *default)


def test_a_slot_whose_mapping_failed_is_mapped_again() -> None:
    """Invariant 4: when the device would not map another region there, the old one is unmapped, and known to be."""
    with World(2) as world, TwinTenant(world) as a, TwinTenant(world) as b:
        first = a.allocate(REGION_BYTES)
        assert first is not None
        a.free(first)
        tensors = [b.allocate(REGION_BYTES) for _ in range(2)]
        assert all(tensors)
        moved, kept = sorted(filter(None, tensors), key=lambda one: one.pieces[0][0] == first.pieces[0][0])
        b.free(moved)
        world.twin._failing = _Always(cuMemMap="UNKNOWN")
        assert a.allocate(REGION_BYTES) is None
        world.twin._failing = {}
        world.twin.refused.clear()
        assert b.allocate(REGION_BYTES) is not None
        b.free(kept)
        again = a.allocate(REGION_BYTES)
        assert again is not None
        assert (again.address, again.pieces) == (first.address, first.pieces)
        for job in (a, b):
            job.leave()
        world.check()
