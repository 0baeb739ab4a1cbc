"""Metrics: names and values in the text format, where they are served, and who may not serve them."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import stat
import time
import urllib.error
import urllib.request
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from zico.base.errors import BrokerError, ConfigError
from zico.base.settings import DeviceMemory, Setting, parse_metrics, resolve
from zico.base.units import GIB, MIB
from zico.broker.metrics import MOST_PEERS, Address, Endpoint, families
from zico.broker.protocol.messages import JobReport, PoolReport, RefusedRequest, Saving, Share, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

prometheus_client = pytest.importorskip("prometheus_client", reason="the extra 'metrics' is not installed")

DOCS = Path(__file__).parents[2] / "docs"
POOL = PoolReport(stalls=2, recoveries=1)


def job(place: int, name: str, **figures: object) -> JobReport:
    """Return a member."""
    return JobReport(name=name, framework="torch", job=place, state="running", **figures)  # type: ignore[arg-type]


def status(*jobs: JobReport) -> Status:
    """Return a pool with these members."""
    return Status(
        schema_version="zico.status.v1", policy="zico", uptime_s=5.5, region_bytes=4 * MIB, budget_bytes=64 * MIB,
        granted_bytes=12 * MIB, physical_bytes=13 * MIB, peak_granted_bytes=60 * MIB, peak_physical_bytes=61 * MIB,
        jobs=jobs,
    )  # fmt: skip


TWO_OF_ONE_NAME = status(
    job(
        3, 'a "b"\\', iterations=7, waited_s=3.0, boundary_waited_s=1.0, held_bytes=8 * MIB, waiting_s=0.25,
        saving=Saving(how="swap", out_bytes=11, in_bytes=9, faults=4), oom=RefusedRequest(1, 2),
    ),
    job(4, 'a "b"\\', iterations=8, share=Share(compute=0.25)),
)  # fmt: skip


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the samples of a scrape, parsed by prometheus-client, by name and labels; each is there once."""
    from prometheus_client.parser import text_string_to_metric_families

    found = [one for family in text_string_to_metric_families(text) for one in family.samples]
    by_labels = {(one.name, frozenset(one.labels.items())): one.value for one in found}
    assert len(by_labels) == len(found)
    return by_labels


def registry_of(*of: Status) -> Any:  # noqa: ANN401 - a registry
    """Return a registry with the figures of these pools."""

    class Collector:
        def collect(self) -> Iterator[object]:
            return families([(one, POOL) for one in of])

    registry = prometheus_client.CollectorRegistry()
    registry.register(Collector())
    return registry


