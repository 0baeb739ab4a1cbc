"""The policies by name, one file each; none is imported before somebody asks for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from zico.errors import ConfigError

if TYPE_CHECKING:
    from zico.scheduler.state import CompiledPolicy

POLICIES = {
    "zico": "shift iterations so that peaks interleave, and grant only what can never block everybody",
    "claims": "start whoever cannot block everybody; the rest is left to the claims",
    "serial": "one iteration at a time, first come first served; persistent memory stays",
    "none": "no coordination: everybody starts at once and waits only when memory is full",
}
"""What each policy does, by its name, which is also its module's."""


def policy_named(name: str) -> CompiledPolicy:
    """Return the policy of that name.

    Raises:
        ConfigError: There is none; the message lists them.
    """
    if name not in POLICIES:
        raise ConfigError(f"{name!r} is no policy: choose one of {', '.join(POLICIES)}")
    policy: CompiledPolicy = importlib.import_module(f"{__name__}.{name}").POLICY
    return policy
