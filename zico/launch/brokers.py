"""Which running broker is meant: one rule for ``status``, ``top``, ``limit``, ``pause``, ``resume`` and ``zico.Pool``.

``--socket``, else ``ZICO_SOCKET``, names one broker; else all of this user's count. ``--device``
leaves those of these devices. A command about a job is for the broker that has the job, one about a
pool for the only broker that is left. ``NAME`` means every process of that name, such as the ranks
of one job, and ``NAME/PID`` one of them.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

import msgspec

from zico.base.errors import BrokerError, CommandError, ConfigError
from zico.base.rundir import known_sockets
from zico.base.settings import SOCKET_VARIABLE, parse_devices
from zico.base.units import parse_size, parse_whole
from zico.broker.client import BrokerClient
from zico.broker.protocol.messages import MAX_PID, MAX_SIZE_BYTES, Change
from zico.broker.shares import parse_priority, parse_slo, parse_weight

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zico.broker.protocol.messages import JobReport, Status

Answer: TypeAlias = "tuple[Path, Status]"
"""A broker's socket, and how its pool is now."""
ANSWER_S = 5.0
"""A broker may take so long to answer a command."""
_NO_LIMIT = "none"


@dataclasses.dataclass(frozen=True)
class Meant:
    """The processes that a command is about."""

    name: str
    pid: int | None = None
    """Of one of them; ``None``: all of that name."""

    def __str__(self) -> str:
        return self.name if self.pid is None else f"{self.name}/{self.pid}"

    def among(self, jobs: Iterable[JobReport]) -> list[JobReport]:
        """Return those that are in a pool."""
        return [job for job in jobs if job.name == self.name and self.pid in (None, job.pid)]

    def as_changed(self, processes: int) -> str:
        """Return how a sentence names so many processes that a change was for."""
        return f"{self} ({processes} processes)" if processes > 1 else str(self)

    @property
    def only_pid(self) -> int | msgspec.UnsetType:
        """Return what a ``Change`` says of it."""
        return msgspec.UNSET if self.pid is None else self.pid


def meant_by(text: str, statuses: Iterable[Status]) -> Meant:
    """Return what ``NAME`` or ``NAME/PID`` means, where jobs of these pools may have names with a slash."""
    names = {job.name for status in statuses for job in status.jobs}
    name, _, number = text.rpartition("/")
    pid = parse_whole(number, 0, MAX_PID)
    if text not in names and name in names and pid is not None:
        return Meant(name, pid)
    return Meant(text)


def change_of(
    size: str | None, job: Meant | None, weight: str | None, priority: str | None, slo: str | None, pool: Status
) -> Change:
    """Return the change that these words ask for, which are those of ``zico limit``.

    Raises:
        ConfigError: They ask for none, or a figure cannot be.
    """
    of_job = [option for option in (weight, priority, slo) if option is not None]
    if size is None and not of_job:
        raise ConfigError("nothing to change: give a SIZE, or --job with a SIZE, --weight, --priority or --slo")
    if job is None and of_job:
        raise ConfigError("--weight, --priority and --slo change one job: name it with --job")
    size_bytes = msgspec.UNSET if size is None else size_bytes_of(size, pool, of_job=job is not None)
    return Change(
        job=msgspec.UNSET if job is None else job.name,
        pid=msgspec.UNSET if job is None else job.only_pid,
        budget_bytes=size_bytes if job is None else msgspec.UNSET,
        limit_bytes=size_bytes if job is not None else msgspec.UNSET,
        weight=msgspec.UNSET if weight is None else parse_weight(weight),
        priority=msgspec.UNSET if priority is None else parse_priority(priority),
        slo=msgspec.UNSET if slo is None else parse_slo(slo),
    )


