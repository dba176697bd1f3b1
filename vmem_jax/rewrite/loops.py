"""The two loops of a looped stack, rewritten so that its slices go through host memory.

The forward loop makes a slice an iteration. Its body begins to copy it out as soon as it is made,
and waits for that copy where it would make the next: the slice in flight is carried. A slice that is
made before the body begins (what the loop itself carries, the residual of a checkpointed layer) is
there throughout an iteration anyway, and is waited for at its end.

The backward loop carries the slice that it reads. At the start of an iteration it begins to fetch
the next, and waits for it at the end. So both copies hide under a whole iteration, and no slice but
two of a stack is ever on the device. The last iteration fetches one more than there are: an empty
slice, parked in front of the first.

Every point stands in front of a heavy equation of the body and is tied to the newest value that it
reads, as in `transfers`. The body is otherwise as it was, equation for equation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.capture import Captured
from vmem_jax.capture.primitives import Class, class_of
from vmem_jax.core.parked import parked
from vmem_jax.core.plan import Plan
from vmem_jax.jax_compat import Atom, JaxprEqn, Literal, Var
from vmem_jax.transfer.ffi import Ffi, first_token
from vmem_jax.transfer.transport import WHOLE, AbstractTransport


@dataclasses.dataclass(frozen=True)
class _Stack:
    """A looped stack: what moves its slices, its slot, and how a slice is split over the devices."""

    transport: Ffi
    slot: int
    spec: PartitionSpec

    def start(self, calls: Calls, x: Var, tokens: Sequence[Var], like: JaxprEqn) -> Var:
        """Slice `x` begins to leave, after what `tokens` wait for."""
        call = lambda x, *tokens: self.transport.start(
            x, slot=self.slot, spec=self.spec, after=tokens
        )
        return calls.bind(call, [x, *tokens], like)[0]

    def gone(self, calls: Calls, x: Var, token: Var, like: JaxprEqn) -> Var:
        call = lambda x, token: self.transport.gone(x, token, slot=self.slot, spec=self.spec)
        return calls.bind(call, [x, token], like)[0]

    def fetch(self, calls: Calls, held: Var, aval: Any, like: JaxprEqn) -> Var:
        """The buffer that the last slice comes back to, after `held`: a token, or a slice."""
        shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        call = lambda held: self.transport.fetch(held, shape, slot=self.slot, spec=self.spec)
        return calls.bind(call, [held], like)[0]

    def back(self, calls: Calls, buffer: Var, like: JaxprEqn) -> Var:
        call = lambda buffer: self.transport.back(buffer, slot=self.slot, spec=self.spec)
        return calls.bind(call, [buffer], like)[0]


class Loops:
    """Emits the loops that make or read looped stacks; knows them by their variables.

    Args:
      transport: our calls, which alone can park and pop in a loop.
    """

    def __init__(
        self, captured: Captured, plan: Plan, transport: AbstractTransport | None, calls: Calls
    ) -> None:
        if not isinstance(transport, Ffi):
            raise ValueError("the plan has looped stacks, which only the transport 'ffi' can move")
        self._calls = calls
        self._stacks: dict[Var, _Stack] = {}
        for slot, b in enumerate(plan.looped, len(parked(captured.program, plan))):
            v = captured.variables[b]
            spec = captured.shards.spec(v) or WHOLE
            self._stacks[v] = _Stack(transport, slot, PartitionSpec(*spec[1:]))

    def has(self, eqn: JaxprEqn) -> bool:
        """Whether `eqn` makes or reads a looped stack."""
        return any(isinstance(v, Var) and v in self._stacks for v in (*eqn.invars, *eqn.outvars))

    def emit(self, eqn: JaxprEqn, invars: Sequence[Atom], after: Sequence[Var]) -> list[Var]:
        """Emits the scan `eqn` on `invars`; a looped stack is its token there and in the results.

        Args:
          after: tokens of what must be back before a stack takes its place.
        """
        calls = self._calls
        body = _Body(eqn, self._stacks)
        operands: list[Atom] = []
        for stack, aval, in_flight in body.pushed:  # the empty slice
            empty = calls.bind(lambda aval=aval: jnp.zeros(aval.shape, aval.dtype), [], eqn)[0]
            token = stack.start(calls, empty, after or [_token(calls, eqn)], eqn)
            if not in_flight:
                token = stack.gone(calls, empty, token, eqn)
            operands += [token, empty] if in_flight else [token]
        for stack, aval, index in body.popped:  # the last slice
            behind = [v for v in invars[body.consts : body.carry_end] if isinstance(v, Var)]
            token = calls.fence([invars[index], *behind], eqn)[0]
            buffer = stack.fetch(calls, token, aval, eqn)
            operands.append(stack.back(calls, buffer, eqn))
        outs = body.bind(calls, invars, operands)
        carried = iter(outs[body.carry : body.carry + body.added])
        tokens = []
        for stack, _, in_flight in body.pushed:
            token = next(carried)
            if in_flight:
                token = stack.gone(calls, next(carried), token, eqn)
            tokens.append(token)
        rest = iter((*outs[: body.carry], *outs[body.carry + body.added :]))
        left = iter(tokens)
        return [next(left) if v in self._stacks else next(rest) for v in eqn.outvars]


class _Body:
    """The body of a scan with the calls of its stacks in it.

    Attributes:
      pushed: of every stack that it makes, the aval of a slice and whether one is carried in flight.
      popped: of every stack that it reads, the aval of a slice and which operand of the scan it is.
      consts, carry: constants, and carried values after them, among the operands of the old scan.
      carry_end: where they end.
      added: values carried beside: of a push its token, and a slice in flight; of a pop a slice.
    """

    def __init__(self, eqn: JaxprEqn, stacks: Mapping[Var, _Stack]) -> None:
        self._eqn = eqn
        self._closed = eqn.params["jaxpr"]
        self._body = compat.open_jaxpr(self._closed)
        self.consts, self.carry = compat.scan_counts(eqn)
        self.carry_end = self.consts + self.carry
        self._made = {v: i for i, e in enumerate(self._body.eqns) for v in e.outvars}
        self._heavy = [i for i, e in enumerate(self._body.eqns) if class_of(e) is Class.HEAVY]
        self.pushed: list[tuple[_Stack, Any, bool]] = []
        self.popped: list[tuple[_Stack, Any, int]] = []
        self._pushes: list[tuple[int, Var]] = []  # (index among the results, the slice)
        self._pops: list[Var] = []
        for index, v in enumerate(eqn.outvars):
            if v in stacks:
                x = self._body.outvars[index]
                self.pushed.append((stacks[v], x.aval, x in self._made))
                self._pushes.append((index, x))
        for index, a in enumerate(eqn.invars):
            if isinstance(a, Var) and a in stacks:
                x = self._body.invars[index]
                self.popped.append((stacks[a], x.aval, index))
                self._pops.append(x)
        self.added = sum(1 + held for *_, held in self.pushed) + len(self.popped)
        self._rewrite()

    def _rewrite(self) -> None:
        """Makes the new body: consts, carry, added, xs -> carry, added, ys."""
        body, equations = self._body, list[JaxprEqn]()
        first, last = (body.eqns[0], body.eqns[-1]) if body.eqns else (self._eqn, self._eqn)
        token_aval = _token(Calls(lambda _: None), first).aval
        calls = Calls(equations.append)
        pushes, pops = range(len(self.pushed)), range(len(self.popped))
        tokens = [compat.new_var(token_aval) for _ in pushes]
        slices = [x for _, x in self._pushes]
        held = {i: compat.new_var(aval) for i, (_, aval, flies) in enumerate(self.pushed) if flies}
        buffers = [compat.new_var(aval) for _, aval, _ in self.popped]  # where the next one goes
        env: dict[Var, Atom] = {}  # what stands for each of these, and for the body's own

        def read(atom: Atom) -> Any:
            return atom if isinstance(atom, Literal) else env.get(atom, atom)

        def tie(values: Sequence[Var], like: JaxprEqn) -> None:
            values = [*dict.fromkeys(values)]
            if len(values) > 1:
                env.update(zip(values, calls.fence([read(v) for v in values], like), strict=True))

        def start(i: int, like: JaxprEqn) -> None:
            stack, x = self.pushed[i][0], read(slices[i])
            env[tokens[i]] = stack.start(calls, x, [read(tokens[i])], like)

        def done(i: int, x: Var, like: JaxprEqn) -> None:
            stack = self.pushed[i][0]
            env[tokens[i]] = stack.gone(calls, x, read(tokens[i]), like)

        done_at, start_at = self._points()
        fetch_at = self._heavy[0] if self._heavy else 0
        for at, eqn in enumerate(body.eqns):
            dones = [i for i in held if done_at[i] == at]
            starts = [i for i in pushes if start_at[i] == at]
            fetches = [*pops] if at == fetch_at else []
            spine = self._newest(eqn)
            if dones or fetches:
                tie([*(tokens[i] for i in dones), *(self._pops[j] for j in fetches), *spine], eqn)
            for i in dones:
                done(i, held[i], eqn)
            for i in starts:
                start(i, eqn)
            for j in fetches:
                # It takes the slice before it for its token: what fetch_done wrote is there, and so
                # that fetch is over, also where nothing else keeps two iterations apart.
                stack, aval, _ = self.popped[j]
                env[buffers[j]] = stack.fetch(calls, read(self._pops[j]), aval, eqn)
            if dones or starts or fetches:
                moved = [*(tokens[i] for i in (*dones, *starts)), *(buffers[j] for j in fetches)]
                tie([*moved, *spine], eqn)
            outs = [compat.new_var(v.aval) for v in eqn.outvars]
            equations.append(eqn.replace(invars=[read(a) for a in eqn.invars], outvars=outs))
            env.update(zip(eqn.outvars, outs, strict=True))

        for i in pushes:
            if start_at[i] == len(body.eqns):
                start(i, last)
        ends = [i for i in pushes if i not in held]
        if ends or pops:  # nothing of the iteration is left to do when these are waited for
            tie([*(tokens[i] for i in ends), *buffers, *self._results()], last)
        for i in ends:
            done(i, read(slices[i]), last)
        arrived = [
            stack.back(calls, read(buffers[j]), last) for j, (stack, _, _) in enumerate(self.popped)
        ]
        added_in = [
            v for i in pushes for v in ((tokens[i], held[i]) if i in held else (tokens[i],))
        ]
        added = [
            read(v) for i in pushes for v in ((tokens[i], slices[i]) if i in held else (tokens[i],))
        ]
        gone = {index for index, _ in self._pushes}
        kept = [read(a) for index, a in enumerate(body.outvars) if index not in gone]
        xs = [v for v in body.invars[self.carry_end :] if v not in self._pops]
        self._new = compat.close(
            body.constvars,
            compat.constants(self._closed),
            [*body.invars[: self.carry_end], *added_in, *self._pops, *xs],
            [*kept[: self.carry], *added, *arrived, *kept[self.carry :]],
            equations,
            self._closed,
        )

    def _points(self) -> tuple[dict[int, int], dict[int, int]]:
        """For every push the equation in front of which the last slice must be gone, and the one in
        front of which the copy of this one starts; the end of the body is one, too."""
        done_at, start_at = {}, {}
        end = len(self._body.eqns)
        for i, (_, x) in enumerate(self._pushes):
            made = self._made.get(x, -1)
            done_at[i] = max((h for h in self._heavy if h <= made), default=0)
            start_at[i] = min((h for h in self._heavy if h > made), default=end)
        return done_at, start_at

    def _newest(self, eqn: JaxprEqn) -> list[Var]:
        """The newest value that `eqn` reads."""
        inside = [a for a in eqn.invars if isinstance(a, Var) and a not in self._pops]
        return sorted(inside, key=lambda a: self._made.get(a, -1))[-1:]

    def _results(self) -> list[Var]:
        """What the body makes, but for looped slices: weight gradients, which wait for nothing else,
        among them."""
        gone = {x for _, x in self._pushes}
        outs = (a for a in self._body.outvars if isinstance(a, Var) and a not in gone)
        return [*dict.fromkeys(a for a in outs if a in self._made)]

    def bind(self, calls: Calls, invars: Sequence[Atom], added: Sequence[Atom]) -> list[Any]:
        """Emits the scan on the operands of the old one and what is carried beside."""
        popped = {index for *_, index in self.popped}
        xs = [a for p, a in enumerate(invars) if p >= self.carry_end and p not in popped]
        operands = [*invars[: self.carry_end], *added, *xs]
        return calls.scan(self._new, self.consts, self.carry + len(added), operands, self._eqn)


def _token(calls: Calls, like: JaxprEqn) -> Var:
    """A token that waits for nothing."""
    return calls.bind(first_token, [], like)[0]
