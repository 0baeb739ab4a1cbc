"""Records that compiled code reads by attribute: classes whose annotated fields are their layout in memory.

A layout module declares a class, and ``dtype_of`` makes the NumPy dtype of it, field by field in
that order::

    class Slot(Record):
        live: I4
        region: I4


    SLOT = dtype_of(Slot)

No object of such a class ever exists. The class is what mypy takes a record for, so that it finds a
misspelt field in compiled code. Python sees the same memory as ``np.void`` and subscripts it by
name, which mypy does not check.
"""

from __future__ import annotations

import ctypes
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterator

I2 = Annotated[int, "i2"]
I4 = Annotated[int, "i4"]
I8 = Annotated[int, "i8"]
U1 = Annotated[int, "u1"]
U8 = Annotated[Any, "u8"]
"""Compiled code computes with it as ``np.uint64``, which mypy does not take for an ``int``."""
F8 = Annotated[float, "f8"]

Numbers = NDArray[Any]
"""A field of several numbers: ``Annotated[Numbers, "i4", (BINS,)]``."""


class Record:
    """What has fields. Those of a class with ``align=False`` follow each other without gaps."""

    _aligned = True

    def __init_subclass__(cls, *, align: bool = True) -> None:
        """Note whether the fields lie as a C compiler would put them."""
        cls._aligned = align

    if TYPE_CHECKING:

        def __getitem__(self, name: str, /) -> Any: ...  # noqa: ANN401 - any field
        def __setitem__(self, name: str, value: Any, /) -> None: ...  # noqa: ANN401 - any field


R = TypeVar("R", bound=Record)
R_co = TypeVar("R_co", bound=Record, covariant=True)


if TYPE_CHECKING:

    class Layout(Generic[R_co]):
        """The dtype of a record, to mypy: one that remembers whose it is. NumPy's functions take it for a dtype."""

        dtype: np.dtype[np.void]
        itemsize: int
        names: tuple[str, ...]
        fields: dict[str, tuple[np.dtype[Any], int]]


class Records(Protocol[R]):
    """An array of records of one class: ``Annotated[Records[Way], Way, (MOST_WAYS,)]`` as a field."""

    @overload
    def __getitem__(self, key: int, /) -> R: ...
    @overload
    def __getitem__(self, key: slice, /) -> Records[R]: ...
    @overload
    def __getitem__(self, key: str, /) -> Numbers: ...

    def __setitem__(self, key: int, value: R, /) -> None:
        """Copy a record into the array."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __iter__(self) -> Iterator[R]:
        """Look at one after the other."""


def dtype_of(record: type[R]) -> Layout[R]:
    """Return the dtype whose fields are the annotated ones of a class."""
    fields = [_field(record, name, hint) for name, hint in get_type_hints(record, include_extras=True).items()]
    return np.dtype(fields, align=record._aligned)  # type: ignore[return-value] # noqa: SLF001


def _field(record: type[Record], name: str, hint: Any) -> tuple[Any, ...]:  # noqa: ANN401 - any annotation
    """Return a field as NumPy wants it: name, type and, where it has several, how many."""
    kind, *shape = get_args(hint)[1:] if get_origin(hint) is Annotated else [hint]
    if isinstance(kind, type) and issubclass(kind, Record):
        kind = dtype_of(kind)
    elif not isinstance(kind, str):
        raise TypeError(
            f"{record.__name__}.{name} is {hint!r}: a field is a record, or Annotated with a type of NumPy."
        )
    return (name, kind, *shape)


def view_at(address: int, dtype: np.dtype[Any] | Layout[Any], count: int) -> Any:  # noqa: ANN401 - records by field name
    """View records at an address as an array, which is valid as long as the memory is there."""
    buffer: Any = (ctypes.c_char * (dtype.itemsize * count)).from_address(address)
    return np.frombuffer(buffer, dtype, count)


def word_of(record: Any, *path: str) -> memoryview[int]:  # noqa: ANN401 - records by field name
    """Return a number of a record, as a view of one element: ``word[0]``. The record's memory must never go.

    Between two operations of a framework little of Python's code is in a processor's cache. So a
    record that is subscripted takes ten microseconds; this takes less than one.
    """
    address, dtype = int(record.__array_interface__["data"][0]), record.dtype
    for name in path:
        dtype, offset = dtype.fields[name][:2]
        address += offset
    view = memoryview((ctypes.c_char * dtype.itemsize).from_address(address)).cast("B")
    return view.cast(_FORMATS[dtype.str.lstrip("<=")])


_FORMATS: dict[str, Literal["q", "i"]] = {"i8": "q", "i4": "i"}
