"""TensorFlow: a training step that lacks memory computes cheap results again in its backward pass.

Theory of operation
    A step of ``tf.function``, Keras' too, is one call. When the job lacks memory in a call,
    TensorFlow is asked for the graph that it really runs: inlined, placed, and optimized.
    ``zico.planning.saving.graph_rebuilding`` chooses what runs again in it, and what waits. The
    changed graph becomes a function of its own, which the next calls run, without optimizing it
    again. While memory still lacks, more runs again.

Guarantees
    6. The changed graph runs the operations that TensorFlow's own optimizers left, and copies of
    some: the same kernels on the same values. Losses have the same bits.
    Copies are of operations without state, whose results depend on their inputs alone.

Known limitations
    The first call needs all its memory. Steps that ``jit_compile`` are XLA's, which has passes of
    its own; they are left as they are. So are steps whose backward operations are not named as
    ``tf.GradientTape`` names them.
"""

# ruff: noqa: SLF001 - TensorFlow has no other names for what is used here
# ruff: noqa: ANN401 - tensors and graphs are TensorFlow's
from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.eager import context as eager
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import func_graph, importer
from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.ops import handle_data_util

from zico.base.comparison import Comparison
from zico.base.saying import inform
from zico.base.units import format_bytes
from zico.job.autoload import complain
from zico.planning.saving.graph_rebuilding import Operation, StepGraph
from zico.swap.joining import HeapGauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zico.job.session import Session
    from zico.planning.saving.graph_rebuilding import Rebuilding

GRADIENT_SCOPE = "gradient_tape/"
"""Where ``tf.GradientTape`` puts the operations of a backward pass."""
VIEWS = frozenset({"Reshape", "Identity", "ExpandDims", "Squeeze"})
LASTING = frozenset({"ReadVariableOp", "Const", "Placeholder", "VarHandleOp"})
PASSES = {
    **dict.fromkeys(VIEWS, 0.0),
    **dict.fromkeys(("AddN", "AddV2", "BiasAdd", "Mul", "Neg", "Square", "SquaredDifference", "Sub"), 1.0),
    **dict.fromkeys(("BroadcastTo", "Cast", "Fill", "Maximum", "Minimum", "Relu", "StridedSlice", "Tile"), 1.0),
    **dict.fromkeys(("Equal", "Less", "LogicalAnd", "SelectV2"), 1.0),
    **dict.fromkeys(("RealDiv", "Rsqrt", "Sqrt", "Transpose", "MatrixBandPart"), 2.0),
    **dict.fromkeys(("Elu", "Erf", "Erfc", "Exp", "Sigmoid", "Softplus", "Tanh", "_UnaryOpsComposition"), 4.0),
    **dict.fromkeys(("LogSoftmax", "Softmax"), 5.0),
    **dict.fromkeys(("BatchMatMulV2", "Einsum", "MatMul"), 12.0),
}
"""What may run again, and about how long it takes, in passes over its largest operand."""
BRANCHING = frozenset({"Switch", "Merge", "Enter", "Exit", "NextIteration"})
"""Operations of loops and branches: what waits for one in a branch that is not taken never runs."""
LACK_SHARE = 1 / 16
"""A call lacks memory if it moves more than this share of what the job may hold."""
SETTLING_CALLS = 4
"""Calls after a change before it is judged: what was there before moves meanwhile."""
JUDGED_CALLS = 3
MOST_CHANGES = 2
STEP_SHARE = 1 / 4
"""Each further change keeps so much less of what the job may hold: copies take memory too, and so do gaps."""


class Rebuilder:
    """Watches the steps of this process, and changes those that lack memory."""

    def __init__(self, joined: Session) -> None:
        """Watch from now on; nothing is changed while the job has the memory that it needs."""
        self._record = joined.record
        self._gauge = HeapGauge(joined.heap)
        self._steps: dict[Any, Step] = {}
        call = eager.Context.call_function

        @functools.wraps(call)
        def call_function(context: Any, name: Any, tensor_inputs: Any, num_outputs: int) -> Any:
            if name not in self._steps:
                self._steps[name] = Step(name, functools.partial(call, context), context)
            return self._watch(self._steps[name], tensor_inputs, num_outputs)

        eager.Context.call_function = call_function

    def _watch(self, step: Step, inputs: Any, n_outputs: int) -> Any:
        self._record["dropped_bytes"] += step.dropped_bytes
        if not step.is_watched or step.thread != threading.get_ident():
            return step.call(inputs, n_outputs)
        before, began = self._moved_bytes(), time.monotonic()
        outputs = step.run(inputs, n_outputs)
        cap_bytes = self._gauge.cap_bytes()
        lacked = self._moved_bytes() - before > LACK_SHARE * cap_bytes
        step.judge(time.monotonic() - began, cap_bytes, int(self._record["peak_live_bytes"]), lacked=lacked)
        return outputs

    def _moved_bytes(self) -> int:
        """Return what had to move for this job, ever, because it had less memory than it needed."""
        return int(self._record["in_bytes"]) + int(self._record["spilled_bytes"])


