"""``python -m zico.broker``: create a pool and serve it until SIGTERM or SIGINT.

Says ``ready`` on stdout, or on the descriptor that ``--ready-fd`` names, when jobs can join. If it
has to compile, it says ``compiling`` before. It logs on stderr. Exit code: 0 after a clean end, 2
for a setting that cannot be used, 1 if another broker lives or the device refuses.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from zico.base.errors import ConfigError, ZicoError
from zico.base.interpreter import at_limit
from zico.base.mps import daemon_at
from zico.base.programs import program_of
from zico.base.settings import HOST, kind_of
from zico.base.units import format_bytes
from zico.base.warming import BROKERS, called, compile_all, load, missing
from zico.broker.devices import Device, facts_of, open_device
from zico.broker.handover import NoteKeeper, check_previous, take_over
from zico.broker.lingering import Contexts
from zico.broker.notes import show_budget
from zico.broker.outside import Outside
from zico.broker.pool_manager import PoolManager
from zico.broker.protocol.messages import as_text
from zico.broker.server import FDS_PER_LINK, MAX_LINKS, Server
from zico.broker.starting import COMPILING, READY
from zico.broker.transport import SPARE_FDS, Descriptors, Listener, make_room, place_of
from zico.pool.table import PoolTable
from zico.scheduler.policies import policy_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zico.broker.handover import Inherited
    from zico.scheduler.state import Policy

_log = logging.getLogger("zico.broker")
_STDOUT_FD = 1

SCRUBS_FROM = (7, 0)
"""The compute capability that Zico's kernels need (``zico.kernels.compilation``)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the broker with these command-line arguments; return its exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=options.log_level.upper(), format="zico broker: %(levelname)s %(message)s"
    )
    try:
        serve(options)
    except ConfigError as error:
        _log.error("%s", error)
        return 2
    except (ZicoError, OSError) as error:
        _log.error("%s", at_limit(error) or error)
        return 1
    except RuntimeError as error:
        if not (told := at_limit(error)):
            raise
        _log.error("%s", told)
        return 1
    return 0


def serve(options: argparse.Namespace) -> None:
    """Create what the options name, serve it, and take it away again.

    Raises:
        ConfigError: An option cannot be used.
        BrokerError: Another broker lives at the socket.
        DriverError: The device cannot give the budget.
    """
    policy = policy_named(options.policy)
    with contextlib.ExitStack() as owned:
        parent_pidfd = None
        if options.parent_pid is not None:
            parent_pidfd = _pidfd(options.parent_pid)
            owned.callback(os.close, parent_pidfd)
        created = owned.enter_context(contextlib.ExitStack())
        kind = kind_of(options.device)
        its_own = program_of(policy.function.__module__).name
        needed = (*called(kind, paging=options.paging and kind == HOST), its_own) if options.warm else ()
        if missing(needed):
            os.write(options.ready_fd, COMPILING)
        # Before all is compiled: what cannot be is said at once.
        pool = None if check_previous(options.socket) else create_pool(options, policy, created)
        if options.warm:
            compile_all(*needed)
            load(*BROKERS, its_own)
        # Only now, since compiling takes long and a signal may well end it: there is nothing to
        # clean up yet.
        stop_fd = owned.enter_context(stop_signals())
        owned.enter_context(place_of(options.socket))
        inherited = take_over(options.socket)
        if inherited is not None:
            created.close()  # another broker has come and gone meanwhile
            options.policy = inherited.note.policy
            policy = policy_named(options.policy)
            pool = _inherited_pool(inherited, owned)
        device, table, memory_fds = pool or create_pool(options, policy, created)
        note = NoteKeeper(options.socket, table, memory_fds, device=device.name, policy=options.policy)
        outside = None if device.kind == HOST else Outside(device.identity, table.memory.size_bytes)
        manager = PoolManager(
            table, memory_fds, policy, device=device, outside=outside, record_path=options.record, note=note
        )
        if device.kind == HOST:
            manager.show_budget_by(show_budget)
        contexts = None if device.kind == HOST else Contexts(device.identity, options.mps_pipes)
        manager.about = {
            "parameters": as_text(options.policy.partition(":")[2]),
            "reserve_bytes": options.reserve_bytes,
            "log_level": options.log_level,
        }
        if contexts is not None and options.mps_pipes is not None:
            manager.about["mps"] = as_text(str(options.mps_pipes))
        # After what takes long, since from here on clients connect and expect an answer.
        listener = owned.enter_context(Listener(options.socket, has_place=True))
        server = Server(manager, listener, contexts)
        if inherited is not None:
            server.inherit(inherited, time.monotonic_ns())
            _log.warning("%s", _told(manager))
        note.write(manager.members)
        if options.metrics_fd is not None:
            from zico.broker.metrics import Endpoint, asked_at, url_of

            metrics = socket.socket(fileno=options.metrics_fd)
            manager.about["metrics"] = as_text(url_of(metrics))
            owned.enter_context(Endpoint(metrics, asked_at(options.socket)))
        os.write(options.ready_fd, READY)
        server.serve(stop_fd=stop_fd, parent_pidfd=parent_pidfd)
        note.close(manager.members)


Pool = tuple[Device, PoolTable, list[int]]
"""A pool on its device, and the descriptors by which jobs get its memory."""


