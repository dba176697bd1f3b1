"""The order of our calls that the emitted program forces, and that the arena's layout relies on.

The runtime of XLA:CPU starts a call as soon as what it reads is there: a barrier orders nothing when
the program runs. Here the calls of a rewritten step run in random orders that keep to the tokens and
buffers that they hand to each other, and to nothing else.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transfer_cases as cases
from helpers import FAST, plan_of
from steps import CASES, normal
from test_loops import arguments, training

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.batch import follow_batch
from vmem_jax.capture.layouts import Layout as BatchLayout
from vmem_jax.core.costs import analytic
from vmem_jax.core.plan import Transfer
from vmem_jax.core.program import BEGIN
from vmem_jax.core.validate import layout_violations, violations
from vmem_jax.policy import POLICIES, Auto, Keep
from vmem_jax.policy.base import Infeasible
from vmem_jax.rewrite import rewrite
from vmem_jax.rewrite.transfers import layout_of
from vmem_jax.transfer.extension import describe
from vmem_jax.transfer.ffi import Ffi

pytestmark = pytest.mark.skipif(
    describe().startswith("none"), reason=f"native extension: {describe()}"
)
RAW = [case for case in CASES if case.jit is jax.jit]


@dataclasses.dataclass(frozen=True)
class Call:
    """One of our calls, and the earlier ones that it reads a token or a buffer of."""

    name: str
    slot: int
    after: frozenset[int]


def calls_of(closed, ordered=True):
    """The calls of a rewritten jaxpr, loops unrolled. Values that others compute order nothing.

    Args:
      ordered: false leaves out what only tells that another tensor is back.
    """
    found: list[Call] = []

    def run(jaxpr, env):
        read = lambda a: env.get(a, frozenset()) if isinstance(a, compat.Var) else frozenset()
        for eqn in jaxpr.eqns:
            reads, outs = [read(a) for a in eqn.invars], eqn.outvars
            name = eqn.primitive.name
            if name == "ffi_call" and "vmem_jax" in eqn.params["target_name"]:
                kind = eqn.params["target_name"].removeprefix("vmem_jax_")
                if not ordered:
                    own = {"offload_start": 0, "fetch_done": 1}.get(kind, len(reads))
                    reads = reads[:own]
                slot = int(dict(eqn.params["attributes"])["slot"])
                found.append(Call(kind, slot, frozenset().union(*reads)))
                env.update(dict.fromkeys(outs, frozenset((len(found) - 1,))))
            elif name == "optimization_barrier":
                env.update(zip(outs, reads, strict=True))
            elif name == "scan":
                env.update(zip(outs, loop(eqn, reads), strict=True))

    def loop(eqn, reads):
        body = compat.open_jaxpr(eqn.params["jaxpr"])
        consts, carry = compat.scan_counts(eqn)
        fixed, carried, xs = reads[:consts], reads[consts : consts + carry], reads[consts + carry :]
        for _ in range(eqn.params["length"]):
            env = dict(zip(body.invars, [*fixed, *carried, *xs], strict=True))
            run(body, env)
            outs = [
                env.get(a, frozenset()) if isinstance(a, compat.Var) else frozenset()
                for a in body.outvars
            ]
            carried = outs[:carry]
        return outs

    run(compat.open_jaxpr(closed), {})
    return found


def shuffled(calls, seed):
    """A random order of `calls` in which each comes after those that it reads from."""
    rng = random.Random(seed)
    waits = [len(call.after) for call in calls]
    readers = [[] for _ in calls]
    for i, call in enumerate(calls):
        for j in call.after:
            readers[j].append(i)
    ready, order = [i for i, n in enumerate(waits) if not n], []
    while ready:
        i = ready.pop(rng.randrange(len(ready)))
        order.append(i)
        for j in readers[i]:
            waits[j] -= 1
            if not waits[j]:
                ready.append(j)
    assert len(order) == len(calls)
    return [calls[i] for i in order]


def faults(calls, layout):
    """What the handlers would find wrong if they were called in this order."""
    stacks = [[] for _ in layout.slots]
    wrong = []

    def extent(slot, depth):
        where = layout.slots[slot]
        return where.offset + depth * where.stride, where.offset + (depth + 1) * where.stride

    held = {}
    for call in calls:
        stack = stacks[call.slot]
        phases = {"offload_done": "leaving", "fetch_start": "parked", "fetch_done": "returning"}
        if call.name == "offload_start":
            key = call.slot, len(stack)
            low, high = extent(*key)
            if len(stack) == layout.slots[call.slot].depth:
                wrong.append(f"slot {call.slot} is full")
            wrong += [
                f"slot {call.slot}: its place holds {other}"
                for other, (bottom, top) in held.items()
                if low < top and bottom < high
            ]
            held[key] = low, high
            stack.append("leaving")
            continue
        before = phases[call.name]
        at = [i for i, phase in enumerate(stack) if phase == before]
        if not at:
            wrong.append(f"slot {call.slot} has nothing that is {before}")
            continue
        if call.name == "fetch_done":
            stack.pop(at[-1])
            held.pop((call.slot, len(stack)), None)
        else:
            stack[at[0 if call.name == "offload_done" else -1]] = {
                "offload_done": "parked",
                "fetch_start": "returning",
            }[call.name]
    assert wrong or not any(stacks)
    return wrong


def emitted(captured, plan, ordered=True):
    layout = layout_of(captured.program, plan)
    return calls_of(rewrite(captured, plan, Ffi(layout)), ordered), layout


def check(captured, plan, seeds=20):
    assert violations(captured.program, plan) == []
    calls, layout = emitted(captured, plan)
    assert len(calls) >= 4 * len(plan.transfers)
    for seed in range(seeds):
        assert faults(shuffled(calls, seed), layout) == []


def gaps(program):
    """(buffer, use, next use) of what can wait in host memory between two of its uses, in order."""
    marks = [s for s, step in enumerate(program.steps) if step.is_boundary]
    inside = range(marks[0] + 1, marks[1] + 1) if marks else range(1, len(program.steps))
    for b, buffer in enumerate(program.buffers):
        if program.is_resident[b] or not buffer.movable or program.producer[b] < 0:
            continue
        uses = [program.producer[b], *program.readers[b]]
        for use, then in itertools.pairwise(uses):
            if then - use > 1 and use + 1 in inside and then in inside:
                yield b, use, then


def drawn(program, seed):
    """A plan in the traced order with transfers in random gaps, at random points of them."""
    rng = random.Random(seed)
    chosen = [gap for gap in gaps(program) if rng.random() < 0.6][:30]
    transfers = [
        Transfer(b, *sorted(rng.randint(use + 1, then) for _ in range(4)))
        for b, use, then in chosen
    ]
    order = range(len(program.steps))
    sub_batches = program.sub_batches
    return plan_of(program, order, transfers=tuple(transfers), sub_batches=sub_batches)


@pytest.mark.parametrize("case", RAW, ids=lambda c: c.name)
def test_whatever_moves_no_place_is_taken_twice(case):
    fun, args = case.make(jnp.float32, 1)
    captured = capture(jax.jit(fun).trace(*args).jaxpr)
    for seed in range(2):
        plan = drawn(captured.program, seed)
        assert len(plan.transfers) > 4
        check(captured, plan)


MOVING = [name for name, policy in POLICIES.items() if "offload" in policy.needs]
TRAINED = [case for case in RAW if case.name in ("vgg", "transformer", "gan", "accumulate")]


@pytest.mark.parametrize("case", TRAINED, ids=lambda c: c.name)
@pytest.mark.parametrize("name", ["auto", *MOVING])
def test_nor_by_the_plans_of_policies(name, case):
    """The lowest one, and one within nine tenths of what is live if all is kept."""
    fun, args = case.make(jnp.float32, 1)
    captured = capture(jax.jit(fun).trace(*args).jaxpr)
    program, costs = captured.program, analytic(captured.program, FAST)
    policy = Auto(allow=("order", "offload")) if name == "auto" else POLICIES[name]()
    kept = Keep().plan(program, costs, None)
    found = [policy.plan(program, costs, b) for b in (1, int(0.9 * kept.predicted_peak))]
    plans = [one.plan if isinstance(one, Infeasible) else one for one in found]
    moving = [plan for plan in plans if plan is not None and plan.transfers]
    assert moving
    for plan in moving:
        check(captured, plan)


def dense(w, x):
    """Three layers whose values are read again."""
    h = [x]
    for p in w:
        h.append(jnp.tanh(h[-1] @ p))
    return jnp.square(h[-1] + h[1]).mean()


def in_sub_batches(count, samples=12):
    """A step of `dense` in `count` sub-batches."""
    w = [normal(i, (8, 8), jnp.float32) for i in range(3)]
    x = normal(9, (samples, 8), jnp.float32)
    step = lambda w, x: jax.tree.map(lambda p, g: p - g, w, jax.grad(dense)(w, x))
    captured = capture(jax.jit(step).trace(w, x).jaxpr)
    batch = follow_batch(captured.flat, [None] * len(w) + [BatchLayout(0)], samples)
    return captured.in_sub_batches(batch, count)


@pytest.mark.parametrize("seed", range(4))
def test_sub_batches_wait_for_the_one_before(seed):
    captured = in_sub_batches(4)
    plan = drawn(captured.program, seed)
    assert plan.transfers and BEGIN in {step.op for step in captured.program.steps}
    check(captured, plan)
    calls, layout = emitted(captured, plan, ordered=False)
    assert any(faults(shuffled(calls, s), layout) for s in range(20))


def test_looped_stacks_keep_their_places():
    captured = capture(jax.jit(training()).trace(*arguments()).jaxpr)
    program = captured.program
    plan = Auto(allow=("order", "offload")).plan(program, analytic(program, FAST), 2 << 20)
    assert plan.looped
    calls, layout = emitted(captured, plan)
    for seed in range(20):
        assert faults(shuffled(calls, seed), layout) == []


def twice(x, w):
    a, b = x @ w, w @ x
    c = a @ b
    return a + c, (c @ c) @ b, b @ x


def shared():
    """`twice` and a plan of it in which one place is used twice."""
    args = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2
    captured = capture(jax.jit(twice).trace(*args).jaxpr)
    program = captured.program
    a, c = (program.steps[s].writes[0] for s in (0, 2))
    moved = Transfer(a, 1, 1, 2, 2), Transfer(c, 4, 4, 4, 4)
    return captured, plan_of(program, range(len(program.steps)), transfers=moved)


def test_a_place_is_used_again_where_a_token_says_that_it_is_free():
    captured, plan = shared()
    check(captured, plan)
    layout = layout_of(captured.program, plan)
    assert layout.slots[0].offset == layout.slots[1].offset
    without, _ = emitted(captured, plan, ordered=False)
    assert any(faults(shuffled(without, seed), layout) for seed in range(20))


def test_a_layout_that_no_token_holds_is_refused():
    captured, plan = shared()
    program, [_, second] = captured.program, plan.transfers
    assert layout_violations(program, plan, [(0, 8), (0, 8)]) == []
    assert layout_violations(program, plan, [(0, 8)]) != []
    crossing = Transfer(program.steps[1].writes[0], 3, 3, 5, 5)
    over = dataclasses.replace(plan, transfers=(crossing, second))
    assert layout_violations(program, over, [(0, 8), (8, 16)]) == []
    assert layout_violations(program, over, [(0, 8), (4, 12)]) != []
    with pytest.raises(ValueError, match="layout of the arena"):
        rewrite(captured, over, Ffi(layout_of(program, plan)))


def test_a_place_that_is_used_twice_holds_the_right_tensor():
    _, plan = shared()
    args = [normal(i, (64, 64), jnp.float32) for i in range(2)]
    step = vmem_jax.jit(twice, plan=plan)
    expected = vmem_jax.jit(twice, budget="1GiB", policy="exact")(*args)
    with cases.injected(delay_seconds=2e-3, poison=True):
        for _ in range(5):
            got = step(*args)
            assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


def moving_runs_right(device, seed):
    """Random plans of one step whose places are used again, run with copies that take their time and
    poison where they have been: who comes too early or too late finds that."""
    args = [normal(i, (8, 8), jnp.float32) for i in range(4)], normal(9, (64, 8), jnp.float32)
    args = jax.device_put(args, device)
    step = lambda w, x: jax.tree.map(lambda p, g: p - g, w, jax.grad(dense)(w, x))
    captured = capture(jax.jit(step).trace(*args).jaxpr, platform=device.platform)
    plan = drawn(captured.program, seed)
    layout = layout_of(captured.program, plan)
    assert layout.nbytes < sum(slot.nbytes for slot in layout.slots)
    moving = vmem_jax.jit(step, plan=plan, transport="ffi")
    faults = cases.injected(delay_seconds=2e-3, poison=True)
    with jax.default_matmul_precision("highest"), faults:
        expected = jax.jit(step)(*args)
        for _ in range(3):
            got = moving(*args)
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_random_plans_run_right(seed):
    moving_runs_right(jax.devices("cpu")[0], seed)
