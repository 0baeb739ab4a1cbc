"""Programs: compiled functions that become machine code together, whole, and are kept in one file.

How it works
    A function that compiled code calls is lowered to LLVM's intermediate representation, once, and
    nothing more. A program links what its entries reach, keeps only the entries visible, optimises
    once, and emits one object file. A later process loads that file and needs neither type
    inference nor LLVM's optimiser.

Guarantees
    * The name of a program's file holds a digest of all sources that the program is made of. The
      digest is also of the versions of Numba, LLVM and Python, and of the processor's level. A file
      of another name is never loaded.
    * Machine code is for a level that many processors have (``LEVELS``), not for the one that is
      here. So a file that one machine made serves others, whatever the directory.
    * A file appears whole. Processes that need a program at once wait for the one that compiles it,
      for a limited time.
    * An entry is never compiled for other types than it names, since the broker's loop would stand
      still meanwhile. Other numbers that Python gives are converted; anything else is a TypeError.

All of Numba that is not public stands here. ``fault`` tells whether this version of Numba has it;
where it has not, ``zico.base.compiled`` uses Numba's own, slower, ways.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import importlib
import inspect
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import llvmlite
import numba
import numpy as np
from llvmlite import binding as llvm
from numba import types
from numba.np import numpy_support

from zico.base.paths import code_directory
from zico.base.sources import closure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Types = tuple[Any, ...]  # of Numba

GROUPS = {
    "heap": (
        "zico.heap.allocator",
        "zico.heap.hooks",
        "zico.heap.fork",
        "zico.heap.history",
        "zico.heap.plan_thread",
        "zico.heap.state_offload",
        "zico.heap.backing",
        "zico.heap.waiting",
    ),
    "pool": (
        "zico.pool.regions",
        "zico.pool.deaths",
        "zico.pool.mutex",
        "zico.pool.shown",
        "zico.pool.living",
        "zico.pool.boundaries",
        "zico.pool.contents",
    ),
    "scheduler": (
        "zico.scheduler.cycles",
        "zico.scheduler.engine",
        "zico.scheduler.plan",
        "zico.scheduler.policies.claims",
        "zico.scheduler.policies.none",
        "zico.scheduler.policies.serial",
        "zico.scheduler.policies.shift",
        "zico.scheduler.best_schedule",
    ),
    "cuda_hooks": (
        "zico.heap.cuda.hooks",
        "zico.heap.cuda.captures",
        "zico.heap.cuda.on_stream",
        "zico.heap.cuda.python_hooks",
    ),
    "cuda": (
        "zico.job.device_timeline",
        "zico.job.context_aside",
        "zico.heap.cuda.backing",
        "zico.heap.cuda.managed",
        "zico.heap.cuda.imports",
        "zico.heap.cuda.moving_out",
        "zico.job.lookup",
    ),
}
"""Modules whose entries become one program. Every other module's entries are a program of their own."""

PATIENCE_S = 300.0
"""Longest wait for another process that compiles the same program: it may have been stopped."""
_POLL_S = 0.05

_LEAN_PASSES = (
    *("TranslateByteCode", "FixupArgs", "IRProcessing", "GenericRewrites", "ReconstructSSA"),
    *("NopythonTypeInference", "PreLowerStripPhis", "IRLegalization", "NativeLowering", "NoPythonBackend"),
)
"""Numba's passes for code without closures, generators, with blocks, parallel loops and expressions of whole arrays.

Left out, too, is what prunes branches by constants before types are inferred: LLVM does so afterwards.
"""


def fault() -> str:
    """Return why Numba is to compile alone: what is missing, or ``ZICO_COMPILER=numba``; an empty text: it is not."""
    return _FAULT or ("ZICO_COMPILER is numba" if os.environ.get("ZICO_COMPILER") == "numba" else "")


# -- what is lowered -------------------------------------------------------------------------------

