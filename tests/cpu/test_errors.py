"""The error tree."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

from zico.base import errors
from zico.base.errors import CommandError, DriverError, OutOfMemory, TraceError, ZicoError
from zico.base.units import MIB

ARGUMENTS: dict[type[ZicoError], tuple[Any, ...]] = {
    OutOfMemory: (3 * MIB, 2 * MIB, 4 * MIB),
    DriverError: ("mapping", 12, "out of maps"),
    CommandError: ("no such thing", 3),
    TraceError: ("a.trace", 7, "is not a trace"),
}


def _tree(kind: type[ZicoError]) -> list[type[ZicoError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _tree(child))]


ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_survives_pickle(kind: type[ZicoError]) -> None:
    """A pickled error comes back as the same type with the same attributes and message."""
    error = kind(*ARGUMENTS.get(kind, ("what went wrong",)))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - made on the line above
        assert type(again) is kind
        assert vars(again) == vars(error)
        assert (str(again), again.args) == (str(error), error.args)


def test_every_error_of_the_module_derives_from_one_base() -> None:
    """Whoever catches ``ZicoError`` catches every error that Zico raises on purpose."""
    assert set(ALL) <= set(_tree(ZicoError))


def test_out_of_memory_names_the_need_the_budget_and_the_remedy() -> None:
    """The message has request, holding, budget and a budget that would do."""
    elsewhere = str(OutOfMemory(1 * MIB, 2 * MIB, 4 * MIB))
    assert "other jobs keep it" in elsewhere
    assert "ZICO_SPILL_DIR" in elsewhere
    limited = str(OutOfMemory(1 * MIB, 2 * MIB, 4 * MIB, 2 * MIB))
    assert "its limit is 2 MiB: raise --limit to at least 3 MiB" in limited
    text = str(OutOfMemory(3 * MIB, 2 * MIB, 4 * MIB))
    for part in ("3 MiB more", "2 MiB", "4 MiB", "--budget to at least 5 MiB"):
        assert part in text


def test_a_driver_error_names_operation_and_status() -> None:
    """The message has the operation, the status, and the detail if there is one."""
    assert str(DriverError("mapping", 12, "no maps left")) == "mapping failed with status 12: no maps left"
    assert str(DriverError("mapping", 12)) == "mapping failed with status 12"


def test_a_command_error_prints_its_message_alone() -> None:
    """The exit code is data, not text; it is 2 unless said."""
    error = CommandError("no such thing")
    assert (str(error), error.exit_code) == ("no such thing", 2)
