"""What is installed under which name: the index has another distribution named ``zico``."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import zico

ROOT = Path(__file__).resolve().parent.parent.parent
WRONG = re.compile(r"(?<![\w-])zico\\?\[[a-z]+\\?\]|pip3? install [^`#\n]*?(?<=['\" ])zico(?=['\"\s`.:;,=<>~]|$)")
"""An extra of ``zico``, or that name given to pip."""
LEFT_OUT = ("CHANGELOG.md", "benchmarks/results/", "tests/cpu/test_distribution.py")


def written_files() -> list[Path]:
    """Return what is tracked, but for raw results and history."""
    names = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.splitlines() if not name.startswith(LEFT_OUT)]


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("pip install 'zico[ray]'", True),
        ("pip install zico[plot]", True),
        ("pip install zico", True),
        ("`pip install zico`", True),
        ("pip install 'zico-memory[ray]'", False),
        ("pip install zico-memory", False),
        ("pip install . # then zico run", False),
        ("zico[0] = 1", False),
    ],
)
def test_the_other_package_is_recognised(text: str, *, is_wrong: bool) -> None:
    """The pattern finds the other distribution's name, and leaves this one's alone."""
    assert bool(WRONG.search(text)) is is_wrong


def test_nothing_installs_the_other_package() -> None:
    """No document, message or script names it to pip."""
    found = []
    for path in written_files():
        try:
            text = path.read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        found += [f"{path.relative_to(ROOT)}: {wrong[0]}" for wrong in WRONG.finditer(text)]
    assert not found


def test_an_import_says_that_the_other_package_is_installed_too(tmp_path: Path) -> None:
    """The import warns, with what to do; without the other package it says nothing."""
    (tmp_path / "zico_memory-0.2.0.dist-info").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zico._look_beside(str(tmp_path))
        zico._look_beside(str(tmp_path / "archive.zip"))
    (tmp_path / "zico-1.0.2.dist-info").mkdir()
    with pytest.warns(
        UserWarning, match="pip uninstall zico, then pip install --force-reinstall --no-deps zico-memory"
    ):
        zico._look_beside(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "says"),
    [(None, "the folder /somewhere/zico hides Zico: change to"), ("zico/__init__.py", "is another package's: pip")],
)
def test_a_command_says_what_it_found_in_the_place_of_zico(file: str | None, says: str) -> None:
    """A folder that Python takes for a package, or the other package, whose module has no version."""
    code = f"""
import importlib.util, sys, types
spec = importlib.util.spec_from_file_location("zico.cli", {str(Path(zico.__path__[0]) / "cli" / "__init__.py")!r})
found = types.ModuleType("zico")
found.__file__, found.__path__ = {file!r}, ["/somewhere/zico"]
sys.modules["zico"] = found
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert says in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("platform", "machine"), [("win32", ""), ("darwin", "arm64"), ("linux", "riscv64"), ("linux", "i686")]
)
def test_an_import_elsewhere_says_where_zico_runs(platform: str, machine: str) -> None:
    """One sentence names what Zico needs and what this is."""
    with pytest.raises(ImportError, match=rf"^Zico runs on Linux, on x86_64 and aarch64; this is {platform} on \S"):
        zico._check_machine(platform, machine)


def test_an_import_here_is_fine() -> None:
    """Both kinds of machines that Zico runs on pass."""
    zico._check_machine("linux", "x86_64")
    zico._check_machine("linux", "aarch64")
