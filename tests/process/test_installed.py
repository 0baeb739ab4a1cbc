"""What Zico starts is the Zico that starts it: however that is installed, wherever the user is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cpu.support.zico_process import ZicoRun, descendants, survivors
from support.harness import PATIENCE_S, clean_environment, compile_once

ROOT = Path(__file__).parents[2]
WHERE = "import numpy, zico.adapters, zico.kernels; print(numpy.__file__, zico.__file__, zico.kernels.__file__)"
STARTER = f"""
import os, subprocess
from zico.base import interpreter
exec({WHERE!r}, {{}})
os.environ["PYTHONPATH"] = os.getcwd()
subprocess.run(interpreter.command("-c", {WHERE!r}), check=True, timeout={PATIENCE_S})
"""
FOREVER = "import os, signal; print('pid', os.getpid(), flush=True); signal.pause()"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with modules that leave a mark where they are imported; gives the mark."""
    mark = tmp_path / "mark"
    folder = tmp_path / "hostile"
    for name in ("zico", "numpy", "click", "runpy", "sitecustomize", "usercustomize"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"open({str(mark)!r}, 'a').write({name!r} + ' ')\n")
    monkeypatch.chdir(folder)
    return mark


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the programs of an environment with a wheel of this checkout, and with the packages of this one behind."""
    compile_once()
    base = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, base / "source", ignore=lambda folder, names: _not_built(Path(folder), names))
    environment = base / "environment"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    none = ["--quiet", "--no-deps", "--no-index"]
    for command in (
        [*pip, "wheel", *none, "--no-build-isolation", "--wheel-dir", str(base), str(base / "source")],
        [sys.executable, "-m", "venv", "--without-pip", str(environment)],
        [
            *pip,
            "--python",
            str(environment / "bin" / "python"),
            "install",
            *none,
            *("--find-links", str(base), "zico-memory"),
        ],
    ):
        subprocess.run(command, env=clean_environment(), timeout=PATIENCE_S, check=True, stdout=subprocess.DEVNULL)
    (site_packages,) = environment.glob("lib/python3*/site-packages")
    # Their own .pth files are not read from here: an editable install of this checkout is not seen.
    (site_packages / "behind.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return environment / "bin"


def _not_built(folder: Path, names: list[str]) -> set[str]:
    built_of = {"zico", "adapters", "kernels", "lab", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"}
    return {name for name in names if name == "__pycache__" or (folder == ROOT and name not in built_of)}


def found(python: Path | str, **variables: str) -> list[list[str]]:
    """Return which files a process of an interpreter imports, and which one does that it starts."""
    # -P: else the user asks Python for what is in the current directory.
    done = subprocess.run(
        [str(python), "-P", "-c", STARTER],
        env=clean_environment() | variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_a_process_of_ours_has_the_package_of_its_starter(hostile: Path, tmp_path: Path, wheel: Path) -> None:
    """As it is installed here, in place in PYTHONPATH, and from a wheel; nothing beside it or in PYTHONPATH runs."""
    in_place = tmp_path / "in_place" / "zico"
    in_place.mkdir(parents=True)
    for entry in (*(ROOT / "zico").iterdir(), ROOT / "adapters", ROOT / "kernels", ROOT / "lab"):
        (in_place / entry.name).symlink_to(entry)
    ours, its = found(sys.executable)
    assert ours == its
    ours, its = found(sys.executable, PYTHONPATH=str(in_place.parent))
    assert ours == its
    assert its[1] == str(in_place / "__init__.py")
    ours, its = found(wheel / "python")
    assert ours == its
    assert its[2].startswith(str(wheel.parent))
    assert not hostile.exists(), hostile.read_text()


def test_a_killed_run_of_a_wheel_leaves_nothing(hostile: Path, wheel: Path) -> None:
    """After SIGKILL of ``zico run`` its jobs, broker and directory go, and nothing of the current folder has run."""
    python = shutil.which("python", path=str(wheel))
    with ZicoRun("--name", "a", f"{python} -c {FOREVER!r}", program=[str(wheel / "zico")]) as run:
        run.read_until("a | pid ")
        below = descendants(run.process.pid)
        (directory,) = run.leftovers
        run.until((directory / "broker.sock").exists)
        run.process.kill()
        run.process.wait(timeout=10)
        assert survivors(below, timeout_s=15) == []
        assert run.leftovers == []
    assert not hostile.exists(), hostile.read_text()
