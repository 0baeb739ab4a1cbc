"""Compile what jobs and brokers call before they do: a minute the first time, nothing where it is kept on disk."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from zico.base.programs import program

JOBS = ("heap", "zico.planning.packing.regions_search", "zico.offload.stores", "zico.pool.behind")
BROKERS = ("scheduler", "pool", "zico.offload.stores")
PAGING = ("zico.offload.pager_loop", "zico.heap.paged")
CUDA = ("cuda_hooks", "cuda", "zico.heap.cuda.contents")


def warm(*kinds: str, paging: bool = False) -> None:
    """Put the machine code that jobs and brokers call into the cache on disk, and load the broker's.

    Waits until it is compiled, on all processors.

    Args:
        kinds: Of devices: ``host``, ``cuda``. What both share is compiled in any case.
        paging: Also what serves the faults of jobs on the host device.
    """
    cuda = CUDA if "cuda" in kinds else ()
    compile_all(*cuda, *BROKERS, *JOBS, *(PAGING if paging else ()))
    load(*BROKERS)


def load(*names: str) -> None:
    """Load programs into this process, and compile what is not kept yet."""
    compile_all(*names)
    for name in names:
        program(name).load()


def compile_all(*names: str) -> None:
    """Compile programs that are not kept yet, each in a process of its own, as many at a time as processors are there.

    Raises:
        Exception: The first one that a process raised.
    """
    missing = [name for name in dict.fromkeys(names) if not program(name).is_kept]
    if not missing:
        return
    # Forked, so that no process imports Numba once more.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as processes:
        for done in [processes.submit(_compile, name) for name in missing]:
            done.result()


def _compile(name: str) -> None:
    program(name).make()


if __name__ == "__main__":
    compile_all(*CUDA, *BROKERS, *JOBS, *PAGING)  # what takes longest first
