"""Lines of a trace file: one JSON object each, to and from arrays of events. The format: docs/trace-format.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
import numpy as np
from msgspec import Meta, Struct, field

from zico.base.decoding import WRONG
from zico.trace.events import EVENT, NO_NAME, Kind, Origin, Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

VERSION = 1
MAX_LINE_BYTES = 1 << 20
MAX_NAME_CHARS = 1024
LARGEST = 1 << 60
"""No number in a file is larger, so that sums stay below 2**63."""

FIRST_EVENT_LINE = 2
"""Event i of a file stands on line i + this."""

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Number = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
Stream = Annotated[int, Meta(ge=-(1 << 15), lt=1 << 15)]


class _Line(Struct, kw_only=True, omit_defaults=True, gc=False, tag_field="k"):
    """What every event may say."""

    kind: ClassVar[Kind]
    op: Name = ""
    stream: Stream = 0


class _Timed(_Line):
    t_ns: Number = field(name="t")


class _OfTensor(_Timed):
    size_bytes: ClassVar[int] = 0
    tensor: Number


class _OfIteration(_Timed):
    size_bytes: ClassVar[int] = 0
    tensor: Number = field(name="iteration")


class _Alloc(_Timed, tag="alloc"):
    kind = Kind.ALLOC
    tensor: Number
    size_bytes: Positive = field(name="bytes")


class _Free(_OfTensor, tag="free"):
    kind = Kind.FREE


class _Read(_OfTensor, tag="read"):
    kind = Kind.READ


class _Write(_OfTensor, tag="write"):
    kind = Kind.WRITE


class _Op(_Timed, tag="op"):
    kind = Kind.OP
    tensor: ClassVar[int] = 0
    size_bytes: Number = field(name="ns")


class _Begin(_OfIteration, tag="begin"):
    kind = Kind.BEGIN


class _End(_OfIteration, tag="end"):
    kind = Kind.END


class _Dropped(_Timed, tag="dropped"):
    kind = Kind.DROPPED
    tensor: ClassVar[int] = 0
    size_bytes: Positive = field(name="events")


class Stop(Struct, tag_field="k", tag="stop"):
    """The last line: how many lines of events there are, and how many events they say are missing."""

    events: int
    dropped: int


class _Version(Struct):
    zico_trace: int


class _Held(_Timed, tag="held"):
    kind = Kind.HELD
    tensor: ClassVar[int] = 0
    size_bytes: Number = field(name="bytes")


EventLine = _Alloc | _Free | _Read | _Write | _Op | _Begin | _End | _Dropped | _Held
_DECODER: msgspec.json.Decoder[EventLine | Stop] = msgspec.json.Decoder(EventLine | Stop)
_ENCODER = msgspec.json.Encoder()
_WITH_BOTH = {Kind.ALLOC: _Alloc}
_WITH_TENSOR = {Kind.FREE: _Free, Kind.READ: _Read, Kind.WRITE: _Write, Kind.BEGIN: _Begin, Kind.END: _End}
_WITH_SIZE = {Kind.OP: _Op, Kind.DROPPED: _Dropped, Kind.HELD: _Held}


def encode_header(origin: Origin) -> bytes:
    """Return the first line."""
    texts = {key: clean(value) if isinstance(value, str) else value for key, value in vars(origin).items()}
    return _ENCODER.encode({"zico_trace": VERSION, **texts}) + b"\n"


def decode_header(line: bytes) -> Origin:
    """Return what the first line says.

    Raises:
        ValueError: It is none, or of another version.
    """
    try:
        version = msgspec.json.decode(line, type=_Version).zico_trace
        if version != VERSION:
            raise ValueError(f"version {version} of the format: this Zico reads version {VERSION}")
        return msgspec.json.decode(line, type=Origin)
    except WRONG as error:
        raise ValueError(f"no trace's first line ({error}): record one by zico trace -o FILE -- CMD") from None


def encode_events(events: NDArray[np.void], names: Sequence[str]) -> bytes:
    """Return the events' lines; ``names`` is what their ``name`` fields are indexes of."""
    lines = []
    for t_ns, tensor, size_bytes, name, stream, kind, _ in events.tolist():
        op = names[name] if name != NO_NAME else ""
        if kind in _WITH_TENSOR:
            lines.append(_WITH_TENSOR[kind](t_ns, tensor, op=op, stream=stream))
        elif kind in _WITH_SIZE:
            lines.append(_WITH_SIZE[kind](t_ns, size_bytes, op=op, stream=stream))
        else:
            lines.append(_WITH_BOTH[kind](t_ns, tensor, size_bytes, op=op, stream=stream))
    return _ENCODER.encode_lines(lines)


