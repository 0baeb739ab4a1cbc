"""Events of a job's memory: what a trace consists of, in memory. On disk: docs/trace-format.md.

A trace is one array of ``EVENT``, and the names that operations refer to. Events stand in the order
in which things happened, or per stream in that in which the device did them. Tensors are numbered
from 0 in the order of their allocation, so a number never means two tensors although an address
does.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from zico.base.records import I2, I4, I8, U1, Record, dtype_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NO_NAME = -1


class Kind(enum.IntEnum):
    """What happened, and what the fields of the event mean then."""

    ALLOC = 1
    """``tensor`` begins to live; ``size_bytes`` its size; ``name`` the operation that asked, if known."""
    FREE = 2
    """``tensor`` ends."""
    READ = 3
    """An operation (``name``) reads ``tensor``; READ and WRITE events precede the OP event they belong to."""
    WRITE = 4
    OP = 5
    """Operation ``name`` began at ``t_ns`` and took ``size_bytes`` nanoseconds."""
    BEGIN = 6
    """Iteration number ``tensor`` begins. It ends where the next one begins, or at its END."""
    END = 7
    DROPPED = 8
    """``size_bytes`` events are missing here: the recorder could not keep up."""
    HELD = 9
    """From now on the job holds regions of ``size_bytes`` in all."""


class EventRecord(Record, align=False):
    """One event, 32 bytes."""

    t_ns: I8  # from the beginning of the trace, CLOCK_MONOTONIC or the model's clock
    tensor: I8  # number of the tensor, or of the iteration
    size_bytes: I8  # bytes; nanoseconds for an OP; a count for DROPPED
    name: I4  # index into Trace.names, or NO_NAME
    stream: I2
    kind: U1  # Kind
    flags: U1  # reserved, 0


EVENT = dtype_of(EventRecord)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a trace comes from: the header of its file."""

    job: str = ""
    framework: str = ""
    device: str = "host"
    """The device that ran it, or the device model's name."""
    source: str = "recorded"
    """``recorded``, ``fake`` (nothing was computed), or the format it was converted from."""
    threshold_bytes: int = 0
    """Smaller tensors were not recorded."""
    parameters: int = 0
    """Number of trainable parameters, 0 if not known."""
    note: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """A whole trace in memory."""

    origin: Origin
    events: NDArray[np.void]
    """Of dtype ``EVENT``."""
    names: tuple[str, ...] = ()
    path: str = ""
    """The file it was read from, for messages."""
