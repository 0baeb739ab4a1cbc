"""``zico status``, ``zico broker`` and ``zico doctor`` beside real brokers."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu.support.zico_process import DEADLINE_S, ZicoRun, python
from support.harness import clean_environment, compile_once

from zico.base.paths import cache_root
from zico.cli import main

FOREVER = (
    "import signal\nfrom zico.job.session import socket_to_join\n"
    "socket_to_join(); print('here', flush=True); signal.pause()"
)
"""It is there when the broker is ready."""


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Give a directory whose path is short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="zt-"))
    yield path
    shutil.rmtree(path)


def test_status_finds_the_broker_of_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``zico status`` without a socket shows the only broker that this user has, as table and as JSON."""
    with ZicoRun("--name", "a", python(FOREVER)) as run:
        run.read_until("a | here")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(run.runtime))
        monkeypatch.delenv("ZICO_SOCKET", raising=False)
        assert main(["status", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["schema_version"], found["budget_bytes"], found["jobs"]) == ("zico.status.v1", 64 << 20, [])
        assert main(["status"]) == 0
        assert "granted 0 B of 64 MiB" in capsys.readouterr().out


def test_status_without_a_broker_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], short_dir: Path
) -> None:
    """Where no broker runs, or none answers at the socket, the answer is one line and exit code 1."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    monkeypatch.delenv("ZICO_SOCKET", raising=False)
    assert main(["status"]) == 1
    assert capsys.readouterr().err == "zico: no broker is running\n"
    assert main(["status", "--socket", str(short_dir / "none")]) == 1
    assert str(short_dir / "none") in capsys.readouterr().err


def test_a_broker_in_the_foreground_serves_until_it_is_told_to_end(
    short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``zico broker`` says ready, answers ``zico status``, and ends with 0 on SIGTERM, its socket gone."""
    socket = short_dir / "s"
    command = [sys.executable, "-m", "zico", "broker", "--budget", "64MiB", "--socket", str(socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as broker:
        try:
            assert broker.stdout is not None
            assert broker.stdout.readline() == b"ready\n"
            assert main(["status", "--socket", str(socket), "--json"]) == 0
            broker.send_signal(signal.SIGTERM)
            _, said = broker.communicate(timeout=DEADLINE_S)
        finally:
            broker.kill()
    assert broker.returncode == 0
    assert f"ZICO_SOCKET={socket}".encode() in said
    assert json.loads(capsys.readouterr().out)["policy"] == "zico"
    assert not socket.exists()


def test_doctor_says_why_a_command_is_not_in_the_pool(capsys: pytest.CaptureFixture[str]) -> None:
    """For a command that imports no framework the verdict is 1 and the reason is named, and what measures sharing."""
    assert main(["doctor", "--json", "--", sys.executable, "-c", "pass"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["schema_version"], found["active"]) == ("zico.doctor.v1", False)
    assert found["frameworks"][0]["reason"] == "no framework was imported"
    assert {check["name"]: check["passed"] for check in found["checks"]}["injection"] is True
    assert [check for check in found["checks"] if check["name"].startswith("cuda")]
    (sharing,) = [check for check in found["checks"] if check["name"] == "sharing"]
    command = shlex.quote(shlex.join([sys.executable, "-c", "pass"]))
    assert sharing["passed"] is None
    assert sharing["detail"].endswith(f"zico fit --measure {command} {command}")


def test_doctor_finds_the_flag_that_keeps_zico_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A command with python -S cannot be active, and the check says to start it without."""
    assert main(["doctor", "--", sys.executable, "-S", "-c", "pass"]) == 1
    assert "start python without -S" in capsys.readouterr().out


def test_a_job_is_told_which_kind_of_device_it_would_share() -> None:
    """On the host an adapter hears so before it joins, and one for GPUs is refused with what the pool is on."""
    code = (
        "from zico.job import session\nfrom zico.base.errors import HookError\n"
        "print('kind', session.pool_kind(), flush=True)\n"
        "try:\n    session.attach('torch', kind='cuda')\nexcept HookError as error:\n    print(error)\n"
    )
    with ZicoRun("--name", "a", python(code)) as run:
        assert run.finish() == 0, run.stderr
    assert "a | kind host\n" in run.stdout
    assert (
        "a | the pool is on host, and what Zico has for torch here shares the memory of cuda devices only" in run.stdout
    )


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """``zico --version`` prints one and ends with 0."""
    assert main(["--version"]) == 0
    assert re.fullmatch(r"zico, version \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_wrong_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """An option that does not exist gives 2 and says which."""
    assert main(["run", "--bugdet", "1G", "true"]) == 2
    assert "--bugdet" in capsys.readouterr().err


def shown(written: bytes) -> list[str]:
    """Return the lines that a terminal would show: carriage return, line feed, erase line and cursor up."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", written.decode()):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece.endswith("A") and piece.startswith("\x1b"):
            row -= int(piece[2:-1] or 1)
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif not piece.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines]


def on_a_terminal(command: list[str], environ: dict[str, str]) -> bytes:
    """Return all that ``command`` writes to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | environ) as process:
        os.close(theirs)
        written = b""
        try:
            while chunk := os.read(ours, 65536):
                written += chunk
        except OSError:  # Linux: the other side of the terminal is closed
            pass
        finally:
            os.close(ours)
            process.wait(timeout=DEADLINE_S)
    return written


def test_on_a_terminal_the_live_table_destroys_no_line() -> None:
    """With a live table on the same terminal every output line stays, and the table itself is gone in the end."""
    code = "import time\nfor i in range(4): print('line', i); time.sleep(0.4)"
    arguments = [sys.executable, "-m", "zico", "run", "--budget", "64MiB", "--name", "a", "--name", "b"]
    written = on_a_terminal([*arguments, python(code), python(code)], {"TERM": "xterm", "COLUMNS": "120"})
    lines = shown(written)
    assert [line for line in lines if line.startswith("a | ")] == [f"a | line {i}" for i in range(4)]
    assert [line for line in lines if line.startswith("b | ")] == [f"b | line {i}" for i in range(4)]
    assert "memory of 64 MiB" in written.decode()
    assert not [line for line in lines if "memory of 64 MiB" in line]
    assert written.decode().rindex("\x1b[?25h") > written.decode().rindex("\x1b[?25l")


def test_no_color_means_no_colour() -> None:
    """With NO_COLOR a terminal gets no colour sequence."""
    arguments = [sys.executable, "-m", "zico", "run", "--budget", "64MiB", "--name", "a", python("print('x')")]
    written = on_a_terminal(arguments, {"TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"})
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]m", written)


# -- no process or thread can be started -----------------------------------------------------------

NOBODY = 65534
AS_NOBODY = (
    *("setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"),
    *("--inh-caps", "-all,+dac_override", "--ambient-caps", "-all,+dac_override"),  # this checkout may be closed to it
    *("--bounding-set", "-sys_admin,-sys_resource"),
)
"""Runs a command as a user whom limits of processes hold for, as they do not for root."""


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root can become another user")
@pytest.mark.parametrize("words", [["run", "true"], ["broker", "--metrics", "0"]])
def test_a_limit_of_processes_is_one_sentence(short_dir: Path, words: list[str]) -> None:
    """A run that can start no process, and a broker that can start no thread, say so and end; nothing hangs."""
    compile_once()
    os.chown(short_dir, NOBODY, NOBODY)
    environ = clean_environment() | {"XDG_RUNTIME_DIR": str(short_dir), "ZICO_CACHE_DIR": str(cache_root())}
    done = subprocess.run(
        [*AS_NOBODY, "prlimit", "--nproc=1", sys.executable, "-m", "zico", *words],
        # OpenBLAS itself interrupts a process that can have no threads.
        env=environ | {"OPENBLAS_NUM_THREADS": "1", "ZICO_BUDGET": "64MiB"},
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert "no further process or thread can be started here: a limit is reached" in last
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
