"""Metrics of a real run, scraped by a real Prometheus, which answers every query of the dashboard."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.zico_process import ZicoRun, descendants, python

from zico.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

text_string_to_metric_families = pytest.importorskip(
    "prometheus_client.parser", reason="the extra 'metrics' is not installed"
).text_string_to_metric_families

DOCS = Path(__file__).parents[2] / "docs"
BOARD = json.loads((DOCS / "grafana.json").read_text())
WITHIN_S = 60.0
JOB = (
    "import os\nfrom zico.broker.client import BrokerClient\nfrom zico.job.session import socket_to_join\n"
    "member = BrokerClient(socket_to_join()).join(os.environ['ZICO_JOB'], 'fake')\n"
    "print('joined', flush=True); open(os.environ['FIFO'] + os.environ['ZICO_JOB']).readline()"
)


def test_a_port_in_use_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """``zico run`` and ``zico broker`` end with 2 and a sentence; no job has run."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        ran = tmp_path / "ran"
        assert main(["run", "--budget", "64MiB", "--metrics", port, f"touch {ran}"]) == 2
        assert main(["broker", "--budget", "64MiB", "--socket", str(tmp_path / "s"), "--metrics", port]) == 2
    said = capsys.readouterr().err
    assert said.count(f"zico: --metrics: port {port} cannot be used (Address already in use): give another one") == 2
    assert not ran.exists()


@contextlib.contextmanager
def held_up_by(directory: Path, names: str) -> Iterator[Callable[[], None]]:
    """Give what lets the jobs of these names end."""
    with contextlib.ExitStack() as opened:
        ends = []
        for name in names:
            os.mkfifo(directory / name)
            ends.append(opened.enter_context(os.fdopen(os.open(directory / name, os.O_RDWR), "wb", buffering=0)))

        def let_end() -> None:
            for end in ends:
                end.write(b"\n")

        yield let_end


@contextlib.contextmanager
def prometheus(target: str, directory: Path) -> Iterator[str]:
    """Run Prometheus with the configuration of the docs, but on this target and faster; give its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = f"127.0.0.1:{free.getsockname()[1]}"
    given = (DOCS / "prometheus.yml").read_text()
    assert "127.0.0.1:9185" in given
    config = directory / "prometheus.yml"
    config.write_text(given.replace("127.0.0.1:9185", target).replace("scrape_interval: 5s", "scrape_interval: 200ms"))
    process = subprocess.Popen(
        [
            *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"),
            *(f"--web.listen-address={own}", "--log.level=error"),
        ]
    )
    try:
        yield f"http://{own}"
    finally:
        process.kill()
        process.wait(timeout=WITHIN_S)


def answer(base: str, path: str, **parameters: str) -> Any:  # noqa: ANN401 - JSON
    """Return the data of a successful, not empty answer of the HTTP API; ask until there is one, or fail."""
    url = f"{base}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    end_s = time.monotonic() + WITHIN_S
    with selectors.DefaultSelector() as nothing:
        while time.monotonic() < end_s:
            with contextlib.suppress(urllib.error.URLError):  # it does not listen yet
                found = json.loads(urllib.request.urlopen(url, timeout=10).read())  # noqa: S310 - http to ourselves
                assert found["status"] == "success", found
                data = found["data"]
                if data["result"] if isinstance(data, dict) else data:
                    return data
            nothing.select(0.05)
    pytest.fail(f"nothing for {url}")


def queries() -> list[str]:
    """Return the dashboard's queries, its variables filled in."""
    found = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    assert len(found) > len(BOARD["panels"])
    return [expr.replace("$device", ".*").replace("$__rate_interval", "1m") for expr in found]


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed: apt-get install prometheus, then make test"
)
def test_prometheus_scrapes_a_run_and_answers_the_dashboard(tmp_path: Path) -> None:
    """The scrape is what promtool accepts, every query has an answer, and figures are those of the run."""
    with (
        held_up_by(tmp_path, "a") as let_end,
        ZicoRun("--metrics", "0", "--name", "a", python(JOB), FIFO=f"{tmp_path}/") as run,
    ):
        run.read_until("a | joined")
        (target,) = re.findall(r"metrics: http://([\d.:]+)/metrics", run.stderr)
        scrape = urllib.request.urlopen(f"http://{target}/metrics", timeout=20).read()
        checked = subprocess.run(["promtool", "check", "metrics"], input=scrape, capture_output=True, check=False)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
        with prometheus(target, tmp_path) as base:
            (held,) = answer(base, "query", query="zico_job_held_bytes")["result"]
            assert (held["metric"]["job_name"], held["metric"]["framework"]) == ("a", "fake")
            (budget,) = answer(base, "query", query="zico_pool_budget_bytes")["result"]
            assert budget["value"][1] == str(64 << 20)
            for query in queries():
                answer(base, "query", query=query)
            (variable,) = [one for one in BOARD["templating"]["list"] if one["name"] == "device"]
            metric = re.fullmatch(r"label_values\((\w+), device\)", variable["definition"])
            assert metric is not None
            assert answer(base, "label/device/values", **{"match[]": metric[1]}) == ["host"]
        let_end()
        assert run.finish() == 0


