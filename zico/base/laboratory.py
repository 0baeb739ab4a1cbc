"""The laboratory, ``zico.lab``, by name: nothing else in the runtime names one of its modules.

It holds published planners and policies, and what commands show of files that no job has at hand.
A Zico without it runs jobs as ever.
"""

from __future__ import annotations

import importlib
from typing import Any

from zico.base.errors import ConfigError

_LABORATORY = "zico.lab"


def part(module: str, name: str, asked: str) -> Any:  # noqa: ANN401 - whatever stands there
    """Return what a module of the laboratory calls by a name.

    Args:
        module: Within ``zico.lab``, as in ``saving.autotm``.
        name: What stands there.
        asked: What the user asked for, as in ``--save autotm``.

    Raises:
        ConfigError: The laboratory is not installed.
    """
    try:
        return getattr(importlib.import_module(f"{_LABORATORY}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name != _LABORATORY:
            raise
        raise ConfigError(f"{asked} is of {_LABORATORY}, which is not installed: install all of Zico") from None
