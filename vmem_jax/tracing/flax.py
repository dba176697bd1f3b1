"""What Flax NNX users need beyond `jit`: modules and optimisers as arguments, updated in place.

A call is made pure as `nnx.jit` does it: the graph of the arguments is split into its definition
(static) and its state (arrays), merged inside the step, and split again with the result; the state
that comes back is written into the caller's own objects. An array of theirs that the step leaves as
it is does not come back, unless it is donated: it would be a copy in memory. An `nnx.State` is a
pytree, as for `jax.jit`. Linen needs nothing: its states are pytrees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from flax import nnx

from vmem_jax.tracing.arguments import Call, Signature, split_static


def has_modules(tree: Any) -> bool:
    """Whether `tree` holds NNX modules, optimisers, metrics, rngs or variables."""
    return bool(_modules(tree))


def _modules(tree: Any) -> list[Any]:
    """The outermost NNX objects in `tree` that are in no `nnx.State`, in order."""
    is_leaf = lambda x: _is_module(x) or isinstance(x, nnx.State)
    return [x for x in jax.tree.leaves(tree, is_leaf=is_leaf) if _is_module(x)]


def _is_module(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def prepare(sig: Signature, args: tuple, kwargs: dict[str, Any]) -> Call:
    """A call with NNX objects among its arguments."""
    dynamic, named, static, rebuild = split_static(sig, args, kwargs)
    graph, state = nnx.split(_with_shapes_as_variables((dynamic, named)))

    paths, _ = jax.tree.flatten_with_path(state)
    kept = [not _is_donated(sig, path) for path, _ in paths]

    def fun(state: Any) -> tuple[list[Any], _Results]:
        arrays = jax.tree.leaves(state)  # before the step: it may write into variables of `state`
        given = {id(x): i for i, x in enumerate(arrays) if kept[i]}
        inside = _without_shape_variables(nnx.merge(graph, state))
        out = rebuild(*inside)
        out_graph, out_state = nnx.split((_modules(inside), out))
        leaves, tree = jax.tree.flatten_with_path(out_state)
        of = lambda path, x: given.get(id(x)) if path[0].key == 0 else None
        unchanged = tuple(of(*leaf) for leaf in leaves)
        new = [x for (_, x), i in zip(leaves, unchanged, strict=True) if i is None]
        return new, _Results(out_graph, tree, unchanged)

    def finish(new: list[Any], results: _Results) -> Any:
        given, rest = jax.tree.leaves(state), iter(new)
        leaves = [next(rest) if i is None else given[i] for i in results.unchanged]
        modules, out = nnx.merge(results.graph, jax.tree.unflatten(results.tree, leaves))
        for mine, now in zip(_modules((dynamic, named)), modules, strict=True):
            # in a dict, since a lone variable has no path of its own
            nnx.update({"it": mine}, nnx.state({"it": now}))
        return out

    return Call(fun, state, (graph, static), lambda path: _is_donated(sig, path), finish)


class _Results(NamedTuple):
    """What comes back from a step, but for its arrays.

    Attributes:
      graph, tree: of (the caller's objects, the result of the user's function): NNX's definition, and
        the tree of their arrays.
      unchanged: for each of these arrays, the index among the arguments of the one that it is; None
        for a new one.
    """

    graph: Any
    tree: Any
    unchanged: tuple[int | None, ...]


class _Shape(nnx.Variable):
    """The shape of an array that is not there: NNX splits arrays and variables, not shapes."""


def _with_shapes_as_variables(tree: Any) -> Any:
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    is_leaf = lambda x: is_shape(x) or _is_module(x)
    return jax.tree.map(lambda x: _Shape(x) if is_shape(x) else x, tree, is_leaf=is_leaf)


def _without_shape_variables(tree: Any) -> Any:
    unwrap = lambda x: x.get_value() if isinstance(x, _Shape) else x
    return jax.tree.map(unwrap, tree, is_leaf=_is_module)


def _is_donated(sig: Signature, path: tuple) -> bool:
    """Paths of the split state begin with (0 or 1, position or name) of the argument."""
    keys = [getattr(p, "key", getattr(p, "idx", None)) for p in path[:2]]
    if keys[0] == 0:
        return keys[1] in sig.donate_nums
    return keys[1] in sig.donate_names
