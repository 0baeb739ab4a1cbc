"""Jobs with heaps on a software device, and what it takes to train with them."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import TYPE_CHECKING, Any

from cpu.support.device_tenant import DeviceTenant
from cpu.support.members import job_of

from zico.heap import allocator
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cpu.support.software_device import SoftwareDevice

KIB, MIB = 1 << 10, 1 << 20
REGION_BYTES = MIB
DEADLINE_S = 60.0


def make_device_pool(n_regions: int, *, isolate: bool = False) -> PoolTable:
    """Make a pool on the host's memory whose jobs are to be on the software device."""
    return PoolTable.create(
        budget_bytes=n_regions * REGION_BYTES,
        region_bytes=REGION_BYTES,
        use_claims=False,
        self_admit=True,
        on_timeline=True,
        isolate=isolate,
    )


@contextlib.contextmanager
def jobs(
    device: SoftwareDevice,
    n_regions: int,
    count: int,
    *,
    isolate: bool = False,
    **options: Any,  # noqa: ANN401 - of DeviceTenant
) -> Iterator[list[DeviceTenant]]:
    """Make a pool and jobs with heaps in it."""
    options.setdefault("wait_limit_s", 0.005)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(make_device_pool(n_regions, isolate=isolate))
        yield [stack.enter_context(DeviceTenant(pool, device, **options)) for _ in range(count)]


def _go_on(device: SoftwareDevice, stop: threading.Event) -> None:
    """Be the device: do things in random order, with pauses, until told to stop."""
    rng = random.Random(1)  # noqa: S311 - a test's
    while not stop.is_set():
        for _ in range(rng.randrange(1, 40)):
            if not (device.queues and device.step_any(rng.randrange(10))):
                break


def _train(tenant: DeviceTenant) -> None:
    """Be a job: iterations with tensors of all sizes on two streams, some used on both."""
    rng = random.Random(job_of(tenant.member))  # noqa: S311 - a test's
    for _ in range(15):
        for _ in range(12):
            tensor = tenant.allocate(rng.choice([200, 5000, 90 * KIB, MIB, 3 * MIB // 2]), rng.randrange(2))
            if tensor and rng.random() < 0.2:
                tenant.use_on(tensor, rng.randrange(2))
            if tenant.live and rng.random() < 0.5:
                tenant.free(tenant.live[rng.randrange(len(tenant.live))])
        tenant.free_all()
        allocator.mark(tenant.record[0])


def train_beside(tenants: list[DeviceTenant], device: SoftwareDevice) -> None:
    """Let jobs train, each in its thread, with the device in another."""
    for tenant in tenants:  # what is called first may compile, for longer than the deadline
        for size in (200, MIB):
            tensor = tenant.allocate(size)
            assert tensor is not None
            tenant.use_on(tensor, 1)
        tenant.free_all()
        allocator.mark(tenant.record[0])
        tenant.settle()
    stop = threading.Event()
    threads = [threading.Thread(target=_train, args=(tenant,), daemon=True) for tenant in tenants]
    runner = threading.Thread(target=_go_on, args=(device, stop), daemon=True)
    for thread in (*threads, runner):
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    stop.set()
    runner.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in (*threads, runner))
