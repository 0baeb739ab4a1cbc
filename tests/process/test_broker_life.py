"""A broker's beginning and end: settings, signals, records, and its place on the disk."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from process.support.broker_process import BUDGET_BYTES, PATIENCE_S, REGION_BYTES, Broker, job, kill
from support.harness import until

from zico.base.errors import BrokerError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(broker: Broker, number: int) -> None:
    """SIGTERM and SIGINT leave exit code 0, no socket, no lock file, the record, and the note of the job that lives."""
    with job(broker, "a", hold=2):
        broker.until(lambda status: status.granted_bytes == 2 * REGION_BYTES, within_s=5)
        code, errors = broker.end(number)
    assert (code, errors) == (0, "")
    assert [path.name for path in broker.socket.parent.iterdir()] == ["s.json"]
    with np.load(broker.record, allow_pickle=False) as record:
        assert record["names"].tolist() == ["a"]
        assert record["held_bytes"].max() == 2 * REGION_BYTES
        assert record["budget_bytes"] == BUDGET_BYTES
        assert np.all(np.diff(record["t_s"]) > 0)


def test_a_broker_in_a_scripts_background_ignores_ctrl_c(tmp_path: Path) -> None:
    """The shell has it ignore SIGINT, which stays so; SIGTERM ends it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        broker = Broker(tmp_path, "--policy", "none")
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        broker.wait_ready()
        broker.process.send_signal(signal.SIGINT)
        assert broker.names() == []
        assert broker.end() == (0, "")
    finally:
        kill(broker.process)


def test_a_report_writes_the_record(broker: Broker) -> None:
    """Whoever has the report may read the record, while the broker goes on."""
    assert not broker.record.exists()
    broker.client.report()
    assert broker.record.exists()
    assert broker.names() == []


def test_a_record_that_cannot_be_written_stops_nothing(start: Callable[..., Broker]) -> None:
    """A record in a directory that does not exist is only complained about."""
    broker = start("--policy", "none", "--record", "/nonexistent/record.npz")
    assert broker.client.report().jobs == ()
    code, errors = broker.end()
    assert code == 0
    assert "/nonexistent/record.npz cannot be written" in errors


def test_of_two_brokers_on_one_path_the_second_is_refused(start: Callable[..., Broker]) -> None:
    """The second says that another lives and ends with 1; the first serves on."""
    first = start("--policy", "none")
    second = start("--policy", "none", ready=False)
    _, errors = second.process.communicate(timeout=PATIENCE_S)
    assert second.process.returncode == 1
    assert "another broker lives" in errors
    assert first.names() == []


def test_a_killed_brokers_socket_is_taken_over(start: Callable[..., Broker]) -> None:
    """After SIGKILL the next broker on the path lives."""
    first = start("--policy", "none")
    kill(first.process)
    with pytest.raises(BrokerError, match="no broker at"):
        first.client.status()
    assert start("--policy", "none").names() == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--policy", "fairy"), "'fairy' is not a policy"),
        (("--budget-bytes", "0"), "below one region"),
        (("--region-bytes", "12345"), "12345 bytes does not work"),
        (("--parent-pid", "999999999"), "living process"),
        (("--socket", "/" + "x" * 200), "the limit is 107"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(
    start: Callable[..., Broker], options: tuple[str, str], complaint: str
) -> None:
    """Exit code 2 and one line that names the value."""
    broker = start(*options, ready=False)
    _, errors = broker.process.communicate(timeout=PATIENCE_S)
    assert broker.process.returncode == 2
    assert complaint in errors
    assert len(errors.splitlines()) == 1


def test_ready_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    """A descriptor named by --ready-fd gets the line, and stdout none."""
    fifo = tmp_path / "ready"
    os.mkfifo(fifo)
    read_fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    command = f"exec 9>{fifo}; exec {sys.executable} -m zico.broker --socket {tmp_path}/zico/s --no-warm --ready-fd 9 "
    command += f"--budget-bytes {BUDGET_BYTES} --region-bytes {REGION_BYTES} --policy none"
    with subprocess.Popen(["/bin/sh", "-c", command], stdout=subprocess.PIPE) as process:
        readable, _, _ = select.select([read_fd], [], [], PATIENCE_S)
        told = os.read(read_fd, 100) if readable else b""
        process.terminate()
        written, _ = process.communicate(timeout=20)
    os.close(read_fd)
    assert (told, written) == (b"ready\n", b"")


def test_without_its_parent_it_ends_after_the_last_job(start: Callable[..., Broker]) -> None:
    """A broker whose parent was killed serves jobs and connections that are left, and ends by itself.

    A script that has found it, and has not joined yet, has a connection.
    """
    parent = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        broker = start("--policy", "none", "--parent-pid", str(parent.pid))
        with job(broker, "a"):
            parent.kill()
            parent.communicate(timeout=20)
            assert broker.names() == ["a"]
        until(lambda: broker.names() == [], 20, "the last job is gone")
        assert broker.names() == []
        broker.client.close()
        assert broker.process.wait(timeout=20) == 0
    finally:
        parent.kill()
        parent.communicate(timeout=20)
    assert list(broker.socket.parent.iterdir()) == []
