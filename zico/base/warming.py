"""Compile what jobs and brokers call before they do: a minute the first time, nothing where it is kept on disk.

``python -m zico.base.warming`` compiles everything. With the kind of a device, ``host`` or
``cuda``, it compiles what brokers and jobs call there that neither page nor plan to save memory.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

from zico.base import interpreter
from zico.base.programs import fault, program

if TYPE_CHECKING:
    from collections.abc import Iterable

JOBS = (
    "heap",
    "zico.planning.packing.regions_search",
    "zico.tiers.stores",
)
BROKERS = ("scheduler", "pool", "zico.tiers.stores")
PAGING = ("zico.paging.loop", "zico.heap.paged")
CUDA = ("cuda_hooks", "cuda", "zico.heap.cuda.contents")
LATER = ("zico.planning.saving.planner",)
"""Programs that only jobs call that save memory, and they not at once. They take as long as all others of the host."""
ALL = (*LATER, *CUDA, *BROKERS, *JOBS, *PAGING)
"""Programs, those first that take longest."""
KINDS = ("host", "cuda")
"""Of devices."""
_YOUNG_OBJECTS = 100_000
"""Between two collections of cycles. Python's own number costs up to a fifth more time; none, twice the memory."""
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def called(kind: str, *, paging: bool = False) -> tuple[str, ...]:
    """Return the programs that jobs and brokers call, without those of ``LATER``.

    Args:
        kind: Of the device: ``host`` or ``cuda``.
        paging: Also what serves the faults of jobs on the host device.
    """
    return (*(CUDA if kind == "cuda" else ()), *BROKERS, *JOBS, *(PAGING if paging else ()))


def missing(names: Iterable[str]) -> list[str]:
    """Return the programs whose machine code is not in the cache on disk."""
    return [name for name in dict.fromkeys(names) if not program(name).is_kept]


def load(*names: str) -> None:
    """Load programs into this process, and compile what is not kept yet."""
    compile_all(*names)
    for name in names:
        program(name).load()


def compile_all(*names: str) -> None:
    """Compile programs that are not kept yet, each in a process of its own, as many at a time as processors are there.

    These processes end with this one, and with the thread that calls this. What they had half
    compiled is compiled again another time.

    Raises:
        Exception: The first one that a process raised.
    """
    left = missing(names)
    if not left:
        return
    # Forked, so that no process imports Numba once more.
    fork, before = multiprocessing.get_context("fork"), set(multiprocessing.active_children())
    with ProcessPoolExecutor(mp_context=fork, initializer=_end_with, initargs=(os.getpid(),)) as processes:
        try:
            for done in [processes.submit(_compile, name) for name in left]:
                done.result()
        except BaseException:
            for process in set(multiprocessing.active_children()) - before:
                process.kill()  # this process would wait for them, at its end at the latest
            raise


def compile_beside(*names: str) -> subprocess.Popen[bytes] | None:
    """Compile programs in a process beside this one; returns it, or ``None`` where nothing is missing.

    It ends with the thread that calls this, at the latest. A process that trains is not forked for
    it, and keeps the interpreter's lock.
    """
    if fault() or not missing(names):
        return None
    code = f"from zico.base import warming; warming.serve({os.getpid()}, {names})"
    quiet = subprocess.DEVNULL  # an error is met again, and told, by the process that needs the program
    return subprocess.Popen(  # noqa: S603 - this Python
        interpreter.command("-c", code), stdin=quiet, stdout=quiet, stderr=quiet
    )


def serve(parent: int, names: Iterable[str]) -> None:
    """Compile programs for ``compile_beside``, in the process that it has started."""
    _end_with(parent)
    for name in names:
        _compile(name)


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def _compile(name: str) -> None:
    gc.set_threshold(_YOUNG_OBJECTS)
    program(name).make()


def main(arguments: list[str]) -> None:
    """Compile what a command line asks for.

    Raises:
        SystemExit: It asks for something else.
    """
    if not arguments:
        compile_all(*ALL)
    elif len(arguments) == 1 and arguments[0] in KINDS:
        compile_all(*called(arguments[0]))
    else:
        raise SystemExit(f"zico.base.warming: {shlex.join(arguments)} is no kind of a device: {', '.join(KINDS)}")


if __name__ == "__main__":
    main(sys.argv[1:])
