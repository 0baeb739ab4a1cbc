"""What comments, docstrings and pages name is there: a dotted name leads to code of ours, a path to a file."""

from __future__ import annotations

import ast
import configparser
import functools
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cpu.support.source_texts import ROOT, files, texts

if TYPE_CHECKING:
    from collections.abc import Iterable

LIBRARIES = frozenset({"cuda", "cupy", "deepspeed", "jax", "keras", "lightning", "numba", "optuna", "ray"})
LIBRARIES |= {"tensorflow", "torch", "transformers", "xla", *sys.stdlib_module_names}
"""What others call so: ``torch.relu`` is PyTorch's, and the adapter is ``zico.adapters.torch``."""
SUFFIXES = frozenset({"c", "cfg", "html", "json", "jsonl", "md", "npz", "png", "pth", "py", "sock", "toml"})
"""Last parts of names of files."""
WRITTEN = frozenset({"NAME.md", "report.md", "table.md"})
"""Pages that commands write."""
OTHERS = ("benchmarks/compatibility", "docs/compatibility")
"""Who names scripts of other repositories."""

_DOTTED = re.compile(r"(?<!`)(`{1,2})([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\([^`]*\))?\1(?!`)")
_SCHEMA = re.compile(r"zico\.\w+\.v\d+")
_FILE = re.compile(r"(?<![\w./<{*-])([\w-]+(?:/[\w.-]+)*\.(?:py|md))\b(?![\w/*}])")

Scope = dict[str, ast.AST]


# -- what there is ---------------------------------------------------------------------------------


@functools.cache
def endings() -> frozenset[str]:
    """Return the paths of the files, each from any of its folders on."""
    return frozenset("/".join(name.split("/")[i:]) for name in files() for i in range(name.count("/") + 1))


