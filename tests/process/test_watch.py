"""``zico pause``, ``zico resume`` and ``zico top`` beside real brokers and jobs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from typing import TYPE_CHECKING

import pytest
from support.harness import ANSWER_S, LightJob, Nursery, Pool, clean_environment, pool, until
from support.scripts import job as script_in
from support.scripts import place_of

from zico.broker.protocol.messages import Change
from zico.cli import main
from zico.paging.page_table import LEAST
from zico.pool.layout import JobState
from zico.scheduler.policies import REAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FOR_EVER = 1_000_000
PEAK = 6
KEPT = 6
SCRIPT = """
from zico.heap import allocator
from zico.job.session import attach

session = attach("test")
record = session.heap.record[0]
while True:
    allocator.free(record, allocator.allocate(record, session.membership.region_bytes, 64))
    session.step()
"""


def states(made: Pool) -> dict[str, str]:
    """Return what the status says that each job does."""
    return {job.name: job.state for job in made.client.status().jobs}


def goes_on(made: Pool, job: LightJob, iterations: int = 5) -> None:
    """Wait until a job has ended so many more iterations."""
    until(
        made.exceeds("iteration", [job.place], int(made.jobs["iteration"][job.place]) + iterations), ANSWER_S, "trains"
    )


# -- pause and resume ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "name", "left"),
    [("zico", "kept", 0), ("zico", "paged", LEAST), *((policy, "kept", None) for policy in REAL)],
)
def test_a_paused_job_holds_nobody_up(nursery: Nursery, policy: str, name: str, left: int | None) -> None:
    """Invariant 7: a job trains on although it needs memory that a paused one keeps, which finds all as it was."""
    with (
        pool(regions=PEAK + KEPT - 1, policy=policy) as made,
        nursery.job(made, name) as kept,
        nursery.job(made, "trains") as trains,
    ):
        assert kept.ask("mark") == "began"
        assert kept.ask(f"hold {KEPT}") == "1"
        made.client.change(Change(job=name, paused=True, move=left is not None))
        assert states(made)[name] == "pausing"
        kept.tell("mark")
        until(lambda: states(made)[name] == "paused", ANSWER_S, "it is paused")
        if left is not None:
            until(lambda: made.jobs["held"][kept.place] <= left, ANSWER_S, "it has moved")
        trains.tell(f"train {FOR_EVER} {PEAK}")
        goes_on(made, trains)
        made.look().check()
        report = next(job for job in made.client.status().jobs if job.name == name)
        assert (report.waiting_s, report.waits_for) == (0, ())
        assert report.away_bytes + report.saving.out_bytes > 0
        assert not kept.has_answered()
        made.client.change(Change(job=name, paused=False))
        assert kept.answer() == "began"
        assert kept.ask("free") == "freed"
        made.look().check()


def test_a_paused_job_ends_on_ctrl_c(tmp_path: Path) -> None:
    """Python sees the signal while the job stands at its boundary, and its place is free afterwards."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    with pool() as made, script_in(made, "a", script) as process:
        place = place_of(made, "a", process)
        process.until(made.exceeds("iteration", [place], 3), "it trains", ANSWER_S)
        made.client.change(Change(job="a", paused=True))
        until(lambda: states(made) == {"a": "paused"}, ANSWER_S, "it is paused")
        process.process.send_signal(signal.SIGINT)
        done = process.finish(ANSWER_S)
        assert "KeyboardInterrupt" in done.stderr
        assert done.returncode == -signal.SIGINT
        until(lambda: made.jobs["state"][place] == JobState.EMPTY, ANSWER_S, "its place is free")


def test_a_paused_job_goes_on_when_the_broker_dies(nursery: Nursery) -> None:
    """Invariant 5: nobody could resume it any more."""
    with pool() as made, nursery.job(made, "a") as job:
        assert job.ask("mark") == "began"
        made.client.change(Change(job="a", paused=True))
        job.tell("mark")
        made.waits_at_boundary(job)
        made.kill_broker()
        assert job.answer() == "began"


@pytest.fixture(scope="module")
def one_job(nursery: Nursery) -> Iterator[Pool]:
    """Give a pool with one job that trains."""
    with pool(regions=16, most=24) as made, nursery.job(made, "a") as job:
        job.tell(f"train {FOR_EVER} 2")
        goes_on(made, job)
        yield made


