"""What ``zico simulate`` is asked: jobs, budgets, policies and a device, read and checked."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zico.errors import ConfigError
from zico.scheduler.policies import POLICIES, policy_named
from zico.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.scheduler.compare import Horizon, Pool
    from zico.scheduler.device_model import DeviceModel
    from zico.scheduler.jobs_file import Ways
    from zico.scheduler.packed import Compiled
    from zico.scheduler.simulate import Load
    from zico.scheduler.state import Less

ORACLE = "oracle"
AUTO = "auto"
ANY_DEVICE = "any"
SAVES = ("none", "swap", "page", "auto")
"""How jobs with traces go on with less under the policy ``auto``; there ``auto`` is whatever is better."""
_STDIN = "-"
_MOST_BYTES = 1 << 60
_LEAST_REGION = 1 << 10
_MOST_S = 1e8
_SHARE = re.compile(r"\d{1,6}(?:\.\d{0,9})?%")
# A comma may also part a policy's parameters: shift:poll=1ms,ramp=0.7,claims are two policies.
_NEXT_POLICY = re.compile(r",(?=[^,=:]*(?:[:,]|$))")


@dataclasses.dataclass(frozen=True)
class Budget:
    """One budget, as it was asked for and in bytes."""

    text: str
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Means:
    """How jobs may go on with less."""

    policies: tuple[str, ...]
    save: str
    """One of ``SAVES``."""

    @property
    def need(self) -> Callable[[Load], int]:
        """Return what a job cannot do without: its peak, unless all policies let it go on with less."""
        from zico.scheduler.jobs_file import least_of, peak_of

        return least_of if set(self.policies) == {AUTO} else peak_of

    def ways(self, copy_bytes_per_s: float) -> Ways | None:
        """Return what makes ways of a trace over a link, ``None`` where nobody is to go on with less."""
        makers = {
            "none": (),
            "swap": (("zico.scheduler.less_of_trace", "by_swapping"),),
            "page": (("zico.simulator.paging_simulation", "by_paging"),),
        }
        makers["auto"] = makers["swap"] + makers["page"]
        chosen = makers[self.save if AUTO in self.policies else "none"]
        if not chosen:
            return None

        def ways(path: Path, jobs: int) -> tuple[Less, ...]:
            from zico.trace.files import read_trace

            trace = read_trace(path)
            found = (
                getattr(importlib.import_module(module), name)(trace, copy_bytes_per_s, jobs) for module, name in chosen
            )
            return tuple(itertools.chain.from_iterable(found))

        return ways


@dataclasses.dataclass(frozen=True)
class Work:
    """What is simulated, whatever the policy and the budget."""

    loads: tuple[Load, ...]
    """In regions."""
    region_bytes: int
    device: DeviceModel
    device_model: str
    seconds: float | None
    seed: int

    def pool(self, budget: Budget) -> Pool:
        """Return what the jobs share."""
        from zico.scheduler.compare import Pool

        return Pool(budget.size_bytes // self.region_bytes, self.device, self.region_bytes)

    def horizon(self, policy: Compiled | None) -> Horizon:
        """Return how long to simulate the jobs under a policy."""
        from zico.scheduler.compare import horizon_of, round_ns_of

        return horizon_of(self.loads, self.seconds, round_ns_of(policy, len(self.loads)) if policy else 0)


def policies_of(text: str) -> tuple[str, ...]:
    """Return the policies that a list names, each once.

    Raises:
        ConfigError: One is not known; the message lists those that are.
    """
    names = tuple(dict.fromkeys(name.strip() for name in _NEXT_POLICY.split(text)))
    for name in names:
        if name not in {ORACLE, AUTO}:
            policy_named(name)
    return names


def is_to_be_compiled(text: str) -> bool:
    """Tell whether the simulator, or a policy of a list, has no machine code yet."""
    from zico.programs import program, program_of

    names = {name.strip().partition(":")[0] for name in _NEXT_POLICY.split(text)} & set(POLICIES)
    programs = {program("scheduler"), *(program_of(policy_named(name).function.__module__) for name in names)}
    return not all(one.is_kept for one in programs)


def region_bytes_of(text: str | None) -> int | None:
    """Return the size of a region, if one is asked for.

    Raises:
        ConfigError: It is no power of two, or too small.
    """
    if text is None:
        return None
    try:
        region_bytes = _size(text)
    except ConfigError:
        region_bytes = 0
    if region_bytes & (region_bytes - 1) or region_bytes < _LEAST_REGION:
        raise ConfigError(f"--region {text!r}: give a power of two, 1KiB or more")
    return region_bytes


def work_of(
    jobs: str,
    budget: str,
    region_bytes: int | None,
    seconds: float | None,
    seed: int,
    device_model: str,
    *,
    means: Means,
) -> tuple[Work, tuple[Budget, ...]]:
    """Read and check the jobs and the budgets; no job may need more than any of these."""
    from zico.scheduler.compare import check_fits, check_guarantees
    from zico.scheduler.jobs_file import finest_region, in_regions, peak_of, read_jobs
    from zico.scheduler.shares import check

    text, where, folder = _source(jobs)
    device = _device(device_model)
    in_bytes = read_jobs(text, where, folder, region_bytes or 1, means.ways(device.copy_bytes_per_s))
    check(in_bytes)
    whole_bytes = sum(map(peak_of, in_bytes))
    if whole_bytes == 0:
        raise ConfigError(f"{where}: no job holds memory: give a curve with bytes")
    budgets = _budgets(budget, whole_bytes)
    unit = region_bytes or finest_region(in_bytes)
    loads = in_regions(in_bytes, unit, whole=region_bytes is not None)
    for one in budgets:
        if region_bytes is None:
            check_fits(in_bytes, one.size_bytes, 1, need=means.need)
        check_fits(loads, one.size_bytes // unit, unit, need=means.need)
        check_guarantees(loads, one.size_bytes // unit, unit, device.slowdown)
    if seconds is not None and not 0 < seconds <= _MOST_S:
        raise ConfigError(f"--seconds {seconds:g}: give a number above 0, at most {_MOST_S:g}")
    work = Work(loads, unit, device, device_model or ANY_DEVICE, seconds, seed)
    work.horizon(None)
    return work, budgets


def _source(jobs: str) -> tuple[str | bytes, str, Path]:
    """Return the text of the jobs, what to call it, and where its traces' paths begin."""
    if jobs.lstrip().startswith("{"):
        return jobs, "the jobs", Path()
    if jobs == _STDIN:
        return sys.stdin.buffer.read(), "stdin", Path()
    path = Path(jobs)
    try:
        return path.read_bytes(), jobs, path.parent
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        raise ConfigError(f"{jobs}: {said}: give a file of jobs, or {{...}} itself") from None


def _budgets(text: str, whole_bytes: int) -> tuple[Budget, ...]:
    """Return the budgets that a list names, each once."""
    found: dict[int, str] = {}
    for one in text.split(","):
        found.setdefault(_budget_bytes(one.strip(), whole_bytes), one.strip())
    return tuple(Budget(one, size_bytes) for size_bytes, one in found.items())


def _budget_bytes(text: str, whole_bytes: int) -> int:
    is_share = _SHARE.fullmatch(text)
    try:
        size_bytes = int(float(text[:-1]) * whole_bytes / 100) if is_share else _size(text)
    except ConfigError:
        size_bytes = 0
    if not 0 < size_bytes <= _MOST_BYTES:
        raise ConfigError(
            f"--budget: {text!r} is not a budget: give a size such as 20GiB, or 70% of the sum of the peaks"
        )
    return size_bytes


def _size(text: str) -> int:
    """Return the bytes of a size; a share of something, or no limit, is none."""
    return 0 if text.endswith("%") or text.lower() == "none" else parse_size(text, whole_bytes=_MOST_BYTES)


def _device(text: str) -> DeviceModel:
    from zico.scheduler.device_model import DeviceModel, device_model_named

    return device_model_named(text) if text else DeviceModel(ANY_DEVICE)
