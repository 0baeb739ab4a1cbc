"""Metrics of pools in Prometheus' text format, over HTTP on a local port or a Unix socket.

Whoever starts the broker opens the address (``Address``), so that a port in use is known before
anything runs. The broker serves it (``Endpoint``) in a thread, which asks the broker's loop over its
own socket as ``zico status`` does. So one thread only touches the loop's records. Of a run on
several devices, the run's own process serves, and asks each broker.

Each connection has a thread and ``PEER_S`` in all. Of more than ``MOST_PEERS``, the oldest is cut: a
scrape takes milliseconds, so whoever is still there is slow. No peer keeps others waiting.

Labels: ``device`` of all; ``job_name``, ``framework`` and ``place`` of a job's. ``job`` itself is
Prometheus' own label for who was scraped. Two processes of one name differ by their places.
"""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import socketserver
import stat
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec

from zico.base.errors import ConfigError, ZicoError
from zico.base.settings import parse_metrics
from zico.broker.client import BrokerClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from zico.base.settings import Setting
    from zico.broker.protocol.messages import JobReport, PoolReport, Status

LOCALHOST = "127.0.0.1"
ANSWER_S = 2.0
"""A scrape waits so long for the broker's loop."""
PEER_S = 5.0
"""A peer may take so long for its request and for reading the answer, all together."""
MOST_PEERS = 16
LOOK_S = 0.5
"""Peers that have taken too long are looked for once in this time."""
BACKLOG = 16
END_S = ANSWER_S + 1.0
_OWNER_ONLY = 0o600

PoolNow: TypeAlias = "tuple[Status, PoolReport]"
"""The present figures of one pool."""

_log = logging.getLogger(__name__)