def test_the_commands_say_what_has_come_to_be(one_job: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    """A job is paused and goes on, and the status says so; what cannot be is refused in a sentence."""
    socket = ("--socket", str(one_job.socket))
    for arguments, reason in (
        (["resume", "a"], "zico: a is not paused"),
        (["pause", "b"], "zico: no job is called 'b': there are a"),
        (["resume", "b"], "zico: no job is called 'b': there are a"),
    ):
        assert main([*arguments, *socket]) == 2
        assert capsys.readouterr().err.splitlines() == [reason]
    assert main(["pause", "a", *socket]) == 0
    assert "zico: a pause" in capsys.readouterr().err.replace("is paused", "pause")
    until(lambda: states(one_job) == {"a": "paused"}, ANSWER_S, "it is paused")
    assert main(["pause", "a", *socket]) == 2
    assert capsys.readouterr().err == "zico: a is paused already: zico resume a lets it go on\n"
    assert main(["status", *socket]) == 0
    assert " paused " in capsys.readouterr().out
    assert main(["resume", "a", *socket]) == 0
    assert capsys.readouterr().err == "zico: a goes on\n"
    assert main(["top", "--once", *socket]) == 0
    assert "up 0:00:" in (printed := capsys.readouterr().out)
    assert len(printed.splitlines()) == 5, "no line for keys that nobody can press"
    assert main(["top", *socket]) == 2
    assert "zico status" in capsys.readouterr().err


def test_commands_say_how_many_processes_they_are_about(nursery: Nursery, capsys: pytest.CaptureFixture[str]) -> None:
    """A name means all of that name, such as the ranks of a job, and NAME/PID one of them."""
    with pool() as made, nursery.job(made, "a"), nursery.job(made, "a"), nursery.job(made, "b/1"):
        socket = ("--socket", str(made.socket))
        first, second, _ = (job.pid for job in made.client.status().jobs)

        def paused() -> list[bool]:
            return [job.state == "pausing" for job in made.client.status().jobs]

        assert said(capsys, "pause", f"a/{second}", *socket) == (
            0,
            f"zico: a/{second} pauses when its iteration ends\n",
        )
        assert paused() == [False, True, False]
        assert said(capsys, "pause", "a", *socket) == (0, "zico: a (2 processes) pauses when its iteration ends\n")
        assert said(capsys, "resume", "a", *socket) == (0, "zico: a (2 processes) goes on\n")
        told = f"zico: no process {os.getpid()} of a is in the pool: zico status shows who is\n"
        assert said(capsys, "resume", f"a/{os.getpid()}", *socket) == (2, told)
        assert said(capsys, "pause", "b/1", *socket) == (0, "zico: b/1 pauses when its iteration ends\n")
        assert paused() == [False, False, True]
        told = "zico: a (2 processes) may hold 1 MiB each, weight 1\n"
        assert said(capsys, "limit", "--job", "a", "1MiB", *socket) == (0, told)
        told = f"zico: a/{first} has no limit of its own, weight 1\n"
        assert said(capsys, "limit", "--job", f"a/{first}", "none", *socket) == (0, told)
        assert [job.limit_bytes for job in made.client.status().jobs] == [0, 1 << 20, 0]


# -- several brokers -------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return the exit code of a command, and all that it has said."""
    code = main(arguments)
    out, errors = capsys.readouterr()
    return code, out + errors


def test_commands_find_the_broker_that_they_are_about(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job is found wherever it is; what could be meant of several is asked for in a sentence, and nothing changes."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("ZICO_SOCKET", raising=False)
    with (
        pool(device="host:0") as first,
        pool(device="host:1", regions=8) as second,
        nursery.job(first, "a"),
        nursery.job(first, "both"),
        nursery.job(second, "both"),
        nursery.job(second, "b"),
    ):
        base = tmp_path / "zico"
        base.mkdir(mode=0o700)
        for number, made in enumerate((first, second)):
            (base / f"broker-host-{number}.sock").symlink_to(made.socket)
        before = [made.client.status() for made in (first, second)]
        for words, reason in (
            (
                ["pause", "c"],
                "no job is called 'c': there are a on host:0, both on host:0, both on host:1, b on host:1",
            ),
            (["pause", "both"], "2 brokers have a job called 'both': choose one with --device: host:0, host:1"),
            (["limit", "--job", "both", "1MiB"], "2 brokers have a job called 'both': choose one with --device: "),
            (["limit", "1MiB"], "2 brokers are running: choose one with --device: host:0, host:1"),
            (["pause", "b", "--device", "host:0"], "no job is called 'b': there are a, both"),
            (["top", "--once", "--device", "cuda"], "no broker of cuda:0 runs: there are brokers of host:0, host:1"),
            (["top", "--once", "--device", "hos"], "--device: 'hos' is not a device: give host, cuda or cuda:N"),
        ):
            code, told = said(capsys, *words)
            assert (code > 0, told.startswith(f"zico: {reason}"), told.count("\n")) == (True, True, 1), told
        assert [made.client.status().budget_bytes for made in (first, second)] == [one.budget_bytes for one in before]
        assert [{*states(made).values()} & {"pausing", "paused"} for made in (first, second)] == [set(), set()]
        assert said(capsys, "pause", "b") == (0, "zico: b pauses when its iteration ends\n")
        assert said(capsys, "pause", "both", "--device", "host:1")[0] == 0
        assert [states(made)["both"] for made in (first, second)] == ["running", "pausing"]
        (pid,) = (job.pid for job in second.client.status().jobs if job.name == "both")
        assert said(capsys, "resume", f"both/{pid}") == (0, f"zico: both/{pid} goes on\n")
        assert said(capsys, "resume", "b") == (0, "zico: b goes on\n")
        assert said(capsys, "limit", "--job", "a", "1MiB")[0] == 0
        assert said(capsys, "limit", "--device", "host:1", "1MiB")[0] == 0
        assert second.client.status().budget_bytes == 1 << 20
        heads = ["host:0, policy zico, up", "host:1, policy zico, up"]
        shown = said(capsys, "top", "--once")[1]
        assert [shown.count(head) for head in heads] == [1, 1]
        shown = said(capsys, "top", "--once", "--device", "host:1")[1]
        assert [shown.count(head) for head in heads] == [0, 1]
        shown = said(capsys, "status", "--device", "host:1")[1]
        assert ("device host:1," in shown, "device host:0," in shown) == (True, False)
        with contextlib.closing(Terminal("--interval", "0.1", XDG_RUNTIME_DIR=str(tmp_path))) as terminal:
            terminal.shows("host:1, policy zico")
            terminal.press("jjjp")
            terminal.until(lambda: states(second)["b"] == "pausing", "the last row is the second pool's last job")
            first.kill_broker()
            terminal.shows("host:1, policy zico")
            terminal.press("bnone\r")
            terminal.shows("the budget was 1 MiB and is 2 MiB")
            second.kill_broker()
            assert terminal.end()[0] == 1


# -- zico top on a terminal ------------------------------------------------------------------------


class Terminal:
    """``zico top`` on a terminal of its own; dead when the block ends."""

    def __init__(self, *words: str, **environ: str) -> None:
        """Start it with these words."""
        self._ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("4H", 30, 150, 0, 0))
        self.before = termios.tcgetattr(self.theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zico", "top", *words],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=subprocess.PIPE,
            env=clean_environment() | {"TERM": "xterm"} | environ,
            text=True,
        )
        self._seen = b""

    def press(self, keys: str) -> None:
        """Send keys, as if typed."""
        os.write(self._ours, keys.encode())

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something is so; what is drawn meanwhile is read, since nobody draws on a full terminal."""

        def looked() -> bool:
            while select.select([self._ours], [], [], 0)[0]:
                self._seen += os.read(self._ours, 1 << 16)
            return condition()

        until(looked, ANSWER_S, what)

    def shows(self, text: str) -> None:
        """Wait until a text is drawn after this was asked."""
        self._seen = b""
        self.until(lambda: text.encode() in self._seen, f"it shows {text!r}")

    def end(self) -> tuple[int, str]:
        """Wait for its end; returns its exit code and its complaint."""
        self.until(lambda: self.process.poll() is not None, "it ends")
        _, errors = self.process.communicate(timeout=ANSWER_S)
        return self.process.returncode, errors.strip()

    def close(self) -> None:
        """Kill it and close the terminal."""
        self.process.kill()
        self.process.communicate(timeout=ANSWER_S)
        os.close(self._ours)
        os.close(self.theirs)


def of(made: Pool) -> tuple[str, ...]:
    """Return the words by which ``zico top`` looks at a pool often."""
    return "--interval", "0.1", "--socket", str(made.socket)


@pytest.fixture
def top(one_job: Pool) -> Iterator[Terminal]:
    """Give ``zico top`` of the pool with one job."""
    with contextlib.closing(Terminal(*of(one_job))) as terminal:
        yield terminal


def test_keys_change_the_pool(one_job: Pool, top: Terminal) -> None:
    """Pause, resume, weight, limit and budget; wrong figures are told; the terminal is as before in the end."""

    def is_so(condition: Callable[[], bool], keys: str) -> None:
        top.press(keys)
        top.until(condition, f"{keys!r} does that")

    top.shows("running")
    is_so(lambda: states(one_job) == {"a": "paused"}, "p")
    top.shows("paused")
    top.press("p")
    top.shows("paused already")
    is_so(lambda: states(one_job) != {"a": "paused"}, "r")
    is_so(lambda: one_job.client.status().jobs[0].share.weight == 2.5, "w2.5\r")
    is_so(lambda: one_job.client.status().jobs[0].limit_bytes == 4 * one_job.region_bytes, "l1MiB\r")
    is_so(lambda: one_job.client.status().budget_bytes == 8 * one_job.region_bytes, "b50%\r")
    for keys, reason in (("wx\r", "'x' is not a weight"), ("l1B\r", "below one region"), ("b900T\r", "--most")):
        top.press(keys)
        top.shows(reason)
    top.press("q")
    assert top.end() == (0, "")
    assert termios.tcgetattr(top.theirs) == top.before


def test_ctrl_c_ends_top_and_leaves_the_terminal_as_it_was(top: Terminal) -> None:
    """As any command, and the job is not touched."""
    top.shows("running")
    top.process.send_signal(signal.SIGINT)
    assert top.end() == (130, "")
    assert termios.tcgetattr(top.theirs) == top.before


def test_top_ends_in_a_sentence_when_the_broker_does() -> None:
    """One line on stderr, and the exit code of an error."""
    with pool() as made, contextlib.closing(Terminal(*of(made))) as terminal:
        terminal.shows("no job has joined yet")
        made.kill_broker()
        code, errors = terminal.end()
        assert (code, len(errors.splitlines())) == (1, 1)
        assert "broker" in errors
