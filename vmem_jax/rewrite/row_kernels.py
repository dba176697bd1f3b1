"""row_kernels: a step with one kernel for what is made of a softmax's rows."""

from __future__ import annotations

from collections.abc import Sequence

from vmem_jax import jax_compat as compat
from vmem_jax.capture.row_kernels import RowKernel, find_row_kernels
from vmem_jax.conv.reduced_rows import ReducedRows, reduced_rows_p
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn
from vmem_jax.rewrite.carried import with_equations
from vmem_jax.rewrite.passes import replaced


def with_row_kernels(flats: Sequence[ClosedJaxpr]) -> tuple[Sequence[ClosedJaxpr], int]:
    """`flats`, which have the same equations on other shapes, with the kernels that the first of them
    can have, and how many these are."""
    eqns = compat.open_jaxpr(flats[0]).eqns
    found = [each for each in find_row_kernels(flats[0]) if _describe(each, eqns).tiling]
    return replaced(flats, found, _replacing)


def _replacing(flat: ClosedJaxpr, found: Sequence[RowKernel]) -> ClosedJaxpr:
    eqns = compat.open_jaxpr(flat).eqns
    return with_equations(flat, [(each.equations[-1], _equation(each, eqns)) for each in found])


def _equation(each: RowKernel, eqns: Sequence[JaxprEqn]) -> JaxprEqn:
    """That of `each`, with the name and source line of the last equation that it stands for."""
    last, params = eqns[each.equations[-1]], {"reduced": _describe(each, eqns)}
    return compat.new_equation(reduced_rows_p, [*each.operands], [each.made], params, like=last)


def _describe(each: RowKernel, eqns: Sequence[JaxprEqn]) -> ReducedRows:
    """What the equation of `each` computes."""
    return ReducedRows(tuple(eqns[i] for i in each.equations), each.operands, each.made)
