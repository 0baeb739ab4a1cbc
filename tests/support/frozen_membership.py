"""What a job asks its broker about frozen memory, answered in the same process."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from zico.broker.protocol import messages as m
from zico.broker.transport import Descriptors

if TYPE_CHECKING:
    from zico.broker.frozen import FrozenMemory


class Membership:
    """The member of a place, without a broker's process."""

    def __init__(self, shared: FrozenMemory, place: int) -> None:
        """Ask this one."""
        self._shared = shared
        self._place = place

    def ask(self, question: m.ShareRequest | m.Filled) -> tuple[m.Shared, Descriptors]:
        """Answer as ``Server`` does."""
        if isinstance(question, m.Filled):
            return m.Shared(self._shared.filled(self._place, question.key)), Descriptors([])
        found, descriptor = self._shared.ask(self._place, question.key, question.size_bytes)
        assert descriptor is None
        regions = self._shared.regions_of(question.key) if found in {"here", "fill"} else ()
        return m.Shared(found, regions), Descriptors([])

    def tell(self, message: m.Unshare) -> None:
        """Take a content back."""
        self._shared.give_back(self._place, message.key)


def session_of(shared: FrozenMemory, place: int, heap: Any, pool: Any) -> Any:  # noqa: ANN401 - as much of a session as is used
    """Return what stands for a job's session."""
    return types.SimpleNamespace(membership=Membership(shared, place), heap=heap, pool=pool)
