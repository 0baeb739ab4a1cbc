"""Which sources the cached machine code depends on."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import zico
from zico.base import programs, sources

if TYPE_CHECKING:
    import pytest

PACKAGE = Path(zico.__file__).parent


def _write(package: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)


def _closure(package: Path, name: str) -> set[str]:
    sources.imported.cache_clear()
    found = sources.closure.__wrapped__(package / name, package)
    return {str(file.relative_to(package)) for file in found}


def test_a_module_depends_on_all_it_imports_directly_or_not(tmp_path: Path) -> None:
    """The closure follows every form of import, within functions too, and round cycles."""
    files = {
        "a.py": "from zico.b import (\n    x,\n    y,\n)\n",
        "b.py": "def f():\n    from zico import c, d\n",
        "c.py": "import zico.e.f\n",
        "d.py": "import numpy\n",
        "e/__init__.py": "",
        "e/f.py": "from zico.e import g as h\n",
        "e/g.py": "import zico.a\n",
        "unused.py": "from zico import a\n",
    }
    _write(tmp_path, files)
    assert _closure(tmp_path, "a.py") == {"a.py", "b.py", "c.py", "d.py", "e/f.py", "e/g.py", "e/__init__.py"}
    assert _closure(tmp_path, "d.py") == {"d.py"}


def test_kernels_and_adapters_beside_the_package_are_found(tmp_path: Path) -> None:
    """In a checkout ``zico.kernels`` lies beside ``zico``; machine code made of it depends on it all the same."""
    files = {
        "zico/a.py": "from zico.kernels import b\n",
        "kernels/b.py": "from zico.adapters.c import d\n",
        "adapters/c.py": "",
        "planners/p.py": "",
        "zico/q.py": "from zico.planning.packing import p\n",
    }
    _write(tmp_path, files)
    sources.imported.cache_clear()
    found = sources.closure.__wrapped__(tmp_path / "zico/a.py", tmp_path / "zico")
    assert {str(file.relative_to(tmp_path)) for file in found} == {"zico/a.py", "kernels/b.py", "adapters/c.py"}
    assert sources.imported.__wrapped__(tmp_path / "zico/q.py", tmp_path / "zico") == frozenset()


def _file(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sources.imported.cache_clear()
    programs._digest.cache_clear()
    monkeypatch.setattr(programs, "closure", lambda source: sources.closure.__wrapped__(source, package))
    monkeypatch.setattr(programs, "_source", lambda module: package / f"{module}.py")
    return programs.Program("a", ("a",)).file


def test_the_cache_moves_when_a_source_it_is_made_of_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change in the file or in what it imports starts another cache; a change elsewhere does not."""
    monkeypatch.setenv("ZICO_CACHE_DIR", str(tmp_path / "cache"))
    package = tmp_path / "package"
    _write(package, {"a.py": "from zico import b\n", "b.py": "x = 1\n", "other.py": "x = 1\n"})
    first = _file(package, monkeypatch)
    _write(package, {"other.py": "x = 2\n"})
    assert _file(package, monkeypatch) == first
    _write(package, {"b.py": "x = 2\n"})
    second = _file(package, monkeypatch)
    _write(package, {"a.py": "from zico import b  # and more\n"})
    third = _file(package, monkeypatch)
    _write(package, {"a.py": "from zico import b\n", "b.py": "x = 1\n"})
    assert _file(package, monkeypatch) == first
    assert len({first, second, third}) == 3
    assert first.parent == tmp_path / "cache" / "code"


def _imports_by_syntax(source: Path) -> set[Path]:
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    bases = [PACKAGE.parent.joinpath(*name.split(".")) for name in found if name.split(".")[0] == "zico"]
    return {file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()}


def test_import_statements_are_read_as_python_reads_them() -> None:
    """The quick reading of import statements finds in every file of Zico what a parser finds."""
    root = PACKAGE / "__init__.py"
    for source in PACKAGE.rglob("*.py"):
        expected = _imports_by_syntax(source) - {root}
        assert expected <= sources.imported(source), source
