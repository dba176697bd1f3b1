"""stacked: products that a loop stacks and that its iteration reads as well, computed once.

XLA:GPU lets a library write its result into the stack, where the slice is, and where the iteration
itself reads the result too, it runs the library twice: once into the stack, once beside it (0.11.2).
A barrier between the result and the stack leaves one product and a copy.
"""

from __future__ import annotations

import math
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.capture import Captured
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Var

DEEP = 512
"""Terms that a product sums for one element of its result, from which on it takes longer than a copy
of the result: 365 on an H200 (748 bfloat16 TFLOP/s and 4.1 TB/s), 507 on an H100."""

_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))


def copied_to_stacks(body: Captured, carry: int) -> ClosedJaxpr:
    """`body`, an iteration of a loop, with a barrier before the stack of each product that it reads
    as well.

    Args:
      carry: how many of its results are carried; the others are stacked.
    """
    opened, program = compat.open_jaxpr(body.flat), body.program
    index = {v: b for b, v in enumerate(body.variables)}
    outs = [*opened.outvars]
    equations: list[JaxprEqn] = [*opened.eqns]
    calls = Calls(equations.append)
    for n, a in enumerate(outs[carry:], carry):
        if not isinstance(a, Var) or a not in index or program.producer[index[a]] < 0:
            continue
        b, step = index[a], program.steps[program.producer[index[a]]]
        is_read = program.readers[b] or opened.outvars.count(a) > 1
        aval: Any = a.aval
        terms = step.flops // (2 * max(math.prod(aval.shape), 1))
        if step.op in _PRODUCTS and terms >= DEEP and is_read:
            [outs[n]] = calls.fence([a], opened.eqns[step.equations[0]])
    parts = opened.constvars, compat.constants(body.flat), opened.invars, outs, equations
    return compat.close(*parts, like=body.flat)
