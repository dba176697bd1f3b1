"""rewrite: the equations of a captured step in the order of a plan, with fences and recomputation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.capture import Captured
from vmem_jax.capture.convolutions import Behind, Matched, match, match_epilogue
from vmem_jax.capture.small_updates import gradients
from vmem_jax.conv.fused import fused_convolution
from vmem_jax.conv.primitive import micro_convolution
from vmem_jax.core.convolution import Configuration
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import states_row_major
from vmem_jax.core.program import BEGIN, COMPRESS, DECOMPRESS, END, Step
from vmem_jax.core.schedule import Do, schedule
from vmem_jax.core.stated_layouts import may_be_left
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from vmem_jax.rewrite.column_sums import with_sums_in_parts
from vmem_jax.rewrite.drawn_masks import with_drawn_masks
from vmem_jax.rewrite.loops import Loops
from vmem_jax.rewrite.own_stacks import with_own_stacks
from vmem_jax.rewrite.sub_batches import looped
from vmem_jax.rewrite.transfers import Transfers
from vmem_jax.transfer.transport import AbstractTransport


def rewrite(
    captured: Captured,
    plan: Plan,
    transport: AbstractTransport | None = None,
    store: int = 0,
    body: bool = False,
) -> ClosedJaxpr:
    """Returns the flat jaxpr of `captured` rewritten to `plan`. An identity plan changes nothing.

    Args:
      transport: the transport of the plan's transfers, with the layout of `layout_of`. Transfers of
        hosted inputs and outputs need none.
      store: the id of the store for the overflow of compressed values.
      body: whether `captured` is the body of a loop.

    A step that appears again in the order becomes a clone of its equations on new variables. Each
    fence becomes one `optimization_barrier`, whose results replace the fenced values from there on.
    In sub-batches the equations of one sub-batch become the body of a loop.
    """
    parts = captured.sub_batches
    is_whole = plan.fenced and captured.program.on_gpu and not body
    is_alone = captured.shards.device_count == 1

    def finished(closed: ClosedJaxpr) -> ClosedJaxpr:
        if not is_whole:
            return closed
        closed = with_own_stacks(closed)
        return with_drawn_masks(with_sums_in_parts(closed)) if is_alone else closed

    rewritten = _in_order(captured, plan, transport, store, body)
    if parts is None:
        return finished(rewritten)
    smaller = None
    if parts.smaller is not None:  # its convolutions are smaller, and so XLA's own
        times = [step.times for step in captured.program.steps]
        others = tuple((s, each) for s, each in plan.convolutions if times[s] == 1)
        plan = dataclasses.replace(plan, convolutions=others)
        smaller = _in_order(captured.of(parts.smaller), plan, transport, is_smaller=True)
    return finished(looped(rewritten, parts, smaller))


def _in_order(
    captured: Captured,
    plan: Plan,
    transport: AbstractTransport | None,
    store: int = 0,
    body: bool = False,
    is_smaller: bool = False,
) -> ClosedJaxpr:
    """`captured.flat` in the order of `plan`, with its fences and transfers."""
    untouched = not plan.fenced and plan.order == tuple(range(len(captured.program.steps)))
    if untouched and not captured.program.compressed:
        return captured.flat
    return _Rewriter(captured, plan, transport, store, body, is_smaller).run()


class _Rewriter:
    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        transport: AbstractTransport | None,
        store: int,
        body: bool,
        is_smaller: bool,
    ) -> None:
        self.program = captured.program
        self.store = store
        self.plan = plan
        self.flat = captured.flat
        self.opened = compat.open_jaxpr(captured.flat)
        self.variables = captured.variables
        self.current: dict[Var, Var] = {}  # existing value -> the variable that holds it now
        for v in (*self.opened.invars, *self.opened.constvars):
            self.current[v] = v
        self.done: dict[tuple, list[Var]] = {}  # (equation, inputs) -> results, to emit once
        self.equations: list[JaxprEqn] = []
        self.transfers: Transfers | None = None
        self.loops: Loops | None = None
        self.invars = list(self.opened.invars)
        self.calls = Calls(self.equations.append)
        self.configurations = dict(plan.divided)
        self.maker = {v: eqn for eqn in self.opened.eqns for v in eqn.outvars}
        self.numbers: dict[int, Var] = {}  # equation that fills an array -> its number
        self.shared: dict[int, Var] = {}  # length -> what all updates of so many elements read
        self.outside: dict[Var, Var] = {}  # as `current`, where the sub-batches begin
        self.left: set[Var] = set()  # gradients whose layouts are left to XLA
        if not body and not states_row_major(self.program, plan):
            steps = filter(may_be_left, self.program.steps)
            self.left = {self.variables[b] for step in steps for b in step.writes}
        self.events = schedule(
            self.program,
            plan.order,
            plan.transfers,
            looped=plan.looped,
            fenced=plan.fenced,
            own=transport is not None and transport.fenced_behind,
            body=body,
            as_made=captured.inputs.platform != "cpu",
        )
        if plan.moves or self.program.hosted:
            calls = self.calls
            self.transfers = Transfers(captured, plan, transport, calls, self.current, is_smaller)
            for b in set(self.program.hosted) & set(self.program.inputs):
                self.invars[b] = compat.new_var(compat.in_host_memory(self.invars[b].aval))
                self.transfers.lies_in_host_memory(b, self.invars[b])
            if plan.looped:
                self.loops = Loops(captured, plan, transport, calls)

    def run(self) -> ClosedJaxpr:
        steps, order = self.program.steps, self.plan.order
        for event in self.events:
            s = order[min(event.position, len(order) - 1)]
            like = steps[s].equations[-1]
            if event.do is Do.RUN:
                self._run(s)
            elif event.do is Do.BARRIER and not event.transfers:
                self._fence(event.buffers, like, steps[s].equations if not steps[s].reads else ())
            elif event.do is not Do.FREE:
                assert self.transfers is not None
                self.transfers.take(event, self.opened.eqns[like])
        here = self.current
        if self.transfers is not None:
            if order:
                last = self.opened.eqns[steps[order[-1]].equations[-1]]
                through = {*self.program.hosted} & {*self.program.inputs} & {*self.program.outputs}
                for b in sorted(through):
                    self.transfers.handed_through(b, last)
            here = {**self.current, **self.transfers.hosted}
        outvars = [a if isinstance(a, Literal) else here[a] for a in self.opened.outvars]
        return compat.close(
            self.opened.constvars,
            compat.constants(self.flat),
            self.invars,
            outvars,
            self.equations,
            self.flat,
        )

    def _run(self, s: int) -> None:
        """Emits step `s`. Fences between the boundaries of sub-batches have no effect outside."""
        if self.program.steps[s].op == BEGIN:
            self.outside = dict(self.current)
        if self.program.steps[s].op in (BEGIN, END):
            self.shared.clear()  # what is made in the loop stays there
        self._step(s)
        if self.program.steps[s].op == END:
            self.current.update(self.outside)

    def _step(self, s: int) -> None:
        """Emits the equations of step `s` on the current versions of its reads."""
        step = self.program.steps[s]
        local: dict[Var, Atom] = {
            self.variables[b]: self.current[self.variables[b]] for b in step.reads
        }

        if step.updates > 1:
            local |= self._reading_one_array(step)

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else local[atom]

        fused = self._behind(s)
        together = () if fused is None else fused.equations
        for i in step.equations:
            eqn = self._stored(self.opened.eqns[i])
            if i in together[:-1]:
                continue
            if eqn.outvars and all(v in local for v in eqn.outvars):
                continue  # a view of what the step reads, read itself
            if eqn.primitive.name == "layout_constraint" and not self.left.isdisjoint(eqn.invars):
                local[eqn.outvars[0]] = read(eqn.invars[0])
                continue
            inputs = list(eqn.invars)
            if fused is not None and i == together[-1]:
                inputs = [*self.opened.eqns[together[0]].invars, fused.bias]
            number = self.numbers.pop(i, None)
            invars = [read(a) for a in inputs] if number is None else [number]
            key = (i, *(id(a) for a in invars if not isinstance(a, Literal)))
            outs = None if eqn.effects else self.done.get(key)
            if self.loops is not None and self.loops.has(eqn):
                assert self.transfers is not None
                outs = self.loops.emit(eqn, invars, self.transfers.returned)
            elif outs is None:
                outs = self._emit(s, eqn, invars, fused if i in together else None)
                self.done[key] = outs
            local.update(zip(eqn.outvars, outs, strict=True))
        for b in step.writes:
            v = self.variables[b]
            self.current[v] = local[v]

    def _reading_one_array(self, step: Step) -> dict[Var, Atom]:
        """The gradients that `step` reads, each taken where a vector is true, which it always is.

        XLA:GPU makes one kernel of chains that read one array (`capture.small_updates`).
        """
        written = self.variables[step.writes[0]]
        size = math.prod(getattr(written.aval, "shape", ()))
        like = self.opened.eqns[step.equations[-1]]
        if size not in self.shared:
            true = lambda: lax.optimization_barrier(jnp.ones(size, bool))
            [self.shared[size]] = self.calls.bind(true, [], like)
        made = [self.variables[b] for b in step.reads if self.program.producer[b] >= 0]
        taken = lambda here, x: lax.select(here.reshape(x.shape), x, lax.full_like(x, 0))
        return {
            v: self.calls.bind(taken, [self.shared[size], self.current[v]], like)[0]
            for v in gradients(made, written, made)
        }

    def _behind(self, s: int) -> Behind | None:
        """The epilogue that the calls of step `s` run after its convolution; None without one."""
        if s not in self.configurations or not self.configurations[s].epilogue:
            return None
        eqns, equations = self.opened.eqns, self.program.steps[s].equations
        [root] = [i for i in equations if eqns[i].primitive.name == "conv_general_dilated"]
        return match_epilogue(self._matched(eqns[root]), equations, root, eqns, self.maker)

    def _matched(self, eqn: JaxprEqn) -> Matched:
        matched = match(eqn, self.maker)
        assert matched is not None, "a plan has configurations only of what capture matched"
        return matched

    def _emit(self, s: int, eqn: JaxprEqn, invars: list[Atom], behind: Behind | None) -> list[Var]:
        """Emits `eqn` of step `s`, a convolution by its configuration; returns its results.

        Args:
          behind: the epilogue that ends in `eqn`; `invars` are then those of the convolution, and the
            bias.
        """
        if behind is not None:
            matched = self._matched(self.opened.eqns[behind.equations[0]])
            matched = dataclasses.replace(
                matched, convolution=matched.convolution.with_epilogue(behind.epilogue)
            )
            call = functools.partial(_divided, matched, self.configurations[s])
            return self.calls.bind(call, invars, eqn)
        if s in self.configurations and eqn.primitive.name == "conv_general_dilated":
            call = functools.partial(_divided, self._matched(eqn), self.configurations[s])
            return self.calls.bind(call, invars, eqn)
        if self.transfers is not None and eqn.primitive.name in (BEGIN, END):
            return self.transfers.through_boundary(eqn, invars)
        outs = [compat.new_var(v.aval) for v in eqn.outvars]
        self.equations.append(eqn.replace(invars=invars, outvars=outs))
        return outs

    def _stored(self, eqn: JaxprEqn) -> JaxprEqn:
        """`eqn`, with what it compresses in the store of this step."""
        if eqn.primitive.name in (COMPRESS, DECOMPRESS):
            return eqn.replace(params={**eqn.params, "store": self.store})
        if eqn.primitive.name != "scan" or not eqn.effects or not self.program.compressed:
            return eqn
        body = eqn.params["jaxpr"]
        opened = compat.open_jaxpr(body)
        eqns = [self._stored(inner) for inner in opened.eqns]
        parts = opened.constvars, compat.constants(body), opened.invars, opened.outvars, eqns
        return eqn.replace(params={**eqn.params, "jaxpr": compat.close(*parts, like=body)})

    def _fence(self, buffers: tuple[int, ...], like: int, filling: Sequence[int] = ()) -> None:
        """One barrier over the current versions of `buffers`, in front of equation `like`.

        Args:
          filling: equations of a step that reads nothing: the numbers with which they fill arrays
            wait for the barrier, too.
        """
        if not buffers:
            return
        held = [self.variables[b] for b in buffers]
        invars: list[Atom] = [self.current[v] for v in held]
        filled = [i for i in filling if _is_filled(self.opened.eqns[i])]
        invars += [self.opened.eqns[i].invars[0] for i in filled]
        outs = [compat.new_var(v.aval) for v in invars]  # of a looped stack that is its token
        self.equations.append(
            compat.new_equation(
                lax.optimization_barrier_p, invars, outs, {}, self.opened.eqns[like]
            )
        )
        self.current.update(zip(held, outs, strict=False))
        self.numbers.update(zip(filled, outs[len(held) :], strict=True))


def _is_filled(eqn: JaxprEqn) -> bool:
    """Whether `eqn` fills an array with a number that the program names."""
    return eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal)


def _divided(
    matched: Matched,
    configuration: Configuration,
    lhs: jax.Array,
    rhs: jax.Array,
    *bias: jax.Array,
) -> jax.Array:
    """Emits a convolution with `configuration`, from its equation's operands to its result."""
    operands = matched.operands(lhs, rhs)
    if matched.convolution.epilogue:
        [values] = bias
        y = fused_convolution(matched.convolution, configuration, *operands, values.reshape(-1))
    else:
        y = micro_convolution(matched.convolution, configuration, *operands)
    return matched.result(y)
