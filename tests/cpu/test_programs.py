"""Programs: what is lowered, linked, kept and loaded; and what Numba does where its internals are not as expected."""

from __future__ import annotations

import enum
import fcntl
import importlib
import itertools
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from zico.base import programs
from zico.base.programs import Program, program_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

DEADLINE_S = 120.0

SOURCE = """
from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray
from zico.base.compiled import array_at, callback, compiled, entry, inlined

PAIR = np.dtype([("a", "i8"), ("b", "f8")])


class Row(NamedTuple):
    numbers: NDArray[np.int64]
    factor: int


@inlined
def half(number):
    return number // 2


@compiled
def both(number):
    return half(number) + 1


@entry(int)
def rounded(number):
    return 2 * both(number)


@entry(PAIR, [np.int64], float, bool)
def weighed(pair, numbers, weight, up):
    pair.a = numbers.sum()
    return pair.a * weight + pair.b if up else 0.0


@entry(Row)
def scaled(row):
    return row.numbers * row.factor, row.factor


@callback(types.int32(types.int32))
def negated(number):
    return -number
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an empty cache."""
    (tmp_path / "cache").mkdir(0o700)
    monkeypatch.setenv("ZICO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "code"


_numbers = itertools.count()


@pytest.fixture
def made(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:  # noqa: ARG001
    """Give a maker of modules that were never imported before, whose programs are kept in an empty cache."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(source: str) -> ModuleType:
        name = f"made_{os.getpid()}_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return importlib.import_module(name)

    return make


def kept(cache: Path) -> list[str]:
    """Return the names of the files of machine code."""
    return sorted(file.name.rpartition("-")[0] for file in cache.glob("*.o"))


def printed(script: str, path: Path) -> str:
    """Return what another process prints that finds modules there."""
    command, environ = [sys.executable, "-c", textwrap.dedent(script)], os.environ | {"PYTHONPATH": str(path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_this_version_of_numba_has_all_that_is_used() -> None:
    """Where this fails, Zico works but compiles for minutes: see which name of Numba's has moved, and follow it."""
    assert programs.fault() == ""


def test_entries_of_a_module_are_one_file(made: Callable[[str], ModuleType], cache: Path) -> None:
    """Numbers, records, arrays and named tuples go in; numbers and arrays come out; C calls what has an address."""
    module: Any = made(SOURCE)
    assert not kept(cache)
    assert module.rounded(9) == 10
    pair, up = np.zeros(1, module.PAIR), True
    pair["b"] = 0.5
    assert module.weighed(pair[0], np.arange(4), 1.5, up) == 9.5
    assert pair["a"][0] == 6
    numbers, factor = module.scaled(module.Row(np.arange(3), 7))
    assert (numbers.tolist(), factor) == ([0, 7, 14], 7)
    assert module.negated.ctypes(3) == -3
    assert module.negated(3) == -3
    assert kept(cache) == [module.__name__]


def test_other_arguments_are_a_program_of_their_own(made: Callable[[str], ModuleType], cache: Path) -> None:
    """A function that is no entry is compiled for the types with which Python calls it, and kept."""
    module: Any = made(SOURCE)
    assert module.both(5) == 3
    assert module.both(5.0) == 3.0
    assert [name.partition("-")[0] for name in kept(cache)] == [module.__name__, *[f"{module.__name__}.both"] * 2]


class Level(enum.IntEnum):
    """A number with a name."""

    HIGH = 9


@pytest.mark.parametrize("first", [Level.HIGH, np.int32(9), 9])
def test_an_entry_is_compiled_for_the_types_that_it_names_alone(
    made: Callable[[str], ModuleType], cache: Path, first: int
) -> None:
    """Other numbers are converted from the first call on, what cannot be is refused, and nothing more is kept."""
    module: Any = made(SOURCE)
    assert module.rounded(first) == 10
    assert [module.rounded(number) for number in (Level.HIGH, np.uint8(9), True)] == [10, 10, 2]
    with pytest.raises(TypeError, match="No matching definition"):
        module.rounded("9")
    assert kept(cache) == [module.__name__]


def test_a_module_without_entries_has_no_file(made: Callable[[str], ModuleType], cache: Path) -> None:
    """Only what Python calls of it is kept."""
    module: Any = made(
        "from zico.base.compiled import compiled\n\n@compiled\ndef twice(number):\n    return 2 * number\n"
    )
    assert module.twice(4) == 8
    assert [name.partition("-")[0] for name in kept(cache)] == [f"{module.__name__}.twice"]


def test_another_process_loads_and_compiles_nothing(made: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """It needs neither Numba's compiler, nor what prepares it, nor the optimizer: all are gone there."""
    module: Any = made(SOURCE)
    module.rounded(1)
    module.both(1)
    script = f"""
        import numpy as np
        from zico.base import programs
        programs.Program._compile = programs.Function.lower = programs._Lowering = None
        import {module.__name__} as module
        numbers, _ = module.scaled(module.Row(np.arange(2), 3))
        print(module.rounded(4), module.both(4), numbers.tolist(), module.negated.ctypes(1))
    """
    assert printed(script, tmp_path) == "6 3 [0, 3] -1\n"


def test_a_file_is_for_its_sources_alone(made: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another source, another version of the compilers, or another processor is another file."""
    file = program_of(made(SOURCE).__name__).file
    assert program_of(made(SOURCE + "\n# more\n").__name__).file.name.rpartition("-")[2] != file.name.rpartition("-")[2]
    name = file.name.rpartition("-")[0]
    assert program_of(name).file == file
    monkeypatch.setattr(programs, "_toolchain", lambda: b"another")
    assert program_of(name).file != file


def test_a_file_serves_other_directories_and_machines(
    made: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same source elsewhere, on another processor and another release of this Python, compiles nothing."""
    module: Any = made(SOURCE)
    module.rounded(1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"{module.__name__}.py").rename(elsewhere / f"{module.__name__}.py")
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")
    script = f"""
        import sys
        from zico.base import programs
        sys.version_info = (*sys.version_info[:2], 99, "final", 0)
        programs.Program._compile = programs.Function.lower = None
        import {module.__name__} as module
        print(module.rounded(4))
    """
    assert printed(script, elsewhere) == "6\n"


@pytest.mark.parametrize(
    ("lacks", "level"), [("none", "x86-64-v3"), ("avx2", "x86-64-v2"), ("bmi", "x86-64-v2"), ("sse3", "x86-64")]
)
def test_a_level_is_what_a_processor_has(lacks: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One missing feature leaves the level below, whatever else is there."""
    features = {name: name != lacks for names in programs.LEVELS.values() for name in names}
    monkeypatch.setattr(programs.llvm, "get_process_triple", lambda: "x86_64-unknown-linux-gnu")
    monkeypatch.setattr(programs.llvm, "get_host_cpu_features", lambda: features)
    assert programs.level() == level


def test_whoever_needs_the_same_waits_for_the_first(made: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """Processes that want a program at once compile it once; each gets it."""
    module: Any = made(SOURCE)
    script = f"""
        from zico.base import programs
        plain = programs.Program._compile
        def noisy(self):
            print("compiled")
            return plain(self)
        programs.Program._compile = noisy
        import {module.__name__} as module
        print(module.rounded(8))
    """

    with ThreadPoolExecutor(3) as threads:
        said = list(threads.map(printed, [script] * 3, [tmp_path] * 3))
    assert sorted("".join(said).split()) == ["10", "10", "10", "compiled"]


def test_a_process_that_is_stopped_while_it_compiles_holds_nobody_up(
    made: Callable[[str], ModuleType], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is waited for so long, and not longer."""
    module: Any = made(SOURCE)
    monkeypatch.setattr(programs, "PATIENCE_S", 0.2)
    file = program_of(module.__name__).file
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert module.rounded(9) == 10
    assert kept(cache) == [module.__name__]


def test_what_a_file_cannot_hold_is_refused(made: Callable[[str], ModuleType]) -> None:
    """A record that would be returned to Python is one sentence, and so is a function that captures variables."""
    module: Any = made(SOURCE + "\n\n@compiled\ndef first(pairs):\n    return pairs[0]\n")
    with pytest.raises(TypeError, match="return numbers, or arrays of numbers"):
        module.first(np.zeros(1, module.PAIR))
    with pytest.raises(TypeError, match="captures step"):
        made(
            """
            from zico.base.compiled import compiled

            def maker(step):
                @compiled
                def made(number):
                    return number + step

            maker(1)
            """
        )


def test_numba_alone_does_as_well(made: Callable[[str], ModuleType], cache: Path, tmp_path: Path) -> None:
    """On a version of Numba whose internals have moved its own decorators take over, and with its cache."""
    made(SOURCE)
    name = next(tmp_path.glob("made_*.py")).stem
    script = f"""
        import numpy as np
        import numba.core.lowering
        del numba._dynfunc.Environment
        from zico.base import programs
        assert "Environment" in programs.fault()
        programs.program_of("{name}").load()
        assert not programs.program_of("{name}").is_kept
        import {name} as module
        numbers, _ = module.scaled(module.Row(np.arange(2), 3))
        print(module.rounded(4), module.both(4), numbers.tolist(), module.negated.ctypes(1))
    """
    assert printed(script, tmp_path) == "6 3 [0, 3] -1\n"
    assert not kept(cache)
    assert list(cache.rglob("*.nbi"))


def test_numba_alone_keeps_what_waits(made: Callable[[str], ModuleType], cache: Path, tmp_path: Path) -> None:
    """Numba keeps a wait although its loop is given functions: the loop is a part of what calls it."""
    made("""
        from zico.base.compiled import compiled
        from zico.pool import waits
        from zico.pool.results import ADMITTED

        @compiled
        def begin(pool, what):
            return what

        @compiled
        def look(pool, what, look):
            return ADMITTED, False

        @compiled
        def sleep(pool, word):
            return False

        @compiled
        def waited(pool):
            return waits.wait(pool, pool, 0, begin, look, sleep)
        """)
    name = next(tmp_path.glob("made_*.py")).stem
    script = f"""
        import os
        os.environ["ZICO_COMPILER"] = "numba"
        import {name} as module
        from zico.base.programs import argument
        from zico.pool.layout import MEMBER
        module.waited.compile((argument(MEMBER),))
    """
    assert printed(script, tmp_path) == ""
    assert list(cache.rglob("*waited*.nbi"))


def test_programs_of_several_modules_have_all_their_entries() -> None:
    """Each module that a group names exists and has entries; a forgotten one would be compiled for nobody."""
    for name, modules in programs.GROUPS.items():
        entries = {entry.function.py_func.__module__ for entry in Program(name, modules)._entries()}
        assert entries == set(modules), name


IN_ONE_PIECE = """
import ctypes
import mmap

libc, unwinder = ctypes.CDLL(None), ctypes.CDLL("libgcc_s.so.1")
libc.mmap.restype = unwinder._Unwind_Find_FDE.restype = ctypes.c_uint64
KIB, STEP = 1 << 10, 1 << 26
gaps = (8, 16, 32, 48, 64, 96, 128, 192)
reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
block = libc.mmap(None, ctypes.c_size_t(STEP * len(gaps)), 0, reserved, -1, ctypes.c_long(0))
for i, gap in enumerate(reversed(gaps), 1):
    assert libc.munmap(ctypes.c_void_p(block + i * STEP - 2 * gap * KIB), ctypes.c_size_t(gap * KIB)) == 0

from zico.heap.cuda import hooks

bases = (ctypes.c_uint64 * 3)()
entry = unwinder._Unwind_Find_FDE(ctypes.c_void_p(hooks.allocate.address + 1), bases)
begins = []
entry -= ctypes.c_uint32.from_address(entry + 4).value - 4  # its CIE, which is the first
while length := ctypes.c_uint32.from_address(entry).value:
    if ctypes.c_uint32.from_address(entry + 4).value:
        begins.append(entry + 8 + ctypes.c_int64.from_address(entry + 8).value)
    entry += 4 + length
print(len(begins), max(begins) - min(begins))
"""


def test_the_code_of_a_program_lies_in_one_piece() -> None:
    """However memory is cut up, no other program comes between two functions of one: exceptions pass through them."""
    command = [sys.executable, "-c", IN_ONE_PIECE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    functions, span_bytes = map(int, done.stdout.split())
    assert functions > 20
    assert span_bytes < 1 << 20
