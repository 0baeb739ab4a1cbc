"""The planners by the names that users type. A planner's code is imported when it is asked for."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from zico.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zico.planners.plan import Planner

_ORDERS = ("size", "duration", "area", "start")
_FITS = ("best", "first")
_REGION_BYTES = 64 * MIB


def _classic(order: str, fit: str) -> Planner:
    from zico.planners.classic import Classic, Fit, Order

    return Classic(Order(order), Fit(fit))


def _made(module: str, name: str, *arguments: int) -> Planner:
    planner: Planner = getattr(importlib.import_module(f"zico.planners.{module}"), name)(*arguments)
    return planner


PLANNERS: Mapping[str, Callable[[], Planner]] = {
    **{f"{order}-{fit}": functools.partial(_classic, order, fit) for order in _ORDERS for fit in _FITS},
    "smartpool": functools.partial(_made, "classic", "smartpool"),
    "improve": functools.partial(_made, "improve", "Improve"),
    "exact": functools.partial(_made, "exact", "Exact"),
    "regions": functools.partial(_made, "regions", "Regions", _REGION_BYTES),
}
"""``start-best`` is dynamic best fit: what an allocator does that does not know the future; ``regions`` plans for
64 MiB."""
