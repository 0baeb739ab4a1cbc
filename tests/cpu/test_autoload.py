"""Enabling an adapter when its framework has been imported, whatever else happens to the import."""

from __future__ import annotations

import copy
import importlib
import importlib.resources
import importlib.util
import sys
import threading
import zipfile
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING

import pytest

from zico.job.autoload import WATCHED, install

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

TOY = {"toy": "toy_adapter:enable"}
ADAPTER = """
import sys
calls = []
def enable():
    import toy
    calls.append((toy.VALUE, toy.__loader__, toy.__spec__.loader))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with a toy framework and its adapter; imports are as before afterwards."""
    (tmp_path / "toy.py").write_text("VALUE = 3\nLOADER_INSIDE = __spec__.loader, __loader__\n")
    (tmp_path / "toy_adapter.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(str(tmp_path))
    meta_path, modules = list(sys.meta_path), set(sys.modules)
    yield tmp_path
    sys.meta_path[:] = meta_path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0].startswith("toy"):
            del sys.modules[name]


def enabled() -> int:
    """Return how often the toy adapter was enabled."""
    return len(importlib.import_module("toy_adapter").calls)


@pytest.mark.usefixtures("folder")
def test_the_adapter_is_enabled_after_the_module_ran() -> None:
    """The adapter sees a complete module, and it is enabled before the import returns."""
    install(TOY)
    assert "toy_adapter" not in sys.modules
    importlib.import_module("toy")
    assert [call[0] for call in importlib.import_module("toy_adapter").calls] == [3]


def test_the_real_loader_is_back_before_the_module_runs(folder: Path) -> None:
    """The module's own code, the adapter and later readers all see the loader that Python would have used."""
    install(TOY)
    toy = importlib.import_module("toy")
    loaders = [*toy.LOADER_INSIDE, *importlib.import_module("toy_adapter").calls[0][1:], toy.__loader__]
    assert {type(loader) for loader in loaders} == {SourceFileLoader}
    assert {loader.path for loader in loaders} == {str(folder / "toy.py")}


@pytest.mark.usefixtures("folder")
def test_a_module_that_is_already_imported_is_enabled_at_once() -> None:
    """Installing after the framework's import is not too late."""
    importlib.import_module("toy")
    install(TOY)
    assert enabled() == 1


@pytest.mark.usefixtures("folder")
def test_an_adapter_is_enabled_once() -> None:
    """Neither another import, nor a reload, nor a second install enables an adapter again."""
    install(TOY)
    toy = importlib.import_module("toy")
    install(TOY)
    importlib.reload(toy)
    del sys.modules["toy"]
    importlib.import_module("toy")
    assert enabled() == 1


def test_looking_for_a_module_enables_nothing(folder: Path) -> None:
    """A spec that is looked up but not loaded, to see what is there, works like the real one."""
    install(TOY)
    spec = importlib.util.find_spec("toy")
    assert spec is not None
    loader = spec.loader
    assert loader is not None
    assert loader.get_source("toy").startswith("VALUE = 3")  # type: ignore[attr-defined]
    assert loader.get_code("toy").co_filename == spec.origin  # type: ignore[attr-defined]
    assert not loader.is_package("toy")  # type: ignore[attr-defined]
    assert not hasattr(loader, "no_such_attribute")
    assert copy.copy(loader).path == str(folder / "toy.py")  # type: ignore[attr-defined]
    assert "toy_adapter" not in sys.modules


@pytest.mark.usefixtures("folder")
def test_a_lazily_loaded_module_is_enabled_when_it_runs() -> None:
    """The standard LazyLoader around the watched loader enables the adapter at the first use."""
    install(TOY)
    spec = importlib.util.find_spec("toy")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy"] = module
    spec.loader.exec_module(module)
    assert "toy_adapter" not in sys.modules
    assert module.VALUE == 3
    assert enabled() == 1


