"""Jobs in pid namespaces of their own, as in containers: numbers of processes mean nothing there."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from process.support.broker_process import Broker, read_line
from support.harness import ANSWER_S, PATIENCE_S, TESTS, LightJob, clean_environment, compile_once, until

if TYPE_CHECKING:
    from collections.abc import Iterator

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
REFUSED = subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0
JOB = """
import os, socket, sys
from pathlib import Path
from support.light_job import Job
assert os.getpid() == 1
Job(Path(sys.argv[1]), sys.argv[2], socket.socket(fileno=int(sys.argv[3]))).serve()
"""

pytestmark = pytest.mark.skipif(REFUSED, reason="this system does not let this user make a pid namespace")


def child_of(process: subprocess.Popen[str]) -> int:
    """Return the number here of the process that ``unshare`` has started."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return int(until(path.read_text, PATIENCE_S, "unshare has started it"))


@contextlib.contextmanager
def contained(broker: Broker, name: str) -> Iterator[LightJob]:
    """Run a light job as the first process of a pid namespace."""
    ours, theirs = socket.socketpair()
    argv = [*UNSHARE, sys.executable, "-c", JOB, str(broker.socket), name, str(theirs.fileno())]
    environment = clean_environment() | {"PYTHONPATH": str(TESTS)}
    with ours, theirs:
        process = subprocess.Popen(argv, env=environment, pass_fds=(theirs.fileno(),), text=True)
        theirs.close()
        with process, contextlib.ExitStack() as undo:
            undo.callback(process.kill)
            job = LightJob(ours, child_of(process))
            undo.callback(job.close)
            yield job


@pytest.mark.parametrize("under", [(), UNSHARE], ids=["broker outside", "broker in another one"])
def test_jobs_with_one_number_in_their_namespaces_are_two_jobs(tmp_path: Path, under: tuple[str, ...]) -> None:
    """Invariants 2 and 5: none is taken for another, for dead or for living; not while the broker lives nor after."""
    compile_once()
    broker = Broker(tmp_path, under=under)
    with contextlib.ExitStack() as owned:
        owned.callback(broker.process.communicate, timeout=PATIENCE_S)
        owned.callback(broker.process.kill)
        assert read_line(broker.process) == "ready"
        a, b, c = (owned.enter_context(contained(broker, name)) for name in "abc")
        for job in (a, b, c):
            job.tell("train 6 12")  # of 16 regions
        assert [job.answer() for job in (a, b, c)] == ["lost 0"] * 3
        assert a.ask("hold 9") == b.ask("hold 2") == "1"
        a.kill()
        until(lambda: broker.names() == ["b", "c"], ANSWER_S, "the dead one has no place")
        assert c.ask("hold 10") == "1", "and what it held is free"
        broker.client.close()
        os.kill(child_of(broker.process) if under else broker.process.pid, signal.SIGKILL)
        b.tell("hold 8")
        assert not b.has_answered(0.3), "c lives, and keeps what it holds"
        assert c.ask("free") == "freed"
        assert b.answer() == "1"
        assert [b.ask("free"), b.ask("free")] == ["freed"] * 2
        for job in (b, c):
            job.tell("train 4 12")
        assert [job.answer() for job in (b, c)] == ["lost 0"] * 2, "they begin iterations by themselves"
