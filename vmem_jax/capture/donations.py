"""donations: which results of a flat jaxpr take over the memory of its donated arguments."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vmem_jax import jax_compat as compat
from vmem_jax.jax_compat import ClosedJaxpr, Var


def hosted_values(flat: ClosedJaxpr, pairs: Sequence[tuple[int, int | None]]) -> set[Var]:
    """The values in host memory. A result there is made by the step, or such an argument itself.

    Args:
      pairs: for each argument there its index, and that of the output that goes there again.
    """
    opened = compat.open_jaxpr(flat)
    inputs = {*opened.invars, *opened.constvars}
    results = [opened.outvars[o] for _, o in pairs if o is not None]
    found = {opened.invars[i] for i, _ in pairs}
    return found | {v for v in results if isinstance(v, Var) and v not in inputs}


def aliases(
    flat: ClosedJaxpr, donated: Sequence[bool], hosted: Collection[Var]
) -> tuple[tuple[Var, Var], ...]:
    """Pairs donated arguments with results of the same shape and dtype, in order, as jit does.

    Args:
      donated: for each argument whether the caller gives it up.
      hosted: values in host memory, which are in no pair.
    """
    opened = compat.open_jaxpr(flat)
    free: dict[str, list[Var]] = {}
    for v in dict.fromkeys(a for a in opened.outvars if isinstance(a, Var) and a not in hosted):
        free.setdefault(v.aval.str_short(), []).append(v)
    pairs = []
    for v, gives in zip(opened.invars, donated, strict=False):
        fitting = free.get(v.aval.str_short(), []) if gives and v not in hosted else []
        if fitting:
            pairs.append((v, v) if v in fitting else (v, fitting[0]))
            fitting.remove(pairs[-1][1])
    return tuple(pairs)
