"""The policies by name, one file each; none is imported before somebody asks for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from zico.base import laboratory
from zico.base.errors import ConfigError
from zico.scheduler.parameters import split

if TYPE_CHECKING:
    from zico.scheduler.packed import Compiled

POLICIES = {
    "zico": "shift iterations so that peaks interleave, and grant only what can never block everybody",
    "shift": "the published scrooge scheduler: ask again and again until a whole iteration is predicted to fit",
    "claims": "start whoever cannot block everybody; the rest is left to the claims",
    "serial": "one iteration at a time, first come first served; persistent memory stays",
    "salus": "lanes that jobs share one iteration at a time, as many lanes as peaks fit",
    "none": "no coordination: everybody starts at once and waits only when memory is full",
    "gandiva": "time slices, suspended between iterations; two jobs share a slice if that pays",
    "tgs": "one job comes first, the others run as far as it loses nothing; memory is paged",
    "nvshare": "the whole device for one job at a time, for a quantum; memory is paged",
    "mps": "everybody runs in a memory pool of its own; what does not fit is paged",
    "partition": "everybody runs in a fixed share of the budget; who does not fit into it cannot run",
}
"""What each policy does, by its name, which is also its module's."""
PUBLISHED = ("salus", "gandiva", "tgs", "nvshare", "mps", "partition")
"""These are others' policies, in ``zico.lab.policies``."""

REAL = ("zico", "shift", "claims", "serial", "salus", "none")
"""Brokers can run these; the others are for the simulator."""


def policy_named(text: str) -> Compiled:
    """Return the policy of that name, told what the text says: ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``.

    Each call returns another object: what a policy remembers is its own.

    Raises:
        ConfigError: There is no such policy or parameter, or a value cannot be used; the message
            lists what there is.
    """
    name, told = split(text)
    if name not in POLICIES:
        raise ConfigError(f"{name!r} is not a policy: choose one of {', '.join(POLICIES)}")
    policy: Compiled
    if name in PUBLISHED:
        policy = laboratory.part(f"policies.{name}", "POLICY", f"the policy {name}")
    else:
        policy = importlib.import_module(f"{__name__}.{name}").POLICY
    return policy.told(told)


def check_real(text: str) -> None:
    """Refuse what no broker can run; says why in one sentence.

    Raises:
        ConfigError: There is no such policy or parameter, or it is for the simulator alone.
    """
    name, told = split(text)
    if name in POLICIES and name not in REAL:
        raise ConfigError(
            f"{name!r} stops jobs inside their iterations, pages or divides memory, which only zico simulate can do: "
            f"choose one of {', '.join(REAL)}"
        )
    if told or name not in POLICIES:
        policy_named(text)
