"""The report of a real run in a real browser: headless Chromium, without a network."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

import msgspec
import pytest
from cpu.support.report_cases import EVIL, Parsed, run
from cpu.support.zico_process import ZicoRun, python

from zico.report.model import RunReport
from zico.report.page import write_page
from zico.report.table import COLUMNS, job_rows

if TYPE_CHECKING:
    from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WITHIN_S = 120
JOIN = (
    "import os\nfrom zico.broker.client import BrokerClient\nfrom zico.job.session import socket_to_join\n"
    "client = BrokerClient(socket_to_join())\nmember = client.join(os.environ['ZICO_JOB'], 'fake')\nclient.status()"
)

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium, then make test"
)


def browse(page: Path, directory: Path, *options: str) -> tuple[str, list[str]]:
    """Return what Chromium writes on its standard output for the page, and the lines of the page's console."""
    process = subprocess.Popen(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *(f"--user-data-dir={directory / 'profile'}", "--enable-logging=stderr", *options, page.as_uri()),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = process.communicate(timeout=WITHIN_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return out, [line for line in errors.splitlines() if "CONSOLE" in line]


@needs_chromium
def test_a_browser_shows_the_figures_of_the_run_and_complains_of_nothing(tmp_path: Path) -> None:
    """Of a real run, the table that Chromium has is that of the JSON; the trace beside it is JSON, too."""
    with ZicoRun("--report", str(tmp_path / "r"), "--name", "one", python(JOIN)) as started:
        assert started.finish() == 0, started.stderr
    shown, console = browse(tmp_path / "r" / "report.html", tmp_path, "--dump-dom")
    assert console == []
    report = msgspec.json.decode((tmp_path / "r" / "report.json").read_bytes(), type=RunReport)
    found = Parsed(shown)
    assert found.rows["jobs"] == [list(COLUMNS), *map(list, job_rows(report))]
    assert msgspec.json.decode(found.script, type=RunReport) == report
    assert json.loads((tmp_path / "r" / "perfetto.json").read_text())["traceEvents"]


@needs_chromium
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_the_page_follows_the_readers_colours(tmp_path: Path, mode: str) -> None:
    """The page is pale or dark as the system is, and has a picture whatever the jobs are called."""
    image = pytest.importorskip("matplotlib.image")
    report, history = run(EVIL)
    write_page(report, history, tmp_path / "report.html")
    preferred = f"--blink-settings=preferredColorScheme={0 if mode == 'dark' else 1}"
    screen = ("--window-size=1200,900", f"--screenshot={tmp_path / 'screen.png'}")
    _, console = browse(tmp_path / "report.html", tmp_path, preferred, *screen)
    assert console == []
    pixels = image.imread(tmp_path / "screen.png")[:, :, :3]
    corner = float(pixels[2, 2].mean())
    assert (corner < 0.2) if mode == "dark" else (corner > 0.9)
    assert (abs(pixels - [0, 0x72 / 255, 0xB2 / 255]).max(axis=2) < 0.02).sum() > 5000  # the first job's colour
