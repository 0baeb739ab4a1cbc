"""The architecture itself: who imports whom, how long things are, which invariants are tested."""

from __future__ import annotations

import ast
import configparser
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from size import functions, source_files, statements

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]

# Layer -> what it may import besides itself and the bottom layer. Arrows point downwards (docs/design/README.md).
BOTTOM = {"base"}
ALLOWED = {
    "": {"job.joining", "job.session", "job.status", "launch.client"},
    "__main__": {"cli"},
    "base": set(),
    "device": set(),
    "trace": set(),
    "kernels": set(),
    "pool": {"device", "trace"},
    "planning": {"trace"},
    "scheduler": {"trace", "planning", "pool.rules", "pool.layout"},
    "tiers": {"device"},
    "paging": {"tiers", "device", "pool"},
    "heap": {"tiers", "paging", "pool", "device", "trace", "planning"},
    "swap": {"tiers", "device", "kernels", "pool", "heap", "planning", "scheduler.state"},
    "broker": {"planning.saving.registry", "tiers", "paging", "pool", "scheduler", "device"},
    "job": {
        "broker.client",
        "broker.devices",
        "broker.protocol",
        "broker.saving",
        "broker.shares",
        "broker.starting",
        "device",
        "heap",
        "kernels",
        "paging",
        "pool",
        "swap",
        "tiers",
        "trace",
    },
    "adapters": {"job", "heap", "swap", "tiers", "planning", "trace", ""},
    "integrations": {"job.autoload", "job.joining", "job.session", "broker", "planning", "trace"},
    "report": {"broker.protocol"},
    "launch": {"report", "broker", "job.session", "trace"},
    "cli": {"launch", "report", "broker", "scheduler", "job.session", "trace", "planning", ""},
    # The laboratory sits on top of everything; nothing imports it.
    "lab": {"cli", "heap", "job", "paging", "planning", "pool", "report", "scheduler", "trace"},
}
RUNTIME = ("zico", "adapters", "kernels")
MAX_FUNCTION_LINES = 60
MAX_DEPTH = 19
"""Modules in a row, each of which imports the next one when it is loaded: import depth stays below 20."""


def nodes_of(path: Path, *words: str) -> Iterator[ast.AST]:
    """Yield all nodes of a file; none, if it has none of some words."""
    text = path.read_text()
    if not words or any(word in text for word in words):
        yield from ast.walk(ast.parse(text))


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere, absolute names."""
    found = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def layer_of(path: Path) -> str:
    """Return the layer that a source file belongs to."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("adapters", "kernels", "lab"):
        return parts[0]
    return "" if parts[1] == "__init__" else parts[1]


def is_allowed(layer: str, module: str) -> bool:
    """Tell whether a layer may import a module of ours."""
    inner = module.removeprefix("zico").removeprefix(".")
    top = inner.split(".")[0]
    if top == layer or top in BOTTOM or inner == "__version__":
        return True
    allowed = {name for name in ALLOWED[layer] if name}
    package = any(name.startswith(f"{inner}.") for name in allowed)  # its modules are looked at one by one
    return package or any(inner == name or inner.startswith(f"{name}.") for name in allowed)


def test_imports_point_downwards() -> None:
    """Every import of one of our modules goes to a layer below."""
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in source_files()
        for name in imports_of(path)
        if name.startswith("zico.") and not is_allowed(layer_of(path), name)
    }
    assert not wrong


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Return packages that import each other in a circle; none, if there is no circle."""
    left = dict(arrows)
    while ends := [name for name, below in left.items() if not below & set(left)]:
        for name in ends:
            del left[name]
    return sorted(left)


def test_packages_import_each_other_in_no_circle() -> None:
    """One order of all packages has each above what it imports; a circle would be seen."""
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["a", "b", "c"]
    arrows: dict[str, set[str]] = {}
    for path in source_files():
        layer = layer_of(path)
        below = {name.split(".")[1] for name in imports_of(path) if name.startswith("zico.")}
        arrows.setdefault(layer, set()).update(below & set(ALLOWED) - {layer, ""})
    assert not circle(arrows)


def loaded_by(path: Path) -> set[str]:
    """Return the modules that a file imports when it is loaded, absolute names."""
    found: set[str] = set()
    left: list[ast.stmt] = ast.parse(path.read_text()).body
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            left += node.orelse if isinstance(node, ast.If) else []
            left += [] if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else node.body
    return found


def longest_chain(arrows: dict[str, set[str]], start: str) -> list[str]:
    """Return the longest way along arrows from a module; a longer one would need a circle."""

    @functools.cache
    def chain(module: str) -> list[str]:
        return [module, *max((chain(below) for below in sorted(arrows[module])), key=len, default=[])]

    return chain(start)


def module_of(path: Path) -> str:
    """Return the name by which a source file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "zico" else ("zico", *parts))


