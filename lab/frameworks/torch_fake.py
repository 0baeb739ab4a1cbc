"""Traces of PyTorch training steps without the hardware: shapes are followed, nothing is computed.

Theory of operation
    The step runs on fake tensors (``FakeTensorMode``): shapes, types and storages, no data. Above
    them a dispatch mode sees every operation that would reach the device. A storage seen for the
    first time is an allocation, and the death of its last reference is a free. Views, saved tensors
    and reference counts are PyTorch's own. A roofline of the device model
    (``zico.lab.simulator.roofline``) gives each operation its time on one stream.

    Fake tensors are CPU tensors here, since autograd on fake CUDA tensors aborts in builds without
    CUDA. The last part of this module stands in for what differs when the model is a CUDA device.

    While modes are active, autograd adds gradients out of place where otherwise it adds into the
    one of which it holds the last reference. That is undone here (``_Recorder.gradients_sum``)::

        as dispatched    ALLOC sum  READ a  READ b  WRITE sum  OP add  FREE a
        as recorded                 READ a  READ b  WRITE a    OP add

Known limitations
    * What kernels allocate inside (workspaces of cuDNN and cuBLAS, im2col buffers) and the
      allocator's rounding are not in the trace. Times are lower bounds: no launch, no imperfect
      kernel.
    * What ``torch.compile`` makes is followed as ``zico.lab.frameworks.torch_codeless`` says.
    * Recurrent layers of cuDNN (``nn.LSTM`` on a GPU) are followed as the single operations that
      they stand for.
    * A value that the script reads from a tensor is 1 (``False`` for truth values); a shape that
      depends on values is an error. Autocast for CUDA is off in builds without CUDA.
"""

# ruff: noqa: A002, ANN401, FBT001, FBT002, SLF001 - torch has no types, its own signatures and its
# private names
from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import math
import weakref
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from zico.lab.frameworks.torch_codeless import COMPILES, codeless, is_compiling
from zico.trace.events import EVENT, NO_NAME, Kind, Origin, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from zico.lab.simulator.roofline import DeviceModel


# --------------------------------------------------------------------------------------------------
# Let a script's devices all be the one on which fake tensors are, and let PyTorch do as on that
# device.
#
# ``device=`` arguments and moves are followed to the CPU, where the tensors are. Where the device
# model is a CUDA device, dropout and attention are the fused ones, and optimizers take their
# multi-tensor path.

_ACCELERATORS = {"cuda", "mps", "xpu"}
_MOVES = {torch.Tensor.cuda, torch.Tensor.pin_memory}
_optimizers = importlib.import_module("torch.optim.optimizer")  # torch.optim hides it
_plain_dropout = torch.nn.functional.dropout
_plain_attention = torch.nn.functional.scaled_dot_product_attention


def pretences(device: DeviceModel) -> Iterator[AbstractContextManager[object]]:
    """Yield what to enter, in this order, before a script runs on fake tensors of a device model."""
    yield _OneDevice()
    yield mock.patch.object(torch.nn.Module, "_apply", _apply)
    yield from _multi_tensor()
    if device.is_cuda:
        yield from _as_cuda()


