"""What a loop takes: the seconds, the traffic and the live bytes of its body."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import Builder
from jax import lax

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.capture import capture_body, capture_pair
from vmem_jax.capture.loop_pairs import find_pairs
from vmem_jax.core.body import body_nbytes
from vmem_jax.core.cards import CARDS
from vmem_jax.core.costs import analytic
from vmem_jax.models.decoder import Decoder, train_step

MACHINE = CARDS["h200"].machine
LAYERS, MIB = 16, 2**20


def program_of(step, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return capture(jax.jit(step).trace(*args).jaxpr).program


def loop_of(program):
    [loop] = [step for step in program.steps if step.op == "scan"]
    return loop


def test_a_loop_takes_what_its_layers_take_unrolled():
    """Rather more: it stacks what JAX names, and updates where it cannot fuse as much."""
    seconds = []
    for scanned in (True, False):
        model = Decoder(layers=6, scanned=scanned)
        params = jax.eval_shape(model.init, jax.random.key(0))
        optimiser = optax.sgd(1e-4)
        state = params, jax.eval_shape(optimiser.init, params)
        tokens = jax.ShapeDtypeStruct((8, 513), jnp.int32)
        closed = jax.jit(train_step(model, optimiser)).trace(state, tokens).jaxpr
        seconds.append(sum(analytic(capture(closed).program, MACHINE).seconds))
    assert 1 < seconds[0] / seconds[1] < 1.35


def recurrent(w, xs):
    def cell(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    return jnp.square(lax.scan(cell, jnp.zeros(xs.shape[1:]), xs)[1]).mean()


@pytest.mark.parametrize("platform", ["", "cpu"])
def test_a_product_adds_to_the_total_that_a_loop_carries_in_its_own_kernel(platform):
    """So that of a weight gradient, which JAX writes as a transposed product and a sum."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 256), (LAYERS, 64, 256))]
    traced = jax.jit(jax.grad(recurrent)).trace(*args).jaxpr
    program = capture(traced, platform=platform).program
    backward = [s for s in program.steps if s.body][-1]
    products = [step for step in backward.body if step.op == "dot_general"]
    adding = [step for step in products if len(step.reads) == 3]
    weight = 4 * 256 * 256
    passes = [s for s in backward.body if s.op == "add_any" and s.nbytes >= 3 * weight]
    assert (len(products), len(adding), len(passes)) == ((2, 0, 1) if platform else (2, 1, 0))
    assert [len(step.in_place) for step in adding] == [1] * len(adding)


def test_each_copy_to_a_stack_and_out_of_one_is_a_kernel():
    loop = loop_of(program_of(recurrent, (256, 256), (LAYERS, 64, 256)))
    more = dataclasses.replace(loop, copies=loop.copies + 3)
    seconds = MACHINE.seconds(more) - MACHINE.seconds(loop)
    assert loop.copies > 0 and seconds == pytest.approx(3 * LAYERS * MACHINE.launch)


def test_a_barrier_is_no_kernel():
    [fence] = [
        step
        for step in program_of(lambda x: jnp.sin(lax.optimization_barrier(x + 1)), (64,)).steps
        if step.op == "optimization_barrier"
    ]
    assert MACHINE.seconds(fence) < MACHINE.launch / 10


