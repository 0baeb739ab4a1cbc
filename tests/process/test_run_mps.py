"""A private MPS daemon: started for a run, told to quit, killed if it does not, whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import fake_mps
import pytest
from zico_process import is_alive, survivors

from zico.base.errors import CommandError, ConfigError
from zico.broker import lingering
from zico.broker.lingering import PIPE_VARIABLE, daemon_at
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
    """The broker learns which processes a daemon's servers still have; where it cannot, it knows that it does not."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lingering.mps_clients(tmp_path) is None, "there is no control program"
    answers = fake_mps.install(tmp_path).with_name("notes-answers")
    assert lingering.mps_clients(tmp_path) is None, "it fails"
    answers.write_text("get_server_list:11 12\nget_client_list 11:101 102\nget_client_list 12:103\n")
    assert lingering.mps_clients(tmp_path) == {101, 102, 103}
    monkeypatch.setattr(lingering, "ANSWER_S", 0.2)
    fake_mps.install(tmp_path, "hangs")
    assert lingering.mps_clients(tmp_path) is None, "it does not answer in time"
