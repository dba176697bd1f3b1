"""The steps of one update stand together: XLA makes one kernel of them, and the gradient dies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from helpers import BACKWARD, UPDATE, Builder, unit_costs

from vmem_jax.capture import capture
from vmem_jax.core.program import Phase, Program
from vmem_jax.core.simulate import simulate
from vmem_jax.policy.order import canonical_order

LARGE = 10_000


def _program(casts: bool = False) -> Program:
    """Two layers with a momentum and a weight each, updated by a step each in the traced order."""
    b = Builder()
    weights = [b.input(LARGE), b.input(LARGE)]
    momenta = [b.input(LARGE), b.input(LARGE)]
    x = b.input(LARGE)
    cast = [b.step([w], LARGE, fusible=True) if casts else w for w in weights]
    h = b.step([x, cast[0]], LARGE)
    loss = b.step([h, cast[1]], LARGE)
    second = b.step([loss, h], LARGE, BACKWARD)
    through = b.step([loss, cast[1]], LARGE, BACKWARD)
    first = b.step([through, x], LARGE, BACKWARD)
    gradients = [first, second]
    new = [
        b.step([m, g], LARGE, UPDATE, fusible=True) for m, g in zip(momenta, gradients, strict=True)
    ]
    moved = [b.step([w, g, m], LARGE, UPDATE, fusible=True)
             for w, g, m in zip(weights, gradients, new, strict=True)]  # fmt: skip
    aliases = [*zip(weights, moved, strict=True), *zip(momenta, new, strict=True)]
    return b.program([*new, *moved], aliases=tuple(aliases))


def _positions(program: Program) -> list[int]:
    order = canonical_order(program)
    return [order.index(s) for s in range(len(order))]


def test_the_steps_of_an_update_are_neighbours_and_the_gradient_dies():
    program = _program()
    at = _positions(program)
    assert at[8] == at[6] + 1  # of the second layer: its momentum, its weight
    assert at[6] < at[4]  # before the gradient of the first exists
    assert abs(at[7] - at[5]) == 1
    still = simulate(program, range(len(program.steps)), unit_costs(program)).live_nbytes
    early = simulate(program, canonical_order(program), unit_costs(program)).live_nbytes
    assert sum(early) < sum(still)


def test_no_weight_is_written_before_what_reads_its_cast():
    program = _program(casts=True)
    at = _positions(program)
    through = next(s for s, step in enumerate(program.steps) if step.phase is Phase.BACKWARD) + 1
    weight = len(program.steps) - 1
    assert at[weight] > at[through]
    assert at[weight] == at[weight - 2] + 1


def test_adams_steps_of_one_weight_are_neighbours():
    """Behind a bias correction, which is made first."""
    optimiser = optax.adam(1e-3)
    shapes = {"a": jax.ShapeDtypeStruct((64, 64), "float32")}
    shapes["b"] = shapes["a"]

    def step(state, x):
        params, rest = state
        loss = lambda p: jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]).sum()
        updates, rest = optimiser.update(jax.grad(loss)(params), rest, params)
        return optax.apply_updates(params, updates), rest

    state = shapes, jax.eval_shape(optimiser.init, shapes)
    x = jax.ShapeDtypeStruct((32, 64), "float32")
    closed = jax.make_jaxpr(step)(state, x)
    count = len(jax.tree.leaves(state))
    program = capture(closed, donated=(True,) * count + (False,)).program
    order = canonical_order(program)
    large = [s for s in order if program.steps[s].phase is Phase.UPDATE
             and program.steps[s].nbytes > 4096]  # fmt: skip
    assert len(large) == 6
    first, second = large[:3], large[3:]
    for group in (first, second):
        at = [order.index(s) for s in group]
        assert at == list(range(at[0], at[0] + 3))
    between = order[order.index(first[-1]) : order.index(second[0])]
    assert any(program.steps[s].phase is Phase.BACKWARD for s in between)
