"""Record a job's events while it runs: a thread empties the ring that the job fills, into a trace file."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Self

import numpy as np

from zico.base.errors import TraceError
from zico.base.settings import RING_VARIABLE
from zico.trace.events import Kind, Origin
from zico.trace.files import TraceWriter
from zico.trace.ringfile import RingReader

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_PERIOD_S = 0.01
"""Seconds between two looks into the ring. It holds ten times what a job allocates meanwhile at its fastest."""
_END_S = 30.0


class Recording:
    """A recording in progress; a context manager. The trace file appears when it is left without an exception."""

    def __init__(self, path: Path, directory: Path, job: str, *, iterations: int | None = None) -> None:
        """Prepare to record one job into ``path``; what it does after ``iterations`` of them is not recorded.

        Raises:
            TraceError: The file cannot be written.
            OSError: The ring cannot be made in ``directory``.
        """
        if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise TraceError(str(path), 0, "cannot be written: give a file in a folder where you may write")
        self._path = path
        self._job = job
        self._iterations = iterations
        self._ring = RingReader(directory / "trace.ring")
        self._writer: TraceWriter | None = None
        self._known = np.zeros(1 << 16, bool)
        self._over = False
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="zico-recording", daemon=True)
        self.n_events = 0
        self.n_dropped = 0

    @property
    def environment(self) -> dict[str, str]:
        """Return what makes a job record itself here."""
        return {RING_VARIABLE: str(self._ring.path)}

    @property
    def has_begun(self) -> bool:
        """Tell whether a process has opened the ring."""
        return self._ring.pid != 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Read what is left and complete the file, or remove it after an exception."""
        self._stop.set()
        self._thread.join(_END_S)
        with self._ring:
            if self._writer is not None:
                failed = self._failure or error
                self._writer.__exit__(type(failed) if failed else None, failed, None)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stop.wait(_PERIOD_S):
                self._take()
            self._take()
        except Exception as error:  # noqa: BLE001 - raised again where the recording is left
            self._failure = error

    def _take(self) -> None:
        """Move what is in the ring to the file."""
        events = self._ring.read()
        if self._over or not len(events):
            return
        events = self._within_iterations(self._whole_lives(events))
        if self._writer is None:
            self._writer = TraceWriter(self._path, self._origin())
        self._writer.names(self._ring.names_so_far())
        self._writer.write(events)
        self.n_events += len(events)
        self.n_dropped += int(events["size_bytes"][events["kind"] == Kind.DROPPED].sum())

    def _origin(self) -> Origin:
        header = self._ring.header[0]
        framework = header["framework"].decode()
        return Origin(job=self._job, framework=framework, threshold_bytes=int(header["threshold_bytes"]))

    def _whole_lives(self, events: NDArray[np.void]) -> NDArray[np.void]:
        """Leave out what happens to tensors whose allocation was dropped."""
        of_tensors = np.isin(events["kind"], (Kind.ALLOC, Kind.FREE, Kind.READ, Kind.WRITE))
        tensors = np.where(of_tensors, events["tensor"], 0)
        missing = int(tensors.max()) + 1 - len(self._known)
        if missing > 0:
            self._known = np.concatenate([self._known, np.zeros(missing + len(self._known), bool)])
        self._known[tensors[events["kind"] == Kind.ALLOC]] = True
        return events[~of_tensors | self._known[tensors]]

    def _within_iterations(self, events: NDArray[np.void]) -> NDArray[np.void]:
        """Leave out what comes after the last iteration that is wanted."""
        if self._iterations is None:
            return events
        begins = np.flatnonzero((events["kind"] == Kind.BEGIN) & (events["tensor"] > self._iterations))
        if not len(begins):
            return events
        self._over = True
        return events[: begins[0]]
