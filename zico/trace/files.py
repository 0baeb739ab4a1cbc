"""Write and read trace files: JSON lines, compressed by zstd, as streams in both directions (docs/trace-format.md).

Guarantees
    * A file under its final name is whole: it is written as ``FILE.partial`` and renamed at the
      end.
    * When a writer dies, ``FILE.partial`` stays, and what was written up to the last ``write`` can
      be read.
    * Reading takes memory for one batch; ``read_trace`` for the whole trace, 32 bytes an event. A
      hostile file costs bounded memory and ends in a ``TraceError``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import itertools
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self, cast

import numpy as np
import zstandard

from zico.base.decoding import WRONG
from zico.base.errors import TraceError
from zico.trace.events import EVENT, Kind, Origin, Trace
from zico.trace.lines import (
    MAX_LINE_BYTES,
    EventLine,
    Stop,
    clean,
    decode_header,
    decode_line,
    decode_lines,
    encode_events,
    encode_header,
    encode_stop,
    to_events,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

PARTIAL_SUFFIX = ".partial"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
GZIP_MAGIC = b"\x1f\x8b"
MAX_EVENTS = 1 << 26
"""Events that ``read_trace`` takes into memory: 2 GiB."""
MAX_FILE_BYTES = 1 << 30
"""Bytes of a file in another program's format, uncompressed, since it is held in memory."""
MAX_NAMES_BYTES = 1 << 27
NAME_BYTES = 160
"""What a name takes besides its characters: an entry of a dictionary, a number, a string's head."""
_CHUNK_BYTES = 1 << 20
_WINDOW_BYTES = 1 << 27  # the largest that zstd itself decodes unasked
_BATCH_EVENTS = 1 << 16


