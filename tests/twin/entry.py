"""How a function of the twin is entered: what every driver call checks before it does anything."""

from __future__ import annotations

import collections
import functools
import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from cuda.bindings import driver  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function", bound="Callable[..., Any]")
Status = Any  # a CUresult
Value = Any  # what the driver takes or gives: a number, or a type of cuda.bindings

real: Any = driver
"""``cuda.bindings.driver``: its types and enumerations work without a GPU."""
LOCKED_S = 60.0
"""A call that waits so long for a locked process is a defect of a test."""
SUCCESS = real.CUresult.CUDA_SUCCESS


class Refused(Exception):  # noqa: N818 - a status on its way out, not an error of Python's
    """Leave a function with a status."""

    def __init__(self, name: str) -> None:
        """Keep the status that ``CUDA_ERROR_`` and ``name`` make."""
        super().__init__(name)
        self.status: Status = getattr(real.CUresult, f"CUDA_ERROR_{name}")


def refuse_unless(holds: object, name: str = "INVALID_VALUE") -> None:
    """Leave the function with a status unless something holds."""
    if not holds:
        raise Refused(name)


def number(value: Value) -> int:
    """Return the value of a handle or pointer, however it was passed."""
    return 0 if value is None else int(value)


def entry(*, context: bool = False, virtual: bool = False, undo: bool = False) -> Callable[[Function], Function]:
    """Make a method a function of the driver.

    Args:
        context: It needs a current context.
        virtual: It is a virtual memory function: needs a context where the twin is told so.
        undo: It gives something back: such calls are not counted and never made to fail.
    """

    def decorate(function: Function) -> Function:
        has_output = function.__annotations__["return"] != "None"

        @functools.wraps(function)
        def checked(self: Core, *args: Any) -> tuple[Any, ...]:  # noqa: ANN401 - as the driver's function
            name = function.__name__
            try:
                if not name.startswith("cuCheckpoint"):
                    refuse_unless(self.is_unlocked.wait(LOCKED_S), "NOT_READY")
                with self.lock:
                    self.enter(name, needs_context=context or (virtual and self.wants_context(name)), undo=undo)
                result = function(self, *args)
            except Refused as refused:
                return (refused.status, None) if has_output else (refused.status,)
            if result is None:
                return (SUCCESS,)
            return (SUCCESS, *result) if isinstance(result, tuple) else (SUCCESS, result)

        return checked  # type: ignore[return-value]

    return decorate


class Core:
    """What all parts of the twin share: its lock, its faults, who is initialised and which contexts are there."""

    def __init__(self) -> None:
        """Start as a process that has not called the driver yet."""
        self.lock = threading.RLock()
        self.needs_context: bool | tuple[str, ...] = False
        self.calls = 0
        """Calls made so far, without those that give something back or set a context."""
        self.counts: collections.Counter[str] = collections.Counter()
        """All calls made so far, by name."""
        self.fail_at = 0
        """Which call is to fail, from 1; 0: none."""
        self.fail_with = "UNKNOWN"
        self._failing: dict[str, str] = {}
        self.is_unlocked = threading.Event()
        """Calls wait for it while the process's contexts are put aside."""
        self.is_unlocked.set()
        self._process = 0
        self._contexts: dict[int, int] = {}  # context -> device
        self._current: dict[int, int] = {}  # native thread -> context
        self._poison: dict[int, str] = {}  # context -> status that every call returns from now on

    def fail_next(self, function: str, status: str = "UNKNOWN") -> None:
        """Let the next call of one function fail, also of one that gives something back."""
        self._failing[function] = status

    def enter(self, function: str, *, needs_context: bool, undo: bool) -> None:
        """Check what every function checks, and fail it if it is its turn.

        Raises:
            Refused: It does not get further.
        """
        if function == "cuInit":
            self._process = os.getpid()
        elif self._process != os.getpid():  # after a fork, too
            raise Refused("NOT_INITIALIZED")
        if status := self._failing.pop(function, None):
            raise Refused(status)
        self.calls += not undo
        self.counts[function] += 1
        if not undo and self.calls == self.fail_at:
            raise Refused(self.fail_with)
        context = self.current_context()
        if needs_context:
            refuse_unless(context, "INVALID_CONTEXT")
            refuse_unless(context in self._contexts, "CONTEXT_IS_DESTROYED")
        if context in self._poison and not undo and not function.startswith("cuCtx"):
            raise Refused(self._poison[context])

    def wants_context(self, function: str) -> bool:
        """Tell whether a virtual memory function needs a context on this twin."""
        return self.needs_context if isinstance(self.needs_context, bool) else function in self.needs_context

    def current_context(self) -> int:
        """Return the context that is current in this thread, or 0; threads that Python did not start count, too."""
        return self._current.get(threading.get_native_id(), 0)

    def poison(self, context: int, name: str) -> None:
        """Lose a context: every later call in it returns this status, as after a fault on the device."""
        with self.lock:
            self._poison.setdefault(context, name)
