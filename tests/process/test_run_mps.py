"""A private MPS daemon: started for a run, told to quit, killed if it does not, whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from cpu.support.zico_process import ZicoRun, is_alive, python, survivors
from process.support import fake_mps

from zico.base import mps as base_mps
from zico.base.errors import CommandError, ConfigError
from zico.base.mps import PIPE_VARIABLE, daemon_at
from zico.launch import mps
from zico.launch.mps import LOG_VARIABLE, MpsDaemon
from zico.launch.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def guardian(tmp_path: Path) -> Iterator[Watchdog]:
    """Give a guardian, sent away afterwards."""
    made = Watchdog(tmp_path / "guarded")
    yield made
    made.close()


def made(tmp_path: Path, how: str = "", **environ: str) -> tuple[MpsDaemon, Path]:
    """Return a daemon not yet started, whose control program behaves so, and its notes."""
    notes = fake_mps.install(tmp_path / "bin", how)
    (tmp_path / "run").mkdir()
    return MpsDaemon(tmp_path / "run", {**os.environ, "PATH": str(tmp_path / "bin"), **environ}), notes


def daemon_pid(notes: Path) -> int:
    """Return the daemon's process number."""
    return int(notes.read_text().split()[1])


@pytest.mark.parametrize("how", ["", "same session"])
def test_a_daemon_serves_in_the_runs_directory_until_it_is_told_to_quit(
    tmp_path: Path, guardian: Watchdog, how: str
) -> None:
    """It is started with directories of the run's own, sees what jobs see, and ends by ``quit``."""
    daemon, notes = made(tmp_path, how, CUDA_VISIBLE_DEVICES="GPU-1")
    assert daemon_at(daemon.variables) is None
    daemon.start(guardian)
    pid = daemon_pid(notes)
    assert is_alive(pid)
    assert daemon.variables == {
        PIPE_VARIABLE: str(tmp_path / "run" / "mps"),
        LOG_VARIABLE: str(tmp_path / "run" / "mps-log"),
    }
    assert daemon_at(daemon.variables) == tmp_path / "run" / "mps"
    daemon.close(guardian)
    assert not is_alive(pid)
    assert notes.read_text().splitlines()[0].endswith("sees GPU-1")
    assert notes.read_text().splitlines()[1:] == ["quit"]
    daemon.close(guardian)


def test_a_daemon_that_does_not_quit_is_killed(
    tmp_path: Path, guardian: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the deadline its group is killed, deaf or not."""
    monkeypatch.setattr(mps, "QUIT_S", 0.2)
    daemon, notes = made(tmp_path, "deaf")
    daemon.start(guardian)
    daemon.close(guardian)
    assert survivors([daemon_pid(notes)], timeout_s=0) == []
    assert notes.read_text().splitlines()[1:] == ["quit"]


def test_without_the_control_program_the_option_is_refused(tmp_path: Path) -> None:
    """One sentence names the program and the way out."""
    with pytest.raises(ConfigError, match=r"nvidia-cuda-mps-control is not on PATH.*run without --mps"):
        MpsDaemon(tmp_path, {"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("fails", "-d ended with 1: cannot find a GPU"),
        ("complains", "-d ended with 3: it said nothing"),
        ("leaves", "-d left no daemon: it said nothing"),
        ("hangs", "-d did not end within 0.5 s: it said nothing"),
    ],
)
def test_a_daemon_that_does_not_start_is_an_error(
    tmp_path: Path, guardian: Watchdog, monkeypatch: pytest.MonkeyPatch, how: str, says: str
) -> None:
    """However it fails, the error has its last words, and closing leaves no process."""
    monkeypatch.setattr(mps, "START_S", 0.5)
    daemon, _ = made(tmp_path, how)
    with pytest.raises(CommandError, match=says):
        daemon.start(guardian)
    daemon.close(guardian)
    assert daemon._processes() == []


def test_a_program_that_cannot_be_run_is_an_error(tmp_path: Path, guardian: Watchdog) -> None:
    """A control program for another machine is named as such."""
    daemon, _ = made(tmp_path)
    (tmp_path / "bin" / mps.CONTROL).write_bytes(b"\x00")
    with pytest.raises(CommandError, match="could not be run"):
        daemon.start(guardian)
    daemon.close(guardian)


_KILLED = """
import os, signal, sys
from pathlib import Path
from zico.launch.mps import MpsDaemon
from zico.launch.watchdog import Watchdog
ward = Watchdog(Path(sys.argv[1]))
MpsDaemon(Path(sys.argv[1]), os.environ).start(ward)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["", "same session", "deaf"])
def test_a_killed_run_takes_its_daemon_along(tmp_path: Path, how: str) -> None:
    """When the run itself is killed, the guardian ends the daemon and removes its directory."""
    notes = fake_mps.install(tmp_path / "bin", how)
    (tmp_path / "run").mkdir()
    environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "run")], env=environ, timeout=60, check=False)
    assert survivors([daemon_pid(notes)], timeout_s=15) == []


