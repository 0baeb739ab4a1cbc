"""One job: its command started, its output passed on, its session ended with it."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import itertools
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, cast

import zico.launch
from zico.base.errors import ConfigError
from zico.base.settings import (
    JOB_VARIABLE,
    MAX_NAME_BYTES,
    RUN_VARIABLE,
    SOCKET_VARIABLE,
    STARTING_VARIABLE,
    fitting_name,
)
from zico.broker import saving, shares
from zico.broker.protocol.messages import DEFAULT_SHARE, Share
from zico.broker.saving import DEFAULT_WISH, Wish
from zico.launch.processes import LEFT_BEHIND_S, Child, LinePipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.launch.watchdog import Watchdog
    from zico.report.model import Snapshot


# --------------------------------------------------------------------------------------------------
# What the user wants to run: command lines split without a shell, each with a name of its own.

MAX_COMMANDS = 64
"""Jobs of one pool at a time (``zico.pool.layout.MAX_JOBS``, kept here because that module needs NumPy)."""


@dataclasses.dataclass(frozen=True)
class Command:
    """One job's command."""

    name: str
    argv: tuple[str, ...]
    text: str
    """As the user would type it."""
    share: Share = DEFAULT_SHARE
    wish: Wish = DEFAULT_WISH
    wishes: tuple[Wish, ...] = ()
    """On each device of the run, where they differ: a limit may be a share of the device's budget."""

    def wish_on(self, number: int) -> Wish:
        """Return how the job is to go on with less on the device of that number."""
        return self.wishes[number] if self.wishes else self.wish


def split_commands(texts: Sequence[str], names: Sequence[str] = (), most: int = MAX_COMMANDS) -> tuple[Command, ...]:
    """Return the commands that ``texts`` name, one each, split as a shell would but run without one.

    Raises:
        ConfigError: A text is empty or has an open quote, or there are too many texts or names.
    """
    return name_commands([split_command(text) for text in texts], names, most)


def name_commands(
    argvs: Sequence[Sequence[str]], names: Sequence[str] = (), most: int = MAX_COMMANDS
) -> tuple[Command, ...]:
    """Return commands with unique names: the given ones first, then those of the scripts.

    Args:
        argvs: The commands' words.
        names: Of the first commands.
        most: So many commands there may be.

    Raises:
        ConfigError: There is no command, there are too many, or more names than commands.
    """
    if not argvs:
        raise ConfigError('no command: give one or more, as in zico run "python train.py", or one command after --')
    if len(argvs) > most:
        raise ConfigError(
            f"{len(argvs)} commands: one pool serves at most {most} jobs at once; --at-most lets more wait"
        )
    if len(names) > len(argvs):
        raise ConfigError(f"{len(names)} names for {len(argvs)} commands: give --name at most once for each command")
    given = [checked_name(name) for name in names]
    wanted = given + [default_name(argv) for argv in argvs[len(given) :]]
    unique = _unique(wanted)
    return tuple(Command(name, tuple(argv), _text_of(argv)) for name, argv in zip(unique, argvs, strict=True))


def _text_of(argv: Sequence[str]) -> str:
    """Return a command as reports have it: what is not UTF-8 in its words is written as escapes."""
    return shlex.join(argv).encode(errors="backslashreplace").decode()


_SCRIPTS = (".py", ".sh")


def up_to_script(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command up to its script, module or code, else its first word."""
    for number, word in enumerate(argv):
        if word in ("-m", "-c"):
            return tuple(argv[: number + 2])
        if word.endswith(_SCRIPTS):
            return tuple(argv[: number + 1])
    return tuple(argv[:1])


def default_name(argv: Sequence[str]) -> str:
    """Return a name made from the script's file name, the module's last part, or the program's name."""
    *_, before, last = ("", *up_to_script(argv))
    if before == "-m":
        return fitting_name(last.rpartition(".")[2])
    path = PurePath(argv[0] if before == "-c" else last)
    return fitting_name(path.stem if path.suffix in _SCRIPTS else path.name)


def split_command(text: str) -> list[str]:
    """Return the words of a command.

    Raises:
        ConfigError: It is empty or has an open quote.
    """
    try:
        argv = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"cannot split the command {text!r}: {str(error).lower()}") from None
    if not argv:
        raise ConfigError(f"the command {text!r} is empty: give a program and its arguments")
    return argv


