"""opened_loops: a scan whose body is a training step of its own, with that step in the open.

Gradient accumulation is such a scan, and so are several steps in one call. Forward and backward pass
are both in its body, so nothing is stacked between them, and the body is planned as a step is. It
stands between the boundaries that sub-batches have (`sub_batches`), once for all iterations:

    what stands in front of the scan
    begin: the iteration, what it reads of the above, what is carried into it, the stacks so far
        one iteration; its slices of the stacks put in place
    end: what it carries out, the stacks
    what stands behind the scan

So policies, `rewrite` and the predictions know nothing new. Layers in the body may be scans
themselves: pairs of loops in the open. `loop_levels` plans their stacks where the body stays closed,
too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.capture import Captured, Inputs, capture_body
from vmem_jax.capture.def_use import makers
from vmem_jax.capture.exact import apply_exact_rules
from vmem_jax.capture.flatten import drop_dead, flatten
from vmem_jax.capture.loop_levels import levels
from vmem_jax.capture.row_major import Spread
from vmem_jax.capture.shards import follow_shards
from vmem_jax.capture.sub_batches import SubBatches, begin_p, end_p
from vmem_jax.capture.whole_rows import AsWritten, with_layouts
from vmem_jax.core.body import body_nbytes
from vmem_jax.core.program import Phase
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var


def opened(captured: Captured) -> Captured | None:
    """`captured` with one of its loops opened: of those whose body is a training step the one that
    holds the most. None where there is none, on several devices, and with arguments in host memory.
    """
    flat, given = captured.separate, captured.inputs
    if captured.sub_batches or captured.shards.device_count > 1 or given.hosted:
        return None
    steps = (loop for loop in _loops(flat, given) if loop.is_step)
    found = max(steps, key=lambda each: each.nbytes, default=None)
    if found is None:
        return None
    params = compat.open_jaxpr(flat).eqns[found.at].params
    opener = _Opener(flat, found.at, found.body)
    made = captured.opened(opener.run(), SubBatches(params["length"], 1, unroll=params["unroll"]))
    written = dataclasses.replace(
        found.written,
        spread=opener.here(found.written.spread),
        turned=params["length"] * found.written.turned,
    )
    return dataclasses.replace(made, misread=captured.misread, written=written)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A scan.

    Attributes:
      at: its index.
      nbytes: what an iteration holds.
      body: it.
      written: of an iteration, as `Captured` has it.
      is_step: whether its body is a training step.
    """

    at: int
    nbytes: int
    body: ClosedJaxpr
    written: AsWritten
    is_step: bool


def buried(captured: Captured) -> JaxprEqn | None:
    """A loop whose body is a training step and that lies in the body of another loop, so that
    `opened` leaves it closed; None where there is none, and on several devices."""
    if captured.shards.device_count > 1:
        return None
    return _buried(captured.separate, captured.inputs, inside=False)


def _buried(flat: ClosedJaxpr, given: Inputs, inside: bool) -> JaxprEqn | None:
    """The same of `flat`, which may lie inside a loop itself."""
    for loop in _loops(flat, given):
        if not loop.is_step:
            found = _buried(loop.body, given, inside=True)
        else:
            found = compat.open_jaxpr(flat).eqns[loop.at] if inside else None
        if found is not None:
            return found
    return None


def _loops(flat: ClosedJaxpr, given: Inputs) -> Iterator[_Loop]:
    """The scans of `flat` of which none is the backward pass of another."""
    level = levels(flat, follow_shards(flat, given.shardings), given.platform)
    others = {i for pair in level.pairs for i in (pair.forward, pair.backward)}
    for i, eqn in enumerate(compat.open_jaxpr(flat).eqns):
        if eqn.primitive.name != "scan" or eqn.effects or i in others:
            continue
        body, written = with_layouts(flatten(eqn.params["jaxpr"]), given.platform)
        body = drop_dead(apply_exact_rules(body)[0])
        if compat.constants(body):
            continue  # the body of a scan has none
        own = eqn.replace(params={**eqn.params, "jaxpr": body})
        program = capture_body(own, step=given).program
        is_step = any(step.phase is Phase.BACKWARD for step in program.steps)
        yield _Loop(i, body_nbytes(program), body, written, is_step)


