"""``zico broker start``, ``status`` and ``stop``: one daemon for a device, and what is said of it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest
from cpu.support.zico_process import ZicoRun, fifos, survivors
from process.support.broker_process import Broker, job, read_line, tell
from support.harness import ANSWER_S, PATIENCE_S, PROCESS, clean_environment, compile_once, until

from zico.broker.client import BrokerClient
from zico.broker.notes import note_path, read_head

if TYPE_CHECKING:
    from collections.abc import Iterator

BUDGET = "64MiB"
LIMIT = "change the budget by zico limit 32MiB --device host"
SWEEP_JOB = PROCESS / "sweep_job.py"


@pytest.fixture
def runtime() -> Iterator[Path]:
    """Give a runtime directory; no broker that listens there outlives the test."""
    compile_once()
    with tempfile.TemporaryDirectory(prefix="zd-") as path:
        yield Path(path)
        heads = [read_head(note.with_suffix(".sock")) for note in Path(path).glob("zico/broker*.json")]
        left = [head for head in heads if head is not None and head.broker.is_alive]
        for head in left:
            os.kill(head.broker.pid, signal.SIGKILL)
        assert left == [], "a broker has stayed"


def socket_in(runtime: Path) -> Path:
    """Return the socket of the host's daemon."""
    return runtime / "zico" / "broker.sock"


