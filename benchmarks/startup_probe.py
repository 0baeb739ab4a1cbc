"""Inside a job of ``micro/test_startup.py``: takes the steps of joining a pool one by one and prints their seconds.

Zico's own import hook is taken away first, so that the framework comes in as without Zico; then the
adapter's imports are done in the order in which it would do them, and its calls are timed where
they are made.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from zico.job import autoload

if TYPE_CHECKING:
    from collections.abc import Callable

_spent_s: dict[str, float] = {}


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its time added up under ``name``."""

    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function's
        began_s = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            _spent_s[name] = _spent_s.get(name, 0.0) + time.monotonic() - began_s

    return run


def main(framework: str) -> None:
    """Join the pool step by step."""
    os.environ["ZICO"] = "off"  # the adapter's import changes nothing
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, autoload.Finder)]
    importlib.import_module(framework)
    timed("import numba", importlib.import_module)("numba")
    hooks = timed("import what is compiled", importlib.import_module)("zico.heap.hooks")
    timed("load compiled code", getattr)(hooks.free, "address")
    modules = ("zico.broker.client", "zico.heap.build", "zico.heap.fork", "zico.pool.table", "zico.job.elf")
    for module in modules:
        timed("import the rest of zico", importlib.import_module)(module)
    from zico.broker.client import BrokerClient
    from zico.heap.build import Heap
    from zico.job.session import Session

    patched: tuple[tuple[Any, str, str], ...] = (
        (BrokerClient, "join", "join the broker"),
        (Heap, "__init__", "set up the heap"),
        (Session, "redirect", "redirect the libraries"),
    )
    for owner, method, name in patched:
        setattr(owner, method, timed(name, getattr(owner, method)))
    adapter = importlib.import_module(f"zico.adapters.{framework}")
    before_s = sum(_spent_s.values())
    timed("all of joining", adapter.enable)()
    inside_s = sum(_spent_s.values()) - before_s - _spent_s["all of joining"]
    _spent_s["other"] = _spent_s.pop("all of joining") - inside_s
    for name, spent_s in _spent_s.items():
        print(f"{name}: {spent_s:.6f}")


if __name__ == "__main__":
    main(sys.argv[1])