class _Opener:
    """`flat` with scan `at` opened, while it is put together."""

    def __init__(self, flat: ClosedJaxpr, at: int, body: ClosedJaxpr) -> None:
        self.flat, self.at, self.body = flat, at, compat.open_jaxpr(body)
        self.outer = compat.open_jaxpr(flat)
        self.scan: JaxprEqn = self.outer.eqns[at]
        self.made = makers(self.outer.eqns)
        self.entered: dict[Var, Var] = {}  # what the iteration reads, and its variable there
        self.inside: list[JaxprEqn] = []
        self.calls = Calls(self.inside.append)
        self.env: dict[Var, Atom] = {}

    def here(self, spread: Spread) -> Spread:
        """`spread`, of the body, by the variables of the iteration."""
        of = lambda values: frozenset(self.env[v] for v in values if v in self.env)
        return Spread(of(spread.gradients), of(spread.wholes))

    def run(self) -> ClosedJaxpr:
        scan, body = self.scan, self.body
        consts, carry = compat.scan_counts(scan)
        length, turned = scan.params["length"], scan.params["reverse"]
        iteration = compat.new_var(jax.typeof(jax.numpy.int32(0)))
        at: Atom = iteration
        if turned:
            [at] = self.calls.bind(lambda i: length - 1 - i, [iteration], scan)
        carried = [compat.new_var(v.aval) for v in body.invars[consts : consts + carry]]
        env = self.env
        env.update(zip(body.invars[consts : consts + carry], carried, strict=True))
        for v, a in zip(body.invars[:consts], scan.invars[:consts], strict=True):
            env[v] = self._there(a)
        slices = zip(body.invars[consts + carry :], scan.invars[consts + carry :], strict=True)
        for v, a in slices:
            [env[v]] = self.calls.bind(_cut, [self._there(a), at], scan, "cut")
        read = lambda a: a if isinstance(a, Literal) else env[a]
        for eqn in body.eqns:
            outs = [compat.new_var(v.aval) for v in eqn.outvars]
            nested = compat.nest_name_stack(eqn, scan)
            self.inside.append(nested.replace(invars=[*map(read, eqn.invars)], outvars=outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        stacks = [compat.new_var(v.aval) for v in scan.outvars[carry:]]
        now = [read(a) for a in body.outvars[:carry]]
        for stack, a in zip(stacks, body.outvars[carry:], strict=True):
            now += self.calls.bind(_put, [stack, read(a), at], scan, "put")
        begins = [iteration, *self.entered.values(), *carried, *stacks]
        start = [*scan.invars[consts : consts + carry]]
        params = {"avals": tuple(v.aval for v in begins), "started": carry}
        begin = compat.new_equation(begin_p, [*self.entered, *start], begins, params, scan)
        operands = [*now, *self.entered.values()]
        ends = [*scan.outvars]
        end = compat.new_equation(end_p, operands, ends, {"count": len(ends)}, scan)
        eqns = self.outer.eqns
        every = [*eqns[: self.at], begin, *self.inside, end, *eqns[self.at + 1 :]]
        parts = self.outer.constvars, compat.constants(self.flat), self.outer.invars
        return drop_dead(compat.close(*parts, self.outer.outvars, every, like=self.flat))

    def _there(self, a: Atom) -> Atom:
        """What stands in the iteration for `a`; an argument for itself."""
        if not isinstance(a, Var) or a not in self.made:
            return a
        return self.entered.setdefault(a, compat.new_var(a.aval))


def _cut(stack: Any, at: Any) -> jax.Array:
    """The slice of an iteration."""
    starts = (at, *(0,) * (stack.ndim - 1))
    sizes = (1, *stack.shape[1:])
    part = lax.dynamic_slice(stack, starts, sizes, allow_negative_indices=False)
    return lax.squeeze(part, [0])


def _put(stack: Any, part: Any, at: Any) -> jax.Array:
    """`stack` with the slice of an iteration."""
    starts = (at, *(0,) * (stack.ndim - 1))
    whole = lax.expand_dims(part, [0])
    return lax.dynamic_update_slice(stack, whole, starts, allow_negative_indices=False)
