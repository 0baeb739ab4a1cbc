"""A pool that was taken over, in one process: members without a connection, and names beside a daemon's jobs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest
from cpu.support.members import make_pool

from zico.base.errors import BrokerError
from zico.broker.handover import Inherited, Note, NoteKeeper, take_over
from zico.broker.members import Entry
from zico.broker.notes import Identity, Process, note_path, read_head
from zico.broker.pool_manager import PoolManager
from zico.broker.protocol.messages import DEFAULT_SHARE
from zico.broker.server import IDLE_NS, JOINING_NS, Server
from zico.broker.transport import Listener
from zico.cli.daemon import renamed
from zico.launch.jobs import Command
from zico.pool.layout import JobState
from zico.scheduler.policies import policy_named

if TYPE_CHECKING:
    from pathlib import Path


def entry(name: str, job: int, pid: int) -> Entry:
    """Return a job of a run in a note."""
    return Entry(name=name, process=Process.of(pid), job=job, framework="torch", share=DEFAULT_SHARE, run="a1")


def test_a_member_that_never_maps_the_table_is_let_go_after_a_while(tmp_path: Path) -> None:
    """One that has it open stays, one that has not is LEAVING only when joining would have failed, and then is reaped.

    A record that no note names belongs to nobody, and its place is free at once.
    """
    with contextlib.ExitStack() as owned:
        table = owned.enter_context(make_pool(4, claims=False))
        argv = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        lost = owned.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE))
        owned.callback(lost.kill)
        pids = (os.getpid(), lost.pid)
        entries = tuple(
            entry(name, table.join(pid, name), pid) for pid, name in zip(pids, ("has", "lost"), strict=True)
        )
        unnamed = table.join(os.getpid(), "unnamed")
        identities = [Identity.of(fd) for fd in (table.table_fd, table.notify_fd, table.memory_fd)]
        note = Note(
            broker=Process(0, 0), device="host", policy="none",
            table=identities[0], pipe=identities[1], memory=identities[2], jobs=entries,
        )  # fmt: skip
        manager = PoolManager(table, [table.memory_fd], policy_named("none"))
        server = Server(manager, owned.enter_context(Listener(tmp_path / "zico" / "s")))
        stopped, stop = os.pipe()
        owned.callback(os.close, stopped)
        owned.callback(server.serve, stop_fd=stopped)  # which ends at once, and lets go of everything
        os.close(stop)

        def states() -> list[int]:
            return [int(table.jobs[entry.job]["state"]) for entry in entries]

        server.inherit(Inherited(table, note), now_ns=0)
        assert table.jobs[unnamed]["state"] == JobState.EMPTY
        assert [(one.name, one.run) for one in manager.report(0).jobs] == [("has", "a1"), ("lost", "a1")]
        for now_ns in range(0, JOINING_NS, IDLE_NS):
            server.look_after_heirs(now_ns)
            assert states() == [JobState.RUNNING, JobState.RUNNING]
        server.look_after_heirs(JOINING_NS)
        assert states() == [JobState.RUNNING, JobState.LEAVING]


@pytest.mark.parametrize(
    ("device", "hidden", "why"),
    [
        ("cuda:0", False, "only a pool on the host can; wait until they end, or stop them"),
        ("host", True, "the kernel does not show their open files (/proc/PID/fd); wait until they end, or stop them"),
    ],
)
def test_a_pool_that_cannot_be_taken_over_is_refused_by_the_names_of_its_jobs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    hidden: bool,  # noqa: FBT001 - a case
    why: str,
) -> None:
    """A GPU's, and one whose jobs' open files are hidden, where a living job has it."""

    def find(_process: Process, _identity: Identity) -> int | None:
        raise PermissionError

    if hidden:
        monkeypatch.setattr(Process, "find", find)
    with make_pool(4) as table:
        keeper = NoteKeeper(tmp_path / "s", table, [table.memory_fd], device=device, policy="none")
        keeper.write([entry("a", 0, os.getpid())])
        path = note_path(tmp_path / "s")
        note = msgspec.json.decode(path.read_bytes())
        assert note["jobs"][0]["run"] == "a1"
        path.write_bytes(msgspec.json.encode(note | {"broker": {"pid": 0, "started": 0}}))
        with pytest.raises(BrokerError) as refused:
            take_over(tmp_path / "s")
        expected = f"the pool of {device} cannot be taken over from a (process {os.getpid()}): {why}"
        assert str(refused.value) == expected


NOTE = b'{"schema_version":"zico.broker.v1","zico":"0","device":"host","broker":{"pid":%s,"started":%s}%s}'


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\0" * 200,
        b'{"schema_version":"\xff"}',
        NOTE % (b"1", b"0", b',"jobs":' + b"[" * 100_000 + b"]" * 100_000),
        NOTE % (b"1", b"0", b',"x":' + b"[" * 100_000 + b"]" * 100_000),
        NOTE % (b"9" * 23, b"0", b""),
        NOTE % (b"4194305", b"0", b""),
        NOTE % (b"-1", b"0", b""),
    ],
    ids=["empty", "zeros", "not UTF-8", "deep jobs", "deep", "huge", "no process has it", "negative"],
)
def test_a_damaged_note_is_no_note(tmp_path: Path, damaged: bytes) -> None:
    """Whatever a crash or a hand has left there, the next broker begins anew."""
    path = tmp_path / "s"
    note_path(path).write_bytes(NOTE % (b"4194304", b"0", b""))
    assert read_head(path) is not None
    note_path(path).write_bytes(damaged)
    assert read_head(path) is None
    assert take_over(path) is None


def test_jobs_of_a_run_get_names_that_nobody_has_in_the_daemons_pool() -> None:
    """A number is added where a name is taken there, and no two of the run become one."""
    commands = tuple(Command(name, (name,), name) for name in ("train", "train-2", "other"))
    assert renamed(commands, ()) == commands
    given = renamed(commands, ["train", "other", "other-2"])
    assert [command.name for command in given] == ["train-3", "train-2", "other-3"]
    assert [command.text for command in given] == ["train", "train-2", "other"]
