"""Jobs on a device that lags, driven at random: no kernel ever sees another's bytes."""

from __future__ import annotations

import contextlib

from cpu.support.device_jobs import KIB, MIB, REGION_BYTES, make_device_pool
from cpu.support.device_tenant import DeviceTenant
from cpu.support.members import check_counters, counters
from cpu.support.software_device import SoftwareDevice
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from zico.heap import allocator
from zico.heap.cuda import on_stream
from zico.pool.layout import STREAMS

N_STREAMS = 5
SIZES = st.one_of(st.integers(1, 32 * KIB), st.integers(32 * KIB, 300 * KIB), st.integers(300 * KIB, 3 * MIB))


class HeapTimelineMachine(RuleBasedStateMachine):
    """Two jobs with more streams than slots do anything; the device goes on at will."""

    isolate = False

    @initialize(
        n=st.integers(3, 10),
        spacing=st.sampled_from([0, 0, 2 * REGION_BYTES]),
        alone=st.sampled_from([0, 4 * REGION_BYTES]),
        beside=st.sampled_from([0, 3 * REGION_BYTES]),
        slots=st.sampled_from([2, 3, STREAMS]),
    )
    def begin(self, n: int, spacing: int, alone: int, beside: int, slots: int) -> None:
        """Make the pool, the device and the jobs."""
        self.stack = contextlib.ExitStack()
        self.pool = self.stack.enter_context(make_device_pool(n, isolate=self.isolate))
        self.device = SoftwareDevice()
        self.spacing, self.slots = {"spacing_bytes": spacing, "alone_bytes": alone, "beside_bytes": beside}, slots
        self.tenants = [self._join() for _ in range(2)]
        self.before = counters(self.pool).copy()
        self.faults: list[str] = []

    def _join(self) -> DeviceTenant:
        tenant = DeviceTenant(self.pool, self.device, streams=N_STREAMS, wait_limit_s=0.002, **self.spacing)
        tenant.record[0]["most_streams"] = self.slots
        self.stack.callback(tenant.close)
        return tenant

    def teardown(self) -> None:
        """When all is freed and the device has done everything, everything is free again and no wait is left."""
        if not hasattr(self, "stack"):
            return
        with self.stack:
            for tenant in self.tenants:
                tenant.free_all()
            for tenant in self.tenants:
                on_stream.settle(tenant.record[0])
            for tenant in self.tenants:
                tenant.settle()
                tenant.check_empty()
                assert not tenant.faults
            check_counters(self.pool)

    def _pick(self, data: st.DataObject) -> DeviceTenant:
        return self.tenants[data.draw(st.integers(0, 1))]

    @rule(data=st.data(), sizes=st.lists(SIZES, min_size=1, max_size=4), stream=st.integers(0, N_STREAMS - 1))
    def allocate(self, data: st.DataObject, sizes: list[int], stream: int) -> None:
        """A job allocates for a stream; kernels of that stream use what it got."""
        tenant = self._pick(data)
        for size in sizes:
            tenant.allocate(size, stream)

    @rule(data=st.data(), which=st.integers(0, 1 << 20))
    def free(self, data: st.DataObject, which: int) -> None:
        """A job frees a tensor behind its last kernel."""
        tenant = self._pick(data)
        if tenant.live:
            tenant.free(tenant.live[which % len(tenant.live)])

    @rule(data=st.data())
    def free_all(self, data: st.DataObject) -> None:
        """A job ends an iteration."""
        tenant = self._pick(data)
        tenant.free_all()
        allocator.mark(tenant.record[0])

    @rule(data=st.data(), which=st.integers(0, 1 << 20), stream=st.integers(0, N_STREAMS - 1))
    def use_elsewhere(self, data: st.DataObject, which: int, stream: int) -> None:
        """A tensor is used on another stream, too."""
        tenant = self._pick(data)
        if tenant.live:
            tenant.use_on(tenant.live[which % len(tenant.live)], stream)

    @rule(data=st.data())
    def mark_for_others(self, data: st.DataObject) -> None:
        """The thread of a job that marks for who waits looks around."""
        on_stream.mark_for_others(self._pick(data).record[0])

    @rule(choices=st.lists(st.integers(0, 9), min_size=1, max_size=12))
    def device_goes_on(self, choices: list[int]) -> None:
        """The device does something on some streams."""
        if self.device.queues:
            for choice in choices:
                self.device.step_any(choice)

    @rule()
    def device_catches_up(self) -> None:
        """The device does all that it can."""
        while self.device.queues and self.device.step_any(0):
            pass

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Invariant 5: a job dies with all its device work, and another comes in its place."""
        which = data.draw(st.integers(0, 1))
        self.faults += self.tenants[which].faults
        self.tenants[which].die()
        self.tenants[which] = self._join()

    @invariant()
    def agrees(self) -> None:
        """Invariants 1, 2 and 4: no kernel has found another's bytes, and no counter has fallen."""
        if not hasattr(self, "stack"):
            return
        assert not self.faults
        for tenant in self.tenants:
            assert not tenant.faults
            assert tenant.record[0]["bad_frees"] == tenant.record[0]["streams"]["failures"] == 0
        check_counters(self.pool)
        now = counters(self.pool)
        assert (now >= self.before).all()
        self.before = now.copy()