def exposed(*of: Status) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return what a scrape of these pools has."""
    return samples(prometheus_client.generate_latest(registry_of(*of)).decode())


def test_a_scrape_has_the_figures_of_the_pool_and_of_each_process() -> None:
    """Values and units are those of the status; names that need escaping survive; places tell processes apart."""
    found = exposed(TWO_OF_ONE_NAME)
    pool = frozenset({("device", "host")})
    assert found["zico_pool_budget_bytes", pool] == 64 * MIB
    assert found["zico_pool_uptime_seconds", pool] == 5.5
    assert (found["zico_pool_stalls_total", pool], found["zico_pool_recoveries_total", pool]) == (2, 1)
    assert found["zico_pool_jobs", pool] == 2
    assert ("zico_pool_context_bytes", pool) not in found  # not known on the host
    first, second = (pool | {("job_name", 'a "b"\\'), ("framework", "torch"), ("place", n)} for n in "34")
    assert [found["zico_job_iterations_total", one] for one in (first, second)] == [7, 8]
    assert found["zico_job_waited_seconds_total", first | {("kind", "boundary")}] == 1.0
    assert found["zico_job_waited_seconds_total", first | {("kind", "allocation")}] == 2.0
    assert found["zico_job_offloaded_bytes_total", first | {("direction", "in")}] == 9
    assert (found["zico_job_waiting_seconds", first], found["zico_job_held_bytes", first]) == (0.25, 8 * MIB)
    assert found["zico_job_page_faults_total", first] == 4
    assert [found["zico_job_out_of_memory", one] for one in (first, second)] == [1, 0]
    assert [found["zico_job_compute_ratio", one] for one in (first, second)] == [1, 0.25]


def test_a_scrape_of_several_pools_has_each_metric_once() -> None:
    """The label says of which device a sample is; the format does not allow a family twice."""
    other = msgspec.structs.replace(status(job(3, "b", iterations=9)), device="host:1")
    found = exposed(TWO_OF_ONE_NAME, other)
    assert found["zico_pool_jobs", frozenset({("device", "host")})] == 2
    assert found["zico_pool_jobs", frozenset({("device", "host:1")})] == 1
    text = prometheus_client.generate_latest(registry_of(TWO_OF_ONE_NAME, other)).decode()
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(set(types)) == len(types)


def test_the_pages_name_every_metric_and_no_other() -> None:
    """The page lists what a scrape has; the dashboard asks for nothing else."""
    there = {name for name, _ in exposed(TWO_OF_ONE_NAME)}
    unknown_here = {"zico_pool_context_bytes", "zico_pool_foreign_bytes"}
    page = set(re.findall(r"\bzico_(?:pool|job)_\w+", (DOCS / "metrics.md").read_text()))
    assert page == there | unknown_here
    board = json.loads((DOCS / "grafana.json").read_text())
    asked = set(re.findall(r"\bzico_\w+", json.dumps([board["panels"], board["templating"]])))
    assert asked <= there


# -- where they are served -------------------------------------------------------------------------


def port(text: str) -> Setting[str]:
    """Return the setting."""
    return Setting(text, "--metrics")


def test_a_port_serves_figures_of_now_until_it_is_closed() -> None:
    """Nobody else can reach it, each scrape asks anew, and afterwards nobody listens."""
    answers = [status(), TWO_OF_ONE_NAME]
    address = Address(port("0"))
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", address.url)
    assert address.socket.getsockname()[0] == "127.0.0.1"
    with Endpoint(address.socket, lambda: [(answers.pop(0), POOL)]):
        for wanted in (0, 2):
            with urllib.request.urlopen(address.url, timeout=10) as answer:  # noqa: S310 - http to ourselves
                found = samples(answer.read().decode())
            assert found["zico_pool_jobs", frozenset({("device", "host")})] == wanted
        url = address.url
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=10)  # noqa: S310 - as above


def test_a_broker_that_does_not_answer_is_said() -> None:
    """A scrape gets 503 and a sentence, and the next one is served."""

    def ask() -> list[tuple[Status, PoolReport]]:
        raise BrokerError("it is busy")

    address = Address(port("0"))
    with Endpoint(address.socket, ask):
        for _ in range(2):
            connection = HTTPConnection("127.0.0.1", address.socket.getsockname()[1], timeout=10)
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (503, b"the broker does not answer: it is busy\n")
            connection.close()


def test_a_silent_peer_does_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is served meanwhile, and it is dropped after a while."""
    monkeypatch.setattr("zico.broker.metrics.PEER_S", 2.0)
    address = Address(port("0"))
    where = address.socket.getsockname()
    with Endpoint(address.socket, lambda: [(status(), POOL)]), socket.create_connection(where, timeout=10) as silent:
        with urllib.request.urlopen(address.url, timeout=1) as answer:  # noqa: S310 - http to ourselves
            assert answer.status == 200
        assert silent.recv(1) == b""


