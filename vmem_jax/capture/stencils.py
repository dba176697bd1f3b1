"""stencils: values of a neighbourhood that are themselves read at several places of another value.

The index of an overlapping max-pool is a scan over the window of each output, and the gradient reads
it once for each window that an element lies in (`capture.overlap`). In one kernel the scan would be
done that many times, so XLA makes the index in a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vmem_jax.capture.primitives import Class
from vmem_jax.jax_compat import JaxprEqn, Var


def made_apart(
    eqns: Sequence[JaxprEqn], classes: Sequence[Class], readers: Mapping[Var, Sequence[int]]
) -> Iterator[int]:
    """The fusible equations whose result exists since it is computed from several slices of a value
    and read through several pads.

    Args:
      classes: of each equation.
      readers: for each value the equations that read it.
    """
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    for i, eqn in enumerate(eqns):
        if classes[i] is not Class.FUSIBLE or len(eqn.outvars) != 1:
            continue
        pads = [j for j in readers.get(eqn.outvars[0], ()) if eqns[j].primitive.name == "pad"]
        if len(pads) > 1 and _reads_slices(i, eqns, classes, maker):
            yield i


def _reads_slices(
    root: int, eqns: Sequence[JaxprEqn], classes: Sequence[Class], maker: Mapping[Var, int]
) -> bool:
    """Whether what ends in equation `root` reads one value through several slices."""
    stack, seen = [root], {root}
    sliced: set[Var] = set()
    while stack:
        for a in eqns[stack.pop()].invars:
            i = maker.get(a) if isinstance(a, Var) else None
            if i is None or i in seen or classes[i] not in (Class.FUSIBLE, Class.VIEW):
                continue
            if eqns[i].primitive.name == "slice":
                whole = eqns[i].invars[0]
                if whole in sliced:
                    return True
                sliced.add(whole)
            seen.add(i)
            stack.append(i)
    return False