def test_slices_from_host_memory_and_back_take_the_link_while_the_loop_computes():
    layer = lambda y, w: (jnp.tanh(y @ w), None)
    found = program_of(lambda w, x: lax.scan(layer, x, w)[0], (LAYERS, 64, 64), (256, 64))
    loop = loop_of(found)
    product = next(step for step in loop.body if step.op == "dot_general")

    def moving(fetched, returned):
        """Seconds of the loop with a slice that comes, and one that leaves, each iteration."""
        copy = lambda **link: dataclasses.replace(product, reads=(), writes=(), **link)
        copies = [copy(fetched=fetched // LAYERS), copy(returned=returned // LAYERS)]
        copies = [step for step in copies if step.fetched + step.returned]
        body = (*copies, *loop.body)
        moved = dataclasses.replace(loop, body=body, fetched=fetched, returned=returned)
        return MACHINE.seconds(moved)

    assert moving(1024, 1024) == MACHINE.seconds(loop)
    much = 1024 * MIB
    assert moving(much, 0) == pytest.approx(much / MACHINE.link_in, rel=0.01)
    assert moving(0, much) == pytest.approx(much / MACHINE.link_out, rel=0.01)
    assert moving(much, much) == pytest.approx(2 * much / MACHINE.link_both, rel=0.01)


def test_updates_in_a_loop_take_what_those_of_unrolled_layers_take():
    """A slice is written where it is made: copied there, it took 1.9 times what it takes unrolled.
    Both loops cast the weights, which unrolled layers do once."""
    optimiser, seconds = optax.adamw(1e-4), []
    shapes = ((8, 4096, 4096), jnp.float32), ((64, 4096), jnp.bfloat16)
    ws, x = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    layer = lambda x, w: (jnp.tanh(x @ w.astype(x.dtype)), None)
    for scanned in (True, False):

        def loss(ws, x, scanned=scanned):
            if scanned:
                x = lax.scan(layer, x, ws)[0]
            for i in range(0 if scanned else len(ws)):
                x = layer(x, ws[i])[0]
            return jnp.mean(x.astype(jnp.float32) ** 2)

        def step(ws, rest, x, loss=loss):
            updates, rest = optimiser.update(jax.grad(loss)(ws, x), rest, ws)
            return optax.apply_updates(ws, updates), rest

        rest = jax.eval_shape(optimiser.init, ws)
        context = vmem_jax.jit(step, budget=1, donate_argnums=(0, 1)).context(
            (ws, rest, x), {}, "h200"
        )
        steps = context.traced.captured.program.steps
        inside = [(s, loop.length) for loop in steps for s in loop.body]
        own = [(s, 1) for s in steps if not s.body]
        passes = [(s, n) for s, n in (*own, *inside) if s.op != "dot_general"]
        seconds.append(sum(n * MACHINE.seconds(s) for s, n in passes))
    assert 1 < seconds[0] / seconds[1] < 1.15


def test_the_seconds_of_a_loop_grow_with_its_iterations():
    def seconds(length):
        step = lambda w, x: lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, w)[0]
        return MACHINE.seconds(loop_of(program_of(step, (length, 256, 256), (4096, 256))))

    assert seconds(32) == pytest.approx(2 * seconds(16), rel=0.01)


def test_of_its_own_a_loop_moves_what_it_stacks_and_copies_there_or_carries():
    """A fused kernel reads slices where they lie, and writes its result into the stack. XLA copies
    what a library reads or makes, and what an iteration reads besides."""

    def nbytes(body):
        step = lambda ws, x: lax.scan(body, x, ws)
        return loop_of(program_of(step, (LAYERS, 512, 512), (512, 512))).nbytes

    copy = 2 * LAYERS * MIB  # each slice is read and written
    assert nbytes(lambda y, w: (jnp.sin(y + w), None)) == 0
    assert nbytes(lambda y, w: (y, jnp.sin(w))) == 0
    assert nbytes(lambda y, w: (jnp.sin(y @ w), None)) == copy
    assert nbytes(lambda y, w: (y, y @ w)) == 2 * copy
    assert nbytes(lambda y, w: (y @ w, None)) == 2 * copy
    assert nbytes(lambda y, w: (jnp.sin(y @ (s := jnp.cos(w))), s)) == copy


@pytest.mark.parametrize("change", [lambda part: 2 * part, lambda part: part * jnp.sin(part)])
def test_a_slice_that_is_read_and_written_is_all_that_is_touched_of_a_stack(change):
    """A stack that is carried, of which every iteration changes a slice, in one kernel."""

    def step(stack):
        def body(stack, i):
            part = change(lax.dynamic_slice_in_dim(stack, i, 1))
            return lax.dynamic_update_slice_in_dim(stack, part, i, 0), None

        return lax.scan(body, stack, jnp.arange(LAYERS))[0]

    loop = loop_of(program_of(step, (LAYERS, 512, 512)))
    touched = loop.length * sum(part.nbytes for part in loop.body)
    assert touched == pytest.approx(2 * LAYERS * MIB, rel=1e-3)  # the stack has 16 MiB
    assert loop.length == LAYERS


def test_a_slice_that_is_read_besides_exists_before_it_is_written():
    def step(stack, w):
        def body(stack, i):
            part = jnp.sin(lax.dynamic_slice_in_dim(stack, i, 1))
            return lax.dynamic_update_slice_in_dim(stack, part, i, 0), part @ w

        return lax.scan(body, stack, jnp.arange(LAYERS))

    loop = loop_of(program_of(step, (LAYERS, 512, 512), (512, 512)))
    [put] = [part for part in loop.body if part.op == "dynamic_update_slice"]
    [made] = [part for part in loop.body if part.op == "sin"]
    assert put.nbytes == pytest.approx(2 * MIB, rel=1e-3) and made.writes[0] in put.reads


def test_a_layer_of_a_loop_has_a_name():
    def step(w, x):
        def layer(y, w):
            with jax.named_scope("attention"):
                y = jnp.tanh(y @ w)
            with jax.named_scope("mlp"):
                return jnp.sin(y @ w), None

        return lax.scan(layer, x, w)[0]

    assert loop_of(program_of(step, (4, 8, 8), (8, 8))).layer == "attention, mlp"


def test_what_dies_in_an_iteration_makes_room():
    b = Builder()
    x = b.input(100)
    y = b.step([x], 40)
    z = b.step([y], 30)
    b.step([z], 20)
    assert body_nbytes(b.program(outputs=[])) == 70


def test_what_is_made_in_place_takes_nothing():
    b = Builder()
    x = b.input(100)
    y = b.step([x], 40)
    b.step([y], 40, in_place=True, workspace=5)
    assert body_nbytes(b.program(outputs=[])) == 45


def test_results_wait_for_the_end():
    b = Builder()
    x = b.input(100)
    y = b.step([x], 40)
    z = b.step([y], 30)
    b.step([z], 20)
    assert body_nbytes(b.program(outputs=[y])) == 90


def test_what_a_fused_kernel_makes_for_a_stack_lies_there_alone():
    """Of an iteration: what it carries, what is stacked alone, what is read too, and what a library
    makes."""
    b = Builder()
    x = b.input(100)
    carry, stacked, read = (b.step([x], nbytes, fusible=True) for nbytes in (40, 1, 2))
    program = b.program(outputs=[carry, stacked, read, b.step([read], 4)])
    assert body_nbytes(program, carried=1) == 46
    assert body_nbytes(program) == 47
    normalised = (dataclasses.replace(s, normalises=stacked in s.writes) for s in program.steps)
    apart = dataclasses.replace(program, steps=tuple(normalised))
    assert body_nbytes(apart, carried=1) == 47


def softmax_body(axis, platform=""):
    """An iteration of the forward loop of a step, whose layers have a softmax along `axis`."""

    def step(ws, x):
        layer = lambda y, w: (jax.nn.softmax(y @ w, axis=axis) @ w, None)
        return jax.grad(lambda ws: jnp.sum(lax.scan(layer, x, ws)[0]))(ws)

    shapes = (LAYERS, 512, 512), (1024, 512)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = capture(jax.jit(step).trace(*args).jaxpr, platform=platform).program
    return next(step.body for step in found.steps if step.op == "scan")


def test_the_exponentials_of_a_stacked_softmax_are_read_where_they_are_made_on_a_gpu():
    body = softmax_body(axis=-1)
    [made] = (step for step in body if step.normalises)
    assert made.op == "exp"
    [b] = made.writes
    assert sum(b in step.reads for step in body) == 2  # where they are summed and divided
    for other in (softmax_body(axis=0), softmax_body(axis=-1, platform="cpu")):
        assert not any(step.normalises for step in other)


def test_the_stacks_of_a_forward_loop_are_all_that_it_writes_of_them():
    def step(ws, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), (jnp.sin(x), jnp.cos(x))), x, ws)

    loop = loop_of(program_of(step, (LAYERS, 512, 512), (512, 512)))
    assert loop.workspace < 3 * MIB  # a product, and what is carried


