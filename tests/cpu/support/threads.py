"""Threads of a test that end with it, and what is looked at until it holds."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from support import harness

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE_S = 30.0


def in_thread(work: Callable[[], object]) -> threading.Thread:
    """Run something beside the test."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def until(condition: Callable[[], object]) -> None:
    """Look until the condition holds; the table has no event for what is looked at."""
    harness.until(condition, DEADLINE_S, "it holds")


def result_in_thread(do: Callable[[], Any]) -> Any:  # noqa: ANN401 - what it returns
    """Run something in a thread of its own and return what it returned."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(do())
        except BaseException as error:  # noqa: BLE001 - shown to the test's own thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results[0]