class TraceWriter:
    """Write a trace batch by batch; a context manager. The file appears when it is left without an exception.

    Raises:
        TraceError: The file cannot be written, or another writer is at it. Nothing is left but what
            was there.
    """

    def __init__(self, path: Path | str, origin: Origin) -> None:
        """Begin the file of a trace that comes from ``origin``."""
        self._path = Path(path)
        self._partial = self._path.with_name(self._path.name + PARTIAL_SUFFIX)
        self._names: list[str] = []
        self._n_events = 0
        self._n_dropped = 0
        with self._translated():
            self._file = _open_alone(self._partial)
            self._stream = zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(
                self._file, closefd=False
            )
            self._stream.write(encode_header(origin))
            self._stream.flush(zstandard.FLUSH_BLOCK)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complete the file and give it its name; after an exception remove what was written."""
        with self._file, self._translated():
            try:
                if kind is None:
                    self._complete()
                    return
            except BaseException:
                self._partial.unlink()
                raise
            self._partial.unlink()

    def names(self, names: Sequence[str]) -> None:
        """Set what the ``name`` fields of later events are indexes of."""
        self._names = [clean(name) for name in names]

    def write(self, events: NDArray[np.void]) -> None:
        """Append events of dtype ``EVENT``. What has been written survives the death of this process."""
        with self._translated():
            for start in range(0, len(events), _BATCH_EVENTS):
                self._stream.write(encode_events(events[start : start + _BATCH_EVENTS], self._names))
            self._stream.flush(zstandard.FLUSH_BLOCK)
        self._n_events += len(events)
        self._n_dropped += int(events["size_bytes"][events["kind"] == Kind.DROPPED].sum())

    def _complete(self) -> None:
        self._stream.write(encode_stop(Stop(self._n_events, self._n_dropped)))
        self._stream.flush(zstandard.FLUSH_FRAME)
        os.fsync(self._file.fileno())
        self._partial.replace(self._path)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TraceError(str(self._path), 0, f"cannot be written ({error.strerror}): choose another -o") from error


def write_trace(path: Path | str, trace: Trace) -> None:
    """Write a whole trace."""
    with TraceWriter(path, trace.origin) as writer:
        writer.names(trace.names)
        writer.write(trace.events)


class TraceReader:
    """Read a trace batch by batch; a context manager. Iterate over it for arrays of events.

    Args:
        path: The file, compressed or not.
        allow_truncated: Take a file without its end for what it holds, as its writer's death leaves
            it.

    Raises:
        TraceError: At any time: the file is not a trace, is damaged or has no end.
    """

    def __init__(self, path: Path | str, *, allow_truncated: bool = False) -> None:
        self._path = str(path)
        self._allow_truncated = allow_truncated
        self._numbers: dict[str, int] = {}
        self._n_names = self._names_bytes = 0
        self._line = 1
        self._stop: Stop | None = None
        self._file = _open_to_read(path)
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._file)
            self._lines = self._whole_lines()
            header, _, self._rest = next(self._lines, b"").partition(b"\n")
            try:
                self.origin = decode_header(header)
            except ValueError as error:
                raise TraceError(self._path, 1, str(error)) from None
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that the events read so far refer to."""
        return tuple(self._numbers)

    def __iter__(self) -> Iterator[NDArray[np.void]]:
        n_events = n_dropped = 0
        for chunk in self._chunks():
            lines = self._decoded(chunk)
            self._line += len(lines)
            if lines and isinstance(lines[-1], Stop):
                self._stop = lines[-1]
            events = to_events([line for line in lines if not isinstance(line, Stop)], self._numbers)
            self._bound_names()
            n_events += len(events)
            n_dropped += int(events["size_bytes"][events["kind"] == Kind.DROPPED].sum())
            yield events
        if self._stop is None:
            self._fail_at_the_end()
        elif self._stop != Stop(n_events, n_dropped):
            raise self._error(
                f"says {self._stop.events} events and {self._stop.dropped} dropped, but there are {n_events} and "
                f"{n_dropped}: lines were lost or added, record it again"
            )

    def _bound_names(self) -> None:
        """Refuse names that fill memory: a file of a hundred KB may hold millions of long ones."""
        new = itertools.islice(reversed(self._numbers), len(self._numbers) - self._n_names)
        self._names_bytes += sum(NAME_BYTES + len(name) for name in new)
        self._n_names = len(self._numbers)
        if self._names_bytes > MAX_NAMES_BYTES:
            what = f"has {self._n_names} different names of operations, which need more than {MAX_NAMES_BYTES} bytes"
            raise self._error(f"{what}: name what is the same alike")

    def _chunks(self) -> Iterator[bytes]:
        """Yield what follows the header, in stretches of whole lines."""
        if self._rest:
            yield self._rest
        yield from self._lines

    def _whole_lines(self) -> Iterator[bytes]:
        """Yield stretches of whole lines; what follows the last newline is none."""
        rest = b""
        for piece in self._pieces():
            end = piece.rfind(b"\n") + 1
            if end:
                yield rest + piece[:end]
                rest = b""
            rest += piece[end:]
            if len(rest) > MAX_LINE_BYTES:
                raise TraceError(self._path, 0, f"has a line of more than {MAX_LINE_BYTES} bytes: this is not a trace")

    def _pieces(self) -> Iterator[bytes]:
        """Yield the file's content, uncompressed."""
        with _translated_reading(self._path):
            yield from self._uncompressed()

    def _uncompressed(self) -> Iterator[bytes]:
        try:
            compressed = self._file.peek(len(ZSTD_MAGIC)).startswith(ZSTD_MAGIC)  # type: ignore[attr-defined]
            source = self._file
            if compressed:
                reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
                source = reader.stream_reader(self._file, read_across_frames=True)
            while piece := source.read(_CHUNK_BYTES):
                yield piece
        except zstandard.ZstdError as error:
            raise self._error(f"the compressed data is damaged after this line ({error}): record it again") from None

    def _decoded(self, chunk: bytes) -> list[EventLine | Stop]:
        """Return the lines of a chunk, each an event but the last one, which may be the stop."""
        n_lines = chunk.count(b"\n")
        try:
            lines = decode_lines(chunk)
        except WRONG:
            lines = []
        if len(lines) == n_lines and not any(isinstance(line, Stop) for line in lines[:-1]):
            return lines
        for number, text in enumerate(chunk.splitlines(), start=1):
            try:
                line = decode_line(text)
            except WRONG as error:
                raise self._error(f"is not an event ({error}): record it again", add=number) from None
            if isinstance(line, Stop):
                raise self._error("is the last line, but more follow: files were joined, keep one", add=number)
        raise AssertionError  # pragma: no cover - one of the lines was wrong

    def _fail_at_the_end(self) -> None:
        if not self._allow_truncated:
            raise self._error(
                "is the last line, but no stop: the recorder died or the file was cut; read what is there by "
                "--allow-truncated"
            )

    def _error(self, what: str, add: int = 0) -> TraceError:
        return TraceError(self._path, self._line + add, what)


