"""transfers: emits the points of transfers into a rewritten jaxpr, with the barriers that order them.

`core.schedule` gives the positions of both and the operands of the barriers. A token passes through
all barriers. So the calls of the native extension run in the planned order even if every running
value is being copied itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.capture import Captured
from vmem_jax.core.looped import EXTRA
from vmem_jax.core.parked import parked, parked_spans
from vmem_jax.core.plan import Plan, Transfer
from vmem_jax.core.program import BEGIN, Program
from vmem_jax.core.schedule import Do, Event
from vmem_jax.core.validate import layout_violations
from vmem_jax.jax_compat import Atom, JaxprEqn, Var
from vmem_jax.transfer.ffi import Ffi
from vmem_jax.transfer.layout import Layout, Parked
from vmem_jax.transfer.memory_kinds import MemoryKinds
from vmem_jax.transfer.transport import WHOLE, AbstractTransport


def layout_of(program: Program, plan: Plan) -> Layout:
    """The layout of the host memory of `plan`.

    It has the slots of `parked_spans`: one for each transfer, except those of hosted buffers, whose
    host memory is the caller's; then one for each looped stack, as deep as the loop is long. What
    moves in a smaller sub-batch has slots of its own, behind all others and never in use with them.
    """
    moving, spans = parked(program, plan), parked_spans(program, plan)
    slots = [
        Parked(program.buffers[t.buffer].nbytes, *span)
        for t, span in zip(moving, spans, strict=False)
    ]
    for b, span in zip(plan.looped, spans[len(moving) :], strict=True):
        buffer = program.buffers[b]
        slots.append(Parked(buffer.nbytes // buffer.slices, *span, buffer.slices + EXTRA))
    if smaller := program.smaller_nbytes:
        after = len(plan.order)  # it runs before them, but no span begins before 0
        slots += [
            Parked(smaller[t.buffer], start + after, back + after)
            for t, (start, back) in zip(moving, spans, strict=False)
        ]
    return Layout.of(slots)


class Transfers:
    """Emits the points of a plan's transfers, position by position.

    Args:
      transport: the transport of the plan's transfers; None if only hosted buffers move. Those always
        use XLA's own copies, since XLA owns their memory.
      calls: emits into the rewritten jaxpr.
      current: the current variable of each captured value; changed when a buffer returns.
      is_smaller: whether `captured` is the smaller sub-batch, which has the last slots.
    """

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        transport: AbstractTransport | None,
        calls: Calls,
        current: dict[Var, Var],
        is_smaller: bool = False,
    ) -> None:
        program = captured.program
        self._plan, self._calls = plan, calls
        streams = MemoryKinds(Layout((), 0))
        moving = parked(program, plan)
        before = len(moving) if is_smaller else 0  # in a sub-batch no stack is looped
        slots = {t: slot for slot, t in enumerate(moving, before)}
        if slots and transport is None:
            raise ValueError("the plan has transfers, but there is no transport for them")
        self._transports: list[tuple[AbstractTransport, int]] = [
            (transport, slots[t]) if transport is not None and t in slots else (streams, i)
            for i, t in enumerate(plan.transfers)
        ]
        arena = None if transport is None else transport.arena
        if arena is not None:
            used = arena.layout.slots
            if program.smaller_nbytes:
                used = used[before:] if is_smaller else used[: len(moving)]
            extents = [(s.offset, s.offset + s.depth * s.stride) for s in used]
            if broken := layout_violations(program, plan, extents):
                raise ValueError(f"the layout of the arena is not valid for this plan: {broken[0]}")
        self.hosted: dict[Var, Var] = {}  # captured value -> its copy in host memory
        self._current, self._variables = current, captured.variables
        self._shards = captured.shards
        self._held: dict[int, Var] = {}  # transfer -> what its last point returned
        self._token: Var | None = None  # of the last barrier, behind the first start
        self._last: dict[int, Do] = {}  # transfer -> its last point
        self._calls_of = {
            Do.START: self._start,
            Do.GONE: self._gone,
            Do.FETCH: self._fetch,
            Do.BACK: self._back,
        }
        own = parked_spans(program, plan) if isinstance(transport, Ffi) else []
        self._last_start = max((start for start, _ in own), default=-1)
        self.returned: tuple[Var, ...] = ()  # tokens of all that is back
        boundaries = [p for p, s in enumerate(plan.order) if program.steps[s].is_boundary]
        self._repeats = bool(boundaries) and any(
            boundaries[0] < start < boundaries[-1] for start, _ in own[: len(moving)]
        )
        self._streamed_out = program.streamed_out

    def lies_in_host_memory(self, b: int, x: Var) -> None:
        """Hosted input `b` is the argument `x`."""
        self.hosted[self._variables[b]] = x
        for i, t in enumerate(self._plan.transfers):
            if t.buffer == b:
                self._held[i] = x

    def handed_through(self, b: int, like: JaxprEqn) -> None:
        """Hosted input `b` is a result, too, and is said to be one in host memory."""
        v = self._variables[b]
        transport = MemoryKinds(Layout((), 0))
        self.hosted[v] = self._calls.bind(
            lambda x: transport.start(x, slot=0), [self.hosted[v]], like
        )[0]

    def through_boundary(self, eqn: JaxprEqn, invars: Sequence[Atom]) -> list[Var]:
        """Emits the boundary `eqn` of sub-batches on `invars`; returns its results.

        The token of what is back goes through both boundaries, as one more total: a sub-batch begins
        to move nothing before all that the one before it has moved is back.
        """
        outs: list[Var] = [compat.new_var(v.aval) for v in eqn.outvars]
        operands, results, params = [*invars], [*outs], dict(eqn.params)
        if self._repeats:
            token = compat.new_var(jax.typeof(np.uint8(0)))
            results.append(token)
            if eqn.primitive.name == BEGIN:
                params["avals"] = (*params["avals"], token.aval)
                self.returned = (*self.returned, token)
            else:
                operands.insert(len(outs), self.returned[-1])
                params["count"] += 1
                self.returned = (token,)
        self._calls.emit(eqn.replace(invars=operands, outvars=results, params=params))
        return outs

    def take(self, event: Event, like: JaxprEqn) -> None:
        """Emits `event`, a point of a transfer or a barrier at one, where `like` stands."""
        if event.do is Do.BARRIER:
            self._barrier(event, like)
            return
        i = event.index
        self._held[i] = self._calls_of[event.do](i, self._plan.transfers[i], like)
        self._last[i] = event.do
        if not self._transports[i][0].fenced_behind:
            self._settle(i)

    def _barrier(self, event: Event, like: JaxprEqn) -> None:
        """One barrier over what the last points of transfers returned and the running values."""
        leaving = [i for i in event.transfers if i not in self._held]
        self._held.update((i, self._of(self._plan.transfers[i])) for i in leaving)
        self._fence(event.transfers, event.buffers, like)
        for i in leaving:
            self._current[self._variables[self._plan.transfers[i].buffer]] = self._held[i]
        own = [
            i for i in event.transfers if self._transports[i][0].fenced_behind and i not in leaving
        ]
        if own and self._token is None:  # the first point of a transfer of our own returns one
            self._token = self._held[own[0]]
        for i in own:
            self._settle(i)

    def _settle(self, i: int) -> None:
        """What transfer `i` holds stands for its buffer where its last point has returned that."""
        v = self._variables[self._plan.transfers[i].buffer]
        if self._last.get(i) is Do.BACK:
            self._current[v] = self._held.pop(i)
        elif self._last.get(i) is Do.GONE and self._plan.transfers[i].buffer in self._streamed_out:
            self.hosted[v] = self._held.pop(i)

    def _start(self, i: int, t: Transfer, like: JaxprEqn) -> Var:
        transport, how = self._transport_of(i)
        if isinstance(transport, Ffi) and self.returned:
            call = lambda x, *tokens: transport.start(x, **how, after=tokens)
            return self._calls.bind(call, [self._of(t), *self.returned], like)[0]
        return self._calls.bind(lambda x: transport.start(x, **how), [self._of(t)], like)[0]

    def _gone(self, i: int, t: Transfer, like: JaxprEqn) -> Var:
        transport, how = self._transport_of(i)
        call = lambda x, held: transport.gone(x, held, **how)
        return self._calls.bind(call, [self._of(t), self._held[i]], like)[0]

    def _fetch(self, i: int, t: Transfer, like: JaxprEqn) -> Var:
        transport, how = self._transport_of(i)
        aval: Any = self._variables[t.buffer].aval
        shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        call = lambda held: transport.fetch(held, shape, **how)
        return self._calls.bind(call, [self._held[i]], like)[0]

    def _back(self, i: int, t: Transfer, like: JaxprEqn) -> Var:
        transport, how = self._transport_of(i)
        if isinstance(transport, Ffi) and (self._repeats or t.back <= self._last_start):
            call = lambda held, *tokens: transport.back_in_turn(held, **how, after=tokens)
            x, token = self._calls.bind(call, [self._held[i], *self.returned], like)
            self.returned = (token,)
            return x
        return self._calls.bind(lambda held: transport.back(held, **how), [self._held[i]], like)[0]

    def _transport_of(self, i: int) -> tuple[AbstractTransport, dict[str, Any]]:
        """The transport of transfer `i`, and the arguments of its points: the slot and the split."""
        transport, slot = self._transports[i]
        spec = self._shards.spec(self._variables[self._plan.transfers[i].buffer])
        return transport, {"slot": slot, "spec": spec or WHOLE}

    def _of(self, t: Transfer) -> Var:
        return self._current[self._variables[t.buffer]]

    def _fence(self, moved: Sequence[int], running: Sequence[int], like: JaxprEqn) -> None:
        """One barrier over what `moved` hold, the token and the buffers `running`."""
        held = [self._held[i] for i in moved]
        behind = [self._variables[b] for b in running]
        own = any(self._transports[i][0].fenced_behind for i in moved)
        token = [self._token] if own and self._token is not None else []
        outs = self._calls.fence([*held, *token, *(self._current[v] for v in behind)], like)
        self._held.update(zip(moved, outs, strict=False))
        self._current.update(zip(behind, outs[len(held) + len(token) :], strict=True))
        if token:
            self._token = outs[len(held)]
