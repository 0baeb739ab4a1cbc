"""What all tests share.

* hypothesis takes no time limit for an example, since the first one of a test may compile.
* Files with long tests run first, so that two workers end at about the same time.
* Importing an adapter joins nothing, unless a test says otherwise.
* What is there when tests begin, frameworks for example, is no work for the garbage collector.
* Processes heed signals that ``nohup`` or a shell's ``&`` has these tests ignore.
* Tests run in an empty directory, as a user's processes do: in the checkout, Python finds Zico by chance.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from typing import TYPE_CHECKING

import pytest

with contextlib.suppress(ImportError):  # tests/gpu may run where it is not installed
    import hypothesis

    hypothesis.settings.register_profile("zico", deadline=None)
    hypothesis.settings.load_profile("zico")

os.environ.setdefault("ZICO", "off")
os.environ.setdefault("ZICO_PROFILES", "off")  # no test is another one's earlier run
for heeded in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
    if signal.getsignal(heeded) is signal.SIG_IGN:
        signal.signal(heeded, lambda _number, _frame: None)  # a program that is started gets the default

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDERS = ("framework", "process", "cpu", "lab")
"""Of tests, by how long a file takes."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Let ``timeout`` of setup.cfg be known where pytest-timeout is not installed: tests/gpu may run there."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds for a test, which nothing watches here", default="0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first; within a folder the random order stays."""
    rank = {name: place for place, name in enumerate(FOLDERS)}
    items.sort(key=lambda item: rank.get(item.path.parent.name, len(rank)))


@pytest.fixture(scope="session", autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Stand in an empty directory."""
    with contextlib.chdir(tmp_path_factory.mktemp("elsewhere")):
        yield


def pytest_collection_finish() -> None:
    """Leave all that has been imported to the end: tests that collect garbage walk only what they have made."""
    gc.collect()
    gc.freeze()
