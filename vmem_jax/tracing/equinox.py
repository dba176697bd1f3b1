"""What Equinox users need beyond `jit`: modules that hold arrays and other things.

As in `eqx.filter_jit`, arrays are traced and everything else in the arguments (activation functions,
rates, flags) is static; outputs may hold both too.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax

from vmem_jax.tracing.arguments import Call, Signature, is_donated, split_static


def has_modules(tree: Any) -> bool:
    """Whether `tree` holds Equinox modules."""
    found = False

    def look(x: Any) -> bool:
        nonlocal found
        is_module = isinstance(x, eqx.Module)
        found = found or is_module
        return is_module

    jax.tree.leaves(tree, is_leaf=look)
    return found


def prepare(sig: Signature, args: tuple, kwargs: dict[str, Any]) -> Call:
    """A call with Equinox modules among its arguments."""
    dynamic, named, static, rebuild = split_static(sig, args, kwargs)
    arrays, rest = eqx.partition((dynamic, named), _is_array)
    leaves, tree = jax.tree.flatten(rest)
    for leaf in leaves:
        try:
            hash(leaf)
        except TypeError:
            raise ValueError(
                f"a {type(leaf).__name__} in the arguments is neither an array nor hashable; as in "
                "`eqx.filter_jit`, whatever is no array is static."
            ) from None

    def fun(arrays: Any) -> tuple[Any, Any]:
        out = rebuild(*eqx.combine(arrays, rest))
        return eqx.partition(out, _is_array)

    return Call(
        fun,
        arrays,
        (static, tuple(leaves), tree),
        lambda path: is_donated(sig, dynamic, path),
        lambda out, rest: eqx.combine(out, rest),
    )


def _is_array(x: Any) -> bool:
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