try:
    from numba._dynfunc import Environment, make_function
    from numba.core import sigutils, typed_passes, typing, untyped_passes
    from numba.core.cgutils import normalize_ir_text
    from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
    from numba.core.compiler import CompilerBase
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined]
    from numba.core.registry import CPUDispatcher, cpu_target
    from numba.core.runtime import _nrt_python
    from numba.core.targetconfig import ConfigStack

    _PASSES = tuple(getattr(untyped_passes, name, None) or getattr(typed_passes, name) for name in _LEAN_PASSES)
    _FAULT = ""
except (ImportError, AttributeError) as error:  # pragma: no cover - on another version of Numba
    _FAULT = str(error)
    JITCodeLibrary = JITCPUCodegen = CompilerBase = CPUDispatcher = _FunctionCompiler = object


class Library(JITCodeLibrary):  # type: ignore[misc]
    """The intermediate representation of some functions, and which libraries they call."""

    def __init__(self, codegen: Any, name: str) -> None:  # noqa: ANN401 - Numba's
        super().__init__(codegen, name)
        self._texts: list[str] = []

    def add_ir_module(self, ir_module: Any) -> None:  # noqa: ANN401 - llvmlite's
        """Add functions; they are parsed where a program is linked."""
        self._texts.append(normalize_ir_text(str(ir_module)))

    def add_linking_library(self, library: Any) -> None:  # noqa: ANN401 - Numba's
        """Note a library that functions of this one call."""
        self._linking_libraries.append(library)

    def link(self) -> Any:  # noqa: ANN401 - llvmlite's
        """Return a module with everything that the functions reach."""
        module = llvm.parse_assembly(str(self._codegen._create_empty_module(self.name)))
        seen: dict[Any, None] = {}
        todo = [self]
        while todo:
            library = todo.pop()
            if library in seen:
                continue
            seen[library] = None
            if isinstance(library, Library):
                for text in library._texts:
                    module.link_in(llvm.parse_assembly(text))
                todo += library._linking_libraries
        for library in seen:  # last: of Numba's own, only what is referred to by then is linked
            if not isinstance(library, Library):
                module.link_in(library._get_module_for_linking(), preserve=True)
        return module

    def finalize(self) -> None:
        """Become machine code alone, for a caller that Numba itself compiles."""
        self._raise_if_finalized()
        own = {function.name for text in self._texts for function in llvm.parse_assembly(text).functions}
        self._final_module = self.link()
        _optimise(self._codegen, self._final_module, own)
        self._finalize_final_module()


def _optimise(codegen: Any, module: Any, kept: Iterable[str]) -> None:  # noqa: ANN401 - Numba's and llvmlite's
    """Optimise a module of which only some names are to be seen; what they do not reach is dropped.

    The order is Numba's: functions alone, a cheap pass over all, then the whole set. Without the
    first, a turnover of a region took 7 % longer.
    """
    _hide(module.functions, kept)
    _hide(module.global_variables, kept)
    module.data_layout = codegen._data_layout
    for function in module.functions:
        manager, builder = codegen._function_pass_manager()
        manager.run(function, builder)
    for options in ({"loop_vectorize": False, "slp_vectorize": False, "opt": 0, "cost": "cheap"}, {}):
        manager, builder = codegen._module_pass_manager(**options)
        manager.run(module, builder)
    module.verify()


def _hide(values: Iterable[Any], kept: Iterable[str]) -> None:
    for value in values:
        if not value.is_declaration and value.name not in kept and not value.name.startswith("llvm."):
            value.linkage = "internal"


class _Pipeline(CompilerBase):  # type: ignore[misc]
    """Numba's passes, less what Zico's functions have no use for, and without its bookkeeping."""

    def _compile_core(self) -> Any:  # noqa: ANN401 - Numba's
        state = self.state
        state.library = Library(state.targetctx.codegen(), state.func_id.func_qualname)
        with ConfigStack().enter(state.flags.copy()):
            for kind in _PASSES:
                one = kind()
                one.analysis = collections.defaultdict(lambda: None)
                one.run_initialization(state)
                one.run_pass(state)
                one.run_finalizer(state)
        state.pipeline = None  # else state and pipeline keep each other
        return state.cr


