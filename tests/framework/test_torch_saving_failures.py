"""A PyTorch job that swaps is killed in mid-copy, or its disk becomes full: no harm to others, no wrong loss."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from support.harness import ANSWER_S, FRAMEWORK, MIB, PATIENCE_S, Pool, clean_environment, pool, until
from support.scripts import Script, alone, job, place_of

from zico.broker.saving import Wish
from zico.launch.jobs import job_environment
from zico.pool.layout import JobState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

VICTIMS = FRAMEWORK / "torch_saving_victims.py"


@pytest.fixture(scope="module")
def roomy() -> Iterator[Pool]:
    """Give a pool with room for two."""
    with pool(regions=1024, region_bytes=MIB // 4) as made:
        yield made


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the losses of a process without Zico."""
    results = tmp_path_factory.mktemp("alone") / "results"
    with alone(VICTIMS, results) as process:
        done = process.finish()
    assert (done.returncode, done.stderr) == (0, "")
    return losses_in(results)


def losses_in(results: Path) -> list[str]:
    """Return the losses that a process has written."""
    found: dict[str, Any] = json.loads(results.read_text())
    return list(found["losses"])


def mounted(directory: Path, size_bytes: int) -> list[str]:
    """Return the command that runs another with a small file system of its own at a directory (user_namespaces(7))."""
    script = f'mount -t tmpfs -o size={size_bytes} none "$0" && exec "$@"'
    return ["unshare", "--mount", "--map-root-user", "sh", "-c", script, str(directory)]


def victim(made: Pool, directory: Path, happens: str, under: Sequence[str] = (), tier_bytes: int = 256 * MIB) -> Script:
    """Start a job that swaps to a file in a directory, to which something happens."""
    (directory / "spill").mkdir(exist_ok=True)
    base = clean_environment() | {"ZICO_SPILL_DIR": str(directory / "spill")}
    environment = job_environment(base, made.socket, "victim", wish=Wish("swap", tier=f"file:{tier_bytes}"))
    return Script([str(VICTIMS), str(directory / "victim"), happens], environment, under)


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_death_in_mid_copy_harms_nobody(roomy: Pool, expected: list[str], tmp_path: Path, direction: str) -> None:
    """Its regions come back, its file is gone, and a neighbour in mid-training ends with the losses it has alone."""
    with job(roomy, "neighbour", VICTIMS, tmp_path / "neighbour", "wait", save="none") as neighbour:
        assert neighbour.line() == "waits"
        with victim(roomy, tmp_path, direction) as killed:
            place = place_of(roomy, "victim", killed)
            done = killed.finish()
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (tmp_path / "victim").exists()
        until(lambda: roomy.jobs["state"][place] == JobState.EMPTY, ANSWER_S, "the dead is forgotten")
        assert not (roomy.regions["owner"] == place).any()
        roomy.look().check()
        assert list((tmp_path / "spill").iterdir()) == []
        neighbour.tell("go on")
        done = neighbour.finish()
    assert (done.returncode, done.stderr) == (0, "")
    assert losses_in(tmp_path / "neighbour") == expected


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("is_enough", [False, True])
def test_a_full_file_system(roomy: Pool, expected: list[str], tmp_path: Path, is_enough: bool) -> None:  # noqa: FBT001 - a parameter
    """Its job goes on with what fits, or ends with one sentence: never by a signal, never with a wrong loss."""
    spill, size_bytes = tmp_path / "spill", (32 if is_enough else 8) * MIB
    spill.mkdir()
    under = mounted(spill, size_bytes)
    if subprocess.run([*under, "true"], check=False, capture_output=True, timeout=ANSWER_S).returncode:
        pytest.skip("this user may not mount a file system of its own")
    with victim(roomy, tmp_path, "none", under, size_bytes) as process:
        done = process.finish()
    if is_enough:
        assert (done.returncode, done.stderr) == (0, "")
        assert losses_in(tmp_path / "victim") == expected
    else:
        assert done.returncode == 1, done.stderr
        assert done.stderr.splitlines()[-1].startswith("zico: out of memory: needs ")
        assert "ZICO_SPILL_DIR" in done.stderr
        assert not (tmp_path / "victim").exists()


@pytest.mark.timeout(3 * PATIENCE_S)
def test_a_disk_that_becomes_full_in_mid_iteration_costs_no_bit(
    roomy: Pool, expected: list[str], tmp_path: Path
) -> None:
    """What finds no room stays where it is; the job goes on by the next tier, to the losses that it has alone."""
    with victim(roomy, tmp_path, "full") as process:
        done = process.finish()
    assert (done.returncode, done.stderr) == (0, "")
    assert losses_in(tmp_path / "victim") == expected
    assert json.loads((tmp_path / "victim").read_text())["kept"] > 0
    assert list((tmp_path / "spill").iterdir()) == []
