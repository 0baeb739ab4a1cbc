"""Memory of CUDA graphs on the driver's twin, by the functions that PyTorch calls, beside another job of the pool."""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.graph_jobs import (
    GLOBAL,
    I64,
    KIB,
    N_REGIONS,
    OTHER_POOL,
    POOL,
    REGION_BYTES,
    Grapher,
    Job,
    begin,
    end,
    two_jobs,
)
from cpu.support.twin_device import MIB

from zico.heap.cuda import captures, hooks, on_stream
from zico.heap.cuda.contents import HELD, LIVES, contents
from zico.heap.cuda.layout import MAX_GRAPH_POOLS, PIECE, PieceState

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_S = 20

_record_stream = ctypes.CFUNCTYPE(None, I64, I64)(hooks.record_stream.address)


def step(job: Grapher, source: int, result: int) -> None:
    """Do a step of a training: temporaries come and go, one is used again; the result has the source's bytes."""
    first = job.allocate(MIB)
    job.copy(first, source, MIB)
    second = job.allocate(MIB)
    job.copy(second, first, MIB)
    job.free(first)
    third = job.allocate(MIB)
    job.fill(third, 0, MIB // 2)
    job.copy(third + MIB // 2, second + MIB // 2, MIB // 2)
    job.copy(result, third, MIB)
    for address in (second, third):
        job.free(address)


@pytest.fixture
def pair() -> Iterator[tuple[Grapher, Job]]:
    """Give a job that captures and another one."""
    with two_jobs() as both:
        yield both


def test_a_captured_step_is_a_plain_one_while_another_job_takes_everything_else(pair: tuple[Grapher, Job]) -> None:
    """Replays end with the bytes of plain steps, whatever another job writes in all the memory that it can get."""
    job, other = pair
    source, plain, captured = (job.allocate(2 * MIB) for _ in range(3))
    with job.capture() as made:
        step(job, source, captured)
    assert "wait value" not in job.device.twin.recorded(made[0])
    assert set(job.device.twin.recorded(made[0])) == {"copy", "memset"}
    taken = other.take_all()
    assert len(taken) == N_REGIONS - job.held() > 0
    for address in taken:
        other.device.driver.call("cuMemsetD8Async", address, 0xEE, REGION_BYTES, other.stream)
    for byte in (1, 2):
        job.fill(source, byte, MIB)
        job.fill(captured, 0xFF, MIB)
        job.device.driver.synchronize(job.stream)
        job.launch(made[0])
        expected = bytes(MIB // 2) + bytes([byte]) * (MIB // 2)
        assert job.device.read(captured, MIB) == expected
    for address in taken:
        other.device.driver.synchronize(other.stream)
        assert set(other.device.read(address, REGION_BYTES)) == {0xEE}
        on_stream.free_on(other.heap, address, other.stream)
    step(job, source, plain)
    job.device.driver.synchronize(job.stream)
    assert job.device.read(plain, MIB) == expected
    for address in (source, plain, captured):
        job.free(address)
    job.release()
    assert job.held() == 0


def test_a_graphs_memory_is_a_tensor_that_lives_until_the_graph_dies(pair: tuple[Grapher, Job]) -> None:
    """So a snapshot shows its segment, though the capture has freed all that lay there."""
    job, _ = pair
    with job.capture():
        job.free(job.allocate(MIB))
    assert contents(job.made)["kind"].tolist() == [HELD, LIVES]
    job.release()
    assert job.held() == 0
    assert contents(job.made)["kind"].tolist() == []


def test_graphs_that_share_a_pool_keep_its_memory_until_the_last_one_dies(pair: tuple[Grapher, Job]) -> None:
    """The first one's death gives nothing back, though no tensor lives there any more."""
    job, _ = pair
    for _ in range(2):
        with job.capture():
            job.free(job.allocate(MIB))
    held = job.held()
    job.release()
    assert job.held() == held > 0
    job.release()
    assert job.held() == 0


def test_freed_memory_is_used_again_in_its_pool_alone(pair: tuple[Grapher, Job]) -> None:
    """A tensor gets a freed one's place for the same stream and pool, cut as large as it is; no other ever does."""
    job, _ = pair
    with job.capture():
        first = job.allocate(MIB)
        kept = job.allocate(MIB)
        job.free(first)
        halves = [job.allocate(MIB // 2) for _ in range(2)]
        assert halves == [first, first + MIB // 2]
        job.free(halves[0])
        job.free(halves[1])
        assert job.allocate(MIB) == first, "freed neighbours have merged"
        job.free(first)
    plain = job.allocate(MIB)
    with job.capture(OTHER_POOL):
        other = job.allocate(MIB)
    with job.capture():
        assert job.allocate(MIB) == first
        assert len({first, kept, plain, other}) == 4
    for address in (first, kept, plain, other):
        job.free(address)
    for pool in (POOL, OTHER_POOL):
        assert job.held() > 0
        job.release(pool)
    job.release()
    assert job.held() == 0


def test_streams_of_a_capture_do_not_use_each_others_memory(pair: tuple[Grapher, Job]) -> None:
    """What one stream freed serves no other of the same capture, nor anybody after ``record_stream``."""
    job, _ = pair
    twin = job.device.twin
    with job.capture():
        assert int(twin.cuStreamBeginCapture(job.side, GLOBAL)[0]) == 0
        first = job.allocate(MIB)
        job.free(first)
        beside = job.allocate(MIB, job.side)
        assert beside != first
        assert job.allocate(MIB) == first
        _record_stream(first, job.stream)
        job.free(first)
        assert job.allocate(MIB) == first, "a tensor's own stream is no other"
        _record_stream(first, job.side)
        job.free(first)
        second = job.allocate(MIB)
        assert second != first
        assert int(twin.cuStreamEndCapture(job.side)[0]) == 0
    job.free(beside, job.side)
    job.free(second)
    job.release()
    assert job.held() == 0


def test_a_tensor_that_outlives_its_graph_keeps_its_segment(pair: tuple[Grapher, Job]) -> None:
    """When the pool's last graph dies, segments without tensors go at once, and another with its last tensor."""
    job, _ = pair
    with job.capture():
        large = job.allocate(2 * REGION_BYTES)
        small = job.allocate(4 * KIB)
        job.free(large)
    assert job.held() == 3
    job.fill(small, 7, 4 * KIB)
    job.release()
    assert job.held() == 1
    job.device.driver.synchronize(job.stream)
    assert set(job.device.read(small, 4 * KIB)) == {7}
    job.free(small)
    assert job.held() == 0


def test_a_graph_that_dies_during_a_capture_gives_its_memory_back_afterwards(pair: tuple[Grapher, Job]) -> None:
    """The device must not be waited for while a stream captures, so the memory goes when the capture has ended."""
    job, _ = pair
    with job.capture():
        job.free(job.allocate(REGION_BYTES))
    with job.capture(OTHER_POOL):
        job.release()
        assert job.record["held"] == 1
    assert job.held() == 0
    job.release(OTHER_POOL)
    assert job.held() == 0


def test_what_a_capture_frees_that_it_did_not_allocate_waits_for_the_end(pair: tuple[Grapher, Job]) -> None:
    """Tensors from before of the stream that captures and of another, large and small, are freed; others get them."""
    job, other = pair
    before = [job.allocate(size, stream) for size in (REGION_BYTES, KIB) for stream in (job.stream, job.side)]
    with job.capture() as made:
        for address, stream in zip(before, 2 * [job.stream, job.side], strict=True):
            job.free(address, stream)
    assert job.device.twin.recorded(made[0]) == []
    assert job.held() == 0
    job.device.driver.synchronize(job.stream)
    job.device.driver.synchronize(job.side)
    taken = other.take_all()
    assert len(taken) == N_REGIONS
    for address in taken:
        on_stream.free_on(other.heap, address, other.stream)
    job.release()


def test_a_segment_waits_here_for_what_others_still_do_there(pair: tuple[Grapher, Job]) -> None:
    """Invariant 2: a region that another job's stream still writes is a segment's only when that is done."""
    job, other = pair
    twin, taken = job.device.twin, other.take_all()
    held = twin.stream(other.stream)
    held.hold(0)
    for address in taken:
        other.device.driver.call("cuMemsetD8Async", address, 0xEE, REGION_BYTES, other.stream)
        on_stream.free_on(other.heap, address, other.stream)
    on_stream.settle(other.heap)

    def synchronize(stream: int) -> Any:  # noqa: ANN401 - as the driver's
        held.release()
        return twin.cuStreamSynchronize(stream)

    twin._addresses.do["cuStreamSynchronize"] = synchronize
    with job.capture():
        address = job.allocate(REGION_BYTES)
        assert set(job.device.read(address, REGION_BYTES)) == {0xEE}, "it came before the other job's work was done"
    job.free(address)
    job.release()
    assert job.held() == 0


def test_there_are_so_many_graph_pools(pair: tuple[Grapher, Job]) -> None:
    """One more than there can be is refused, and is served when another has gone."""
    job, _ = pair
    refused: list[int] = []
    function = ctypes.CFUNCTYPE(None, I64)(refused.append)
    hooks.OTHERS_RECORD[0]["refuse"] = ctypes.cast(function, ctypes.c_void_p).value
    pools = [(1, number) for number in range(MAX_GRAPH_POOLS + 1)]
    for pool in pools:
        begin(0, *pool, 0)
        end(0, *pool)
    assert refused == [hooks.Refusal.TOO_MANY_GRAPHS]
    job.release(pools[0])
    with job.capture(pools[-1]):
        job.free(job.allocate(MIB))
    for pool in pools[1:]:
        job.release(pool)
    assert len(refused) == 1
    assert job.held() == 0


def test_one_capture_at_a_time(pair: tuple[Grapher, Job]) -> None:
    """A second one is refused, and the first goes on; one that is given up leaves nothing."""
    job, _ = pair
    refused: list[int] = []
    function = ctypes.CFUNCTYPE(None, I64)(refused.append)
    hooks.OTHERS_RECORD[0]["refuse"] = ctypes.cast(function, ctypes.c_void_p).value
    with job.capture():
        address = job.allocate(MIB)
        begin(0, *OTHER_POOL, 0)
        end(0, *OTHER_POOL)
        job.free(address)
        assert job.allocate(MIB) == address
        job.free(address)
    job.release()
    assert refused == [hooks.Refusal.SECOND_CAPTURE]
    begin(0, *POOL, 0)
    captures.abandon(job.heap)
    assert job.heap["streams"]["capturing"] == 0
    assert job.held() == 0
    captures.abandon(job.heap)
    assert job.allocate(0) == 0


def test_a_pool_serves_one_thread_without_a_capture(pair: tuple[Grapher, Job]) -> None:
    """Its tensors on any stream are the pool's; another thread's are not, nor its own when that has ended."""
    job, _ = pair
    with job.capture():
        pass
    found: list[int] = []
    with job.served():
        mine = [job.allocate(MIB), job.allocate(MIB, job.side)]
        thread = threading.Thread(target=lambda: found.append(job.allocate(MIB)))
        thread.start()
        thread.join(LONG_S)
    found.append(job.allocate(MIB))
    with job.capture():
        found.append(job.allocate(MIB, job.side))  # a stream that does not capture
    base = job.made.base
    assert sorted(job.saved()["offset"].tolist()) == sorted(address - base for address in mine)
    assert dict(zip(job.saved()["offset"] + base, job.saved()["stream"], strict=True)) == {
        mine[0]: job.stream,
        mine[1]: job.side,
    }
    assert len({*mine, *found}) == 5
    for address, stream in zip((*mine, *found), (job.stream, job.side, job.stream, job.stream, job.side), strict=True):
        job.free(address, stream)
    job.release()
    job.release()
    assert job.held() == 0


def test_a_pool_goes_back_to_what_was_in_use(pair: tuple[Grapher, Job]) -> None:
    """From random states, with all since then freed: the same tensors live, and new ones overlap none of them."""
    job, _ = pair
    order = np.random.default_rng(5)
    with job.capture():
        pass
    for _ in range(20):
        live: dict[int, int] = {}
        with job.served():
            for _ in range(int(order.integers(12))):
                size_bytes = int(order.integers(1, 8)) * 128 * KIB
                live[job.allocate(size_bytes)] = size_bytes
                if live and order.random() < 0.4:
                    job.free(live.popitem()[0])
        then = job.saved()
        for address in live:
            job.free(address)
        with job.served():
            for address in [job.allocate(int(order.integers(1, 6)) * 256 * KIB) for _ in range(3)]:
                job.free(address)
        assert len(job.saved()) == 0
        assert captures.restore(job.heap, *POOL, then)
        assert job.saved().tolist() == then.tolist()
        with job.served():
            more = {job.allocate(MIB // 2): MIB // 2 for _ in range(3)}
        spans = sorted((address, address + size_bytes) for address, size_bytes in (live | more).items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        for address in live | more:
            job.free(address)
    held = job.held()
    job.release()
    assert job.held() == 0 < held


def test_a_pool_does_not_go_back_over_what_lives(pair: tuple[Grapher, Job]) -> None:
    """A younger tensor keeps the pool as it is; one from then may live on, and a freed one comes back, by its state."""
    job, _ = pair
    with job.capture():
        shared, kept = job.allocate(MIB), job.allocate(MIB // 2)
        _record_stream(shared, job.side)
        job.free(shared)
    then = job.saved()
    assert then["state"].tolist() == [PieceState.SPENT, PieceState.LIVES]
    with job.served():
        younger = job.allocate(MIB)
    assert not captures.restore(job.heap, *POOL, then)
    assert younger - job.made.base in job.saved()["offset"]
    job.free(younger)
    assert captures.restore(job.heap, *POOL, then)
    assert not captures.restore(job.heap, *OTHER_POOL, then), "there is no such pool"
    job.free(kept)
    assert captures.restore(job.heap, *POOL, then)
    assert job.saved().tolist() == then.tolist()
    job.free(kept)
    assert captures.restore(job.heap, *POOL, np.zeros(0, PIECE))
    with job.served():
        assert job.allocate(2 * MIB) == shared, "what was free or spent is one piece again"
    job.free(shared)
    job.release()
    assert job.held() == 0


def test_a_graphs_tensor_is_given_to_who_asks_for_its_address(pair: tuple[Grapher, Job]) -> None:
    """PyTorch's allocator knows an address only after it has asked for it; where no tensor lives, none is given."""
    job, _ = pair
    with job.capture():
        address = job.allocate(MIB)
    with job.served():
        assert job.allocate(address) == address
        assert job.allocate(address + MIB) == 0
    job.free(address)
    with job.served():
        assert job.allocate(address) == 0
    job.release()
    assert job.held() == 0
