"""What the user wants to run: command lines split without a shell, each with a name of its own."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from pathlib import PurePath
from typing import TYPE_CHECKING

from zico.broker.messages import DEFAULT_SHARE, Share
from zico.broker.saving import DEFAULT_WISH, Wish
from zico.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_COMMANDS = 64
"""Jobs of one pool at a time (``zico.pool.layout.MAX_JOBS``, kept here because that module needs NumPy)."""
MAX_NAME_BYTES = 40
"""Leaves room in the table's 48 bytes for the ``.2`` of a job's second process."""

_NOT_IN_A_NAME = re.compile(r"[^\w.+=@,-]+")


@dataclasses.dataclass(frozen=True)
class Command:
    """One job's command."""

    name: str
    argv: tuple[str, ...]
    text: str
    """As the user would type it."""
    share: Share = DEFAULT_SHARE
    wish: Wish = DEFAULT_WISH


def split_commands(texts: Sequence[str], names: Sequence[str] = ()) -> tuple[Command, ...]:
    """Return the commands that ``texts`` name, one each, split as a shell would but run without one.

    Raises:
        ConfigError: A text is empty or has an open quote, or there are too many texts or names.
    """
    return name_commands([_split(text) for text in texts], names)


def name_commands(argvs: Sequence[Sequence[str]], names: Sequence[str] = ()) -> tuple[Command, ...]:
    """Return commands with unique names: the given ones first, then those of the scripts.

    Raises:
        ConfigError: There is no command, there are too many, or more names than commands.
    """
    if not argvs:
        raise ConfigError('no command: give one or more, as in zico run "python train.py", or one command after --')
    if len(argvs) > MAX_COMMANDS:
        raise ConfigError(f"{len(argvs)} commands: one pool serves at most {MAX_COMMANDS} jobs")
    if len(names) > len(argvs):
        raise ConfigError(f"{len(names)} names for {len(argvs)} commands: give --name at most once for each command")
    given = [_checked_name(name) for name in names]
    wanted = given + [default_name(argv) for argv in argvs[len(given) :]]
    unique = _unique(wanted)
    return tuple(Command(name, tuple(argv), shlex.join(argv)) for name, argv in zip(unique, argvs, strict=True))


def default_name(argv: Sequence[str]) -> str:
    """Return a name made from the script's file name, the module's last part, or the program's name."""
    for before, argument in itertools.pairwise(argv):
        if before == "-m":
            return _fitting(argument.rpartition(".")[2])
        if before == "-c":
            break
        if argument.endswith((".py", ".sh")):
            return _fitting(PurePath(argument).stem)
    program = PurePath(argv[0])
    return _fitting(program.stem if program.suffix in {".py", ".sh"} else program.name)


def _split(text: str) -> list[str]:
    try:
        argv = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"cannot split the command {text!r}: {str(error).lower()}") from None
    if not argv:
        raise ConfigError(f"the command {text!r} is empty: give a program and its arguments")
    return argv


def _checked_name(name: str) -> str:
    if not name or _fitting(name) != name:
        raise ConfigError(
            f"{name!r} is not a job name: give letters, digits and any of . _ + = @ , - "
            f"in at most {MAX_NAME_BYTES} bytes"
        )
    return name


def _fitting(name: str) -> str:
    cleaned = _NOT_IN_A_NAME.sub("-", name).strip("-") or "job"
    return cleaned.encode()[:MAX_NAME_BYTES].decode(errors="ignore")


def _unique(wanted: Sequence[str]) -> list[str]:
    """Return ``wanted`` with ``-2``, ``-3`` ... appended where a name occurred before."""
    names: list[str] = []
    for name in wanted:
        candidates = itertools.chain([name], (f"{name}-{count}" for count in itertools.count(2)))
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return names
