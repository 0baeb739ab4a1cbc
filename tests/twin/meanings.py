"""Zico's kernels on the software twin: what each means, run in stream order."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from zico.kernels.digest import DIGEST, LANES, TELL, THREADS
from zico.kernels.progress import PROGRESS
from zico.kernels.scrub import SCRUB
from zico.kernels.spin import SPIN

from twin.entry import refuse_unless

if TYPE_CHECKING:
    from twin.twin import Twin

_REST_S = 0.0002
_never = threading.Event()


def _array(twin: Twin, address: int, count: int, dtype: type) -> Any:  # noqa: ANN401 - an array of dtype
    """View the device's memory; call it with the twin's lock held."""
    size_bytes = count * np.dtype(dtype).itemsize
    memory: Any = (ctypes.c_char * size_bytes).from_address(twin.locate(address, size_bytes))
    return np.frombuffer(memory, dtype)


def register(twin: Twin) -> None:
    """Let the twin run Zico's kernels by their NumPy meanings."""

    def progress(twin: Twin, counter: int, value: int) -> None:
        with twin.lock:
            PROGRESS.meaning(_array(twin, counter, 1, np.int64), value)

    def spin(twin: Twin, counter: int, value: int, stop: int, given_up: int) -> None:
        end_s = time.monotonic() + twin.wait_deadline_s
        while True:
            with twin.lock:
                words = [_array(twin, address, 1, np.int64) for address in (counter, stop, given_up)]
                if SPIN.meaning(words[0], value, words[1], words[2]):
                    return
            refuse_unless(time.monotonic() < end_s, "LAUNCH_TIMEOUT")
            _never.wait(_REST_S)

    def scrub(twin: Twin, region: int, size_bytes: int) -> None:
        with twin.lock:
            SCRUB.meaning(_array(twin, region, size_bytes, np.uint8))

    def digest(twin: Twin, source: int, n: int, target: int) -> None:
        with twin.lock:
            DIGEST.meaning(_array(twin, source, n, np.uint64), _array(twin, target, LANES, np.uint64), THREADS)

    def tell(twin: Twin, words: int, found: int) -> None:
        with twin.lock:
            TELL.meaning(_array(twin, words, LANES, np.uint64), _array(twin, found, LANES, np.uint64))

    for kernel, run in ((PROGRESS, progress), (SPIN, spin), (SCRUB, scrub), (DIGEST, digest), (TELL, tell)):
        twin.kernel(kernel.name, *[ctypes.c_int64] * kernel.parameters)(run)