def encode_stop(stop: Stop) -> bytes:
    """Return the last line."""
    return _ENCODER.encode(stop) + b"\n"


def decode_line(line: bytes) -> EventLine | Stop:
    """Return what one line says; raises one of ``WRONG``."""
    return _DECODER.decode(line)


def decode_lines(lines: bytes) -> list[EventLine | Stop]:
    """Return what whole lines say; raises one of ``WRONG``."""
    return _DECODER.decode_lines(lines)


def to_events(lines: Sequence[EventLine], numbers: dict[str, int]) -> NDArray[np.void]:
    """Return lines of events as an array; names that are new get the next number in ``numbers``."""
    events = np.zeros(len(lines), EVENT)
    for column in ("t_ns", "tensor", "size_bytes", "stream", "kind"):
        events[column] = [getattr(line, column) for line in lines]
    events["name"] = [numbers.setdefault(line.op, len(numbers)) if line.op else NO_NAME for line in lines]
    return events


def clean(text: str) -> str:
    """Return a name as it is written: of bounded length and of characters that UTF-8 has."""
    return text[:MAX_NAME_CHARS].encode(errors="replace").decode()


# --------------------------------------------------------------------------------------------------
# Rebuild a trace from a log that knows addresses only: snapshots and profiler traces of frameworks.
#
# Such logs begin in the middle of a life. A free of an address of which no allocation was seen
# means that the tensor was there before. An allocation at an address that is taken means that its
# free was missed.

_Row = tuple[int, int, int, int, int, int, int]


class Rebuilder:
    """Take a log's entries in their order; ``trace`` is what they mean."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._before: list[_Row] = []
        self._live: dict[int, int] = {}  # address -> tensor; those from before are numbered -1, -2...
        self._n_tensors = 0
        self._names: dict[str, int] = {}

    def allocate(self, t_ns: int, address: int, size_bytes: int, name: str = "") -> None:
        """Begin a tensor at an address."""
        if address in self._live:
            self.free(t_ns, address, 0)
        tensor = self._n_tensors
        self._n_tensors += 1
        self._live[address] = tensor
        self._rows.append((t_ns, tensor, size_bytes, self._number(name), 0, Kind.ALLOC, 0))

    def free(self, t_ns: int, address: int, size_bytes: int) -> None:
        """End the tensor at an address; if none is known, it was there before the log began."""
        if address not in self._live:
            self.was_there(address, size_bytes)
        self._rows.append((t_ns, self._live.pop(address), 0, NO_NAME, 0, Kind.FREE, 0))

    def was_there(self, address: int, size_bytes: int, name: str = "") -> None:
        """Know of a tensor that is at an address and was there before the log began."""
        if address not in self._live and size_bytes > 0:
            self._live[address] = -1 - len(self._before)
            self._before.append((0, len(self._before), size_bytes, self._number(name), 0, Kind.ALLOC, 0))

    @property
    def bytes_before(self) -> int:
        """Return how much was there before the log began, as far as it is known."""
        return sum(size_bytes for _, _, size_bytes, *_ in self._before)

    def operate(self, t_ns: int, duration_ns: int, name: str) -> None:
        """Note an operation."""
        self._rows.append((t_ns, 0, duration_ns, self._number(name), 0, Kind.OP, 0))

    def mark(self, t_ns: int, kind: Kind, iteration: int) -> None:
        """Note an iteration's BEGIN or END."""
        self._rows.append((t_ns, iteration, 0, NO_NAME, 0, kind, 0))

    def trace(self, origin: Origin, path: str) -> Trace:
        """Return the trace: what was there before is allocated first, at its beginning."""
        n_before = len(self._before)
        events = np.array(self._before + self._rows, EVENT)
        rows = events[n_before:]
        of_tensors = np.isin(rows["kind"], (Kind.ALLOC, Kind.FREE))
        number = rows["tensor"][of_tensors]
        rows["tensor"][of_tensors] = np.where(number < 0, -1 - number, number + n_before)
        return Trace(origin, events, tuple(self._names), path)

    def _number(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names)) if name else NO_NAME
