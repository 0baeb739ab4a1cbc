"""Read the data of a pickle without being able to run what is in it.

A pickle is a program for a stack machine. This machine has the operations that build numbers, strings, lists, tuples
and dictionaries, and no other: none that looks up a name, imports, or calls. PyTorch's memory viewer, in a browser,
reads the same subset. It costs memory in proportion to the file, and never recurses.
"""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_CONTAINERS = 1 << 25
"""Empty ones cost a byte in the file and 64 in memory."""
_BAD = (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error)


class UnpickleError(Exception):
    """Say which byte of a pickle cannot be followed, and why."""


def unpickle(data: bytes) -> Any:  # noqa: ANN401 - whatever the pickle holds
    """Return the numbers, strings, lists, tuples and dictionaries in a pickle of protocol 2 to 5.

    Raises:
        UnpickleError: It is damaged, too large, or wants anything else, such as to run code. Nothing was run.
    """
    machine = _Machine(data)
    try:
        machine.run()
        return machine.stack[-1]
    except _BAD as error:
        raise UnpickleError(f"byte {machine.at}: {type(error).__name__}, the pickle is damaged") from None


class _Machine:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.n_containers = 0

    def run(self) -> None:
        data, stop = self.data, pickle.STOP[0]
        while True:
            code = data[self.at]
            self.at += 1
            if code == stop:
                return
            step = _STEPS[code]
            if step is None:
                raise UnpickleError(
                    f"byte {self.at - 1}: operation {bytes([code])!r} is refused, since it runs code or builds what no "
                    "memory snapshot holds"
                )
            step(self)

    def take(self, layout: struct.Struct) -> int:
        (value,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return value

    def take_bytes(self, length: int) -> bytes:
        self.at += length
        return self.data[self.at - length : self.at]  # beyond the end there is no next operation

    def contain(self, value: Any) -> None:  # noqa: ANN401 - any container
        self.n_containers += 1
        if self.n_containers > MAX_CONTAINERS:
            raise UnpickleError(f"byte {self.at}: more than {MAX_CONTAINERS} lists and dictionaries")
        self.stack.append(value)

    def to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def last(self, kind: type) -> Any:  # noqa: ANN401 - of that kind
        value = self.stack[-1]
        if type(value) is not kind:
            raise TypeError
        return value


_U1, _U2, _U4, _U8 = (struct.Struct(f"<{letter}") for letter in "BHIQ")
_I4 = struct.Struct("<i")
_F8 = struct.Struct(">d")


def _mark(machine: _Machine) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def _number(layout: struct.Struct) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.take(layout))


def _long(machine: _Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take_bytes(machine.take(_U1)), "little", signed=True))


def _text(length: struct.Struct) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.take_bytes(machine.take(length)).decode(errors="replace"))


def _constant(value: object) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _tuple(length: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        items = [machine.stack.pop() for _ in range(length)]
        machine.contain(tuple(reversed(items)))

    return step


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    machine.last(list).append(value)


def _appends(machine: _Machine) -> None:
    values = machine.to_mark()
    machine.last(list).extend(values)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.last(dict)[key] = value


def _set_items(machine: _Machine) -> None:
    items = machine.to_mark()
    machine.last(dict).update(zip(items[::2], items[1::2], strict=True))


def _put(index: struct.Struct) -> Callable[[_Machine], None]:
    return lambda machine: machine.memo.__setitem__(machine.take(index), machine.stack[-1])


def _get(index: struct.Struct) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.memo[machine.take(index)])


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


_STEPS: list[Callable[[_Machine], None] | None] = [None] * 256
for _code, _step in {
    pickle.PROTO: lambda machine: machine.take(_U1),  # what a newer one adds is refused where it stands
    pickle.FRAME: lambda machine: machine.take(_U8),  # only how the writer cut its output
    pickle.MARK: _mark,
    pickle.NONE: _constant(None),
    pickle.NEWTRUE: _constant(value=True),
    pickle.NEWFALSE: _constant(value=False),
    pickle.BININT: _number(_I4),
    pickle.BININT1: _number(_U1),
    pickle.BININT2: _number(_U2),
    pickle.BINFLOAT: _number(_F8),
    pickle.LONG1: _long,
    pickle.SHORT_BINUNICODE: _text(_U1),
    pickle.BINUNICODE: _text(_U4),
    pickle.BINUNICODE8: _text(_U8),
    pickle.EMPTY_LIST: lambda machine: machine.contain([]),
    pickle.EMPTY_DICT: lambda machine: machine.contain({}),
    pickle.EMPTY_TUPLE: _tuple(0),
    pickle.TUPLE1: _tuple(1),
    pickle.TUPLE2: _tuple(2),
    pickle.TUPLE3: _tuple(3),
    pickle.TUPLE: lambda machine: machine.contain(tuple(machine.to_mark())),
    pickle.APPEND: _append,
    pickle.APPENDS: _appends,
    pickle.SETITEM: _set_item,
    pickle.SETITEMS: _set_items,
    pickle.BINPUT: _put(_U1),
    pickle.LONG_BINPUT: _put(_U4),
    pickle.MEMOIZE: _memoize,
    pickle.BINGET: _get(_U1),
    pickle.LONG_BINGET: _get(_U4),
}.items():
    _STEPS[_code[0]] = _step