def zico(runtime: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Return how ``zico`` with these words, in this environment, has ended."""
    environ = clean_environment() | {"XDG_RUNTIME_DIR": str(runtime)} | variables
    argv = [sys.executable, "-m", "zico", *words]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def named(word: str) -> list[int]:
    """Return the processes that have a word on their command lines."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            found += [int(line.parent.name)] if word.encode() in line.read_bytes().split(b"\0") else []
    return found


def members(socket: Path) -> set[str]:
    """Return the names of the jobs in a daemon's pool."""
    with BrokerClient(socket, ANSWER_S) as client:
        return {one.name for one in client.status().jobs}


def killed(runtime: Path) -> int:
    """Kill the daemon; returns its number once it is dead."""
    head = read_head(socket_in(runtime))
    assert head is not None
    os.kill(head.broker.pid, signal.SIGKILL)
    until(lambda: not head.broker.is_alive, ANSWER_S, "it is dead")
    return head.broker.pid


def test_a_daemon_is_started_once_joined_and_stopped(runtime: Path) -> None:
    """A second start, a stop of none and a run with a budget of its own are one sentence each; nothing is left."""
    socket = socket_in(runtime)
    assert zico(runtime, "broker", "stop").stderr == f"zico: no broker of host runs at {socket}\n"
    started = zico(runtime, "broker", "start", "--budget", BUDGET, "--reserve", "1MiB", "--log-level", "info")
    assert (started.returncode, started.stdout.startswith("the broker of host is ready (process ")) == (0, True)
    again = zico(runtime, "broker", "start")
    assert again.returncode == 1
    assert again.stderr.startswith("zico: a broker of host runs already (process ")
    assert again.stderr.count("\n") == 1
    status = zico(runtime, "broker", "status", "--json")
    (daemon,) = json.loads(status.stdout)["brokers"]
    assert (status.returncode, daemon["device"], daemon["state"]) == (0, "host", "running")
    assert (daemon["budget_bytes"], daemon["socket"]) == (64 << 20, str(socket))
    joined = zico(runtime, "run", "--", "true", ZICO_METRICS="9185", ZICO_POLICY="serial", ZICO_BUDGET="64MiB").stderr
    assert "budget 64 MiB (of the broker that runs)" in joined
    assert (
        "zico: this run joins the broker of host, which has policy zico and not serial (ZICO_POLICY), metrics none and "
        "not 9185 (ZICO_METRICS): leave that out, or zico broker stop once its jobs have ended, and start it again "
        "with --policy, --metrics\n"
    ) in joined
    same = zico(runtime, "run", "--", "true", ZICO_POLICY="zico", ZICO_LOG_LEVEL="info", ZICO_RESERVE="1MiB").stderr
    assert "which has" not in same
    own = zico(runtime, "run", "--budget", "32MiB", "--", "true").stderr
    assert "--budget: this run has a pool of its own, beside that of the broker of host that runs" in own
    assert "budget 32 MiB (--budget)" in own
    assert zico(runtime, "broker", "stop").returncode == 0
    assert list(socket.parent.iterdir()) == []


def script(runtime: Path, budget: str | None = None, **variables: str) -> list[str]:
    """Return what a script says on stderr that joins by itself, and a child of its that does so, too."""
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import zico; zico.join()'], check=True)"
    code = f"import zico; zico.join(budget={budget!r}); {child}"
    environ = clean_environment() | {"XDG_RUNTIME_DIR": str(runtime), "ZICO": "on"} | variables
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return done.stderr.splitlines()


def test_a_script_says_once_which_settings_the_pool_that_it_joins_has_otherwise(runtime: Path) -> None:
    """In the words of a run: of a daemon, and of a pool that it takes over; not under a run, nor for each rank."""
    socket = socket_in(runtime)
    joins = "zico: this process joins the broker of host, which has "
    shares = "zico: shares 64 MiB of host, 0 other jobs; ZICO=off leaves this out"
    assert script(runtime, budget=BUDGET, ZICO_POLICY="serial")[1:] == [], "its broker has them all"
    until(lambda: not socket.exists(), ANSWER_S, "its broker has ended")
    assert zico(runtime, "broker", "start", "--budget", BUDGET).returncode == 0
    assert script(runtime, ZICO_BUDGET="32MiB") == [
        shares,
        f"{joins}budget 64 MiB and not 32 MiB (ZICO_BUDGET): leave that out, or {LIMIT}",
    ]
    assert f"{joins}budget 64 MiB and not 2 GiB (zico.join): leave that out" in script(runtime, "2GiB")[1]
    (runtime / "config.toml").write_text("isolate = 1\n")
    in_file = {"ZICO_CONFIG": str(runtime / "config.toml")}
    assert f"{joins}isolate off and not on (isolate in {in_file['ZICO_CONFIG']})" in script(runtime, **in_file)[1]
    unusable = script(runtime, ZICO_BUDGET="plenty")
    assert unusable[1].startswith("zico: settings were not compared with those of the pool: ZICO_BUDGET: 'plenty' is ")
    assert script(runtime) == script(runtime, ZICO_BUDGET=BUDGET) == [shares]
    assert script(runtime, ZICO_BUDGET="32MiB", LOCAL_RANK="1") == [shares]
    run = zico(
        runtime, "run", "--", sys.executable, "-c", "import zico; zico.join('2GiB')", ZICO="on", ZICO_BUDGET="32MiB"
    )
    assert (run.returncode, (run.stdout + run.stderr).count("joins the broker")) == (0, 1)
    with job(cast("Broker", SimpleNamespace(socket=socket)), "a", hold=3):
        killed(runtime)
        taken_over = script(runtime, ZICO_BUDGET="32MiB")
        assert "started by this process" in taken_over[0]
        assert f"{joins}budget 64 MiB and not 32 MiB (ZICO_BUDGET)" in taken_over[1]
    until(lambda: not socket.exists(), ANSWER_S, "the broker has ended")


def test_a_daemon_of_another_version_is_not_followed(runtime: Path) -> None:
    """Its jobs are named in one sentence and go on; status and runs say that they do."""
    socket = socket_in(runtime)
    assert zico(runtime, "broker", "start", "--budget", BUDGET).returncode == 0
    with job(cast("Broker", SimpleNamespace(socket=socket)), "a", hold=3) as a:
        named = f"a (process {a.pid})"
        pid = killed(runtime)
        status = zico(runtime, "broker", "status")
        said = f"host: the broker (process {pid}) has ended; {named} run on, and zico broker start takes"
        assert (status.returncode, status.stdout.startswith(said)) == (1, True)
        assert f"{named} hold memory beside this run" in zico(runtime, "run", "--budget", "32MiB", "--", "true").stderr
        note = msgspec.json.decode(note_path(socket).read_bytes())
        note_path(socket).write_bytes(msgspec.json.encode(note | {"zico": "99.0"}))
        refused = zico(runtime, "broker", "start")
        assert refused.returncode == 1
        assert refused.stderr.startswith("zico: the pool of host is of another Zico (99.0, this is ")
        assert refused.stderr.endswith(f" from {named}: wait until they end, or stop them, or go on with that Zico\n")
        assert refused.stderr.count("\n") == 1
        tell(a, "iterate")
        assert read_line(a) == "began"
    assert zico(runtime, "broker", "status").stdout == "no broker runs\n"


def test_daemons_of_two_devices_take_a_runs_jobs(runtime: Path) -> None:
    """A run joins both; the one that serves somebody already gets the second job; they are stopped together."""
    both = ("--device", "host:0,host:1")
    assert zico(runtime, "broker", "start", "--device", "host:1", "--budget", BUDGET).returncode == 0
    second = zico(runtime, "broker", "start", *both)
    assert (second.returncode, second.stderr.count("\n")) == (1, 1)
    assert second.stderr.startswith("zico: a broker of host:1 runs already (process ")
    assert not (runtime / "zico" / "broker-host-0.json").exists()
    assert zico(runtime, "broker", "start", "--device", "host:0", "--budget", BUDGET).returncode == 0
    busy = SimpleNamespace(socket=runtime / "zico" / "broker-host-0.sock")
    with job(cast("Broker", busy), "other", hold=3):
        ran = zico(runtime, "run", *both, "--name", "a", "--name", "b", "--name", "c", "true", "true", "true")
    assert (ran.returncode, ran.stderr.count("budget 64 MiB (of the broker that runs)")) == (0, 4)
    assert [f"{name} starts on host:{n}" in ran.stderr for name, n in (("a", 1), ("b", 1), ("c", 0))] == [True] * 3
    shown = zico(runtime, "status").stdout
    assert [f"sock: device host:{n}, policy zico" in shown for n in (0, 1)] == [True, True]
    named = zico(runtime, "status", "--json", "--socket", str(busy.socket))
    assert json.loads(named.stdout)["device"] == "host:0"
    stopped = zico(runtime, "broker", "stop", *both)
    assert (stopped.returncode, stopped.stdout.count("has ended")) == (0, 2)
    assert list(busy.socket.parent.iterdir()) == []


def test_of_two_daemons_none_is_left_where_one_cannot_start(runtime: Path) -> None:
    """One sentence says which failed and why; Ctrl-C while the second one starts leaves none, either."""
    both = ("--device", "host:0,host:1", "--budget", BUDGET)
    base = runtime / "zico"
    blocker = base / "broker-host-1.sock"
    blocker.mkdir(parents=True)
    base.chmod(0o700)
    failed = zico(runtime, "broker", "start", *both)
    assert (failed.returncode, failed.stdout) == (1, "")
    *_, told = failed.stderr.splitlines()
    assert told.startswith("zico: the broker of host:1 could not start: ")
    assert str(blocker) in told
    assert told.endswith("; that of host:0 has been stopped again")
    assert list(base.iterdir()) == [blocker]
    blocker.rmdir()
    environ = clean_environment() | {"XDG_RUNTIME_DIR": str(runtime)}
    argv = [sys.executable, "-m", "zico", "broker", "start", *both]
    with subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE, text=True) as starting:
        until(lambda: blocker.with_suffix(".log").exists(), PATIENCE_S, "the second one is being started")
        starting.send_signal(signal.SIGINT)
        starting.communicate(timeout=ANSWER_S)
    left = survivors(named(str(blocker)), timeout_s=0)
    assert (starting.returncode, left) == (130, [])
    assert list(base.iterdir()) == []


