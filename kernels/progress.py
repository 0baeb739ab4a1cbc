"""Progress: a stream's counter, written on the device's timeline.

A counter is 64 bit, in host memory that the device and all jobs see. One stream writes it, each
value larger than the one before. Who finds it at a value knows that all work put on the stream
before that mark is done.

A stream operation writes the counter where the device has one. On an H200 that takes the processor
1.0 us a mark and the device 2.7 us between other work. The kernel takes 3.6 us and 2.4 us
(benchmarks/results/gpu/progress.md). The processor's time is spent inside the heap's mutex.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.kernels.compilation import Kernel, store_release
from zico.kernels.launch import INVALID_VALUE, WORD_BYTES, launch, write_value

from zico.base.compiled import compiled

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from zico.kernels.launch import Launcher


def meaning(counter: npt.NDArray[np.int64], value: int) -> None:
    """Set the counter."""
    counter[0] = value


def progress(counter: int, value: int) -> int:
    """Set the counter at an address. One thread."""
    return store_release(counter, value)


PROGRESS = Kernel(progress, meaning)


@compiled
def mark(launcher: Launcher, stream: int, counter: int, value: int) -> int:
    """Let a stream set its counter to ``value`` when all its work so far is done; returns a ``CUresult``.

    Tell others of the mark only after this returned 0: what they wait for must already be on the
    stream.
    """
    if counter % WORD_BYTES != 0:
        return INVALID_VALUE
    if launcher.write_value != 0:
        return write_value(launcher, stream, counter, value)
    return launch(launcher, launcher.progress, 1, 1, stream, (counter, value))
