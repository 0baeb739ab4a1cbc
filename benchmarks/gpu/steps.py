"""Run a script, and note at each step of an optimizer what the job's swapper has counted until then.

``zico run --device cuda:0 --save zico --limit NAME=SIZE "python benchmarks/gpu/steps.py OUT.json SCRIPT ARGUMENTS"``.
"""

# ruff: noqa: SLF001 - nobody else is to read these
from __future__ import annotations

import atexit
import json
import runpy
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from zico.job import session

if TYPE_CHECKING:
    from zico.swap.swapper import Swapper

COUNTED = ("out_bytes", "in_bytes", "dropped_bytes", "late", "waited_ns", "making_ns")


def counted(swapper: Swapper | None) -> dict[str, Any]:
    """Return what a swapper has counted: of copies, of plans, and what the plan in force says."""
    if swapper is None:
        return {}
    plan = swapper._plan
    planned = None if plan is None else {"leaves_bytes": plan.out_bytes, "drops": len(plan.drops)}
    return {
        **{name: getattr(swapper.figures, name) for name in COUNTED},
        "waited_for_memory_ns": swapper._job.waited_ns(),
        "planned_iterations": swapper.planned_iterations,
        "plans": swapper._learner.plans,
        "margin": swapper._learner._now.margin,
        "plan": planned,
    }


def main() -> None:
    """Run the script; its figures are written when it ends."""
    out, script, *arguments = sys.argv[1:]
    steps: list[dict[str, Any]] = []

    def note(*_: Any) -> None:  # noqa: ANN401 - torch's hook signature
        joined = session.current()
        steps.append({"s": time.monotonic(), **counted(None if joined is None else joined.swapper)})

    register_optimizer_step_post_hook(note)
    atexit.register(lambda: Path(out).write_text(json.dumps(steps)))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