def test_a_sweep_joins_a_daemon_beside_the_jobs_of_others(runtime: Path, tmp_path: Path) -> None:
    """Jobs of its own get names that are free; Ctrl-C ends them and nothing else, and what is left runs there, too."""
    socket = socket_in(runtime)
    assert zico(runtime, "broker", "start", "--budget", BUDGET).returncode == 0
    command = shlex.join([sys.executable, str(SWEEP_JOB), "2", "fifo{x}"])
    words = ("--at-most", "2", "--grid", "x=1..3", "--json", "r.json", command)
    with (
        fifos(tmp_path, "123") as ends,
        job(cast("Broker", SimpleNamespace(socket=socket)), "x=2"),
    ):
        with ZicoRun(*words, XDG_RUNTIME_DIR=str(runtime), ZICO_BUDGET="") as run:
            run.read_until("x=1 | begun")
            assert "budget 64 MiB (of the broker that runs)" in run.stderr
            run.read_until("x=2-2 | begun")
            assert members(socket) == {"x=2", "x=1", "x=2-2"}
            os.write(ends["1"], b"\n")
            run.read_until("x=1 ended with exit code 0")
            run.read_until("x=3 | begun")
            assert members(socket) == {"x=2", "x=2-2", "x=3"}
            run.process.send_signal(signal.SIGINT)
            assert (run.finish(), run.leftovers) == (130, [])
            assert "2 are left: zico run --resume sweep_job.sweep.jsonl" in run.stderr
        until(lambda: members(socket) == {"x=2"}, ANSWER_S, "the sweep's jobs are gone, and the other one is not")
        for end in ends.values():
            os.write(end, b"\n")
        resumed = zico(runtime, "run", "--resume", "sweep_job.sweep.jsonl")
        assert resumed.returncode == 0
        assert "budget 64 MiB (of the broker that runs)" in resumed.stderr
        results = json.loads(Path("r.json").read_text())
        assert [(one["name"], one["exit_code"], one["peak_bytes"]) for one in results["jobs"]] == [
            (f"x={x}", 0, 12 << 20) for x in "123"
        ]
        assert results["budget_bytes"] == 64 << 20
    assert zico(runtime, "broker", "stop").returncode == 0
