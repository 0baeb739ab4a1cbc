"""Figures as text."""

from __future__ import annotations

NONE = "-"


def gain(value: float | None) -> str:
    """Return a ratio: ``1.35x``."""
    return NONE if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """Return a share in whole percent."""
    return NONE if value is None else f"{100 * value:.0f} %"


def number(value: float | None, digits: int = 0) -> str:
    """Return a number with so many digits after the point."""
    return NONE if value is None else f"{value:,.{digits}f}"