def read_trace(path: Path | str, *, allow_truncated: bool = False, whole: bool = False) -> Trace:
    """Return the whole trace in a file: ours, or of PyTorch's, which may be compressed by gzip.

    PyTorch's are memory snapshots, and of its profiler Chrome traces and raw memory timelines.

    Args:
        path: The file.
        allow_truncated: Take a file of ours without its end for what it holds.
        whole: Take all of it as one iteration, whatever repeats in it.

    Raises:
        TraceError: It is none of these, is damaged, or is too large to be held in memory.
    """
    from zico.trace.iterations import as_one_iteration

    trace = _read_any(path, allow_truncated=allow_truncated)
    return as_one_iteration(trace) if whole else trace


def _read_any(path: Path | str, *, allow_truncated: bool) -> Trace:
    from zico.trace.chrome import looks_like_chrome, read_chrome
    from zico.trace.memory_timeline import looks_like_timeline, read_timeline
    from zico.trace.snapshot import looks_like_snapshot, read_snapshot

    with _translated_reading(path), _open_to_read(path) as file:
        start = file.peek(1)  # type: ignore[attr-defined]
        of_others = (
            (looks_like_snapshot, read_snapshot),
            (looks_like_timeline, read_timeline),
            (looks_like_chrome, read_chrome),
        )
        for looks_like, read in of_others:
            if looks_like(start):
                content = file.read(MAX_FILE_BYTES + 1)
                if len(content) > MAX_FILE_BYTES:
                    raise TraceError(str(path), 0, f"has more than {MAX_FILE_BYTES} bytes: record fewer steps")
                return read(content, str(path))
    with TraceReader(path, allow_truncated=allow_truncated) as reader:
        batches = [np.empty(0, EVENT)]
        n_events = 0
        for batch in reader:
            n_events += len(batch)
            if n_events > MAX_EVENTS:
                raise TraceError(str(path), 0, f"has more than {MAX_EVENTS} events: record fewer iterations")
            batches.append(batch)
        return Trace(reader.origin, np.concatenate(batches), reader.names, str(path))


@contextlib.contextmanager
def _translated_reading(path: Path | str) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise TraceError(str(path), 0, f"is damaged within its compression by gzip ({error}): copy it again") from None
    except OSError as error:
        raise TraceError(str(path), 0, f"cannot be read ({error.strerror})") from error


def _open_to_read(path: Path | str) -> BinaryIO:
    """Open a file, through gzip if that compressed it; nothing is held of what comes out but a buffer."""
    with _translated_reading(path):
        file = Path(path).open("rb")  # noqa: SIM115 - the caller closes it
        with contextlib.ExitStack() as undo:
            undo.enter_context(file)
            if file.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC):
                return cast("BinaryIO", gzip.open(path))
            undo.pop_all()
        return file


def _open_alone(path: Path) -> BinaryIO:
    """Open a file to write it from its beginning; two writers at once would rename each other's halves."""
    file = open(path, "ab", buffering=0)  # noqa: SIM115, PTH123 - the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.samestat(os.fstat(file.fileno()), path.stat())  # else another writer has just renamed it
    except BaseException:
        file.close()
        raise
    if not is_ours:
        file.close()
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    file.truncate(0)
    return file
