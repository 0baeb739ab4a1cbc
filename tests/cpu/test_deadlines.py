"""Waits with a deadline in the supervisor: what is cancelled ends, whenever that comes."""

from __future__ import annotations

import asyncio
import os
import types
from typing import TYPE_CHECKING

import pytest

from zico.launch.processes import readable, within

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 8
"""Of the loop, between what is waited for and the cancellation."""


@types.coroutine
def step() -> Iterator[None]:
    """Let the loop go round once."""
    yield


async def cancelled_after(steps: int) -> bool:
    """Let a pipe become readable, cancel the wait so many steps of the loop later, and tell whether it ended so."""
    reading, writing = os.pipe()
    try:
        waiting = asyncio.create_task(within(60.0, readable(reading)))
        await step()
        await step()
        os.write(writing, b"x")
        for _ in range(steps):
            await step()
        asked = waiting.cancel()
        await asyncio.wait([waiting], timeout=60.0)
        return waiting.cancelled() == asked
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("steps", range(STEPS))
def test_a_wait_that_is_cancelled_as_it_is_met_is_cancelled(steps: int) -> None:
    """A task that went on would never end: nothing cancels it again, and who cancels waits for it."""
    assert asyncio.run(cancelled_after(steps))


def test_a_wait_has_its_deadline() -> None:
    """What never comes is a TimeoutError."""
    reading, writing = os.pipe()
    try:
        with pytest.raises(TimeoutError):
            asyncio.run(within(0.01, readable(reading)))
    finally:
        os.close(reading)
        os.close(writing)
