"""Updates in the loops that make their gradients: scanned layers and their optimisers."""

from __future__ import annotations

import json

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from processes import in_subprocess

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.core.need import need_nbytes

LAYERS, WIDTH, ROWS = 16, 64, 4
STACK = 4 * LAYERS * WIDTH * WIDTH

EXACT = {"xla_backend_optimization_level": 0}
"""Without it LLVM makes one operation of a product and a sum where it likes, which rounds once."""


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 0.2, shape), jnp.float32)


X, W, B = normal(0, ROWS, WIDTH), normal(1, LAYERS, WIDTH, WIDTH), normal(2, LAYERS, WIDTH)


def layer(y, p):
    return y + jnp.tanh(y @ p["w"] + p["b"]), None


def scanned(layer=layer, **options):
    return lambda p, x: lax.scan(layer, x, p, **options)[0]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(WIDTH, kernel_init=lambda *_: W[0])(x)), None


def flax_scan():
    stack = nn.scan(
        nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
    )()
    params = jax.eval_shape(stack.init, jax.random.key(0), X, None)
    filled = jax.tree.map(lambda a: W if a.ndim == 3 else B, params)
    return lambda p, x: stack.apply(p, x, None)[0], filled


def equinox_scan():
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key))
    arrays, static = eqx.partition(
        jax.eval_shape(make, jax.random.split(jax.random.key(0), LAYERS)),
        lambda a: isinstance(a, jax.ShapeDtypeStruct),
    )
    arrays = jax.tree.map(lambda a: W if a.ndim == 3 else B, arrays)
    one = lambda y, a: (y + jax.vmap(eqx.combine(a, static))(y), None)
    return lambda p, x: lax.scan(jax.checkpoint(one), x, p)[0], arrays


def nested(p, x):
    """A loop of loops, both checkpointed."""
    inner = jax.checkpoint(lambda y, p: lax.scan(jax.checkpoint(layer), y, p))
    halves = lambda a: a.reshape(2, LAYERS // 2, *a.shape[1:])
    return lax.scan(lambda y, p: (inner(y, p)[0], None), x, jax.tree.map(halves, p))[0]


def clipped(y, p):
    return jnp.clip(layer(y, p)[0], -1, 1), None


def flipped(p, x):
    return lax.scan(layer, x, jax.tree.map(lambda a: a[::-1], p))[0]


def shared(p, x):
    """The same weights in two loops, whose gradients are summed."""
    return scanned()(p, jnp.sin(scanned()(p, x)))


PLAIN = {"w": W, "b": B}
MODELS = {
    "lax": (scanned(), PLAIN),
    "checkpointed": (scanned(jax.checkpoint(layer)), PLAIN),
    "reversed": (scanned(reverse=True), PLAIN),
    "odd unroll": (scanned(unroll=3), PLAIN),
    "shared": (shared, PLAIN),
    "two loops": (
        lambda p, x: scanned()(p[1], jnp.sin(scanned()(p[0], x))),
        [PLAIN, jax.tree.map(lambda a: 2 * a, PLAIN)],
    ),
    "nested": (nested, PLAIN),
    "clipped": (scanned(jax.checkpoint(clipped)), PLAIN),  # numbers are cast in the body
    "flax": flax_scan(),
    "equinox": equinox_scan(),
}

OPTIMISERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1, momentum=0.9)),
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-3, 100), eps=1e-3),
    "lion": optax.lion(1e-3),
}


def training(model, optimiser, more=lambda grads, old, new: ()):
    """(state, x) -> (state, (loss, what `more` makes)), and the state."""
    apply, params = model
    loss_of = lambda p, x: jnp.square(apply(p, x)).mean()

    def step(state, x):
        p, s = state
        loss, grads = jax.value_and_grad(loss_of)(p, x)
        updates, s = optimiser.update(grads, s, p)
        new = optax.apply_updates(p, updates)
        return (new, s), (loss, more(grads, p, new))

    return step, (params, optimiser.init(params))


def both(step, state, steps=3):
    """(plain, ours) after some steps: the results, temporaries in bytes; and ours."""
    found = []
    budgeted = vmem_jax.jit(
        step, budget="1GiB", policy="exact", donate_argnums=0, compiler_options=EXACT
    )
    for make in (jax.jit(step, donate_argnums=0), budgeted):
        lowered = make.lower(state, X)
        compiled = lowered.compile(EXACT) if make is not budgeted else lowered.compile()
        mine, runs = jax.tree.map(jnp.array, state), []
        for _ in range(steps):
            mine, out = compiled(mine, X)
            runs.append(out)
        own = sum(a.nbytes for a in jax.tree.leaves((state, X)))
        need = compiled.need_nbytes if make is budgeted else need_nbytes(compiled)
        found.append(((mine, runs), need - own))
    return found, budgeted


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def stacked_of(step, state):
    return capture(jax.jit(step).trace(state, X).jaxpr, donated=donated(state)).stacked


def donated(state):
    return [True] * len(jax.tree.leaves(state)) + [False]


