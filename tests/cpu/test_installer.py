"""``make`` installs by uv with the settings that a user has for pip, and by pip where that cannot be."""

from __future__ import annotations

import importlib.util
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
INSTALLER = ROOT / ".ci/install.py"
DEADLINE_S = 60.0
LISTED = """\
:env:.disable-pip-version-check='1'
:env:.find-links='/wheels /more'
:env:.default-timeout='180'
freeze.all='true'
global.cert='/ca.crt'
global.extra-index-url='https://a.example/simple https://b.example/simple'
global.find-links='/not/these'
install.no-index='false'
"""
# An environment's Python and its uv, which write down how they were called.
PYTHON = """#!/bin/sh
echo "$@" >> "{log}"
case "$*" in
*"config list"*) echo "{setting}" ;;
*uv) test -n "{has_uv}" || exit 1; cp "{uv}" "$(dirname "$0")/uv" ;;
esac
"""
UV = """#!/bin/sh
echo "uv $@ cert=$SSL_CERT_FILE" >> "{log}"
exit {status}
"""


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("installer", INSTALLER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_uv_is_told_what_pip_was(installer: ModuleType) -> None:
    """Variables hold before files, several values are several options, and other commands' settings do not count."""
    told = installer.for_uv(installer.settings_of(LISTED))
    assert told is not None
    options, variables = told
    assert options == [
        *("--index-strategy", "unsafe-best-match"),
        *("--extra-index-url", "https://a.example/simple"),
        *("--extra-index-url", "https://b.example/simple"),
        *("--find-links", "/wheels"),
        *("--find-links", "/more"),
    ]
    assert variables == {"SSL_CERT_FILE": "/ca.crt", "UV_HTTP_TIMEOUT": "180"}


@pytest.mark.parametrize("listed", ["global.proxy='http://a.example'", "install.target='/elsewhere'"])
def test_a_setting_without_a_counterpart_is_left_to_pip(installer: ModuleType, listed: str) -> None:
    """What uv cannot be told could install something else, or to another place."""
    assert installer.for_uv(installer.settings_of(listed)) is None


def installs(tmp_path: Path, *, setting: str = "", has_uv: bool = True, status: int = 0) -> tuple[list[str], str]:
    """Install ``thing``; returns the calls but for the one that lists settings, and what was said."""
    log, python, uv = tmp_path / "log", tmp_path / "python", tmp_path / "uv.sh"
    python.write_text(PYTHON.format(log=log, setting=setting, has_uv="yes" if has_uv else "", uv=uv))
    uv.write_text(UV.format(log=log, status=status))
    for script in (python, uv):
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    argv = [sys.executable, str(INSTALLER), str(python), "thing"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    settings, *calls = log.read_text().splitlines()
    assert settings.endswith("config list")
    return calls, done.stderr


BY_PIP = "-m pip --disable-pip-version-check install --quiet --no-compile thing"


def test_uv_is_fetched_and_installs(tmp_path: Path) -> None:
    """By pip comes uv, of the tested version; by uv the rest."""
    (fetch, install), said = installs(tmp_path, setting="global.cert='/ca.crt'")
    assert fetch.endswith(f"--constraint {ROOT}/constraints.txt uv")
    assert install.startswith("uv pip install ")
    assert install.endswith(" thing cert=/ca.crt")
    assert f"--python {tmp_path}/python" in install
    assert not said


def test_pip_installs_where_uv_fails(tmp_path: Path) -> None:
    """What uv cannot do is tried by pip, and that is said."""
    calls, said = installs(tmp_path, status=2)
    assert calls[-1] == BY_PIP
    assert calls[-2].startswith("uv ")
    assert said == "install: uv could not; pip tries\n"


def test_pip_installs_where_uv_cannot_be_had(tmp_path: Path) -> None:
    """An index may have no uv: nothing fails."""
    calls, _ = installs(tmp_path, has_uv=False)
    assert len(calls) == 2
    assert calls[-1] == BY_PIP


def test_pip_installs_by_settings_of_its_own(tmp_path: Path) -> None:
    """Nobody fetches uv then."""
    calls, _ = installs(tmp_path, setting="install.target='/elsewhere'")
    assert calls == [BY_PIP]


@pytest.mark.parametrize("which", ["ray", "deepspeed", "triton"])
def test_an_environment_beside_the_usual_one_needs_nothing_of_it(which: str) -> None:
    """Each is made in a checkout that has no ``.venv``."""
    argv = ["make", "--dry-run", f"{which.upper()}=build/none", "VENV=absent", "build/none/.installed"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert "-m venv build/none" in done.stdout
    assert "absent" not in done.stdout
