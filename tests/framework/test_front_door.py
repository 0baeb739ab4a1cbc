"""Plain scripts that import an adapter share one pool of their user's, which comes and goes with them."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbclient
import nbformat
import psutil
import pytest
from support.harness import ANSWER_S, FRAMEWORK, PATIENCE_S, clean_environment, compile_once, until
from support.scripts import Script, alone

if TYPE_CHECKING:
    from collections.abc import Iterator

BUDGET = "256MiB"
SCRIPT = str(FRAMEWORK / "front_door.py")


class Plain(Script):
    """A plain script in a terminal of its own."""

    def __init__(self, framework: str, runtime: Path, *, fresh: bool = False, **environ: str) -> None:
        """Start it; nothing of its environment is Zico's but what is said here."""
        base = clean_environment() | {"XDG_RUNTIME_DIR": str(runtime), "PYTHONPATH": str(FRAMEWORK)}
        base.pop("ZICO", None)
        super().__init__([SCRIPT, framework], base | environ, loaded="" if fresh else "bare torch", fresh=fresh)

    def ask(self, line: str) -> Any:  # noqa: ANN401 - JSON
        """Return its answer."""
        self.tell(line)
        return json.loads(self.line())


@pytest.fixture
def runtime() -> Iterator[Path]:
    """Give a runtime directory; no broker that listens there outlives the test."""
    compile_once()
    path = Path(tempfile.mkdtemp(prefix="zf-"))
    yield path
    left = brokers(path)
    for broker in left:
        broker.kill()
    shutil.rmtree(path)
    assert not left, "a broker has stayed"


@functools.cache
def losses_alone() -> Any:  # noqa: ANN401 - JSON
    """Return the losses of five steps without Zico."""
    with Script([SCRIPT, "torch"], clean_environment(), loaded="bare torch") as lonely:
        lonely.tell("train 5")
        return json.loads(lonely.line())


def brokers(runtime: Path) -> list[psutil.Process]:
    """Return the brokers whose sockets are there."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "broker" in words and any(word.startswith(str(runtime)) for word in words):
            found.append(process)
    return found


def test_two_plain_scripts_share_one_pool_that_ends_with_the_last_of_them(runtime: Path) -> None:
    """PyTorch in one terminal and Keras in another, each with its own losses; who starts the broker may end first."""
    expected = losses_alone()
    with Plain("torch", runtime, fresh=True, ZICO_BUDGET=BUDGET) as first:
        assert first.ask("train 5") == expected
        with Plain("keras", runtime, fresh=True) as second:
            assert len(second.ask("train 3")) == 3
            assert first.ask("train 5") == expected
            figures = [script.ask("status") for script in (first, second)]
            assert [one["budget_bytes"] for one in figures] == [256 << 20] * 2
            assert [one["iterations"] for one in figures] == [10, 3]
            assert figures[1]["frameworks"][-1] == "keras"
            assert len(brokers(runtime)) == 1
            done = first.finish()
            assert done.returncode == 0
            assert done.stderr == "zico: shares 256 MiB of host, started by this process; ZICO=off leaves this out\n"
            assert len(second.ask("train 3")) == 3
            assert len(brokers(runtime)) == 1
            done = second.finish()
            assert done.returncode == 0
            assert "zico: shares 256 MiB of host, 1 other job; ZICO=off leaves this out\n" in done.stderr
    until(lambda: not brokers(runtime), ANSWER_S, "the broker has ended")
    assert [path.name for path in (runtime / "zico").iterdir()] == []


def test_scripts_that_begin_together_start_one_broker(runtime: Path) -> None:
    """Whoever comes second waits for the first one's broker."""
    with Plain("torch", runtime, ZICO_BUDGET=BUDGET) as one, Plain("torch", runtime, ZICO_BUDGET=BUDGET) as other:
        assert one.ask("train 2") == other.ask("train 2")
        assert [script.ask("status")["iterations"] for script in (one, other)] == [2, 2]
        assert len(brokers(runtime)) == 1
        assert [script.finish().returncode for script in (one, other)] == [0, 0]
    until(lambda: not brokers(runtime), ANSWER_S, "the broker has ended")


def test_a_script_that_leaves_goes_on_outside(runtime: Path) -> None:
    """Tensors are the pool's until then, and not afterwards, before the broker hears of it.

    An adapter is enabled once, also if by hand, too.
    """
    with Plain("torch", runtime, ZICO_BUDGET=BUDGET) as script:
        assert script.ask("enable")
        expected = script.ask("train 3")
        assert script.ask("status")["iterations"] == 3
        assert script.ask("in_pool")
        (broker,) = brokers(runtime)
        broker.suspend()
        assert script.ask("leave") is None
        assert not script.ask("in_pool")
        assert script.ask("train 3") == expected
        broker.resume()
        assert script.finish().returncode == 0
    until(lambda: not brokers(runtime), ANSWER_S, "the broker has ended")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"ZICO": "off"}, ""),
        (
            {"ZICO_BUDGET": "plenty"},
            "zico: this process shares no memory: the broker could not start: ZICO_BUDGET: 'plenty' is not",
        ),
        ({"ZICO_DEVICE": "cuda:7"}, "zico: this process shares no memory: the broker could not start: ZICO_DEVICE"),
    ],
)
def test_a_script_without_a_pool_goes_on_without_zico(runtime: Path, environ: dict[str, str], said: str) -> None:
    """Switched off, or where there can be no broker: at most one line, and the script goes on."""
    with Plain("torch", runtime, **environ) as script:
        assert script.ask("status") is None
        done = script.finish()
    assert done.returncode == 0
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == bool(said)


