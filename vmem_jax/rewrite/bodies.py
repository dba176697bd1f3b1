"""bodies: the loops of a step with the equations of each body in an order that holds few bytes.

A backward body that computes values again is a small training step of its own: part of the forward
pass, then a backward pass. XLA orders it as it likes, which for the layer of a decoder kept four
values of the feed-forward part alive during the backward pass of the attention. So a body is ordered
and fenced as a whole step is (`policy.order`, `core.fences`): what is computed again runs just before
its first use, and a weight gradient as soon as its cotangent exists. It costs no recomputation.
"""

from __future__ import annotations

from vmem_jax import jax_compat as compat
from vmem_jax.capture.capture import capture_body
from vmem_jax.capture.def_use import before_barriers
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.inputs import Inputs
from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.program import Phase
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var
from vmem_jax.policy.exact import Exact
from vmem_jax.rewrite.rewrite import rewrite
from vmem_jax.rewrite.stacked import copied_to_stacks


def with_ordered_bodies(flat: ClosedJaxpr, platform: str = "") -> ClosedJaxpr:
    """`flat` with the bodies of its backward loops, and of those in them, ordered and fenced. On a
    GPU the others compute what they stack once (`stacked`).

    Args:
      platform: as `capture` has it.
    """
    opened = compat.open_jaxpr(flat)
    eqns = [_ordered(eqn, platform) if eqn.primitive.name == "scan" else eqn for eqn in opened.eqns]
    parts = opened.constvars, compat.constants(flat), opened.invars, opened.outvars, eqns
    return compat.close(*parts, like=flat)


def _ordered(eqn: JaxprEqn, platform: str) -> JaxprEqn:
    inside = with_ordered_bodies(flatten(eqn.params["jaxpr"]), platform)
    inner = eqn.replace(params={**eqn.params, "jaxpr": inside})
    captured = capture_body(inner, step=Inputs(platform=platform))
    program = captured.program
    if not any(step.phase is Phase.BACKWARD for step in program.steps):
        if platform != "gpu":
            return eqn
        body = copied_to_stacks(captured, compat.scan_counts(eqn)[1])
        return eqn.replace(params={**eqn.params, "jaxpr": body})
    plan = Exact().plan(program, Costs("", (0.0,) * len(program.steps)), None)
    assert isinstance(plan, Plan), "without a budget there is always a plan"
    body = _counting(rewrite(captured, plan, body=True), *compat.scan_counts(eqn))
    return eqn.replace(params={**eqn.params, "jaxpr": body})


def _counting(body: ClosedJaxpr, consts: int, carry: int) -> ClosedJaxpr:
    """`body` that adds to the numbers which its loop carries in front of all barriers.

    XLA:GPU (0.11.2) takes a number that went through one before for that of the iteration, where it
    copies slices by it (`compiler.places`).
    """
    opened = compat.open_jaxpr(body)
    before = before_barriers(opened.eqns)
    made = (a if isinstance(a, Var) else None for a in opened.outvars[:carry])
    carried = dict(zip(made, opened.invars[consts : consts + carry], strict=True))
    eqns = list[JaxprEqn]()
    for eqn in opened.eqns:
        if eqn.primitive.name in ("add", "sub") and isinstance(eqn.invars[1], Literal):
            (first, second), [out] = eqn.invars, eqn.outvars
            number = before.get(first) if isinstance(first, Var) else None
            if number is not None and number is carried.get(out) and not out.aval.shape:
                eqn = eqn.replace(invars=[number, second])
        eqns.append(eqn)
    parts = opened.constvars, compat.constants(body), opened.invars, opened.outvars, eqns
    return compat.close(*parts, like=body)