@dataclasses.dataclass(eq=False)
class Variant:
    """A step as it was, or changed."""

    name: Any
    """Of the function that TensorFlow calls."""
    plan: Rebuilding | None = None
    dropped_bytes: int = 0
    """What it keeps less than the step as it was."""
    function: Any = None
    """What keeps the function alive."""


class Step:
    """One function, and its variants."""

    def __init__(self, name: Any, call: Callable[..., Any], context: Any) -> None:
        self.is_watched = True
        self.thread = threading.get_ident()
        """Who called it first. Calls of other threads are not judged, and change nothing."""
        self._function = call
        self._context = context
        self._variants = [Variant(name)]
        self._judged = Comparison(self._variants[0], settle=SETTLING_CALLS, window=JUDGED_CALLS)
        self._source: graph_pb2.GraphDef | None = None
        self._to_save_bytes = 0
        """What the next variant is to keep less than the step as it was; 0: there is to be none."""

    @property
    def dropped_bytes(self) -> int:
        """Return what a call of the present variant keeps less than the step as it was."""
        return self._judged.way.dropped_bytes

    def call(self, inputs: Any, n_outputs: int) -> Any:
        """Call the present variant."""
        current = self._judged.way
        if current.plan is None:
            return self._function(current.name, inputs, n_outputs)
        with self._configured(_as_it_is):
            return self._function(current.name, inputs, n_outputs)

    def run(self, inputs: Any, n_outputs: int) -> Any:
        """Call the present variant; a change that is due comes before, or takes this call to look at the graph."""
        if self._to_save_bytes and self._source is None:
            return self._run_and_look(inputs, n_outputs)
        if self._to_save_bytes:
            try:
                self._change(inputs)
            except Exception as error:  # noqa: BLE001 - the step itself is whole, and goes on
                complain("a training step of TensorFlow stays as it is", error)
                self._settle()
        return self.call(inputs, n_outputs)

    def judge(self, seconds: float, cap_bytes: int, peak_bytes: int, *, lacked: bool) -> None:
        """Take in how the last call went; after some of them, decide whether there is to be a change."""
        window = self._judged.note(seconds, lacked)
        if window is None:
            return
        lacks = window[1]
        n_changes = len(self._variants) - 1
        if lacks and n_changes < MOST_CHANGES:
            self._to_save_bytes = peak_bytes - cap_bytes + round((n_changes + 1) * STEP_SHARE * cap_bytes)
        elif lacks or n_changes:
            self._settle()

    def _settle(self) -> None:
        """Go on with the fastest variant."""
        self._judged.turn(self._judged.best)
        self._variants = [self._judged.way]
        self._source = None
        self.is_watched = False

    def _run_and_look(self, inputs: Any, n_outputs: int) -> Any:
        """Call the step as it is, and have TensorFlow say what it runs."""
        context = self._context
        context.enable_graph_collection()
        try:
            with self._configured(_looked_at):
                outputs = self._function(self._judged.way.name, inputs, n_outputs)
            graphs = [graphs.post_optimization_graph for graphs in context.export_run_metadata().function_graphs]
        finally:
            context.disable_graph_collection()
        steps = [graph for graph in graphs if _can_change(graph)]
        if steps:
            self._source = max(steps, key=lambda graph: len(graph.node))
        else:
            self._settle()
        self._judged.turn(self._judged.way)
        return outputs

    def _change(self, inputs: Any) -> None:
        """Make a variant that keeps less, and go on with it; where there is none, with the fastest one."""
        to_save_bytes, self._to_save_bytes = self._to_save_bytes, 0
        graph, results = imported(self._source, inputs)
        operations = graph.get_operations()
        try:
            step = StepGraph(described(operations))
        except ValueError:  # what is no training step, or none of which the planner knows enough
            self._settle()
            return
        kept_bytes = step.kept_bytes()
        plan = step.plan(kept_bytes - to_save_bytes)
        last = self._variants[-1].plan
        if plan.kept_bytes >= (kept_bytes if last is None else last.kept_bytes):
            self._settle()
            return
        apply(plan, graph, operations)
        graph.outputs = [tensor_in(graph, result) for result in results]
        name = f"zico_{tf.compat.as_str(self._variants[0].name)}_{len(self._variants)}"
        function = atomic_function.from_func_graph(name, graph, {})
        self._variants.append(Variant(function.name, plan, kept_bytes - plan.kept_bytes, function))
        self._judged.turn(self._variants[-1])
        if last is None:
            saved = format_bytes(kept_bytes - plan.kept_bytes)
            inform(
                f"a training step computes {len(plan.copies)} results again, so that it keeps {saved} less for its "
                "backward pass: what the job may hold is less than it needs"
            )

    @contextlib.contextmanager
    def _configured(self, change: Callable[[Any], None]) -> Iterator[None]:
        """Let this thread's calls have a configuration that differs from the process's."""
        context = self._context
        before = context.function_call_options
        config = context.config
        change(config)
        context.function_call_options = eager.FunctionCallOptions(before.executor_type, config)
        try:
            yield
        finally:
            context.function_call_options = before


