"""A driver that fails its k-th call: shows that every rollback scope leaves nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zico.base.errors import DriverError

if TYPE_CHECKING:
    from zico.device.api import Driver

ENOMEM = 12


class FaultyDriver:
    """Pass calls on to another driver, except the one that is to fail; counts what is lent and not yet returned."""

    def __init__(self, inner: Driver, fail_at: int) -> None:
        """Fail the call number ``fail_at`` (from 1; 0 never fails)."""
        self._inner = inner
        self._fail_at = fail_at
        self.calls = 0
        self.lent: list[Any] = []

    @property
    def live(self) -> int:
        """Return how many things are lent and not closed."""
        return sum(not owned.closed for owned in self.lent)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the inner driver has
        """Return the inner driver's attribute; methods come wrapped."""
        attribute = getattr(self._inner, name)
        if not callable(attribute):
            return attribute

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the inner driver's
            self.calls += 1
            if self.calls == self._fail_at:
                raise DriverError(name, ENOMEM, f"call {self.calls} was made to fail")
            result = attribute(*args, **kwargs)
            if hasattr(result, "close"):
                self.lent.append(result)
            return result

        return counted
