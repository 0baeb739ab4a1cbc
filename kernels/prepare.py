"""Loading the kernels onto a device, and what compiled code needs to launch them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from zico.kernels.compilation import COMPUTE_CAPABILITY, image
from zico.kernels.launch import LAUNCHER
from zico.kernels.progress import PROGRESS
from zico.kernels.scrub import SCRUB
from zico.kernels.spin import SPIN

from zico.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt
    from zico.kernels.compilation import Kernel

KERNELS = (PROGRESS, SPIN, SCRUB)


class Facts(Protocol):
    """What is needed to know of a device (``zico.device.cuda.facts``)."""

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Return its architecture."""
        ...

    @property
    def waits_on_stream(self) -> bool:
        """Tell whether it has 64-bit stream memory operations."""
        ...


class Loader(Protocol):
    """What is needed of a driver (``zico.device.cuda``)."""

    @property
    def facts(self) -> Facts:
        """Return what the device is."""
        ...

    def addresses(self) -> Mapping[str, int]:
        """Return the addresses of the driver's C functions by name."""
        ...

    def load_kernel(self, image: bytes, name: str) -> int:
        """Load an image and return the handle of a kernel in it."""
        ...


def prepare(driver: Loader, stop: int, given_up: int, also: Iterable[Kernel] = ()) -> npt.NDArray[Any]:
    """Load kernels; returns a launcher (an array of one ``LAUNCHER``) that is good as long as the driver lives.

    A device marks and waits by stream operations; one without those does by kernels. One that is
    too old for kernels cannot scrub.

    Args:
        driver: Of the device.
        stop: Device address of a word that is set when kernels shall wait no more. What runs behind
            one that gives up is not ordered after what it waited for.
        given_up: Device address of the word that a kernel sets which gave up waiting.
        also: Kernels to load besides those that mark and wait, if the device can run them. Each
            takes milliseconds of a job's start.

    Raises:
        ConfigError: The device has neither.
    """
    facts = driver.facts
    addresses = driver.addresses()
    launcher = np.zeros(1, LAUNCHER)
    one = launcher[0]
    one["launch_kernel"] = addresses["cuLaunchKernel"]
    one["stop"], one["given_up"] = stop, given_up
    needed = dict.fromkeys(also)
    if facts.waits_on_stream:
        one["write_value"] = addresses["cuStreamWriteValue64_v2"]
        one["wait_value"] = addresses["cuStreamWaitValue64_v2"]
    else:
        needed |= dict.fromkeys((PROGRESS, SPIN))
    if facts.compute_capability >= COMPUTE_CAPABILITY:
        for kernel in needed:
            one[kernel.function.__name__] = driver.load_kernel(image(kernel), kernel.name)
    elif not facts.waits_on_stream:
        major, minor = facts.compute_capability
        message = (
            f"the device of compute capability {major}.{minor} can wait for another job's progress neither by stream "
            "memory operations nor by Zico's kernels, which need 7.0: use a GPU of 2017 (Volta) or later"
        )
        raise ConfigError(message)
    return launcher
