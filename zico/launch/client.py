"""Python's side of the commands: a pool that runs already, and a run of jobs.

``zico.Pool`` and ``zico.run`` are these. Words and figures are those of ``zico status``, ``limit``,
``pause``, ``resume`` and ``run``.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from zico.base import interpreter
from zico.base.errors import CommandError
from zico.broker.protocol.messages import Change
from zico.launch.brokers import Brokers, change_of
from zico.report.model import RunReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.broker.protocol.messages import Status

Option: TypeAlias = "str | int | float | bool | Path | Sequence[str] | Mapping[str, str | int | float] | None"
JSON_NAME = "run.json"
_INTERRUPTED_S = 10.0
"""Longer than ``zico run`` takes to end its jobs, with the grace that it gives by default."""


class Pool:
    """A pool that runs: how it is, and what can be changed while jobs train.

    Each call asks the broker and waits for its answer, five seconds at most. Nothing is kept open.
    Where no broker runs, or several may be meant, a call raises ``CommandError``. It raises
    ``BrokerError`` where the broker does not answer, and ``ConfigError`` where it refuses.
    """

    def __init__(self, device: str | None = None, socket: str | Path | None = None) -> None:
        """Ask nobody yet.

        Args:
            device: Of the pool: ``host``, ``cuda:0``; by default the only one there is.
            socket: The broker's; by default ``ZICO_SOCKET``, else any of this user's.
        """
        self._device = device
        self._socket = None if socket is None else Path(socket)

    def __repr__(self) -> str:
        return f"zico.Pool(device={self._device!r}, socket={self._socket and str(self._socket)!r})"

    def status(self) -> Status:
        """Return how the pool and its jobs are, as ``zico status --json`` prints it."""
        with self._brokers() as brokers:
            return brokers.only()[1]

    def limit(
        self,
        size: str | int | None = None,
        *,
        job: str | None = None,
        weight: float | None = None,
        priority: int | None = None,
        slo: str | None = None,
    ) -> Status:
        """Change the budget, or a job's limit, weight, priority or promise; returns how the pool is then.

        No job is stopped. A larger budget takes effect at once, a smaller one as jobs return memory.

        Args:
            size: ``20GiB``, bytes, a share of the first budget such as ``50%``, or ``none``.
            job: ``NAME`` or ``NAME/PID`` of a job; by default the budget changes.
            weight: How much the job's throughput counts.
            priority: Jobs of a higher one start first.
            slo: By how much the job may be slower than alone, such as ``10%``; ``none``: nothing is promised.
        """
        with self._brokers() as brokers:
            path, before, meant = (*brokers.only(), None) if job is None else brokers.having(job)
            words = [None if one is None else str(one) for one in (weight, priority, slo)]
            wanted = change_of(None if size is None else str(size), meant, words[0], words[1], words[2], before)
            return brokers.change(path, wanted)[0]

    def pause(self, job: str, *, move: bool = False) -> Status:
        """Let a job begin no further iteration; ``move``: what it keeps leaves the budget. Returns without waiting."""
        return self._pause(job, paused=True, move=move)

    def resume(self, job: str) -> Status:
        """Let a paused job go on."""
        return self._pause(job, paused=False)

    def _pause(self, job: str, *, paused: bool, move: bool = False) -> Status:
        with self._brokers() as brokers:
            path, _, meant = brokers.having(job)
            return brokers.change(path, Change(job=meant.name, pid=meant.only_pid, paused=paused, move=move))[0]

    def _brokers(self) -> Brokers:
        return Brokers(self._socket, self._device)


def run(commands: Sequence[str | Sequence[str]], **options: Option) -> RunReport:
    """Run jobs in one pool, as ``zico run`` does, and return its report when the last one has ended.

    All output goes to this process's standard error. An interrupt ends the jobs.

    Args:
        commands: What each job runs: a text as for ``zico run``, or a sequence of words.
        options: Of ``zico run``, with underscores: ``budget="20GiB"``, ``policy="serial"``. A flag
            is ``True``. An option that may be repeated takes a sequence; one of jobs takes a
            mapping: ``limit={"train": "2GiB"}``.

    Returns:
        The report, as ``zico run --json`` writes it. ``jobs`` have ``exit_code``: a job that fails raises nothing.

    Raises:
        CommandError: The jobs could not be started; what was wrong is on standard error.
    """
    texts = [one if isinstance(one, str) else shlex.join(one) for one in commands]
    with tempfile.TemporaryDirectory(prefix="zico-") as directory:
        path = Path(directory, JSON_NAME)
        words = ["run", f"--json={path}", *words_of(options), *texts]
        code = _ended(interpreter.command("-m", "zico", *words))
        if not path.exists():
            raise CommandError("zico run did not start the jobs: standard error says why", exit_code=code)
        return msgspec.json.decode(path.read_bytes(), type=RunReport)


def _ended(argv: Sequence[str]) -> int:
    """Run a command that ends by an interrupt, and return its exit code."""
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno()) as process:  # noqa: S603 - ours
        try:
            return process.wait()
        except KeyboardInterrupt:
            # A terminal has sent it to the command, too, which takes a second one for haste.
            try:
                process.wait(_INTERRUPTED_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
            raise


def words_of(options: Mapping[str, Option]) -> Iterator[str]:
    """Yield the words of a command line that say the same."""
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        match value:
            case None | False:
                continue
            case True:
                yield option
            case Mapping():
                for job, its in value.items():
                    yield from (option, f"{job}={its}")
            case Sequence() if not isinstance(value, str):
                for one in value:
                    yield from (option, str(one))
            case _:
                yield from (option, str(value))
