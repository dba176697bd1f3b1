"""counted_masks: masks that are counted, such as a causal one, for each row of a softmax by itself.

`jnp.tril` counts the rows and columns of one matrix, which is then spread over samples and heads. XLA
makes tiles of the rows that share a row of it (`capture.softmax`): those of all heads, which lie far
apart. So what is computed of counts and numbers alone is counted over the whole array: the kernel of
the softmax computes it, and shares nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.editor import Editor, Equation, spliced
from vmem_jax.capture.primitives import ELEMENTWISE, Class, class_of
from vmem_jax.capture.shards import is_typed
from vmem_jax.capture.softmax import fits, maxima
from vmem_jax.jax_compat import Atom, ClosedJaxpr, Literal, Var

_MOST_EQUATIONS = 64
"""Of a mask, at most: that of `jnp.tril` has six."""


def with_counted_masks(flat: ClosedJaxpr, platform: str) -> ClosedJaxpr:
    """`flat` whose softmaxes read masks that are counted for the whole array.

    Args:
      platform: that it is compiled for; only on "gpu" something changes.
    """
    if platform != "gpu":
        return flat
    eqns = compat.open_jaxpr(flat).eqns
    maker = {v: eqn for eqn in eqns for v in eqn.outvars}
    softmaxes = [eqn for eqn in eqns if _takes_counts(eqn, maker)]
    if not softmaxes:
        return flat
    editor = Editor(flat)
    for i in sorted({i for eqn in softmaxes for i in _spread_behind(eqn, editor)}):
        spread = editor.eqns[i]
        [out] = spread.outvars
        counted = _Counted(out.aval.shape, maker)
        if counted.knows(out):
            made = functools.partial(counted.value, out)
            editor.replaced[i] = spliced(made, [], spread, out)[0]
    return editor.edited() if editor.replaced else flat


def _takes_counts(eqn: Equation, maker: Mapping[Var, Equation]) -> bool:
    """Whether `eqn` makes the exponentials of rows that XLA reduces at once with a counted mask."""
    if maxima(eqn, maker) is None or is_typed(eqn.outvars[0]):
        return False
    return fits(eqn.outvars[0].aval.shape, counted=True)


def _spread_behind(exponentials: Equation, editor: Editor) -> Iterator[int]:
    """The broadcasts of several numbers, each for several rows, that rows of `exponentials` are made
    of."""
    [out] = exponentials.outvars
    pending, seen = [*editor.producers(exponentials)], set[int]()
    while pending:
        i = pending.pop()
        eqn = editor.eqns[i]
        if i in seen or eqn.outvars[0].aval.size != out.aval.size:
            continue
        seen.add(i)
        if eqn.primitive.name == "broadcast_in_dim":
            if eqn.invars[0].aval.size > 1:
                yield i
        elif eqn.primitive.name in ELEMENTWISE or class_of(eqn) is Class.VIEW:
            pending += editor.producers(eqn)


def counted_values(eqns: Iterable[Equation]) -> set[Var]:
    """What is computed of counts and numbers alone: beside what moves memory it takes no time."""
    found: set[Var] = set()
    for eqn in eqns:
        if _may_count(eqn) and found.issuperset(
            a for a in eqn.invars if not isinstance(a, Literal)
        ):
            found.update(eqn.outvars)
    return found


def _may_count(eqn: Equation) -> bool:
    """Whether `eqn` counts, or makes counts of counts."""
    return eqn.primitive.name in ("iota", *ELEMENTWISE) or _places(eqn) is not None


class _Counted:
    """What is computed of counts and numbers, for each element of an array.

    Args:
      shape: of the array.
      maker: the equation that makes each value.
    """

    def __init__(self, shape: Sequence[int], maker: Mapping[Var, Equation]) -> None:
        self.shape, self.maker = (*shape,), maker
        self.known: dict[Var, bool] = {}
        self.values: dict[tuple[Var, tuple[int, ...]], jax.Array] = {}

    def knows(self, atom: Atom) -> bool:
        """Whether `atom` is computed of counts and numbers alone."""
        if isinstance(atom, Literal):
            return True
        if atom not in self.known:
            self.known[atom] = len(self.known) < _MOST_EQUATIONS and self._is_counted(atom)
        return self.known[atom]

    def _is_counted(self, v: Var) -> bool:
        eqn = self.maker.get(v)
        return eqn is not None and _may_count(eqn) and all(map(self.knows, eqn.invars))

    def value(self, atom: Atom, at: Sequence[int] | None = None) -> jax.Array:
        """`atom`, which it knows, spread over the array.

        Args:
          at: the dimension of the array that each of its own is; by default they are the same.
        """
        aval: Any = atom.aval
        if isinstance(atom, Literal):
            return lax.full(self.shape, atom.val, aval.dtype)
        key = atom, (*(range(len(self.shape)) if at is None else at),)
        if key not in self.values:
            self.values[key] = self._value(*key)
        return self.values[key]

    def _value(self, v: Var, at: tuple[int, ...]) -> jax.Array:
        aval: Any = v.aval
        eqn = self.maker[v]
        if eqn.primitive.name == "iota":
            d = eqn.params["dimension"]
            if aval.shape[d] == 1:  # it may be repeated
                return lax.full(self.shape, 0, aval.dtype)
            return lax.broadcasted_iota(aval.dtype, self.shape, at[d])
        if (places := _places(eqn)) is not None:
            return self.value(eqn.invars[0], [at[d] for d in places])
        operands = [self.value(a, at[len(at) - len(a.aval.shape) :]) for a in eqn.invars]
        return eqn.primitive.bind(*operands, **eqn.params)


def _places(eqn: Equation) -> list[int] | None:
    """The dimension of its result that each dimension of the operand of `eqn` is, where it only adds
    or removes dimensions, of one element or by repeating; None of anything else. Of one element it is
    any."""
    if eqn.primitive.name == "broadcast_in_dim":
        return [*eqn.params["broadcast_dimensions"]]
    if eqn.primitive.name not in ("reshape", "expand_dims", "squeeze"):
        return None
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    long = [d for d, n in enumerate(after) if n > 1]
    if [n for n in before if n > 1] != [after[d] for d in long]:
        return None
    left = iter(long)
    return [next(left) if n > 1 else 0 for n in before]
