"""Up to three heaps in one pool, driven at random and compared with what was asked of them."""

from __future__ import annotations

import contextlib
import mmap
import threading

from cpu.support.members import Tenant, check_counters, free_list, job_of, tenants
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from zico.heap import allocator, evicting, state_offload
from zico.heap.layout import GRANULE_BYTES, Arena
from zico.pool import results
from zico.pool.layout import NO_MORE, NOBODY

KIB, MIB = 1 << 10, 1 << 20
REFUSED = (results.NOT_SERVED, results.NEVER_FITS)
SIZES = st.one_of(
    st.integers(GRANULE_BYTES, 4 * GRANULE_BYTES),
    st.integers(GRANULE_BYTES, 20 * MIB),
    st.sampled_from([1, 2, 3, 4, 16]).flatmap(
        lambda n: st.sampled_from([n * GRANULE_BYTES + by for by in (-64, -1, 0, 1, 64)])
    ),
).map(lambda size: max(size, GRANULE_BYTES))
ALIGNMENTS = st.sampled_from([1, 16, 64, 64, 64, 128, 512, 4096, 16 * KIB, 64 * KIB])


class HeapMachine(RuleBasedStateMachine):
    """Up to three jobs allocate, free and iterate; contents, slots, gaps, regions and counters must be right."""

    jobs = staticmethod(tenants)

    @initialize(
        n=st.integers(1, 400), region_kib=st.sampled_from([16, 64, 64, 128, 256, 4096]), count=st.integers(1, 3)
    )
    def begin(self, n: int, region_kib: int, count: int) -> None:
        """Make a pool of at most 64 MiB and the jobs."""
        region_bytes = region_kib * KIB
        self.n = max(1, min(n, 64 * MIB // region_bytes))
        self.region_bytes = region_bytes
        self.stack = contextlib.ExitStack()
        self.tenants = self.stack.enter_context(self.jobs(self.n, count, region_bytes=region_bytes, wait_limit_s=0.002))
        self.pool = self.tenants[0].member
        for tenant in self.tenants:
            tenant.record[0]["optimizer"]["limit"] = self.n

    def teardown(self) -> None:
        """Free everything: then nothing is held, and nothing is reserved in the next tier."""
        if not hasattr(self, "stack"):
            return
        with self.stack:
            for tenant in self.tenants:
                tenant.free_all()
                assert tenant.job["held"] == tenant.job["live_bytes"] == 0
                assert tenant.record[0]["spill"]["live_bytes"] == tenant.record[0]["bad_frees"] == 0
                assert tenant.record[0]["optimizer"]["away"] == tenant.job["evicted"] == 0
                assert all(len(tenant.gaps(arena)) == 1 for arena in Arena)
            assert len(free_list(self.pool)) == self.n

    def _pick(self, data: st.DataObject) -> Tenant:
        return self.tenants[data.draw(st.integers(0, 5)) % len(self.tenants)]

    @rule(data=st.data(), size=SIZES, alignment=ALIGNMENTS, apart=st.booleans())
    def allocate(self, data: st.DataObject, size: int, alignment: int, apart: bool) -> None:  # noqa: FBT001 - drawn
        """Invariant 2: a block is inside the window, aligned and apart from every other, or refused for a reason."""
        tenant = self._pick(data)
        job = tenant.job
        before = {field: int(job[field]) for field in ("held", "oom_count", "requested_bytes", "spilled_bytes")}
        before["held"] += int(tenant.record[0]["optimizer"]["away"] + job["evicted"])
        tenant.record[0]["optimizer"]["thread"] = threading.get_ident() if apart else 0
        address = tenant.allocate(size, alignment)
        tenant.record[0]["optimizer"]["thread"] = 0
        if alignment <= mmap.PAGESIZE:
            assert job["requested_bytes"] == before["requested_bytes"] + size
        if address in REFUSED:
            assert job["held"] + tenant.record[0]["optimizer"]["away"] + job["evicted"] == before["held"]
            fewest = -(-size // self.region_bytes)
            if address == results.NEVER_FITS:
                assert job["oom_count"] == before["oom_count"] + 1
                assert job["oom_request_bytes"] == -(-size // 64) * 64
                assert job["oom_held"] == job["held"]
                # Where it is refused a fresh range would not have had enough regions either.
                assert before["held"] + fewest + 1 > self.n or len(self.tenants) > 1
            elif alignment <= mmap.PAGESIZE:
                assert size > self.region_bytes, "there is address space for small ones"
                assert size <= self.n * self.region_bytes, "never because of the budget"
            return
        assert address % max(alignment, 64) == 0
        assert (job["spilled_bytes"] > before["spilled_bytes"]) == tenant.is_spilled(address)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A block's pattern is intact when it is freed."""
        tenant = self._pick(data)
        blocks = sorted(tenant.live)
        which = data.draw(st.integers(0, 1 << 20))  # not a choice among blocks: their number may depend on time
        if blocks:
            tenant.free(blocks[which % len(blocks)])

    @rule(data=st.data())
    def free_most(self, data: st.DataObject) -> None:
        """An iteration's end: most blocks go."""
        tenant = self._pick(data)
        for address in sorted(tenant.live)[1:]:
            tenant.free(address)

    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        """An iteration ends; where the job has to ask, the broker says yes as soon as it can."""
        tenant = self._pick(data)
        thread = threading.Thread(target=tenant.mark, daemon=True)
        thread.start()
        for _ in range(10000):
            thread.join(0.001)
            if not thread.is_alive():
                break
            self.pool.admit(job_of(tenant.member))
        assert not thread.is_alive()
        assert tenant.job["persistent"] == tenant.job["held"] + tenant.job["evicted"]

    @rule(data=st.data(), n=st.integers(1, 40))
    def evict(self, data: st.DataObject, n: int) -> None:
        """A job evicts what it is asked for, or all that it holds and may."""
        tenant = self._pick(data)
        job = tenant.job
        held, room = int(job["held"]), int(tenant.record[0]["spill"]["limit_bytes"]) // self.region_bytes
        room -= int(job["evicted"]) + int(tenant.record[0]["spill"]["live_bytes"]) // self.region_bytes
        room -= int(tenant.record[0]["optimizer"]["away"])
        job["evict"] = n
        evicting.evict(tenant.record[0], job)
        assert job["held"] == held - min(n, held, room)
        assert job["evict"] == (0 if n <= min(held, room) else NO_MORE)
        job["evict"] = 0

    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        """A job gets back all that it has evicted, if that is free and nobody else is endangered, or nothing."""
        tenant = self._pick(data)
        job = tenant.job
        held, evicted = int(job["held"]), int(job["evicted"])
        if evicted and evicting.take_back(tenant.record[0], job):
            assert (job["held"], job["evicted"]) == (held + evicted, 0)
        else:
            assert (job["held"], job["evicted"]) == (held, evicted)

    @rule(data=st.data(), n=st.integers(1, 40))
    def end_step_and_rest(self, data: st.DataObject, n: int) -> None:
        """What was allocated apart leaves, as much as is wished and there is; nothing else does."""
        tenant = self._pick(data)
        heap, job = tenant.record[0], tenant.job
        before = int(job["held"] + job["evicted"] + heap["optimizer"]["away"])
        state_offload.end_step(heap)
        begin, end = (int(tenant.heap.arenas[Arena.STATE][field]) // self.region_bytes for field in ("start", "end"))
        own = tenant.heap.slots["region"][begin:end][tenant.heap.slots["live"][begin:end] > 0]
        assert heap["optimizer"]["in_use"] == len(own)
        assert (own != NOBODY).all()
        done = state_offload.send(heap, job, n)
        assert done <= min(n, int((own >= 0).sum()))
        assert job["held"] + job["evicted"] + heap["optimizer"]["away"] == before
        assert len(self.tenants) > 1 or heap["spill"]["live_bytes"] or done == min(n, int((own >= 0).sum()))

    @rule(data=st.data())
    def begin_step(self, data: st.DataObject) -> None:
        """What is away is back, if the budget has room for it; nothing leaves until the step ends."""
        tenant = self._pick(data)
        heap, job = tenant.record[0], tenant.job
        before = int(job["held"] + job["evicted"] + heap["optimizer"]["away"])
        had_left = bool(heap["optimizer"]["away"])  # else what is evicted has its own time to come back
        state_offload.begin_step(heap)
        assert job["held"] + job["evicted"] + heap["optimizer"]["away"] == before
        assert state_offload.send(heap, job, 1) == 0
        if had_left and len(self.tenants) == 1 and before <= self.n:
            assert job["held"] == before

    @rule(
        data=st.data(),
        more=st.lists(st.integers(1, 40).map(lambda n: n * GRANULE_BYTES // 2 + 32 * KIB), max_size=3),
        places=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=30),
    )
    def follow(self, data: st.DataObject, more: list[int], places: list[int]) -> None:
        """A plan is in force, right or wrong: places that overlap, for tensors that may or may not come."""
        tenant = self._pick(data)
        sizes = sorted({*(-(-size // 64) * 64 for size in tenant.live.values()), *more})
        most = min(tenant.heap.arena_bytes, 12 * self.region_bytes) // 64
        plan = {
            (sizes[i % len(sizes)], 1 + i // len(sizes)): place % most * 64
            for i, place in enumerate(places)
            if sizes and place % most * 64 + sizes[i % len(sizes)] <= tenant.heap.arena_bytes
        }
        if plan:
            tenant.follow(plan)

    @rule(data=st.data(), where=st.integers(0, 1 << 40))
    def free_what_is_no_block(self, data: st.DataObject, where: int) -> None:
        """A free inside the window of what no block starts near is counted, and changes nothing."""
        tenant = self._pick(data)
        offset = where % int(tenant.record[0]["window_bytes"])
        starts = {(address - tenant.base) // GRANULE_BYTES for address in tenant.live}
        if offset // GRANULE_BYTES in starts:
            return
        before = int(tenant.record[0]["bad_frees"])
        allocator.free(tenant.record[0], tenant.base + offset)
        assert tenant.record[0]["bad_frees"] == before + 1
        tenant.record[0]["bad_frees"] = before

    @invariant()
    def agrees(self) -> None:
        """Invariants 1, 2 and 4: the structures are what the live blocks say, and no byte of a pattern changed."""
        if not hasattr(self, "stack"):
            return
        check_counters(self.pool)
        for tenant in self.tenants:
            tenant.check_structure()
            for address in tenant.live:
                tenant.check(address)