def test_a_peer_that_goes_on_slowly_is_dropped_by_the_time_it_has_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends a byte now and then does not stay for longer than one who sends none."""
    monkeypatch.setattr("zico.broker.metrics.PEER_S", 0.5)
    address = Address(port("0"))
    with (
        Endpoint(address.socket, lambda: [(status(), POOL)]),
        socket.create_connection(address.socket.getsockname()) as slow,
    ):
        slow.settimeout(0.05)
        slow.sendall(b"GET /metrics HTTP/1.0\r\nX: ")
        end_s = time.monotonic() + 10
        dropped = False
        while not dropped and time.monotonic() < end_s:
            try:
                slow.sendall(b"a")
                dropped = slow.recv(1) == b""
            except TimeoutError:
                pass
            except ConnectionError:
                dropped = True
    assert dropped


def test_of_many_slow_peers_the_oldest_go() -> None:
    """However many there are, a scrape is served at once, and of those that are there a few stay."""
    address = Address(port("0"))
    where = address.socket.getsockname()
    with Endpoint(address.socket, lambda: [(status(), POOL)]), contextlib.ExitStack() as opened:
        slow = [opened.enter_context(socket.create_connection(where, timeout=10)) for _ in range(3 * MOST_PEERS)]
        with urllib.request.urlopen(address.url, timeout=4) as answer:  # noqa: S310 - http to ourselves
            assert answer.status == 200
        assert [peer.recv(1) for peer in slow[: 2 * MOST_PEERS]] == [b""] * 2 * MOST_PEERS


def test_an_endpoint_that_ends_waits_for_no_slow_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut when the time for answers under way is over."""
    monkeypatch.setattr("zico.broker.metrics.END_S", 0.1)
    address = Address(port("0"))
    with socket.create_connection(address.socket.getsockname(), timeout=10) as slow:
        with Endpoint(address.socket, lambda: [(status(), POOL)]):
            with urllib.request.urlopen(address.url, timeout=4) as answer:  # noqa: S310 - http to ourselves
                assert answer.status == 200
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 4
        assert slow.recv(1) == b""


def test_a_fault_of_ours_is_logged_and_the_next_scrape_is_served(caplog: pytest.LogCaptureFixture) -> None:
    """The scraper gets 500, the log a trace."""
    answers = [None, [(status(), POOL)]]
    address = Address(port("0"))
    with Endpoint(address.socket, lambda: answers.pop(0)):  # type: ignore[arg-type, return-value]
        with pytest.raises(urllib.error.HTTPError, match="500") as refused:
            urllib.request.urlopen(address.url, timeout=10)  # noqa: S310 - http to ourselves
        refused.value.close()
        with urllib.request.urlopen(address.url, timeout=10) as answer:  # noqa: S310 - http to ourselves
            assert answer.status == 200
    assert "the metrics of a pool cannot be told" in caplog.text


def test_a_unix_socket_is_its_owners_and_goes_with_the_run(tmp_path: Path) -> None:
    """It has mode 0600 and serves; a stale one is replaced; its path is gone afterwards."""
    path = tmp_path / "m"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with Address(port(str(path))) as address:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with Endpoint(address.socket, lambda: [(status(), POOL)]), socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(10)
            peer.connect(str(path))
            peer.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: peer.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.0 200")
    assert b"\nzico_pool_jobs{" in answer
    assert not path.exists()


def test_an_address_that_cannot_be_used_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """A port or a socket in use, a file, a missing folder, a path that is too long; nothing is taken away."""
    (tmp_path / "file").write_text("kept")
    with Address(port("0")) as first, Address(port(str(tmp_path / "live"))) as second:
        taken = str(first.socket.getsockname()[1])
        for wanted, why in (
            (taken, f"--metrics: port {taken} cannot be used (Address already in use): give another one"),
            (str(tmp_path / "live"), "somebody listens there"),
            (str(tmp_path / "file"), "it exists and is not a socket"),
            (str(tmp_path / "no" / "folder"), "No such file or directory"),
            (str(tmp_path / ("x" * 120)), "too long"),
        ):
            with pytest.raises(ConfigError, match=re.escape(why)):
                Address(port(wanted))
        assert second.socket.fileno() >= 0
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "live"]


def test_without_the_library_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--metrics`` without prometheus-client names the extra."""
    monkeypatch.setattr("zico.broker.metrics.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"^--metrics: .* is not installed: pip install 'zico-memory\[metrics\]'$"):
        Address(port("0"))


@pytest.mark.parametrize("text", ["65536", "-1"])
def test_a_number_that_is_no_port_is_refused_with_the_settings(text: str) -> None:
    """Before anything starts; what is no number is a path."""
    with pytest.raises(ConfigError, match=f"^--metrics: {text} is not a port"):
        resolve({"metrics": port(text)}, DeviceMemory(GIB, GIB), ["zico"])
    assert (parse_metrics("9185"), parse_metrics("m9")) == (9185, Path("m9"))
