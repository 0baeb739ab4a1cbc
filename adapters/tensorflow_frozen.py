"""TensorFlow's frozen variables, with Keras or without, are held once for all jobs of a pool that have the same ones.

Theory of operation
    A variable is frozen that a layer of Keras, or a ``tf.Module``, has and does not train. Before the
    first gradient tape begins, all of the process are offered to ``zico.job.frozen``. So are, at the
    ends of the first iterations, those that have not been shared yet. A variable of the host takes
    a tensor over that is assigned to it. So it is assigned one that lies in the mapping, and what
    it had is freed.

    TensorFlow writes in place only what it has allocated itself and nothing else refers to
    (``Tensor::RefCountIsOne``). What lies in a mapping it has not allocated. So whatever writes the
    variable, an assignment, an optimizer or statistics of batches, gives it new memory, which is the
    pool's and counts. The mapping goes with the last tensor that refers to it.

Guarantees (numbers as in docs/design/invariants.md)
    6. Variables keep their bits, shapes and identity.
    12. TensorFlow does not write to a mapping, and it is this process's alone if something else does.
    What fails here costs a line on stderr, and the job goes on with its own memory.

Known limitations
    * On the host. A variable that ``tf.gather`` or ``scatter_update`` has read or written by itself
      is copied by every read from then on, and stays the job's own. Keras' embeddings read otherwise.
    * A tensor that was read before the move keeps the old memory while it lives.
    * A write by another thread at the moment of the move may be lost.
"""

# ruff: noqa: SLF001 - TensorFlow has no other name for a tensor's memory
from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import backprop
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from zico.job.frozen import OFFERS, Bytes, Sharer

if TYPE_CHECKING:
    from zico.job.frozen import Mapping
    from zico.job.session import Session

TYPES = {
    *(tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.complex64, tf.complex128),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
}
"""What ``tf.bitcast`` makes of bytes."""


class FrozenSharing(Sharer):
    """Shares frozen variables of this process."""

    takes = "a model or layer of Keras, a tf.Module, or a list of TensorFlow's variables"

    def __init__(self, joined: Session) -> None:
        """Share nothing yet."""
        super().__init__(joined)
        self._moved: dict[int, weakref.ref[Any]] = {}
        """By identity: variables that have been shared; if one is no more, it was written."""
        self._has_begun = False

    def install(self) -> None:
        """Offer frozen variables before the first tape begins, and at the ends of the first iterations."""
        self._offers = OFFERS
        tapes: Any = backprop.GradientTape
        begin = tapes.__init__

        @functools.wraps(begin)
        def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401, N807 - as TensorFlow's
            if not self._has_begun:
                self._has_begun = True
                self._offer(self._still_frozen)
            begin(*args, **kwargs)

        tapes.__init__ = __init__

    def knows(self, given: Any) -> bool:  # noqa: ANN401 - whatever a user gives
        """Tell whether this has variables that are not trained, or is several variables."""
        variables = getattr(given, "non_trainable_variables", given)
        return isinstance(variables, Iterable) and all(isinstance(_inner(one), tf.Variable) for one in variables)

    def share(self, given: Any) -> Any:  # noqa: ANN401 - as given
        """Share what a layer or a module does not train, or these variables, as far as it can be."""
        variables = [_inner(one) for one in getattr(given, "non_trainable_variables", given)]
        with tf.init_scope(), self._session.as_one():  # eagerly, off any tape, and no assignment is a step
            found = map(self._bytes_of, {id(one): one for one in variables}.values())
            self._sharing.share([one for one in found if one is not None], self._move)
        return given

    def _bytes_of(self, variable: Any) -> Bytes | None:  # noqa: ANN401 - TensorFlow's
        """Return a variable's memory if that is the pool's."""
        if not (isinstance(variable, ResourceVariable) and variable.dtype in TYPES and variable.is_initialized()):
            return None
        tensor = variable.read_value()  # who writes the variable from now on leaves this tensor as it is
        memory = tensor._numpy()
        address = memory.ctypes.data if isinstance(memory, np.ndarray) else 0
        return Bytes(address, memory.nbytes, [variable, tensor]) if self._sharing.has(address) else None

    def _move(self, bytes_: Bytes, mapping: Mapping) -> bool:
        variable, tensor = bytes_.of
        bytes_.of.clear()  # the last reference to the old memory
        if not _lies_at(variable, bytes_.address):
            return False
        variable.assign(_tensor_in(mapping, tensor.dtype, tensor.shape), read_value=False)
        self._moved[id(variable)] = weakref.ref(variable)
        return True

    def _still_frozen(self) -> list[Any]:
        """Return the frozen variables that have not been shared before."""
        return [one for one in frozen_variables() if (moved := self._moved.get(id(one))) is None or moved() is not one]


def frozen_variables() -> list[Any]:
    """Return what layers of Keras and modules of this process do not train."""
    keras: Any = sys.modules.get("keras")
    kinds = (tf.Module, keras.Layer) if hasattr(keras, "Layer") else (tf.Module,)
    owners = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    return [_inner(one) for owner in owners for one in owner.non_trainable_variables]


def _inner(variable: Any) -> Any:  # noqa: ANN401 - anything
    """Return the variable of TensorFlow in one of Keras."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)


def _lies_at(variable: Any, address: int) -> bool:  # noqa: ANN401 - TensorFlow's
    """Tell whether a variable has its memory there; where reads copy, it never has."""
    return bool(variable.read_value()._numpy().ctypes.data == address)


def _tensor_in(mapping: Mapping, dtype: Any, shape: Any) -> Any:  # noqa: ANN401 - TensorFlow's
    """Return a tensor that lies in a mapping and keeps it."""
    memory = np.frombuffer(mapping.buffer(), np.uint8)
    flat = tf.experimental.dlpack.from_dlpack(memory.__dlpack__())
    return tf.bitcast(tf.reshape(flat, [*shape, *([dtype.size] if dtype.size > 1 else [])]), dtype)
