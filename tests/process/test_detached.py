"""``zico run --detach``, ``logs``, ``attach``, ``stop``, ``--after`` and ``--time``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.harness import ANSWER_S, PATIENCE_S, clean_environment, compile_once, until

from zico.launch.detached import Run

if TYPE_CHECKING:
    from collections.abc import Iterator

FOREVER = "import signal; print('it runs', flush=True); signal.pause()"


class Home:
    """A user's directories, and commands of that user."""

    def __init__(self, directory: Path) -> None:
        """Own a directory."""
        self.directory = directory
        self.environment = clean_environment() | {
            "XDG_RUNTIME_DIR": str(directory),
            "XDG_STATE_HOME": str(directory / "state"),
            "ZICO_BUDGET": "64MiB",
        }

    def zico(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "zico", *words],
            env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip

    def detach(self, name: str, code: str, *options: str) -> Run:
        """Start a run of one job."""
        done = self.zico("run", "--detach", "--name", name, *options, "--", sys.executable, "-c", code)
        assert done.returncode == 0, done.stderr
        assert (
            done.stderr == f"zico: {name} goes on by itself: zico logs {name}, zico attach {name}, zico stop {name}\n"
        )
        return Run(self.runs / name)

    @property
    def runs(self) -> Path:
        """Return where runs lie."""
        return self.directory / "state" / "zico" / "runs"


@pytest.fixture
def home() -> Iterator[Home]:
    """Give a user whose runs are ended afterwards."""
    compile_once()
    with tempfile.TemporaryDirectory(prefix="zd-") as directory:  # sockets have short paths
        made = Home(Path(directory))
        try:
            yield made
        finally:
            for path in made.runs.glob("*/pid"):
                with contextlib.suppress(ProcessLookupError):
                    if Run(path.parent).lives:
                        os.kill(int(path.read_text()), signal.SIGTERM)


def says(run: Run, text: str) -> None:
    """Wait until a run has said something."""
    until(lambda: text in run.log.read_text(), PATIENCE_S, f"it says {text!r}")


def test_a_run_is_left_seen_and_ended(home: Home) -> None:
    """Its output is kept, the list says how it is, and stop ends its jobs and tells its exit code."""
    run = home.detach("a", FOREVER)
    says(run, "it runs")
    assert "a | it runs" in home.zico("logs", "a").stdout
    assert " runs " in home.zico("logs").stdout
    again = home.zico("run", "--detach", "--name", "a", "true")
    assert (again.returncode, again.stderr) == (
        2, "zico: a run called a lives: zico stop a ends it, or give another --name\n"
    )  # fmt: skip
    assert home.zico("stop", "a").stderr == "zico: a has ended\n"
    assert (run.lives, run.exit_code) == (False, 128 + signal.SIGTERM)
    assert "ended with 143" in home.zico("logs").stdout
    assert home.zico("stop", "a").stderr == "zico: a had ended before\n"


def test_who_attaches_sees_the_end(home: Home, tmp_path: Path) -> None:
    """The exit code is the run's; a run of the same name keeps what the one before said."""
    os.mkfifo(tmp_path / "fifo")
    run = home.detach("a", f"print('first', flush=True); open({str(tmp_path / 'fifo')!r}).read(); raise SystemExit(3)")
    says(run, "first")
    seeing = subprocess.Popen(
        [sys.executable, "-m", "zico", "attach", "a"], env=home.environment, stdout=subprocess.PIPE, text=True
    )
    with seeing:
        assert seeing.stdout is not None
        until(lambda: "first" in str(seeing.stdout and seeing.stdout.readline()), PATIENCE_S, "it shows the log")
        (tmp_path / "fifo").write_text("end")
        assert seeing.wait(PATIENCE_S) == 3
    home.detach("a", "print('second')")
    assert "first" in (run.directory / "log.before").read_text()


def test_a_run_begins_after_another(home: Home, tmp_path: Path) -> None:
    """It waits, whatever the other ends with, and says so."""
    os.mkfifo(tmp_path / "fifo")
    first = home.detach("a", f"open({str(tmp_path / 'fifo')!r}).read()")
    then = home.detach("b", "print('its turn')", "--after", "a")
    says(then, "zico: waits until a has ended")
    assert (first.lives, then.lives) == (True, True)
    assert "its turn" not in then.log.read_text()
    (tmp_path / "fifo").write_text("end")
    says(then, "its turn")
    until(lambda: then.exit_code == 0, ANSWER_S, "it has ended")
    unknown = home.zico("run", "--after", "c", "true")
    assert (unknown.returncode, unknown.stderr) == (2, "zico: no run is called 'c': there are a, b\n")


def test_a_run_ends_when_its_time_is_over(home: Home) -> None:
    """The jobs end as by a signal, and the run says why."""
    done = home.zico("run", "--time", "1s", "--", sys.executable, "-c", FOREVER)
    assert done.returncode == 128 + signal.SIGTERM
    assert "zico: the 1s of --time are over: the jobs are ended" in done.stderr
    refused = home.zico("run", "--time", "soon", "true")
    assert (refused.returncode, "'soon' is not a time" in refused.stderr) == (2, True)


def test_what_is_refused_is_refused_at_once(home: Home) -> None:
    """The terminal gets the sentence and the exit code of a run that cannot begin."""
    done = home.zico("run", "--detach", "--budget", "nothing", "true")
    assert (done.returncode, done.stderr[:25]) == (2, "zico: --budget: 'nothing'")
    assert home.zico("logs", "nobody").stderr == "zico: no run is called 'nobody': there are true\n"
    assert home.zico("run", "--detach", "--name", "..", "true").returncode == 2


def test_a_killed_run_is_known_as_killed(home: Home) -> None:
    """Nothing can be said by a process that was killed, so the lock tells."""
    run = home.detach("a", FOREVER)
    says(run, "it runs")
    os.kill(int((run.directory / "pid").read_text()), signal.SIGKILL)
    until(lambda: not run.lives, ANSWER_S, "it is dead")
    assert "was killed" in home.zico("logs").stdout
    attached = home.zico("attach", "a")
    assert (attached.returncode, attached.stderr) == (1, "zico: a was killed\n")
