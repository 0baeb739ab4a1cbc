"""The jobs of a sweep: grids expanded, a jobs' file read, each job with a name and its parameters. Starts nothing.

``--grid lr=0.1,0.01 --grid seed=1..4`` gives the product of both, in the order given: the last grid
changes fastest. ``{lr}`` in a word of the command becomes the value; ``{{`` and ``}}`` are braces.
Words are split first, so a value with spaces stays one word.
"""

from __future__ import annotations

import collections
import itertools
import math
import re
import shlex
import string
from typing import TYPE_CHECKING, Any

import msgspec

from zico.base.decoding import WRONG
from zico.base.errors import ConfigError
from zico.base.settings import MAX_NAME_BYTES, fitting_name
from zico.launch.jobs import (
    Command,
    checked_name,
    checked_words,
    default_name,
    split_command,
    up_to_script,
)
from zico.report.model import owner_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MAX_JOBS = 10_000
AGAIN = "+again"
"""What the name of a job's second try ends with in the pool."""
MAX_SWEEP_NAME_BYTES = MAX_NAME_BYTES - len(AGAIN)

_NAME = re.compile(r"[A-Za-z_]\w*")
_RANGE = re.compile(r"(-?\d{1,12})\.\.(-?\d{1,12})")
_BRACES = "write {{ and }} for braces that are no placeholder"


class SweepJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One job of a sweep."""

    name: str
    argv: tuple[str, ...]
    parameters: dict[str, str] = {}
    owner: str = ""
    """The command that it was made of, by its name: ``--weight OWNER=2`` is for it."""

    @property
    def text(self) -> str:
        """Return its command as the user would type it."""
        return shlex.join(self.argv)

    @property
    def kind(self) -> tuple[str, ...]:
        """Return the words of its command up to the script: jobs that share them need about the same memory."""
        return up_to_script(self.argv)


# -- grids -----------------------------------------------------------------------------------------


def parse_grids(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the values of each grid by its name, from ``NAME=VALUE,VALUE`` or ``NAME=FIRST..LAST``.

    Raises:
        ConfigError: A text is no grid, has no value or one twice, or two have one name.
    """
    grids: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise ConfigError(f"--grid {text!r} is no grid: give NAME=VALUE,VALUE or NAME=FIRST..LAST, as in lr=0.1,1")
        if name in grids:
            raise ConfigError(f"--grid {name} is given twice: give all its values in one, as in {name}=1,2")
        grids[name] = tuple(itertools.chain.from_iterable(_values(text, value.strip()) for value in values.split(",")))
        seen: set[str] = set()
        for value in grids[name]:
            if value in seen:
                raise ConfigError(f"--grid {text!r} has {value!r} twice, so two jobs would be the same: give it once")
            seen.add(value)
    count = math.prod(map(len, grids.values()))
    if count > MAX_JOBS:
        raise ConfigError(f"the grids make {count} jobs: give fewer values, for at most {MAX_JOBS} jobs")
    return grids


def _values(text: str, value: str) -> Sequence[str]:
    if not value:
        raise ConfigError(f"--grid {text!r} has an empty value: give at least one value, and one after each comma")
    found = _RANGE.fullmatch(value)
    if found is None:
        return (value,)
    first, last = int(found[1]), int(found[2])
    if first > last:
        raise ConfigError(f"--grid {text!r}: the range {value} is empty: give the smaller number first")
    if last - first >= MAX_JOBS:
        raise ConfigError(f"--grid {text!r}: the range {value} makes more than {MAX_JOBS} jobs: give fewer values")
    return [str(number) for number in range(first, last + 1)]


def grid_jobs(commands: Sequence[Command], grids: Mapping[str, tuple[str, ...]]) -> tuple[SweepJob, ...]:
    """Return a job for each command and each combination of the grids that it uses; a command as it is without grids.

    Raises:
        ConfigError: A command has a placeholder without a grid, no grid is for a command, or there
            are too many jobs.
    """
    if not grids:
        return tuple(SweepJob(command.name, command.argv, owner=command.name) for command in commands)
    used = [_placeholders(command.argv, grids, "--grid") for command in commands]
    unused = [name for name in grids if not any(name in names for names in used)]
    if unused:
        raise ConfigError(f"no command uses --grid {unused[0]}: put {{{unused[0]}}} into one, or leave the grid out")
    count = sum(math.prod(len(grids[name]) for name in names) for names in used)
    if count > MAX_JOBS:
        raise ConfigError(f"the grids make {count} jobs: give fewer values, for at most {MAX_JOBS} jobs")
    jobs = [
        SweepJob(
            "", tuple(_filled(word, parameters) for word in command.argv), parameters=parameters, owner=command.name
        )
        for command, names in zip(commands, used, strict=True)
        for values in itertools.product(*(grids[name] for name in grids if name in names))
        for parameters in [dict(zip((name for name in grids if name in names), values, strict=True))]
    ]
    return _named(jobs, several=len(commands) > 1)


