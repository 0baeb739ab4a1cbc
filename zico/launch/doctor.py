"""Find out whether Zico would be active, by trying it: a small run of the real path per framework.

Reading versions alone would not tell: an allocator that cannot be redirected shows only when it is.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from zico import __version__
from zico.base.errors import DriverError, ZicoError
from zico.base.mps import CONTROL, daemon_at
from zico.base.paths import cache_refusal
from zico.base.rundir import base_directory
from zico.base.settings import HOST, PLAN_VARIABLE, PROFILES_VARIABLE, kind_of
from zico.base.units import format_bytes
from zico.broker.devices import devices_here, has_usable_driver
from zico.broker.outside import use_now
from zico.launch.figures import run_report
from zico.launch.jobs import Command, Listener, job_environment
from zico.launch.outsiders import PYTHON, blocking_flag
from zico.launch.pools import Target
from zico.launch.supervisor import supervise

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zico.base.settings import Settings
    from zico.broker.devices import DeviceFacts
    from zico.broker.outside import DeviceUse
    from zico.launch.jobs import Stream
    from zico.report.model import JobFigures


# --------------------------------------------------------------------------------------------------
# What ``zico doctor`` finds out about the GPUs, and about settings that change what Zico does.

_ABSENT = frozenset((36, 100))  # as zico.device.cuda says that there is no driver library, or no device
_REGION_HINT = "--region must be a power-of-two multiple of it"
_WAITS = {
    True: "by 64-bit stream memory operations",
    False: "by a kernel, because the device has no 64-bit stream memory operations (slower, but correct)",
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that Zico needs from the machine or the interpreter."""

    name: str
    passed: bool | None
    """``None``: nobody has looked; the detail says what to expect."""
    detail: str