def _can_change(graph: graph_pb2.GraphDef) -> bool:
    """Tell whether a graph is a training step in which operations may wait for each other."""
    return any(GRADIENT_SCOPE in node.name for node in graph.node) and not any(
        node.op in BRANCHING or node.op.startswith("Collective") for node in graph.node
    )


def _as_it_is(config: Any) -> None:
    """Let no graph optimizer change a graph that they have left so."""
    config.graph_options.rewrite_options.disable_meta_optimizer = True


def _looked_at(config: Any) -> None:
    """Let the configuration differ in what functions do not use, so that the graph is made anew and can be seen."""
    config.placement_period += 1


def tensor_in(graph: Any, name: str) -> Any:
    """Return a tensor by the name that nodes of a graph have for it."""
    return graph.get_tensor_by_name(name if ":" in name else f"{name}:0")


def imported(source: graph_pb2.GraphDef, inputs: Sequence[Any]) -> tuple[Any, list[str]]:
    """Return a graph of a step's nodes, whose arguments are like the inputs, and the names of its results."""
    ends = {name: [node for node in source.node if node.op == name] for name in ("_Arg", "_Retval")}
    for nodes in ends.values():
        nodes.sort(key=lambda node: node.attr["index"].i)
    arguments = {node.name for node in ends["_Arg"]}
    inner = graph_pb2.GraphDef(versions=source.versions, library=source.library)
    for node in source.node:
        if node.op not in ends:
            copy = inner.node.add()
            copy.CopyFrom(node)
            copy.attr.pop("_class", None)  # may name an argument; devices are chosen already
            control = [f"^{name}" for name in arguments]
            kept = [name for name in node.input if name not in control]
            del copy.input[:]
            copy.input.extend(kept)
    graph = func_graph.FuncGraph("zico_step")
    with graph.as_default():
        graph.inputs = [
            tf.compat.v1.placeholder(tf.as_dtype(node.attr["T"].type), name=f"zico_argument_{i}")
            for i, node in enumerate(ends["_Arg"])
        ]
        for placeholder, given in zip(graph.inputs, inputs, strict=True):
            if given.dtype == tf.resource:
                handle_data_util.copy_handle_data(given, placeholder)
            else:
                placeholder.set_shape(given.shape)
        by_name = {f"{node.name}:0": tensor for node, tensor in zip(ends["_Arg"], graph.inputs, strict=True)}
        importer.import_graph_def(inner, input_map=by_name, name="")
    graph.control_outputs = [operation for operation in graph.get_operations() if operation._is_stateful]
    results = [node.input[0] for node in ends["_Retval"]]
    return graph, [by_name[f"{name}:0"].name if name in arguments else name for name in results]


def described(operations: Sequence[Any]) -> list[Operation]:
    """Return a graph's operations as the planner knows them."""
    numbers = {operation: i for i, operation in enumerate(operations)}
    return [
        Operation(
            inputs=tuple((numbers[tensor.op], tensor.value_index) for tensor in operation.inputs),
            waits_for=tuple(numbers[before] for before in operation.control_inputs),
            output_bytes=tuple(map(_bytes_of, operation.outputs)),
            passes=None if operation._is_stateful else PASSES.get(operation.type),
            is_view=operation.type in VIEWS,
            lasts=operation.type in LASTING,
            is_gradient=GRADIENT_SCOPE in operation.name,
            can_be_pivot=operation.type != "AddN" and any(map(_is_feature_map, operation.outputs)),
        )
        for operation in operations
    ]


def _bytes_of(tensor: Any) -> int:
    elements = tensor.shape.num_elements()
    return (elements or 0) * (tensor.dtype.size or 0)


def _is_feature_map(tensor: Any) -> bool:
    return tensor.dtype.is_floating and tensor.shape.rank not in (0, None)


def apply(plan: Rebuilding, graph: Any, operations: Sequence[Any]) -> None:
    """Change a graph as planned."""
    copies: dict[Any, Any] = {}

    def current(tensor: Any) -> Any:
        copy = copies.get(tensor.op)
        return tensor if copy is None else copy.outputs[tensor.value_index]

    with graph.as_default(), framework_ops.control_dependencies(None):
        for number, after in plan.copies:
            original = operations[number]
            copy = graph._create_op_internal(
                original.type,
                [current(tensor) for tensor in original.inputs],
                [tensor.dtype for tensor in original.outputs],
                name=f"zico/{original.name}",
                attrs=dict(original.node_def.attr),
                compute_device=False,
            )
            copy._set_device(original.device)
            copy._add_control_input(operations[after])
            copies[original] = copy
    for number, at in plan.readers:
        reader = operations[number]
        reader._update_input(at, current(reader.inputs[at]))
    for number, before in plan.delays:
        operations[number]._add_control_input(operations[before])
