"""loop_pairs: a forward scan and the scan that reads what it stacks, as one iteration of both.

A `lax.scan` over layers, differentiated, is two scans: one forwards, which stacks its residuals, and
one backwards over these stacks. One iteration of either makes up the step of one layer: the forward
body, and behind it the backward body, with the residuals as values in between. In that form, the
*paired body*, nothing is stacked, and what stands between the two parts can be chosen anew: which
values the forward scan stacks, and which the backward scan computes again from these, from the
slices that both read and from what is the same in every iteration.

A `jax.checkpoint` in the body is inlined here, and what it computes again is merged with what it
repeats, as in `flatten`; what its policy offloads is a residual like any other. A large constant of a
loop that is made of less (a mask, a broadcast number) is made in the body, whatever reads it there
(`loop_constants`): outside, it would be there throughout both loops.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.def_use import makers
from vmem_jax.capture.exact import apply_exact_rules
from vmem_jax.capture.flatten import drop_dead, flatten, inline
from vmem_jax.capture.loop_constants import MadeInBody, Prices
from vmem_jax.capture.primitives import nbytes
from vmem_jax.capture.shards import Shards
from vmem_jax.capture.whole_rows import with_layouts_in_loops
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var


@dataclasses.dataclass(frozen=True)
class Given:
    """What the loops of a pair read, by their variables in the paired body.

    Attributes:
      consts: what is the same in every iteration, with its value outside.
      slices: slices of stacks, with the stack outside.
      forward, backward: what the loops carry into an iteration, with its value before the first.
      late: what only the backward scan has: what it carries, cotangents.
      constants: (variable outside, value) of the constants of the bodies.
    """

    consts: Mapping[Var, Atom]
    slices: Mapping[Var, Atom]
    forward: Mapping[Var, Atom]
    backward: Mapping[Var, Atom]
    late: frozenset[Var]
    constants: tuple[tuple[Var, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Made:
    """What the loops of a pair make, by their values in the paired body.

    Attributes:
      carried: (value, result outside) of what a loop carries out of an iteration.
      stacked: the same of what it stacks, but for residuals that nothing else reads.
    """

    carried: tuple[tuple[Atom, Var], ...]
    stacked: tuple[tuple[Atom, Var], ...]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two scans, one of which reads what the other stacks.

    Attributes:
      forward, backward: their equations in the flat jaxpr.
      length: iterations.
      body: the paired body: inputs as in `given`, equations of the forward part before those of the
        backward part, results as in `made`, those of the forward scan first.
      given: what both read.
      forward_made, backward_made: what they make.
      residual_nbytes: bytes of the stacks between them as they were traced.
    """

    forward: int
    backward: int
    length: int
    body: ClosedJaxpr
    given: Given
    forward_made: Made
    backward_made: Made
    residual_nbytes: int

    @functools.cached_property
    def late(self) -> frozenset[Var]:
        """The values of the body that depend on what only the backward scan has."""
        found = set(self.given.late)
        for eqn in compat.open_jaxpr(self.body).eqns:
            if any(isinstance(a, Var) and a in found for a in eqn.invars):
                found.update(eqn.outvars)
        return frozenset(found)

    def shards(self, outside: Shards) -> Shards:
        """How the values of the body are split, where `outside` says that of the step's."""
        given = self.given
        groups = (given.consts, given.slices, given.forward, given.backward)
        values = {v: a for group in groups for v, a in group.items()}
        return outside.within(self.body, values, given.slices)

    @property
    def boundary(self) -> int | None:
        """The first equation of the body that depends on what only the backward scan has."""
        for i, eqn in enumerate(compat.open_jaxpr(self.body).eqns):
            if any(v in self.late for v in eqn.outvars):
                return i
        return None


