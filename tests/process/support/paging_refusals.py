"""What a paged job meets that it cannot change, each in a process of its own: ``paging_refusals.py WHICH``."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

import numpy as np
from cpu.support.paged_window import BLOCK_BYTES, BLOCKS, PagedWindow

from zico.base.warming import JOBS, PAGING, load
from zico.broker.saving import Wish
from zico.device.userfault import REQUEST_POISON, SYS_USERFAULTFD, Reach
from zico.heap import allocator
from zico.heap.layout import HEAP_RECORD
from zico.job.paged_job import open_heap
from zico.job.settings import JobSettings
from zico.paging.page_table import State
from zico.pool.table import PoolTable
from zico.tiers.destinations import TierWish
from zico.tiers.stack import TierStack

NOBODY = 65534
FRAMES = 4
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
CALL_AT, SECOND_ARGUMENT_AT = 0, 24  # in struct seccomp_data
SYS_IOCTL = {"x86_64": 16, "aarch64": 29}.get(platform.machine(), -1)
_FAILS, _ALLOWED = 0x00050000, 0x7FFF0000


def become_nobody() -> None:
    """Give all privileges up."""
    if os.geteuid() == 0:
        os.setuid(NOBODY)


def refuse_userfaultfd() -> None:
    """Let userfaultfd(2) fail from now on, as container engines do."""
    refuse([(_LOAD, 0, 0, CALL_AT), (_IF_EQUAL, 0, 1, SYS_USERFAULTFD), (_RETURN, 0, 0, _FAILS | errno.EPERM)])


def refuse_poison() -> None:
    """Let UFFDIO_POISON fail from now on, as kernels before Linux 6.6 do."""
    call = [(_LOAD, 0, 0, CALL_AT), (_IF_EQUAL, 0, 3, SYS_IOCTL), (_LOAD, 0, 0, SECOND_ARGUMENT_AT)]
    refuse([*call, (_IF_EQUAL, 0, 1, REQUEST_POISON), (_RETURN, 0, 0, _FAILS | errno.EINVAL)])


def refuse(code: list[tuple[int, int, int, int]]) -> None:
    """Filter the system calls of all threads from now on (seccomp(2)); what the code does not end is allowed."""
    filled = b"".join(struct.pack("HBBI", *one) for one in [*code, (_RETURN, 0, 0, _ALLOWED)])
    text = ctypes.create_string_buffer(filled)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) + 1, ctypes.addressof(text)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, program) == 0, os.strerror(ctypes.get_errno())


def load_tiers() -> None:
    """Load the tiers' code, which nobody may not read, the cache being this user's."""
    TierStack.create([TierWish("memory", 2 * BLOCK_BYTES)], block_bytes=BLOCK_BYTES).close()


def refused() -> None:
    """Open the heap of a job that wishes to page and may not; it works without."""
    load(*JOBS, *PAGING)
    load_tiers()
    region_bytes = 1 << 16
    made = PoolTable.create(budget_bytes=8 * region_bytes, region_bytes=region_bytes, use_claims=True, self_admit=True)
    with made as pool:
        pool.member[0]["job"] = pool.join(os.getpid(), "refused")
        become_nobody()
        refuse_userfaultfd()
        heap = open_heap(
            pool, int(pool.member[0]["job"]), JobSettings(wish=Wish("page", tier="memory:1MiB")), "torch", {}
        )
        assert heap.paged is None
        heap.enable()
        address = allocator.allocate(HEAP_RECORD[0], region_bytes, 64)
        ctypes.memset(address, 7, region_bytes)
        assert ctypes.string_at(address, region_bytes) == bytes([7]) * region_bytes
        heap.close()


def user_mode() -> None:
    """Page without privileges: what the process touches itself comes, and a system call says that it cannot."""
    load(*PAGING)
    with PagedWindow(FRAMES) as window:  # loads what nobody may not read, the cache being this user's
        window.blocks[:] = 0
    become_nobody()
    with PagedWindow(FRAMES) as window:
        if window.memory.reach == Reach.ALL:
            print("all faults are shown to every user here")  # noqa: T201 - the answer
            return
        for block in range(BLOCKS):
            window.blocks[block] = block
        for block in range(BLOCKS):
            assert (window.blocks[block] == block).all()
        out = next(i for i in range(BLOCKS) if window.array("states_address")[i] == State.OUT)
        zeros = os.open("/dev/zero", os.O_RDONLY)
        try:
            os.readv(zeros, [window.blocks[out]])
        except OSError as error:
            assert error.errno == errno.EFAULT  # noqa: PT017 - no pytest in here
        else:
            raise AssertionError("a system call has written to what was out")
        assert (window.blocks[out] == out).all(), "what the call could not reach is as it was"


def broken_tier() -> None:
    """Touch what is in a file from which nothing can be read."""
    with PagedWindow(FRAMES, tiers=[TierWish("file", 2 * BLOCKS * BLOCK_BYTES)]) as window:
        for block in range(BLOCKS):
            window.blocks[block] = block
        store = window.tiers.record["tiers"][0][0]
        store["descriptor"] = os.open(f"/proc/self/fd/{int(store['descriptor'])}", os.O_WRONLY)
        print("found", np.unique(window.blocks), flush=True)  # noqa: T201 - never reached


def broken_tier_on_an_older_kernel() -> None:
    """The same where the kernel cannot poison pages."""
    refuse_poison()
    broken_tier()


if __name__ == "__main__":
    cases = (refused, user_mode, broken_tier, broken_tier_on_an_older_kernel)
    {case.__name__: case for case in cases}[sys.argv[1]]()