def test_other_processes_are_left_alone(tmp_path: Path, guardian: Watchdog) -> None:
    """A daemon of another run, of the same name, outlives ours."""
    first, first_notes = made(tmp_path)
    first.start(guardian)
    (tmp_path / "other").mkdir()
    second, second_notes = made(tmp_path / "other")
    second.start(guardian)
    first.close(guardian)
    assert not is_alive(daemon_pid(first_notes))
    assert is_alive(daemon_pid(second_notes))
    second.close(guardian)
    assert not is_alive(daemon_pid(second_notes))


def test_the_users_own_daemon_is_found(tmp_path: Path) -> None:
    """The directory that the environment names is looked into, the usual one where it names none."""
    (tmp_path / "control").touch()
    assert daemon_at({PIPE_VARIABLE: str(tmp_path)}) == tmp_path
    assert daemon_at({PIPE_VARIABLE: str(tmp_path / "none")}) is None


def test_the_clients_of_all_servers_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zico learns which processes a daemon's servers still have; where it cannot, it knows that it does not."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert base_mps.clients(tmp_path) is None, "there is no control program"
    answers = fake_mps.install(tmp_path).with_name("notes-answers")
    assert base_mps.clients(tmp_path) is None, "it fails"
    answers.write_text("get_server_list:11 12\nget_client_list 11:101 102\nget_client_list 12:103\n")
    assert base_mps.clients(tmp_path) == {11: {101, 102}, 12: {103}}
    monkeypatch.setattr(base_mps, "_silent", set())
    monkeypatch.setattr(base_mps, "ANSWER_S", 0.2)
    fake_mps.install(tmp_path, "hangs")
    assert base_mps.clients(tmp_path) is None, "it does not answer in time"


# -- the work of clients that are killed -----------------------------------------------------------

CATCHES = "import signal; signal.signal(signal.SIGTERM, print); print(flush=True); signal.pause()"
IS_KILLED = "import signal; print(flush=True); signal.pause()"
DEAF = "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
JOB = f"import os, signal; {DEAF}print('pid', os.getpid(), flush=True); signal.pause()"


@pytest.fixture
def served(tmp_path: Path, guardian: Watchdog, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the notes of a daemon that this process and those that it starts have, as a user's own is."""
    daemon, notes = made(tmp_path)
    daemon.start(guardian)
    monkeypatch.setenv(PIPE_VARIABLE, daemon.variables[PIPE_VARIABLE])
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(base_mps, "_silent", set())
    yield notes
    daemon.close(guardian)


def told(notes: Path) -> list[str]:
    """Return what a daemon was told to end."""
    return [line for line in notes.read_text().splitlines() if line.startswith("terminate_client")]


@contextlib.contextmanager
def started(*codes: str) -> Iterator[list[int]]:
    """Start programs that say when they are ready; give their process numbers."""
    with contextlib.ExitStack() as stack:
        children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for code in codes]
        for child in children:
            stack.enter_context(child)
            stack.callback(child.kill)
        assert [child.stdout.read(1) for child in children if child.stdout] == [b"\n"] * len(codes)
        yield [child.pid for child in children]


