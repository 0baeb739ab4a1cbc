"""What a process started by ``zico run`` goes through before the user's first line."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import TypeAlias

import pytest

import zico.job.autoload
from zico.base import interpreter

Done: TypeAlias = subprocess.CompletedProcess[str]
PACKAGE_PATH = Path(zico.job.autoload.__file__).parent.parent.parent
INJECT = PACKAGE_PATH / "zico" / "job" / "inject"
TIMEOUT_S = 60

# Reports what is watched and what of ours is left on sys.path.
REPORT = """
import sys
finders = [f for f in sys.meta_path if type(f).__module__ == "zico.job.autoload"]
print("watching", len(finders))
print("inject on path", any(p.endswith("inject") for p in sys.path))
"""


def python(code: str, *paths: Path, interpreter: str = sys.executable, **environment: str) -> Done:
    """Run Python code as ``zico run`` would: our folder first, then the user's PYTHONPATH."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ZICO_", "PYTHON"))}
    clean["PYTHONPATH"] = os.pathsep.join(str(path) for path in (INJECT, *paths))
    return subprocess.run(
        [interpreter, "-c", code],
        env=clean | environment,
        cwd=INJECT,  # a folder in which nothing can be imported by accident
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A folder on the user's PYTHONPATH, with a toy framework named like a watched one."""
    (tmp_path / "keras.py").write_text("VALUE = 3\n")
    return tmp_path


def test_a_job_is_watched(user: Path) -> None:
    """With a socket, imports are watched, and our folder is not left on sys.path."""
    done = python(REPORT, user, ZICO_SOCKET="/s", ZICO_PACKAGE_PATH=str(PACKAGE_PATH))
    assert (done.stdout, done.stderr, done.returncode) == ("watching 1\ninject on path False\n", "", 0)


def test_without_a_socket_nothing_happens(user: Path) -> None:
    """Without ZICO_SOCKET not even zico is imported."""
    code = REPORT + "\nprint(any(name.partition('.')[0] == 'zico' for name in sys.modules))"
    done = python(code, user, ZICO_PACKAGE_PATH=str(PACKAGE_PATH))
    assert (done.stdout, done.stderr) == ("watching 0\ninject on path False\nFalse\n", "")


def test_descendants_of_a_job_are_watched_for_what_has_ranks(user: Path) -> None:
    """A process whose ancestor is the job may be a rank that trains; a framework without ranks is left alone."""
    environment = {"ZICO_SOCKET": "/s", "ZICO_PACKAGE_PATH": str(PACKAGE_PATH)}
    code = REPORT + "\nprint(*(name for finder in finders for name in finder.watched))"
    done = python(code, user, ZICO_OWNER_PID="1", **environment)
    assert (done.stdout, done.stderr) == ("watching 1\ninject on path False\ntorch deepspeed\n", "")


def test_a_job_that_replaces_its_own_image_is_watched_again(user: Path) -> None:
    """After exec the process is still the job, since its process id is the one that owns."""
    code = (
        "import os, sys\n"
        "os.environ['ZICO_OWNER_PID'] = str(os.getpid())\n"
        f"os.execv(sys.executable, [sys.executable, '-c', {REPORT!r}])\n"
    )
    done = python(code, user, ZICO_SOCKET="/s", ZICO_PACKAGE_PATH=str(PACKAGE_PATH))
    assert (done.stdout, done.stderr) == ("watching 1\ninject on path False\n", "")


def test_zico_comes_last_on_the_path(user: Path) -> None:
    """A zico that is not installed is put behind all that the user has, and only if it is not importable."""
    code = "import sys; print(sys.path[-1]); print(len(sys.path))"
    appended = python(code, user, ZICO_SOCKET="/s", ZICO_PACKAGE_PATH=str(PACKAGE_PATH))
    plain = python(code, user)
    last, count = appended.stdout.split()
    if plain.stdout.split()[1] == count:
        pytest.skip("zico is installed in this environment, so the path is not needed")
    assert (last, int(count)) == (str(PACKAGE_PATH), int(plain.stdout.split()[1]) + 1)
    present = python(code, user, PACKAGE_PATH, ZICO_SOCKET="/s", ZICO_PACKAGE_PATH="/nowhere")
    assert "/nowhere" not in present.stdout


def test_a_broken_zico_costs_one_line(user: Path) -> None:
    """If zico cannot be started, one line says why and the user's program runs."""
    broken = user / "broken"
    (broken / "zico").mkdir(parents=True)
    (broken / "zico" / "__init__.py").write_text("raise RuntimeError('half\\n  installed')\n")
    done = python("print('ran')", user, broken, ZICO_SOCKET="/s")
    assert (done.stdout, done.stderr, done.returncode) == (
        "ran\n",
        "zico: not active: half installed\n",
        0,
    )


@pytest.mark.parametrize("has_zico", [True, False])
def test_stderr_without_a_reader_stops_no_import(user: Path, *, has_zico: bool) -> None:
    """A line that Zico cannot write is lost, and the framework is imported; also where stderr is closed."""
    broken = user / "broken"
    (broken / "zico").mkdir(parents=True)
    (broken / "zico" / "__init__.py").write_text("raise RuntimeError('half installed')\n")
    (user / "torch.py").write_text("")
    environment = {"ZICO_SOCKET": str(user / "none"), "ZICO_PACKAGE_PATH": str(PACKAGE_PATH)}
    for redirect in ("os.dup2(ends[1], 2)", "sys.stderr.close()", "sys.stderr = None"):
        # Where Zico is broken, sitecustomize writes the line, and else the import of torch.
        (user / "sitecustomize.py").write_text(f"import os, sys\nends = os.pipe()\nos.close(ends[0])\n{redirect}\n")
        done = python("import torch; print('ran')", user, *([] if has_zico else [broken]), **environment)
        assert done.stdout == "ran\n", redirect


def test_the_users_sitecustomize_runs(user: Path) -> None:
    """The user's own sitecustomize runs, is the module of that name, and the job is still watched."""
    (user / "sitecustomize.py").write_text("import sys\nsys.user_ran = (__file__,)\n")
    code = REPORT + "\nimport sitecustomize\nprint(*sys.user_ran)\nprint(sitecustomize.__file__)"
    done = python(code, user, ZICO_SOCKET="/s", ZICO_PACKAGE_PATH=str(PACKAGE_PATH))
    theirs = str(user / "sitecustomize.py")
    assert done.stdout == f"watching 1\ninject on path False\n{theirs}\n{theirs}\n"
    assert done.stderr == ""


@pytest.mark.parametrize("mistake", ["raise RuntimeError('theirs')", "import no_such_module", "1 +"])
def test_a_broken_sitecustomize_of_the_user_is_reported_as_ever(user: Path, mistake: str) -> None:
    """What the user's sitecustomize raises is reported as Python does without us, and the job is watched."""
    (user / "sitecustomize.py").write_text(mistake + "\n")
    with_zico = python(REPORT, user, ZICO_SOCKET="/s", ZICO_PACKAGE_PATH=str(PACKAGE_PATH))
    without = python("", user, PYTHONPATH=str(user))
    assert with_zico.stdout == "watching 1\ninject on path False\n"
    assert with_zico.stderr == without.stderr
    assert "Error in sitecustomize" in without.stderr


def test_a_failing_adapter_is_reported_once(user: Path) -> None:
    """In a real job, a framework whose adapter fails is imported, and one line says that it is not shared."""
    adapters = user / "elsewhere" / "zico" / "adapters"
    adapters.mkdir(parents=True)
    for folder in (adapters, adapters.parent):
        (folder / "__init__.py").touch()
    shutil.copy(zico.job.autoload.__file__, adapters.parent)
    (adapters / "keras.py").write_text("def enable():\n    raise RuntimeError('no broker')\n")
    done = python("import keras; print(keras.VALUE)", user, user / "elsewhere", ZICO_SOCKET="/s")
    assert (done.stdout, done.returncode) == ("3\n", 0)
    assert done.stderr == "zico: keras is not shared: no broker\n"


def test_starting_imports_nothing_slow(user: Path) -> None:
    """Activation imports nothing that costs milliseconds, in a process that may never see a framework."""
    code = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = python(code, user, ZICO_SOCKET="/s", ZICO_PACKAGE_PATH=str(PACKAGE_PATH))
    slow = {"ctypes", "cuda", "llvmlite", "numba", "numpy", "pathlib", "re", "socket", "typing"}
    before = set(python(code, user).stdout.split())  # what the environment itself loads, coverage say
    assert "zico" in done.stdout.split()
    assert set(done.stdout.split()) & slow <= before


# -- the .pth file of the installed package --------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter whose site-packages have Zico and its ``.pth`` file."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    shutil.copy(PACKAGE_PATH / "zico" / "job" / "zico.pth", site)
    (site / "a-zico.pth").write_text(f"{PACKAGE_PATH}\n")  # as an editable install, it comes first by its name
    return str(folder / "bin" / "python")


@pytest.mark.parametrize("path", [{"PYTHONPATH": "/"}, {}])
def test_a_job_with_a_pythonpath_of_its_own_is_watched_once(installed: str, path: dict[str, str]) -> None:
    """Where the command's PYTHONPATH hides our folder the .pth file stands in; beside it, nothing is doubled."""
    environment = {"ZICO_SOCKET": "/s", "ZICO_PACKAGE_PATH": str(PACKAGE_PATH), **path}
    done = python(REPORT, interpreter=installed, **environment)
    assert (done.stdout, done.stderr) == ("watching 1\ninject on path False\n", "")


def test_the_installed_package_has_the_pth_file() -> None:
    """It lies at the root of site-packages, where Python looks for such files, in editable installs, too."""
    found = importlib.metadata.distributions(
        name="zico-memory"
    )  # a checkout's own metadata may lie beside the installed
    assert any("zico.pth" in map(str, distribution.files or ()) for distribution in found)


@pytest.mark.parametrize("environment", [{}, {"ZICO_SOCKET": "/s"}])
def test_the_pth_file_does_nothing_outside_a_run(installed: str, environment: dict[str, str]) -> None:
    """A Python process that ``zico run`` did not start imports nothing of Zico, wherever Zico is installed."""
    code = "import sys; print([name for name in sys.modules if name.partition('.')[0] == 'zico'])"
    done = python(code, interpreter=installed, PYTHONPATH="", **environment)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_pth_file_costs_no_line_where_zico_is_broken(installed: str, user: Path) -> None:
    """What goes wrong in it is not reported by Python at each start: the run says that the job is outside."""
    (user / "zico").mkdir()
    (user / "zico" / "__init__.py").write_text("raise RuntimeError('half installed')\n")
    environment = {"ZICO_SOCKET": "/s", "ZICO_PACKAGE_PATH": str(PACKAGE_PATH), "PYTHONPATH": str(user)}
    done = python("print('ran')", interpreter=installed, **environment)
    assert (done.stdout, done.stderr) == ("ran\n", "")


def test_a_process_that_zico_starts_for_itself_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that a job starts has the job's environment, and must not join the pool of that job."""
    monkeypatch.setenv("ZICO_SOCKET", "/s")
    monkeypatch.setenv("ZICO_PACKAGE_PATH", str(PACKAGE_PATH))
    code = "import sys; print([type(one).__module__ for one in sys.meta_path if 'zico' in type(one).__module__])"
    done = subprocess.run(
        interpreter.command("-c", code), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_what_zico_starts_imports_nothing_from_beside_the_script(tmp_path: Path) -> None:
    """A file of the script's folder, or of the current directory, does not replace what Zico needs."""
    (tmp_path / "click.py").write_text("raise RuntimeError('the script has this one')\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import subprocess\nfrom zico.base import interpreter\n"
        "subprocess.run(interpreter.command('-c', 'import click; print(click.__name__)'), timeout=60, check=False)\n"
    )
    for argv in ([sys.executable, str(script)], [sys.executable, "-m", "train"]):
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert (done.stdout, done.stderr) == ("click\n", "")