MAX_WORD_BYTES = (1 << 17) - 1
"""Bytes of the longest word of a command. Source: ``MAX_ARG_STRLEN`` of Linux, less the byte that ends it."""


def checked_words(argv: Sequence[str]) -> Sequence[str]:
    """Return the words of a command that the kernel can be given.

    Raises:
        ConfigError: There are none, or one has a NUL, no bytes in the file system's encoding, or
            too many.
    """
    if not argv or not argv[0]:
        raise ConfigError("a command without a program: give a program and its arguments")
    for word in argv:
        try:
            size_bytes = len(os.fsencode(word))
        except UnicodeEncodeError:
            raise ConfigError(f"{word!r:.80} cannot be a word of a command: give text that UTF-8 has") from None
        if "\0" in word:
            raise ConfigError(f"{word!r:.80} has a NUL, which no word of a command can have: leave it out")
        if size_bytes > MAX_WORD_BYTES:
            what = f"{word!r:.40} has {size_bytes} bytes, and a word of a command at most {MAX_WORD_BYTES}"
            raise ConfigError(f"{what}: put it into a file")
    return argv


def checked_name(name: str, most_bytes: int = MAX_NAME_BYTES) -> str:
    """Return a name that a job may have.

    Raises:
        ConfigError: It has other characters, or more bytes.
    """
    if not name or fitting_name(name) != name or len(name.encode()) > most_bytes:
        raise ConfigError(
            f"{name!r} is not a job name: give letters, digits and any of . _ + = @ , - in at most {most_bytes} bytes"
        )
    return name


def _unique(wanted: Sequence[str]) -> list[str]:
    """Return ``wanted`` with ``-2``, ``-3`` ... appended where a name occurred before."""
    names: list[str] = []
    for name in wanted:
        candidates = itertools.chain([name], (f"{name}-{count}" for count in itertools.count(2)))
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return names


# -- the environment of a job: the user's own, and what switches Zico on in it ---------------------

PACKAGE = Path(zico.launch.__file__).parent.parent
INJECT = PACKAGE / "job" / "inject"
# Of a surrounding `zico run`: here they would make a process believe that it is part of that one's
# job.
_NOT_INHERITED = (
    "ZICO_OWNER_PID",
    JOB_VARIABLE,
    RUN_VARIABLE,
    STARTING_VARIABLE,
    *shares.VARIABLES.values(),
    *saving.VARIABLES.values(),
)


def job_environment(
    environ: Mapping[str, str],
    socket: Path,
    name: str,
    share: Share = DEFAULT_SHARE,
    wish: Wish = DEFAULT_WISH,
    run: str = "",
) -> dict[str, str]:
    """Return ``environ`` with what makes a Python process in it join the broker at ``socket`` as ``name``.

    ``run`` tells the run's jobs from others of that name in the pool.
    """
    job = {key: value for key, value in environ.items() if key not in _NOT_INHERITED}
    # An empty entry in PYTHONPATH means the current directory: add none.
    entries = [str(INJECT), *filter(None, [environ.get("PYTHONPATH")])]
    job |= {
        SOCKET_VARIABLE: str(socket),
        JOB_VARIABLE: name,
        **({RUN_VARIABLE: run} if run else {}),
        "ZICO_PACKAGE_PATH": str(PACKAGE.parent),
        "PYTHONPATH": os.pathsep.join(entries),
        "PYTHONUNBUFFERED": "1",
        **shares.variables_of(share),
        **saving.variables_of(wish),
    }
    return job


# -- what a supervisor tells the one who started it. The library prints nothing itself -------------