def test_one_port_serves_all_devices_of_a_run(tmp_path: Path) -> None:
    """Each figure says of which device it is; of a broker that has ended there are none, and the others' go on."""
    words = ("--device", "host:0,host:1", "--metrics", "0", "--name", "a", "--name", "b", python(JOB), python(JOB))
    with held_up_by(tmp_path, "ab") as let_end, ZicoRun(*words, FIFO=f"{tmp_path}/") as run:
        run.read_until("a | joined")
        run.read_until("b | joined")
        (url,) = re.findall(r"metrics: (\S+)", run.stderr)

        def values(metric: str) -> dict[tuple[str, ...], float]:
            text = urllib.request.urlopen(url, timeout=20).read().decode()  # noqa: S310 - http to ourselves
            assert text.count(f"# TYPE {metric} ") == 1
            return {
                (sample.labels["device"], sample.labels.get("job_name", "")): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == metric
            }

        assert values("zico_pool_budget_bytes") == {("host:0", ""): 64 << 20, ("host:1", ""): 64 << 20}
        assert values("zico_job_held_bytes") == {("host:0", "a"): 0, ("host:1", "b"): 0}
        for pid in descendants(run.process.pid):
            if b"zico.broker\0" in (line := Path(f"/proc/{pid}/cmdline").read_bytes()) and b"\0host:0\0" in line:
                os.kill(pid, signal.SIGKILL)
        run.read_until("the broker of host:0 has ended")
        assert values("zico_job_held_bytes") == {("host:1", "b"): 0}
        let_end()
        assert (run.finish(), run.leftovers) == (0, [])


def test_a_broker_serves_a_unix_socket_until_it_ends(tmp_path: Path) -> None:
    """``zico broker --metrics PATH`` answers there; a run that joins says so; afterwards the path is gone."""
    path = tmp_path / "metrics"
    with ZicoRun("--metrics", str(path), command="broker") as broker:
        broker.read_until("ready")
        variables = {"XDG_RUNTIME_DIR": str(broker.runtime), "ZICO_BUDGET": "", "ZICO_METRICS": "0"}
        with ZicoRun("--", "true", **variables) as run:
            run.finish()
        assert re.findall("zico: .*metrics.*", run.stderr) == [
            f"zico: metrics: http://localhost/metrics at the Unix socket {path} (of the broker that runs)"
        ]
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(WITHIN_S)
            peer.connect(str(path))
            peer.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            scrape = b"".join(iter(lambda: peer.recv(65536), b""))
        assert b'\nzico_pool_budget_bytes{device="host"} 6.7108864e+07\n' in scrape
        broker.process.send_signal(signal.SIGTERM)
        assert broker.finish() == 0
    assert not path.exists()
