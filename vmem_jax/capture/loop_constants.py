"""loop_constants: what is the same in every iteration of a loop, and made of less in its body.

JAX puts before a scan what does not depend on its iterations, at the size that they read it in: a
causal mask for every head of every sample, a number for every element. There it is throughout the
loop. XLA itself makes a broadcast number in the body again. Here all is that takes less to make than
to read, by operations that kernels of the body compute where they read it.
"""

from __future__ import annotations

from collections.abc import Sequence

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.def_use import makers
from vmem_jax.capture.flatten import drop_dead
from vmem_jax.capture.primitives import Class, class_of, nbytes
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var

_TRANSCENDENTAL = frozenset(
    "cos sin tan exp exp2 expm1 log log1p pow tanh logistic erf erf_inv lgamma digamma cbrt".split()
)
"""Costs more than reading the result again."""


class Prices:
    """Of values the bytes of what they are made of, where that is less.

    Args:
      eqns: of a flat jaxpr.
      before: only what is made before this one of them can be made again.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], before: int | None = None) -> None:
        self.eqns = eqns[:before]
        self.maker = makers(self.eqns)
        self._prices: dict[Var, int | None] = {}

    def of(self, v: Var) -> int | None:
        """Bytes of what `v` is made of, if it is larger and can be made in the body; else None."""
        if v not in self._prices:
            i = self.maker.get(v)
            self._prices[v] = None if i is None else self._made(self.eqns[i])
        return self._prices[v]

    def _made(self, eqn: JaxprEqn) -> int | None:
        cheap = class_of(eqn) in (Class.VIEW, Class.FUSIBLE)
        if not cheap or eqn.primitive.name in _TRANSCENDENTAL:
            return None
        price = 0
        for a in {a for a in eqn.invars if isinstance(a, Var)}:
            own = self.of(a)
            price += nbytes(a.aval) if own is None else own
        return price if price < sum(nbytes(v.aval) for v in eqn.outvars) else None


class MadeInBody:
    """What stands in a body for values outside of its loop, which are the same in every iteration.

    Args:
      prices: of these values.
      equations: of the body; those that make a value there are added.

    Attributes:
      constants: of the body, each with the value outside.
    """

    def __init__(self, prices: Prices, equations: list[JaxprEqn]) -> None:
        self.prices, self.equations = prices, equations
        self.constants: dict[Var, Atom] = {}
        self._known: dict[Var, Atom] = {}  # outside -> in the body

    def read(self, a: Atom) -> Atom:
        """What stands for `a`: a constant, or what is made of less."""
        if isinstance(a, Literal):
            return a
        if a in self._known:
            return self._known[a]
        if self.prices.of(a) is None:
            self._known[a] = own = compat.new_var(a.aval)
            self.constants[own] = a
            return own
        eqn = self.prices.eqns[self.prices.maker[a]]
        invars = [*map(self.read, eqn.invars)]
        outs = [compat.new_var(v.aval) for v in eqn.outvars]
        self.equations.append(eqn.replace(invars=invars, outvars=outs))
        self._known.update(zip(eqn.outvars, outs, strict=True))
        return self._known[a]


def with_constants_in_loops(flat: ClosedJaxpr) -> ClosedJaxpr:
    """`flat`, whose scans make in their bodies what is made of less and read by fused kernels; what
    is made of nothing (a number, an iota) whatever reads it."""
    opened = compat.open_jaxpr(flat)
    prices = Prices(opened.eqns)
    equations: list[JaxprEqn] = []
    here: dict[Var, Atom] = {}
    read = lambda a: here.get(a, a) if isinstance(a, Var) else a
    for eqn in opened.eqns:
        again = None
        if eqn.primitive.name == "scan" and not eqn.effects:
            again = _Body(eqn, prices).made()
        if again is None:
            equations.append(eqn.replace(invars=[*map(read, eqn.invars)]))
            continue
        body, inputs = again
        consts, carry = compat.scan_counts(eqn)
        count = consts + len(inputs) - len(eqn.invars)
        operands = [*map(read, inputs)]
        outs = Calls(equations.append).scan(body, count, carry, operands, eqn)
        here.update(zip(eqn.outvars, outs, strict=True))
    if not here:
        return flat
    outvars = [*map(read, opened.outvars)]
    parts = opened.constvars, compat.constants(flat), opened.invars, outvars, equations
    return drop_dead(compat.close(*parts, like=flat))


class _Body:
    """The body of the scan `eqn`, and what is made in it of what its constants are made of."""

    def __init__(self, eqn: JaxprEqn, prices: Prices) -> None:
        self.eqn, self.prices = eqn, prices
        self.closed = eqn.params["jaxpr"]
        self.here = MadeInBody(prices, [])

    def made(self) -> tuple[ClosedJaxpr, list[Atom]] | None:
        """The body with constants made in it, and in those of the scans in it, and what the scan is
        given then; None if nothing changes."""
        body, (count, _) = compat.open_jaxpr(self.closed), compat.scan_counts(self.eqn)
        here: dict[Var, Atom] = {}
        inputs = self.here.constants
        for v, a in zip(body.invars[:count], self.eqn.invars[:count], strict=True):
            price = self.prices.of(a) if isinstance(a, Var) else None
            if price is None or (price and not _is_fused(v, body.eqns)):
                inputs[v] = a
            else:
                here[v] = self.here.read(a)
        read = lambda a: here.get(a, a) if isinstance(a, Var) else a
        inner = [eqn.replace(invars=[*map(read, eqn.invars)]) for eqn in body.eqns]
        parts = body.constvars, compat.constants(self.closed), [*inputs, *body.invars[count:]]
        outvars = [*map(read, body.outvars)]
        again = compat.close(*parts, outvars, [*self.here.equations, *inner], self.closed)
        found = with_constants_in_loops(again)
        if not here and found is again:
            return None
        return found, [*inputs.values(), *self.eqn.invars[count:]]


def _is_fused(v: Var, eqns: Sequence[JaxprEqn]) -> bool:
    """Whether kernels that read `v` compute it: it need not exist in an iteration."""
    readers = [eqn for eqn in eqns if v in eqn.invars]
    return all(_is_fused_into(eqn, v, eqns) for eqn in readers)


def _is_fused_into(reader: JaxprEqn, v: Var, eqns: Sequence[JaxprEqn]) -> bool:
    if reader.primitive.name == "scan":
        inner = compat.open_jaxpr(reader.params["jaxpr"])
        count, _ = compat.scan_counts(reader)
        given = [own for own, a in zip(inner.invars, reader.invars, strict=True) if a is v]
        return v not in reader.invars[count:] and all(_is_fused(a, inner.eqns) for a in given)
    if class_of(reader) is Class.VIEW:
        return all(_is_fused(out, eqns) for out in reader.outvars)
    return class_of(reader) is not Class.HEAVY
