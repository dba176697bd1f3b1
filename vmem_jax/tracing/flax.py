"""What Flax NNX users need beyond `jit`: modules and optimisers as arguments, updated in place.

A call is made pure as `nnx.jit` does it: the graph of the arguments is split into its definition
(static) and its state (arrays), merged inside the step, and split again with the result; the state
that comes back is written into the caller's own objects. Linen needs nothing: its states are
pytrees.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from vmem_jax.tracing.arguments import Call, Signature, split_static


def has_modules(tree: Any) -> bool:
    """Whether `tree` holds NNX modules, optimisers, metrics, rngs or variables."""
    return bool(_modules(tree))


def _modules(tree: Any) -> list[Any]:
    """The outermost NNX objects in `tree`, in order."""
    is_module = lambda x: isinstance(x, nnx.Object | nnx.Variable)
    return [x for x in jax.tree.leaves(tree, is_leaf=is_module) if is_module(x)]


def prepare(sig: Signature, args: tuple, kwargs: dict[str, Any]) -> Call:
    """A call with NNX objects among its arguments."""
    dynamic, named, static, rebuild = split_static(sig, args, kwargs)
    graph, state = nnx.split(_with_shapes_as_variables((dynamic, named)))

    def fun(state: Any) -> tuple[Any, Any]:
        inside = _without_shape_variables(nnx.merge(graph, state))
        out = rebuild(*inside)
        out_graph, out_state = nnx.split((inside, out))
        return out_state, out_graph

    def finish(out_state: Any, out_graph: Any) -> Any:
        inside, out = nnx.merge(out_graph, out_state)
        for mine, new in zip(_modules((dynamic, named)), _modules(inside), strict=True):
            # in a dict, since a lone variable has no path of its own
            nnx.update({"it": mine}, nnx.state({"it": new}))
        return out

    return Call(fun, state, (graph, static), lambda path: _is_donated(sig, path), finish)


class _Shape(nnx.Variable):
    """The shape of an array that is not there: NNX splits arrays and variables, not shapes."""


def _with_shapes_as_variables(tree: Any) -> Any:
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    is_leaf = lambda x: is_shape(x) or isinstance(x, nnx.Object | nnx.Variable)
    return jax.tree.map(lambda x: _Shape(x) if is_shape(x) else x, tree, is_leaf=is_leaf)


def _without_shape_variables(tree: Any) -> Any:
    is_leaf = lambda x: isinstance(x, nnx.Object | nnx.Variable)
    unwrap = lambda x: x.get_value() if isinstance(x, _Shape) else x
    return jax.tree.map(unwrap, tree, is_leaf=is_leaf)


def _is_donated(sig: Signature, path: tuple) -> bool:
    """Paths of the split state begin with (0 or 1, position or name) of the argument."""
    keys = [getattr(p, "key", getattr(p, "idx", None)) for p in path[:2]]
    if keys[0] == 0:
        return keys[1] in sig.donate_nums
    return keys[1] in sig.donate_names
