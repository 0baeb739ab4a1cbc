"""Constants that compiled code reads from memory, so that no value of theirs is compiled.

``read_from_memory`` comes first, when all modules that have the constants are imported and nothing
is compiled. The code is kept apart from Zico's. Two kinds of values are compiled in all the same: a
tuple's length, and what a branch compares a constant with where Numba drops the other branch.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Any

import common
from llvmlite import binding, ir
from numba.core.base import BaseContext

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    Value = float | tuple[float, ...]

_SYMBOL = "zico_changeable"
_LONGEST = 16
"""Numbers that a tuple may have."""
_MEMORY = (ctypes.c_int64 * 64)()
_I64 = ir.IntType(64)
_places: dict[tuple[str, str], int] = {}
"""Where each constant's numbers begin."""


class Whole(int):
    """A number that compiled code reads from memory."""

    at: int


class Fraction(float):
    """The same."""

    at: int


def _number(value: float, at: int) -> Whole | Fraction:
    made: Whole | Fraction
    if isinstance(value, int):
        made = Whole(value)
        ctypes.c_int64.from_buffer(_MEMORY, 8 * at).value = value
    else:
        made = Fraction(value)
        ctypes.c_double.from_buffer(_MEMORY, 8 * at).value = value
    made.at = at
    return made


def change(module: ModuleType, name: str, value: Value) -> None:
    """Give a constant another value, in compiled code and in every module of Zico that has it by its name."""
    at = _places[module.__name__, name]
    before = getattr(module, name)
    if isinstance(value, tuple):
        made: Any = tuple(_number(one, at + k) for k, one in enumerate(value))
    else:
        made = _number(type(before)(value), at)
    for other in [one for known, one in sys.modules.items() if known.startswith("zico.")]:
        if vars(other).get(name) is before:
            setattr(other, name, made)


def read_from_memory(constants: Sequence[tuple[ModuleType, str]], *, cache: str) -> None:
    """Let Numba make of each of these constants what reads it, in code that is kept in a cache of that name."""
    os.environ["ZICO_CACHE_DIR"] = str(common.BUILT / f"changeable-{cache}")
    binding.add_symbol(_SYMBOL, ctypes.addressof(_MEMORY))
    as_before = BaseContext.get_constant_generic

    def lower(context: Any, builder: Any, kind: Any, value: Any) -> Any:  # noqa: ANN401 - Numba's
        if not isinstance(value, Whole | Fraction):
            return as_before(context, builder, kind, value)
        module = builder.module
        known = _SYMBOL in module.globals
        symbol = module.globals[_SYMBOL] if known else ir.GlobalVariable(module, ir.IntType(8), _SYMBOL)
        address = builder.add(builder.ptrtoint(symbol, _I64), _I64(8 * value.at))
        return builder.load(builder.inttoptr(address, context.get_value_type(kind).as_pointer()))

    BaseContext.get_constant_generic = lower
    at = 0
    for module, name in constants:
        value = getattr(module, name)
        _places[module.__name__, name] = at
        at += _LONGEST if isinstance(value, tuple) else 1
        change(module, name, value)
