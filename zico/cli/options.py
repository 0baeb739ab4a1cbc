"""Options that are settings, where they may be given, and the settings made of them.

Precedence, by click: command line, environment variable, settings file, default. The user's
settings file says the same as the options, in TOML, for what is always the same::

    # ~/.config/zico/config.toml
    device = "cuda:0"
    budget = "80%"
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from zico.base.decoding import to_json
from zico.base.errors import CommandError, ConfigError, ZicoError
from zico.base.paths import SETTINGS_VARIABLE, settings_file
from zico.base.settings import (
    DEFAULT_AVAILABLE_PERCENT,
    DEFAULT_CUDA_REGION_BYTES,
    DEFAULT_CUDA_RESERVE,
    DEFAULT_LOG_LEVEL,
    DEFAULT_POLICY,
    DEFAULT_REGION_BYTES,
    HOST,
    LOG_LEVELS,
    Setting,
    Settings,
    device_of,
    devices_of,
    kind_of,
    resolve,
)
from zico.base.units import format_bytes
from zico.launch.devices import memory_of
from zico.scheduler.policies import POLICIES, REAL, check_real

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zico.base.settings import Given
    from zico.broker.protocol.messages import Share

Function = TypeVar("Function", bound=Callable[..., Any])

KEYS = (
    *("budget", "device", "policy", "region", "grace", "log-level", "isolate", "mps", "most", "weight", "priority"),
    *("slo", "compute", "save", "limit", "tier", "share-frozen", "reserve", "jobs", "metrics"),
)
"""A settings file may have these: the options that are settings."""
_FILE = "zico.settings_file"


class Option(click.Option):
    """An option whose text may be in an environment variable or in the settings file as well."""

    def value_from_envvar(self, _ctx: click.Context) -> Any:  # noqa: ANN401 - as click says
        """Return the variable's text as it is: neither split nor taken for a flag; empty is as good as missing."""
        text = os.environ.get(str(self.envvar)) or None
        return (text,) if text is not None and self.multiple else text


class SocketPath(click.ParamType):  # type: ignore[type-arg, unused-ignore] # click before 8.4 has no parameter
    """A path that a socket may have: files beside it, such as its lock, have longer names."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:  # noqa: ANN401 - click's
        """Return the path; a folder, or what no file may be called, ends the command."""
        path = Path(value)
        if not path.name or path.name == ".." or "\0" in str(value):
            self.fail(f"{str(value)!r} cannot be a socket: give the path of one", param, ctx)
        return path


SOCKET = SocketPath()


class PoolCommand(click.Command):
    """A command with settings, which the user's settings file gives where nothing else does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the file, unless only help is wanted or nothing is a setting, then parse."""
        options = [option for option in self.params if isinstance(option, Option)]
        if options and not set(ctx.help_option_names) & set(args):
            ctx.meta[_FILE], values = read_settings()
            ctx.default_map = {
                str(option.name): (values[key],) if option.multiple else values[key]
                for option in options
                if (key := _key_of(option)) in values
            }
        return super().parse_args(ctx, args)


class PoolGroup(PoolCommand, click.Group):
    """A command with settings that also has commands of its own."""


def setting(name: str, **how: Any) -> Callable[[Function], Function]:  # noqa: ANN401 - as click says
    """Return what adds an option ``--name`` to a command, which ``ZICO_NAME`` and the settings file may give, too."""
    field = name.removeprefix("--").replace("-", "_")
    return click.option(name, field, cls=Option, envvar=f"ZICO_{field.upper()}", **how)


def _key_of(option: click.Parameter) -> str:
    return str(option.name).replace("_", "-")


_POOL_OPTIONS = (
    setting(
        "--budget",
        metavar="SIZE",
        help="Memory that all jobs share: 20GiB, 512M, 50%, or none for all there is "
        f"(default: {DEFAULT_AVAILABLE_PERCENT} % of what is free).",
    ),
    setting(
        "--reserve",
        metavar="SIZE",
        help="Memory kept free for each job's context and workspaces "
        f"(default: none; {DEFAULT_CUDA_RESERVE} on a GPU).",
    ),
    setting(
        "--device",
        metavar="DEVICE",
        help="host, cuda or cuda:N (default: host); zico run takes several with commas between them.",
    ),
    setting(
        "--policy",
        metavar="NAME",
        help=f"The scheduler: {', '.join(REAL)} (default: {DEFAULT_POLICY}).",
        shell_complete=lambda _context, _option, begun: [name for name in REAL if name.startswith(begun)],
    ),
    setting(
        "--region",
        metavar="SIZE",
        help=f"Unit of memory, a power of two (default: {format_bytes(DEFAULT_REGION_BYTES)}; "
        f"on a GPU 2 MiB to {format_bytes(DEFAULT_CUDA_REGION_BYTES)}, by the budget).",
    ),
    setting(
        "--isolate",
        flag_value="1",
        help="Clear memory before another job gets it, and unmap it from the job that returned it. Costs time.",
    ),
    setting(
        "--most",
        metavar="SIZE",
        help="The highest budget that zico limit may set (default: the machine's memory; the budget on a GPU).",
    ),
    setting(
        "--metrics",
        metavar="PORT|PATH",
        help="Serve metrics for Prometheus at this port of 127.0.0.1 (0: any free one), or at a Unix socket.",
    ),
    setting(
        "--log-level",
        metavar="LEVEL",
        help=f"What the broker logs: {', '.join(LOG_LEVELS)} (default: {DEFAULT_LOG_LEVEL}).",
    ),
)