def test_a_broker_that_was_killed_is_followed_by_another(runtime: Path) -> None:
    """Its socket is stale: the next script starts a broker of its own there."""
    with Plain("torch", runtime, ZICO_BUDGET=BUDGET) as first:
        expected = first.ask("train 2")
        (broker,) = brokers(runtime)
        os.kill(broker.pid, signal.SIGKILL)
        until(lambda: not brokers(runtime), PATIENCE_S, "it is dead")
        with Plain("torch", runtime, ZICO_BUDGET=BUDGET) as second:
            assert second.ask("train 2") == expected
            assert first.ask("train 2") == expected
            assert second.finish().returncode == 0
        assert first.finish().returncode == 0
    until(lambda: not brokers(runtime), ANSWER_S, "the broker has ended")


# -- a daemon --------------------------------------------------------------------------------------

TRAINING = (str(FRAMEWORK / "torch_job.py"), "--iterations", "8")


def daemon(runtime: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Return how ``zico broker`` with these words has ended."""
    environ = clean_environment() | {"XDG_RUNTIME_DIR": str(runtime)}
    argv = [sys.executable, "-m", "zico", "broker", *words]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_a_daemon_that_is_killed_and_started_again_keeps_the_jobs_of_zico_run_and_of_scripts(runtime: Path) -> None:
    """Both join its pool, lose their broker half-way, get the next one, and compute the same bits as alone."""
    expected = losses_alone()
    with alone(*TRAINING) as trainer:
        losses = trainer.finish().stdout
    assert daemon(runtime, "start", "--budget", BUDGET).returncode == 0
    environ = clean_environment() | {"XDG_RUNTIME_DIR": str(runtime)}
    run = ["-m", "zico", "run", "--quiet", "--json", str(runtime / "run.json"), "--", sys.executable, *TRAINING]
    with (
        Plain("torch", runtime) as script,
        Script([*run, "--pause-at", "4"], environ, fresh=True) as trains,
    ):
        said = [trains.line().removeprefix("torch_job | ") for _ in range(5)]
        assert said.pop() == "half-way"
        assert script.ask("train 5") == expected
        (broker,) = brokers(runtime)
        broker.kill()
        until(lambda: not brokers(runtime), PATIENCE_S, "it is dead")
        again = daemon(runtime, "start", "--budget", "1GiB")
        assert again.returncode == 0, again.stderr
        for told in ("took over a pool of 256 MiB with", "front_door (process", "torch_job (process"):
            assert told in again.stderr
        assert script.ask("train 5") == expected
        trains.tell("on")
        done = trains.finish()
        assert done.returncode == 0, done.stderr
        said += [line.removeprefix("torch_job | ") for line in done.stdout.splitlines()]
        assert said == losses.splitlines()
        figures = json.loads((runtime / "run.json").read_text())
        assert [(job["name"], job["iterations"]) for job in figures["jobs"]] == [("torch_job", 8)]
        assert figures["budget_bytes"] == 256 << 20
        assert script.ask("status")["iterations"] == 10
        stopped = daemon(runtime, "stop")
        assert "front_door (process" in stopped.stdout
        assert script.ask("train 5") == expected
        assert script.finish().returncode == 0
    (runtime / "run.json").unlink()
    assert daemon(runtime, "status").stdout == "no broker runs\n"


CELLS = (
    "import zico.adapters.torch",
    """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(512, 1024)).square().mean().backward()
    optimizer.step()
""",
    """
import json, zico
print(json.dumps(zico.status()))
""",
)
"""Of a notebook."""


def test_a_notebooks_kernel_is_a_job_until_it_ends(runtime: Path, tmp_path: Path) -> None:
    """Its first cell imports the adapter; what later cells train is the pool's, and the broker ends with the kernel."""
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    environ = clean_environment() | {"XDG_RUNTIME_DIR": str(runtime), "ZICO_BUDGET": BUDGET}
    environ["JPY_SESSION_NAME"] = str(tmp_path / "exp.ipynb")  # as Jupyter's server does
    environ |= {"IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path / "jupyter")}
    environ.pop("ZICO", None)
    client = nbclient.NotebookClient(notebook, timeout=int(PATIENCE_S), kernel_name="python3")
    client.execute(env=environ)
    (said,) = [output.text for output in cells[-1].outputs if output.output_type == "stream"]
    status = json.loads(said)
    assert status["name"] == "exp"
    assert status["iterations"] == 4
    assert status["peak_bytes"] > 4 << 20
    assert status["budget_bytes"] == 256 << 20
    until(lambda: not brokers(runtime), ANSWER_S, "the broker has ended")