class _OneDevice(TorchFunctionMode):
    """Lets a script's devices all be the one on which the fake tensors are."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MOVES:
            return args[0]
        kwargs = {name: _here(value, name) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.unflatten:  # torch.compile knows the method, but not what it calls in turn
            return args[0].unflatten(*args[1:], **kwargs)
        return func(*map(_here, args), **kwargs)


def _here(value: Any, name: str = "") -> Any:
    kind = value.type if isinstance(value, torch.device) else value.partition(":")[0] if isinstance(value, str) else ""
    return "cpu" if kind in _ACCELERATORS or (name == "device" and isinstance(value, int)) else value


def _fused_dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or inplace or not 0 < p < 1:
        return _plain_dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, train=True)[0]


def _apply(module: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """Convert a module as ``Module._apply`` does real ones; fake tensors it swaps, which references to them forbid."""
    for child in module.children() if recurse else ():
        child._apply(fn)
    for parameter in module._parameters.values():
        for tensor in (parameter, getattr(parameter, "grad", None)):
            if tensor is not None:
                with torch.no_grad():
                    tensor.data = fn(tensor)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _fused_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
) -> Any:
    if not dropout_p or kwargs.get("enable_gqa") or query.dim() != 4:  # noqa: PLR2004 - with heads
        return _plain_attention(query, key, value, attn_mask, dropout_p, *args, **kwargs)
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    keeps_sums = True
    # The kernel that a CUDA device has for it; without dropout the CPU's keeps as much.
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, keeps_sums, dropout_p, *args, **kwargs
    )[0]


def _multi_tensor() -> Iterator[Any]:
    """Yield what lets fake tensors be worked on together where real ones are."""
    for module in (_optimizers, _foreach_utils):
        types = [*module._foreach_supported_types, FakeTensor]
        yield mock.patch.object(module, "_foreach_supported_types", types)


def _as_cuda() -> Iterator[Any]:
    """Yield what lets PyTorch do as on a CUDA device."""
    yield mock.patch.object(torch.nn.functional, "dropout", _fused_dropout)
    yield mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _fused_attention)
    yield mock.patch.object(_optimizers, "_get_foreach_kernels_supported_devices", return_value=["cpu"])


# --------------------------------------------------------------------------------------------------

_ALLOCATE_ONLY = ("empty", "new_empty")
_GATHERS = {"embedding", "gather", "index", "index_select"}
"""Operations that read only as much of their source as they return."""
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}
"""Operations that change a tensor without reading it, besides those that draw random numbers."""
_NOTE = "workspaces inside kernels are not modelled; times are a roofline's lower bounds"
if not COMPILES:
    _NOTE += "; this PyTorch follows a step of torch.compile as it is without"


def fake_trace(
    build: Callable[[], Callable[[], object]],
    device: DeviceModel,
    iterations: int = 3,
    job: str = "",
    *,
    marks: list[int] | None = None,
    copies: bool = False,
) -> Trace:
    """Follow a training step on a device that need not be there.

    Runs ``build``, then one step that no iteration contains (optimizers allocate their state in
    it), then ``iterations`` more. Cyclic garbage is collected between iterations only, so that they
    are alike. With ``marks`` it is collected at every second mark instead. A job's own collector
    comes late: what a step leaves in cycles is still there at the peak of the next one.

    Args:
        build: Makes model and optimizer, and returns what does one training step.
        device: Whose times the trace has.
        iterations: How many BEGIN marks it has.
        job: What ``Origin.job`` says.
        marks: Gets the events before which a job marks an iteration's end: where its first
            optimizer has made a step.
        copies: Whether the trace has what oneDNN allocates on the host: copies of convolutions, workspaces of LSTM.
    """
    recorder = _Recorder()
    parameters: dict[int, int] = {}
    first: list[int] = []

    def count(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            parameters.update((id(p), p.numel()) for p in group["params"] if p.requires_grad)
        if marks is not None and id(optimizer) == (first or [id(optimizer)])[0]:
            first[:] = [id(optimizer)]
            marks.append(len(recorder.events))
            if len(marks) % 2 == 0:
                gc.collect()

    with contextlib.ExitStack() as stack:
        stack.enter_context(_collected_by_hand())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        dispatch = stack.enter_context(_Dispatch(recorder, device, copies=copies and not device.is_cuda))
        stack.enter_context(codeless(dispatch.fused))
        for pretence in pretences(device):
            stack.enter_context(pretence)
        step = build()
        stack.callback(register_optimizer_step_post_hook(count).remove)
        step()
        for number in range(iterations):
            if marks is None:
                gc.collect()
            recorder.mark(Kind.BEGIN, number)
            step()
        gc.collect()
        recorder.mark(Kind.END, iterations - 1)
        recorder.close()
    origin = Origin(job, f"torch {torch.__version__}", device.name, "fake", 0, sum(parameters.values()), _NOTE)
    return Trace(origin, np.array(recorder.events, EVENT), tuple(recorder.names))


class _Recorder:
    """The events so far, the model's clock, and which storage is which tensor."""

    def __init__(self) -> None:
        self.events: list[tuple[int, ...]] = []
        self.names: dict[str, int] = {}
        self._t_ns = 0
        self._n_tensors = 0
        self._tensors: dict[int, tuple[int, int, weakref.ref[Any]]] = {}  # storage -> number, bytes, its death
        self._sum = (0, 0)  # storages of the last operation, if it was a sum of gradients, and of its first operand

    def mark(self, kind: Kind, number: int) -> None:
        """Note that an iteration begins or ends."""
        self._add(kind, number)

    def close(self) -> None:
        """Hear of no more frees."""
        self._tensors.clear()

    def operation(self, name: str, reads: list[Any], writes: list[Any], duration_ns: int) -> None:
        """Note an operation on storages, and that those it writes first begin to live. No time: it only allocates."""
        self._sum = (0, 0)
        index = self.names.setdefault(name, len(self.names))
        # A storage that is read but not known comes from data that was there before.
        read = {self._number(storage, NO_NAME): None for storage in reads if storage.nbytes()}
        written = {self._number(storage, index): None for storage in writes if storage.nbytes()}
        if duration_ns:
            for number in read:
                self._add(Kind.READ, number, 0, index)
            for number in written:
                self._add(Kind.WRITE, number, 0, index)
            self._add(Kind.OP, NO_NAME, duration_ns, index)
            self._t_ns += duration_ns

    def copied(self, name: str, how: _Copied) -> None:
        """Note that a kernel makes a tensor by copies, which come and go within it."""
        index = self.names.setdefault(name, len(self.names))
        operands = [self._begin(size_bytes, index) for size_bytes in how.operands]
        own = self._begin(how.made_bytes, index)
        for number in operands:
            self._add(Kind.FREE, number)
        self._number(how.tensor.untyped_storage(), index)
        if how.is_strided:
            self._add(Kind.FREE, self._begin(how.made_bytes, index))
        self._add(Kind.FREE, own)

    def _begin(self, size_bytes: int, index: int) -> int:
        number, self._n_tensors = self._n_tensors, self._n_tensors + 1
        self._add(Kind.ALLOC, number, size_bytes, index)
        return number

    def gradients_sum(self, total: int, operand: int) -> None:
        """Note that the last operation was autograd's sum of gradients: in place, if its first operand dies now."""
        self._sum = (total, operand)

    def _number(self, storage: Any, name: int) -> int:
        key, size_bytes = storage._cdata, storage.nbytes()
        number, known_bytes, _ = self._tensors.get(key, (NO_NAME, 0, None))
        if size_bytes != known_bytes:
            if known_bytes:  # resized: PyTorch allocates anew and copies
                self._add(Kind.FREE, number)
            number = self._begin(size_bytes, name)
            self._tensors[key] = (number, size_bytes, weakref.ref(storage, functools.partial(self._freed, key)))
        return number

    def _freed(self, key: int, _reference: object) -> None:
        if key not in self._tensors:  # closed
            return
        number, size_bytes, _ = self._tensors.pop(key)
        total, operand = self._sum
        if operand != key or self._tensors[total][1] != size_bytes:
            self._add(Kind.FREE, number)
            return
        self._sum = (0, 0)
        made, _, reference = self._tensors[total]
        self._tensors[total] = (number, size_bytes, reference)
        self._n_tensors = made
        first = next(i for i in range(len(self.events) - 1, -1, -1) if self.events[i][5] == Kind.ALLOC)
        tail = self.events[first + 1 :]
        self.events[first:] = [(e[0], number, *e[2:]) if e[1] == made else e for e in tail]

    def _add(self, kind: Kind, tensor: int, size_bytes: int = 0, name: int = NO_NAME) -> None:
        self.events.append((self._t_ns, tensor, size_bytes, name, 0, kind, 0))


