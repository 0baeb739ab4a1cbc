"""Jobs begin while the broker starts: they wait for it where they join, and end with it if it cannot start."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from cpu.support.zico_process import ZicoRun, customised, descendants, python, survivors
from support.harness import ANSWER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

JOB = (
    "import os; print('pid', os.getpid(), flush=True)\n"
    "from zico.job.session import attach; print('joined under', attach('test').membership.policy, flush=True)"
)
LATE = (
    "import os\nfrom zico.base.errors import BrokerError\nfrom zico.job.session import attach, socket_to_join\n"
    "socket_to_join(); print('pid', os.getpid(), flush=True); open(os.environ['FIFO']).readline()\n"
    "try: attach('test')\n"
    "except BrokerError: print('refused', flush=True)"
)
OUTLIVING = """
import os
from zico.base.errors import BrokerError
from zico.job.session import attach
if os.fork():
    os._exit(0)
os.setsid()
os.chdir({folder!r})
is_late = os.fork()
if is_late:
    open("go").readline()
try:
    attach("test")
except BrokerError:
    open("late" if is_late else "early", "w").write("refused\\n")
"""
IN_BROKER = "import os, resource, sys\nif 'zico.broker' in sys.orig_argv:\n    {}\n"
"""A ``sitecustomize``: what the broker's process does first."""
HELD_UP = "open(os.environ['FIFO']).readline()"
NO_ROOM = HELD_UP + "; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # less than the pool has"


@contextlib.contextmanager
def started(tmp_path: Path, in_broker: str, job: str = JOB) -> Iterator[tuple[ZicoRun, Callable[[], int]]]:
    """Run a job that joins, beside a broker that does ``in_broker`` first; what is called lets it go on."""
    site = customised(tmp_path / "site", IN_BROKER.format(in_broker))
    os.mkfifo(tmp_path / "fifo")
    held_up = os.open(tmp_path / "fifo", os.O_RDWR)
    try:
        with ZicoRun("--name", "a", python(job), **site, FIFO=str(tmp_path / "fifo")) as run:
            yield run, lambda: os.write(held_up, b"\n")
    finally:
        os.close(held_up)


def test_a_job_begins_before_the_broker_is_ready_and_waits_to_join(tmp_path: Path) -> None:
    """What a job imports before it joins costs no time: the broker starts beside it."""
    with started(tmp_path, HELD_UP) as (run, go_on):
        run.read_until("a | pid ")
        assert "joined" not in run.stdout
        go_on()
        run.read_until("a | joined under zico")
        assert run.finish() == 0
        assert "compiling" not in run.stderr, "all that a broker calls is kept on disk"


def test_a_broker_that_compiles_is_not_waited_for_when_all_jobs_have_ended(tmp_path: Path) -> None:
    """A mistyped name costs no minutes: the broker and the processes that compile for it end, and leave nothing."""
    with ZicoRun("--json", str(tmp_path / "r.json"), "no-such-program", ZICO_CACHE_DIR=str(tmp_path / "cache")) as run:
        run.read_until("zico: compiling; this takes a minute or two, once per machine")
        below = descendants(run.process.pid)
        code = run.finish()
        assert (code, survivors(below), run.leftovers) == (127, [], [])
    assert list((tmp_path / "cache").glob("*/*.o")) == [], "it has waited for the compiler"
    (job,) = json.loads((tmp_path / "r.json").read_text())["jobs"]
    assert job["note"] == "was not started"


def test_a_process_that_outlives_its_run_waits_for_no_broker(tmp_path: Path) -> None:
    """The directory of the run's socket has gone, or goes while it waits: it is refused and trains alone."""
    with contextlib.ExitStack() as stack:
        pipes = {}
        for name in ("go", "late", "early"):
            os.mkfifo(tmp_path / name)
            pipes[name] = os.open(tmp_path / name, os.O_RDWR)
            stack.callback(os.close, pipes[name])
        run, go_on = stack.enter_context(started(tmp_path, HELD_UP, OUTLIVING.format(folder=str(tmp_path))))
        run.read_until("a ended with exit code 0")
        go_on()
        assert (run.finish(), run.leftovers) == (0, [])
        os.write(pipes.pop("go"), b"\n")
        for pipe in pipes.values():
            assert select.select([pipe], [], [], ANSWER_S)[0], "it waits for a broker"
            assert os.read(pipe, 100) == b"refused\n"


def test_a_broker_that_cannot_start_ends_the_jobs(tmp_path: Path) -> None:
    """A job that waits to join would else train beside no budget: the run says why, and nothing stays."""
    with started(tmp_path, NO_ROOM) as (run, go_on):
        pid = run.number_after("a | pid ")
        go_on()
        code = run.finish()
        assert (code, survivors([pid]), run.leftovers) == (1, [], [])
        assert "zico: the broker could not start: " in run.stderr
        assert "without coordination" not in run.stderr
        assert "joined" not in run.stdout


def test_a_job_that_comes_after_the_broker_has_ended_does_not_wait_for_it(tmp_path: Path) -> None:
    """It is refused at once, as if there were no broker, and trains alone; the run has said that the broker is gone."""
    with started(tmp_path, "pass", LATE) as (run, go_on):
        run.read_until("a | pid ")
        below = (Path("/proc") / str(pid) for pid in descendants(run.process.pid))
        (broker,) = [process for process in below if b"zico.broker" in (process / "cmdline").read_bytes()]
        os.kill(int(broker.name), signal.SIGTERM)
        run.read_until("the broker has ended: ")
        go_on()
        run.read_until("a | refused")
        assert run.finish() == 0