class Address:
    """A listening socket for metrics; closing it takes a Unix socket's path away."""

    def __init__(self, wanted: Setting[str]) -> None:
        """Listen at the port of 127.0.0.1 (0: any free one), or at the path, which only its owner may open.

        Raises:
            ConfigError: prometheus-client is not installed, or the port or the path cannot be used.
        """
        if find_spec("prometheus_client") is None:
            raise ConfigError(
                f"{wanted.origin}: prometheus-client is not installed: pip install 'zico-memory[metrics]'"
            )
        where = parse_metrics(wanted.value)
        self._path = where if isinstance(where, Path) else None
        family = socket.AF_INET if self._path is None else socket.AF_UNIX
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if isinstance(where, Path):
                _bind_path(self.socket, where)
            else:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind((LOCALHOST, where))
            self.socket.listen(BACKLOG)
        except OSError as error:
            self.socket.close()
            what = f"port {where}" if isinstance(where, int) else str(where)
            raise ConfigError(
                f"{wanted.origin}: {what} cannot be used ({error.strerror or error}): give another one, or 0 for any "
                "free port"
            ) from None

    @property
    def url(self) -> str:
        """Return where the metrics are to be had."""
        return url_of(self.socket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close, and unlink the path; another process that has inherited the socket goes on."""
        self.socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def url_of(listener: socket.socket) -> str:
    """Return where metrics are to be had that are served at a listening socket."""
    place = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"http://localhost/metrics at the Unix socket {place}"
    return f"http://{LOCALHOST}:{place[1]}/metrics"


def _bind_path(new: socket.socket, path: Path) -> None:
    """Bind to a path in the place of a socket where nobody listens; nobody can connect before ``listen``."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(0, "it exists and is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise FileExistsError(0, "somebody listens there")
    new.bind(str(path))
    path.chmod(_OWNER_ONLY)


class Endpoint:
    """Serve metrics at a listening socket, which it owns, until ``close``."""

    def __init__(self, listener: socket.socket, ask: Callable[[], Sequence[PoolNow]]) -> None:
        """Begin.

        Args:
            listener: Listens already.
            ask: Returns the present figures of at least one pool; called once for each request, in
                a thread of its own.
        """
        self._is_over = False
        self._server = _Server(listener, _application(ask))
        self._thread = threading.Thread(target=self._serve, name="zico-metrics", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Refuse further requests and wait ``END_S`` at most for the present ones."""
        self._is_over = True
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(END_S)
        self._server.end_peers(END_S)
        self._server.server_close()

    def _serve(self) -> None:
        while not self._is_over:
            self._server.handle_request()
            self._server.cut_slow()


def asked_at(*paths: Path) -> Callable[[], Sequence[PoolNow]]:
    """Return what asks the brokers that listen at these paths, and raises the last one's error if none answers."""

    def ask() -> Sequence[PoolNow]:
        found: list[PoolNow] = []
        missing: ZicoError | OSError | None = None
        for path in paths:
            try:
                with BrokerClient(path, ANSWER_S) as client:
                    found.append((client.status(), client.report(record=False).pool))
            except (ZicoError, OSError) as error:
                missing = error
        if missing is not None and not found:
            raise missing
        return found

    return ask


class _Handler(WSGIRequestHandler):
    """A request of which nothing is logged."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def get_stderr(self) -> io.StringIO:
        """Return where faults of peers are written: nowhere."""
        return io.StringIO()


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """An HTTP server on a socket that listens already, of either family."""

    daemon_threads = True
    timeout = LOOK_S

    def __init__(self, listener: socket.socket, application: WSGIApplication) -> None:
        self._peers: dict[socket.socket, float] = {}
        """Connections that are open and not cut, the oldest first, and when each is to be cut."""
        self._changed = threading.Condition()
        super().__init__((LOCALHOST, 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()
        self.set_app(application)

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """Return a connection; a peer at a Unix socket has no address."""
        return self.socket.accept()[0], (LOCALHOST, 0)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's
        """Serve a connection in a thread; cut the oldest of too many."""
        with self._changed:
            self._peers[request] = time.monotonic() + PEER_S
            while len(self._peers) > MOST_PEERS:
                self._cut(next(iter(self._peers)))
        super().process_request(request, client_address)

    def cut_slow(self) -> None:
        """Cut the peers that have taken too long."""
        with self._changed:
            for peer in [peer for peer, end_s in self._peers.items() if time.monotonic() >= end_s]:
                self._cut(peer)

    def end_peers(self, within_s: float) -> None:
        """Wait for the answers that are under way, and cut whoever is still there then."""
        with self._changed:
            self._changed.wait_for(lambda: not self._peers, within_s)
            for peer in list(self._peers):
                self._cut(peer)

    def close_request(self, request: Any) -> None:  # noqa: ANN401 - socketserver's
        """Close a connection."""
        with self._changed:
            self._peers.pop(request, None)
            self._changed.notify_all()
            super().close_request(request)

    def _cut(self, peer: socket.socket) -> None:
        """Let whatever its thread waits for fail, so that the thread closes it; the condition is held."""
        del self._peers[peer]
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: object) -> None:
        """Drop a connection that a peer has broken."""


def _application(ask: Callable[[], Sequence[PoolNow]]) -> WSGIApplication:
    """Return prometheus-client's application on the pools' figures and this process."""
    from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

    class Collector:
        def collect(self) -> Iterator[Any]:
            return families(ask())

    registry = CollectorRegistry()
    registry.register(Collector())
    ProcessCollector(registry=registry)
    inner = make_wsgi_app(registry)

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            return inner(environ, start_response)
        except (ZicoError, OSError) as error:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"the broker does not answer: {error}\n".encode()]
        except Exception:
            _log.exception("the metrics of a pool cannot be told")
            raise

    return application


# -- what is told ----------------------------------------------------------------------------------

_POOL_GAUGES = {
    "budget_bytes": "The most bytes that all jobs may hold together.",
    "most_bytes": "The largest budget that the pool can be given.",
    "granted_bytes": "Bytes of regions that jobs hold.",
    "peak_granted_bytes": "The most bytes of regions that jobs held at once, and what they shared.",
    "shared_bytes": "Frozen memory that jobs have in common, counted once.",
    "physical_bytes": "Physical memory of the pool, as the kernel or the driver counts it.",
    "peak_physical_bytes": "The most physical memory of the pool.",
    "region_bytes": "Bytes of one region.",
    "uptime_seconds": "Time since the broker began.",
    "context_bytes": "Device memory outside the pool that jobs and broker hold, where it is known.",
    "foreign_bytes": "Device memory outside the pool that jobs and broker do not hold, where it is known.",
}
_POOL_COUNTERS = {
    "stalls": "Times no job could continue, so that tensors left the budget.",
    "recoveries": "Times a process died inside the pool's lock and the pool was repaired.",
}
_JOB_GAUGES = {
    "held_bytes": "Bytes of regions that the job holds.",
    "peak_bytes": "The most bytes of regions that the job held.",
    "live_tensor_bytes": "Bytes of the job's live tensors.",
    "peak_tensor_bytes": "The most bytes of live tensors.",
    "persistent_bytes": "Bytes that the job held at its last boundary between iterations.",
    "shared_bytes": "Frozen memory that the job has in common with others, not in what it holds.",
    "growth_bytes": "Bytes that the job keeps more after each of its last iterations, 0 if it does not grow.",
    "need_bytes": "Bytes that a waiting allocation asks for, 0 if none waits.",
    "limit_bytes": "The most bytes that the job may hold by a limit of its own, 0 without one.",
    "waiting_seconds": "How long the present wait has lasted, 0 if the job does not wait.",
    "out_of_memory": "1 if a request of the job could not be met, else 0.",
    "compute_ratio": "The most that the job may use of its device's processors, 1 for all of them.",
}
_JOB_COUNTERS = {
    "iterations": "Iterations that ended.",
    "requested_bytes": "Bytes of all tensors over the threshold.",
    "pooled_bytes": "Bytes of these that came from the pool.",
    "spilled_bytes": "Bytes of tensors placed in the next tier, because there was no room.",
    "evicted_bytes": "Bytes moved to the next tier while the job waited, for jobs that could continue.",
    "maps": "Regions mapped.",
}
_SAVING_COUNTERS = {
    "page_faults": ("faults", "Page faults served."),
    "late_arrivals": ("late", "Planned or expected arrivals that a thread had to wait for."),
    "copy_waited_seconds": ("waited_s", "Time that threads waited for copies or page faults."),
    "copy_hidden_seconds": ("hidden_s", "Time of copies that no thread waited for."),
    "dropped_bytes": ("dropped_bytes", "Bytes that went without a copy, to be made again."),
    "making_seconds": ("making_s", "Time in which threads made again what was dropped."),
}
_JOB_LABELS = ("device", "job_name", "framework", "place")


def families(pools: Sequence[PoolNow]) -> Iterator[Any]:
    """Yield prometheus-client's metric families, each with the figures of all pools and their present jobs."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    info = InfoMetricFamily("zico_pool", "What the pool is.", labels=("device",))
    for status, _ in pools:
        info.add_metric((status.device,), {"policy": status.policy, "isolated": str(status.isolated).lower()})
    yield info
    for name, about in _POOL_GAUGES.items():
        gauge = GaugeMetricFamily(f"zico_pool_{name}", about, labels=("device",))
        for status, _ in pools:
            value = getattr(status, name.replace("_seconds", "_s"))
            if value is not msgspec.UNSET:
                gauge.add_metric((status.device,), value)
        if gauge.samples:
            yield gauge
    for name, about in _POOL_COUNTERS.items():
        counter = CounterMetricFamily(f"zico_pool_{name}", about, labels=("device",))
        for status, pool in pools:
            counter.add_metric((status.device,), getattr(pool, name))
        yield counter
    jobs = GaugeMetricFamily("zico_pool_jobs", "Processes that train in the pool.", labels=("device",))
    for status, _ in pools:
        jobs.add_metric((status.device,), len(status.jobs))
    yield jobs
    yield from _of_jobs(
        [((status.device, job.name, job.framework, str(job.job)), job) for status, _ in pools for job in status.jobs]
    )


def _of_jobs(labelled: Sequence[tuple[tuple[str, ...], JobReport]]) -> Iterator[Any]:
    """Yield the families of jobs, each given with its labels."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    for name, about in _JOB_GAUGES.items():
        gauge = GaugeMetricFamily(f"zico_job_{name}", about, labels=_JOB_LABELS)
        for labels, job in labelled:
            gauge.add_metric(labels, _gauge(job, name))
        yield gauge
    for name, about in _JOB_COUNTERS.items():
        counter = CounterMetricFamily(f"zico_job_{name}", about, labels=_JOB_LABELS)
        for labels, job in labelled:
            counter.add_metric(labels, getattr(job, name))
        yield counter
    waited = CounterMetricFamily(
        "zico_job_waited_seconds", "Time waited, between iterations or in allocations.", labels=(*_JOB_LABELS, "kind")
    )
    moved = CounterMetricFamily(
        "zico_job_offloaded_bytes", "Bytes copied to a tier (out) and back (in).", labels=(*_JOB_LABELS, "direction")
    )
    away = GaugeMetricFamily(
        "zico_job_in_tier_bytes", "Bytes of live tensors that are in a tier only.", labels=_JOB_LABELS
    )
    for labels, job in labelled:
        waited.add_metric((*labels, "boundary"), job.boundary_waited_s)
        waited.add_metric((*labels, "allocation"), max(0.0, job.waited_s - job.boundary_waited_s))
        moved.add_metric((*labels, "out"), job.saving.out_bytes)
        moved.add_metric((*labels, "in"), job.saving.in_bytes)
        away.add_metric(labels, job.saving.out_now_bytes)
    yield from (waited, moved, away)
    for name, (field, about) in _SAVING_COUNTERS.items():
        counter = CounterMetricFamily(f"zico_job_{name}", about, labels=_JOB_LABELS)
        for labels, job in labelled:
            counter.add_metric(labels, getattr(job.saving, field))
        yield counter


def _gauge(job: JobReport, name: str) -> float:
    if name == "out_of_memory":
        return float(job.oom is not None)
    if name == "compute_ratio":
        return job.share.compute
    return float(getattr(job, name.replace("_seconds", "_s")))