@pytest.mark.parametrize(("platform", "is_written_over"), [("cpu", True), ("gpu", False)])
def test_a_product_in_a_body_is_written_over_on_a_cpu_alone(platform, is_written_over):
    """On a GPU it is an element of a tuple, with a workspace."""

    def loss(ws, x):
        layer = lambda x, w: (jnp.tanh(x @ w) @ w, None)
        return jnp.sum(lax.scan(layer, x, ws)[0])

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 64, 64), (256, 64))]
    closed = jax.jit(jax.grad(loss)).trace(*shapes).jaxpr
    captured = capture(closed, platform=platform)
    [pair] = find_pairs(captured.separate)
    [forward, backward] = [
        s for s in compat.open_jaxpr(captured.flat).eqns if s.params.get("jaxpr")
    ]
    programs = [
        capture_pair(pair, step=captured.inputs)[0].program,
        *(capture_body(eqn, step=captured.inputs).program for eqn in (forward, backward)),
    ]
    for program in programs:
        written_over = [
            r
            for step in program.steps
            for r, _ in step.in_place
            if program.producer[r] >= 0 and program.steps[program.producer[r]].op == "dot_general"
        ]
        assert bool(written_over) == is_written_over
    steps = [step for step in captured.program.steps if step.op == "scan"]
    for step, program in zip(steps, programs[1:], strict=True):
        assert [s.in_place for s in step.body] == [s.in_place for s in program.steps]


def test_random_bits_in_a_body_take_their_counters_on_a_cpu():
    def step(ws, x, key):
        def layer(x, given):
            w, key = given
            return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x @ w, 0), None

        return lax.scan(layer, x, (ws, jax.random.split(key, 4)))[0]

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 64, 64), (256, 64))]
    closed = jax.jit(step).trace(*shapes, jax.eval_shape(jax.random.key, 0)).jaxpr
    cpu, gpu = (loop_of(capture(closed, platform=name).program) for name in ("cpu", "gpu"))
    assert cpu.workspace > gpu.workspace + 256 * 64 * 4
