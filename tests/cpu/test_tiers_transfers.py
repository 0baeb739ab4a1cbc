"""Asynchronous copies: fences, order, cancelling, and what they keep alive."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
from threads import until

from zico.errors import LocalProtocolError
from zico.tiers.layout import FULL
from zico.tiers.stack import TierStack
from zico.tiers.transfers import Copy, Outcome, Transfers
from zico.tiers.wishes import TierWish

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 8192
SOON_S = 30.0


class GatedStack(TierStack):
    """A stack that begins to put only when it is let."""

    gate: threading.Event
    began: threading.Event

    def put(self, address: int, size_bytes: int) -> int:
        """Say that a copy has begun, and wait for the gate."""
        self.began.set()
        assert self.gate.wait(SOON_S)
        return super().put(address, size_bytes)


@pytest.fixture
def stack() -> Iterator[GatedStack]:
    """Give memory for sixteen blocks behind an open gate."""
    GatedStack.gate, GatedStack.began = threading.Event(), threading.Event()
    GatedStack.gate.set()
    with GatedStack.create((TierWish("memory", 16 * BLOCK),), block_bytes=BLOCK) as made:
        GatedStack.began.clear()
        yield made


@pytest.fixture
def transfers(stack: GatedStack) -> Iterator[Transfers]:
    """Give transfers to that stack."""
    with contextlib.closing(Transfers(stack)) as made:
        yield made
        stack.gate.set()


def out(transfers: Transfers, data: np.ndarray, **more: object) -> Copy:
    """Ask for a copy of an array to the tiers."""
    return transfers.out(data.ctypes.data, data.nbytes, kept=data, **more)  # type: ignore[arg-type]


def test_what_went_out_comes_back(transfers: Transfers) -> None:
    """Payloads go and come by fences, in the order of asking, and dropping them leaves nothing behind."""
    order: list[int] = []
    data = [np.full(1000 * (n + 1), n, np.uint8) for n in range(5)]
    left = [out(transfers, one, then=lambda copy: order.append(copy.size_bytes)) for one in data]
    assert left[-1].wait(SOON_S)
    assert [copy.outcome for copy in left] == [Outcome.COPIED] * 5
    back = [np.zeros_like(one) for one in data]
    came = [transfers.back(copy.ticket, one.ctypes.data, one.nbytes) for copy, one in zip(left, back, strict=True)]
    assert all(copy.wait(SOON_S) for copy in came)
    assert all(np.array_equal(one, other) for one, other in zip(data, back, strict=True))
    assert order == [1000, 2000, 3000, 4000, 5000]
    for copy in left:
        transfers.drop(copy.ticket)
    use = transfers._stack.usage()[0]
    assert (use.used_bytes, use.out_bytes, use.in_bytes) == (0, 15000, 15000)


def test_asking_does_not_wait_and_what_has_not_begun_can_be_cancelled(stack: GatedStack, transfers: Transfers) -> None:
    """While one copy is being made others queue up; one of them is cancelled, the others are made."""
    stack.gate.clear()
    copies = [out(transfers, np.zeros(10, np.uint8)) for _ in range(3)]
    assert stack.began.wait(SOON_S)
    assert not any(copy.done() for copy in copies)
    assert not copies[0].wait(0.001)
    assert copies[1].cancel()
    assert not copies[0].cancel()
    stack.gate.set()
    assert all(copy.wait(SOON_S) for copy in copies)
    assert [copy.outcome for copy in copies] == [Outcome.COPIED, Outcome.CANCELLED, Outcome.COPIED]
    assert copies[1].cancel()


def test_a_copy_keeps_its_source_until_it_has_ended(stack: GatedStack, transfers: Transfers) -> None:
    """The array lives until the copy is made, is gone when ``then`` is called, and nothing holds it later."""
    stack.gate.clear()
    data = np.zeros(BLOCK, np.uint8)
    alive = weakref.ref(data)
    seen: list[bool] = []
    copy = out(transfers, data, then=lambda _: seen.append(alive() is None))
    del data
    assert alive() is not None
    stack.gate.set()
    assert copy.wait(SOON_S)
    assert seen == [True]
    assert alive() is None


def test_a_full_tier_is_an_outcome_with_a_sentence(transfers: Transfers) -> None:
    """What has no room stays where it is, and says so."""
    data = np.arange(17 * BLOCK, dtype=np.uint8)
    copy = out(transfers, data)
    assert copy.wait(SOON_S)
    assert (copy.outcome, copy.ticket) == (Outcome.FULL, FULL)
    assert "no room is left where memory goes (memory 128 KiB)" in copy.why
    assert np.array_equal(data, np.arange(17 * BLOCK, dtype=np.uint8))


def test_a_copy_that_fails_to_come_back_says_why(stack: GatedStack, transfers: Transfers) -> None:
    """A file that cannot be read any more makes the fence ``FAILED`` and names the reason."""
    ticket = stack.put(stack.shared.ctypes.data, 100)
    stack.record["tiers"][0][0]["map_address"] = 0
    stack.record["tiers"][0][0]["descriptor"] = -1
    copy = transfers.back(ticket, stack.shared.ctypes.data, 1)
    assert copy.wait(SOON_S)
    assert copy.outcome is Outcome.FAILED
    assert copy.why == f"memory could not come back from its tier: {os.strerror(9)}"


def test_a_caller_whose_then_fails_does_not_stop_the_others(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error goes where a thread's errors go, the fence ends, and later copies are made."""
    told: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: told.append(str(arguments.exc_value)))

    def fail(_copy: Copy) -> None:
        raise ValueError("then failed")

    copies = [out(transfers, np.zeros(10, np.uint8), then=fail), out(transfers, np.zeros(10, np.uint8))]
    assert all(copy.wait(SOON_S) for copy in copies)
    assert [copy.outcome for copy in copies] == [Outcome.COPIED] * 2
    assert told == ["then failed"]


def test_closing_makes_no_further_copies(stack: GatedStack) -> None:
    """What is being copied ends, what is queued is cancelled, and asking again is refused with a sentence."""
    transfers = Transfers(stack)
    stack.gate.clear()
    copies = [out(transfers, np.zeros(10, np.uint8)) for _ in range(3)]
    assert stack.began.wait(SOON_S)
    closing = threading.Thread(target=transfers.close)
    closing.start()
    assert not copies[0].done()
    until(lambda: transfers._closed)
    stack.gate.set()
    closing.join(SOON_S)
    assert [copy.outcome for copy in copies] == [Outcome.COPIED, Outcome.CANCELLED, Outcome.CANCELLED]
    with pytest.raises(LocalProtocolError, match="closed"):
        out(transfers, np.zeros(1, np.uint8))
    transfers.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_that_they_are_not_its_own(transfers: Transfers) -> None:
    """Threads do not survive a fork: a child that asks gets an error, and closing in it does not wait."""
    child = os.fork()
    if child == 0:
        try:
            out(transfers, np.zeros(1, np.uint8))
        except LocalProtocolError:
            transfers.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