CASES = [(model, "sgd") for model in MODELS] + [
    (model, name) for name in ("momentum", "adamw") for model in ("checkpointed", "flax", "shared")
]
CASES += [("lax", "lion"), ("two loops", "adamw")]


@pytest.mark.parametrize(("model", "optimiser"), CASES)
def test_the_results_keep_every_bit_and_the_gradients_never_exist(model, optimiser):
    step, state = training(MODELS[model], OPTIMISERS[optimiser])
    ((plain, before), (ours, after)), _ = both(step, state)
    assert same(plain, ours)
    loops = 2 if model == "two loops" else 1
    assert before - after > 0.7 * loops * STACK
    said = [stacked.why for stacked in stacked_of(step, state)]
    if model == "shared":  # of the gradients that are summed, those of the first loop backwards
        assert len(said) == 1 and "add_any at test_updates.py" in said[0]
    else:
        assert said == []


def global_norm(grads, old, new):
    return optax.global_norm(grads)


STAYING = {
    "clipped": (
        training((scanned(), PLAIN), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))),
        "reduce_sum at",
    ),
    "norm": (training((scanned(), PLAIN), optax.sgd(0.1), global_norm), "reduce_sum at"),
    "returned": (
        training((scanned(), PLAIN), optax.sgd(0.1), lambda grads, old, new: grads),
        "the step returns them",
    ),
    "flipped": (training((flipped, PLAIN), optax.sgd(0.1)), "rev at"),
    "old and new values together": (
        training(
            (scanned(), PLAIN),
            optax.sgd(0.1),
            lambda grads, old, new: jax.tree.map(lambda a, b: jnp.vdot(a, b), old, new),
        ),
        "dot_general at",
    ),
    "not donated": (training((scanned(), PLAIN), optax.sgd(0.1)), "the state is not donated"),
}


@pytest.mark.parametrize("name", STAYING)
def test_what_must_exist_as_a_whole_does_and_it_is_said(name):
    (step, state), why = STAYING[name]
    closed = jax.jit(step).trace(state, X).jaxpr
    gives = [] if name == "not donated" else donated(state)
    captured = capture(closed, donated=gives)
    [stacked] = captured.stacked
    assert captured.with_compressed(captured.flat, ()).stacked == (stacked,)
    assert why in stacked.why and stacked.nbytes == STACK + STACK // WIDTH
    if name == "clipped":
        ((plain, _), (ours, _)), budgeted = both(step, state)
        assert same(plain, ours)
        said = " ".join(str(budgeted.explain(state, X)).split())
        assert "exist all at once" in said and "reduce_sum at" in said


@pytest.mark.parametrize(
    "more",
    [
        lambda grads, old, new: (optax.global_norm(old), optax.global_norm(new)),
        lambda grads, old, new: jax.tree.map(lambda a, b: 0.9 * a + 0.1 * jnp.sin(a), old, new),
    ],
    ids=["norm", "average"],
)
def test_what_is_made_of_old_values_is_made_before_they_are_written_over(more):
    step, state = training((scanned(), PLAIN), OPTIMISERS["momentum"], more)
    ((plain, before), (ours, after)), _ = both(step, state)
    assert same(plain, ours) and before - after > 0.7 * STACK


def body_of_updates(step, state):
    """The barrier of the backward body before the updates, and the equations behind it."""
    captured = capture(jax.jit(step).trace(state, X).jaxpr, donated=donated(state))
    *_, scan = [e for e in captured.flat.jaxpr.eqns if e.primitive.name == "scan"]
    eqns = scan.params["jaxpr"].jaxpr.eqns
    is_fence = lambda e: e.primitive.name == "optimization_barrier"
    first = next(i for i, e in enumerate(eqns) if is_fence(e) and len(e.invars) > 2)
    return eqns[first], eqns[first + 1 :]


def test_a_moment_is_written_before_the_weights_read_it_again():
    """Otherwise its slice lies beside the stack, and is copied there."""
    step, state = training((scanned(jax.checkpoint(layer)), PLAIN), OPTIMISERS["adamw"])
    _, after = body_of_updates(step, state)
    fenced = [v for e in after if e.primitive.name == "optimization_barrier" for v in e.invars]
    stacks = [(LAYERS, WIDTH), (LAYERS, WIDTH, WIDTH)]
    assert sorted(v.aval.shape for v in fenced) == sorted(2 * stacks)  # two moments of each
    made = {e.outvars[0]: e.primitive.name for e in after}
    whole = lambda v: made[v] == "dynamic_update_slice"
    assert all(map(whole, fenced))


def test_a_moment_whose_old_slice_is_read_for_others_is_written_last():
    """A look-ahead that reads the old momentum: its slice is fenced, the stack written behind."""

    def ahead(updates, state, params=None):
        new = jax.tree.map(lambda g, m: 0.9 * m + g, updates, state)
        moves = jax.tree.map(lambda n, m: -0.1 * (2 * n - m), new, state)
        return moves, new

    optimiser = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), ahead)
    step, state = training((scanned(jax.checkpoint(layer)), PLAIN), optimiser)
    ((plain, before), (ours, after)), _ = both(step, state)
    assert same(plain, ours) and before - after > 0.7 * STACK
    _, equations = body_of_updates(step, state)
    kinds = [e.primitive.name for e in equations]
    assert kinds.index("dynamic_update_slice") > max(
        i for i, e in enumerate(equations) if e.primitive.name == "optimization_barrier"
    )


