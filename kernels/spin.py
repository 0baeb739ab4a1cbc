"""Waiting on the device for another stream's counter, where the device has no stream operation for it.

Known limitations
    The kernel occupies one of the device's thread slots until the counter arrives. Where jobs take
    turns on the device (no MPS), it occupies its own job's turns, too. ``cuStreamWaitValue64`` does
    neither, and is used where it is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.kernels.compilation import Kernel, load_acquire, rest, store_release
from zico.kernels.launch import INVALID_VALUE, WORD_BYTES, launch, wait_value

from zico.base.compiled import compiled

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from zico.kernels.launch import Launcher

FIRST_REST_NS = 64
LAST_REST_NS = 8192
"""Rests double up to here. A rest takes up to twice as long as asked (PTX ISA, ``nanosleep``), so
the end is seen at most 16 us late. That is a small part of the milliseconds between two marks, and
8 us apart the reads load no bus."""


def meaning(
    counter: npt.NDArray[np.int64], value: int, stop: npt.NDArray[np.int64], given_up: npt.NDArray[np.int64]
) -> bool:
    """Look once; return whether the wait is over.

    Args:
        counter: Another stream's.
        value: What it must reach.
        stop: Not 0 when nobody shall wait any more.
        given_up: Set to ``value`` if the wait ended by ``stop``.
    """
    if int(counter[0]) >= value:
        return True
    if stop[0] == 0:
        return False
    given_up[0] = value
    return True


def spin(counter: int, value: int, stop: int, given_up: int) -> int:
    """Wait until the counter at an address has reached ``value`` or the word at ``stop`` is not 0. One thread."""
    pause_ns = FIRST_REST_NS
    while load_acquire(counter) < value:
        if load_acquire(stop) != 0:
            return store_release(given_up, value)
        rest(pause_ns)
        pause_ns = min(2 * pause_ns, LAST_REST_NS)
    return 0


SPIN = Kernel(spin, meaning)


@compiled
def wait(launcher: Launcher, stream: int, counter: int, value: int) -> int:
    """Let a stream go on only when a counter has reached ``value``; returns a ``CUresult`` and does not wait itself.

    The mark must be on its stream already. A device runs what was put on it in order. So a wait
    that stands before its mark could keep the mark from running.
    """
    if counter % WORD_BYTES != 0:
        return INVALID_VALUE
    if launcher.wait_value != 0:
        return wait_value(launcher, stream, counter, value)
    return launch(launcher, launcher.spin, 1, 1, stream, (counter, value, launcher.stop, launcher.given_up))
