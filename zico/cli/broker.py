"""``zico broker``: a broker of a device, in the foreground or as a daemon, which jobs join later."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.core import ParameterSource

from zico.base.errors import CommandError, ConfigError, ZicoError
from zico.base.rundir import base_directory, socket_for
from zico.base.settings import DEFAULT_EXPECTED_JOBS, SOCKET_VARIABLE, device_of, devices_of
from zico.base.units import format_bytes
from zico.broker.client import BrokerClient
from zico.broker.notes import is_served, read_head
from zico.broker.starting import lines_of, start_broker, words_of
from zico.cli.options import (
    SOCKET,
    WORDS,
    PoolCommand,
    PoolGroup,
    described,
    given_in,
    json_option,
    pool_options,
    setting,
    settings_from,
    settings_of_each,
    told_as_json,
)
from zico.launch.brokers import ANSWER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.broker.notes import Head

END_S = 10.0
"""A broker may take so long to end."""
LOG_SUFFIX = ".log"
STATUS_SCHEMA = "zico.daemons.v1"

_jobs = setting(
    "--jobs", metavar="N", help=f"How many jobs to keep the --reserve for (default: {DEFAULT_EXPECTED_JOBS})."
)
_device = setting("--device", metavar="DEVICE", help="host, cuda or cuda:N, or several: cuda:0,cuda:1 (default: host).")
_socket = click.option(
    "--socket",
    type=SOCKET,
    metavar="PATH",
    help="Where it listens (default: in the user's runtime directory).",
)
_mps = setting("--mps", flag_value="1", hidden=True)
_record = click.option(
    "--record",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="At the end, write what happened to this .npz file.",
)


class _StartCommand(PoolCommand):
    """Keeps the words that it was given, for the process that it starts."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = tuple(args)
        return super().parse_args(ctx, args)


@click.group(cls=PoolGroup, invoke_without_command=True)
@pool_options
@_mps
@_jobs
@_socket
@_record
@click.option("--until", type=int, metavar="PID", help="End when process PID and the last job have ended.")
@click.pass_context
def broker(
    ctx: click.Context, /, *, socket: Path | None, record: Path | None, until: int | None, **_settings: object
) -> int:
    """Run a broker without jobs; they join it later.

    It prints "ready" when jobs can join, and "compiling" before that if it has to compile. It runs
    until Ctrl-C. Scripts join it that import an adapter (import zico.adapters.torch); with --socket,
    those for which ZICO_SOCKET names it.

    "zico broker start" does the same in the background, as the daemon of a device.
    """
    if ctx.invoked_subcommand is not None:
        for option in ctx.params:
            if ctx.get_parameter_source(option) is ParameterSource.COMMANDLINE:
                raise click.UsageError(
                    f"--{option.replace('_', '-')} stands before {ctx.invoked_subcommand}: give options after it", ctx
                )
        return 0
    settings = settings_from(ctx)
    path = socket or socket_for(settings.device.value)
    click.echo(f"zico: {described(settings)}", err=True)
    if settings.warning:
        click.echo(f"zico: {settings.warning}", err=True)
    if settings.mps.value:
        _say_if_no_mps(settings.mps.origin)
    click.echo(f"zico: jobs join with {SOCKET_VARIABLE}={path}", err=True)

    from zico.broker.__main__ import main

    arguments = words_of(settings, path)
    if until is not None:
        arguments += ["--parent-pid", str(until)]
    if record is not None:
        arguments += ["--record", str(record)]
    if not settings.metrics.value:
        return main(arguments)
    from zico.broker.metrics import Address

    with Address(settings.metrics) as address:
        click.echo(f"zico: metrics: {address.url}", err=True)
        return main([*arguments, "--metrics-fd", str(address.socket.detach())])


def _say_if_no_mps(origin: str) -> None:
    from zico.base.mps import CONTROL, daemon_at

    if daemon_at(os.environ) is None:
        click.echo(f"zico: {origin}: zico broker starts no MPS daemon: start {CONTROL} -d before it", err=True)


# -- the daemon of a device ------------------------------------------------------------------------


