"""A sweep's file: what its jobs are, and how each has ended, one JSON text a line, so that nothing done is done again.

The first line is the sweep: jobs, options and directory. Each further line is one try of a job that
has ended. A line is on disk before the next job starts. A last line without its end was being
written when the machine stopped: it counts as not there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING, Self

import msgspec

from zico.base.decoding import WRONG
from zico.base.errors import ConfigError
from zico.launch.jobs import checked_words
from zico.launch.sweep import SweepJob  # noqa: TC001 - msgspec reads the annotation
from zico.report.model import SweepFigures

if TYPE_CHECKING:
    from pathlib import Path

SWEEP_SCHEMA = "zico.sweep.v1"
_MOST_FILES = 10_000


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep is: the file's first line."""

    schema_version: str = SWEEP_SCHEMA
    directory: str
    """Where its commands run."""
    words: tuple[str, ...]
    """The command line, without ``zico run``."""
    jobs: tuple[SweepJob, ...]


class JobResult(SweepFigures, frozen=True, kw_only=True):
    """How one try of a job ended: a further line of the file."""

    tries: int = 1
    exit_code: int
    again: bool = False
    """It is to be tried again, alone."""


class SweepFile:
    """A sweep's file, held by this process alone until it is closed."""

    def __init__(self, path: Path, descriptor: int, sweep: Sweep, results: dict[str, JobResult]) -> None:
        self.path = path
        self.sweep = sweep
        self.results = results
        """The last try of each job that has ended, by its name."""
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path, sweep: Sweep) -> Self:
        """Return a new file with the sweep in it.

        Raises:
            FileExistsError: There is one; it is unchanged.
            ConfigError: It cannot be written.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise
        except OSError as error:
            raise _refused(path, "cannot be written", error) from None
        made = cls(path, descriptor, sweep, {})
        _lock(path, descriptor)
        made._append(sweep)
        return made

    @classmethod
    def create_numbered(cls, directory: Path, stem: str, sweep: Sweep) -> Self:
        """Return a new file in ``directory``: STEM.sweep.jsonl, or STEM-2.sweep.jsonl where that is taken, and so on.

        Raises:
            ConfigError: It cannot be written.
        """
        for number in range(1, _MOST_FILES):
            name = stem if number == 1 else f"{stem}-{number}"
            with contextlib.suppress(FileExistsError):
                return cls.create(directory / f"{name}.sweep.jsonl", sweep)
        raise ConfigError(f"{directory} has {_MOST_FILES} sweeps of {stem}: remove some, or give --report DIR")

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Return the file of a sweep that has been begun.

        Raises:
            ConfigError: It cannot be used, is no sweep's file, or another run has it.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise _refused(path, "cannot be used", error) from None
        try:
            _lock(path, descriptor)
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            sweep, results = _read(path, whole)
            if len(whole) < len(content):
                os.ftruncate(descriptor, len(whole))
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, sweep, results)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the file; does nothing the second time."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def add(self, result: JobResult) -> None:
        """Write how a try has ended; it is on disk afterwards.

        Raises:
            OSError: The disk is full, for instance.
        """
        self._append(result)
        self.results[result.name] = result

    @property
    def left(self) -> tuple[SweepJob, ...]:
        """Return the jobs that have not ended, those to be tried again included, in their order."""
        ended = {name for name, result in self.results.items() if not result.again}
        return tuple(job for job in self.sweep.jobs if job.name not in ended)

    def _append(self, line: Sweep | JobResult) -> None:
        text = msgspec.json.encode(line) + b"\n"
        while text:
            text = text[os.write(self._descriptor, text) :]
        os.fsync(self._descriptor)


def _read(path: Path, whole: bytes) -> tuple[Sweep, dict[str, JobResult]]:
    first, *rest = whole.splitlines() or [b""]
    try:
        sweep = msgspec.json.decode(first, type=Sweep)
        if sweep.schema_version != SWEEP_SCHEMA:
            raise ConfigError(f"--resume {path}: is {sweep.schema_version!r}, not {SWEEP_SCHEMA}: name a sweep's file")
    except WRONG as error:
        raise ConfigError(f"--resume {path}: is no sweep's file ({error}): name the one that zico run wrote") from None
    for job in sweep.jobs:
        try:
            checked_words(job.argv)
        except ConfigError as error:
            raise ConfigError(f"--resume {path}: job {job.name!r}: {error}") from None
    names = {job.name for job in sweep.jobs}
    results = {}
    for number, line in enumerate(rest, 2):
        try:
            result = msgspec.json.decode(line, type=JobResult)
        except WRONG as error:
            raise ConfigError(f"--resume {path}: line {number} is damaged ({error}): remove that line") from None
        if result.name not in names:
            raise ConfigError(f"--resume {path}: line {number}: the sweep has no job {result.name!r}: remove that line")
        results[result.name] = result
    return sweep, results


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{path} is in use by another zico run: wait for its end, or end it") from None


def _refused(path: Path, what: str, error: OSError) -> ConfigError:
    return ConfigError(f"the sweep's file {path} {what} ({(error.strerror or str(error)).lower()}): name another")
