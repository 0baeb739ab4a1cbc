"""One device of a run: its settings, its broker, what its jobs are told, and what its broker tells of them."""

from __future__ import annotations

import dataclasses
import shutil
import time
from typing import TYPE_CHECKING

from zico.base.mps import PERCENTAGE_VARIABLE, daemon_at
from zico.base.settings import HOST, kind_of
from zico.broker.protocol.messages import Report
from zico.launch.broker import BrokerProcess, JoinedBroker
from zico.launch.devices import device_variables

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from zico.base.settings import Setting, Settings
    from zico.broker.metrics import Address
    from zico.broker.protocol.messages import JobReport, Outside, Share
    from zico.launch.broker import RunBroker
    from zico.launch.jobs import Listener
    from zico.launch.watchdog import Watchdog
    from zico.report.model import Record

LOOKING_SHARE = 0.02
"""Looking at the record takes at most this share of the time: it grows with the run."""
TIME_SLICES = "the jobs take turns on the GPU; with --mps their kernels overlap"


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to run on."""

    settings: Settings
    joins: Path | None = None
    """The socket of a daemon whose pool the jobs join instead of one of their own."""
    record_to: Path | None = None
    """Where to copy the broker's record, if it wrote one."""


class Pool:
    """One device's pool in a run."""

    def __init__(self, target: Target, environ: Mapping[str, str], run: str, *, sweeps: bool) -> None:
        """Start nothing.

        Args:
            target: The device.
            environ: The jobs' environment before the device adds to it.
            run: What the run's jobs tell the broker of whose they are.
            sweeps: More jobs may come than a broker reports.
        """
        self._target = target
        self._sweeps = sweeps
        self.device = target.settings.device.value
        self.environ = {**environ, **device_variables(target.settings)}
        """Of each job in the pool."""
        self.is_joined = target.joins is not None
        self.run = run
        self.is_gone = False
        """Whether the broker has ended before the jobs."""
        self.others = 0
        """Jobs of others that were in the pool when the run began."""
        self._members: dict[tuple[str, int, int], JobReport] = {}
        """All that have been in the pool: the broker reports the latest ones only."""
        self._outside: dict[tuple[str, int, str], Outside] = {}
        self._looked: Record | None = None
        self._look_again_s = 0.0

    def start(
        self,
        directory: Path,
        guardian: Watchdog,
        listener: Listener,
        stack: contextlib.ExitStack,
        *,
        pages: bool,
        metrics: Address | None,
    ) -> str:
        """Start or join the broker; ``stack`` closes it. Returns how jobs share a GPU, empty on the host.

        Args:
            directory: A private one for its files.
            guardian: Will end it if we are killed.
            listener: Is told what it says.
            stack: Of the run.
            pages: Some job may page.
            metrics: Where a broker of the run's own serves metrics; stays the caller's.

        Raises:
            CommandError: The MPS daemon could not start.
            ConfigError: There is no MPS here.
            BrokerError: The broker to join does not answer.
        """
        mps_pipes, told = self._share_device(directory, guardian, stack)
        settings, joins = self._target.settings, self._target.joins
        self.broker: RunBroker
        if joins is not None:
            self.broker = JoinedBroker(directory, joins, self.run)
            self.others = self.broker.others
        else:
            self.broker = BrokerProcess(
                *(directory, settings, guardian, listener.problem), pages=pages, mps_pipes=mps_pipes, metrics=metrics
            )
        stack.callback(self.broker.close, guardian)
        return told

    def environ_for(self, share: Share) -> dict[str, str]:
        """Return the environment of a job in the pool; on a GPU with the most that MPS lets it use."""
        if share.compute == 1 or kind_of(self.device) == HOST:
            return self.environ
        return {**self.environ, PERCENTAGE_VARIABLE: f"{100 * share.compute:g}"}

    @property
    def metrics(self) -> Setting[str] | None:
        """Return where metrics of the run's own broker are to be served, if anywhere."""
        wanted = self._target.settings.metrics
        return wanted if wanted.value and not self.is_joined else None

    @property
    def first_budget_bytes(self) -> int:
        """Return the budget in the beginning."""
        return self._target.settings.budget_bytes.value

    @property
    def budget_bytes(self) -> int:
        """Return the budget now, as far as that is known; asks the broker."""
        status = self.broker.status()
        return self.first_budget_bytes if status is None else status.budget_bytes

    @property
    def free_bytes(self) -> int:
        """Return what the budget has beside the peaks of all jobs that are in the pool; asks the broker."""
        status = self.broker.status()
        if status is None:
            return self.first_budget_bytes
        return max(0, status.budget_bytes - sum(job.peak_bytes for job in status.jobs))

    def look(self) -> Record | None:
        """Return the broker's record, an older one if looking took long; ``None`` if the broker does not answer."""
        began_s = time.monotonic()
        if began_s >= self._look_again_s:
            self._looked = self.broker.look()
            now_s = time.monotonic()
            self._look_again_s = now_s + (now_s - began_s) / LOOKING_SHARE
        return self._looked

    def others_now(self) -> Sequence[JobReport]:
        """Return the jobs of others that are in the pool now; asks the broker."""
        status = self.broker.status() if self.is_joined else None
        return [job for job in status.jobs if job.run != self.run] if status is not None else ()

    def own_now(self) -> Sequence[JobReport]:
        """Return the processes of the run's jobs that are in the pool now; asks the broker."""
        status = self.broker.status()
        return [job for job in status.jobs if not self.is_joined or job.run == self.run] if status is not None else ()

    def report(self, *, record: bool = True) -> Report | None:
        """Return the broker's figures; of a sweep all of its jobs, and not only the latest."""
        report = self.broker.report(record=record)
        if report is None or not self._sweeps:
            return report
        self._members |= {(one.name, one.pid, one.job): one for one in report.jobs}
        self._outside |= {(one.name, one.pid, one.framework): one for one in report.outside}
        return Report(report.pool, tuple(self._members.values()), 0, tuple(self._outside.values()))

    def keep_record(self) -> str:
        """Copy the record to where it is wanted, if there is one; returns why that cannot be, else an empty text."""
        record, wanted = self.broker.record, self._target.record_to
        if wanted is not None and record is not None and record.exists():
            try:
                shutil.copyfile(record, wanted)
            except OSError as error:
                wanted.unlink(missing_ok=True)  # a part of it
                return f"the record cannot be kept: {wanted}: {error.strerror}"
        return ""

    def _share_device(
        self, directory: Path, guardian: Watchdog, stack: contextlib.ExitStack
    ) -> tuple[Path | None, str]:
        """Let the jobs' kernels overlap on a GPU if that is wanted.

        Returns:
            The directory of the MPS daemon that was started for the jobs, if one was; else how they
            share a GPU.
        """
        if kind_of(self.device) == HOST:
            return None, ""
        from zico.launch.mps import MpsDaemon

        if self._target.settings.mps.value and not self.is_joined:
            daemon = MpsDaemon(directory, self.environ)
            stack.callback(daemon.close, guardian)
            daemon.start(guardian)
            self.environ |= daemon.variables
            return daemon.pipes, ""
        found = daemon_at(self.environ)
        return None, TIME_SLICES if found is None else f"jobs share the GPU by the MPS daemon at {found}"


class Metrics:
    """Metrics of a run: its broker serves them, or, of several brokers, this process does."""

    def __init__(self, pools: Sequence[Pool], listener: Listener, stack: contextlib.ExitStack) -> None:
        """Listen where metrics are to be served, if anywhere, and say where that is; ``stack`` closes it.

        Raises:
            ConfigError: They cannot be served there.
        """
        self._pools = [pool for pool in pools if pool.metrics is not None]
        self._stack = stack
        self._address: Address | None = None
        wanted = next((pool.metrics for pool in self._pools), None)
        if wanted is not None:
            from zico.broker.metrics import Address

            self._address = stack.enter_context(Address(wanted))
            listener.message(f"metrics: {self._address.url}")

    @property
    def of_broker(self) -> Address | None:
        """Return where the run's only own broker serves."""
        return self._address if len(self._pools) == 1 else None

    def serve(self) -> None:
        """Serve those of several brokers, which have been started, until the stack closes."""
        if self._address is not None and len(self._pools) > 1:
            from zico.broker.metrics import Endpoint, asked_at

            ask = asked_at(*(pool.broker.socket for pool in self._pools))
            self._stack.enter_context(Endpoint(self._address.socket, ask))
