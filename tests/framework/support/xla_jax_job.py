"""JAX with its own CUDA plugin as a job on a driver of software; prints what it saw as JSON.

The job finds the driver as programs do (``software_cuda.py``), and joins as ``zico run`` lets it:
by the import of JAX.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import sys
import time
from typing import Any

from process.support.software_cuda import Driver

from zico import step
from zico.job import autoload, session

MIB = 1 << 20
LONG_S = 100
FREED_S = 20


def live_bytes() -> int:
    """Return what this job's tensors take of the pool."""
    found = session.status()
    assert found is not None
    return int(found["tensor_bytes"])


def await_frees() -> None:
    """Return when nothing of this job's is left in the pool: JAX frees in threads of its own."""
    end_s = time.monotonic() + FREED_S
    while live_bytes() > 0 and time.monotonic() < end_s:
        select.select([], [], [], 0.001)


def is_in_pool(array: Any) -> bool:  # noqa: ANN401 - a jax.Array
    """Tell whether an array lies in the heap's window."""
    joined = session.current()
    assert joined is not None
    return bool(0 <= array.unsafe_buffer_pointer() - joined.heap.window.handle < joined.heap.window.size_bytes)


def train(jax: Any, np: Any) -> dict[str, Any]:  # noqa: ANN401 - the modules
    """Put arrays on the device, look where they are, and delete them."""
    live = [live_bytes()]
    values = np.arange(MIB, dtype=np.float32)
    arrays = []
    for _ in range(2):
        arrays.append(jax.device_put(values).block_until_ready())
        live.append(live_bytes())
        step()
    found = {
        "in_pool": [is_in_pool(array) for array in arrays],
        "is_equal": bool((np.asarray(arrays[1]) == values).all()),
    }
    for array in arrays:
        array.delete()
    await_frees()
    found["live_bytes"] = [*live, live_bytes()]
    try:
        jax.device_put(np.zeros(64 * MIB, np.int8)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        found["error"] = str(error)
    found["after_error"] = is_in_pool(jax.device_put(values).block_until_ready())
    return found


def main() -> None:
    """Join, train, tell."""
    faulthandler.dump_traceback_later(LONG_S, exit=True)
    os.environ |= {"JAX_PLATFORMS": "cuda", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    autoload.install({"jax": autoload.WATCHED["jax"]})
    import jax
    import jax.extend.backend
    import numpy as np
    from jax._src import hardware_utils

    hardware_utils._NVIDIA_GPU_DEVICES = [os.devnull]
    found = train(jax, np)
    status = session.status()
    assert status is not None
    found |= {
        "driver_allocations": Driver().calls().get("cuMemAllocAsync", 0),
        "frameworks": status["frameworks"],
        "iterations": status["iterations"],
        "settings": [os.environ[f"XLA_PYTHON_CLIENT_{name}"] for name in ("ALLOCATOR", "PREALLOCATE")],
    }
    jax.extend.backend.clear_backends()
    await_frees()
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
