"""Jobs of a pool that isolates them on the driver's software twin: kernels that scrub, mappings that go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cpu.support.isolated_twin import N_REGIONS, REGION_BYTES, jobs
from cpu.support.twin_device import TwinDevice
from twin.meanings import register

from zico.base.errors import ConfigError
from zico.heap.cuda import on_stream

if TYPE_CHECKING:
    from collections.abc import Iterator

TOO_OLD = {"COMPUTE_CAPABILITY_MAJOR": 6}


@pytest.fixture
def device() -> Iterator[TwinDevice]:
    """Make a twin that runs Zico's kernels; in the end it must have everything back."""
    with TwinDevice() as device:
        register(device.twin)
        yield device


@pytest.mark.parametrize("isolate", [True, False])
def test_the_next_owners_stream_scrubs_behind_its_wait(device: TwinDevice, *, isolate: bool) -> None:
    """Invariant 11: B gets what A's stream still writes; B finds zeros, and A's bytes if the pool does not isolate."""
    with jobs(device, isolate=isolate) as (a, b):
        first = a.take()
        device.twin.stream(a.stream).hold(0)
        a.fill(first, 0xAA)
        a.free(first)
        second = b.take()
        device.twin.stream(a.stream).release()
        assert b.bytes_at(second) == ({0} if isolate else {0xAA})
        b.free(second)
        for job in (a, b):
            device.driver.synchronize(job.stream)
            on_stream.settle(job.heap)


def test_what_a_job_has_freed_is_unmapped_when_the_device_has_finished(device: TwinDevice) -> None:
    """Invariant 11: A's stream can use what A has freed until its work is done; then the device cannot reach it."""
    with jobs(device) as (a, b):
        first = a.take()
        device.twin.stream(a.stream).hold(0)
        a.fill(first, 0xAA)
        a.free(first)
        on_stream.settle(a.heap)
        assert device.is_open(first)
        device.twin.stream(a.stream).release()
        device.driver.synchronize(a.stream)
        on_stream.settle(a.heap)
        assert not any(device.is_open(first + n * REGION_BYTES) for n in range(N_REGIONS))
        second = b.take()
        b.fill(second, 0xBB)
        assert b.bytes_at(second) == {0xBB}
        b.free(second)
        again = a.take()
        assert a.bytes_at(again) == {0}
        a.free(again)


def test_a_device_without_kernels_cannot_isolate() -> None:
    """A job on a device that is too old for Zico's kernels is told so, and nothing of it stays."""
    with TwinDevice(attributes=TOO_OLD) as device, pytest.raises(ConfigError, match="cannot scrub"), jobs(device):
        pass