class _Dispatch(TorchDispatchMode):
    """Tells the recorder of every operation: what it reads and writes, and how long the device takes for it."""

    def __init__(self, recorder: _Recorder, device: DeviceModel, *, copies: bool) -> None:
        super().__init__()
        self._recorder = recorder
        self._device = device
        self._copies = copies

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` compile below this mode."""
        return True

    def fused(self, reads: list[Any], writes: list[Any]) -> None:
        """Note a kernel that ``torch.compile`` has made; its time is that of moving its bytes."""
        moved_bytes = sum(map(_extent_bytes, (*reads, *writes)))
        duration_ns = self._device.duration_ns(0, moved_bytes, writes[0].dtype.itemsize, tf32=False)
        self._recorder.operation("fused", _storages(reads), _storages(writes), duration_ns)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_compiling():
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        except DynamicOutputShapeException:
            raise RuntimeError(f"the shape of what {func} returns depends on values, and here are none") from None
        if self._copies and func is torch.ops.aten.mkldnn_rnn_layer.default:
            result = _with_workspace(args, result)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        overwrites = name in _OVERWRITES or torch.Tag.nondeterministic_seeded in func.tags
        reads: list[Any] = []
        writes: list[Any] = []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            _sort(argument, value, reads, writes, overwrites=overwrites)
        for argument in func._schema.arguments[len(args) :]:
            _sort(argument, kwargs.get(argument.name), reads, writes, overwrites=overwrites)
        known = {_identity(tensor) for tensor in (*reads, *writes)}
        made = [tensor for tensor in _tensors(result) if _identity(tensor) not in known]
        writes += made
        duration_ns = 0
        if writes and not name.startswith(_ALLOCATE_ONLY):
            moved_bytes = sum(map(_extent_bytes, (*reads, *writes)))
            if name in _GATHERS:
                moved_bytes -= max(0, _extent_bytes(args[0]) - _extent_bytes(result))
            duration_ns = self._device.duration_ns(
                _flops(func, args, kwargs, result), moved_bytes, writes[0].dtype.itemsize, tf32=_allows_tf32(name)
            )
        for one in _copied(func, args, result) if self._copies else ():
            self._recorder.copied(name, one)
        self._recorder.operation(name, _storages(reads), _storages(writes), duration_ns)
        in_backward = torch._C._current_graph_task_id() != -1
        if made and func is torch.ops.aten.add.Tensor and in_backward and not args[0]._is_view():
            self._recorder.gradients_sum(_identity(result), _identity(args[0]))


def _sort(argument: Any, value: Any, reads: list[Any], writes: list[Any], *, overwrites: bool) -> None:
    tensors = _tensors(value)
    is_written = argument.alias_info is not None and argument.alias_info.is_write
    if is_written:
        writes += tensors
    if not (is_written and (overwrites or argument.kwarg_only)):  # out= is only written
        reads += tensors


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, (list, tuple)) else []


def _identity(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata


def _storages(tensors: list[Any]) -> list[Any]:
    return [tensor.untyped_storage() for tensor in tensors]


def _extent_bytes(tensor: Any) -> int:
    read_once = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return min(read_once * tensor.itemsize, tensor.untyped_storage().nbytes())


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    formula = flop_registry.get(func.overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula is not None else 0


def _allows_tf32(name: str) -> bool:
    backend = torch.backends.cudnn if name.startswith("convolution") else torch.backends.cuda.matmul
    return bool(backend.allow_tf32)


# -- what oneDNN allocates on the host -------------------------------------------------------------
#
# It convolves images whose channels lie in blocks of as many as a register has numbers. So what comes
# in and out is copied, and so are weights. Few channels of an image stay as they are, and so does what
# has its channels last. Groups of channels that fill no blocks are convolved without copies. Where a
# result is larger than what it is made of, by a stride, the way back takes one copy more.
#
# Its recurrent layers copy weights and gates, and keep a workspace between the passes. Its size only
# the library knows. It is asked for sequences of one and of three steps, since the size grows evenly.


@dataclasses.dataclass(frozen=True)
class _Copied:
    """How a kernel makes a tensor."""

    operands: tuple[int, ...]
    """Bytes of their copies."""
    made_bytes: int
    """Of the copy that it makes first."""
    tensor: Any
    is_strided: bool


def _copied(func: Any, args: Any, result: Any) -> list[_Copied]:
    """Return for each tensor that oneDNN makes by copies how it is made."""
    is_recurrent_backward = func is torch.ops.aten.mkldnn_rnn_layer_backward.default
    if is_recurrent_backward or func is torch.ops.aten.mkldnn_rnn_layer.default:
        return [_recurrent(args, result[0], with_gradients=is_recurrent_backward)]
    if func is torch.ops.aten.convolution.default:
        image, weight, stride, transposed, groups = args[0], args[1], args[3], args[6], args[8]
        if not _is_blocked(image, weight, groups):
            return []
        operands = (_image_bytes(image, weight), _weight_bytes(weight))
        is_strided = transposed and max(stride) > 1
        return [_Copied(operands, _image_bytes(result, weight, made=True), result, is_strided)]
    if func is not torch.ops.aten.convolution_backward.default or not _is_blocked(args[1], args[2], args[9]):
        return []
    above, image, weight = args[0], args[1], args[2]
    is_strided = max(args[4]) > 1 and not args[7]
    gradient, weights = _image_bytes(above, weight), _weight_bytes(weight)
    made = _image_bytes(image, weight, made=True)
    found = (
        _Copied((gradient, weights), made, result[0], is_strided),
        _Copied((_image_bytes(image, weight), gradient), weights, result[1], is_strided=False),
    )
    return [one for one in found if one.tensor is not None]


def _recurrent(args: Any, made: Any, *, with_gradients: bool) -> _Copied:
    """Return what a recurrent layer works on: the gates of all steps, its weights, and perhaps their gradients."""
    sequence, weights = args[0], args[1:3]
    gates_bytes = sequence.shape[0] * sequence.shape[1] * weights[0].shape[0] * sequence.itemsize
    copies = [weight.numel() * weight.itemsize for weight in weights]
    return _Copied((gates_bytes, *copies, *(copies if with_gradients else ())), 1, made, is_strided=False)


def _is_blocked(image: Any, weight: Any, groups: int) -> bool:
    per_group = (weight.shape[0] // groups, weight.shape[1])
    fills = groups == 1 or per_group[1] == 1 or not any(width % _lanes() for width in per_group)
    return bool(fills and image.dtype == torch.float32 and len(image) > 1 and image.is_contiguous())


def _image_bytes(image: Any, weight: Any, *, made: bool = False) -> int:
    width = image.shape[1]
    stays = width < _lanes() and max(weight.shape[2:]) > 1
    if stays:
        return image.numel() * image.itemsize if made else 1
    return image.numel() // width * _blocked(width) * image.itemsize


def _weight_bytes(weight: Any) -> int:
    outputs, inputs = weight.shape[:2]
    return weight.numel() // (outputs * inputs) * _blocked(outputs) * _blocked(inputs) * weight.itemsize


def _blocked(width: int) -> int:
    return width if width == 1 else -(-width // _lanes()) * _lanes()


@functools.cache
def _lanes() -> int:
    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


def _with_workspace(args: Any, result: Any) -> Any:
    """Return the result of a recurrent layer with a workspace of its size; the fake one's is empty."""
    sequence, weights, rest = args[0], args[1:5], args[7:]
    steps = sequence.shape[0]
    shapes = (tuple(sequence.shape[1:]), *(tuple(one.shape) for one in weights), tuple(args[5].shape))
    one, three = (_workspace_bytes(shapes, length, (rest[0], tuple(rest[1]), *rest[2:])) for length in (1, 3))
    return (*result[:3], sequence.new_empty(one + (three - one) // 2 * (steps - 1), dtype=torch.uint8))


@functools.cache
def _workspace_bytes(shapes: tuple[tuple[int, ...], ...], length: int, rest: tuple[Any, ...]) -> int:
    """Return the workspace of a real layer of so many steps."""
    sequence, *weights, state = shapes
    with unset_fake_temporarily(), torch._C._DisableTorchDispatch(), torch.enable_grad():
        made = [torch.zeros(shape) for shape in ((length, *sequence), *weights, state, state)]
        workspace = torch.ops.aten.mkldnn_rnn_layer(*made, *rest)[3]
    return workspace.numel() * workspace.itemsize


@contextlib.contextmanager
def _collected_by_hand() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
