"""batch_arguments: finds the arguments that hold the batch."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from vmem_jax.capture.layouts import Layout
from vmem_jax.tracing.arguments import Signature


@dataclasses.dataclass(frozen=True)
class BatchArguments:
    """The batch among the arguments of a step.

    Attributes:
      size: the number of samples; 0 without a batch.
      layouts: for each argument, how the samples lie in it; None if it has none.
      why: why there is no batch, for people.
    """

    size: int
    layouts: tuple[Layout | None, ...]
    why: str = ""


def batch_arguments(
    sig: Signature,
    paths: Sequence[tuple],
    names: Sequence[str],
    avals: Sequence[jax.ShapeDtypeStruct],
    donated: Sequence[bool],
    out_avals: Sequence[Any],
) -> BatchArguments:
    """The arguments that hold the batch, along their first dimensions.

    They are those that `batch_argnums` and `batch_argnames` name. If these name none: among the
    arguments that are neither donated nor returned (by the shapes and dtypes of their leaves), those
    whose leaves agree on their first dimension, if there is only one such size. Scalars and PRNG keys
    do not count.

    Args:
      paths: the paths of the leaves: position or name, argument, path in that argument.
      names: the user's names of the leaves.
      out_avals: the avals of the results.

    Raises:
      ValueError: a named argument holds no array, or arrays of different sizes.
    """
    argument_of = [_argument(path) for path in paths]
    sized = [i for i, a in enumerate(avals) if _may_be_split(a)]
    named = [i for i in sized if _is_named(sig, argument_of[i])]
    if sig.batch_nums or sig.batch_names:
        if not named:
            raise ValueError(
                "what `batch_argnums` and `batch_argnames` name holds no array with a dimension."
            )
        other = next((i for i in named if avals[i].shape[0] != avals[named[0]].shape[0]), None)
        if other is not None:
            raise ValueError(
                f"the batch has {avals[named[0]].shape[0]} samples by `{names[named[0]]}`, but "
                f"{avals[other].shape[0]} by `{names[other]}`: the first dimensions of what "
                "`batch_argnums` and `batch_argnames` name must agree."
            )
        return _found(avals, named)
    groups: dict[Any, list[int]] = {}
    for i in sized:
        if not donated[i]:
            groups.setdefault(argument_of[i], []).append(i)
    returned = collections.Counter((tuple(o.shape), o.dtype) for o in out_avals)
    fresh = {
        argument: leaves
        for argument, leaves in groups.items()
        if collections.Counter((avals[i].shape, avals[i].dtype) for i in leaves) - returned
    }
    agreeing = [
        leaves
        for leaves in (fresh or groups).values()
        if len({avals[i].shape[0] for i in leaves}) == 1
    ]
    first = {avals[leaves[0]].shape[0]: names[leaves[0]] for leaves in agreeing}
    if len(first) == 1:
        return _found(avals, [i for leaves in agreeing for i in leaves])
    if first:
        which = ", ".join(f"{size} of `{name}`" for size, name in first.items())
        why = f"the first dimensions of the arguments disagree ({which})"
    else:
        why = "no argument that is not donated or returned has one size for its first dimensions"
    return BatchArguments(0, (None,) * len(avals), f"{why}; name the batch with `batch_argnums`")


def _found(avals: Sequence[jax.ShapeDtypeStruct], which: Sequence[int]) -> BatchArguments:
    layouts = tuple(Layout(0) if i in which else None for i in range(len(avals)))
    size = avals[which[0]].shape[0]
    why = "" if size > 1 else f"the batch has {size} sample{'s' if size != 1 else ''}"
    return BatchArguments(size, layouts, why)


def _may_be_split(aval: jax.ShapeDtypeStruct) -> bool:
    key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
    raw = str(aval.dtype) == "uint32" and aval.shape in ((2,), (4,))
    return bool(aval.shape) and not key and not raw


def _argument(path: tuple) -> tuple[Any, Any]:
    """Whether by position or by name, and which, of the path of a leaf."""
    which, key = (getattr(p, "key", getattr(p, "idx", None)) for p in path[:2])
    return which, key


def _is_named(sig: Signature, argument: tuple[Any, Any]) -> bool:
    which, key = argument
    return key in (sig.batch_nums if which == 0 else sig.batch_names)
