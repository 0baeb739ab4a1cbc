"""The whole of Zico on the CUDA driver's software twin: jobs with streams, in any order that a device may have."""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.members import counters
from cpu.support.twin_tenant import TwinTenant
from cpu.support.twin_world import REGION_BYTES, World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

if TYPE_CHECKING:
    from cpu.support.twin_world import Tensor

KIB = 1 << 10
DEADLINE_S = 60.0
WITHOUT_KERNELS = {"COMPUTE_CAPABILITY_MAJOR": 6}
"""Marks and waits are stream operations."""
BY_KERNEL = {"CAN_USE_64_BIT_STREAM_MEM_OPS": 0}
"""Marks and waits are kernels."""
TINY, SMALL, MIDDLE, LARGE = 12, 32 * KIB, 400 * KIB, 3 * REGION_BYTES
WHICH = st.integers(0, 1 << 20)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """Compile what jobs call, so that no test's deadline pays for it."""
    with World(4) as world, TwinTenant(world) as job:
        for size_bytes in (100, REGION_BYTES):
            tensor = job.allocate(size_bytes)
            assert tensor is not None
            job.use_on(tensor, 1)
            job.free(tensor, 1)
        job.leave()


def would_fit(job: TwinTenant, size_bytes: int) -> bool:
    """Tell whether a request is within the budget; a job takes a fifth of a second to believe that it is not."""
    needed = -(-size_bytes // REGION_BYTES) + 1
    return int(job.job["held"]) + needed <= int(job.world.pool.header["budget_regions"])


class EndToEndMachine(RuleBasedStateMachine):
    """Jobs with several streams allocate, use, free, end iterations, leave and die; the device does as it likes."""

    @initialize(
        n=st.integers(3, 9),
        jobs=st.integers(1, 3),
        streams=st.integers(1, 3),
        spacing=st.sampled_from([(0, 0, 0), (0, 3 * REGION_BYTES, 2 * REGION_BYTES), (2 * REGION_BYTES, 0, 0)]),
        way=st.sampled_from([{}, {"attributes": WITHOUT_KERNELS}, {"isolate": True}]),
    )
    def begin(self, n: int, jobs: int, streams: int, spacing: tuple[int, int, int], way: dict[str, Any]) -> None:
        """Make the device, which stands still, and the jobs."""
        self.stack = contextlib.ExitStack()
        self.world = self.stack.enter_context(World(n, **way))
        names = ("spacing_bytes", "alone_bytes", "beside_bytes")
        self.options: dict[str, Any] = {"streams": streams} | dict(zip(names, spacing, strict=True))
        self.runs_freely = False
        self.world.twin.pause()
        self.tenants = [self._join() for _ in range(jobs)]
        self.before = counters(self.world.pool).copy()

    def _join(self) -> TwinTenant:
        return self.stack.enter_context(TwinTenant(self.world, **self.options))

    def teardown(self) -> None:
        """When all have left, every region is free, and the device has everything back."""
        if not hasattr(self, "stack"):
            return
        with self.stack:
            self.world.twin.release()
            for tenant in self.tenants:
                tenant.leave()
            self.world.check()
            assert self.world.pool.header["granted"] == 0

    def _pick(self, which: int) -> TwinTenant:
        return self.tenants[which % len(self.tenants)]

    # -- jobs --------------------------------------------------------------------------------------

    @rule(job=WHICH, seed=WHICH, doings=st.sampled_from([1, 4, 12, 24]))
    def work(self, job: int, seed: int, doings: int) -> None:
        """A job allocates, uses tensors on streams, frees them on streams, and ends its iteration now and then."""
        tenant = self._pick(job)
        rng = random.Random(seed)  # noqa: S311 - a test's
        for _ in range(doings):
            doing, stream = rng.choice("aaaaffuue"), rng.randrange(self.options["streams"])
            if doing == "a":
                size_bytes = rng.randint(1, rng.choice([TINY, SMALL, MIDDLE, LARGE]))
                if would_fit(tenant, size_bytes):
                    tenant.allocate(size_bytes, stream)
            elif doing == "e" and rng.random() < 0.3:
                tenant.end_iteration()
            elif tenant.live and doing != "e":
                tensor = rng.choice(tenant.live)
                (tenant.free if doing == "f" else tenant.use_on)(tensor, stream)

    @rule(job=WHICH, how=st.sampled_from(["leave", "die", "die", *["go on"] * 9]))
    def end(self, job: int, how: str) -> None:
        """Invariant 5: a job leaves, or dies with all its device work, and another takes its place."""
        if how == "go on":
            return
        self.world.twin.release()
        getattr(self._pick(job), how)()
        if not self.runs_freely:
            self.world.twin.pause()
        self.tenants[job % len(self.tenants)] = self._join()

    # -- the device --------------------------------------------------------------------------------

    @precondition(lambda self: not self.runs_freely)
    @rule(choices=st.lists(WHICH, min_size=1, max_size=12))
    def step(self, choices: list[int]) -> None:
        """The device does single things on some streams."""
        for choice in choices:
            streams = [one for one in self.world.twin._all_streams() if one.can_step()]
            if streams:
                streams[choice % len(streams)].step()

    @precondition(lambda self: not self.runs_freely)
    @rule(seed=WHICH)
    def run_shuffled(self, seed: int) -> None:
        """Invariant 7: the device does everything in some order, and no stream is left waiting for what never comes."""
        self.world.twin.run_shuffled(seed)
        assert all(stream.is_idle() for stream in self.world.twin._all_streams())

    @rule(runs_freely=st.sampled_from([False, False, True]))
    def switch(self, *, runs_freely: bool) -> None:
        """From now on the device goes on beside the jobs, or stands still."""
        self.runs_freely = runs_freely
        (self.world.twin.release if runs_freely else self.world.twin.pause)()

    @invariant()
    def agrees(self) -> None:
        """Invariants 1, 2 and 4: kernels find what they left, the table is whole, and no counter has fallen."""
        if not hasattr(self, "world"):
            return
        self.world.check()
        for tenant in self.tenants:
            tenant.check()
        now = counters(self.world.pool)
        assert (now >= self.before).all()
        self.before = now.copy()


EndToEndMachine.TestCase.settings = settings(max_examples=14, stateful_step_count=40, deadline=None)
TestEndToEnd = EndToEndMachine.TestCase


# -- threads ---------------------------------------------------------------------------------------


def _train(job: TwinTenant, seed: int, iterations: int) -> None:
    """Be a thread of a job: iterations with tensors of all sizes on all streams, some used on several."""
    rng = random.Random(seed)  # noqa: S311 - a test's
    streams = len(job.handles)
    sizes = (200, 5000, SMALL, 90 * KIB, MIDDLE, REGION_BYTES, 3 * REGION_BYTES // 2)
    live: list[Tensor] = []
    for _ in range(iterations):
        for _ in range(6):
            size_bytes = rng.choice(sizes)
            tensor = job.allocate(size_bytes, rng.randrange(streams)) if would_fit(job, size_bytes) else None
            if tensor:
                live.append(tensor)
                if rng.random() < 0.3:
                    job.use_on(tensor, rng.randrange(streams))
            if live and rng.random() < 0.5:
                job.free(live.pop(rng.randrange(len(live))), rng.choice([None, rng.randrange(streams)]))
        while live:
            job.free(live.pop())
        job.mark()


def _train_and_die(world: World, seed: int, lives: int, iterations: int, options: dict[str, Any]) -> None:
    """Be several jobs of two threads after each other, of which all but the last die with work on the device."""
    world.use_context()
    for life in range(lives):
        job = TwinTenant(world, **options)
        with ThreadPoolExecutor(1, initializer=world.use_context) as other:
            done = other.submit(_train, job, seed + life + 50, iterations)
            _train(job, seed + life, iterations)
            done.result(DEADLINE_S)
        if life < lives - 1:
            for _ in range(3):
                job.allocate(MIDDLE)
            job.die()
        else:
            job.leave()


def _stop_and_go(world: World, done: threading.Event) -> None:
    """Be a device that stands still every now and then."""
    rng = random.Random(1)  # noqa: S311 - a test's
    while not done.wait(rng.random() * 0.02):
        world.twin.pause()
        done.wait(rng.random() * 0.01)
        world.twin.release()


@pytest.mark.parametrize("attributes", [{}, WITHOUT_KERNELS, BY_KERNEL], ids=["both", "operations", "kernels"])
def test_jobs_train_and_die_beside_each_other(attributes: dict[str, int]) -> None:
    """Invariants 1, 2, 5 and 7: jobs in threads train, die and leave; no kernel finds another's bytes, all get on."""
    options = {"streams": 3, "wait_limit_s": DEADLINE_S}
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            _train_and_die(world, seed, 3, 8, options)
        except BaseException as error:  # noqa: BLE001 - of a thread; the test raises it
            failures.append(error)

    with World(10, attributes=attributes) as world:
        done = threading.Event()
        threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in (100, 200, 300)]
        device = threading.Thread(target=_stop_and_go, args=(world, done), daemon=True)
        for thread in (*threads, device):
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        done.set()
        device.join(DEADLINE_S)
        assert not failures
        assert not any(thread.is_alive() for thread in (*threads, device))
        world.check()
        assert world.pool.header["granted"] == 0
        assert world.handed_on > 10, "memory has changed hands ahead of the device"
