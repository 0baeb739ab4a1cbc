"""TensorFlow: tensors live in the pool; a training step ends an iteration.

Which execution or update that is: ``zico.adapters.tensorflow_steps``, and for Keras' own loops
``zico.adapters.keras``.

On the host two libraries allocate: ``libtensorflow_framework.so.2`` and ``libtensorflow_cc.so.2``
(most large tensors). On a CUDA device the first of them calls the driver, by what it looks up
(``zico.adapters.xla``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zico.base.errors import HookError
from zico.job import joining, session
from zico.job.autoload import complain

if TYPE_CHECKING:
    from zico.adapters.tensorflow_frozen import FrozenSharing

    from zico.job.session import Session

TESTED_VERSION = "2.21"

SYSTEM_ALLOCATOR = "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"
"""Without it TensorFlow with oneDNN keeps large CPU tensors in an arena of its own, which never gives memory back."""

LIBRARIES = {
    "libtensorflow_framework.so": ("posix_memalign", "free"),
    "libtensorflow_cc.so": ("posix_memalign", "aligned_alloc", "free"),
}

_ONLY_BETWEEN_STEPS = (
    "a training step of TensorFlow is one call: what it keeps between steps leaves while it waits for the next one, "
    "nothing leaves within a step. Choose --save page for a job larger than its limit"
)

CUDA_LIBRARY = "libtensorflow_framework.so"
CUDA_SETTINGS = {"TF_GPU_ALLOCATOR": ("cuda_malloc_async",)}
"""What TensorFlow reads when it first uses a GPU."""

KEPT_BACK = "TF_DEVICE_MIN_SYS_MEMORY_IN_MB"
"""What TensorFlow leaves of a device's free memory to contexts and libraries: 225 MiB below 2 GiB, else up to 1.8 GiB.

A budget has no contexts in it. The default is ``MinSystemMemory`` in TensorFlow's ``gpu_device.cc``.
"""


@session.once
def enable() -> Session | None:
    """Take TensorFlow's memory from the pool of the broker that ``ZICO_SOCKET`` names.

    Returns:
        The session, or ``None`` if there is no broker to join.

    Raises:
        HookError: Zico cannot redirect this build of TensorFlow, or a setting prevents it.
            TensorFlow then works as without Zico; the scheduler still admits the iterations of a
            process that has joined.
        ZicoError: The broker or the device refuses this process.
    """
    kind = session.pool_kind()
    joined = session.attach("tensorflow", kind=kind)
    if joined is None:
        return None
    if kind == "host":
        os.environ.setdefault(SYSTEM_ALLOCATOR, "1")
        for library, names in LIBRARIES.items():
            joined.redirect(library, names)
        if joined.settings.wish.save == "swap":
            complain("feature maps stay", HookError(_ONLY_BETWEEN_STEPS))
    else:
        _enable_cuda(joined)
    if joined.settings.wish.save in (None, "auto"):
        from zico.adapters.tensorflow_rebuilding import Rebuilder

        Rebuilder(joined)
    from zico.adapters.tensorflow_steps import StepMarker

    StepMarker(joined).install()
    joined.shares_by(_frozen)
    return joined


def _frozen(joined: Session) -> FrozenSharing:
    from zico.adapters.tensorflow_frozen import FrozenSharing

    return FrozenSharing(joined)


def _enable_cuda(joined: Session) -> None:
    import tensorflow as tf
    from zico.adapters import xla

    if not tf.test.is_built_with_cuda():
        message = (
            f"this build of TensorFlow ({tf.__version__}) knows no GPU: pip install tensorflow[and-cuda], or "
            "share the host's memory (--device host)"
        )
        raise HookError(message)
    xla.enable(joined, os.environ, CUDA_SETTINGS)
    os.environ[KEPT_BACK] = os.environ.get(KEPT_BACK) or "0"
    xla.redirect(CUDA_LIBRARY)


joining.enter()  # the import is the front door
