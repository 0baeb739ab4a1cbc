"""The scripts of ``deploy/slurm`` under Slurm's own daemons, on one node that is this machine: ``make test-slurm``.

Slurm's daemons have a directory and ports of their own. They watch jobs by ``/proc``, not by
control groups.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.harness import ANSWER_S, PATIENCE_S, PROCESS, TESTS, clean_environment, compile_once, until

from zico.base.errors import ZicoError
from zico.base.paths import cache_root
from zico.broker.client import BrokerClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.broker.protocol.messages import Status

SCRIPTS = TESTS.parent / "deploy" / "slurm"
HOST = socket.gethostname()
NAME = "node1"
"""Of the node, as in the files of ``deploy/slurm``."""
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
LACKING = [name for name in NEEDED if shutil.which(name, path=PATH) is None]

pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)} (Debian: slurm-wlm, munge)"),
    pytest.mark.skipif(os.getuid() != 0, reason="a prolog runs as root"),
]

CONTROLLER = """\
ClusterName=zico
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={directory}/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=2
PartitionName=all Nodes={name} Default=YES State=UP
"""
SETTINGS = """\
ZICO={directory}/zico
ZICO_DEVICE=host
ZICO_OPTIONS="--budget 4GiB"
ZICO_DIRECTORY={directory}/pool
export ZICO_CACHE_DIR={cache} ZICO_CONFIG={directory}/settings.toml
"""


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with contextlib.ExitStack() as owned:
        made = [owned.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in made]


class Cluster:
    """Slurm with one node."""

    def __init__(self, directory: Path, owned: contextlib.ExitStack) -> None:
        """Write its files and start its daemons; ``owned`` ends them."""
        self.directory = directory
        self.settings = directory / "settings.toml"
        self._environment = clean_environment() | {"PATH": PATH, "SLURM_CONF": str(directory / "slurm.conf")}
        self._environment.pop("ZICO", None)  # a job has what it was submitted with: else it would not join
        self._write()
        key, secret = directory / "munge.key", secrets.token_bytes(128)
        key.write_bytes(secret)
        key.chmod(0o600)
        files = [
            f"--{name}={directory}/munge.{name.partition('-')[0]}" for name in ("pid-file", "log-file", "seed-file")
        ]
        self._start(
            owned, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={directory}/munge", *files
        )
        until((directory / "munge").exists, ANSWER_S, "munged listens")
        self._start(owned, "slurmctld", "-D", "-c")
        self._start(owned, "slurmd", "-D", "-N", NAME)
        owned.callback(self._end_jobs)
        until(lambda: self.node() == "idle", ANSWER_S, "the node is there")

    def _write(self) -> None:
        here = self.directory
        here.chmod(0o755)
        for name in ("state", "spool"):
            (here / name).mkdir()
        (here / "nvidia0").touch()
        self.settings.touch()
        for name in ("zico-prolog", "zico-epilog", "zico-task-prolog"):
            shutil.copy(SCRIPTS / name, here)
        ports = free_ports(2)
        ours = (SCRIPTS / "slurm.conf.part").read_text().replace("/etc/slurm/", f"{here}/")
        ours = ours.replace(f"NodeName={NAME}", f"NodeName={NAME} NodeHostname={HOST} NodeAddr=127.0.0.1")
        rest = CONTROLLER.format(host=HOST, name=NAME, directory=here, ports=ports)
        (here / "slurm.conf").write_text(rest + ours)
        (here / "gres.conf").write_text((SCRIPTS / "gres.conf").read_text().replace("/dev/nvidia0", f"{here}/nvidia0"))
        (here / "zico.conf").write_text(SETTINGS.format(directory=here, cache=cache_root()))
        (here / "zico").write_text(f'#!/bin/sh\nexec {sys.executable} -m zico "$@"\n')
        (here / "zico").chmod(0o755)

    def _start(self, owned: contextlib.ExitStack, *argv: str) -> None:
        log = owned.enter_context((self.directory / f"{argv[0]}.out").open("wb"))
        daemon = subprocess.Popen(argv, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        owned.callback(self._end, daemon)

    def _end(self, daemon: subprocess.Popen[bytes]) -> None:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(ANSWER_S)

    def _end_jobs(self) -> None:
        """Cancel all jobs and wait for their epilogs; no broker stays."""
        self.says("scancel", "--user", "root")
        until(lambda: not self.says("squeue", "--noheader"), ANSWER_S, "no job is left")
        until(
            lambda: not self.jobs() and not (self.directory / "pool/zico/broker.sock").exists(), ANSWER_S, "no broker"
        )

    def says(self, *argv: str) -> str:
        """Run one of Slurm's commands and return its words."""
        done = subprocess.run(
            argv,
            env=self._environment,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def node(self) -> str:
        """Return the state of the node; empty if nobody answers yet."""
        with contextlib.suppress(AssertionError):
            return self.says("sinfo", "--noheader", "--format", "%T")
        return ""

    def submit(self, name: str, command: str, *options: str) -> str:
        """Submit a job and return its number."""
        output = str(self.directory / f"{name}.out")
        words = ("sbatch", "--parsable", "--job-name", name, "--output", output, *options, "--wrap", command)
        return self.says(*words)

    def said(self, name: str) -> str:
        """Return what a job has printed."""
        path = self.directory / f"{name}.out"
        return path.read_text() if path.exists() else ""

    def is_over(self, job: str) -> bool:
        """Tell whether a job has ended and its epilog, too."""
        return job not in self.says("squeue", "--noheader", "--format", "%A").split()

    def status(self) -> Status | None:
        """Return what the broker of the node says; ``None`` if none answers."""
        with contextlib.suppress(ZicoError, OSError), BrokerClient(self.directory / "pool/zico/broker.sock") as client:
            return client.status()
        return None

    def jobs(self) -> list[str]:
        """Return the jobs in the pool."""
        status = self.status()
        return sorted(job.name for job in status.jobs) if status else []

    def trains(self, name: str) -> str:
        """Return a command that trains until a byte is in its pipe, and make the pipe."""
        os.mkfifo(self.directory / f"{name}.fifo")
        return f"{sys.executable} {PROCESS / 'sweep_job.py'} 2 {self.directory / name}.fifo"

    def trains_by_itself(self, name: str) -> str:
        """Return a command of a script that joins as an import of an adapter does, and then trains."""
        argv = shlex.split(self.trains(name))
        return shlex.join([sys.executable, "-c", f"import os, zico; zico.join(); os.execv({argv[0]!r}, {argv})"])

    def finish(self, name: str) -> None:
        """Let a job end."""
        with (self.directory / f"{name}.fifo").open("wb") as pipe:
            pipe.write(b"1")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Give a cluster without jobs; nothing of it stays."""
    compile_once()
    with tempfile.TemporaryDirectory(prefix="zs-") as directory, contextlib.ExitStack() as owned:
        yield Cluster(Path(directory), owned)


def test_jobs_of_a_user_share_the_pool_of_a_node_until_the_last_one_ends(cluster: Cluster) -> None:
    """One that is cancelled leaves the other, and a suspended one keeps the broker when another's epilog has run."""
    zico = cluster.directory / "zico"
    jobs = {
        name: cluster.submit(name, f"{zico} run --name {name} -- {cluster.trains(name)}", f"--gres=shard:{shards}")
        for name, shards in (("a", 24), ("b", 40))
    }
    until(lambda: cluster.jobs() == ["a", "b"], PATIENCE_S, "both are in the pool")
    assert "(of the broker that runs)" in cluster.said("a")

    cluster.says("scancel", jobs["a"])
    until(lambda: cluster.is_over(jobs["a"]), ANSWER_S, "the cancelled job is over")
    assert cluster.jobs() == ["b"]

    cluster.says("scontrol", "suspend", jobs["b"])
    other = cluster.submit("c", "true")
    until(lambda: cluster.is_over(other), ANSWER_S, "a job beside it is over")
    cluster.says("scontrol", "resume", jobs["b"])
    assert cluster.jobs() == ["b"]

    cluster.finish("b")
    until(lambda: cluster.is_over(jobs["b"]), ANSWER_S, "the last job is over")
    assert cluster.status() is None
    assert "b ended with exit code 0" in cluster.said("b")


def test_a_script_that_joins_by_itself_may_hold_its_shards(cluster: Cluster) -> None:
    """A task is told by the task prolog where the pool is, and that a shard is a gibibyte."""
    job = cluster.submit("a", cluster.trains_by_itself("a"), "--gres=shard:3")
    until(cluster.jobs, PATIENCE_S, "it is in the pool")
    status = cluster.status()
    assert status is not None
    assert [one.limit_bytes for one in status.jobs] == [3 << 30]
    cluster.finish("a")
    until(lambda: cluster.is_over(job), ANSWER_S, "it is over")


def test_a_users_wrong_settings_drain_no_node(cluster: Cluster) -> None:
    """The job runs, without a broker, and its output says why; the next one has a broker again."""
    cluster.settings.write_text("budget = [")
    job = cluster.submit("a", "echo it runs")
    until(lambda: cluster.is_over(job), PATIENCE_S, "it is over")
    said = cluster.said("a")
    assert "zico: no broker of yours runs on this node" in said
    assert "settings.toml is not TOML" in said
    assert said.endswith("it runs\n")
    assert cluster.node() == "idle"

    cluster.settings.write_text("")
    job = cluster.submit("b", cluster.trains_by_itself("b"), "--gres=shard:1")
    until(cluster.jobs, PATIENCE_S, "the next one is in a pool")
    assert "no broker" not in cluster.said("b")
    cluster.finish("b")
    until(lambda: cluster.is_over(job), ANSWER_S, "it is over")


def test_a_node_without_zico_is_drained(cluster: Cluster) -> None:
    """Slurm gives it no more jobs, and the one that it had waits for another node."""
    (cluster.directory / "zico").unlink()
    cluster.submit("a", "echo it runs")
    until(lambda: cluster.node() == "drained", ANSWER_S, "the node is drained")
    assert "it runs" not in cluster.said("a")
