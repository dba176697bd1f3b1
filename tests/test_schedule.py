"""The schedule: the barriers that the heap is predicted with are those that the jaxpr has."""

from __future__ import annotations

import collections
import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest
from helpers import FAST, plan_of
from steps import CASES, normal
from test_arena_order import RAW, drawn, in_sub_batches

from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.core import planned
from vmem_jax.core.costs import analytic
from vmem_jax.core.fences import fences
from vmem_jax.core.parked import parked
from vmem_jax.core.plan import Transfer
from vmem_jax.core.planned import predicted_need
from vmem_jax.core.schedule import Do, schedule
from vmem_jax.core.simulate import simulate
from vmem_jax.policy import Auto
from vmem_jax.rewrite import rewrite
from vmem_jax.rewrite.transfers import layout_of
from vmem_jax.transfer.extension import describe
from vmem_jax.transfer.ffi import Ffi

pytestmark = pytest.mark.skipif(
    describe().startswith("none"), reason=f"native extension: {describe()}"
)
TOKEN = ((), "uint8")
REWRITING = importlib.import_module("vmem_jax.rewrite.rewrite")


def kind(v):
    return v.aval.shape, str(v.aval.dtype)


def emitted(captured, plan, monkeypatch):
    """Of each barrier of the rewritten jaxpr the shapes and dtypes that it holds, without tokens.

    Not of those in sums in parts: they hold a few rows, which the prediction leaves out.
    """
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "optimization_barrier":
                values = [v for v in eqn.invars if isinstance(v, compat.Var)]  # no numbers
                found.append(collections.Counter(map(kind, values)))
                found[-1].pop(TOKEN, None)
            elif eqn.primitive.name == "scan":
                walk(compat.open_jaxpr(eqn.params["jaxpr"]))

    moves = parked(captured.program, plan)
    transport = Ffi(layout_of(captured.program, plan)) if moves else None
    with monkeypatch.context() as patch:
        patch.setattr(REWRITING, "with_sums_in_parts", lambda closed: closed)
        closed = rewrite(captured, plan, transport)
    walk(compat.open_jaxpr(closed))
    return found


def predicted(captured, plan, monkeypatch):
    """The same of the events that `predicted_need` predicts from."""
    seen = []

    def scheduled(*args, **options):
        seen.extend(schedule(*args, **options))
        return (*seen,)

    with monkeypatch.context() as patch:
        patch.setattr(planned, "schedule", scheduled)
        predicted_need(captured.program, plan)
    last: dict[int, Do] = {}
    found = []
    for event in seen:
        if event.do is Do.BARRIER:
            held = [captured.variables[b] for b in event.buffers]
            for i in event.transfers:
                b = plan.transfers[i].buffer
                is_token = last.get(i) in (Do.START, Do.GONE) and b not in captured.program.hosted
                held += [] if is_token else [captured.variables[b]]
            found.append(collections.Counter(map(kind, held)))
        elif event.index >= 0 and event.do is not Do.RUN:
            last[event.index] = event.do
    return found


def check(captured, plan, monkeypatch):
    ours, theirs = (of(captured, plan, monkeypatch) for of in (predicted, emitted))
    assert len(ours) == len(theirs) and ours == theirs
    return ours


@pytest.mark.parametrize("case", RAW, ids=lambda c: c.name)
def test_predicted_and_emitted_barriers_are_the_same(case, monkeypatch):
    fun, args = case.make(jnp.float32, 1)
    captured = capture(jax.jit(fun).trace(*args).jaxpr)
    program = captured.program
    costs = analytic(program, FAST)
    peak = simulate(program, range(len(program.steps)), costs).peak
    alone = check(captured, plan_of(program, range(len(program.steps))), monkeypatch)
    moving = drawn(program, 0)
    assert len(check(captured, moving, monkeypatch)) > len(alone) + len(moving.transfers)
    again = Auto(allow=("order", "recompute")).plan(program, costs, int(0.9 * peak))
    check(captured, again, monkeypatch)


def test_of_sub_batches(monkeypatch):
    captured = in_sub_batches(4)
    assert check(captured, drawn(captured.program, 0), monkeypatch)


def test_of_a_clamp_behind_a_library_kernel(monkeypatch):
    def step(w, x):
        def loss_of(w):
            y = jax.nn.relu(x @ w + 1)
            return jnp.where(y > 0, jnp.sin(y), 0).sum() + (y[:2] * 3).sum()

        return jax.grad(loss_of)(w)

    captured = capture(jax.jit(step).trace(jnp.ones((16, 16)), jnp.ones((64, 16))).jaxpr)
    program = captured.program
    plan = plan_of(program, range(len(program.steps)))
    [clamp] = [s for s, step in enumerate(program.steps) if step.compared]
    events = schedule(program, plan.order)
    behind = events[[e.index for e in events if e.do is Do.RUN].index(clamp) :]
    assert any(e.do is Do.BARRIER and e.buffers == program.steps[clamp].compared for e in behind)
    check(captured, plan, monkeypatch)


def test_of_hosted_arguments_and_results(monkeypatch):
    def step(p, m, x):
        g = jax.grad(lambda p: jnp.square(jnp.tanh(x @ p) @ p).sum())(p)
        m = 0.9 * m + g
        return p - 0.1 * m, m

    args = [normal(i, (16, 16), jnp.float32) for i in range(3)]
    captured = capture(jax.jit(step).trace(*args).jaxpr)
    program = captured.program
    moments, made = program.inputs[1], program.outputs[1]
    end = len(program.steps)
    read, by = program.readers[moments][0], program.producer[made]
    transfers = Transfer(moments, 0, 0, read - 1, read), Transfer(made, by + 1, end, end, end)
    program = dataclasses.replace(program, hosted=(moments, made))
    captured = dataclasses.replace(captured, program=program)
    plan = plan_of(program, range(end), transfers=transfers)
    assert check(captured, plan, monkeypatch)


def test_every_step_runs_and_everything_that_dies_is_freed():
    case = next(c for c in CASES if c.name == "lstm")
    fun, args = case.make(jnp.float32, 1)
    program = capture(jax.jit(fun).trace(*args).jaxpr).program
    plan = drawn(program, 1)
    events = schedule(program, plan.order, plan.transfers)
    assert [e.index for e in events if e.do is Do.RUN] == [*plan.order]
    assert [e.position for e in events] == sorted(e.position for e in events)
    freed = {b for e in events if e.do is Do.FREE for b in e.buffers}
    assert freed == {b for step in program.steps for b in step.writes} - set(program.outputs)
    for do in (Do.START, Do.GONE, Do.FETCH, Do.BACK):
        assert {e.index for e in events if e.do is do} == {*range(len(plan.transfers))}


def test_a_fence_holds_values_in_the_order_in_which_they_are_made():
    """XLA makes them in that order: else a weight gradient is made before the last one is summed."""
    captured = in_sub_batches(4)
    program = captured.program
    order = (*range(len(program.steps)),)
    found = set()
    for event in schedule(program, order):
        if event.do is Do.BARRIER and len(event.buffers) > 1:
            made = [program.producer[b] for b in event.buffers]
            assert made == sorted(made)
            found.add(event.position)
    unsorted = {f.position for f in fences(program, order) if f.buffers[0] != min(f.buffers)}
    assert unsorted & found
    for event in schedule(program, order, as_made=False):  # as XLA:CPU does better
        if event.do is Do.BARRIER and event.position in unsorted:
            [fence] = [f for f in fences(program, order) if f.position == event.position]
            assert event.buffers == fence.buffers
            unsorted.discard(event.position)
    assert not unsorted
