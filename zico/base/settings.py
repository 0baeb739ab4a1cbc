"""Settings of a run, each with its origin, checked before anything is started.

Click finds what was given, and where (``zico.cli.options``). This module measures nothing: the
caller gives the texts and the device's memory, so every rule here is testable as a function.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Generic, TypeVar

from zico.base.errors import ConfigError
from zico.base.units import KIB, MIB, format_bytes, parse_size, parse_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

Value = TypeVar("Value")

HOST = "host"
DEFAULT_POLICY = "zico"
DEFAULT_LOG_LEVEL = "warning"
DEFAULT_GRACE_S = 5.0
DEFAULT_REGION_BYTES = 4 * MIB
DEFAULT_CUDA_REGION_BYTES = 64 * MIB
"""The largest default there: a region is one handle of the driver, and each is exported, imported and mapped."""
DEFAULT_CUDA_REGIONS = 128
"""How many regions a small budget on a GPU has by default: about ten of a job's are partly empty."""
DEFAULT_CUDA_SAVING_REGION_BYTES = 16 * MIB
"""The largest default for jobs that move tensors from the start.

What comes back has regions of its own, and between tensors that have left lie parts of regions. On an H200 a
ResNet-50 at 60 % of its peak took 158 ms with these, and 208 ms with 64 MiB. There, two jobs that hand regions to each
other, and save nothing, lost 14 % by them (benchmarks/results/gpu/gpu_saving_steps.json).
"""
_MOVES_LATER = ("", "none", "auto", "page")
"""What ``--save`` says where no tensor moves from the start."""
DEFAULT_AVAILABLE_PERCENT = 80
"""Share of the memory available now that a run takes when no budget is given.

On the host device the same memory also holds interpreters, libraries and data sets. On a GPU it
holds what others start meanwhile. Neither is in the budget.
"""
DEFAULT_CUDA_RESERVE = "1GiB"
"""A context takes about half of it; libraries such as cuBLAS and cuDNN allocate workspaces beside the framework."""
DEFAULT_EXPECTED_JOBS = "2"
"""Jobs that a broker expects that is started before them."""
MAX_EXPECTED_JOBS = 1000

DEFAULT_MOST_REGIONS = 1 << 16
"""What a budget on the host may be raised to unless something else is said: a table of 2 MiB."""
SHARES = ("weight", "priority", "slo", "compute")
SAVING = ("save", "limit", "tier", "share_frozen")
OF_A_POOL = ("budget", "most", "reserve", "region", "policy", "isolate", "mps", "metrics")
"""What describes a pool: with one of them as an option, ``zico run`` has a pool of its own."""
OF_A_BROKER = (*OF_A_POOL, "log-level")
"""What a broker keeps as it was started."""

LOG_LEVELS = ("debug", "info", "warning", "error")
MIN_REGION_BYTES = 64 * KIB
"""Smaller tensors than this never reach the host's pool, so a smaller region would only cost mappings."""
MAX_GRACE_S = 3600.0
MAX_STARTING_S = 3600.0
MAX_PORT = 2**16 - 1

SOCKET_VARIABLE = "ZICO_SOCKET"
"""A job, or ``zico status``, finds its broker by this variable."""
SWITCH_VARIABLE = "ZICO"
"""``off``: importing an adapter and ``zico.join`` do nothing."""
DEVICE_VARIABLE = "ZICO_DEVICE"
JOB_VARIABLE = "ZICO_JOB"
"""What a job is called."""
MAX_NAME_BYTES = 40
"""Bytes of a job's name, so that the table's 48 have room for the ``.2`` of its second process."""
_NOT_IN_A_NAME = re.compile(r"[^\w.+=@,-]+")
RUN_VARIABLE = "ZICO_RUN"
"""Which ``zico run`` started a job: its own jobs are told from others of their names in a daemon's pool."""
STARTING_VARIABLE = "ZICO_STARTING"
"""Seconds that a job waits until that socket is there, since ``zico run`` starts jobs beside the broker."""

RING_VARIABLE = "ZICO_TRACE_RING"
"""A file made by ``zico trace`` into which the job records its events."""
OPS_VARIABLE = "ZICO_TRACE_OPS"
"""Set: record operations too, where the adapter can see them."""
PARTS_VARIABLE = "ZICO_PAGING"
"""``FLAGS[:DEGREE]``: parts of paging that are on, and how far it looks ahead, for measuring what each is worth.

``zico.paging.layout`` has both."""
PLAN_VARIABLE = "ZICO_PLAN"
"""``off``: place tensors by their classes alone, follow no plan."""
PROFILES_VARIABLE = "ZICO_PROFILES"
"""``off``: a job begins without what it did in an earlier run, and keeps nothing for the next one."""

