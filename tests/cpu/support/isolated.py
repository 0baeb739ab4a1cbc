"""Jobs of a pool that isolates them, in one process: they look into what they get, and at what they have given back."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from cpu.support.members import Tenant, is_mapped, job_of, make_pool, words_at

from zico.device import host
from zico.heap import allocator
from zico.pool.layout import NOBODY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REGION_BYTES = 1 << 16
N_REGIONS = 16
_bytes = itertools.cycle(range(1, 256))
"""What each job writes."""
_MMAP = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)
_FALLOCATE = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)


class IsolatedTenant(Tenant):
    """A member of a pool that isolates jobs: looks into what it gets, and at what it has given back."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - Tenant's
        """Join."""
        super().__init__(*arguments, **options)
        self.byte = next(_bytes)

    def write(self, address: int) -> None:
        """Look for what others have left, then fill the block with this job's byte."""
        found = np.frombuffer((ctypes.c_char * self.live[address]).from_address(address), "u1")
        assert ((found == 0) | (found == self.byte)).all(), "a new block holds what another job has written"
        found[:] = self.byte

    def check(self, address: int) -> None:
        """Look whether the byte is still there."""
        assert all((words_at(place).view("u1") == self.byte).all() for place in self.places(address))

    def free(self, address: int) -> None:
        """Free a block; what lies in no slot of another block is out of reach then."""
        places = self.places(address)
        super().free(address)
        for place in places:
            slot = (place - self.base) // self.member.region_bytes
            if place - self.base < self.record[0]["spill_offset"] and not self.heap.slots["live"][slot]:
                assert not is_mapped(place), "what was given back can still be reached"

    def check_mappings(self) -> None:
        """Nothing is mapped but slots with live blocks."""
        shift = int(self.record[0]["region_shift"])
        slots = self.heap.slots[: int(self.record[0]["spill_offset"]) >> shift]
        assert ((slots["mapped"] != NOBODY) == (slots["live"] > 0)).all()

    def die(self) -> None:
        """Die: the addresses go, the broker reaps."""
        self.heap.close()
        self.member.reap(job_of(self.member))


@contextlib.contextmanager
def isolated(
    n_regions: int,
    count: int = 1,
    *,
    region_bytes: int = REGION_BYTES,
    claims: bool = True,
    wait_limit_s: float = 0.02,
) -> Iterator[list[Tenant]]:
    """Make a pool that isolates jobs, and ``count`` jobs with heaps in it."""
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(make_pool(n_regions, region_bytes=region_bytes, claims=claims, isolate=True))
        yield [stack.enter_context(IsolatedTenant(pool, wait_limit_s=wait_limit_s)) for _ in range(count)]


def take(tenant: Tenant, n_regions: int = N_REGIONS) -> int:
    """Allocate whole regions of the pool."""
    address = int(allocator.allocate(tenant.record[0], n_regions * REGION_BYTES, 64))
    assert address > 0
    assert not tenant.is_spilled(address)
    return address


def fill(tenant: Tenant, byte: int, n_regions: int = N_REGIONS) -> int:
    """Allocate whole regions and write to all of them."""
    address = take(tenant, n_regions)
    ctypes.memset(address, byte, n_regions * REGION_BYTES)
    return address


def bytes_found(tenant: Tenant, n_regions: int = N_REGIONS) -> set[int]:
    """Allocate whole regions; returns which bytes are in them, and frees them."""
    address = take(tenant, n_regions)
    found = set(ctypes.string_at(address, n_regions * REGION_BYTES))
    allocator.free(tenant.record[0], address)
    return found


class Refusing:
    """Replaces a function of the kernel in a heap's device record by one that fails at some of its calls."""

    def __init__(self, tenant: Tenant, name: str, refuses: Callable[[int], bool], *, unmaps: bool = False) -> None:
        """``refuses`` gets the number of the call, counted from 1: of those that unmap or, else, of the others."""
        device = tenant.heap.device[0]
        self._device, self._name, self._real_address = device, name, int(device[name])
        kind = {"mmap": _MMAP, "fallocate": _FALLOCATE}[name]
        real, calls = kind(self._real_address), iter(range(1, 1 << 20))

        def function(*arguments: int) -> int:
            counts = unmaps == (name == "mmap" and arguments[2] == host.PROT_NONE)
            return -1 if counts and refuses(next(calls)) else int(real(*arguments))

        self._function = kind(function)

    def __enter__(self) -> None:
        """Replace it."""
        self._device[self._name] = ctypes.cast(self._function, ctypes.c_void_p).value

    def __exit__(self, *_: object) -> None:
        """Put the kernel's back."""
        self._device[self._name] = self._real_address
