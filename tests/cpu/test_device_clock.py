"""A GPU's clock on the software twin: it stands still while the device waits for copies, or makes something again."""

from __future__ import annotations

import contextlib
import gc
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.swapping_job import SwappingJob, got, swapping
from cpu.support.swapping_parts import DEADLINE_S
from cpu.support.twin_world import REGION_BYTES, World
from hypothesis import given
from hypothesis import strategies as st

from zico.base.errors import DriverError
from zico.heap.cuda import on_stream
from zico.swap.device_clock import DeviceClock, Stamp, without
from zico.swap.observed import Observed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAUSE_S = 0.02
NS_PER_S = 1e9


@given(
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8),
    times=st.lists(st.integers(0, 60), max_size=8),
)
def test_a_clock_stands_still_in_spans(spans: list[tuple[float, float]], times: list[float]) -> None:
    """Of each moment before a time, those in a span do not count, however many spans they are in."""
    moments = [not any(begin <= moment < end for begin, end in spans) for moment in range(60)]
    assert without(spans, times) == [sum(moments[: int(t)]) for t in times]


class Timed:
    """A job with a clock of its first stream."""

    def __init__(self, job: SwappingJob) -> None:
        """Tell the tier of the clock."""
        self.job = job
        self.stream: int | None = job.tenant.handles[0]
        streams = job.tier.outgoing, job.tier.incoming
        self.clock = job.tier.clock = DeviceClock(job.tenant.heap, streams, lambda: self.stream)

    def stamp(self) -> Stamp:
        """Put a stamp on the stream."""
        stamp = self.clock.stamp()
        assert stamp is not None
        return stamp

    def since(self, stamps: Sequence[Stamp]) -> list[float]:
        """Return what any clock would say."""
        return self.clock._stamps.since(stamps[0], stamps)

    def catch_up(self) -> None:
        """Wait until the device has come by all stamps."""
        self.job.tenant.driver.synchronize(self.job.tenant.handles[0])

    def pause(self) -> None:
        """Let the device do nothing for a while."""
        end_s = time.monotonic() + PAUSE_S
        while time.monotonic() < end_s:
            pass


@pytest.fixture
def timed() -> Iterator[Timed]:
    """Return a job; the device stands still when the test begins."""
    with World(2) as world, swapping(world) as job, contextlib.ExitStack() as undo:
        undo.callback(world.twin.release)
        made = Timed(job)
        yield made
        job.tier.clock = None
        made.clock.close()


def test_it_stands_still_while_the_stream_waits_for_a_copy(timed: Timed) -> None:
    """Between two stamps the stream waits for a copy out: that does not count, what follows does."""
    job, twin = timed.job, timed.job.tenant.world.twin
    saved = got(job.save(REGION_BYTES))
    first = timed.stamp()
    job.tenant.driver.synchronize(job.tenant.handles[0])
    twin.pause()
    assert job.mover.send(saved)
    assert job.mover.settle(DEADLINE_S)
    ((value, copied),) = timed.clock._copies[job.tier.outgoing]
    fence = on_stream.mark_stream(job.tenant.record[0], job.tier.outgoing)
    assert on_stream.wait_for(job.tenant.record[0], job.tenant.handles[0], fence)
    second, third = timed.stamp(), timed.stamp()
    timed.pause()
    twin.release()
    assert first.awaited[0] < value < second.awaited[0] == third.awaited[0]
    times = timed.clock.read([first, second, third])
    plain, (done,) = timed.since([first, second, third]), timed.clock._stamps.since(first, [copied])
    assert done > PAUSE_S / 2 * NS_PER_S
    assert times == [0, round(plain[1] - done), round(plain[2] - done)]
    job.free(saved)


def test_what_is_made_again_takes_no_time(timed: Timed) -> None:
    """What the device is given meanwhile does not count; in the iteration before, it changes nothing."""
    with timed.clock.standing():
        pass
    stamps = [timed.stamp()]
    with timed.clock.standing():
        timed.catch_up()  # else a busy machine may come by the first stamp when the pause is over
        timed.pause()
    stamps.append(timed.stamp())
    plain = timed.since(stamps)
    (_, (begin, end)) = timed.clock._made
    begun, ended = timed.clock._stamps.since(stamps[0], [begin, end])
    assert ended - begun > PAUSE_S / 2 * NS_PER_S
    assert timed.clock.read(stamps) == [0, round(plain[1] - (ended - begun))]


def test_an_iteration_without_a_stamp_has_no_times(timed: Timed) -> None:
    """What a captured graph is given has no time."""
    first = timed.stamp()
    timed.stream = None
    with pytest.raises(DriverError, match="has no time"):
        timed.clock.read([first, timed.clock.stamp()])
    with timed.clock.standing():
        pass


def test_what_the_device_waits_is_lost(timed: Timed) -> None:
    """The processor sees no such wait, but the iteration takes longer than the clock had it go."""
    seen = Observed((), (), (), np.zeros(2, np.int64), np.array([0, 60]))
    assert timed.clock.lost_ns(100, 0, seen) == 40
    assert timed.clock.lost_ns(50, 3, seen) == 3


def test_events_are_used_again(timed: Timed) -> None:
    """Stamps that nobody has any more leave their events to the next ones."""
    events = {timed.stamp().event for _ in range(20)}
    gc.collect()
    assert len(events) == 1