_DEVICE = re.compile(r"(?P<kind>host|cuda)(:(?P<ordinal>\d{1,4}))?")
MAX_DEVICES = 16
"""Devices of one run."""
_SWITCH = {"": False, "0": False, "false": False, "1": True, "true": True}


def fitting_name(name: str) -> str:
    """Return the name with what no job's name has made dashes, cut to ``MAX_NAME_BYTES``."""
    cleaned = _NOT_IN_A_NAME.sub("-", name).strip("-") or "job"
    return cleaned.encode(errors="replace")[:MAX_NAME_BYTES].decode(errors="ignore")


@dataclasses.dataclass(frozen=True)
class Setting(Generic[Value]):
    """One checked value and where it came from."""

    value: Value
    origin: str
    """The flag, the environment variable, the file, or what the default was derived from."""


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device, in bytes."""

    total_bytes: int
    available_bytes: int
    """What could be used now without taking it from others."""
    granularity_bytes: int = MIN_REGION_BYTES
    """What a region must be a power-of-two multiple of."""
    is_taken_at_once: bool = False
    """The pool takes all of its budget when it is made, so that the budget cannot exceed what is available."""
    held_by: str = ""
    """Who holds what is not available, as far as that is known."""
    identity: str = ""
    """What names the device where this process sees several of its kind, else empty."""
    promised_bytes: int = 0
    """Bytes of what is available that pools of this machine, of any user, may yet take."""


Given = Mapping[str, Setting[str]]
"""What was given, as text by the names of the settings, with "_" for "-"."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that a run needs to know before it starts."""

    device: Setting[str]
    """``host``, ``host:N`` or ``cuda:N``."""
    device_identity: str
    """What names it where there are several of its kind, else empty."""
    policy: Setting[str]
    region_bytes: Setting[int]
    budget_bytes: Setting[int]
    reserve_bytes: Setting[int]
    """What each job is expected to need of the device outside the pool, for its context and for workspaces."""
    expected_jobs: Setting[int]
    warning: str
    """What the user should know of the budget; empty as a rule."""
    grace_s: Setting[float]
    """How long an ending job may take after each signal."""
    log_level: Setting[str]
    isolate: Setting[bool]
    """Whether a region is unmapped by who returns it and scrubbed before the next one gets it."""
    mps: Setting[bool]
    """Whether the jobs share the GPU through a private MPS daemon."""
    most_bytes: Setting[int]
    """What the budget may be raised to while jobs run."""
    metrics: Setting[str]
    """Where the broker serves metrics (``parse_metrics``); empty: nowhere."""
    shares: Mapping[str, Setting[str]]
    """Weights, priorities, guarantees and shares of the processors as ``NAME=VALUE,...``, read once names are known."""
    saving: Mapping[str, Setting[str]]
    """How jobs go on with less than their peaks: modes and limits likewise, and tiers."""


def kind_of(device: str) -> str:
    """Return ``host`` or ``cuda`` for the name of a device."""
    return device.partition(":")[0]


def devices_of(given: Given) -> tuple[Setting[str], ...]:
    """Return the devices that are chosen, in their order; whether they exist is not looked at.

    Raises:
        ConfigError: One of them is no device's name, one is given twice, or there are too many.
    """
    chosen = _chosen(given, "device", HOST)
    return tuple(Setting(name, chosen.origin) for name in parsed(chosen, parse_devices).value)


def device_of(given: Given) -> Setting[str]:
    """Return the only device that is chosen; whether it exists is not looked at.

    Raises:
        ConfigError: It is no device's name, or there are several.
    """
    first, *others = devices_of(given)
    if others:
        raise ConfigError(
            f"{first.origin}: {1 + len(others)} devices are given, and this command is about one: give --device "
            f"{first.value}"
        )
    return first


