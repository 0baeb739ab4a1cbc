"""JAX: what the policies of ``jax.checkpoint`` save between the passes of a function, and compute again.

A policy is the script's choice. This traces what each would do, on shapes alone: nothing runs, and no
array is made.

Known limitations
    Operations are counted as JAX hands them to XLA, which may drop or fuse some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from zico.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

POLICIES = ("everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
"""Names in ``jax.checkpoint_policies``, for a ``jax.checkpoint`` around the whole function."""


class Passes(NamedTuple):
    """What a function keeps between its passes, arguments and constants aside, and what it computes."""

    saved_bytes: int
    flops: int
    """Both passes cost this."""


def passes_of(function: Callable[..., Any], arguments: Sequence[Any], policy: str | None = None) -> Passes:
    """Return what ``jax.value_and_grad`` of a function does, by its first argument.

    Args:
        function: Returns a number.
        arguments: Arrays, shapes (``jax.ShapeDtypeStruct``), and trees of those.
        policy: One of ``POLICIES``; ``None``: the function as it is.

    Raises:
        ConfigError: The function does not return one number.
    """
    shape = jax.eval_shape(function, *arguments)
    if getattr(shape, "shape", None) != () or not jnp.issubdtype(shape.dtype, jnp.floating):
        message = f"the function returns {shape!r:.60}: return one that returns its loss, a floating-point number"
        raise ConfigError(message)
    if policy is not None:
        function = jax.checkpoint(function, policy=getattr(jax.checkpoint_policies, policy))

    def backward(first: Any, *rest: Any) -> Any:  # noqa: ANN401 - trees of any kind
        return jax.vjp(lambda tree: function(tree, *rest), first)[1]

    graph = jax.make_jaxpr(backward)(*arguments).jaxpr
    known = {id(each) for each in (*graph.invars, *graph.constvars)}
    made = {id(each): each.aval for each in graph.outvars if id(each) not in known and not isinstance(each, Literal)}
    costs: Any = jax.jit(jax.value_and_grad(function)).lower(*arguments).cost_analysis()
    return Passes(sum(each.size * each.dtype.itemsize for each in made.values()), int(costs["flops"]))