def test_gradients_are_cast_behind_the_barrier():
    """It holds them as narrow as the computation made them."""
    narrow = lambda y, p: layer(y, jax.tree.map(lambda a: a.astype(jnp.bfloat16), p))
    apply = lambda p, x: lax.scan(jax.checkpoint(narrow), x.astype(jnp.bfloat16), p)[0]
    model = (lambda p, x: apply(p, x).astype(jnp.float32), PLAIN)
    step, state = training(model, OPTIMISERS["momentum"])
    barrier, after = body_of_updates(step, state)
    gradients = [v.aval for v in barrier.invars if v.aval.shape == (WIDTH, WIDTH)]
    assert [a.dtype for a in gradients] == [jnp.bfloat16]
    assert any(e.primitive.name == "convert_element_type" for e in after)
    ((plain, before), (ours, held)), _ = both(step, state)
    assert same(plain, ours) and before - held > 0.7 * STACK


def test_moments_in_host_memory_are_updated_in_the_loop():
    step, state = training((scanned(), PLAIN), OPTIMISERS["momentum"])
    closed = jax.jit(step).trace(state, X).jaxpr
    hosted = [(2, 2), (3, 3)]
    captured = capture(closed, donated=donated(state), hosted=hosted)
    assert captured.sliced == (2, 3) and captured.stacked == ()


def test_without_loops_nothing_changes():
    step, state = training(
        (lambda p, x: layer(x, {"w": p["w"][0], "b": p["b"][0]})[0], PLAIN), OPTIMISERS["sgd"]
    )
    captured = capture(jax.jit(step).trace(state, X).jaxpr, donated=donated(state))
    assert captured.flat is captured.separate and captured.stacked == ()


def test_the_prediction_knows_that_stacks_are_written_in_place():
    step, state = training((scanned(jax.checkpoint(layer)), PLAIN), OPTIMISERS["adamw"])
    program = capture(jax.jit(step).trace(state, X).jaxpr, donated=donated(state)).program
    [*_, forward, backward] = [s for s in program.steps if s.op == "scan"]
    assert backward.workspace < STACK / 2
    assert backward.flops < 8 * forward.flops
    overwritten = {
        i for i, by in program.overwritten_by.items() if by == program.steps.index(backward)
    }
    assert sum(program.buffers[b].nbytes for b in overwritten) == 3 * (STACK + STACK // WIDTH)


def test_every_device_updates_its_own_shards():
    out = in_subprocess(
        """
        import json
        import jax
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        import test_updates as updates
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
        x = updates.X = put(updates.X, "data")
        said, saved, bits = [], 0, True
        for spec in ((None, None, "model"), ("model",)):
            place = lambda a: put(a, *spec) if a.ndim == 3 else put(a)
            params = jax.tree.map(place, updates.PLAIN)
            step, state = updates.training((updates.scanned(), params), updates.OPTIMISERS["sgd"])
            shardings = [a.sharding for a in jax.tree.leaves((state, x))]
            closed = jax.jit(step).trace(state, x).jaxpr
            captured = updates.capture(
                closed, donated=updates.donated(state), shardings=shardings)
            said.append([(s.nbytes, s.why) for s in captured.stacked])
            ((plain, before), (ours, after)), _ = updates.both(step, state, 1)
            bits &= updates.same(plain, ours)
            saved = saved or before - after
        print(json.dumps([said, saved, bits]))
        """,
        4,
    )
    said, saved, bits = json.loads(out.splitlines()[-1])
    assert bits and saved > 0.35 * STACK
    assert said == [[], [[STACK, "they are split over devices along the layers"]]]


@pytest.mark.gpu_compile
@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_the_need_of_a_described_card_falls_by_the_gradients(optimiser):
    from vmem_jax.devices.targets import target

    width, layers = 512, 32
    params = {"w": (layers, width, width), "b": (layers, width)}
    sharding = target("h200").sharding()
    shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    zeros = lambda: jax.tree.map(jnp.zeros, params, is_leaf=lambda a: isinstance(a, tuple))
    model = scanned(jax.checkpoint(layer))
    tx = OPTIMISERS[optimiser]
    step, _ = training((model, PLAIN), tx)
    state = jax.eval_shape(lambda: (zeros(), tx.init(zeros())))
    args = jax.tree.map(shape, (state, jax.ShapeDtypeStruct((ROWS, width), jnp.float32)))
    plain = need_nbytes(jax.jit(step, donate_argnums=0).lower(*args).compile())
    budgeted = vmem_jax.jit(step, budget="1GiB", policy="exact", donate_argnums=0)
    need = budgeted.lower(*args).compile("h200").need_nbytes
    assert plain - need > 0.7 * 4 * layers * width * width