def resolve(
    given: Given,
    memory: DeviceMemory,
    policies: Collection[str],
    n_jobs: int | None = None,
    device: Setting[str] | None = None,
) -> Settings:
    """Return the settings of a run on one device. Starts and changes nothing.

    Args:
        given: By the command line, the environment and the settings file.
        memory: Of the device.
        policies: The names that are accepted.
        n_jobs: How many jobs there will be; ``None`` where only the user can know.
        device: Which one, where several are chosen; by default the only one.

    Raises:
        ConfigError: A value is not acceptable; the message names it, its origin and what would be
            accepted.
    """
    device = device or device_of(given)
    is_host = kind_of(device.value) == HOST
    reserve = _reserve(_chosen(given, "reserve", "0" if is_host else DEFAULT_CUDA_RESERVE), memory)
    jobs = _expected_jobs(given, n_jobs)
    reserved_bytes = reserve.value * jobs.value
    default_region_bytes = DEFAULT_REGION_BYTES
    if not is_host:
        budget = _budget(_chosen(given, "budget"), memory.granularity_bytes, memory, reserved_bytes)
        default_region_bytes = cuda_region_bytes(budget.value)
        ways = _chosen(given, "save").value.split(",")
        if any(way.rpartition("=")[2].strip() not in _MOVES_LATER for way in ways):
            default_region_bytes = min(default_region_bytes, DEFAULT_CUDA_SAVING_REGION_BYTES)
    region = _region(_chosen(given, "region"), memory, max(default_region_bytes, memory.granularity_bytes))
    budget = _budget(_chosen(given, "budget"), region.value, memory, reserved_bytes)
    most = _most(_chosen(given, "most"), budget, region.value, memory, reserved_bytes)
    taken = most if memory.is_taken_at_once and most.value > budget.value else budget
    mps = parsed(_chosen(given, "mps"), parse_switch)
    if mps.value and is_host:
        raise ConfigError(f"{mps.origin}: MPS needs a GPU: choose one, as in --device cuda:0")
    return Settings(
        device=device,
        device_identity=memory.identity,
        policy=_policy(_chosen(given, "policy", DEFAULT_POLICY), policies),
        region_bytes=region,
        budget_bytes=budget,
        reserve_bytes=reserve,
        expected_jobs=jobs,
        warning=_warning(taken, memory, reserved_bytes),
        grace_s=parsed(_chosen(given, "grace", str(DEFAULT_GRACE_S)), _parse_grace),
        log_level=_one_of(_chosen(given, "log_level", DEFAULT_LOG_LEVEL), LOG_LEVELS, "log level"),
        isolate=parsed(_chosen(given, "isolate"), parse_switch),
        mps=mps,
        most_bytes=most,
        metrics=_metrics(_chosen(given, "metrics")),
        shares={name: _chosen(given, name) for name in SHARES},
        saving={name: _chosen(given, name) for name in SAVING},
    )


def _chosen(given: Given, name: str, default: str = "") -> Setting[str]:
    return given.get(name) or Setting(default, "default")


def parsed(setting: Setting[str], parse: Callable[[str], Value]) -> Setting[Value]:
    """Return the parsed setting; an error gains the setting's origin."""
    try:
        return Setting(parse(setting.value), setting.origin)
    except ConfigError as error:
        raise ConfigError(f"{setting.origin}: {error}") from None


def parse_devices(text: str) -> tuple[str, ...]:
    """Return the names of devices that are separated by commas, each as it is called everywhere.

    Raises:
        ConfigError: One of them is no device's name, one is given twice, or there are too many.
    """
    names = tuple(_parse_device(part.strip()) for part in text.split(","))
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{text!r} has {twice} twice: give each device once")
    if len(names) > MAX_DEVICES:
        raise ConfigError(f"{len(names)} devices are given: give at most {MAX_DEVICES}")
    return names


def _parse_device(text: str) -> str:
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is not a device: give host, cuda or cuda:N, where N counts from 0, or several with commas "
            "between them"
        )
    return HOST if text == HOST else f"{match['kind']}:{int(match['ordinal'] or 0)}"


def parse_switch(text: str) -> bool:
    """Return whether a text says on.

    Raises:
        ConfigError: It says neither on nor off.
    """
    if text.lower() not in _SWITCH:
        raise ConfigError(f"{text!r} is neither on nor off: give 1 or 0")
    return _SWITCH[text.lower()]


def _one_of(setting: Setting[str], accepted: Collection[str], what: str) -> Setting[str]:
    if setting.value not in accepted:
        choices = ", ".join(accepted)
        raise ConfigError(f"{setting.origin}: {setting.value!r} is not a {what}: give one of {choices}")
    return setting


def _policy(setting: Setting[str], accepted: Collection[str]) -> Setting[str]:
    """Check the name; what is said behind it is for the policy itself to check."""
    _one_of(Setting(setting.value.partition(":")[0], setting.origin), accepted, "policy")
    return setting