@functools.cache
def modules() -> dict[str, Path]:
    """Return Python files by dotted names: those of the package as they are installed, others by their folders."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    installed = {folder: package for package, folder in re.findall(r"(\S+) = (\S+)", config["options"]["package_dir"])}
    found = {}
    for name in files():
        if name.endswith(".py"):
            first, *rest = Path(name).with_suffix("").parts
            parts = [installed.get(first, first), *(part for part in rest if part != "__init__")]
            found[".".join(parts)] = ROOT / name
    return found


@functools.cache
def heads() -> dict[str, list[str]]:
    """Return the modules that a dotted name may begin with, by what stands before its first dot."""
    found: dict[str, list[str]] = {}
    for name in modules():
        found.setdefault(name.rpartition(".")[2], []).append(name)
    return {head: names for head, names in found.items() if head not in LIBRARIES}


def names_of(body: Iterable[ast.AST]) -> Scope:
    """Return what statements define, by name, with what defines it."""
    found: Scope = {}
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found[node.name] = node
            case ast.Import() | ast.ImportFrom():
                found |= {alias.asname or alias.name.partition(".")[0]: node for alias in node.names}
            case ast.If() | ast.Try() | ast.With():
                found |= names_of(ast.iter_child_nodes(node))
            case ast.stmt():
                stored = [each for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute)]
                found |= {name_of(each): node for each in stored if isinstance(each.ctx, ast.Store)}
            case _:
                pass
    return found


def name_of(target: ast.Name | ast.Attribute) -> str:
    """Return a variable's name, or the last part of an attribute's."""
    return target.id if isinstance(target, ast.Name) else target.attr


@functools.cache
def scope_of(module: str) -> Scope:
    """Return what a module defines."""
    return names_of(ast.parse(modules()[module].read_text()).body)


def members_of(defined: ast.ClassDef) -> Scope:
    """Return what a class defines, and what its methods write into attributes."""
    methods = [node for node in defined.body if isinstance(node, ast.FunctionDef)]
    return names_of([*defined.body, *(node for method in methods for node in ast.walk(method))])


def is_there(module: str, parts: list[str]) -> bool:
    """Tell whether a name leads somewhere from a module on, as far as that can be seen without running it."""
    while parts and f"{module}.{parts[0]}" in modules():
        module, parts = f"{module}.{parts[0]}", parts[1:]
    if not parts:
        return True
    found = scope_of(module).get(parts[0]) if module in modules() else None
    if isinstance(found, ast.ImportFrom) and found.module in modules():
        return is_there(found.module, parts)
    if isinstance(found, ast.ClassDef) and len(parts) > 1 and not found.bases:
        return parts[1] in members_of(found)
    return found is not None


@functools.cache
def classes() -> dict[str, list[str]]:
    """Return the modules of the package that define a class, by its name."""
    found: dict[str, list[str]] = {}
    for module, path in modules().items():
        if module.startswith("zico."):
            for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
                found.setdefault(name, []).append(module)
    return found


def is_attribute(head: str, name: str) -> bool:
    """Tell whether a variable can be meant: it is called as a class of ours, which has an attribute of that name."""
    kind = head.title().replace("_", "")
    for module in classes().get(kind, ()):
        defined = scope_of(module)[kind]
        if isinstance(defined, ast.ClassDef) and name in members_of(defined):
            return True
    return False


# -- what is named ---------------------------------------------------------------------------------


def unknown_names(text: str) -> list[str]:
    """Return the dotted names in backticks that begin as a module of ours is called, and lead nowhere."""
    unknown = []
    for name in (match[2] for match in _DOTTED.finditer(text)):
        head, *parts = name.split(".")
        starts = heads().get(head, ())
        is_other = parts[-1] in SUFFIXES or _SCHEMA.fullmatch(name)
        if starts and not is_other and not any(is_there(start, parts) for start in starts):
            unknown += [] if is_attribute(head, parts[0]) else [name]
    return unknown


def unknown_files(text: str) -> list[str]:
    """Return the pages, and the files in folders of the repository, that are named and are not there."""
    folders = {name.partition("/")[0] for name in files() if "/" in name}
    return [
        name
        for name in _FILE.findall(text)
        if (name.partition("/")[0] in folders or ("/" not in name and name.endswith(".md")))
        and name not in endings() | WRITTEN
    ]


def test_dotted_names_lead_to_code() -> None:
    """A dotted name in backticks that begins as a module of ours is called names something in it."""
    assert [f"{name}: {each}" for name, text in texts() for each in unknown_names(text)] == []


def test_a_name_that_leads_nowhere_is_found() -> None:
    """Modules, members, classes' attributes and calls are looked up; names of libraries and schemas are not ours."""
    nothing = "nothing"
    known = "``zico.pool.regions`` `pool.regions.acquire` ``regions.acquire()`` `zico.adapters.torch_saving.Stepping`"
    others = "``torch.relu`` ``zico.report.v1`` ``zico.pth`` ``session.is_to_swap`` `regions.py` ``os.path.nothing``"
    assert unknown_names(f"{known} {others} regions.nothing ```regions.nothing```") == []
    lost = ["pool.nothing", "zico.pool.nothing", "regions.nothing", "zico.adapters.torch_saving.Stepping.nothing"]
    assert unknown_names(" ".join(f"``{name}``" for name in lost)) == lost
    assert unknown_names(f"`session.{nothing}(1, 2)`") == ["session.nothing"]


def test_named_files_are_there() -> None:
    """Code and pages name files and pages of the repository that exist."""
    found = texts("zico/", "adapters/", "kernels/", "lab/", "docs/", "benchmarks/", "README.md", "CONTRIBUTING.md")
    named = [(name, text) for name, text in found if not name.startswith(OTHERS)]
    assert [f"{name}: {each}" for name, text in named for each in unknown_files(text)] == []


def test_a_file_that_is_not_there_is_found() -> None:
    """The check sees a lost page and a lost file, and leaves users' scripts and what is written alone."""
    assert unknown_files("memory.md, docs/design/memory.md, `zico/pool/regions.py`, train.py, report.md, a/b.md") == []
    assert unknown_files("(methods.md 1.5), `docs/methods.md`, zico/pool/nothing.py") == [
        "methods.md",
        "docs/methods.md",
        "zico/pool/nothing.py",
    ]
