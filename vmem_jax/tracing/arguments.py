"""arguments: turns a call of the user's function into a flat list of arrays, and back.

This module does so for pytrees; `flax.py` and `equinox.py` do it for modules that are updated in
place or that hold more than arrays.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from vmem_jax import jax_compat as compat


@dataclasses.dataclass(frozen=True)
class Signature:
    """The static, the donated and the batch arguments of the user's function, by position and
    name."""

    fun: Callable
    static_nums: frozenset[int]
    static_names: frozenset[str]
    donate_nums: frozenset[int]
    donate_names: frozenset[str]
    parameters: tuple[str, ...]
    batch_nums: frozenset[int] = frozenset()
    batch_names: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Call:
    """One call, ready to be traced or run.

    Attributes:
      fun: dynamic tree -> (output arrays, static part of the output), with the static arguments
        bound. It is called only to trace.
      tree: the dynamic arguments, a pytree of arrays.
      static: a hashable key; with the avals it selects the compiled step.
      donated: path in the dynamic tree -> whether that leaf is donated.
      finish: (output arrays, static part) -> the result of the user's function.
      plain: whether the leaves of (args, kwargs) are those of `tree`, and `finish` does nothing.
    """

    fun: Callable[[Any], tuple[Any, Any]]
    tree: Any
    static: Hashable
    donated: Callable[[tuple], bool]
    finish: Callable[[Any, Any], Any] = lambda out, _: out
    plain: bool = False


def signature(
    fun: Callable,
    static_argnums: int | Sequence[int],
    static_argnames: str | Sequence[str],
    donate_argnums: int | Sequence[int],
    donate_argnames: str | Sequence[str],
    batch_argnums: int | Sequence[int] = (),
    batch_argnames: str | Sequence[str] = (),
) -> Signature:
    """Resolves numbers and names against each other, as `jax.jit` does.

    Raises:
      ValueError: a number or a name is not one of the function's, or an argument is both static and
        donated.
    """
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    positional = [
        name
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    variadic_names = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def resolve(
        nums: int | Sequence[int], names: str | Sequence[str], role: str
    ) -> tuple[frozenset[int], frozenset[str]]:
        nums = _places(nums)
        names = (names,) if isinstance(names, str) else tuple(names or ())
        if parameters:
            for n in nums:
                if not variadic and not -len(positional) <= n < len(positional):
                    raise ValueError(
                        f"`{role}_argnums` has {n}, but `{_name(fun)}` has {len(positional)} "
                        f"positional arguments: {', '.join(positional)}."
                    )
            for name in names:
                if name not in parameters and not variadic_names:
                    raise ValueError(
                        f"`{role}_argnames` has {name!r}, which is no argument of `{_name(fun)}`: "
                        f"{', '.join(parameters)}."
                    )
        positions = {n % len(positional) if n < 0 and positional else n for n in nums}
        both = positions | {positional.index(name) for name in names if name in positional}
        all_names = {*names, *(positional[n] for n in positions if n < len(positional))}
        return frozenset(both), frozenset(all_names)

    static_nums, static_names = resolve(static_argnums, static_argnames, "static")
    donate_nums, donate_names = resolve(donate_argnums, donate_argnames, "donate")
    if static_nums & donate_nums or static_names & donate_names:
        twice = [*sorted(static_names & donate_names)] or [*map(str, static_nums & donate_nums)]
        raise ValueError(
            f"arguments {twice} are both static and donated; a static one has no array."
        )
    batch_nums, batch_names = resolve(batch_argnums, batch_argnames, "batch")
    if static_nums & batch_nums or static_names & batch_names:
        raise ValueError("arguments are both static and of the batch; a static one has no array.")
    return Signature(
        fun,
        static_nums,
        static_names,
        donate_nums,
        donate_names,
        tuple(positional),
        batch_nums,
        batch_names,
    )


def prepare_pytrees(sig: Signature, args: tuple, kwargs: dict[str, Any]) -> Call:
    """A call whose arguments are pytrees of arrays, apart from the static ones."""
    dynamic, named, static, rebuild = split_static(sig, args, kwargs)

    def fun(tree: Any) -> tuple[Any, None]:
        return rebuild(*tree), None

    return Call(
        fun,
        (dynamic, named),
        static,
        lambda path: is_donated(sig, dynamic, path),
        plain=not (sig.static_nums or sig.static_names),
    )


def split_static(
    sig: Signature, args: tuple, kwargs: dict[str, Any]
) -> tuple[dict[int, Any], dict[str, Any], Hashable, Callable]:
    """(dynamic by position, dynamic by name, static key, rebuild) of one call.

    Raises:
      ValueError: a static argument is not hashable.
    """
    dynamic = {i: a for i, a in enumerate(args) if i not in sig.static_nums}
    named = {k: v for k, v in kwargs.items() if k not in sig.static_names}
    fixed = {i: a for i, a in enumerate(args) if i in sig.static_nums}
    fixed_named = {k: v for k, v in kwargs.items() if k in sig.static_names}
    for key, value in (*fixed.items(), *fixed_named.items()):
        try:
            hash(value)
        except TypeError:
            name = (
                sig.parameters[key] if isinstance(key, int) and key < len(sig.parameters) else key
            )
            raise ValueError(
                f"static argument `{name}` of `{_name(sig.fun)}` is not hashable: "
                f"{type(value).__name__}. Static arguments choose the compiled step; use a tuple, a "
                "frozen dataclass, or pass it as an array."
            ) from None
    count = len(args)

    def rebuild(dynamic: dict[int, Any], named: dict[str, Any]) -> Any:
        full = [dynamic[i] if i in dynamic else fixed[i] for i in range(count)]
        return sig.fun(*full, **named, **fixed_named)

    static = (count, tuple(fixed.items()), tuple(sorted(fixed_named.items(), key=lambda i: i[0])))
    return dynamic, named, static, rebuild


def is_donated(sig: Signature, dynamic: dict[int, Any], path: tuple) -> bool:
    """Whether the leaf at `path` of (dynamic by position, by name) belongs to a donated argument."""
    which, key = path[0].idx, path[1].key
    return key in sig.donate_nums if which == 0 else key in sig.donate_names


def leaf_names(sig: Signature, tree: Any) -> list[str]:
    """The user's name of every leaf: "state.params['conv1']['kernel']"."""
    names = []
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        which, key = ([getattr(p, "key", getattr(p, "idx", None)) for p in path] + [None] * 2)[:2]
        if which == 0 and isinstance(key, int):
            key = sig.parameters[key] if key < len(sig.parameters) else f"args[{key}]"
        rest = path[2:]
        if rest and getattr(rest[-1], "name", "") == "value":  # of an NNX variable
            rest = rest[:-1]
        names.append(f"{key}{jax.tree_util.keystr(rest)}")
    return names