@broker.command(cls=_StartCommand)
@pool_options
@_mps
@_jobs
@_socket
@_record
@click.pass_context
def start(ctx: click.Context, /, *, socket: Path | None, **_settings: object) -> int:
    """Start a broker in the background; returns when jobs can join it. Several devices get one each.

    If jobs of a broker that has ended still run, this one takes their pool over. If the broker of
    one device cannot start, those of the devices before it are stopped again.
    """
    from zico.broker.handover import check_previous

    places = _places(ctx, socket)
    each = settings_of_each(ctx)
    metrics = each[0].metrics
    if len(places) > 1 and metrics.value:
        raise ConfigError(
            f"{metrics.origin}: {len(places)} brokers cannot serve metrics at one place: start them one after another, "
            "each with a port of its own"
        )
    for _, path in places:
        _refuse_second(path)
        check_previous(path)
    ready: list[str] = []
    try:
        for (device, path), settings in zip(places, each, strict=True):
            words = [*ctx.meta[WORDS], *([] if socket else ["--socket", str(path)])]
            if len(places) > 1:
                words += ["--device", device, "--budget", f"{settings.budget_bytes.value}B"]
            ready.append(_start(device, path, words))
    except BaseException as error:
        stopped = [device for device, path in places[: len(ready)] if _ended(device, path)]
        if stopped and isinstance(error, ZicoError):
            told = f"{error}; that of {', '.join(stopped)} has been stopped again"
            raise CommandError(told, exit_code=getattr(error, "exit_code", 1)) from None
        raise
    for line in ready:
        click.echo(line)
    return 0


def _refuse_second(path: Path) -> None:
    head = read_head(path)
    if head is not None and is_served(head, path):
        raise CommandError(
            f"a broker of {head.device} runs already (process {head.broker.pid}, {path}): jobs join it; zico broker "
            "stop ends it",
            exit_code=1,
        )


def _start(device: str, path: Path, words: Sequence[str]) -> str:
    """Start the broker of a device by these words of a command line, wait until jobs can join it, and say so.

    Nothing of it is left where it fails.
    """
    log = path.with_suffix(LOG_SUFFIX)
    with contextlib.ExitStack() as undo:
        # Ctrl-C may come as soon as the file is there, so what removes it stands before.
        undo.callback(_remove, log)
        with _new_log(log) as said:
            lines = start_broker(words, said, lambda text: click.echo(f"zico: {text}", err=True))
            if lines is not None:
                raise CommandError(f"the broker of {device} could not start: {_last_of(lines)}", exit_code=1)
            undo.pop_all()
            for line in lines_of(said):
                click.echo(line, err=True)
    head = read_head(path)
    process = f" (process {head.broker.pid})" if head else ""
    return f"the broker of {device} is ready{process}"


@broker.command(cls=PoolCommand)
@_device
@_socket
@click.pass_context
def stop(ctx: click.Context, /, *, socket: Path | None, **_settings: object) -> int:
    """End the broker of a device, of any version of Zico. Its jobs run on by themselves."""
    for device, path in _places(ctx, socket):
        _stop(device, path)
    return 0


def _stop(device: str, path: Path) -> None:
    head = read_head(path)
    if not _ended(device, path):
        left = f"; {_named(head)} run on, and zico broker start takes their pool over" if _lives(head) else ""
        raise CommandError(f"no broker of {device} runs at {path}{left}", exit_code=1)
    process = f" (process {head.broker.pid})" if head else ""
    click.echo(f"the broker of {device}{process} has ended")
    after = read_head(path)
    if _lives(after):
        click.echo(f"{_named(after)} run on by themselves; zico broker start takes their pool over")


def _ended(device: str, path: Path) -> bool:
    """End the broker at a socket and wait ``END_S`` at most; return whether one ran there.

    Raises:
        CommandError: It has not ended by then.
    """
    head = read_head(path)
    pidfd = None if head is None else head.broker.watch()
    if head is None or pidfd is None:
        if head is not None and is_served(head, path):
            raise CommandError(
                f"the broker of {device} runs in another container (pid namespace): end it there", exit_code=1
            )
        return False
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if not select.select([pidfd], [], [], END_S)[0]:
            raise CommandError(
                f"the broker of {device} has not ended within {END_S:g} s: kill -9 {head.broker.pid} ends it, and "
                "its jobs run on",
                exit_code=1,
            )
    finally:
        os.close(pidfd)
    path.with_suffix(LOG_SUFFIX).unlink(missing_ok=True)
    return True


@broker.command(cls=PoolCommand, hidden=True)
@pool_options
@_mps
@_jobs
@_socket
@click.pass_context
def compare(ctx: click.Context, /, *, socket: Path | None, **_settings: object) -> int:
    """Print which settings the broker that runs has otherwise: for a script that joins it by itself."""
    from zico.cli.daemon import told_to_script

    ((_, path),) = _places(ctx, socket)
    if told := told_to_script(ctx, path):
        click.echo(told)
    return 0


