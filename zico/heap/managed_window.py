"""The managed memory that becomes a job's window: how much of it, beside the pool and other jobs' windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from zico.driver.cuda.bindings import OUT_OF_MEMORY
from zico.driver.cuda.managed import allocate
from zico.errors import DriverError
from zico.pool.layout import JobState
from zico.units import format_bytes, parse_size

if TYPE_CHECKING:
    from zico.driver.cuda.driver import CudaDriver
    from zico.driver.cuda.managed import Managed
    from zico.pool.table import PoolTable

VARIABLE = "ZICO_PAGED_BYTES"
"""Where the user says how large it is: all that the job will ever need at once. A percentage is of what is free."""
_SPARE_SHARE = 8
"""Without it, an eighth of what is free is left to what comes besides tensors: contexts, workspaces, modules."""


def open_window(pool: PoolTable, job: int, text: str) -> Managed:
    """Allocate the window of a job on a GPU, so that all such windows together fit into what the device has free.

    The job's record says how large it is, so that of two jobs that begin at once each sees the other.

    Args:
        pool: The pool, on a CUDA device.
        job: The job's place.
        text: A size, or nothing.

    Raises:
        ConfigError: The text is no size.
        DriverError: The device cannot, or has less free; nothing is left behind.
    """
    driver = cast("CudaDriver", pool.driver)
    free_bytes = max((driver.free_bytes() or 0) - _promised(pool, job), 0)
    wanted = parse_size(text, whole_bytes=free_bytes) if text else free_bytes - free_bytes // _SPARE_SHARE
    record = pool.jobs[job]
    record["managed_bytes"] = wanted
    try:
        _refuse_beyond(driver, wanted, _promised(pool, job))
        return allocate(driver, wanted)
    except DriverError:
        record["managed_bytes"] = 0
        raise


def _refuse_beyond(driver: CudaDriver, wanted: int, promised: int) -> None:
    """Refuse a window that does not fit beside other jobs' into what is free; what of those is resident counts twice.

    Raises:
        DriverError: It does not.
    """
    free_bytes = driver.free_bytes() or 0
    if wanted + promised > free_bytes:
        detail = (
            f"{format_bytes(wanted)} are asked for, {driver.name} has {format_bytes(free_bytes)} free, and other jobs' "
            f"windows may take {format_bytes(promised)} of it: more could hang the GPU; lower {VARIABLE} or --budget"
        )
        raise DriverError("allocation of managed memory", OUT_OF_MEMORY, detail)


def _promised(pool: PoolTable, job: int) -> int:
    """Return the bytes of the windows of other jobs, whether they are resident, and so not free any more, or not."""
    jobs = pool.jobs[: int(pool.header["places"])]
    others = [one for place, one in enumerate(jobs) if place != job and one["state"] != JobState.EMPTY]
    return sum(int(one["managed_bytes"]) for one in others)
