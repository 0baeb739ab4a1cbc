"""Compile what moves payloads, once."""

from __future__ import annotations

import numpy as np

from zico.tiers import stores
from zico.tiers.layout import ALIGNMENT_BYTES
from zico.tiers.stack import TierStack
from zico.tiers.wishes import TierWish


def warm() -> None:
    """Move a payload through a small tier, so that every function is compiled with its real types."""
    page = np.zeros(ALIGNMENT_BYTES, np.uint8)
    wishes = (TierWish("memory", 4 * ALIGNMENT_BYTES),)
    with TierStack.create(wishes, block_bytes=ALIGNMENT_BYTES, label="warm") as stack:
        ticket = stack.put(page.ctypes.data, page.nbytes)
        stores.where(stack.record[0], ticket)
        stack.get(ticket, page.ctypes.data, page.nbytes)
        stack.drop(ticket)
        stack.keep_only([])
        stack.trim()