def find_pairs(flat: ClosedJaxpr, platform: str = "") -> tuple[Pair, ...]:
    """The pairs of scans of `flat`, in the order of their forward scans. No scan is in two pairs.

    Args:
      platform: that it is compiled for; on "gpu" the bodies are laid out (`whole_rows`).
    """
    eqns = compat.open_jaxpr(flat).eqns
    maker = makers(eqns)
    taken: set[int] = set()
    found = []
    for backward, eqn in enumerate(eqns):
        if eqn.primitive.name != "scan" or eqn.effects:
            continue
        shared: dict[int, int] = {}  # forward scan -> bytes of its stacks that are read here
        for v in {a for a in _slices(eqn) if isinstance(a, Var)}:
            forward = maker.get(v, -1)
            if forward >= 0 and _makes_stack(eqns[forward], v, eqn):
                shared[forward] = shared.get(forward, 0) + nbytes(v.aval)
        for forward in sorted(shared, key=lambda i: -shared[i]):
            if forward not in taken and backward not in taken:
                taken |= {forward, backward}
                found.append(_Joined(flat, forward, backward, platform).pair())
    return tuple(sorted(found, key=lambda pair: pair.forward))


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [a for a in eqn.invars if isinstance(a, Var)]


def _moves_between_memories(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "device_put":
        return False
    pairs = zip(eqn.invars, eqn.outvars, strict=True)
    host = compat.is_in_host_memory
    return all(host(a.aval) != host(v.aval) for a, v in pairs)


def _slices(eqn: JaxprEqn) -> Sequence[Atom]:
    return eqn.invars[sum(compat.scan_counts(eqn)) :]


def _makes_stack(eqn: JaxprEqn, v: Var, reader: JaxprEqn) -> bool:
    if eqn.primitive.name != "scan" or eqn.effects:
        return False
    _, carry = compat.scan_counts(eqn)
    same = eqn.params["length"] == reader.params["length"] > 1
    turned = eqn.params["reverse"] != reader.params["reverse"]
    # the second layer of a recurrent network reads what the first stacks, too
    differentiated = "transpose(" in compat.name_stack(reader)
    return same and turned and differentiated and v in eqn.outvars[carry:]


class _Joined:
    """The paired body of two scans of `flat`, while it is put together."""

    def __init__(self, flat: ClosedJaxpr, forward: int, backward: int, platform: str) -> None:
        self.flat, self.at, self.platform = flat, (forward, backward), platform
        self.outer = compat.open_jaxpr(flat)
        self.eqns: Sequence[JaxprEqn] = self.outer.eqns
        self.equations: list[JaxprEqn] = []
        self.slices: dict[Var, Atom] = {}
        self.sliced: dict[Var, Atom] = {}  # stack outside -> the same of its slice
        self.same = MadeInBody(Prices(self.eqns, forward), self.equations)
        self.constants: dict[Var, Any] = {}  # of the bodies themselves
        # a user's own offloading of residuals is a hint, like `jax.checkpoint`
        self.hints = self._moves_residuals_alone()

    def _moves_residuals_alone(self) -> bool:
        """Whether what the loops have in host memory is residuals, and nothing else."""
        forward, backward = (self.eqns[i] for i in self.at)
        _, carry = compat.scan_counts(forward)
        others = {a for i, e in enumerate(self.eqns) if i not in self.at for a in _variables(e)}
        others |= {a for a in self.outer.outvars if isinstance(a, Var)}
        residuals = {*forward.outvars[carry:]} & {*_variables(backward)} - others
        values = {*_variables(forward), *_variables(backward), *forward.outvars, *backward.outvars}
        return not any(compat.is_in_host_memory(v.aval) for v in values - residuals)

    def pair(self) -> Pair:
        forward, backward = (self.eqns[i] for i in self.at)
        begun, begun_outs = self._run(forward)
        _, carry = compat.scan_counts(forward)
        stacks = dict(zip(forward.outvars[carry:], begun_outs[carry:], strict=True))
        self.sliced.update(stacks)
        early = {*self.same.constants, *self.slices}
        ended, ended_outs = self._run(backward)
        late = {*ended, *self.same.constants, *self.slices} - early
        residuals = {a for a in _slices(backward) if isinstance(a, Var) and a in stacks}
        given = Given(self.same.constants, self.slices, begun, ended, frozenset(late))
        made = (
            self._made(forward, begun_outs, residuals),
            self._made(backward, ended_outs, set()),
        )
        return self._flattened(given, made, sum(nbytes(v.aval) for v in residuals))

    def _flattened(self, given: Given, made: tuple[Made, Made], residual_nbytes: int) -> Pair:
        inputs = [*given.consts, *given.slices, *given.forward, *given.backward]
        results = [a for m in made for a, _ in (*m.carried, *m.stacked)]
        constants = [*self.constants], [*self.constants.values()]
        closed = compat.close(*constants, inputs, results, self.equations, self.flat)
        closed = with_layouts_in_loops(flatten(closed), self.platform)
        closed = drop_dead(apply_exact_rules(closed)[0])
        opened = compat.open_jaxpr(closed)
        outside = {v: compat.new_var(v.aval) for v in opened.constvars}
        values = compat.constants(closed)
        given = dataclasses.replace(
            given,
            consts={**given.consts, **outside},
            constants=tuple(zip(outside.values(), values, strict=True)),
        )
        inputs = [*opened.invars, *opened.constvars]
        body = compat.close([], [], inputs, opened.outvars, opened.eqns, closed)
        outs = iter(opened.outvars)
        forward, backward = (
            Made(
                tuple((next(outs), v) for _, v in m.carried),
                tuple((next(outs), v) for _, v in m.stacked),
            )
            for m in made
        )
        length = self.eqns[self.at[0]].params["length"]
        return Pair(*self.at, length, body, given, forward, backward, residual_nbytes)

    def _run(self, eqn: JaxprEqn) -> tuple[dict[Var, Atom], list[Atom]]:
        """Adds the body of scan `eqn`; returns what it carries, as in `Given`, and what it makes."""
        consts, carry = compat.scan_counts(eqn)
        body = inline(eqn.params["jaxpr"])
        opened = compat.open_jaxpr(body)
        env: dict[Var, Atom] = {}
        for v, value in zip(opened.constvars, compat.constants(body), strict=True):
            env[v] = own = compat.new_var(v.aval)
            self.constants[own] = value
        carried: dict[Var, Atom] = {}
        for index, (v, a) in enumerate(zip(opened.invars, eqn.invars, strict=True)):
            if index < consts:
                env[v] = self.same.read(a)
            elif index < consts + carry:
                env[v] = own = compat.new_var(v.aval)
                carried[own] = a
            else:
                env[v] = self._slice(v, a)
        read = lambda a: a if isinstance(a, Literal) else env[a]
        for inner in opened.eqns:
            if self.hints and _moves_between_memories(inner):
                env.update(zip(inner.outvars, map(read, inner.invars), strict=True))
                continue
            outs = [compat.new_var(v.aval) for v in inner.outvars]
            nested = compat.nest_name_stack(inner, eqn)
            self.equations.append(
                nested.replace(invars=[read(a) for a in inner.invars], outvars=outs)
            )
            env.update(zip(inner.outvars, outs, strict=True))
        return carried, [read(a) for a in opened.outvars]

    def _slice(self, v: Var, stack: Atom) -> Atom:
        if stack not in self.sliced:
            self.sliced[stack] = own = compat.new_var(v.aval)
            self.slices[own] = stack
        return self.sliced[stack]

    def _made(self, eqn: JaxprEqn, outs: Sequence[Atom], residuals: set[Var]) -> Made:
        """What scan `eqn` makes, but for what nothing but the backward scan reads.

        Args:
          residuals: those of its stacks that the backward scan reads.
        """
        _, carry = compat.scan_counts(eqn)
        results = {a for a in self.outer.outvars if isinstance(a, Var)}
        others = (e for i, e in enumerate(self.eqns) if i != self.at[1])
        read = results | {a for e in others for a in e.invars if isinstance(a, Var)}
        last = self.eqns[self.at[1]]
        read |= {a for a in last.invars[: sum(compat.scan_counts(last))] if isinstance(a, Var)}
        made = [*zip(outs, eqn.outvars, strict=True)]
        stacked = (pair for pair in made[carry:] if pair[1] not in residuals or pair[1] in read)
        return Made(tuple(made[:carry]), tuple(stacked))