def test_imports_are_not_deep() -> None:
    """No chain of imports is longer than the limit, and a longer one would be seen."""
    assert longest_chain({"a": {"b", "c"}, "b": {"c"}, "c": set()}, "a") == ["a", "b", "c"]
    modules = {module_of(path): loaded_by(path) for path in source_files()}
    arrows = {name: below & modules.keys() - {name} for name, below in modules.items()}
    longest = max((longest_chain(arrows, name) for name in arrows), key=len)
    assert 10 < len(longest) <= MAX_DEPTH, longest


def test_an_upward_import_would_be_seen() -> None:
    """The table refuses a scheduler that knows the broker, and a core that knows an adapter."""
    assert not is_allowed("scheduler", "zico.broker.server")
    assert not is_allowed("heap", "zico.adapters.torch")
    assert not is_allowed("trace", "zico.pool.regions")


def laboratory_names(path: Path) -> list[int]:
    """Return the lines of a file that name the laboratory in code."""
    imports = [0 for name in imports_of(path) if f"{name}.".startswith("zico.lab.")]
    texts = (node for node in nodes_of(path, "zico.lab") if isinstance(node, ast.Constant))
    return imports + [text.lineno for text in texts if re.fullmatch(r"zico\.lab[\w.]*", str(text.value))]


def test_one_module_of_the_runtime_names_the_laboratory(tmp_path: Path) -> None:
    """Jobs, brokers and their commands reach it by ``zico.base.laboratory`` alone; another way would be seen."""
    found = {str(path.relative_to(ROOT)) for path in source_files(RUNTIME) if laboratory_names(path)}
    assert found == {"zico/base/laboratory.py"}
    guilty = tmp_path / "guilty.py"
    for line in ("from zico.lab.saving import flow", "import zico.lab", "import_module('zico.lab.saving.flow')"):
        guilty.write_text(line)
        assert laboratory_names(guilty)


def test_only_zico_device_opens_the_device() -> None:
    """Only zico/device may import cuda."""
    users = [path for path in source_files() if any(name.split(".")[0] == "cuda" for name in imports_of(path))]
    assert all(path.is_relative_to(ROOT / "zico" / "device") for path in users), users


STARTS_INTERPRETERS = {
    "zico/base/interpreter.py",
    "zico/launch/doctor.py",  # as a job of the user's, whose path is what it looks at
}


def interpreters(path: Path) -> list[int]:
    """Return the lines of a file that name this process's interpreter, or have ``multiprocessing`` start one."""
    names, ways = {"executable", "_base_executable"}, {"spawn", "forkserver"}
    return [
        node.lineno
        for node in nodes_of(path, *names, *ways)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "sys" and {one.name for one in node.names} & names)
        or (isinstance(node, ast.Constant) and node.value in ways)
    ]


def test_one_module_starts_interpreters(tmp_path: Path) -> None:
    """Every Python process that Zico starts for itself gets its command from one module; another one would be seen."""
    found = {str(path.relative_to(ROOT)) for path in source_files() if interpreters(path)}
    assert found == STARTS_INTERPRETERS
    guilty = tmp_path / "guilty.py"
    for line in ("run([sys.executable, '-m', 'zico'])", "from sys import executable", "get_context('spawn')"):
        guilty.write_text(line)
        assert interpreters(guilty) == [1]


def waiting_loops(path: Path) -> set[str]:
    """Return the functions of a file that sleep in a loop of theirs."""
    found = set()
    for function in nodes_of(path):
        if isinstance(function, ast.FunctionDef):
            loops = [node for node in ast.walk(function) if isinstance(node, ast.While | ast.For)]
            calls = {ast.unparse(node.func) for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Call)}
            if any("sleep" in call or call == "futex_wait" for call in calls):
                found.add(f"{path.relative_to(ROOT)}:{function.name}")
    return found


def test_a_jobs_threads_wait_in_one_loop() -> None:
    """Waits for memory and at boundaries are one loop; marks for others, a fork and a move off a GPU have their own."""
    loops = {one for path in source_files(("zico/pool", "zico/heap")) for one in waiting_loops(path)}
    own = {"cuda/on_stream.py:progress_thread", "cuda/moving_out.py:_hold_still", "paged.py:hold"}
    assert loops == {"zico/pool/waits.py:wait", *(f"zico/heap/{one}" for one in own)}


def test_only_one_module_makes_consoles() -> None:
    """Everywhere else a name with brackets would be markup to rich."""
    makers = {"rich.console.Console", "rich.print", "rich.markup.render"}
    users = {path for path in source_files() if imports_of(path) & makers}
    assert users == {ROOT / "zico" / "report" / "console.py"}


WRITES_STDERR = {
    "zico/base/saying.py",
    "zico/job/inject/sitecustomize.py",  # also where Zico cannot be imported
}
OF_A_USER = (
    *("base", "device", "heap", "integrations", "job", "paging", "pool", "planning", "swap", "tiers", "trace"),
)


