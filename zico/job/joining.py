"""The import is a front door: ``import zico.adapters.torch`` shares this process's memory with the user's other jobs.

How it works
    Without ``zico run`` nobody has told this process of a broker. Each user has at most one broker
    for a device that such processes join. It listens on a socket in the user's runtime directory.
    Where there is none the first process starts one, by ``zico broker``. That broker ends when the
    process and all other jobs have gone. Adapters are then enabled as under ``zico run``, when
    their framework is imported (``zico.job.autoload``).

Guarantees
    * Whatever fails costs one line on stderr, and the script goes on as without Zico.
    * A broker that is about to end is not joined: an open connection keeps it, and the next process
      starts another one.
    * ``ZICO=off`` makes all of it do nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from zico.base import interpreter
from zico.base.errors import BrokerError, ZicoError
from zico.base.paths import settings_file
from zico.base.rundir import socket_for
from zico.base.saying import inform
from zico.base.settings import (
    DEVICE_VARIABLE,
    HOST,
    JOB_VARIABLE,
    OF_A_BROKER,
    SOCKET_VARIABLE,
    SWITCH_VARIABLE,
    parse_devices,
)
from zico.base.units import format_bytes
from zico.broker.starting import start_broker
from zico.job import autoload, session

if TYPE_CHECKING:
    from zico.broker.client import BrokerClient
    from zico.broker.protocol.messages import Status

_LOOK_S = 0.01
_COMPARED_S = 30.0
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
"""Variables in which torchrun, MPI and Slurm number a job's processes on a machine."""
_ATTEMPTS = 5
"""A broker may end, or another process may start one, between two looks."""

_kept: list[BrokerClient] = []
"""The connection by which the broker knows that this process is there, before it joins."""


def join(budget: str | None = None, device: str | None = None, name: str | None = None) -> Status | None:
    """Share this process's memory with the user's other jobs on a device.

    ``import zico.adapters.torch``, or another adapter, does the same with the defaults. Frameworks
    that are imported already are shared from now on, others when they are imported.

    If the user has no broker for the device, this starts one and waits until it is ready. That
    takes a second; the first start on a machine compiles, which takes a minute. A line on stderr
    says which pool it is. If there is none, the line says why, and the script goes on as without
    Zico. Under ``zico run``, or in a pool already, the pool stays what it is.

    Args:
        budget: Of a broker that is to be started: ``8GiB``, ``75%``; by default as for
            ``zico broker``. A line on stderr says so where the pool has another one already.
        device: ``host`` or ``cuda:N``; by default as for ``zico broker``.
        name: What the job is called; by default as its script or its notebook.

    Returns:
        How the pool is now, before this process has a place in it; ``None``: it shares no memory.
    """
    from zico.broker.client import BrokerClient

    if not enter(budget, device, name):
        return None
    client = BrokerClient(Path(os.environ[SOCKET_VARIABLE]))
    try:
        return client.status()
    except BrokerError as error:
        autoload.complain("this process shares no memory", error)
        return None
    finally:
        client.close()


def enter(budget: str | None = None, device: str | None = None, name: str | None = None) -> bool:
    """Do what ``join`` does and tell whether this process is to share memory; under ``zico run`` nobody is asked."""
    if os.environ.get(SWITCH_VARIABLE) == "off":
        return False
    if not os.environ.get(SOCKET_VARIABLE):
        try:
            path = _open_pool(device, budget)
        except (ZicoError, OSError) as error:
            autoload.complain("this process shares no memory", error)
            return False
        os.environ[SOCKET_VARIABLE] = str(path)
        if name:
            os.environ[JOB_VARIABLE] = name
    if not any(isinstance(finder, autoload.Finder) for finder in sys.meta_path):
        autoload.install()
    return True


def leave() -> None:
    """Take no more memory from the pool, and wait for nobody at boundaries.

    At once on the host, on a GPU when the broker has heard of it. Tensors that are there stay, and
    count until they are freed or the process ends. Frameworks that are imported later are not
    shared. A process that has left cannot join again.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, autoload.Finder)]
    os.environ[SWITCH_VARIABLE] = "off"
    os.environ.pop(SOCKET_VARIABLE, None)
    joined = session.current()
    if joined is not None:
        joined.leave()
    while _kept:
        _kept.pop().close()


# -- the user's broker for a device ----------------------------------------------------------------


def _open_pool(device: str | None, budget: str | None) -> Path:
    """Return the socket of the user's broker for a device, which stays as long as this process does."""
    from zico.broker.client import BrokerClient

    # A framework takes its first device where the script names none: so does this, of several.
    named = device or os.environ.get(DEVICE_VARIABLE) or HOST
    first = parse_devices(named)[0]
    path = socket_for(first)
    device = first if device or first != named else None  # what ZICO_DEVICE names the broker reads itself
    started = False
    for _ in range(_ATTEMPTS):
        if path.is_socket():
            client = BrokerClient(path)
            try:
                status = client.status()
            except BrokerError:  # it has just ended, or was killed: its socket is stale
                client.close()
            else:
                _kept.append(client)
                others = len(status.jobs)
                how = "started by this process" if started else f"{others} other {'job' if others == 1 else 'jobs'}"
                budget_text = format_bytes(status.budget_bytes)
                inform(f"shares {budget_text} of {status.device}, {how}; {SWITCH_VARIABLE}=off leaves this out")
                _compare(path, first, budget)
                return path
        started = _start(path, device, budget)
    raise BrokerError(f"the broker at {path} does not answer: zico status shows whether it runs")


def _start(path: Path, device: str | None, budget: str | None) -> bool:
    """Start a broker and wait until it listens; false if another process was quicker.

    Raises:
        BrokerError: It cannot start; the message is what it said.
    """
    words = ["--socket", str(path), "--until", str(os.getpid())]
    words += [*(["--device", device] if device else []), *(["--budget", budget] if budget else [])]
    with tempfile.TemporaryFile() as said:
        lines = start_broker(words, said, inform)
    if lines is None:
        return True
    if "another broker lives" in lines[-1]:
        time.sleep(_LOOK_S)  # until that one listens
        return False
    raise BrokerError(f"the broker could not start: {lines[-1].removeprefix('zico: ')}")


def _compare(path: Path, device: str, budget: str | None) -> None:
    """Say which settings the pool to join has otherwise, in the words of ``zico run``, once for all ranks of a job.

    Another process finds that out: this one may be a launcher that forks, and may not open a GPU.
    """
    if any(os.environ.get(name, "0") != "0" for name in _LOCAL_RANKS):
        return
    variables = (f"ZICO_{name.upper().replace('-', '_')}" for name in OF_A_BROKER)
    words = ["--socket", str(path), "--device", device, *(["--budget", budget] if budget else [])]
    try:
        if not budget and not any(map(os.environ.get, variables)) and not settings_file().exists():
            return
        done = subprocess.run(  # noqa: S603 - this Python
            interpreter.command("-m", "zico", "broker", "compare", *words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMPARED_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        autoload.complain("settings were not compared with those of the pool", error)
        return
    told = done.stderr if done.returncode else done.stdout
    if told.strip():
        what = "settings were not compared with those of the pool: " if done.returncode else ""
        inform(what + told.strip().splitlines()[-1].removeprefix("zico: "))