def aval_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype, weak type and sharding of an argument: array, tracer, shape or scalar."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if compat.is_tracer(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.aval.weak_type)
    if isinstance(leaf, jax.Array):
        committed = leaf.committed or len(leaf.devices()) > 1
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=leaf.sharding if committed else None,
            weak_type=leaf.aval.weak_type,
        )
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        abstract = jax.eval_shape(lambda x: x, leaf)
        weak = isinstance(leaf, int | float | complex) and not isinstance(leaf, np.generic)
        weak = weak and not isinstance(leaf, bool)
        return jax.ShapeDtypeStruct(abstract.shape, abstract.dtype, weak_type=weak)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    raise TypeError(
        f"an argument of type {type(leaf).__name__} is no array. Mark it with `static_argnums` or "
        "`static_argnames`, or pass arrays."
    )


def check_donation(names: Sequence[str], leaves: Sequence[Any], donated: Sequence[bool]) -> None:
    """Raises ValueError if a donated array is also handed over as another argument."""
    first: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, jax.Array) or compat.is_tracer(leaf):
            continue
        other = first.setdefault(id(leaf), i)
        if other != i and (donated[i] or donated[other]):
            raise ValueError(
                f"`{names[other]}` and `{names[i]}` are the same array and it is donated: its "
                "memory can be given up only once. Pass a copy, or donate neither."
            )


def _places(nums: Any) -> tuple[int, ...]:
    """Positions, given as one integer, as several, or as an array of them; none for None."""
    if nums is None:
        return ()
    try:
        return (operator.index(nums),)
    except TypeError:  # `jax.jit` tells one from several so, too
        return tuple(map(operator.index, nums))


def _name(fun: Callable) -> str:
    return getattr(fun, "__name__", type(fun).__name__)