def size_bytes_of(text: str, pool: Status, *, of_job: bool) -> int:
    """Return what a SIZE means to a pool, or to a job of it; 0: no limit of the job's own."""
    cleaned = text.strip()
    if cleaned.lower() == _NO_LIMIT:
        return 0 if of_job else pool.most_bytes
    whole_bytes = pool.first_budget_bytes if cleaned.endswith("%") else MAX_SIZE_BYTES
    return parse_size(cleaned, whole_bytes=whole_bytes)


class Brokers:
    """The running brokers that a command may be about; owns a connection to each until the block ends."""

    def __init__(self, socket: Path | None, device: str | None) -> None:
        """Ask nobody yet.

        Args:
            socket: What ``--socket`` says.
            device: What ``--device`` says.

        Raises:
            ConfigError: Those are no devices.
        """
        self._socket = socket
        self._devices: tuple[str, ...] = ()
        """Empty: of any device."""
        if device is not None:
            try:
                self._devices = parse_devices(device)
            except ConfigError as error:
                raise ConfigError(f"--device: {error}") from None
        self._clients: dict[Path, BrokerClient] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    def look(self) -> list[Answer]:
        """Return the answers of those that give one within ``ANSWER_S`` each; who runs is found anew each time.

        Raises:
            CommandError: None does.
        """
        answers, reasons = [], []
        for path in self._paths():
            client = self._clients.setdefault(path, BrokerClient(path, ANSWER_S))
            try:
                answers.append((path, client.status()))
            except BrokerError as error:
                reasons.append(str(error))
        if not answers:
            raise CommandError("no broker is running" + "".join(f"; {reason}" for reason in reasons), exit_code=1)
        found = [(path, status) for path, status in answers if status.device in (self._devices or {status.device})]
        if not found:
            there = ", ".join(dict.fromkeys(status.device for _, status in answers))
            raise CommandError(
                f"no broker of {' or '.join(self._devices)} runs: there are brokers of {there}", exit_code=1
            )
        return found

    def only(self) -> Answer:
        """Return the answer of the only broker.

        Raises:
            CommandError: None answers, or several do.
        """
        found = self.look()
        if len(found) > 1:
            raise CommandError(f"{len(found)} brokers are running: {_choose(found)}")
        return found[0]

    def having(self, job: str) -> tuple[Path, Status, Meant]:
        """Return the answer of the broker that has a job, and what is meant by it; of the only one also without it.

        Raises:
            CommandError: No broker answers, or several have a job of that name.
            ConfigError: Of several brokers none has it.
        """
        found = self.look()
        meant = meant_by(job, (status for _, status in found))
        if len(found) == 1:
            return *found[0], meant  # which says itself whom it has
        its = [answer for answer in found if meant.among(answer[1].jobs)]
        if not its:
            there = [f"{one.name} on {status.device}" for _, status in found for one in status.jobs]
            told = f"there are {', '.join(dict.fromkeys(there))}" if there else "none has joined yet"
            raise ConfigError(f"no job is called {job!r}: {told}")
        if len(its) > 1:
            raise CommandError(f"{len(its)} brokers have a job called {job!r}: {_choose(its)}")
        return *its[0], meant

    def change(self, path: Path, wanted: Change) -> tuple[Status, int]:
        """Change the pool of the broker at ``path``; returns how it is then, and how many processes that was for.

        Raises:
            BrokerError: The broker does not answer.
            ConfigError: The broker refuses the change.
        """
        client = self._clients[path]
        processes = client.change(wanted)
        return client.status(), processes

    def _paths(self) -> list[Path]:
        if self._socket is not None:
            return [self._socket]
        named = os.environ.get(SOCKET_VARIABLE)
        return [Path(named)] if named else known_sockets()


def _choose(found: Iterable[Answer]) -> str:
    """Return how to say which of several brokers is meant; ``--device`` where that is enough."""
    where = [(status.device, path) for path, status in found]
    devices = [device for device, _ in where]
    if len(set(devices)) == len(devices):
        return f"choose one with --device: {', '.join(devices)}"
    return f"choose one with --socket: {', '.join(f'{path} ({device})' for device, path in where)}"
