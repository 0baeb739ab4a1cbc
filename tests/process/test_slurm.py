"""The scripts of ``deploy/slurm``, run as Slurm runs them; a stand-in for ``squeue`` says which jobs there are."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.harness import PATIENCE_S, TESTS, clean_environment, compile_once

from zico.base.paths import cache_root

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPTS = TESTS.parent / "deploy" / "slurm"

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="a prolog runs as root")


class Node:
    """A node of a cluster, as its scripts see it."""

    def __init__(self, directory: Path) -> None:
        """Make the programs that they call."""
        self.pool = directory / "pool"
        self._running = directory / "running"
        self._running.write_text("")
        programs = directory / "bin"
        programs.mkdir()
        for name, line in {
            "zico": f'exec {sys.executable} -m zico "$@"',
            "squeue": f"cat {self._running}",
        }.items():
            (programs / name).write_text(f"#!/bin/sh\n{line}\n")
            (programs / name).chmod(0o755)
        self.squeue = programs / "squeue"
        self._environment = clean_environment() | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "ZICO": str(programs / "zico"),
            "ZICO_DEVICE": "host",
            "ZICO_OPTIONS": "--budget 64MiB",
            "ZICO_DIRECTORY": str(self.pool),
            "ZICO_CACHE_DIR": str(cache_root()),
        }

    def runs(self, script: str, job: int, *, beside: tuple[int, ...] = (), **variables: str) -> str:
        """Run a script for a job, while others run; return what it has said."""
        self._running.write_text("".join(f"{each}\n" for each in (job, *beside)))
        environment = self._environment | {"SLURM_JOB_UID": str(os.getuid()), "SLURM_JOB_GID": str(os.getgid())}
        environment |= {"SLURM_JOB_ID": str(job), "SLURM_SHARDS_ON_NODE": "24"} | variables
        done = subprocess.run(
            [str(SCRIPTS / script)], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> tuple[int, str]:
        """Return how ``zico broker status`` has ended, and its words."""
        environment = clean_environment() | {"XDG_RUNTIME_DIR": str(self.pool)}
        argv = [sys.executable, "-m", "zico", "broker", "status"]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        return done.returncode, done.stdout


@pytest.fixture
def node() -> Iterator[Node]:
    """Give a node without jobs; no broker of it stays."""
    compile_once()
    with tempfile.TemporaryDirectory(prefix="zs-") as directory:
        made = Node(Path(directory))
        yield made
        made.runs("zico-epilog", 0)
        assert made.status()[0] == 1


def test_the_first_job_of_a_user_starts_a_broker_and_the_last_one_ends_it(node: Node) -> None:
    """A second job finds the broker there; it stays while a job of the user runs."""
    node.runs("zico-prolog", 1)
    code, first = node.status()
    assert code == 0
    node.runs("zico-prolog", 2, beside=(1,))
    code, second = node.status()
    assert code == 0
    assert second.split()[:2] == first.split()[:2]
    node.runs("zico-epilog", 1, beside=(2,))
    assert node.status()[0] == 0
    node.runs("zico-epilog", 2)
    assert node.status()[0] == 1


def test_the_broker_stays_where_slurm_does_not_say_who_runs(node: Node) -> None:
    """Jobs of the user may be on the node."""
    node.runs("zico-prolog", 1)
    before = node.squeue.read_text()
    node.squeue.write_text("#!/bin/sh\nexit 1\n")
    node.runs("zico-epilog", 1)
    assert node.status()[0] == 0
    node.squeue.write_text(before)


def test_a_broker_that_does_not_start_fails_no_prolog(node: Node) -> None:
    """The node would be drained; the task prolog says why instead, until a broker starts."""
    options = {"ZICO_OPTIONS": "--budget nonsense"}
    node.runs("zico-prolog", 1, **options)
    assert node.status()[0] == 1
    told = node.runs("zico-task-prolog", 1).splitlines()
    assert told[2].startswith("print zico: no broker of yours runs on this node")
    assert "nonsense" in told[3]
    node.runs("zico-prolog", 2, beside=(1,))
    assert node.status()[0] == 0
    assert len(node.runs("zico-task-prolog", 2).splitlines()) == 2


def test_a_task_is_told_where_the_pool_is_and_what_it_may_hold(node: Node) -> None:
    """The task prolog prints variables as Slurm reads them."""
    assert node.runs("zico-task-prolog", 1).splitlines() == [
        f"export XDG_RUNTIME_DIR={node.pool}",
        "export ZICO_JOB_LIMIT=24GiB",
    ]