def test_packages_keep_their_parts_and_resources(folder: Path) -> None:
    """Submodules that import the package while it is importing, and its data files, work as always."""
    (folder / "toy.py").unlink()
    package = folder / "toy"
    package.mkdir()
    (package / "__init__.py").write_text("import toy\nfrom toy import part\nVALUE = part.VALUE\n")
    (package / "part.py").write_text("import toy\nimport toy.other\nVALUE = toy.other.VALUE\n")
    (package / "other.py").write_text("VALUE = 4\n")
    (package / "data.txt").write_text("some data")
    install(TOY)
    importlib.import_module("toy.part")
    assert importlib.resources.files("toy").joinpath("data.txt").read_text() == "some data"
    assert importlib.import_module("toy_adapter").calls[0][0] == 4
    assert enabled() == 1


def test_a_module_in_a_zip_file_is_enabled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One zip importer serves all modules of its file; each watched one is still enabled exactly once."""
    (folder / "toy.py").unlink()
    archive = folder / "toys.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("toy.py", "import toy_too\nVALUE = 5\n")
        file.writestr("toy_too.py", "VALUE = 6\n")
    monkeypatch.syspath_prepend(str(archive))
    (folder / "toy_too_adapter.py").write_text("calls = []\ndef enable():\n    calls.append(1)\n")
    install(TOY | {"toy_too": "toy_too_adapter:enable"})
    toy = importlib.import_module("toy")
    assert type(toy.__loader__).__name__ == "zipimporter"
    assert [call[0] for call in importlib.import_module("toy_adapter").calls] == [5]
    assert importlib.import_module("toy_too_adapter").calls == [1]


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        ("def enable():\n    raise RuntimeError('no\\n  broker')", "no broker"),
        ("def enable():\n    raise RuntimeError", "RuntimeError"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("", "module 'toy_adapter' has no attribute 'enable'"),
        (None, "No module named 'toy_adapter'"),
    ],
)
def test_a_failing_adapter_costs_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], adapter: str | None, reason: str
) -> None:
    """Whatever is wrong with an adapter, its framework is imported and one line gives the reason."""
    (folder / "toy_adapter.py").unlink()
    if adapter is not None:
        (folder / "toy_adapter.py").write_text(adapter)
    install(TOY)
    assert importlib.import_module("toy").VALUE == 3
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("zico: toy is not shared: ")
    assert reason in written.err
    assert written.err.count("\n") == 1


@pytest.mark.usefixtures("folder")
def test_a_process_without_stderr_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no stderr, a failing adapter stays silent instead of failing the import."""
    monkeypatch.setattr(sys, "stderr", None)
    install({"toy": "toy_adapter:no_such_function"})
    assert importlib.import_module("toy").VALUE == 3


def test_a_failing_framework_fails_as_without_zico(folder: Path) -> None:
    """What the module's code raises arrives unchanged, and the next, successful import is enabled."""
    good = (folder / "toy.py").read_text()
    (folder / "toy.py").write_text("error = ZeroDivisionError('boom')\nraise error\n")
    install(TOY)
    with pytest.raises(ZeroDivisionError, match=r"^boom$") as caught:
        importlib.import_module("toy")
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    assert "toy" not in sys.modules
    assert "toy_adapter" not in sys.modules
    (folder / "toy.py").write_text(good + "# of another size, so that no stale bytecode fits\n")
    importlib.import_module("toy")
    assert enabled() == 1


def test_an_absent_framework_is_absent(folder: Path) -> None:
    """A watched module that does not exist raises what Python raises for it."""
    (folder / "toy.py").unlink()
    install(TOY)
    assert importlib.util.find_spec("toy") is None
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'toy'$"):
        importlib.import_module("toy")


def test_a_folder_of_the_same_name_is_no_framework(folder: Path) -> None:
    """A mere folder named like a framework, in the directory of a script say, is not enabled."""
    (folder / "toy.py").unlink()
    (folder / "toy").mkdir()
    install(TOY)
    importlib.import_module("toy")
    assert "toy_adapter" not in sys.modules


@pytest.mark.usefixtures("folder")
def test_a_blocked_module_is_not_enabled() -> None:
    """None in sys.modules means that a module must not be imported; installing respects it."""
    sys.modules["toy"] = None  # type: ignore[assignment]
    install(TOY)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("toy")
    assert "toy_adapter" not in sys.modules


