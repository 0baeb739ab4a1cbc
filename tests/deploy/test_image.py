"""The image of ``deploy/Containerfile``, and a pool that its containers share: ``make test-image``.

Buildah makes and runs it with a root directory and mounts of its own, as it can be done where no
control group may be made. The variables are those of the Makefile.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.harness import ANSWER_S, PATIENCE_S, PROCESS, TESTS, until

from zico import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = TESTS.parent
USER = 1000
"""Of the image."""
BUILD_S = 3600
"""It installs a framework and compiles."""
ISOLATION = "--isolation=chroot"

pytestmark = [
    pytest.mark.skipif(shutil.which("buildah") is None, reason="not installed: buildah"),
    pytest.mark.skipif(os.getuid() != 0, reason="buildah is tried as root alone"),
    pytest.mark.timeout(BUILD_S),
]


def buildah(*words: str, within_s: float = 120) -> str:
    """Run one of Buildah's commands and return its words."""
    done = subprocess.run(
        ["buildah", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """Give the name of the image; one that ``IMAGE`` names is taken as it is."""
    if there := os.environ.get("IMAGE"):
        yield there
        return
    values = {"BASE": os.environ.get("IMAGE_BASE"), "FRAMEWORK": os.environ.get("IMAGE_FRAMEWORK"), "UID": str(USER)}
    arguments = [f"--build-arg={name}={value}" for name, value in values.items() if value]
    name = f"zico-test-{os.getpid()}"
    flags = shlex.split(os.environ.get("IMAGE_FLAGS", ""))
    buildah("bud", ISOLATION, *flags, *arguments, "-t", name, "-f", "deploy/Containerfile", ".", within_s=BUILD_S)
    yield name
    buildah("rmi", name)


class Container:
    """One container of the image, with the directory of the pool."""

    def __init__(self, image: str, shared: Path, owned: contextlib.ExitStack) -> None:
        """Make it; ``owned`` removes it."""
        self._name = buildah("from", "--pull-never", image)
        owned.callback(buildah, "rm", self._name)
        mounts = (f"{shared}:/run/zico", f"{PROCESS}:/job:ro")
        self._words = ("run", ISOLATION, *(f"--volume={mount}" for mount in mounts), self._name, "--")

    def says(self, *argv: str) -> str:
        """Run a command in it and return its words."""
        return buildah(*self._words, *argv)

    def start(self, owned: contextlib.ExitStack, *argv: str) -> subprocess.Popen[bytes]:
        """Start a command in it, which ``owned`` waits for."""
        process = subprocess.Popen(["buildah", *self._words, *argv], cwd=ROOT, stdin=subprocess.DEVNULL)
        owned.callback(process.wait, ANSWER_S)
        return process


@pytest.fixture
def shared() -> Iterator[Path]:
    """Give the directory that containers have in common."""
    with tempfile.TemporaryDirectory(prefix="zi-") as directory:
        os.chown(directory, USER, USER)
        yield Path(directory)


@contextlib.contextmanager
def pipe(path: Path) -> Iterator[int]:
    """Make a pipe that the image's user reads, and give an end of it."""
    os.mkfifo(path)
    os.chown(path, USER, USER)
    end = os.open(path, os.O_RDWR)
    try:
        yield end
    finally:
        os.close(end)


def names(inside: Container) -> list[str]:
    """Return the jobs of the pool: its broker answers its user alone."""
    return sorted(job["name"] for job in json.loads(inside.says("zico", "status", "--json"))["jobs"])


def test_the_image_has_this_zico_with_all_its_code_compiled(image: str, shared: Path) -> None:
    """No container compiles at its start."""
    with contextlib.ExitStack() as owned:
        made = Container(image, shared, owned)
        assert made.says("zico", "--version") == f"zico, version {__version__}"
        code = "from zico.base import warming; print(warming.missing(warming.ALL))"
        assert made.says("python3", "-c", code) == "[]"
        assert made.says("id", "-u") == str(USER)


def test_containers_share_the_pool_of_a_third_one(image: str, shared: Path) -> None:
    """Each has a root directory of its own, and the mounted directory."""
    with contextlib.ExitStack() as owned:
        broker, *others = (Container(image, shared, owned) for _ in range(3))
        ends = {name: owned.enter_context(pipe(shared / name)) for name in "ab"}
        runs = owned.enter_context(contextlib.ExitStack())
        broker.start(runs, "zico", "broker", "--budget", "64MiB")
        runs.callback(broker.says, "zico", "broker", "stop")
        until((shared / "zico" / "broker.sock").exists, ANSWER_S, "the broker listens")
        jobs = []
        for other, name in zip(others, ends, strict=True):
            trains = ("python3", "/job/sweep_job.py", "2", f"/run/zico/{name}")
            jobs.append(other.start(runs, "zico", "run", "--name", name, "--", *trains))
            runs.callback(os.write, ends[name], b"1")
        until(lambda: names(broker) == ["a", "b"], PATIENCE_S, "both are in the pool")
        assert "a (process" in broker.says("zico", "broker", "status")
        for end, job in zip(ends.values(), jobs, strict=True):
            os.write(end, b"1")
            assert job.wait(ANSWER_S) == 0
        assert names(broker) == []
