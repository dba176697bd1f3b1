"""masks: the cotangents behind an activation that exist in memory.

What a ReLU's gradient lets through, `select(mask, cotangent, 0)`, is cheap to compute, but a norm
reads it for its sums and behind them, and so do the two norms that a residual join adds. XLA:GPU
computes it in the first reduction that reads it, which writes it, so the mask's source and the
cotangent are free from there on. A barrier in between, on what either is computed from, would make
two of it and keep both. The same holds of the gradient of a ReLU that is clipped, and of a SiLU or
GELU.
"""

from __future__ import annotations

from collections.abc import Iterator

from vmem_jax.capture.fused_reads import Values
from vmem_jax.capture.primitives import Class, nbytes
from vmem_jax.capture.ties import COMPARISONS
from vmem_jax.jax_compat import Atom, JaxprEqn, Var

_MOST_EPOCHS = 8
"""Heavy kernels between the first reader and the last, at most: beyond, holding it costs more than
reading once what it is made of."""

_CURVES = frozenset(("logistic", "tanh", "erf"))
"""What SiLU and GELU are made of."""

_SUMS = frozenset(("add", "add_any"))
"""What the gradient of a SiLU or GELU ends with."""

_ENDS = _SUMS | {"select_n"}
"""What an activation's gradient ends with."""

_MOST_OF_ACTIVATION = 32
"""Equations of an activation's gradient, with what it computes again, at most: of a SiLU behind a
batch norm 13, of a GELU 25."""


def masked_cotangents(values: Values) -> Iterator[tuple[Var, bool]]:
    """What an activation's gradient makes of a heavy kernel's result and several fusible kernels
    read, and whether a kernel of its own makes it: where they stand in front of another heavy kernel
    and behind it, or read it in another shape, as a group norm does. What a heavy kernel reads exists
    anyway."""
    for i, eqn in enumerate(values.eqns):
        if values.classes[i] is not Class.FUSIBLE or eqn.primitive.name not in _ENDS:
            continue
        [out] = eqn.outvars
        readers = {*_readers(out, values)}
        epochs = {values.epoch[r] for r in readers}
        if len(readers) < 2 or max(epochs) - min(epochs) > _MOST_EPOCHS:
            continue
        far = len(epochs) > 1
        fusible = all(values.classes[r] is not Class.HEAVY for r in readers)
        is_masked = (fusible or far) and _is_masked(eqn, values)
        if is_masked or (fusible and _is_of_curve(i, values)):
            yield out, far or _is_reshaped(out, values)


def _is_masked(eqn: JaxprEqn, values: Values) -> bool:
    """Whether `eqn` selects from the result of a heavy kernel by comparisons of values as large."""
    if eqn.primitive.name != "select_n":
        return False
    which, *cases = eqn.invars
    size = nbytes(eqn.outvars[0].aval)
    source = any(
        values.nbytes.get(a, 0) >= size
        for compared in _comparisons(which, values)
        for a in values.operands[compared]
    )
    made = [values.maker[a] for a in cases if isinstance(a, Var) and a in values.maker]
    return source and any(values.classes[m] is Class.HEAVY for m in made)


def _is_reshaped(v: Var, values: Values) -> bool:
    """Whether something reads `v`, or `v` in another type, in another shape."""
    for i in values.readers.get(v, ()):
        if values.eqns[i].primitive.name == "reshape":
            return True
        is_same = values.eqns[i].primitive.name == "convert_element_type"
        if is_same and _is_reshaped(values.eqns[i].outvars[0], values):
            return True
    return False


def _comparisons(which: Atom, values: Values) -> Iterator[int]:
    """The comparisons that say `which`, alone or together."""
    maker = values.maker.get(which) if isinstance(which, Var) else None
    if maker is None:
        return
    if values.eqns[maker].primitive.name in COMPARISONS:
        yield maker
    elif values.eqns[maker].primitive.name in ("and", "or", "not"):
        for a in values.operands[maker]:
            yield from _comparisons(a, values)


def _is_of_curve(i: int, values: Values) -> bool:
    """Whether equation `i` makes a sum of a heavy kernel's result that nothing else reads, element by
    element, and of what a curve says."""
    if values.eqns[i].primitive.name not in _SUMS:
        return False
    [out] = values.eqns[i].outvars
    size = lambda v: getattr(v.aval, "size", 0)  # JAX declares it for arrays alone
    inside, heavy, curved, stack = {i}, set[Var](), False, [i]
    while stack and len(inside) <= _MOST_OF_ACTIVATION:
        for a in values.operands[stack.pop()]:
            maker = values.maker.get(a)
            if maker is None or size(a) != size(out):
                continue
            if values.classes[maker] is Class.HEAVY:
                heavy.add(a)
            elif values.classes[maker] is Class.FUSIBLE and maker not in inside:
                curved |= values.eqns[maker].primitive.name in _CURVES
                inside.add(maker)
                stack.append(maker)
    return curved and not stack and any(inside.issuperset(values.readers[a]) for a in heavy)


def _readers(v: Var, values: Values) -> Iterator[int]:
    """The equations that read `v`, or `v` in another type or shape."""
    for i in values.readers.get(v, ()):
        eqn = values.eqns[i]
        is_same = eqn.primitive.name == "convert_element_type" or values.classes[i] is Class.VIEW
        if is_same:
            yield from _readers(eqn.outvars[0], values)
        else:
            yield i
