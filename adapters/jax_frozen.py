"""JAX arrays that nobody changes any more are held once for all jobs of a pool that have the same ones.

Theory of operation
    JAX does not say which arrays are frozen, and an array stays where it is. So ``zico.share`` returns
    a tree whose arrays lie in mappings (``zico.job.frozen``). JAX takes memory of the host as it is,
    where that may be (``jax.device_put``), and keeps it until nothing needs it. The arrays that were
    given are freed by whoever has them.

Guarantees (numbers as in docs/design/invariants.md)
    6. Arrays have the same bits, shapes, types and shardings.
    12. XLA does not write to memory that it was given. An array that is donated is copied, and is gone.

Known limitations
    * On the host. Arrays on several devices, in another order than C's, of weak type or of fewer than
      8 bits an element stay the job's own. So do those of 64 bits where JAX makes none.
    * A jitted function has a copy of what it closes over: pass it as an argument.
    * Until the caller lets the old arrays go, both are held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zico.base.errors import ConfigError
from zico.job.frozen import Bytes, Sharer

if TYPE_CHECKING:
    from zico.job.frozen import Mapping

WHOLE_BYTES = ("bfloat16", "float8")
"""How the names of types begin that JAX adds to NumPy's own and that have no parts of bytes."""


class FrozenSharing(Sharer):
    """Shares arrays when it is asked to."""

    takes = "a tree of JAX arrays"

    def knows(self, given: Any) -> bool:  # noqa: ANN401 - whatever a user gives
        """Tell whether there are arrays in this."""
        return any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(given))

    def share(self, given: Any) -> Any:  # noqa: ANN401 - as given
        """Return a tree whose arrays are shared as far as they can be.

        Raises:
            ConfigError: JAX traces the function that calls this.
        """
        leaves, tree = jax.tree_util.tree_flatten(given)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise ConfigError(
                "zico.share was called in a function that JAX traces, where no array has memory: call it outside, and "
                "pass what it returns as an argument"
            )
        there: dict[int, Any] = {}

        def move(bytes_: Bytes, mapping: Mapping) -> bool:
            array = _array_in(mapping, bytes_.of)
            if array is not None:
                there[id(bytes_.of)] = array
            return array is not None

        found = map(self._bytes_of, leaves)
        self._sharing.share([one for one in found if one is not None], move)
        return jax.tree_util.tree_unflatten(tree, [there.get(id(leaf), leaf) for leaf in leaves])

    def _bytes_of(self, array: Any) -> Bytes | None:  # noqa: ANN401 - any leaf
        """Return an array's memory if that is the pool's, and NumPy could have it the same way."""
        if not isinstance(array, jax.Array) or array.is_deleted() or not _is_plain(array):
            return None
        address = array.block_until_ready().unsafe_buffer_pointer()
        return Bytes(address, array.nbytes, array) if self._sharing.has(address) else None


def _is_plain(array: Any) -> bool:  # noqa: ANN401 - JAX's
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return False
    has_whole_bytes = array.dtype.isbuiltin == 1 or array.dtype.name.startswith(WHOLE_BYTES)
    if not has_whole_bytes or array.weak_type or not array.is_fully_addressable or len(array.devices()) > 1:
        return False
    return bool(array.format.layout.major_to_minor == tuple(range(array.ndim)))


def _array_in(mapping: Mapping, like: Any) -> Any:  # noqa: ANN401 - JAX's
    """Return an array that lies in a mapping and keeps it; ``None``: JAX would copy, or make another type of it."""
    memory = np.frombuffer(mapping.buffer(), like.dtype).reshape(like.shape)
    array = jax.device_put(memory, like.sharding if like.committed else None, may_alias=True)
    return array if array.unsafe_buffer_pointer() == mapping.address else None