class Stream(enum.Enum):
    """Which of a job's output streams."""

    STDOUT = "stdout"
    STDERR = "stderr"


class Listener:
    """Whoever shows the run, nothing of it as it is here; called by the supervisor's thread, once at a time."""

    interval_s = 3600.0
    """How often to be told of the progress."""

    def output(self, name: str, stream: Stream, lines: list[bytes]) -> None:
        """Pass on complete lines, without their ends, of the job called ``name``.

        Raises:
            BrokenPipeError: Nobody reads any more; the run then ends as on SIGTERM.
        """

    def message(self, text: str) -> None:
        """Say one line about the run itself that a quiet run can do without."""

    def problem(self, text: str) -> None:
        """Say one line that the user must see."""

    def progress(self, snapshot: Snapshot) -> None:
        """Show how far the run is."""


# --------------------------------------------------------------------------------------------------

NOT_FOUND_CODE = 127
NOT_EXECUTABLE_CODE = 126
"""Both codes are those of POSIX shells."""

Output = Callable[[str, Stream, list[bytes]], None]


class Job:
    """A command on its way from being started to its exit code."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.child: Child | None = None
        self.exit_code: int | None = None
        self.processors: frozenset[int] = frozenset()
        """Those of the host on which it runs, if it has a share of them; else none."""
        self.wall_s = 0.0
        self.ended_s = 0.0
        """When it ended, on the monotonic clock."""
        self._started_s = time.monotonic()
        self._pipes: list[LinePipe] = []

    @property
    def living(self) -> bool:
        """Say whether a process of it may live."""
        return self.child is not None and self.exit_code is None

    def start(self, environ: Mapping[str, str], *, takes_input: bool) -> str | None:
        """Start the command; return why it could not be started, else ``None``.

        Args:
            environ: The job's whole environment.
            takes_input: Let it read our standard input instead of nothing.
        """
        self._started_s = time.monotonic()
        try:
            self.child = Child(self.command.argv, environ, stdin=None if takes_input else subprocess.DEVNULL)
        except OSError as error:
            found = not isinstance(error, FileNotFoundError)
            self.exit_code = NOT_EXECUTABLE_CODE if found else NOT_FOUND_CODE
            self.ended_s = time.monotonic()
            return self._why_not(error)
        return None

    async def run(self, output: Output, guardian: Watchdog, grace_s: float) -> int:
        """Pass its output on until it has ended, end what it left behind, and keep its exit code.

        Changes ``exit_code``, ``wall_s`` and ``ended_s``. The wait for the process itself has no
        deadline: that is how long training takes.

        Returns:
            How many processes it left behind that had to be ended.
        """
        child = cast("Child", self.child)
        for stream, pipe in zip(Stream, child.pipes, strict=True):
            self._pipes.append(await LinePipe.connect(pipe, partial(output, self.command.name, stream)))
        await child.ended()
        self.ended_s = time.monotonic()
        self.wall_s = self.ended_s - self._started_s
        left = await child.end_session(quiet_s=LEFT_BEHIND_S, grace_s=grace_s)
        # Processes that have left the session may still hold the pipes.
        await asyncio.gather(*(pipe.close(wait_s=LEFT_BEHIND_S) for pipe in self._pipes))
        guardian.remove(child.pid)
        self.exit_code = child.reap()
        return left

    def expire_output(self) -> None:
        """Pass on output that has been held back for long enough."""
        for pipe in self._pipes:
            pipe.expire()

    def _why_not(self, error: OSError) -> str:
        program = self.command.argv[0]
        if self.exit_code == NOT_EXECUTABLE_CODE:
            return f"{self.command.name}: cannot run {program!r}: {(error.strerror or str(error)).lower()}"
        text = f"{self.command.name}: the program {program!r} does not exist"
        if len(self.command.argv) == 1:
            return f'{text}; a whole command goes into one pair of quotes ("python train.py") or after --'
        if "=" in program:
            return f"{text}; to set a variable put env before it: env {self.command.text}"
        return text
