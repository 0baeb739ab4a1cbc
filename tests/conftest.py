"""What all tests share: hypothesis takes no time limit for an example, since the first one of a test may compile."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

with contextlib.suppress(ImportError):  # tests/gpu may run where it is not installed
    import hypothesis

    hypothesis.settings.register_profile("zico", deadline=None)
    hypothesis.settings.load_profile("zico")

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Let ``timeout`` of setup.cfg be known where pytest-timeout is not installed: tests/gpu may run there."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds for a test, which nothing watches here", default="0")