class _Lowering(_FunctionCompiler):  # type: ignore[misc]
    def _customize_flags(self, flags: Any) -> Any:  # noqa: ANN401 - Numba's
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
        return flags


class Function(CPUDispatcher):  # type: ignore[misc]
    """A function that compiled code calls, and Python through a program."""

    def __init__(self, function: Callable[..., Any], entries: tuple[Types, ...] = (), *, in_line: bool = False) -> None:
        """Prepare to compile.

        Args:
            function: What Python would run.
            entries: The types of arguments with which Python calls it as part of its module's
                program.
            in_line: Its callers take it in.
        """
        options = {"nopython": True, "nogil": True, "boundscheck": None, "error_model": "numpy", "forceinline": in_line}
        if function.__code__.co_freevars:
            captured = ", ".join(function.__code__.co_freevars)
            message = f"{function.__qualname__} captures {captured}, which the name of its file would not tell"
            raise TypeError(message)
        super().__init__(function, {}, options, _Pipeline)
        self.__wrapped__ = function
        self._options = options
        self._lowered: dict[Types, Any] = {}
        self._has_entries = bool(entries)
        if entries:
            _register(function.__module__, *(_Entry(self, one) for one in entries))

    @functools.cached_property
    def _lowering(self) -> Any:  # noqa: ANN401 - Numba's; a process that loads kept programs lowers nothing
        return _Lowering(self.py_func, self.targetdescr, self._options, {}, _Pipeline)

    def lower(self, arguments: Types, returned: Any = None) -> Any:  # noqa: ANN401 - Numba's
        """Return what Numba makes of the function for some types of arguments, without machine code."""
        if arguments not in self._lowered:
            result = self._lowering.compile(arguments, returned)
            key = _Key()
            self.targetctx.insert_user_function(key, result.fndesc, [result.library])
            self._lowered[arguments] = result._replace(entry_point=key)
        return self._lowered[arguments]

    def get_call_template(self, args: Any, kws: Any) -> Any:  # noqa: ANN401 - Numba's
        """Tell a caller that is being compiled what this returns."""
        signature, args = self._compiler.fold_argument_types(args, kws)
        lowered = self.lower(tuple(args))
        name = self.py_func.__name__  # of these types alone: no other signature is tried, however near
        template = typing.make_concrete_template(name, key=name, signatures=[lowered.signature])
        return template, signature, args, {}

    def get_overload(self, sig: Any) -> Any:  # noqa: ANN401 - Numba's
        """Return what stands for the function in code that is being compiled."""
        return self._lowered[tuple(sigutils.normalize_signature(sig)[0])].entry_point

    def compile(self, sig: Any) -> Any:  # noqa: ANN401 - Numba's
        """Return what Python calls for some types of arguments; loads or compiles the program that it is in."""
        arguments = tuple(sigutils.normalize_signature(sig)[0])
        with global_compiler_lock:
            if arguments not in self.overloads:
                program_of(self.py_func.__module__).load()
            if arguments not in self.overloads:
                if self._has_entries:
                    return self  # once more: now an entry is there, and Numba converts for it
                _stray(self, arguments).load()
            return self.overloads[arguments].entry_point

    def accept(self, arguments: Types, callable_: Callable[..., Any]) -> None:
        """Let calls from Python with some types of arguments go to machine code."""
        self._insert([one._code for one in arguments], callable_, objectmode=False)
        self.overloads[arguments] = _Overload(callable_, types.none(*arguments))
        if self._has_entries:
            self.disable_compile()


class _Key:
    """What stands for a lowered function in the tables of Numba's target."""


@dataclasses.dataclass(frozen=True)
class _Overload:
    entry_point: Callable[..., Any]
    signature: Any
    objectmode: bool = False