def parse_metrics(text: str) -> int | Path:
    """Return the port or the path of a Unix socket at which metrics are to be served.

    Raises:
        ConfigError: It is a number, but no port, or nothing that can be a path.
    """
    if text.lstrip("+-").isdecimal():
        number = parse_whole(text, 0, MAX_PORT)
        if number is None:
            raise ConfigError(f"{text} is not a port: give a number from 0 to {MAX_PORT}, or a path")
        return number
    if "\0" in text:
        raise ConfigError(f"{text!r} is neither a port nor a path: give a number from 0 to {MAX_PORT}, or a path")
    return Path(text)


def _metrics(chosen: Setting[str]) -> Setting[str]:
    if chosen.value:
        parsed(chosen, parse_metrics)
    return chosen


def _parse_grace(text: str) -> float:
    return _seconds(text, "a grace period", MAX_GRACE_S)


def starting_s(text: str) -> float:
    """Return how long a job waits for a broker that is starting, by its variable; empty: not at all.

    Raises:
        ConfigError: It is no such time; the message names the variable.
    """
    return parsed(Setting(text or "0", STARTING_VARIABLE), lambda said: _seconds(said, "a wait", MAX_STARTING_S)).value


def _seconds(text: str, what: str, most_s: float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= most_s:
        raise ConfigError(f"{text!r} is not {what}: give seconds from 0 to {most_s:.0f}")
    return seconds


def cuda_region_bytes(budget_bytes: int) -> int:
    """Return the size of a region that a GPU's budget has by default: a power of two."""
    return min(DEFAULT_CUDA_REGION_BYTES, 1 << max(0, (budget_bytes // DEFAULT_CUDA_REGIONS).bit_length() - 1))


def _region(chosen: Setting[str], memory: DeviceMemory, default_bytes: int) -> Setting[int]:
    if not chosen.value:
        return Setting(default_bytes, chosen.origin)
    least_bytes = memory.granularity_bytes

    def parse(text: str) -> int:
        region_bytes = parse_size(text, whole_bytes=memory.total_bytes)
        if region_bytes % least_bytes or (region_bytes // least_bytes).bit_count() != 1:
            raise ConfigError(
                f"a region of {text} is {region_bytes} bytes: give a power of two from "
                f"{format_bytes(least_bytes)}, such as {format_bytes(default_bytes).replace(' ', '')}"
            )
        return region_bytes

    return parsed(chosen, parse)


def _reserve(chosen: Setting[str], memory: DeviceMemory) -> Setting[int]:
    def parse(text: str) -> int:
        if text.strip().lower() in {"0", "none"}:
            return 0
        # A device may well be smaller: then the reserve only causes the warning beside an explicit
        # budget.
        whole_bytes = memory.total_bytes if text.strip().endswith("%") else sys.maxsize
        return parse_size(text, whole_bytes=whole_bytes)

    return parsed(chosen, parse)


def _expected_jobs(given: Given, n_jobs: int | None) -> Setting[int]:
    """Return how many jobs are to find room for what they need outside the pool."""
    if n_jobs is not None:
        return Setting(n_jobs, "the commands")

    def parse(text: str) -> int:
        number = parse_whole(text, 1, MAX_EXPECTED_JOBS)
        if number is None:
            raise ConfigError(f"{text!r} is not a number of jobs: give a number from 1 to {MAX_EXPECTED_JOBS}")
        return number

    return parsed(_chosen(given, "jobs", DEFAULT_EXPECTED_JOBS), parse)


def _room_bytes(memory: DeviceMemory) -> int:
    """Return what a pool could take; some of a GPU is always taken, so all of it could never be had."""
    return memory.available_bytes if memory.is_taken_at_once else memory.total_bytes


def _warning(taken: Setting[int], memory: DeviceMemory, reserved_bytes: int) -> str:
    """Return what is to be said of a pool that leaves less than the reserve; the user may know better."""
    left_bytes = _room_bytes(memory) - taken.value
    if left_bytes >= reserved_bytes:
        return ""
    return (
        f"warning: {taken.origin}: {format_bytes(taken.value)} leave {format_bytes(left_bytes)} of the device for "
        f"contexts and workspaces, less than the reserve of {format_bytes(reserved_bytes)}"
    )


def _budget(chosen: Setting[str], region_bytes: int, memory: DeviceMemory, reserved_bytes: int) -> Setting[int]:
    """Return the budget in whole regions, rounded down so that it is never exceeded.

    ``none`` and percentages are of what is left beside the reserve, so that they never take it.
    """

    def parse(text: str) -> int:
        is_share = text.strip().lower() == "none" or text.strip().endswith("%")
        whole_bytes = _left(_room_bytes(memory), region_bytes, reserved_bytes) if is_share else memory.total_bytes
        wanted_bytes = parse_size(text, whole_bytes=whole_bytes)
        budget_bytes = wanted_bytes // region_bytes * region_bytes
        if budget_bytes == 0:
            raise ConfigError(
                f"a budget of {text} is {format_bytes(wanted_bytes)}, less than one region of "
                f"{format_bytes(region_bytes)}: give a larger --budget or a smaller --region"
            )
        if memory.is_taken_at_once and budget_bytes > memory.available_bytes:
            holders = memory.held_by or "others"
            raise ConfigError(
                f"a budget of {text} is {format_bytes(budget_bytes)}, but {format_bytes(memory.available_bytes)} of "
                f"the device's {format_bytes(memory.total_bytes)} are free, the rest is held by {holders}: give a "
                "smaller --budget or end those"
            )
        return budget_bytes

    if chosen.value:
        return parsed(chosen, parse)
    free_bytes = memory.available_bytes - memory.promised_bytes
    share_bytes = free_bytes * DEFAULT_AVAILABLE_PERCENT // 100
    left_bytes = _left(free_bytes, region_bytes, reserved_bytes)
    available = format_bytes(free_bytes)
    if memory.promised_bytes:
        available += f" that other pools leave of {format_bytes(memory.available_bytes)}"
    if share_bytes <= left_bytes:
        origin = f"default: {DEFAULT_AVAILABLE_PERCENT} % of the {available} available"
        return parsed(Setting(f"{share_bytes}B", origin), parse)
    return parsed(Setting(f"{left_bytes}B", f"default: the {available} available less the reserve"), parse)


def _left(room_bytes: int, region_bytes: int, reserved_bytes: int) -> int:
    if reserved_bytes and room_bytes - reserved_bytes < region_bytes:
        raise ConfigError(
            f"the reserve of {format_bytes(reserved_bytes)} leaves less than one region of {format_bytes(room_bytes)}: "
            "give --budget as a size, give a smaller --reserve, or end processes that hold memory"
        )
    return room_bytes - reserved_bytes


def _most(
    chosen: Setting[str], budget: Setting[int], region_bytes: int, memory: DeviceMemory, reserved_bytes: int
) -> Setting[int]:
    """Return what the budget may be raised to, in whole regions.

    On the host that costs address space and a table only; a device takes it at once.
    """
    if not chosen.value:
        free_of_cost_bytes = min(memory.total_bytes, DEFAULT_MOST_REGIONS * region_bytes)
        most_bytes = budget.value if memory.is_taken_at_once else max(budget.value, free_of_cost_bytes)
        return Setting(most_bytes // region_bytes * region_bytes, chosen.origin)
    most = _budget(chosen, region_bytes, memory, reserved_bytes)
    if most.value < budget.value:
        raise ConfigError(
            f"{most.origin}: {format_bytes(most.value)} is below the budget of {format_bytes(budget.value)}: "
            "give at least the budget"
        )
    return most


# -- what a job is called --------------------------------------------------------------------------

_KERNEL = "ipykernel_launcher"
"""The script of every notebook's process."""
_SESSION_VARIABLE = "JPY_SESSION_NAME"
"""Jupyter's server, from 2.0 on, tells a kernel its notebook's path in this variable."""
_VSCODE_NAME = "__vsc_ipynb_file__"
"""Visual Studio Code tells the same by this one of a notebook's own variables."""
_NO_SCRIPT = ("-c", "-m")


def job_name(environ: Mapping[str, str], script: str) -> str:
    """Return the name of a job's process: the given one, else its notebook's or its script's."""
    if environ.get(JOB_VARIABLE):
        return environ[JOB_VARIABLE]
    if PurePath(script).stem == _KERNEL:
        # The server of Visual Studio Code has sessions with paths of its own.
        script = _vscode_notebook() or environ.get(_SESSION_VARIABLE) or "notebook"
    return "job" if script in _NO_SCRIPT else fitting_name(PurePath(script).stem)


def _vscode_notebook() -> str:
    """Return the path of the notebook that runs in this process, if Visual Studio Code has told it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    path = getattr(shell, "user_ns", {}).get(_VSCODE_NAME)
    return path if isinstance(path, str) else ""
