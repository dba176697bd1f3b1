"""loop_segments: a pair of scans in segments, of which only the carry-ins are stacked.

Two scans of n iterations, the second of which reads what the first stacks, are made again as

    forward:   for each segment but the last: keep what it carries in; run k iterations
               run the last iterations, and stack all that is asked for
    backward:  run these backwards
               for each other segment, last first: run its k iterations again from what it carried in,
               and stack all that is asked for; run them backwards

So of most stacks k slices exist at a time, of the carried values another n / k, and each iteration
but those of the last segment runs forwards once more. With k near the square root of n that is the
plan of Chen et al., "Training deep nets with sublinear memory cost" (arXiv:1604.06174), sections 3
and 4.1; there, too, the last segment is not run again. It has the k iterations of the others or
fewer, so that any n can be divided.

A segment can be divided in turn, as in section 4.3: while it runs again it keeps what each segment
of j of its iterations carries in, and stacks of j slices exist at a time (`core.paired.Division`).
Each level runs the iterations forwards once more. The code of the bodies is there 2 ** levels times.

Stacks that are wanted whole (some of the residuals, results of the loops, gradients) are written in
place, slice by slice, and arguments are read where they lie: a scan over segments of them would copy
each segment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.flatten import drop_dead
from vmem_jax.capture.shards import is_typed
from vmem_jax.core.paired import Division, EqualSegments
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var


@dataclasses.dataclass(frozen=True)
class Segments:
    """How a pair of scans is divided.

    Attributes:
      every: iterations in a segment, and in a segment of it, of each level.
      parts: stacks of the forward scan that exist for one innermost segment at a time. The backward
        scan reads them, and nothing else does.
      carry: how many values the backward scan was traced to carry. Behind those it carries stacks
        whose slices it replaces, the updated ones of what the forward scan reads.
    """

    every: tuple[int, ...]
    parts: frozenset[Var]
    carry: int


def can_be_divided(eqn: JaxprEqn) -> bool:
    """Whether scan `eqn` can run in segments: its values are on the device, and no type of them says
    how it is split over several."""
    values = [a for a in (*eqn.invars, *eqn.outvars) if isinstance(a, Var)]
    return not any(compat.is_in_host_memory(v.aval) or is_typed(v) for v in values)


def segmented(flat: ClosedJaxpr, loops: Sequence[Segments]) -> ClosedJaxpr:
    """`flat` with pairs of its scans in segments."""
    opened = compat.open_jaxpr(flat)
    found = [(each, *_scans(opened.eqns, each.parts)) for each in loops]
    first = {forward: each for each, forward, _ in found}
    second = {backward: forward for _, forward, backward in found}
    made: dict[int, _Pair] = {}
    same = {  # through barriers
        v: a
        for eqn in opened.eqns
        if eqn.primitive.name == "optimization_barrier"
        for a, v in zip(eqn.invars, eqn.outvars, strict=True)
    }
    equations: list[JaxprEqn] = []
    calls, env = Calls(equations.append), dict[Var, Atom]()
    read = lambda a: a if isinstance(a, Literal) else env.get(a, a)
    for i, eqn in enumerate(opened.eqns):
        if i in first:
            made[i] = _Pair(first[i], eqn)
            made[i].forward([read(a) for a in eqn.invars], calls, env)
        elif i in second:
            pair, sources = made[second[i]], [same.get(a, a) for a in _variables(eqn)]
            pair.backward(eqn, sources, [read(a) for a in eqn.invars], calls, env)
        else:
            equations.append(eqn.replace(invars=[read(a) for a in eqn.invars]))
    results = [read(a) for a in opened.outvars]
    parts = opened.constvars, compat.constants(flat), opened.invars, results, equations
    return drop_dead(compat.close(*parts, like=flat))


def _scans(eqns: Sequence[JaxprEqn], parts: frozenset[Var]) -> tuple[int, int]:
    """The scans that make and read `parts`."""
    made = [i for i, eqn in enumerate(eqns) if not parts.isdisjoint(eqn.outvars)]
    read = [
        i for i, e in enumerate(eqns) if any(isinstance(a, Var) and a in parts for a in e.invars)
    ]
    [forward], [backward] = made, read
    return forward, backward


def _variables(eqn: JaxprEqn) -> list[Any]:
    """The operands of `eqn`, None for literals."""
    return [a if isinstance(a, Var) else None for a in eqn.invars]


class _Pair:
    """One pair, while it is made again."""

    def __init__(self, segments: Segments, eqn: JaxprEqn) -> None:
        self.eqn, self.parts = eqn, segments.parts
        self.length = eqn.params["length"]
        self.division = Division(self.length, segments.every)
        self.consts, self.carry = compat.scan_counts(eqn)
        self.ys = eqn.outvars[self.carry :]
        self.again = _Again(eqn, segments.parts)
        self.backward_carry = segments.carry

    def _slice_of(self, t: Any) -> Any:
        """The slice of stacks that the iteration reads and writes that runs as number `t`."""
        return self.length - 1 - t if self.eqn.params["reverse"] else t

    # -- forwards

    def forward(self, operands: Sequence[Atom], calls: Calls, env: dict[Var, Atom]) -> None:
        whole = [v for v in self.ys if v not in self.parts]
        outs = calls.bind(self._forward, operands, self.eqn)
        carried, stacks, rest = _cut(outs, self.carry, len(whole))
        env.update(zip(self.eqn.outvars[: self.carry], carried, strict=True))
        env.update(zip(whole, stacks, strict=True))
        self.operands = operands
        self.whole = [env[v] for v in self.again.whole]
        levels = [len(self.again.carried)] * len(self.division.levels)
        *self.carried_in, self.last_parts = _cut(rest, *levels)

    def _forward(self, *operands: Any) -> list[Any]:
        consts, carried, xs = _cut(operands, self.consts, self.carry)
        run = jaxpr_as_fun(self.eqn.params["jaxpr"])
        whole = [p for p, v in enumerate(self.ys) if v not in self.parts]
        parts = [p for p, v in enumerate(self.ys) if v in self.parts]
        stacks = [_room(self.length, self.ys[p]) for p in whole]

        def once(state: Any, t: Any) -> Any:
            carried, stacks = state
            i = self._slice_of(t)
            outs = run(*consts, *carried, *(_slice(x, i) for x in xs))
            carried, ys = _cut(outs, self.carry)
            stacks = [_put(stack, ys[p], i) for p, stack in zip(whole, stacks, strict=True)]
            return (carried, stacks), [ys[p] for p in parts]

        entering = lambda state: [state[0][c] for c in self.again.carried]
        state, kept, last = self._run(once, entering, (carried, stacks), 0, self.division)
        return [*state[0], *state[1], *(a for own in kept for a in own), *last]

    def _run(
        self, once: Callable, entering: Callable, state: Any, first: Any, division: Division
    ) -> tuple[Any, list[Any], Any]:
        """Runs the iterations of `division` from number `first` on.

        Args:
          once: (state, number) -> the next state and the parts.
          entering: gives what is kept of the state where a segment begins.

        Returns:
          The last state, what was kept of each level, and the parts of the last iterations.
        """
        without = lambda state, t: (once(state, t)[0], None)
        found = []
        for level in division.levels:

            def segment(state: Any, s: Any, level: EqualSegments = level) -> Any:
                kept = entering(state)
                numbers = _numbers(level.every) + self._start(first, level, s)
                return self._scan(without, state, numbers, level.every)[0], kept

            state, kept = lax.scan(segment, state, _numbers(level.count))
            found.append(kept)
        numbers = _numbers(division.last) + (first + division.length - division.last)
        state, last = self._scan(once, state, numbers, division.last)
        return state, found, last

    def _start(self, first: Any, level: EqualSegments, s: Any) -> Any:
        """The first iteration of segment `s` of `level`."""
        return first + level.at + s * level.every

    def _scan(self, once: Callable, state: Any, xs: Any, length: int, reverse: bool = False) -> Any:
        unroll = self.eqn.params["unroll"]
        if not isinstance(unroll, bool):
            unroll = min(unroll, length)
        return lax.scan(once, state, xs, reverse=reverse, unroll=unroll)

    # -- backwards

    def backward(
        self,
        eqn: JaxprEqn,
        sources: Sequence[Var | None],
        operands: Sequence[Atom],
        calls: Calls,
        env: dict[Var, Atom],
    ) -> None:
        """Emits the backward scan `eqn`.

        Args:
          sources: what its operands were before barriers.
          operands: they.
        """
        consts, carry = compat.scan_counts(eqn)
        # what is updated in place is read from where it is written to, or there would be two of it
        replaced = {sources[consts + c]: c for c in range(self.backward_carry, carry)}
        xs = range(self.consts + self.carry, len(self.eqn.invars))
        current = {p: replaced[a] for p in xs if (a := _variables(self.eqn)[p]) in replaced}
        mine = dict(zip(self.again.parts, self.last_parts, strict=True))
        indices: list[int | None] = []  # of every stack that is read that of the part, or None
        others = []
        for a, now in zip(eqn.invars[consts + carry :], operands[consts + carry :], strict=True):
            is_part = isinstance(a, Var) and a in mine
            indices.append(self.again.parts.index(a) if is_part else None)
            others += [] if is_part else [now]
        groups = [operands[:consts], operands[consts : consts + carry], others]
        groups += [self.operands, self.whole, self.last_parts, *self.carried_in]
        sizes = [len(group) for group in groups]

        def run(*values: Any) -> list[Any]:
            consts, carried, others, mine, whole, last, *kept = _cut(values, *sizes[:-1])
            return self._backward(
                eqn, indices, current, consts, carried, others, mine, whole, last, kept
            )

        outs = calls.bind(run, [a for group in groups for a in group], eqn)
        env.update(zip(eqn.outvars, outs, strict=True))

    def _backward(
        self,
        eqn: JaxprEqn,
        indices: Sequence[int | None],
        current: Mapping[int, int],
        consts: Sequence[Any],
        carried: Sequence[Any],
        others: Sequence[Any],
        operands: Sequence[Any],
        whole: Sequence[Any],
        last: Sequence[Any],
        carried_in: Sequence[Any],
    ) -> list[Any]:
        run, carry = jaxpr_as_fun(eqn.params["jaxpr"]), len(carried)
        stacks = [_room(self.length, v) for v in eqn.outvars[carry:]]

        def once(state: Any, given: Any) -> Any:
            (carried, stacks), (t, parts) = state, given
            i, rest = self._slice_of(t), iter(others)
            xs = [_slice(next(rest), i) if p is None else parts[p] for p in indices]
            outs = run(*consts, *carried, *xs)
            carried, ys = _cut(outs, carry)
            return (carried, [_put(s, y, i) for s, y in zip(stacks, ys, strict=True)]), None

        def backwards(
            state: Any, first: Any, division: Division, kept: Sequence[Any], last: Sequence[Any]
        ) -> Any:
            """Runs the iterations of `division` from number `first` on backwards."""
            numbers = _numbers(division.last) + (first + division.length - division.last)
            state, _ = self._scan(once, state, (numbers, last), division.last, reverse=True)
            for level, own in [*zip(division.levels, kept, strict=True)][::-1]:

                def segment(state: Any, given: Any, level: EqualSegments = level) -> Any:
                    # nothing of a segment may run before what is behind it has run backwards
                    (s, entered), carried = lax.optimization_barrier((given, state[0]))
                    current_of = lambda p, a: carried[current[p]] if p in current else a
                    now = [current_of(p, a) for p, a in enumerate(operands)]
                    again = lambda inner, t: self.again.run(now, whole, inner, self._slice_of(t))
                    start = self._start(first, level, s)
                    _, kept, last = self._run(again, list, entered, start, level.deeper)
                    state = carried, state[1]
                    return backwards(state, start, level.deeper, kept, last), None

                given = _numbers(level.count), own
                state, _ = lax.scan(segment, state, given, reverse=True)
            return state

        carried, stacks = backwards((carried, stacks), 0, self.division, carried_in, last)
        return [*carried, *stacks]


class _Again:
    """What of the body of a forward scan makes the parts again.

    Attributes:
      carried: which of the carried values it needs from the iteration before.
      whole: the whole stacks that it reads.
      parts: those that it makes, in the order of `run`.
    """

    def __init__(self, eqn: JaxprEqn, parts: frozenset[Var]) -> None:
        self.body = eqn.params["jaxpr"]
        self.consts, self.carry = compat.scan_counts(eqn)
        opened = compat.open_jaxpr(self.body)
        made = [*zip(opened.outvars[self.carry :], eqn.outvars[self.carry :], strict=True)]
        self.parts = [v for _, v in made if v in parts]
        stacked = {a: v for a, v in made[::-1] if v not in parts and isinstance(a, Var)}
        wanted = [a for a, v in made if v in parts]
        carried: set[int] = set()
        while True:
            results = [*(opened.outvars[c] for c in sorted(carried)), *wanted]
            equations, needed = _making(opened.eqns, results, stacked)
            inputs = enumerate(opened.invars[self.consts : self.consts + self.carry])
            more = {c for c, v in inputs if v in needed and v not in stacked}
            if more <= carried:
                break
            carried |= more
        self.carried = sorted(carried)
        read = [a for a in stacked if a in needed]
        self.whole = [stacked[a] for a in read]
        self.inputs = [p for p, v in enumerate(opened.invars) if v in needed and v not in stacked]
        given = [*opened.constvars, *(opened.invars[p] for p in self.inputs), *read]
        closed = compat.close([], [], given, results, equations, self.body)
        self._run = jaxpr_as_fun(closed)

    def run(
        self, operands: Sequence[Any], whole: Sequence[Any], carried: Sequence[Any], i: Any
    ) -> tuple[list[Any], list[Any]]:
        """What the next iteration needs, and the parts.

        Args:
          operands: of the forward scan.
          whole: stacks.
          carried: what it needs from the iteration before.
          i: which slices it reads.
        """
        given = []
        for p in self.inputs:
            if p < self.consts:
                given.append(operands[p])
            elif p < self.consts + self.carry:
                given.append(carried[self.carried.index(p - self.consts)])
            else:
                given.append(_slice(operands[p], i))
        given += [_slice(stack, i) for stack in whole]
        outs = self._run(*compat.constants(self.body), *given)
        return outs[: len(self.carried)], outs[len(self.carried) :]


def _making(
    eqns: Sequence[JaxprEqn], results: Sequence[Atom], stacked: Collection[Any]
) -> tuple[list[JaxprEqn], set[Var]]:
    """The equations that make `results` from what is `stacked`, and all values that these read."""
    needed = {a for a in results if isinstance(a, Var)}
    found = []
    for eqn in reversed(eqns):
        if any(v in needed and v not in stacked for v in eqn.outvars):
            needed.update(a for a in eqn.invars if isinstance(a, Var))
            found.append(eqn)
    return found[::-1], needed


def _cut(values: Sequence[Any], *sizes: int) -> list[list[Any]]:
    """`values` in lists of these sizes, and one of the rest."""
    found, at = [], 0
    for size in sizes:
        found.append([*values[at : at + size]])
        at += size
    return [*found, [*values[at:]]]


def _numbers(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)


def _slice(stack: Any, i: Any) -> Any:
    return lax.dynamic_index_in_dim(stack, i, keepdims=False, allow_negative_indices=False)


def _put(stack: Any, x: Any, i: Any) -> Any:
    starts = [i] + [jnp.int32(0)] * x.ndim
    return lax.dynamic_update_slice(stack, x[None], starts, allow_negative_indices=False)


def _room(length: int, stack: Var) -> Any:
    """A stack to write slices into."""
    aval: Any = stack.aval
    assert aval.shape[0] == length, "a stack has a slice for each iteration"
    return lax.full(aval.shape, 0, aval.dtype)
