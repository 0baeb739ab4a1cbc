"""What a session does for a job that pages: its window, its tiers, and its pager.

Whatever keeps a job from being paged is said in one line, and the job goes on as any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zico.base.errors import ConfigError, DriverError, ZicoError
from zico.base.laboratory import part
from zico.broker.saving import SWAPPING, VARIABLES, check_device
from zico.job.autoload import complain

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Mapping

    from zico.heap.build import Heap
    from zico.job.settings import JobSettings
    from zico.pool.table import PoolTable
    from zico.tiers.stack import TierStack

_DEFAULT_TIERS = "memory"
_NOT_PAGED = "this job is not paged"
_NOT_SWAPPED = "this job does not swap"


def managed_window(undo: contextlib.ExitStack, pool: PoolTable, job: int, settings: JobSettings) -> dict[str, Any]:
    """Return, as a parameter of the heap, managed memory for the window of a job on a GPU, if it is to page."""
    wish = settings.wish
    if wish.save != "page":
        return {}
    from zico.heap.cuda.managed_window import open_window

    try:
        check_device("cuda", {settings.name: wish}, VARIABLES)
        return {"managed": undo.enter_context(open_window(pool, job, settings.window))}
    except (ConfigError, DriverError) as error:
        complain(_NOT_PAGED, error)
        return {}


def check_swapping(pool: PoolTable, job: int, settings: JobSettings, framework: str) -> None:
    """Say why a job on a GPU that is to swap does not, if so; its record then says that it saves nothing."""
    from zico.pool.layout import SaveMode

    if settings.wish.save != "swap":
        return
    refused = None
    if framework not in SWAPPING:
        refused = ConfigError(f"on a GPU {', '.join(SWAPPING)} alone swaps, {framework} does not: give page")
    else:
        try:
            check_device("cuda", {settings.name: settings.wish}, VARIABLES)
        except ConfigError as error:
            refused = error
    if refused is not None:
        complain(_NOT_SWAPPED, refused)
        pool.jobs[job]["save"] = SaveMode.NONE


def open_heap(pool: PoolTable, job: int, settings: JobSettings, framework: str, of_device: dict[str, Any]) -> Heap:
    """Return the process's heap, on the host with the window of a job that pages, if it is to page.

    Where that is left open a job pages whose framework has nothing to swap with. Its record then
    says so, and as which published system it pages, if as one.
    """
    from zico.heap.build import Heap
    from zico.heap.layout import HEAP_RECORD
    from zico.pool.layout import SaveMode

    wish, parameters = settings.wish, {**settings.heap, **of_device}
    pages = wish.save == "page" or (wish.save == "auto" and framework not in SWAPPING)
    if pages and "timeline" not in of_device:
        try:
            paging = {**_case(wish.planner), **settings.paging}
            tiers = _tiers(pool, settings, paging.pop("tier", _DEFAULT_TIERS))
            heap = Heap(pool, HEAP_RECORD, **parameters, tiers=tiers, paging=paging)
        except ZicoError as error:
            complain(_NOT_PAGED, error)
        else:
            pool.jobs[job]["save"], pool.jobs[job]["planner"] = SaveMode.PAGE, wish.planner.encode()
            return heap
    return Heap(pool, HEAP_RECORD, **parameters)


def _case(system: str) -> Mapping[str, Any]:
    """Return how a published system pages: parameters of ``PagedMemory``, and its tier, if it has one of its own."""
    found: Mapping[str, Any] = part("saving.pagers", "PAGERS", f"--save {system}")[system] if system else {}
    return found


def _tiers(pool: PoolTable, settings: JobSettings, usual: str) -> TierStack:
    from zico.paging.pager import block_bytes_for
    from zico.tiers.destinations import parse_tiers
    from zico.tiers.stack import TierStack

    directory = settings.heap.get("spill_directory")
    wishes = parse_tiers(settings.wish.tier or usual, directory)
    return TierStack.create(wishes, block_bytes=block_bytes_for(pool.region_bytes), directory=directory)


def serve_pages(heap: Heap) -> None:
    """Serve this process's faults from now on, if it pages; the job's record says where the kernel counts its pages."""
    if heap.paged is None:
        return
    from zico.device.userfault import REMEDY, Reach
    from zico.paging.pager import Pager

    if heap.paged.reach == Reach.USER_MODE:
        complain("system calls that are given memory which is out fail with EFAULT", ConfigError(REMEDY))
    heap.pool.jobs[heap.pool.member[0]["job"]]["pages_fd"] = heap.paged.memory_fd
    heap.pager = Pager(heap.paged, heap.pool.member, float(heap.record[0]["wait"]["limit_ns"]) / 1e9)
    heap.pager.start()