def switch_checks(environ: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Yield what ``ZICO_PLAN`` and ``ZICO_PROFILES`` do, where they are set."""
    switches = {PLAN_VARIABLE: "heaps follow no plan", PROFILES_VARIABLE: "jobs remember no earlier run"}
    for variable, means in switches.items():
        value = environ.get(variable)
        if value == "off":
            yield Check(variable, passed=True, detail=f"off: {means}; unset it to let them")
        elif value:
            yield Check(variable, passed=False, detail=f"{value!r} has no effect: give off, or unset it")


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


_GAIN = "zico fit --measure --mps says what jobs gain by it"


def _mps_check(environ: Mapping[str, str]) -> Check:
    daemon = daemon_at(environ)
    if daemon is not None:
        return Check("MPS", passed=True, detail=f"a daemon runs at {daemon}: jobs' kernels overlap")
    if shutil.which(CONTROL, path=environ.get("PATH")):
        return Check("MPS", passed=True, detail=f"no daemon runs: jobs time-slice; --mps starts one for a run; {_GAIN}")
    return Check("MPS", passed=True, detail=f"{CONTROL} is not on PATH: jobs time-slice, and --mps does not work")


# --------------------------------------------------------------------------------------------------

SCHEMA = "zico.doctor.v1"
TRY_S = 180
"""A framework that takes longer than this to be imported and tried counts as not working."""
START_S = 30.0
ACTIVE_FROM_FRACTION = 0.95
_TRY = """
import importlib, os, signal, sys
signal.alarm({limit})
os.environ.update({environ!r})
import {module} as framework
where = {where!r}
tensors = {tensors}
adapter = importlib.import_module("zico.adapters.{adapter}")
print("TESTED", getattr(adapter, "TESTED_VERSION", ""))
"""


JOB_PACKAGES = ("msgspec", "numba", "numpy", "platformdirs")
"""Packages beside its framework that a job imports; its environment may be another one than that of ``zico run``."""
_LACKS = """
import importlib.util, zico
lacking = [name for name in {packages} if importlib.util.find_spec(name) is None]
print(getattr(zico, "__version__", ""), " and ".join(lacking))
"""
_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
"""A trial on the host device has these, since frameworks that find a GPU put their tensors there."""
_XLA = "arrays and programs' workspaces are in the pool; what cuBLAS, cuDNN and NCCL allocate is outside the budget"
_NO_MARKS = "zico.step() marks iterations, else Zico looks for the period of allocations"


@dataclasses.dataclass(frozen=True)
class Framework:
    """A framework that Zico has an adapter for, and how to try it."""

    module: str
    distributions: tuple[str, ...]
    adapter: str
    tensors: str
    """An expression that makes some tensors of a MiB each; ``where`` is ``cpu`` or ``cuda``."""
    gpu_only: bool = False
    """Whether it has tensors on a GPU only: then it is tried only there."""
    on_gpu: str = ""
    """What of its memory on a GPU is the pool's, and what is not."""


FRAMEWORKS = (
    Framework("torch", ("torch",), "torch", "[framework.ones(1 << 18, device=where) for _ in range(16)]"),
    Framework(
        "tensorflow",
        ("tensorflow", "tensorflow-cpu"),
        "tensorflow",
        "[framework.random.uniform([1 << 18]) for _ in range(16)]",
        on_gpu=f"{_XLA}; Zico sets TF_GPU_ALLOCATOR=cuda_malloc_async",
    ),
    Framework(
        "keras",
        ("keras",),
        "keras",
        "[framework.random.uniform((1 << 18,)) for _ in range(16)]",
    ),
    Framework(
        "jax",
        ("jax",),
        "jax",
        "[framework.numpy.ones(1 << 18) for _ in range(16)]",
        on_gpu=f"{_XLA}; Zico sets XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async; {_NO_MARKS}",
    ),
    Framework(
        "cupy",
        ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "cupy",
        "[framework.ones(1 << 18, 'f4') for _ in range(16)]",
        gpu_only=True,
        on_gpu="arrays are in the pool; managed and pinned memory and allocators that the program chooses are outside "
        f"the budget; CUDA graphs are refused; {_NO_MARKS}",
    ),
    Framework(
        "numba.cuda",
        ("numba",),
        "numba",
        "[framework.device_array(1 << 18, 'f4') for _ in range(16)]",
        gpu_only=True,
        on_gpu="arrays are in the pool, and making and freeing one waits for the device; managed, mapped and "
        f"pinned memory is outside the budget; handles for other processes are refused; {_NO_MARKS}",
    ),
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a framework, or the user's own command, did when it was tried."""

    name: str
    active: bool
    version: str
    tested_version: str
    """The versions that the adapter is tested with, as ``"2.11, 2.13"``."""
    pool_fraction: float
    reason: str
    """Why it is not active; empty if it is."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Everything found."""

    active: bool
    checks: tuple[Check, ...]
    frameworks: tuple[Finding, ...]
    schema_version: str = SCHEMA


class _Collector(Listener):
    """Only keeps what is said."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}

    def output(self, name: str, stream: Stream, lines: list[bytes]) -> None:
        del stream  # both are searched
        self.lines.setdefault(name, []).extend(line.decode(errors="replace") for line in lines)

    def problem(self, text: str) -> None:
        self.lines.setdefault("", []).append(text)


def diagnose(settings: Settings, argv: Sequence[str] = ()) -> Diagnosis:
    """Return whether Zico would be active for the frameworks that are installed, or for the command ``argv``.

    Starts a broker and one process per framework, or the command itself, and waits for their ends.
    """
    checks = tuple(_checks(settings, argv))
    cuda = tuple(cuda_checks())
    commands: tuple[Command, ...]
    if argv:
        commands = (Command("command", tuple(argv), " ".join(argv)),)
        versions = {"command": ""}
    else:
        versions = dict(installed_versions())
        device = settings.device.value
        commands = tuple(trial(framework, device) for framework in to_try(versions, device))
        cuda += tuple(gpu_rows(versions, device))
    findings = tuple(_try_all(commands, versions, settings)) if commands else ()
    needed = checks if kind_of(settings.device.value) == HOST else (*checks, *cuda)
    healthy = all(check.passed is not False for check in needed)
    active = healthy and bool(findings) and all(finding.active for finding in findings)
    return Diagnosis(active, (*checks, *cuda), findings)


def to_try(versions: Mapping[str, str], device: str) -> Iterator[Framework]:
    """Yield the installed frameworks that have tensors on a device."""
    for framework in FRAMEWORKS:
        if framework.module in versions and not (framework.gpu_only and kind_of(device) == HOST):
            yield framework


def gpu_rows(versions: Mapping[str, str], device: str) -> Iterator[Check]:
    """Yield what Zico does for installed frameworks on a GPU, also where they are tried on another device."""
    tried = "not tried, since the device is the host; on a GPU, " if kind_of(device) == HOST else ""
    for framework in FRAMEWORKS:
        if framework.on_gpu and framework.module in versions:
            detail = f"{versions[framework.module]}: {tried}{framework.on_gpu}"
            yield Check(f"{framework.module} on a GPU", passed=None, detail=detail)


def installed_versions() -> Iterator[tuple[str, str]]:
    """Yield (module, version) of each framework that is installed, without importing it."""
    for framework in FRAMEWORKS:
        for distribution in framework.distributions:
            try:
                yield framework.module, importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
            break


def _checks(settings: Settings, argv: Sequence[str]) -> Iterator[Check]:
    yield _check_flags(argv)
    injection = _check_injection(argv)
    yield injection
    if injection.passed:
        yield _check_packages(_interpreter_of(argv))
    yield _check_device()
    yield _check_cache()
    yield _check_sockets()
    if argv:
        yield _sharing(argv)
    regions = settings.budget_bytes.value // settings.region_bytes.value
    yield Check("budget", regions > 1, f"{regions} regions of {settings.region_bytes.value} bytes")
    yield from switch_checks()


def _check_flags(argv: Sequence[str]) -> Check:
    flag = blocking_flag(argv)
    if flag is None:
        return Check("interpreter flags", passed=True, detail="no flag disables Zico")
    if not _why_unwatched(argv[0], flag):
        return Check("interpreter flags", passed=True, detail=f"python {flag} finds Zico by zico.pth in its packages")
    return Check("interpreter flags", passed=False, detail=f"python {flag} disables Zico: start python without {flag}")


def _check_injection(argv: Sequence[str]) -> Check:
    interpreter = _interpreter_of(argv)
    reason = _why_unwatched(interpreter)
    return Check("injection", passed=not reason, detail=reason or f"{interpreter} watches imports")


def _interpreter_of(argv: Sequence[str]) -> str:
    is_python = bool(argv) and PYTHON.fullmatch(PurePath(argv[0]).name) is not None
    return argv[0] if is_python else sys.executable


def _check_packages(interpreter: str) -> Check:
    """Say whether an interpreter's environment has what a job needs, which may be another one than ours."""
    code = _LACKS.format(packages=JOB_PACKAGES)
    try:
        tried = _started_as_a_job(interpreter, "-c", code)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("packages", passed=False, detail=f"{interpreter} cannot be started: {error}")
    version, _, lacking = tried.stdout.decode(errors="replace").strip().partition(" ")
    install = f"{interpreter} -m pip install zico-memory=={__version__}"
    if lacking:
        return Check("packages", passed=False, detail=f"{interpreter} lacks {lacking}: {install}")
    if version != __version__:
        found = f"Zico {version}" if version else "no Zico that can be imported"
        return Check("packages", passed=False, detail=f"{interpreter} has {found}, this is {__version__}: {install}")
    return Check("packages", passed=True, detail=f"{interpreter} has what a job needs")


def _started_as_a_job(interpreter: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    environ = job_environment(os.environ, Path("/nonexistent"), "doctor")
    return subprocess.run(  # noqa: S603 - the user's own interpreter
        [interpreter, *arguments], env=environ, timeout=START_S, check=False, capture_output=True
    )


def _why_unwatched(interpreter: str, *flags: str) -> str:
    """Start the interpreter as a job's and return why it does not watch imports, empty if it does."""
    code = "import sys; sys.exit(not any(type(f).__module__ == 'zico.job.autoload' for f in sys.meta_path))"
    try:
        tried = _started_as_a_job(interpreter, *flags, "-c", code)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{interpreter} cannot be started: {error}"
    if tried.returncode == 0:
        return ""
    reason = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return reason or f"{interpreter} ignores PYTHONPATH or sitecustomize"


def _sharing(argv: Sequence[str]) -> Check:
    """Say how to find out whether sharing pays; that takes minutes, so it is a command of its own."""
    command = shlex.quote(shlex.join(argv))
    detail = f"whether two such jobs at once do more than one after the other: zico fit --measure {command} {command}"
    return Check("sharing", passed=None, detail=detail)


def _check_device() -> Check:
    try:
        os.close(os.memfd_create("zico-doctor"))
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return Check("host device", passed=False, detail=f"this system has no memfd_create or pidfd_open: {error}")
    return Check("host device", passed=True, detail="memfd and pidfd work")


def _check_cache() -> Check:
    """Look whether compiled code can be kept where it is wanted, without creating anything."""
    directory, fault = cache_refusal()
    return Check("compiled code", passed=not fault, detail=fault or f"kept in {directory}")


def _check_sockets() -> Check:
    try:
        return Check("sockets", passed=True, detail=f"in {base_directory()}")
    except ZicoError as error:
        return Check("sockets", passed=False, detail=str(error))


def trial(framework: Framework, device: str) -> Command:
    """Return a command that makes tensors on the device, and on no other."""
    where, environ = ("cpu", _WITHOUT_GPUS) if kind_of(device) == HOST else ("cuda", {})
    code = _TRY.format(limit=TRY_S, where=where, environ=environ, **dataclasses.asdict(framework))
    return Command(framework.module, (sys.executable, "-P", "-c", code), f"python -c 'import {framework.module} ...'")


def _try_all(commands: Sequence[Command], versions: Mapping[str, str], settings: Settings) -> Iterator[Finding]:
    """Run the commands beside a broker and yield a finding for each."""
    collector = _Collector()
    try:
        report = run_report(supervise(commands, [Target(settings)], collector), [settings])
    except ZicoError as error:
        for command in commands:
            yield _failed(command.name, versions[command.name], str(error))
        return
    for job in report.jobs:
        lines = collector.lines.get(job.name, [])
        tested = next((line.removeprefix("TESTED").strip() for line in lines if line.startswith("TESTED")), "")
        reason = _why_not(job, lines)
        yield Finding(job.name, reason == "", versions[job.name], tested, job.pool_fraction, reason)


def _failed(name: str, version: str, reason: str) -> Finding:
    return Finding(name, active=False, version=version, tested_version="", pool_fraction=0.0, reason=reason)


def _why_not(job: JobFigures, lines: Sequence[str]) -> str:
    """Return why a job that has ended did not use the pool, empty if it did."""
    if not job.framework:
        return job.note if job.exit_code == 0 or not lines else f"{job.note}: {lines[-1]}"
    strangers = [one.text for one in job.outside if one.pid != job.pid]
    if strangers:
        return strangers[0]
    if job.requested_bytes == 0 and job.outside:
        return f"Zico schedules its iterations, but does not share its memory: {job.outside[0].reason}"
    if job.requested_bytes == 0:
        return "it joined, but allocated no tensor over the threshold"
    if job.pool_fraction < ACTIVE_FROM_FRACTION:
        return f"only {job.pool_fraction:.1%} of the tensors' bytes were in the pool"
    return ""