def test_one_function_writes_to_a_users_stderr() -> None:
    """Whatever runs in a user's process writes lines by the one function that never raises."""
    folders = (*(f"zico/{name}" for name in OF_A_USER), "adapters", "kernels")
    found = {
        str(path.relative_to(ROOT))
        for path in source_files(folders)
        for node in nodes_of(path, "stderr", "print")
        if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in {"sys.stderr", "print"}
    }
    assert found == WRITES_STDERR


def test_no_adapter_imports_another() -> None:
    """Adapters know one framework each and none of the others; ``torch_ops.py`` is a part of ``torch.py``.

    XLA is a part of two frameworks, and ``xla.py`` knows neither.
    """
    for path in (ROOT / "adapters").glob("*.py"):
        own = (f"zico.adapters.{path.stem.split('_')[0]}_", "zico.adapters.xla")
        found = {name for name in imports_of(path) if name.startswith("zico.adapters.")}
        assert not {name for name in found if not name.startswith(own)}, path


@pytest.mark.parametrize("name", ["connection", "messages"])
def test_the_protocol_has_no_sockets(name: str) -> None:
    """Messages, framing and state machine take and give bytes, and know no operating system."""
    banned = {"socket", "os", "threading", "time", "select", "selectors", "asyncio"}
    assert not banned & {
        module.split(".")[0] for module in imports_of(ROOT / "zico" / "broker" / "protocol" / f"{name}.py")
    }


def test_every_package_is_installed() -> None:
    """Each folder with an ``__init__.py`` is among the packages of setup.cfg, under its name within zico."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = {path.parent.relative_to(ROOT).parts for path in source_files() if path.name == "__init__.py"}
    names = {".".join(parts if parts[0] == "zico" else ("zico", *parts)) for parts in folders}
    assert names == set(setup["options"]["packages"].split())


def test_functions_are_short() -> None:
    """No function is longer than the limit, docstring not counted."""
    long = {
        f"{path.relative_to(ROOT)}:{name}": lines
        for path in source_files((*("zico", "adapters", "kernels", "lab"), "benchmarks", "tests"))
        for name, lines in functions(path)
        if lines > MAX_FUNCTION_LINES
    }
    assert not long


def test_importing_zico_loads_nothing_heavy() -> None:
    """`import zico` in a fresh process loads no CUDA, no Numba, no NumPy and no framework."""
    code = "import sys, zico; print(*sorted(name.split('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"cuda", "numba", "llvmlite", "numpy", "torch", "tensorflow", "keras"} & set(done.stdout.split())


def test_zico_run_starts_without_numpy_and_numba() -> None:
    """The command line loads what a command needs: a run leaves arrays and compiled code to the broker and its jobs."""
    code = "import sys, zico.cli; zico.cli.command.get_command(None, 'run'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "zico.launch.supervisor" in done.stdout.split()
    assert not {"numba", "llvmlite", "numpy", "matplotlib"} & set(done.stdout.split())


def numbered_invariants() -> set[int]:
    """Return the numbers in the list of invariants."""
    text = (ROOT / "docs" / "design" / "invariants.md").read_text()
    return {int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)}


def invariants_in_tests() -> set[int]:
    """Return the numbers that docstrings of tests name."""
    numbers = set()
    for path in source_files(("tests",)):
        for sentence in re.findall(r'"""Invariants? ([^:]+):', path.read_text()):
            numbers |= {int(number) for number in re.findall(r"\d+", sentence)}
    return numbers


def test_invariants_and_tests_name_each_other() -> None:
    """Every numbered invariant has a test, and every number that a test names exists."""
    assert invariants_in_tests() == numbered_invariants()


def test_every_test_says_what_is_true() -> None:
    """Each test function has a docstring."""
    silent = [
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in source_files(("tests",))
        for node in statements(path)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert not silent


def sleepers(path: Path) -> list[int]:
    """Return the lines of a file that call a function named sleep."""
    return [
        node.lineno
        for node in nodes_of(path, "sleep")
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "sleep"
    ]


def test_nobody_sleeps_to_synchronise(tmp_path: Path) -> None:
    """No test calls a sleep, and one that did would be seen."""
    assert not {path: lines for path in source_files(("tests",)) if (lines := sleepers(path))}
    guilty = tmp_path / "guilty.py"
    guilty.write_text("import time\ntime.sleep(1)\n")
    assert sleepers(guilty) == [2]


def test_documents_name_no_machine() -> None:
    """No document, source or result names a path of the machine it was written on."""
    pattern = re.compile(r"/(?:work|root|home)/")
    suffixes = {".py", ".md", ".cfg", ".toml", ".json", ".txt"}
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    paths = [ROOT / name for name in files.stdout.splitlines()]
    named = [path for path in paths if path.suffix in suffixes and path != Path(__file__) and path.exists()]
    assert not [path for path in named if pattern.search(path.read_text())]
