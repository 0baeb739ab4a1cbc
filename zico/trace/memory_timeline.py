"""Read raw memory timelines of PyTorch's profiler: what ``export_memory_timeline("FILE.raw.json.gz")`` writes.

An entry is ``[time in ns, action, bytes, category]`` and says of no tensor which one it is. So what
ends is taken to be the youngest of that size. The bytes alive are those of the file at all times;
which of two tensors of one size lives longer is a guess.

Source: torch/profiler/_memory_profiler.py, ``export_memory_timeline_raw``.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

import msgspec
from msgspec import Meta

from zico.base.decoding import WRONG
from zico.base.errors import TraceError
from zico.trace.events import Origin, Trace
from zico.trace.lines import LARGEST, Rebuilder

_PREEXISTING, _CREATE, _VERSION, _DESTROY = range(1, 5)
_CATEGORIES = (
    "parameter",
    "optimizer state",
    "input",
    "temporary",
    "activation",
    "gradient",
    "autograd detail",
    "unknown",
)
"""Categories in the order of ``_CATEGORY_TO_COLORS``."""

_Time = Annotated[int, Meta(ge=-1)]  # since 1970; a number beyond 63 bits is refused anyway
_Bytes = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
_Category = Annotated[int, Meta(ge=0, lt=len(_CATEGORIES))]
_Entry = tuple[_Time, Annotated[int, Meta(ge=_PREEXISTING, le=_DESTROY)], _Bytes, _Category]
_DECODE = msgspec.json.Decoder(list[_Entry]).decode


def looks_like_timeline(start: bytes) -> bool:
    """Tell whether a file that starts so is a list of lists."""
    return b"".join(start[:64].split())[:2] == b"[["


def read_timeline(content: bytes, path: str) -> Trace:
    """Return what a timeline's device did; the file does not say which device it was.

    Raises:
        TraceError: It is damaged, or the curve of a timeline, which knows no tensors.
    """
    try:
        entries = _DECODE(content)
    except WRONG as error:
        remedy = "export it by export_memory_timeline('FILE.raw.json.gz')"
        raise TraceError(path, 0, f"is no raw memory timeline of PyTorch's profiler ({error}): {remedy}") from None
    built = Rebuilder()
    living: dict[int, list[int]] = defaultdict(list)  # size -> addresses, the youngest last
    entries.sort(key=lambda entry: entry[0])  # those of before have the time -1
    start_ns = next((t for t, *_ in entries if t >= 0), 0)
    for number, (t, action, size, category) in enumerate(entries):
        size_bytes, t_ns = abs(size), min(max(t - start_ns, 0), LARGEST)
        if not size_bytes or action == _VERSION:  # a write: its two entries say of which category the tensor is now
            continue
        if action == _DESTROY:
            address = living[size_bytes].pop() if living[size_bytes] else number
            built.free(t_ns, address, size_bytes)
            continue
        living[size_bytes].append(number)
        if action == _PREEXISTING:
            built.was_there(number, size_bytes, _CATEGORIES[category])
        else:
            built.allocate(t_ns, number, size_bytes, _CATEGORIES[category])
    trace = built.trace(Origin(framework="torch", source="PyTorch memory timeline"), path)
    if not len(trace.events):
        raise TraceError(path, 0, "holds no events: profile some steps with profile_memory=True")
    return trace