class Callback:
    """A function with an address that C calls; Python that calls it runs its source."""

    def __init__(self, function: Callable[..., Any], signature: Any) -> None:  # noqa: ANN401 - Numba's
        functools.update_wrapper(self, function)
        self._function = Function(function)
        self._signature = signature
        self._address = 0
        self._engine: Any = None  # keeps the machine code for as long as somebody keeps this
        _register(function.__module__, _CEntry(self))

    @property
    def address(self) -> int:
        """Return the address; loads or compiles the program."""
        if not self._address:
            program_of(self.__module__).load()
        return self._address

    @property
    def ctypes(self) -> Any:  # noqa: ANN401 - a ctypes function
        """Return the machine code as ctypes calls it."""
        from numba.core.typing.ctypes_utils import to_ctypes

        kinds = [to_ctypes(one) for one in (self._signature.return_type, *self._signature.args)]
        return ctypes.CFUNCTYPE(*kinds)(self.address)

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 - as the function
        """Run the source."""
        return self.__wrapped__(*args)  # type: ignore[attr-defined]


# -- entries ---------------------------------------------------------------------------------------


class _Entry:
    """A function that Python calls with some types of arguments."""

    def __init__(self, function: Function, arguments: Types) -> None:
        self.function, self.arguments = function, arguments
        self.constants: list[str] = []

    @property
    def symbol(self) -> str:
        """Return its name in the machine code, which no other entry of any program has."""
        kinds = hashlib.sha256(repr([str(one) for one in self.arguments]).encode()).hexdigest()[:16]
        return f"{_full_name(self.function)}-{kinds}"

    def wrap(self, library: Library) -> dict[str, str]:
        """Put into a library how Python calls it; returns the names that it has there and the ones it is to get."""
        result = self.function.lower(self.arguments)
        library.add_linking_library(result.library)
        context, description = result.target_context, result.fndesc
        context.create_cpython_wrapper(library, description, result.environment, result.call_helper, release_gil=True)
        self.constants = [_name_of(one) for one in result.environment.consts]
        symbol = self.symbol
        return {description.llvm_cpython_wrapper_name: symbol, description.env_name: f"{symbol}.environment"}

    def take(self, engine: Any, constants: list[str]) -> None:  # noqa: ANN401 - llvmlite's
        """Let Python call what has been loaded."""
        function = self.function.py_func
        environment = Environment(function.__globals__)
        environment.consts.extend(np.dtype(one) for one in constants)
        symbol = self.symbol
        ctypes.c_void_p.from_address(engine.get_global_value_address(f"{symbol}.environment")).value = id(environment)
        module, address = sys.modules[function.__module__], engine.get_function_address(symbol)
        made = make_function(module, function.__name__, "", address, environment, (environment, engine))
        self.function.accept(self.arguments, made)


class _CEntry:
    """A function that C calls."""

    def __init__(self, callback: Callback) -> None:
        self.callback, self.function = callback, callback._function
        self.constants: list[str] = []

    @property
    def symbol(self) -> str:
        """Return its name in the machine code, which no other entry of any program has."""
        return _full_name(self.function)

    def wrap(self, library: Library) -> dict[str, str]:
        """Put into a library how C calls it."""
        signature = self.callback._signature
        result = self.function.lower(tuple(signature.args), signature.return_type)
        library.add_linking_library(result.library)
        arguments = (library, result.fndesc, result.environment, result.call_helper)
        result.target_context.create_cfunc_wrapper(*arguments)
        return {result.fndesc.llvm_cfunc_wrapper_name: self.symbol}

    def take(self, engine: Any, _constants: list[str]) -> None:  # noqa: ANN401 - llvmlite's
        """Give the callback its address."""
        self.callback._engine = engine
        self.callback._address = engine.get_function_address(self.symbol)


def _full_name(function: Function) -> str:
    return f"{function.py_func.__module__}.{function.py_func.__qualname__}"