class Daemon(msgspec.Struct, frozen=True):
    """One broker, as ``zico broker status --json`` tells of it."""

    device: str
    socket: str
    pid: int
    zico: str
    """The version of Zico that it is of."""
    state: str
    """``running``; or ``ended``: its jobs run on by themselves."""
    jobs: tuple[str, ...]
    """Each with its process."""
    budget_bytes: int = 0
    granted_bytes: int = 0
    uptime_s: float = 0.0
    problem: str = ""
    """Why it gives no figures."""


@broker.command(cls=PoolCommand)
@_device
@_socket
@json_option
@click.pass_context
def status(ctx: click.Context, /, *, socket: Path | None, json_path: Path | None, **_settings: object) -> int:
    """Say which brokers run, and which pools have lost theirs. Exit code: 0 if a broker runs, else 1."""
    chosen = socket is not None or ctx.get_parameter_source("device") is ParameterSource.COMMANDLINE
    paths = [path for _, path in _places(ctx, socket)] if chosen else known()
    found = [daemon for daemon in map(_look, paths) if daemon is not None]
    if not told_as_json({"schema_version": STATUS_SCHEMA, "brokers": found}, json_path):
        for daemon in found:
            click.echo(_line(daemon))
        if not found:
            click.echo("no broker runs" + (f" at {paths[0]}" if chosen else ""))
    return 0 if any(daemon.state == "running" for daemon in found) else 1


def known() -> list[Path]:
    """Return the sockets at which a broker of this user's has listened, the host's first."""
    notes = base_directory().glob("broker*.json")
    return sorted((note.with_suffix(".sock") for note in notes), key=lambda path: (len(path.name), path.name))


def _look(path: Path) -> Daemon | None:
    """Return what is known of the broker at a socket; ``None`` if neither it nor one of its jobs lives."""
    head = read_head(path)
    if head is None:
        return None
    runs = is_served(head, path)
    if not (runs or head.living):
        return None
    seen = Daemon(
        device=head.device,
        socket=str(path),
        pid=head.broker.pid,
        zico=head.zico,
        state="running" if runs else "ended",
        jobs=tuple(map(str, head.living)),
    )
    if not runs:
        return seen
    try:
        with BrokerClient(path, ANSWER_S) as client:
            now = client.status()
    except ZicoError as error:
        return msgspec.structs.replace(seen, problem=str(error))
    return msgspec.structs.replace(
        seen,
        # Also those in other containers: by their numbers the note's would be dead.
        jobs=tuple(f"{job.name} (process {job.pid})" for job in now.jobs),
        budget_bytes=now.budget_bytes,
        granted_bytes=now.granted_bytes,
        uptime_s=now.uptime_s,
    )


def _line(daemon: Daemon) -> str:
    jobs = ", ".join(daemon.jobs) or "no job"
    if daemon.state == "ended":
        return (
            f"{daemon.device}: the broker (process {daemon.pid}) has ended; {jobs} run on, and zico broker start takes "
            "their pool over"
        )
    if daemon.problem:
        return f"{daemon.device}: broker of Zico {daemon.zico} (process {daemon.pid}), {jobs}: {daemon.problem}"
    return (
        f"{daemon.device}: broker (process {daemon.pid}, for {daemon.uptime_s:.0f} s), granted "
        f"{format_bytes(daemon.granted_bytes)} of {format_bytes(daemon.budget_bytes)}, {jobs}"
    )


def _places(ctx: click.Context, socket: Path | None) -> list[tuple[str, Path]]:
    """Return the devices that a command is about, with their sockets; a named socket is for one device."""
    if socket is not None:
        return [(device_of(given_in(ctx)).value, socket)]
    return [(device.value, socket_for(device.value)) for device in devices_of(given_in(ctx))]


def _new_log(path: Path) -> Any:  # noqa: ANN401 - a file that is also a context
    try:
        path.unlink(missing_ok=True)
        return path.open("x+b")
    except OSError as error:
        raise ConfigError(f"the broker's log {path} cannot be written: {error.strerror}") from None


def _remove(log: Path) -> None:
    """Remove a broker's log if that is possible: a folder that refuses it has been told of by ``_new_log``."""
    with contextlib.suppress(OSError):
        log.unlink()


def _last_of(lines: Sequence[str]) -> str:
    return lines[-1].removeprefix("zico: ").removeprefix("zico broker: ").removeprefix("ERROR ")


def _lives(head: Head | None) -> bool:
    return head is not None and bool(head.living)


def _named(head: Head | None) -> str:
    return ", ".join(map(str, head.living)) if head else ""
