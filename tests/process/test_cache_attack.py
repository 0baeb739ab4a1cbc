"""Another user plants code in a compile cache that everybody may write."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cpu.support.zico_process import ZicoRun, python
from support.harness import PROCESS

from zico.base.paths import cache_root

PROGRAM = PROCESS / "cached_program.py"
DEADLINE_S = 300.0
NOBODY = 65534
_PLANTED = 63


def ran(cache: Path, own: Path, *arguments: str) -> tuple[int, Path, str]:
    """Run the program; return its result, where its machine code is, and what it said on stderr."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env=os.environ | {"ZICO_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(own)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    result, file = done.stdout.splitlines()
    return int(result), Path(file), done.stderr


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Give a directory for the user's own cache."""
    (tmp_path / "own").mkdir(0o700)
    return tmp_path / "own"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Give a cache that every user may write."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    return tmp_path / "shared"


def plant(cache: Path, own: Path) -> None:
    """Put machine code that is not the program's where it would look for its own, as ``nobody`` if we may."""
    result, _, _ = ran(own / "real", own, "3")  # the name of the file does not tell what the function multiplies by
    assert result == _PLANTED
    shutil.copytree(own / "real", cache, dirs_exist_ok=True)
    for path in (cache, *cache.rglob("*")):
        if os.getuid() == 0:
            os.chown(path, NOBODY, NOBODY)
        path.chmod(0o777)


def test_code_that_another_user_planted_does_not_run(own: Path, shared: Path) -> None:
    """Planted code is not loaded, the program works, and a sentence says so."""
    plant(shared, own)
    assert ran(own / "real", own)[0] == _PLANTED  # the control: what is found in a cache does run

    result, file, said = ran(shared, own)
    assert result == 42
    assert file.is_relative_to(own / "zico" / "code")
    assert said.count("\n") == 1
    assert said.startswith(f"zico: machine code is kept in {own / 'zico'} and not in {shared}, as {shared} ")


def test_a_cache_that_was_closed_too_late_is_refused_as_well(own: Path, shared: Path) -> None:
    """What was planted while a cache was open is not loaded after its owner has closed it."""
    plant(shared, own)
    if os.getuid() == 0:
        os.chown(shared, 0, 0)
    shared.chmod(0o700)
    result, file, said = ran(shared, own)
    assert result == 42
    assert file.is_relative_to(own / "zico" / "code")
    assert f"as {shared / 'code'} " in said


def test_a_run_says_it_once_and_its_jobs_get_the_cache_that_passed(own: Path, shared: Path) -> None:
    """However many jobs there are, ``zico run`` has one sentence, and each job finds the directory in its place."""
    (own / "zico").symlink_to(cache_root())  # where everything is compiled already
    code = "import os; print('cache at', os.environ['ZICO_CACHE_DIR']); import zico.base.compiled"
    caches = {"ZICO_CACHE_DIR": str(shared), "XDG_CACHE_HOME": str(own)}
    with ZicoRun("--quiet", python(code), python(code), **caches) as run:
        assert run.finish() == 0
        (told,) = [line for line in run.stderr.splitlines() if "machine code is kept in" in line]
        kept = told.partition(" kept in ")[2].partition(" and not in ")[0]
        assert f" and not in {shared}, as {shared} may be written by others" in told
        assert run.stdout.count(f"cache at {kept}\n") == 2
    assert not list(shared.iterdir())