@pytest.mark.usefixtures("folder")
def test_finders_without_find_spec_are_passed_over() -> None:
    """A finder of the old kind on sys.meta_path does not break the import of a watched module."""
    install(TOY)
    sys.meta_path.insert(0, object())  # type: ignore[arg-type]
    finder = sys.meta_path[1]
    assert finder.find_spec("toy", None, None) is not None
    assert finder.find_spec("toy_adapter", None, None) is None


@pytest.mark.usefixtures("folder")
def test_importing_threads_see_the_framework_only_when_it_is_shared() -> None:
    """Of many threads that import at once, none returns before the adapter is enabled, and it is once."""
    count = 8
    install(TOY)
    start = threading.Barrier(count)
    seen: list[int] = []

    def body() -> None:
        start.wait(timeout=10)
        importlib.import_module("toy")
        seen.append(enabled())

    run_all([threading.Thread(target=body) for _ in range(count)])
    assert seen == [1] * count


def run_all(threads: list[threading.Thread]) -> None:
    """Run threads to their end."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)


class Redirector:
    """A finder that looks for a submodule in another folder, by asking every finder again, as numba-cuda's does."""

    def __init__(self, name: str, folder: Path) -> None:
        """Look for ``name`` in ``folder``."""
        self.name, self.folder = name, str(folder)

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> object:
        """Return what some finder finds in the folder."""
        if name != self.name or path is None or self.folder in path:
            return None
        found = (finder.find_spec(name, [self.folder], target) for finder in sys.meta_path)  # type: ignore[arg-type]
        return next((spec for spec in found if spec is not None), None)


@pytest.mark.parametrize("redirected", [False, True])
def test_a_submodule_may_be_watched(folder: Path, redirected: bool) -> None:  # noqa: FBT001 - a case
    """Its adapter is enabled when it is imported and not with its package, also where a finder redirects it."""
    (folder / "toypackage").mkdir()
    (folder / "toypackage" / "__init__.py").touch()
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "sub.py").write_text("WHERE = 'elsewhere'\n")
    (folder / "toypackage" / "sub.py").write_text("WHERE = 'here'\n")
    (folder / "toy_adapter.py").write_text(
        "import sys\ncalls = []\ndef enable():\n    calls.append(sys.modules['toypackage.sub'].WHERE)\n"
    )
    if redirected:
        sys.meta_path.insert(0, Redirector("toypackage.sub", folder / "elsewhere"))
    install({"toypackage.sub": "toy_adapter:enable"})
    importlib.import_module("toypackage")
    assert "toy_adapter" not in sys.modules
    module = importlib.import_module("toypackage.sub")
    assert importlib.import_module("toy_adapter").calls == ["elsewhere" if redirected else "here"]
    assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader


def test_a_framework_that_another_one_imports_is_not_the_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outermost framework counts, but Keras gives way to its backend; after all imports each counts for itself."""
    (folder / "keras.py").write_text("import toybackend\n")
    (folder / "toybackend.py").write_text("import toy\n")
    (folder / "toy_adapter.py").write_text(
        "from zico.job.autoload import framework_of\ncalls = []\n"
        "def enable():\n    calls.append(framework_of('toy'))\n"
        "def enable_backend():\n    calls.append(framework_of('toybackend'))\n"
    )
    monkeypatch.delitem(sys.modules, "keras", raising=False)  # an earlier test's, which would be enabled at once
    install({"keras": "toy_adapter:enable", "toybackend": "toy_adapter:enable_backend", **TOY})
    importlib.import_module("keras")
    del sys.modules["keras"]
    assert importlib.import_module("toy_adapter").calls == ["toybackend", "toybackend", "toy"]


@pytest.mark.parametrize(("module", "adapter"), WATCHED.items())
def test_the_table_names_adapters(module: str, adapter: str) -> None:
    """Every watched name is a module's, and every adapter a function of a module of zico.adapters."""
    where, _, function = adapter.partition(":")
    assert all(part.isidentifier() for part in module.split("."))
    assert where.startswith("zico.adapters.")
    assert function.isidentifier()
