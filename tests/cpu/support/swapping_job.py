"""A job that swaps, on the driver's software twin."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from cpu.support.swapping_parts import DEADLINE_S, Gauge
from cpu.support.twin_tenant import TwinTenant
from cpu.support.twin_world import CHECK, World

from zico.base.errors import SwapError
from zico.heap.cuda import on_stream
from zico.swap.device_tier import DeviceTier
from zico.swap.mover import Idle, Mover
from zico.tiers.destinations import TierWish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cpu.support.twin_world import Tensor

MIB = 1 << 20
PINNED = (TierWish("memory", 64 * MIB),)


class Saved(Idle):
    """A tensor of a job that nobody reaches for between two uses; kernels say whether it is as it was."""

    def __init__(self, job: SwappingJob, tensor: Tensor) -> None:
        """Stand for a tensor that is here."""
        super().__init__(tensor.size_bytes)
        self.job = job
        self.tensor = tensor
        self.fence = 0
        self.held = False

    def address_if_idle(self) -> int:
        """Return its address, unless held."""
        return 0 if self.held else self.tensor.address

    def let_go(self) -> None:
        """Free it, as PyTorch does: on the stream that it was allocated for."""
        self.job.give_up(self.tensor)

    def settle(self) -> int:
        """Allocate for the stream that copies in."""
        self.came = self.job.receive(self.tensor)
        return self.came.address

    def arrive(self) -> None:
        """Be here, behind the copy."""
        self.tensor = self.came
        self.fence = self.job.tier.fence_of(self.ticket)

    def use(self, stream: int, *, keep: bool = False) -> None:
        """Let a kernel on a stream look at it; ``keep``: hold it afterwards."""
        self.job.mover.need(self, self.hold)
        handle = self.job.tenant.handles[stream]
        on_stream.record_stream(self.job.tenant.record[0], self.tensor.address, handle)
        if self.tensor.content:
            self.job.tier.follow(handle, self.fence)
        else:
            self.job.tenant._follow(self.tensor, stream)
        self.job.tenant._launch(CHECK, self.tensor, stream)
        self.held = keep

    def hold(self) -> None:
        """Reach for it."""
        self.held = True


class SwappingJob:
    """A job with side streams; its tensors leave by a mover."""

    def __init__(self, tenant: TwinTenant, tier: DeviceTier, mover: Mover) -> None:
        """Use them."""
        self.tenant, self.tier, self.mover = tenant, tier, mover
        tenant.handles.append(tier.incoming)

    def save(self, size_bytes: int, stream: int = 0) -> Saved | None:
        """Allocate, write, and keep for later; ``None`` if there is no room."""
        tensor = self.tenant.allocate(size_bytes, stream)
        return None if tensor is None else Saved(self, tensor)

    def give_up(self, tensor: Tensor) -> None:
        """Free what has been copied, or is going to be."""
        self.tenant.live.remove(tensor)
        tensor.freed = True
        on_stream.free_on(self.tenant.record[0], tensor.address, self.tenant.handles[tensor.stream])

    def receive(self, tensor: Tensor) -> Tensor:
        """Allocate for what comes back."""
        incoming = len(self.tenant.handles) - 1
        address = int(on_stream.allocate_on(self.tenant.record[0], tensor.size_bytes, self.tier.incoming))
        if address <= 0:
            message = f"no room for {tensor.size_bytes} bytes"
            raise SwapError(message)
        came = self.tenant.world.enter(self.tenant, address, tensor.size_bytes, incoming)
        came.content = tensor.content or tensor.number
        self.tenant.live.append(came)
        return came

    def free(self, saved: Saved) -> None:
        """Use it for the last time."""
        saved.use(0, keep=True)
        self.give_up(saved.tensor)


@contextlib.contextmanager
def swapping(world: World, wishes: tuple[TierWish, ...] = PINNED, **options: Any) -> Iterator[SwappingJob]:  # noqa: ANN401 - a tenant's
    """Make a job whose tensors leave; at its end every copy is done and nothing is left."""
    with TwinTenant(world, **options) as tenant, contextlib.ExitStack() as undo:
        tier = DeviceTier(tenant.heap, wishes, block_bytes=1 << 18)
        undo.callback(tier.close)
        mover = Mover(tier, Gauge(), DEADLINE_S)
        undo.callback(mover.close)
        undo.callback(world.twin.release)
        yield SwappingJob(tenant, tier, mover)
        world.twin.release()
        tenant.settle()
        for handle in (*tenant.handles, tier.outgoing):
            tenant.driver.synchronize(handle)
        tenant.settle()
        tenant.check()
        tenant.check_empty()


def got(saved: Any) -> Any:  # noqa: ANN401 - whatever was asked for
    """Return what must have been had."""
    assert saved is not None
    return saved
