"""Jobs of environments of their own share one pool, as PyTorch in one and TensorFlow in the other do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cpu.support.zico_process import ZicoRun
from support.harness import PATIENCE_S, clean_environment, compile_once

from zico.launch.doctor import JOB_PACKAGES, _check_packages

TORCH = """
import torch
weight = torch.nn.Parameter(torch.ones(1 << 18))
sgd = torch.optim.SGD([weight], lr=0.1)
for _ in range(4):
    sgd.zero_grad()
    (weight * 2).sum().backward()
    sgd.step()
"""
TENSORFLOW = """
import tensorflow as tf
weight = tf.Variable(tf.ones(1 << 18))
sgd = tf.keras.optimizers.SGD(0.1)
for _ in range(4):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * 2)
    sgd.apply_gradients([(tape.gradient(loss, weight), weight)])
"""
ALLOCATOR = Path(__file__).parent / "support" / "preloaded_allocator.c"


def environment(folder: Path, *packages: str) -> str:
    """Return the interpreter of a new environment whose path ends with these folders; it has nothing else."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)],
        env=clean_environment(),
        timeout=PATIENCE_S,
        check=True,
    )
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    # Their own .pth files are not read from here: an editable install of this checkout is not seen.
    (site_packages / "behind.pth").write_text("\n".join(packages))
    return str(folder / "bin" / "python")


@pytest.fixture
def installed() -> list[str]:
    """Give the folders of installed packages."""
    return [path for path in sys.path if path.endswith("-packages")]


def test_frameworks_of_two_environments_share_a_pool(tmp_path: Path, installed: list[str]) -> None:
    """Neither environment has Zico: both jobs find that of ``zico run`` by its path, adapters and all."""
    compile_once()
    commands = []
    for name, source in (("torch", TORCH), ("tensorflow", TENSORFLOW)):
        script = tmp_path / f"train_{name}.py"
        script.write_text(source)
        commands.append(f"{environment(tmp_path / name, *installed)} {script}")
    report = tmp_path / "report.json"
    with ZicoRun("--json", str(report), "--budget", "256MiB", *commands) as run:
        assert run.finish() == 0, run.stderr
    jobs = json.loads(report.read_text())["jobs"]
    assert [job["framework"] for job in jobs] == ["torch", "tensorflow"], run.stderr
    assert all(job["pool_fraction"] > 0.95 for job in jobs), jobs


def test_what_an_environment_lacks_is_named(tmp_path: Path) -> None:
    """The doctor says what a job needs and its environment has not, and the job says it, too."""
    bare = environment(tmp_path / "bare")
    check = _check_packages(bare)
    assert not check.passed
    assert check.detail.startswith(f"{bare} lacks {' and '.join(JOB_PACKAGES)}: {bare} -m pip install zico-memory==")
    (tmp_path / "torch.py").write_text("loaded = True")  # as if the framework were there
    with ZicoRun(f"{bare} -c 'import torch; assert torch.loaded'", PYTHONPATH=str(tmp_path)) as run:
        assert run.finish() == 0, run.stderr
    assert "torch is not shared: No module named '" in run.stderr
    assert f": {bare} -m pip install zico-memory" in run.stderr


def test_an_environment_with_another_zico_is_named(tmp_path: Path, installed: list[str]) -> None:
    """A job needs the version of its broker."""
    other = tmp_path / "other" / "zico"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("__version__ = '0.0.1'")
    check = _check_packages(environment(tmp_path / "with_other", str(other.parent), *installed))
    assert not check.passed
    assert "has Zico 0.0.1, this is" in check.detail


def test_an_environment_with_all_is_fine(tmp_path: Path, installed: list[str]) -> None:
    """Zico itself need not be there."""
    assert _check_packages(environment(tmp_path / "all", *installed)).passed
    assert _check_packages(sys.executable).passed


@pytest.mark.parametrize("case", ["preloaded", "huge pages", "few addresses"])
def test_a_job_shares_memory_in_an_unusual_process(tmp_path: Path, case: str) -> None:
    """Another allocator in front of the C library's, PyTorch's huge pages, and a limit of addresses."""
    compile_once()
    (tmp_path / "train.py").write_text(TORCH)
    command, environ = f"{sys.executable} {tmp_path}/train.py", {}
    if case == "preloaded":
        library = tmp_path / "allocator.so"
        cc = ["cc", "-shared", "-fPIC", "-fno-builtin", "-o", str(library), str(ALLOCATOR)]
        subprocess.run(cc, timeout=PATIENCE_S, check=True)
        command = f"env LD_PRELOAD={library} {command}"
    elif case == "huge pages":
        environ["THP_MEM_ALLOC_ENABLE"] = "1"
    else:
        command = f"prlimit --as={1 << 38} {command}"
    report = tmp_path / "report.json"
    with ZicoRun("--json", str(report), "--budget", "256MiB", command, **environ) as run:
        assert run.finish() == 0, run.stderr
    (job,) = json.loads(report.read_text())["jobs"]
    assert job["framework"] == "torch", run.stderr
    assert job["pool_fraction"] > 0.95, run.stderr
    assert job["iterations"] == 4
