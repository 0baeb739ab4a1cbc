"""Where do the seconds before a job's first iteration go? Imports, first calls of each library, MPS, Zico.

Each stage is timed in a process of its own, so that one that fails costs one stage. Imports come
first, the first of them from a cold cache of files. ``--twin`` runs on the host what can run there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[0]))  # PYTHONSAFEPATH leaves it out
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import pairs
import record

if TYPE_CHECKING:
    from collections.abc import Callable

PART = "probe"
STAGE_S = 40.0
KEPT = 200
"""Characters of what a failed stage said last."""

Seconds = dict[str, float]


class Clock:
    """Seconds of steps, one behind the other."""

    def __init__(self) -> None:
        """Begin."""
        self.seconds: Seconds = {}
        self._at_s = time.perf_counter()

    def end(self, step: str) -> None:
        """End a step; the next one begins."""
        now_s = time.perf_counter()
        self.seconds[step] = round(now_s - self._at_s, 4)
        self._at_s = now_s


# -- stages, each in a process of its own ----------------------------------------------------------


def torch_imports(device: str) -> Seconds:
    """Import PyTorch, and what its first optimizer imports."""
    del device
    clock = Clock()
    for module in ("numpy", "torch", "torch._dynamo"):
        import_module(module)
        clock.end(module)
    return clock.seconds


def torch_calls(device: str) -> Seconds:
    """Make the first calls of PyTorch: each loads what it needs of the libraries, the second time nothing."""
    import torch

    clock = Clock()

    def end(step: str) -> None:
        if device != "cpu":
            torch.cuda.synchronize()
        clock.end(step)

    torch.empty(1, device=device)
    end("context and first tensor")
    one = torch.randn(256, 256, device=device)
    end("random numbers")
    for step in ("matrix product", "matrix product again"):
        one @ one
        end(step)
    one.bfloat16() @ one.bfloat16()
    end("matrix product, bfloat16")
    images = torch.randn(8, 16, 32, 32, device=device)
    layer = torch.nn.Conv2d(16, 16, 3, device=device)
    end("layer")
    for step in ("convolution", "convolution again"):
        layer(images).sum()
        end(step)
    layer(images).sum().backward()
    end("backward")
    optimizer = torch.optim.AdamW(layer.parameters())
    end("optimizer")
    for step in ("step", "step again"):
        optimizer.step()
        end(step)
    return clock.seconds


def module_import(module: str) -> Callable[[str], Seconds]:
    """Import a module."""

    def stage(device: str) -> Seconds:
        del device
        clock = Clock()
        import_module(module)
        clock.end(module)
        return clock.seconds

    return stage


STAGES: dict[str, Callable[[str], Seconds]] = {
    "imports": torch_imports,
    "imports again": torch_imports,
    "first calls": torch_calls,
    "JAX": module_import("jax"),
    "CuPy": module_import("cupy"),
    "Numba": module_import("numba.cuda"),
    "Zico": module_import("zico.job.session"),
}
REHEARSED = ("Zico",)
"""Jobs of other parts import the rest."""


def run_stage(name: str, device: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a stage in a process of its own; returns its seconds by step, or why there are none."""
    argv = [sys.executable, __file__, "--stage", name, "--device", device]
    begun_s = time.monotonic()
    try:
        done = subprocess.run(
            argv,
            env=os.environ | (environment or {}),
            capture_output=True,
            text=True,
            timeout=STAGE_S,
            check=True,
        )
        found = {"steps": json.loads(done.stdout.splitlines()[-1])}
    except subprocess.CalledProcessError as error:
        found = {"why": error.stderr.strip()[-KEPT:]}
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        found = {"why": f"{type(error).__name__}: {error}"}
    return found | {"process_s": round(time.monotonic() - begun_s, 3)}


# -- what takes more than a process ----------------------------------------------------------------


def under_mps(device: str) -> dict[str, Any]:
    """Say whether MPS is there, and time the first calls of a client."""
    import run_jobs

    found: dict[str, Any] = {"daemon": shutil.which(pairs.MPS_DAEMON) is not None}
    if not found["daemon"] or device == "cpu":
        return found
    with contextlib.ExitStack() as stack:
        begun_s = time.monotonic()
        variables = stack.enter_context(run_jobs.mps_daemon())
        found["start_s"] = round(time.monotonic() - begun_s, 3)
        return found | {"first calls": run_stage("first calls", device, variables)}


def with_zico(device: str) -> dict[str, Any]:
    """Time a job of three iterations in a pool, from the command to its end, and its stages."""
    where, batch = ("host", "2") if device == "cpu" else ("cuda:0", "64")
    with tempfile.TemporaryDirectory(prefix="zico-probe-") as folder:
        figures = Path(folder, "figures.json")
        job = ["benchmarks/gpu/job.py", "dcgan", "--batch", batch, "--device", device, "--iterations", "3"]
        command = shlex.join([sys.executable, *job, "--figures", str(figures)])
        begun_s = time.monotonic()
        argv = [*common.ZICO, "run", "--quiet", "--device", where, "--budget", "2GiB", command]
        try:
            subprocess.run(argv, cwd=common.ROOT, capture_output=True, text=True, timeout=2 * STAGE_S, check=True)
            stages = json.loads(figures.read_text())["stages"]
        except subprocess.CalledProcessError as error:
            return {"why": error.stderr.strip()[-KEPT:]}
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return {"why": f"{type(error).__name__}: {error}"}
        return {"run_s": round(time.monotonic() - begun_s, 3), "stages": stages}


def main() -> int:
    """Run the stages in order, and append the line; returns 1 if the first one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    if "--stage" not in sys.argv:
        record.add_options(parser)
    parser.add_argument("--stage", choices=STAGES, help="run this stage here, and print it as JSON")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--twin", action="store_true", help="rehearse some of it on the host")
    options = parser.parse_args()
    if options.stage:
        sys.stdout.write(json.dumps(STAGES[options.stage](options.device)) + "\n")
        return 0
    device = "cpu" if options.twin else options.device
    begun_s = time.monotonic()
    figures = {name: run_stage(name, device) for name in (REHEARSED if options.twin else STAGES)}
    figures["MPS"] = under_mps(device)
    if not options.twin:  # other parts of a rehearsal run jobs with Zico
        figures["job with Zico"] = with_zico(device)
    status = record.FAILED if "why" in next(iter(figures.values())) else record.DONE
    told = {"seconds": time.monotonic() - begun_s, "turn": options.round, "status": status}
    record.append(options.result, PART, "stages", figures, **told)
    return int(status != record.DONE)


if __name__ == "__main__":
    sys.exit(main())
