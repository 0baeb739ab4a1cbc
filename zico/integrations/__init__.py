"""What trainers and hyperparameter searches report of a job in a pool; each library in a module of its own.

Where the library is missing that an integration is for, one sentence says how to install it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def first_of(names: tuple[str, ...], library: str, install: str) -> ModuleType:
    """Import the first module that is installed.

    Args:
        names: Modules that do equally well, the best first.
        library: What people call the library.
        install: What pip is to install.

    Raises:
        ImportError: None is installed. What a module that is there raises goes through unchanged.
    """
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    raise ImportError(f"this integration needs {library}, which is not installed: pip install '{install}'")
