"""For scripts of checks that run inside a job: every ``check_*`` function runs, and the findings go to a file."""

from __future__ import annotations

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Callable


def run(script: dict[str, Any]) -> None:
    """Run the checks of a script's globals in their order; writes "ok" or the traceback of each."""
    found = {}
    for name, check in list(script.items()):
        if name.startswith("check_"):
            try:
                value = check()
                found[name] = "ok" if value is None else value
            except Exception:  # noqa: BLE001 - the top of a check
                found[name] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(found))


def record() -> Any:  # noqa: ANN401 - a JOB record
    """Return this job's record in the shared table."""
    joined = session.current()
    assert joined is not None, "this process is in no pool"
    return joined.record


def marks() -> int:
    """Return how many iterations of this job have been ended by a mark."""
    joined = session.current()
    assert joined is not None, "this process is in no pool"
    return int(joined.heap.record[0]["phases"]["marks"])


def assert_iterations(expected: int, work: Callable[[], object], of: object = "") -> None:
    """Fail unless that many iterations end while ``work`` runs, as reports count them; ``of`` is told then."""
    gc.collect()  # what stepped before is gone then
    before = _iterations()
    work()
    found = _iterations() - before
    assert found == expected, f"{found} iterations, not {expected}: {of}"


def _iterations() -> int:
    found = session.status()
    assert found is not None, "this process is in no pool"
    return int(found["iterations"])


def in_pool(address: int) -> bool:
    """Tell whether the address lies in the window of this process's heap."""
    joined = session.current()
    assert joined is not None, "this process is in no pool"
    offset = address - joined.heap.window.handle
    return bool(0 <= offset < joined.heap.window.size_bytes)