def pool_options(function: Function) -> Function:
    """Add the options that describe a pool."""
    for option in reversed(_POOL_OPTIONS):
        function = option(function)
    return function


def given_in(ctx: click.Context) -> dict[str, Setting[str]]:
    """Return what was given to a command, with where from; of an option that was given several times a list."""
    given = {}
    for option in ctx.command.params:
        source = ctx.get_parameter_source(str(option.name))
        if isinstance(option, Option) and source not in (None, ParameterSource.DEFAULT):
            value = ctx.params[str(option.name)]
            origins = {
                ParameterSource.ENVIRONMENT: str(option.envvar),
                ParameterSource.DEFAULT_MAP: f"{_key_of(option)} in {ctx.meta[_FILE]}",
            }
            text = ",".join(value) if option.multiple else value
            given[str(option.name)] = Setting(text, origins.get(source, option.opts[0]))
    return given


@click.command(cls=PoolCommand)
@pool_options
def _pool(**_given: str | None) -> None:
    """Stand for commands that have few options of a pool or none."""


def settings_with(words: Sequence[str], n_jobs: int | None = None) -> Settings:
    """Return the settings where the command line is these words; of several devices those of the first."""
    given = given_in(_pool.make_context("zico", list(words)))
    return _resolved(given, devices_of(given)[0], n_jobs)


def settings_from(ctx: click.Context) -> Settings:
    """Return the settings of a command about one device and this machine.

    Raises:
        ConfigError: One of them cannot be used, or several devices are given.
    """
    given = given_in(ctx)
    return _resolved(given, device_of(given), None)


