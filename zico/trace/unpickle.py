"""Read the data of a pickle without being able to run what is in it.

A pickle is a program for a stack machine. ``pickletools`` takes it apart, and this machine has the operations that
build numbers, strings, lists, tuples and dictionaries, and no other: none that looks up a name, imports, or calls.
PyTorch's memory viewer, in a browser, reads the same subset. It costs memory in proportion to the file, and never
recurses.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

MAX_CONTAINERS = 1 << 25
"""Empty ones cost a byte in the file and 64 in memory."""
_BAD = (IndexError, KeyError, TypeError, ValueError, AttributeError)


class UnpickleError(Exception):
    """Say which byte of a pickle cannot be followed, and why."""


def unpickle(data: bytes) -> Any:  # noqa: ANN401 - whatever the pickle holds
    """Return the numbers, strings, lists, tuples and dictionaries in a pickle of protocol 2 to 5.

    Raises:
        UnpickleError: It is damaged, too large, or wants anything else, such as to run code. Nothing was run.
    """
    machine = _Machine()
    try:
        for operation, argument, at in pickletools.genops(data):
            machine.at = at or 0
            step = _STEPS.get(operation.name)
            if step is None:
                raise UnpickleError(
                    f"byte {at}: operation {operation.name} is refused, since it runs code or builds what no memory "
                    "snapshot holds"
                )
            step(machine, argument)
        return machine.stack[-1]
    except _BAD as error:
        raise UnpickleError(f"byte {machine.at}: {type(error).__name__}, the pickle is damaged") from None


class _Machine:
    def __init__(self) -> None:
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.n_containers = 0

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


_Step = Callable[[_Machine, Any], object]


def _nothing(_machine: _Machine, _argument: object) -> None:
    """Do nothing: what a newer protocol adds is refused where it stands, and frames only cut the output."""


def _mark(machine: _Machine, _argument: None) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def _value(machine: _Machine, value: object) -> None:
    machine.stack.append(value)


def _text(machine: _Machine, text: str) -> None:
    machine.stack.append(text.encode(errors="surrogatepass").decode(errors="replace"))


def _constant(value: object) -> _Step:
    return lambda machine, _: machine.stack.append(value)


def _tuple(length: int) -> _Step:
    def step(machine: _Machine, _argument: None) -> None:
        items = [machine.stack.pop() for _ in range(length)]
        machine.contain(tuple(reversed(items)))

    return step


def _append(machine: _Machine, _argument: None) -> None:
    value = machine.stack.pop()
    machine.last(list).append(value)


def _appends(machine: _Machine, _argument: None) -> None:
    values = machine.to_mark()
    machine.last(list).extend(values)


def _set_item(machine: _Machine, _argument: None) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.last(dict)[key] = value


def _set_items(machine: _Machine, _argument: None) -> None:
    items = machine.to_mark()
    machine.last(dict).update(zip(items[::2], items[1::2], strict=True))


def _put(machine: _Machine, index: int) -> None:
    machine.memo[index] = machine.stack[-1]


def _get(machine: _Machine, index: int) -> None:
    machine.stack.append(machine.memo[index])


_STEPS: dict[str, _Step] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _nothing),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1"), _value),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _text),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _get),
    "MEMOIZE": lambda machine, _: _put(machine, len(machine.memo)),
    "MARK": _mark,
    "NONE": _constant(None),
    "NEWTRUE": _constant(value=True),
    "NEWFALSE": _constant(value=False),
    "EMPTY_LIST": lambda machine, _: machine.contain([]),
    "EMPTY_DICT": lambda machine, _: machine.contain({}),
    "EMPTY_TUPLE": _tuple(0),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "TUPLE": lambda machine, _: machine.contain(tuple(machine.to_mark())),
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
}