def _name_of(constant: object) -> str:
    """Return the name of a type of array elements: what Numba refers to where a function returns an array."""
    if isinstance(constant, np.dtype) and constant.names is None:
        return constant.str
    message = f"a compiled function cannot give Python {constant!r}: return numbers, or arrays of numbers"
    raise TypeError(message)


_registered: dict[str, list[Any]] = collections.defaultdict(list)


def _register(module: str, *entries: Any) -> None:  # noqa: ANN401 - either kind of entry
    _registered[module] += entries


@functools.cache
def _element(dtype: np.dtype[Any]) -> Any:  # noqa: ANN401 - a Numba type; of a heap's record it takes Numba 8 ms to make
    return numpy_support.from_dtype(dtype)


def argument(kind: Any) -> Any:  # noqa: ANN401 - a Numba type
    """Return the type of an argument; see ``zico.base.compiled.entry``."""
    if isinstance(kind, list):
        return types.Array(_element(np.dtype(kind[0])), 1, "C")
    if isinstance(kind, np.dtype):
        return _element(kind)
    if isinstance(kind, type) and issubclass(kind, tuple):
        return types.BaseTuple.from_types([argument(one) for one in get_type_hints(kind).values()], kind)
    alias = getattr(get_origin(kind), "__value__", None)  # NDArray of NumPy 2.5 is an alias with parameters
    if alias is not None:
        return argument(alias[get_args(kind)])
    if get_origin(kind) is np.ndarray:
        return argument([get_args(get_args(kind)[1])[0]])
    return {int: types.int64, float: types.float64, bool: types.boolean}.get(kind, kind)


# -- programs --------------------------------------------------------------------------------------


@functools.cache
def program(name: str) -> Program:
    """Return a program of ``GROUPS``, or the one of a module."""
    return Program(name, GROUPS.get(name, (name,)))


def program_of(module: str) -> Program:
    """Return the program that a module's entries are part of."""
    return program(next((name for name, modules in GROUPS.items() if module in modules), module))


class Program:
    """Entries that become machine code together."""

    def __init__(self, name: str, modules: tuple[str, ...], entries: tuple[_Entry, ...] = ()) -> None:
        """Prepare; ``entries``: instead of all that the modules have."""
        self.name = name
        self._modules = modules
        self._given = entries
        self._loaded = False

    @property
    def file(self) -> Path:
        """Return where the machine code is kept."""
        digest = hashlib.sha256(_toolchain())
        # By name and content: a checkout and an installed package have the same files in other places.
        sources = {source for module in self._modules for source in closure(_source(module))}
        for name, content in sorted({(source.name, _digest(source)) for source in sources}):
            digest.update(f"{name}\n".encode() + content)
        return code_directory() / f"{self.name}-{digest.hexdigest()[:16]}.o"

    @property
    def is_kept(self) -> bool:
        """Tell whether the machine code is there, so that nothing needs to be compiled."""
        return not fault() and self.file.exists()

    def make(self) -> None:
        """Put the machine code on disk; waits for another process that compiles it."""
        if fault():
            self._entries()  # Numba's own decorators compile when they decorate, or at the first call
            return
        with global_compiler_lock:
            self._read()

    def load(self) -> None:
        """Let callbacks have addresses and Python's calls arrive; compiles first where no file is there.

        Waits for another process that compiles it.
        """
        if fault():
            self._entries()
            return
        with global_compiler_lock:
            if self._loaded or not self._entries():
                return
            head, _, code = self._read().partition(b"\n")
            engine = _engine()
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            engine.finalize_object()
            constants = json.loads(head)
            for entry in self._entries():
                entry.take(engine, constants[entry.symbol])
            self._loaded = True

    def _read(self) -> bytes:
        file = self.file
        with contextlib.suppress(FileNotFoundError):
            return file.read_bytes()
        with _alone(file):
            with contextlib.suppress(FileNotFoundError):
                return file.read_bytes()
            code = self._compile()
            new = file.with_suffix(f".{os.getpid()}")
            with contextlib.suppress(OSError):  # on a full disk the next process compiles again
                new.write_bytes(code)
                new.replace(file)
        return code

    def _entries(self) -> list[Any]:
        if self._given:
            return list(self._given)
        for module in self._modules:
            importlib.import_module(module)
        return [entry for module in self._modules for entry in _registered[module]]

    def _compile(self) -> bytes:
        codegen = _codegen()
        library = Library(codegen, self.name)
        names: dict[str, str] = {}
        entries = self._entries()
        for entry in entries:
            names |= entry.wrap(library)
        module = library.link()
        for old, new in names.items():
            with contextlib.suppress(NameError):
                module.get_function(old).name = new
                continue
            module.get_global_variable(old).name = new
        _optimise(codegen, module, set(names.values()))
        head = json.dumps({entry.symbol: entry.constants for entry in entries}).encode()
        return head + b"\n" + codegen._tm.emit_object(module)


