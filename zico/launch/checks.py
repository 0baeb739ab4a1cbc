"""What ``zico doctor`` finds out about the GPUs, and about settings that change what Zico does."""

from __future__ import annotations

import dataclasses
import os
import shutil
from typing import TYPE_CHECKING

from zico.broker.devices import devices_here, has_usable_driver
from zico.broker.lingering import CONTROL, daemon_at
from zico.broker.outside import use_now
from zico.config import PLAN_VARIABLE
from zico.errors import DriverError
from zico.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zico.broker.devices import DeviceFacts
    from zico.broker.outside import DeviceUse

_ABSENT = frozenset((36, 100))  # as zico.driver.cuda says that there is no driver library, or no device
_REGION_HINT = "--region must be a power-of-two multiple of it"
_WAITS = {
    True: "by 64-bit stream memory operations",
    False: "by a kernel, because the device has no 64-bit stream memory operations (slower, but correct)",
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that Zico needs from the machine or the interpreter."""

    name: str
    passed: bool
    detail: str


def plan_check(environ: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Yield what ``ZICO_PLAN`` does, if it is set."""
    value = environ.get(PLAN_VARIABLE)
    if value == "off":
        yield Check(PLAN_VARIABLE, passed=True, detail="off: heaps follow no plan; unset it to let them")
    elif value:
        yield Check(PLAN_VARIABLE, passed=False, detail=f"{value!r} has no effect: give off, or unset it")


def cuda_checks(environ: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Yield what each CUDA device can do, or why there is none; where there is no GPU that is no fault."""
    try:
        found = [(facts, use_now(facts)) for facts in devices_here()]
    except DriverError as error:
        yield Check("cuda", error.status in _ABSENT, f"no usable GPU here, only the host device: {error.detail}")
        return
    for facts, use in found:
        yield from _device_checks(facts, use)
    yield _mps_check(environ)


def _device_checks(facts: DeviceFacts, use: DeviceUse) -> Iterator[Check]:
    device = f"cuda:{facts.ordinal}"
    free = f"{format_bytes(use.free_bytes)} of {format_bytes(facts.total_bytes)} free"
    yield Check(device, passed=True, detail=f"{facts.name}, {facts.uuid}, {free}")
    usable = has_usable_driver(facts)
    advice = "" if usable else ": Zico needs 12.0, update the NVIDIA driver"
    yield Check(f"{device} driver", usable, f"libcuda.so.1 knows CUDA {facts.driver_text}{advice}")
    yield _support(
        f"{device} virtual memory",
        "virtual memory management",
        has_it=facts.has_virtual_memory,
        remedy="use a GPU of 2016 (Pascal) or later, or --device host",
    )
    yield _support(
        f"{device} sharing",
        "memory shared by file descriptors",
        has_it=facts.exports_descriptors,
        remedy="run on Linux without vGPU, or use --device host",
    )
    yield Check(f"{device} waits", passed=True, detail=_WAITS[facts.waits_on_stream])
    granularity = format_bytes(facts.granularity_bytes)
    yield Check(f"{device} granularity", facts.has_virtual_memory, f"{granularity}, {_REGION_HINT}")


def _support(name: str, what: str, *, has_it: bool, remedy: str) -> Check:
    return Check(name, has_it, what if has_it else f"no {what}: {remedy}")


def _mps_check(environ: Mapping[str, str]) -> Check:
    """Say how jobs would share a GPU; both ways work."""
    daemon = daemon_at(environ)
    if daemon is not None:
        return Check("MPS", passed=True, detail=f"a daemon runs at {daemon}: jobs' kernels overlap")
    if shutil.which(CONTROL, path=environ.get("PATH")):
        return Check("MPS", passed=True, detail="no daemon runs: jobs time-slice; --mps starts one for a run")
    return Check("MPS", passed=True, detail=f"{CONTROL} is not on PATH: jobs time-slice, and --mps does not work")