def test_the_work_of_clients_ends_before_a_signal_that_kills_them(served: Path) -> None:
    """SIGTERM kills what does not catch it and SIGKILL all; no stranger's work ends, nor that of no clients."""
    with started(CATCHES, IS_KILLED, IS_KILLED) as (catches, is_killed, is_none):
        server = fake_mps.name_clients(served, os.getpid(), catches, is_killed)
        base_mps.end_work([catches, is_killed, is_none], signal.SIGTERM)
        assert told(served) == [f"terminate_client {server} {is_killed} lives"]
        base_mps.end_work([catches, is_none])
        assert told(served)[1:] == [f"terminate_client {server} {catches} lives"]


def test_numbers_of_another_namespace_end_nobodys_work(served: Path) -> None:
    """Where the server is no process here, its clients' numbers are those of strangers."""
    with started(IS_KILLED) as (client,):
        served.with_name("notes-answers").write_text(f"get_server_list:{client}\nget_client_list {client}:{client}\n")
        base_mps.end_work([client])
        assert told(served) == []


@pytest.mark.parametrize(("how", "lines"), [("hangs", 0), ("hangs at the end", 1)])
def test_a_control_program_that_hangs_holds_no_kill_up(
    served: Path, monkeypatch: pytest.MonkeyPatch, how: str, lines: int
) -> None:
    """It is waited for until its deadline, and not asked again."""
    monkeypatch.setattr(base_mps, "ANSWER_S", 0.5)
    monkeypatch.setattr(base_mps, "END_S", 1.0)
    fake_mps.install(served.parent, how)
    with started(IS_KILLED) as (client,):
        fake_mps.name_clients(served, client)
        base_mps.end_work([client])
        assert len(told(served)) == lines
        fake_mps.install(served.parent)
        base_mps.end_work([client])
        assert len(told(served)) == lines


@pytest.mark.parametrize("way", ["grace is over", "second signal", "run is killed", "left behind"])
def test_every_way_of_killing_a_job_ends_its_work_first(served: Path, tmp_path: Path, way: str) -> None:
    """After its grace, at a second signal, by the guardian and what a job leaves behind: told once, while it lives."""
    os.mkfifo(tmp_path / "go")
    leaves = f"sh -c 'trap \"\" TERM; sleep 1000 & echo pid $!; read go < {tmp_path}/go'"
    job = leaves if way == "left behind" else python(JOB)
    grace = "3600" if way == "second signal" else "0.2"
    with ZicoRun("--grace", grace, "--name", "a", job) as run:
        pid = run.number_after("a | pid ")
        server = fake_mps.name_clients(served, pid)
        if way == "run is killed":
            run.process.kill()
            run.process.wait(timeout=10)
        elif way == "left behind":
            (tmp_path / "go").write_text("\n")
        else:
            run.process.send_signal(signal.SIGINT)
        if way == "second signal":
            run.read_until("a second signal kills them")
            run.process.send_signal(signal.SIGINT)
        if way != "run is killed":
            run.finish()
        assert survivors([pid], timeout_s=15) == []
    assert told(served) == [f"terminate_client {server} {pid} lives"]


def test_clients_that_are_left_end_with_the_daemon(
    tmp_path: Path, guardian: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has left its job's session outlives the run, but its work on the GPU does not."""
    daemon, notes = made(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    daemon.start(guardian)
    server = fake_mps.name_clients(notes, os.getpid())
    daemon.close(guardian)
    assert notes.read_text().splitlines()[1:] == [f"terminate_client {server} {os.getpid()} lives", "quit"]