def _stray(function: Function, arguments: Types) -> Program:
    """Return a program of one function, for types of arguments that it did not name."""
    entry = _Entry(function, arguments)
    return Program(entry.symbol, (function.py_func.__module__,), (entry,))


def _source(module: str) -> Path:
    return Path(inspect.getfile(importlib.import_module(module)))


@functools.cache
def _digest(source: Path) -> bytes:
    return hashlib.sha256(source.read_bytes()).digest()


class _Codegen(JITCPUCodegen):  # type: ignore[misc]
    """Numba's, for a level of processors instead of the one that is here."""

    def _get_host_cpu_name(self) -> Any:  # noqa: ANN401 - Numba's
        return level() or super()._get_host_cpu_name()

    def _get_host_cpu_features(self) -> Any:  # noqa: ANN401 - Numba's
        return "" if level() else super()._get_host_cpu_features()


LEVELS = {
    "x86-64-v3": ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"),
    "x86-64-v2": ("cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"),
    "x86-64": (),
}
"""Levels of x86-64 processors, with what each has beyond the next one here. Zico's code has no use for a higher one.

Source: x86-64 psABI, "Processor-Specific Micro-Architecture Levels",
https://gitlab.com/x86-psABIs/x86-64-ABI
"""


def level() -> str:
    """Return the highest of ``LEVELS`` that this processor has; an empty text on another architecture."""
    if not llvm.get_process_triple().startswith("x86_64"):
        return ""
    has = llvm.get_host_cpu_features()
    names = list(LEVELS)
    return next(
        name
        for place, name in enumerate(names)
        if all(has.get(feature) for below in names[place:] for feature in LEVELS[below])
    )


@functools.cache
def _codegen() -> Any:  # noqa: ANN401 - Numba's
    _ = cpu_target.target_context.codegen()  # which prepares LLVM
    return _Codegen("zico")


@functools.cache
def _toolchain() -> bytes:
    version = sys.version_info[:2]  # a release within these keeps what machine code knows of Python
    return repr((numba.__version__, llvmlite.__version__, version, _codegen().magic_tuple())).encode()


@functools.cache
def _engine() -> Any:  # noqa: ANN401 - llvmlite's
    codegen = _codegen()
    for name, address in _nrt_python.c_helpers.items():  # Numba does so when it first compiles
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)
    # An exception finds its way through code by the range of addresses of each program (libgcc takes it that ranges do
    # not overlap). By default LLVM puts a program's hot and cold code into whatever gaps there are, with other
    # programs in between. llvmlite's memory manager gives it one piece.
    module = llvm.parse_assembly(str(codegen._create_empty_module("zico")))
    return llvm.create_mcjit_compiler(module, codegen._tm, use_lmm=True)


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Wait until no other process compiles the same; go on beside one that takes longer than ``PATIENCE_S``."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    end_s = time.monotonic() + PATIENCE_S
    with file.with_suffix(".lock").open("w") as lock:
        while time.monotonic() < end_s:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_POLL_S)
        yield
