"""A daemon and two jobs in containers of their own, as far as the kernel makes them: one directory in common."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cpu.support.zico_process import ZicoRun, fifos
from support.harness import ANSWER_S, PROCESS, compile_once, until

from zico.base.errors import ZicoError
from zico.broker.client import BrokerClient

UNSHARE = ("unshare", "--pid", "--mount", "--ipc", "--net", "--fork", "--kill-child", "--mount-proc")
# No process sees another one's shared memory, or where its directory lies.
ENTER = (
    "mount -t tmpfs none /dev/shm && mount -t tmpfs none /mnt && mkdir -m 700 /mnt/pool && "
    'mount --bind "$0" /mnt/pool && exec "$@"'
)
REFUSED = subprocess.run(
    [*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
).returncode

pytestmark = pytest.mark.skipif(REFUSED != 0, reason="this system does not let this user make namespaces")


def container(shared: Path, command: str, *words: str) -> ZicoRun:
    """Start a command of Zico in namespaces of its own, with the directory at /mnt/pool."""
    program = (*UNSHARE, "sh", "-c", ENTER, str(shared), sys.executable, "-m", "zico")
    return ZicoRun(*words, command=command, program=program, XDG_RUNTIME_DIR="/mnt/pool")


def names(socket: Path) -> list[str]:
    """Return the jobs of the pool."""
    with contextlib.suppress(ZicoError, OSError), BrokerClient(socket) as client:
        return sorted(one.name for one in client.status().jobs)
    return []


def test_jobs_in_containers_of_their_own_share_the_pool_of_a_third() -> None:
    """Two runs that have nothing but a directory in common with the broker, and with each other, are in one pool."""
    compile_once()
    there = list(Path("/mnt").iterdir())
    with contextlib.ExitStack() as owned:
        shared = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="zc-")))
        pipes = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="zc-")))
        ends = owned.enter_context(fifos(pipes, "ab"))
        owned.enter_context(container(shared, "broker")).read_until("ready\n")
        socket = shared / "zico" / "broker.sock"
        job = [sys.executable, str(PROCESS / "sweep_job.py"), "2"]
        runs = [
            owned.enter_context(container(shared, "run", "--name", name, "--", *job, str(pipes / f"fifo{name}")))
            for name in ends
        ]
        until(lambda: names(socket) == ["a", "b"], ANSWER_S, "both are in the pool")
        with container(shared, "broker", "status") as asked:
            assert asked.finish() == 0
            assert sorted(re.findall(r"\b(\w) \(process", asked.stdout)) == ["a", "b"]
        for run, end in zip(runs, ends.values(), strict=True):
            run.read_until("begun")
            os.write(end, b"1")
        assert [run.finish() for run in runs] == [0, 0]
        assert [said for run in runs for said in run.stderr.splitlines() if "has ended" in said] == []
        assert names(socket) == []
        assert list(Path("/mnt").iterdir()) == there, "what they have mounted is their own"


def test_a_daemon_in_another_container_is_found_and_not_ended() -> None:
    """``status`` tells of it and ``start`` starts no second one; ``stop`` says where it can be ended."""
    compile_once()
    with contextlib.ExitStack() as owned:
        shared = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="zc-")))
        owned.enter_context(container(shared, "broker")).read_until("ready\n")
        for word, code, says in (
            ("status", 0, "of 64 MiB, no job"),
            ("start", 1, "runs already"),
            ("stop", 1, "in another container"),
        ):
            with container(shared, "broker", word) as asked:
                assert asked.finish() == code
                assert says in asked.stdout + asked.stderr
        assert names(shared / "zico" / "broker.sock") == []


def test_a_run_ends_when_its_daemon_in_another_container_does() -> None:
    """A run that has joined watches the connection, since the daemon's number means nobody here."""
    compile_once()
    with contextlib.ExitStack() as owned:
        shared = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="zc-")))
        pipes = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="zc-")))
        end = owned.enter_context(fifos(pipes, "a"))["a"]
        broker = owned.enter_context(container(shared, "broker"))
        broker.read_until("ready\n")
        job = [sys.executable, str(PROCESS / "sweep_job.py"), "2", str(pipes / "fifoa")]
        run = owned.enter_context(container(shared, "run", "--name", "a", "--", *job))
        run.read_until("begun")
        broker.process.kill()
        broker.process.wait(ANSWER_S)
        run.read_until("has ended")
        os.write(end, b"1")
        assert run.finish() == 0
