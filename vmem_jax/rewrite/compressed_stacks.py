"""compressed_stacks: a loop that stacks slices without their zeros, and the loop that reads them.

The first loop compresses a slice behind its last reader in the iteration, so that a stack of byte
arrays exists between both. The second one decompresses a slice in front of its first reader, which a
barrier ties to the newest value that this reads: XLA would decompress it at the start of the
iteration. The slices come back in the reverse order, so a call needs no number of its slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import core

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from vmem_jax.transfer.compression import compress, decompress


class CompressedStacks:
    """Emits the loops that make or read compressed stacks.

    Args:
      sites: of every stack its site and the capacity in bytes of a slice.
    """

    def __init__(self, sites: Mapping[Var, tuple[int, int]]) -> None:
        self.sites = sites
        self.held: dict[Var, Var] = {}  # stack -> that of its byte arrays

    def emitted(self, eqn: JaxprEqn) -> JaxprEqn:
        """`eqn`, with the calls in it if it is a loop that makes or reads compressed stacks."""
        if any(v in self.sites for v in eqn.outvars):
            eqn = self._making(eqn)
        if any(isinstance(a, Var) and a in self.held for a in eqn.invars):
            eqn = self._reading(eqn)
        return eqn

    def _making(self, eqn: JaxprEqn) -> JaxprEqn:
        closed, length = eqn.params["jaxpr"], eqn.params["length"]
        body, equations = compat.open_jaxpr(closed), list[JaxprEqn]()
        results, outvars = [*body.outvars], [*eqn.outvars]
        behind: dict[int, list[int]] = {}  # equation -> the results that are compressed behind it
        for p, v in enumerate(eqn.outvars):
            if v in self.sites:
                x = body.outvars[p]
                used = [i for i, e in enumerate(body.eqns) if x in (*e.invars, *e.outvars)]
                behind.setdefault(max(used, default=-1), []).append(p)
        calls = Calls(equations.append)
        for i in range(-1, len(body.eqns)):
            if i >= 0:
                equations.append(body.eqns[i])
            for p in behind.get(i, ()):
                site, capacity = self.sites[eqn.outvars[p]]
                call = lambda x, s=site, n=capacity: compress(x, store=0, site=s, capacity=n)
                like = body.eqns[max(i, 0)] if body.eqns else eqn
                [results[p]] = calls.bind(call, [body.outvars[p]], like)
                stack = compat.new_var(core.ShapedArray((length, capacity), jnp.uint8))
                outvars[p] = self.held[eqn.outvars[p]] = stack
        inside = _with(closed, body.invars, results, equations)
        return _replaced(eqn, inside, eqn.invars, outvars)

    def _reading(self, eqn: JaxprEqn) -> JaxprEqn:
        closed = eqn.params["jaxpr"]
        body = compat.open_jaxpr(closed)
        invars, operands, inside = [*body.invars], [*eqn.invars], _Reader()
        for p, a in enumerate(eqn.invars):
            if isinstance(a, Var) and a in self.held:
                site, capacity = self.sites[a]
                operands[p] = self.held[a]
                invars[p] = inside.add(body.invars[p], site, capacity)
        for inner in body.eqns:
            inside.emit(inner)
        results = inside.results(body.outvars, body.eqns[-1])
        return _replaced(
            eqn, _with(closed, invars, results, inside.equations), operands, eqn.outvars
        )


class _Reader:
    """The equations of an iteration that reads compressed slices."""

    def __init__(self) -> None:
        self.equations: list[JaxprEqn] = []
        self.calls = Calls(self.equations.append)
        self.slice: dict[Var, int] = {}  # a slice, or what a barrier made of it -> its site
        self.compressed: dict[int, Var] = {}  # what waits
        self.values: dict[int, Var] = {}  # what was decompressed
        self.env: dict[Var, Var] = {}  # behind barriers
        self.made: dict[Atom, int] = {}  # when

    def add(self, x: Var, site: int, capacity: int) -> Var:
        """Slice `x` of a stack; returns what it is read from."""
        self.slice[x] = site
        self.compressed[site] = compat.new_var(core.ShapedArray((capacity,), jnp.uint8))
        return self.compressed[site]

    def emit(self, eqn: JaxprEqn) -> None:
        """Emits `eqn`; a barrier passes a slice on compressed."""
        is_barrier = eqn.primitive.name == "optimization_barrier"
        if not is_barrier:
            self._decompress(eqn.invars, eqn)
        invars = [self._now(a) for a in eqn.invars]
        outs = [compat.new_var(a.aval) for a in invars] if is_barrier else eqn.outvars
        for a, v, out in zip(eqn.invars, eqn.outvars, outs, strict=True) if is_barrier else ():
            if isinstance(a, Var) and a in self.slice and self.slice[a] in self.compressed:
                self.slice[v] = self.slice[a]
                self.compressed[self.slice[a]] = out
            else:
                self.env[v] = out
        self.equations.append(eqn.replace(invars=invars, outvars=outs))
        self.made.update((v, len(self.equations)) for v in outs)

    def results(self, outvars: Sequence[Atom], like: JaxprEqn) -> list[Atom]:
        self._decompress(outvars, like)
        return [self._now(a) for a in outvars]

    def _now(self, a: Atom) -> Atom:
        """What stands for `a` here."""
        if isinstance(a, Literal):
            return a
        if a not in self.slice:
            return self.env.get(a, a)
        site = self.slice[a]
        return self.values[site] if site in self.values else self.compressed[site]

    def _decompress(self, wanted: Sequence[Atom], like: JaxprEqn) -> None:
        """Decompresses those of `wanted` that wait, when the newest other value is there."""
        sites = [(a, self.slice[a]) for a in wanted if isinstance(a, Var) and a in self.slice]
        for a, site in sites:
            if site in self.values:
                continue
            others = [b for b in wanted if isinstance(b, Var) and b not in self.slice]
            newest = max(others, key=lambda b: self.made.get(self._now(b), 0), default=None)
            if newest is not None and self._now(newest) in self.made:
                held = [self.compressed[site], self._now(newest)]
                self.compressed[site], self.env[newest] = self.calls.fence(held, like)
                self.made[self.env[newest]] = len(self.equations)
            shape: Any = a.aval
            call = lambda c, shape=shape, site=site: decompress(c, shape, store=0, site=site)
            [self.values[site]] = self.calls.bind(call, [self.compressed.pop(site)], like)


def _with(
    closed: ClosedJaxpr, invars: list[Var], outvars: list[Atom], equations: list[JaxprEqn]
) -> ClosedJaxpr:
    constvars = compat.open_jaxpr(closed).constvars
    return compat.close(constvars, compat.constants(closed), invars, outvars, equations, closed)


def _replaced(eqn: JaxprEqn, body: ClosedJaxpr, invars: list[Atom], outvars: list[Var]) -> JaxprEqn:
    params = {**eqn.params, "jaxpr": body}
    effects = compat.open_jaxpr(body).effects
    return eqn.replace(invars=invars, outvars=outvars, params=params, effects=effects)
