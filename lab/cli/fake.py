"""``zico trace --fake SCRIPT:function``: the trace of a PyTorch training step without the hardware.

SCRIPT is loaded as a module would be, with its folder importable. ``function`` takes no argument;
it builds model and optimizer and returns what does one training step::

    def build():
        model = torch.nn.Linear(1000, 1000, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad()
            model(torch.randn(64, 1000, device="cuda")).sum().backward()
            optimizer.step()

        return step

A function that returns nothing is the step itself; then SCRIPT has built the rest when it was
loaded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from zico.base.errors import ConfigError, TraceError
from zico.base.units import format_bytes
from zico.lab.simulator.roofline import device_model
from zico.planning.packing.from_trace import iteration_problem
from zico.trace.events import Kind
from zico.trace.files import write_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

    from zico.lab.simulator.roofline import DeviceModel
    from zico.trace.events import Trace

_MODULE = "zico_traced_script"


def run_fake(target: str, output: Path, device: str) -> int:
    """Trace ``target`` on the device model of that name, write the trace and say what it shows; returns 0.

    Raises:
        ConfigError: There is no such device model, script or function, or no PyTorch.
        TraceError: The script fails, or its step allocates nothing. Nothing is written.
    """
    model = device_model(device)
    trace = fake(target, model)
    write_trace(output, trace)
    found = iteration_problem(trace)
    seconds = float(found.iteration.tick_ns[-1]) / 1e9
    peak, memory = format_bytes(found.problem.peak_live_bytes), format_bytes(model.memory_bytes)
    click.echo(
        f"{trace.origin.job} on {model.title}: {peak} of {memory} at the peak of an iteration, "
        f"which takes at least {seconds:.3g} s; {output}"
    )
    return 0


REMEDY = "check that it trains without --fake, or record it with -- CMD"


def fake(
    target: str,
    model: DeviceModel,
    arguments: Mapping[str, int] | None = None,
    remedy: str = REMEDY,
    **how: Any,  # noqa: ANN401 - of fake_trace
) -> Trace:
    """Return the trace of ``SCRIPT:function``.

    Args:
        target: The script and its function.
        model: The device.
        arguments: What the function is called with.
        remedy: What the message says of a script that fails.
        how: Further arguments of ``fake_trace``.

    Raises:
        ConfigError, TraceError: As ``run_fake``; the function does not take these arguments.
    """
    path, function = named(target)
    try:
        from_torch = importlib.import_module("zico.lab.frameworks.torch_fake")
    except ImportError as error:
        raise ConfigError(f"--fake needs PyTorch ({error}): pip install 'zico-memory[torch]'") from error
    job = f"{path.name}:{function}"
    with told_of(path, remedy):
        trace: Trace = from_torch.fake_trace(lambda: _build(path, function, arguments or {}), model, job=job, **how)
    allocates = trace.events["kind"] == Kind.ALLOC
    if not allocates[np.argmax(trace.events["kind"] == Kind.BEGIN) :].any():
        what = f"the step of {function!r} allocates nothing: return the function that trains"
        raise TraceError(str(path), 0, what)
    return trace


def named(target: str) -> tuple[Path, str]:
    """Return script and function of ``SCRIPT:function``.

    Raises:
        ConfigError: There is no such script.
    """
    script, _, function = target.rpartition(":")
    path = Path(script)
    if not script or not function.isidentifier() or not path.is_file():
        raise ConfigError(f"{target!r} does not name a function: give SCRIPT:function, where SCRIPT is a Python file")
    return path, function


@contextlib.contextmanager
def told_of(path: Path, remedy: str) -> Iterator[None]:
    """Say which line of a script raised.

    Raises:
        TraceError: The script raised, whatever it was.
    """
    try:
        yield
    except (ConfigError, TraceError):
        raise
    except (Exception, SystemExit) as error:  # whatever a script raises
        said = str(error).partition("\n")[0]
        raise TraceError(str(path), _line(error, path), f"{type(error).__name__}: {said}: {remedy}") from error


def _line(error: BaseException, path: Path) -> int:
    """Return where in the script it happened, 0 if nowhere."""
    if isinstance(error, SyntaxError):
        return error.lineno or 0
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 0 for f in reversed(frames) if Path(f.filename).resolve() == path.resolve()), 0)


def _build(path: Path, function: str, arguments: Mapping[str, int]) -> Callable[[], object]:
    build = defined(path, function, "a training step")
    if arguments:
        try:
            inspect.signature(build).bind(**arguments)
        except TypeError as error:
            raise ConfigError(f"{function!r} of {path} {_given(arguments)} ({error})") from None
        build = functools.partial(build, **arguments)
    step = build()
    if step is None:
        return build
    if not callable(step):
        raise ConfigError(f"{function!r} of {path} returned {step!r:.60}: return a function that trains a step")
    return step


def _given(arguments: Mapping[str, int]) -> str:
    named = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return f"cannot be called with {named}: give it these parameters, and defaults for others"


def defined(path: Path, function: str, returned: str) -> Callable[[], Any]:
    """Load a script and return its function.

    Args:
        path: The script.
        function: The name.
        returned: What it should return, for the message.

    Raises:
        ConfigError: The script defines none of that name.
    """
    build = getattr(_load(path), function, None)
    if not callable(build):
        raise ConfigError(f"{path} has no function {function!r}: define one that returns {returned}")
    found: Callable[[], Any] = build
    return found


def _load(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.resolve().parent))  # as Python does for a script
    try:
        spec = importlib.util.spec_from_file_location(_MODULE, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{path} is not a Python file: give one that ends in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[_MODULE] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module