def settings_of_each(
    ctx: click.Context, n_jobs: int | None = None, taken_bytes: Mapping[str, int] | None = None
) -> tuple[Settings, ...]:
    """Return the settings of a command for each device that is given, for so many jobs in all if that is known.

    A share of the memory is one of each device's. Several pools on the host have equal parts of the
    machine's.

    Args:
        ctx: Of the command.
        n_jobs: How many jobs there will be.
        taken_bytes: By device: what the pool that jobs are to join has taken of its memory, which
            counts as available.

    Raises:
        ConfigError: One of them cannot be used.
    """
    given = given_in(ctx)
    devices = devices_of(given)
    on_host = sum(kind_of(device.value) == HOST for device in devices)
    on_each = None if n_jobs is None else -(-n_jobs // len(devices))
    taken = taken_bytes or {}
    return tuple(_resolved(given, device, on_each, on_host, taken.get(device.value, 0)) for device in devices)


def _resolved(
    given: Given, device: Setting[str], n_jobs: int | None, on_host: int = 1, taken_bytes: int = 0
) -> Settings:
    memory = memory_of(device, on_host)
    if memory.is_taken_at_once:
        memory = dataclasses.replace(memory, available_bytes=memory.available_bytes + taken_bytes)
    settings = resolve(given, memory, POLICIES, n_jobs, device)
    try:
        check_real(settings.policy.value)
    except ConfigError as error:
        raise ConfigError(f"{settings.policy.origin}: {error}") from None
    return settings


def read_settings() -> tuple[str, dict[str, str]]:
    """Return the path of the file that ``ZICO_CONFIG`` names, else of the user's own, and what it says, as text.

    Nothing if the user's own is missing.

    Raises:
        ConfigError: It cannot be read, is not TOML, or has a setting that there is not.
    """
    path = settings_file()
    try:
        text = path.read_text()
    except FileNotFoundError:
        if not os.environ.get(SETTINGS_VARIABLE):
            return "", {}
        raise ConfigError(f"{SETTINGS_VARIABLE}: the file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings file {path} cannot be read: {error}") from None
    return str(path), _values(path, text)


def _values(path: Path, text: str) -> dict[str, str]:
    try:
        found = tomllib.loads(text)
    except ValueError as error:  # of a number with thousands of digits, too
        raise ConfigError(f"the settings file {path} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"the settings file {path} is nested too deeply: give text or numbers") from None
    for key, value in found.items():
        if key not in KEYS:
            raise ConfigError(f"{key!r} in {path} is not a setting: give some of {', '.join(KEYS)}")
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{key} in {path} is neither text nor a number: give it as on the command line")
    return {key: str(value) for key, value in found.items()}


def described(settings: Settings) -> str:
    """Return the settings with their origins, as one line."""
    parts = {
        "budget": (format_bytes(settings.budget_bytes.value), settings.budget_bytes.origin),
        "reserve": (f"{format_bytes(settings.reserve_bytes.value)} a job", settings.reserve_bytes.origin),
        "jobs": (str(settings.expected_jobs.value), settings.expected_jobs.origin),
        "device": (settings.device.value, settings.device.origin),
        "policy": (settings.policy.value, settings.policy.origin),
        "region": (format_bytes(settings.region_bytes.value), settings.region_bytes.origin),
    }
    if not settings.reserve_bytes.value:
        del parts["reserve"], parts["jobs"]
    if settings.isolate.value:
        parts["isolate"] = ("on", settings.isolate.origin)
    return ", ".join(f"{name} {value} ({origin})" for name, (value, origin) in parts.items())


# -- exit codes that answer a question, and errors that must not be taken for an answer ------------


@contextlib.contextmanager
def errors_end_with(exit_code: int) -> Iterator[None]:
    """Let every error inside end the command with this code."""
    try:
        yield
    except ZicoError as error:
        raise CommandError(str(error), exit_code=exit_code) from error


# -- files that options name -----------------------------------------------------------------------

STDOUT = Path("-")
json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    metavar="[=FILE]",
    help="Print the figures as JSON, and nothing else to stdout; --json=FILE writes them to FILE.",
)
_PERCENT = 0.01
_TOOK_A_FILE = ("run", "plan", "simulate")


def with_json_words(words: Sequence[str]) -> list[str]:
    """Let ``--json`` without ``=FILE`` mean stdout; some commands also take ``--json FILE.json``."""
    ours = words[: words.index("--")] if "--" in words else words
    found = []
    for i, word in enumerate(ours):
        following = ours[i + 1] if i + 1 < len(ours) else ""
        has_file = words[0] in _TOOK_A_FILE and _is_json_file(following)
        found.append("--json=-" if word == "--json" and not has_file else word)
    return [*found, *words[len(ours) :]]


def _is_json_file(word: str) -> bool:
    """Tell whether a word is a file's name, and not a command whose last word is one."""
    named = Path(word)
    return word == "-" or (named.suffix == ".json" and (" " not in word or (named.parent.is_dir() and "/" in word)))


"""Options that name a file take this for standard output."""


def check_outputs(json_path: Path | None, report_dir: Path | None) -> None:
    """Refuse outputs that could not be written, before the work and not after it; makes the report's directory.

    Raises:
        ConfigError: One of them could not.
    """
    if json_path is not None and json_path != STDOUT and not json_path.parent.is_dir():
        raise ConfigError(f"--json: the directory {str(json_path.parent)!r} does not exist")
    if report_dir is not None:
        try:
            report_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--report: cannot write to {str(report_dir)!r}: {error.strerror}") from None


def write_json(found: object, path: Path | None) -> None:
    """Write figures to a file, atomically, or to stdout; ``None``: nowhere.

    Raises:
        OSError: The file cannot be written.
    """
    from zico.report.files import write_atomically

    if path == STDOUT:
        click.echo(to_json(found), nl=False)
    elif path is not None:
        write_atomically(path, to_json(found))


def told_as_json(found: object, path: Path | None) -> bool:
    """Write figures where ``--json`` says, if it is given, and tell whether that was stdout, for nothing else then."""
    with writing_to(path or STDOUT):
        write_json(found, path)
    return path == STDOUT


def write_file(path: Path, content: bytes) -> None:
    """Write a file, atomically; one that cannot be written ends the command."""
    from zico.report.files import write_atomically

    with writing_to(path):
        write_atomically(path, content)


@contextlib.contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Let a file that cannot be written inside end the command."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path}: cannot be written ({error.strerror}): give another path", exit_code=1) from error


# --------------------------------------------------------------------------------------------------


def compute_text(share: Share) -> str:
    """Return the most that a job may use of the processors; empty: all."""
    return "" if share.compute == 1 else f"{share.compute:.{0 if share.compute >= _PERCENT else 1}%}"


def share_text(share: Share) -> str:
    """Return what a job gets beside the others."""
    parts = [f"weight {share.weight:g}"]
    if share.priority:
        parts.append(f"priority {share.priority}")
    if share.slo is not None:
        parts.append(f"at most {share.slo:.0%} slower")
    if share.compute < 1:
        parts.append(f"{compute_text(share)} of the processors")
    return ", ".join(parts)


# --------------------------------------------------------------------------------------------------
# A command that knows whether ``--`` was given: click alone cannot tell its arguments from those
# before it.

whole_option = click.option(
    "--whole", is_flag=True, help="Take a trace as one iteration, such as a snapshot of one or two steps."
)
AFTER_DASHES = "zico.after_dashes"
"""Key in ``click.Context.meta``; absent without ``--``."""
WORDS = "zico.words"
"""Key in ``click.Context.meta``: the command line as it was, a tuple of words."""


class DashesCommand(PoolCommand):
    """All that follows the first ``--`` is one command of the user's, kept apart from our options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before ``--`` and keep the rest."""
        ctx.meta[WORDS] = tuple(args)
        if "--" in args:
            at = args.index("--")
            ctx.meta[AFTER_DASHES] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)
