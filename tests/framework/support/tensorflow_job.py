"""TensorFlow's build for CUDA over the driver of software: ``tensorflow_job.py WAY CHECK...``; prints it as JSON.

WAY and what is printed are as in ``wheel_job.py``. Kernels do nothing: what is compared has been
copied, on the device by ``DeepCopy``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import sys
from typing import Any

import numpy as np
import turns
from process.support.software_cuda import Driver

from zico.job import autoload, session

LONG_S = 200
MIB = 1 << 20
ELEMENTS = MIB // 4
FAR_TOO_LARGE = (4, 1 << 30)
"""Bytes."""
tf: Any = None
driver = Driver()


def live_bytes() -> int:
    """Return what TensorFlow says that tensors take."""
    return int(tf.config.experimental.get_memory_info("GPU:0")["current"])


def address_of(tensor: Any) -> int:  # noqa: ANN401 - a tensor
    """Return where a tensor lies: DLPack's structure begins with it."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    return ctypes.c_void_p.from_address(get_pointer(capsule, b"dltensor")).value or 0


def is_in_pool(tensor: Any) -> bool:  # noqa: ANN401 - a tensor
    """Tell whether a tensor lies in the heap's window."""
    joined = session.current()
    return joined is not None and 0 <= address_of(tensor) - joined.heap.base < joined.heap.window.size_bytes


def copies() -> dict[str, Any]:
    """Copy in, on the device and out; then free."""
    before = live_bytes()
    values = np.arange(ELEMENTS, dtype=np.float32)
    first = tf.constant(values)
    second = tf.raw_ops.DeepCopy(x=first)
    found = {
        "is_equal": [bool((one.numpy() == values).all()) for one in (first, second)],
        "devices": [one.device.rsplit("/", 1)[-1] for one in (first, second)],
        "in_pool": [is_in_pool(one) for one in (first, second)],
        "live_bytes": live_bytes() - before,
    }
    del first, second
    return found | {"left_bytes": live_bytes() - before}


def function() -> dict[str, Any]:
    """Copy twice in a graph of operations, for two inputs, and free what it returns."""
    before = live_bytes()
    copied = tf.function(lambda tensor: tf.raw_ops.DeepCopy(x=tf.raw_ops.DeepCopy(x=tensor)))
    is_equal = []
    for value in (1.0, 2.0):
        values = np.full(ELEMENTS, value, np.float32)
        is_equal.append(bool((copied(tf.constant(values)).numpy() == values).all()))
    return {"is_equal": is_equal, "left_bytes": live_bytes() - before}


def out_of_memory() -> dict[str, Any]:
    """Ask for more than there is, and go on."""
    before = live_bytes()
    try:
        tf.raw_ops.Empty(shape=FAR_TOO_LARGE, dtype=tf.uint8)
        error = ["nothing", ""]
    except tf.errors.OpError as raised:
        error = [type(raised).__name__, str(raised)]
    values = np.ones(ELEMENTS, np.float32)
    goes_on = bool((tf.constant(values).numpy() == values).all())
    return {"error": error, "goes_on": goes_on, "left_bytes": live_bytes() - before}


def limit() -> dict[str, Any]:
    """Ask how much memory TensorFlow takes the device to have."""
    from tensorflow.python.client import device_lib

    found = {one.device_type: one.memory_limit for one in device_lib.list_local_devices()}
    return {"limit_bytes": found["GPU"]}


def take_turns() -> dict[str, Any]:
    """Fill most of the budget with values, read them back and give them up, again and again."""
    return turns.take(tf.constant, lambda tensor: tensor.numpy())


CHECKS = {one.__name__: one for one in (copies, function, out_of_memory, limit, take_turns)}


def main() -> None:
    """Join or not, do what is asked, tell."""
    global tf  # noqa: PLW0603 - its import is what joins
    faulthandler.dump_traceback_later(LONG_S, exit=True)
    way, *names = sys.argv[1:]
    if way == "pool":
        autoload.install({"tensorflow": autoload.WATCHED["tensorflow"]})
    import tensorflow as tf

    tf.constant(np.zeros(1))  # TensorFlow makes its device, and takes what it keeps
    found: dict[str, Any] = {name: CHECKS[name]() for name in names}
    status = session.status()
    found |= {
        "frameworks": status and status["frameworks"],
        "iterations": status and status["iterations"],
        "calls": driver.calls(),
        "bad_calls": driver.counter("bad_calls").value,
        "kernels": driver.counter("kernels_launched").value,
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