def _inherited_pool(inherited: Inherited, owned: contextlib.ExitStack) -> Pool:
    """Return a pool that was taken over; ``owned`` closes all of it."""
    table = owned.enter_context(inherited.table)
    make_room(0, "a pool", MAX_LINKS * FDS_PER_LINK + SPARE_FDS)
    memory_fds = table.driver.export_pieces(table.memory)
    owned.enter_context(Descriptors(memory_fds))
    return Device(inherited.note.device, ""), table, memory_fds


def _told(manager: PoolManager) -> str:
    status = manager.status(time.monotonic_ns())
    jobs = ", ".join(f"{job.name} (process {job.pid})" for job in status.jobs) or "no job"
    return (
        f"took over a pool of {format_bytes(status.budget_bytes)} with {jobs}: budget, regions and policy stay as they "
        "were; zico limit changes the budget"
    )


def create_pool(options: argparse.Namespace, policy: Policy, owned: contextlib.ExitStack) -> Pool:
    """Create the pool on its device, and the descriptors by which jobs get its memory; ``owned`` closes all of it.

    Raises:
        ConfigError: The device is none, the sizes cannot be used, or too few descriptors may be
            open here.
        DriverError: The device cannot give the budget; nothing is left behind.
    """
    device, driver = open_device(options.device)
    owned.callback(driver.close)
    if options.isolate and device.kind != HOST:
        _check_scrubs(device, facts_of(device.name).compute_capability)
    most_bytes = max(options.budget_bytes, options.most_bytes)
    n_pieces = 0 if device.kind == HOST else most_bytes // max(1, options.region_bytes)
    whose = f"a pool of {n_pieces} regions"
    make_room(n_pieces, whose)
    table = owned.enter_context(
        PoolTable.create(
            budget_bytes=most_bytes,
            region_bytes=options.region_bytes,
            use_claims=policy.use_claims,
            self_admit=policy.self_admit,
            driver=driver,
            isolate=options.isolate,
        )
    )
    budget = options.budget_bytes // options.region_bytes
    if budget < 1:
        raise ConfigError(
            f"--budget-bytes {options.budget_bytes} is below one region: raise it or lower --region-bytes"
        )
    table.set_budget(budget)
    make_room(n_pieces, whose, MAX_LINKS * FDS_PER_LINK + SPARE_FDS)
    memory_fds = driver.export_pieces(table.memory)
    owned.enter_context(Descriptors(memory_fds))
    return device, table, memory_fds


def _check_scrubs(device: Device, compute_capability: tuple[int, int]) -> None:
    """Refuse to isolate jobs on a device that is too old for the kernel that scrubs."""
    if compute_capability < SCRUBS_FROM:
        found, needed = (".".join(map(str, version)) for version in (compute_capability, SCRUBS_FROM))
        raise ConfigError(
            f"--isolate: {device.name} has compute capability {found}, and scrubbing memory needs {needed}: leave "
            "--isolate out or use a GPU of 2017 (Volta) or later"
        )


@contextlib.contextmanager
def stop_signals() -> Iterator[int]:
    """Turn SIGTERM and SIGINT into bytes on the descriptor that this yields; a SIGINT that is ignored stays so."""
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    heard = [signal.SIGTERM] if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else [signal.SIGTERM, signal.SIGINT]
    before = {number: signal.signal(number, _ignore) for number in heard}
    wakeup_before = signal.set_wakeup_fd(write_fd)
    try:
        yield read_fd
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read_fd)
        os.close(write_fd)


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing: the wake-up descriptor has got the byte by now."""


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise ConfigError(f"--parent-pid {pid}: {error.strerror}; give the pid of a living process") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zico.broker", description="Own one pool of memory and its jobs.")
    parser.add_argument(
        "--socket", type=Path, required=True, help="Unix socket to listen on, in a directory of mode 0700"
    )
    parser.add_argument("--budget-bytes", type=int, required=True, help="bytes that all jobs together may hold")
    parser.add_argument(
        "--most-bytes", type=int, default=0, help="bytes to which that may be raised later (default: no more)"
    )
    parser.add_argument("--region-bytes", type=int, required=True, help="bytes of one region")
    parser.add_argument(
        "--reserve-bytes", type=int, default=0, help="bytes left free for each job beside the pool: only told to others"
    )
    parser.add_argument("--device", default=HOST, help="host, host:N or cuda:N (default: host)")
    parser.add_argument("--isolate", action="store_true", help="unmap what comes back, and scrub it before it goes out")
    parser.add_argument("--paging", action="store_true", help="compile what serves page faults beforehand, too")
    parser.add_argument(
        "--mps-pipes", type=Path, default=daemon_at(os.environ), help="directory of the MPS daemon that serves the jobs"
    )
    parser.add_argument("--policy", default="zico", help="NAME or NAME:KEY=VALUE,KEY=VALUE (default: zico)")
    parser.add_argument("--record", type=Path, help="file (.npz) for what happened, written at the end")
    parser.add_argument(
        "--ready-fd", type=int, default=_STDOUT_FD, help="descriptor that gets 'ready' (default: stdout)"
    )
    parser.add_argument("--metrics-fd", type=int, help="listening socket at which to serve metrics")
    parser.add_argument("--parent-pid", type=int, help="end when this process is dead and the last job is gone")
    parser.add_argument("--no-warm", dest="warm", action="store_false", help="do not compile the jobs' code beforehand")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="warning")
    return parser


if __name__ == "__main__":
    sys.exit(main())
