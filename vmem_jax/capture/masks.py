"""masks: the cotangents behind a ReLU that exist in memory.

What a ReLU's gradient lets through, `select(mask, cotangent, 0)`, is cheap to compute, but a norm
reads it for its sums and behind them, and so do the two norms that a residual join adds. XLA:GPU
computes it in the first reduction that reads it, which writes it, so the mask's source and the
cotangent are free from there on. A barrier in between, on what either is computed from, would make
two of it and keep both.
"""

from __future__ import annotations

from collections.abc import Iterator

from vmem_jax.capture.fused_reads import Values
from vmem_jax.capture.primitives import Class, nbytes
from vmem_jax.capture.ties import COMPARISONS
from vmem_jax.jax_compat import JaxprEqn, Var

_MOST_EPOCHS = 8
"""Heavy kernels between the first reader and the last, at most: beyond, holding it costs more than
reading once what it is made of."""


def masked_cotangents(values: Values) -> Iterator[tuple[Var, bool]]:
    """What a ReLU's gradient makes of a heavy kernel's result and several fusible kernels read, and
    whether they stand in front of another heavy kernel and behind it. What a heavy kernel reads
    exists anyway."""
    for i, eqn in enumerate(values.eqns):
        if values.classes[i] is Class.FUSIBLE and _is_masked(eqn, values):
            readers = {*_readers(eqn.outvars[0], values)}
            epochs = {values.epoch[r] for r in readers}
            apart = len(epochs) > 1
            near = len(readers) > 1 and max(epochs) - min(epochs) <= _MOST_EPOCHS
            if near and (apart or all(values.classes[r] is not Class.HEAVY for r in readers)):
                yield eqn.outvars[0], apart


def _is_masked(eqn: JaxprEqn, values: Values) -> bool:
    """Whether `eqn` selects from the result of a heavy kernel by a comparison of a value as large."""
    if eqn.primitive.name != "select_n":
        return False
    which, *cases = eqn.invars
    maker = values.maker.get(which) if isinstance(which, Var) else None
    if maker is None or values.eqns[maker].primitive.name not in COMPARISONS:
        return False
    size = nbytes(eqn.outvars[0].aval)
    source = any(values.nbytes.get(a, 0) >= size for a in values.operands[maker])
    made = [values.maker[a] for a in cases if isinstance(a, Var) and a in values.maker]
    return source and any(values.classes[m] is Class.HEAVY for m in made)


def _readers(v: Var, values: Values) -> Iterator[int]:
    """The equations that read `v`, or `v` in another type or shape."""
    for i in values.readers.get(v, ()):
        eqn = values.eqns[i]
        is_same = eqn.primitive.name == "convert_element_type" or values.classes[i] is Class.VIEW
        if is_same:
            yield from _readers(eqn.outvars[0], values)
        else:
            yield i