def _named(jobs: Sequence[SweepJob], *, several: bool) -> tuple[SweepJob, ...]:
    """Return the jobs with names of their parameters, or all with numbers where such names would not do."""
    names = []
    for job in jobs:
        owner = [job.owner] if several or not job.parameters else []
        names.append(",".join(owner + [f"{name}={value}" for name, value in job.parameters.items()]))
    taken = set(names)
    if len(taken) < len(names) or not all(_may_be_named(name, taken) for name in names):
        width = len(str(len(jobs)))
        most = MAX_SWEEP_NAME_BYTES - width - 1
        bases = [job.owner.encode()[:most].decode(errors="ignore") for job in jobs]
        names = [f"{base}-{number:0{width}}" for number, base in enumerate(bases, 1)]
    return tuple(msgspec.structs.replace(job, name=name) for job, name in zip(jobs, names, strict=True))


def _may_be_named(name: str, names: set[str]) -> bool:
    """Tell whether a name will do as it is: the pool would take v=1.2 beside v=1 for a second process of that job."""
    fits = fitting_name(name) == name and len(name.encode()) <= MAX_SWEEP_NAME_BYTES
    return fits and owner_of(name, {name.rpartition(".")[0]} & names) is None


# -- placeholders ----------------------------------------------------------------------------------


def _placeholders(argv: Sequence[str], known: Mapping[str, Any], what: str) -> set[str]:
    """Return the names in braces; refuse those that are not known."""
    found = set()
    for word in argv:
        for name in _names_in(word):
            if name not in known:
                there = ", ".join(known) or "none"
                raise ConfigError(
                    f"{{{name}}} in {shlex.join(argv)!r} is not among the names of {what} ({there}): "
                    f"give it there, or {_BRACES}"
                )
            found.add(name)
    return found


def _names_in(word: str) -> list[str]:
    try:
        fields = [(name, spec, how) for _, name, spec, how in string.Formatter().parse(word) if name is not None]
    except ValueError as error:
        raise ConfigError(f"{word!r} has a single brace ({error}): {_BRACES}") from None
    for name, spec, how in fields:
        if spec or how or not _NAME.fullmatch(name):
            raise ConfigError(f"{word!r} has braces around what is no name: give {{NAME}}, or {_BRACES}")
    return [name for name, _, _ in fields]


def _filled(word: str, parameters: Mapping[str, str]) -> str:
    """Return a word with values instead of placeholders; those are known to be there."""
    parts = []
    for literal, name, _, _ in string.Formatter().parse(word):
        parts += [literal, "" if name is None else parameters[name]]
    return "".join(parts)


# -- a jobs' file ----------------------------------------------------------------------------------


class JobEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One job as a jobs' file says it."""

    name: str = ""
    command: str = ""
    """The file's if it is left out."""
    parameters: dict[str, str | int | float | bool] = {}


class JobsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A jobs' file."""

    jobs: list[JobEntry]
    command: str = ""


_GIVE = 'give {"command": CMD, "jobs": [{"name": NAME, "command": CMD, "parameters": {NAME: VALUE}}, ...]}'


def read_jobs_file(path: Path) -> tuple[SweepJob, ...]:
    """Return the jobs that a JSON file describes.

    Raises:
        ConfigError: It cannot be read, says what is not known, or describes a job that cannot be.
    """
    where = f"--jobs-file {path}"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=JobsFile)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({(error.strerror or str(error)).lower()}): name a file") from None
    except WRONG as error:
        raise ConfigError(f"{where}: {str(error)[:1].lower()}{str(error)[1:]}: {_GIVE}") from None
    if not file.jobs:
        raise ConfigError(f"{where}: there are no jobs in it: give at least one")
    if len(file.jobs) > MAX_JOBS:
        raise ConfigError(f"{where}: describes {len(file.jobs)} jobs: give at most {MAX_JOBS}")
    jobs = [_entry_job(f"{where}: job {number}", file, entry) for number, entry in enumerate(file.jobs, 1)]
    for name, count in collections.Counter(entry.name for entry in file.jobs if entry.name).items():
        if count > 1:
            raise ConfigError(f"{where}: {count} jobs are named {name!r}: give each its own name")
    unnamed = [job for job in jobs if not job.name]
    made = iter(_named(unnamed, several=len({job.owner for job in unnamed}) > 1))
    named = [job if job.name else next(made) for job in jobs]
    taken = {job.name for job in named}
    if len(taken) < len(named):
        raise ConfigError(f"{where}: a job's name is that of a job without a name: give each its own name")
    return tuple(msgspec.structs.replace(job, owner=job.name) for job in named)


def _entry_job(where: str, file: JobsFile, entry: JobEntry) -> SweepJob:
    text = entry.command or file.command
    if not text:
        raise ConfigError(f"{where}: has no command: give it one, or the file one for all jobs")
    parameters = {name: _as_text(value) for name, value in entry.parameters.items()}
    try:
        argv = split_command(text)
        used = _placeholders(argv, parameters, "its parameters")
        if entry.name:
            checked_name(entry.name, MAX_SWEEP_NAME_BYTES)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    unused = sorted(set(parameters) - used)
    if unused:
        raise ConfigError(f"{where}: its command does not use {unused[0]!r}: put {{{unused[0]}}} there, or drop it")
    filled = tuple(_filled(word, parameters) for word in argv)
    try:
        checked_words(filled)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return SweepJob(entry.name, filled, parameters=parameters, owner=default_name(filled))


def _as_text(value: str | float) -> str:
    """Return a value as a command takes it: numbers and truth values as JSON writes them."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
