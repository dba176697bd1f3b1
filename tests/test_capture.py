"""capture: which steps there are, where they come from, what they read, hold and may do."""

from __future__ import annotations

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture, fuse
from vmem_jax.core.program import Kind, Phase
from vmem_jax.core.validate import check_program

X, W = jnp.ones((64, 32)), jnp.ones((32, 32))


def captured(fun, *args, donate=(), names=()):
    closed = jax.jit(fun).trace(*args).jaxpr
    count = len(jax.tree.leaves(args))
    donated = [i in donate for i in range(count)]
    found = capture(closed, names, donated)
    assert check_program(found.program) == []
    _check_equations(found)
    return found


def _check_equations(found):
    """Every equation with an effect is in one step; every buffer has its variable's bytes."""
    eqns = compat.open_jaxpr(found.flat).eqns
    for i, eqn in enumerate(eqns):
        steps = [s for s in found.program.steps if i in s.equations]
        assert len(steps) == 1 if eqn.effects else True
    for buffer, variable in zip(found.program.buffers, found.variables, strict=True):
        if jnp.issubdtype(variable.aval.dtype, jnp.floating):
            assert buffer.nbytes == variable.aval.size * variable.aval.dtype.itemsize


def program(fun, *args, **kwargs):
    return captured(fun, *args, **kwargs).program


def ops(program, phase=None):
    return [s.op for s in program.steps if phase in (None, s.phase)]


def sgd(loss_of):
    def step(params, *batch):
        loss, grads = jax.value_and_grad(loss_of)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


# -- kernels


def test_elementwise_chains_are_one_step_and_their_insides_do_not_exist():
    found = program(lambda x: jnp.sin(jnp.exp(x) * 2 + 1), X)
    assert len(found.steps) == 1 and found.steps[0].fusible
    assert len(found.buffers) == 2
    assert found.steps[0].in_place == ((0, 1),)


def test_nothing_is_written_over_what_a_library_made():
    """Calls of cuDNN and cuBLAS return tuples, and XLA:GPU keeps their parts until the reader is
    through. XLA:CPU writes over the result of a product."""
    x, w = jax.ShapeDtypeStruct((2, 8, 8, 4), "float32"), jax.ShapeDtypeStruct((4, 4), "float32")
    convolved = lambda x, w: jax.lax.conv_general_dilated(
        x, w.reshape(1, 1, 4, 4), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    clipped = lambda x, w: jax.nn.relu(convolved(x, w) + 1)  # which the library does as well
    multiplied = lambda x, w: x @ w
    on_gpu, on_cpu = (0, 0, 0), (0, 0, 1)
    for platform, pairs in (("gpu", on_gpu), ("cpu", on_cpu)):
        for make, count in zip((convolved, clipped, multiplied), pairs, strict=True):
            traced = jax.jit(lambda x, w, make=make: jnp.tanh(make(x, w))).trace(x, w)
            found = capture(traced.jaxpr, platform=platform).program
            assert len(found.steps) == 2 and len(found.steps[1].in_place) == count


@pytest.mark.parametrize("size, nbytes", [(8, 2 * 9 * 9 * 4 * 4), (7, 0)])
def test_a_convolution_that_pads_one_side_more_has_a_padded_copy(size, nbytes):
    """Of stride 2 and an even size, as in residual networks, in all three passes."""
    x = jax.ShapeDtypeStruct((2, size, size, 4), "float32")
    w = jax.ShapeDtypeStruct((3, 3, 4, 8), "float32")
    convolved = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    found = program(jax.grad(lambda *a: jnp.sin(convolved(*a)).sum(), (0, 1)), x, w)
    assert [s.workspace for s in found.steps if s.convolution] == [nbytes] * 3


def test_the_factor_of_a_derivative_is_computed_where_it_is_read():
    """1 − tanh², a primitive of its own since JAX 0.11, is no residual beside tanh itself."""
    found = program(jax.grad(lambda x, w: jnp.tanh(x @ w).sum()), X, W)
    assert "one_minus_square" not in [s.op for s in found.steps if not s.fusible]
    activations = [
        b for b in found.buffers if b.kind is Kind.ACTIVATION and b.nbytes == 64 * 32 * 4
    ]
    assert len(activations) == 1


def test_chains_join_the_product_that_reads_them_as_a_value():
    found = program(lambda x, w: jnp.exp(x) @ w, X, W)
    assert ops(found) == ["exp", "dot_general"]
    assert not found.steps[1].fusible
    assert (found.steps[1].flops, found.steps[1].dtype) == (2 * 64 * 32 * 32, "float32")


def test_a_transposed_product_is_what_exists():
    """A weight gradient, and not what a barrier would leave XLA to transpose behind it."""
    found = captured(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), W, jnp.ones((64, 32)))
    step = found.program.steps[-1]
    names = [compat.open_jaxpr(found.flat).eqns[i].primitive.name for i in step.equations]
    assert names == ["dot_general", "transpose"] and step.epilogue_nbytes == 0
    heads = lambda x, w: jnp.einsum("nij,njk->nki", x, w) @ w  # of a batch it is a kernel's work
    cube = jax.ShapeDtypeStruct((4, 8, 8), "float32")
    found = program(heads, cube, cube)
    assert len(found.steps[0].equations) == 1


def test_a_slice_of_a_stack_costs_its_own_bytes():
    stack, x = jax.ShapeDtypeStruct((8, 32, 32), "float32"), X
    [cast, _] = program(lambda w, x: x @ w[3].astype("bfloat16"), stack, x).steps
    assert cast.nbytes == 32 * 32 * (4 + 2)
    [every_second] = program(lambda w: 2 * w[:, :, ::2], stack).steps
    assert every_second.nbytes == 8 * 32 * (32 + 16) * 4
    [rows] = program(lambda w, i: 2 * w[i], stack, jax.ShapeDtypeStruct((2,), "int32")).steps
    assert rows.nbytes < 5 * 32 * 32 * 4


def test_views_cost_nothing():
    found = program(lambda x, w: (x.reshape(2, 32, 32) @ w).reshape(64, 32).T, X, W)
    assert [op for op in ops(found) if op != "transpose"][:1] == ["dot_general"]
    assert found.resident_nbytes == (64 * 32 * 2 + 32 * 32) * 4


def test_reduction_ends_a_chain():
    found = program(lambda x: jnp.square(x - 1).sum() + 1, X)
    assert ops(found)[0] == "reduce_sum"
    assert found.buffers[found.steps[0].writes[0]].nbytes == 4


def test_dropout_keeps_the_mask_and_not_the_bits():
    def loss(w, x, key):
        keep = jax.random.bernoulli(key, 0.5, (64, 32))
        return jnp.square(jnp.where(keep, x @ w, 0) @ w).sum()

    found = program(jax.grad(loss), W, X, jax.random.key(0))
    late = {
        b
        for s in found.steps
        if s.phase is Phase.BACKWARD
        for b in s.reads
        if found.producer[b] >= 0 and found.steps[found.producer[b]].phase is Phase.FORWARD
    }
    held = [found.buffers[b] for b in late if found.buffers[b].nbytes >= 64 * 32]
    assert any("bool[64,32]" in b.label for b in held)
    assert not any("uint32[64,32]" in b.label for b in held)


@pytest.mark.parametrize(
    ("platform", "activation", "late"),
    [
        ("gpu", jax.nn.relu, [True]),  # its mask reads the pool's input in the backward pass anyway
        ("gpu", lambda y: y, [False]),
        ("cpu", jax.nn.relu, []),
    ],
)
def test_the_index_of_an_overlapping_pool_is_made_once_on_a_gpu(platform, activation, late):
    """Not in the gradient's kernel, which reads it once for each of four windows."""

    def loss(w, x):
        y = activation(jnp.einsum("bhwc,cd->bhwd", x, w))
        return jnp.square(nn.max_pool(y, (3, 3), (2, 2)) @ w).sum()

    x = jnp.ones((2, 9, 9, 32))
    found = capture(jax.jit(sgd(loss)).trace(W, x).jaxpr, platform=platform)
    assert "max_pool_overlap" in [each.rule for each in found.applied]
    buffers, steps = found.program.buffers, found.program.steps
    made = [(s, b) for s, step in enumerate(steps) for b in step.writes]
    made = [(s, b) for s, b in made if "uint8" in buffers[b].label]
    turn = next(s for s, step in enumerate(steps) if step.phase is Phase.BACKWARD)
    assert [s > turn for s, _ in made] == late
    for s, b in made:
        assert steps[s].phase is Phase.FORWARD and buffers[b].nbytes == 2 * 4 * 4 * 32
        assert len(found.program.readers[b]) == 1


def test_a_mask_is_read_in_the_backward_pass_however_long_it_was_held():
    """It waits for its gradient in any case, so that what this makes of it need not exist as well."""

    def loss(params, x, key):
        for w in params:
            key, own = jax.random.split(key)
            shares = jax.nn.softmax((x @ w).astype(jnp.float32))
            kept = jnp.where(jax.random.bernoulli(own, 0.9, shares.shape), shares / 0.9, 0)
            x = kept.astype(jnp.bfloat16) @ w
        return jnp.square(x.astype(jnp.float32)).sum()

    x, w = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    found = program(sgd(loss), [w] * 16, x, jax.random.key(0))
    backward = [s for s in found.steps if s.phase is Phase.BACKWARD]
    assert sum(s.op == "dot_general" for s in backward) >= 3 * 16
    made = [found.buffers[b].label for s in backward for b in s.writes]
    assert not [label for label in made if "float32[64,64]" in label]


def test_relu_keeps_no_mask():
    def loss(w, x):
        return jnp.square(jax.nn.relu(x @ w) @ w).sum()

    found = captured(jax.grad(loss), W, X)
    assert [a.rule for a in found.applied] == ["relu_mask"]
    assert not any("bool" in b.label for b in found.program.buffers)


@pytest.mark.parametrize(
    ("after", "passes"),
    [
        (lambda y, b: y, 0),
        (lambda y, b: y + b, 2),
        (lambda y, b: jax.nn.relu(y + b), 2),
        (lambda y, b: jnp.tanh(y), 0),
    ],
    ids=["nothing", "bias", "bias and relu", "not by the library"],
)
def test_what_a_library_kernel_does_besides_saves_a_pass_over_its_result(after, passes):
    conv = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")
    fun = lambda x, w, b: after(conv(x, w), b)
    found = program(fun, jnp.ones((2, 3, 8, 8)), jnp.ones((4, 3, 3, 3)), jnp.ones((4, 8, 8)))
    [step] = [step for step in found.steps if step.convolution]
    assert step.epilogue_nbytes == passes * 4 * 2 * 4 * 8 * 8


def test_merged_repeated_equations():
    found = program(lambda x, w: (x @ w) * jnp.sin(x @ w), X, W)
    assert ops(found).count("dot_general") == 1


@pytest.mark.parametrize(
    "hint", [lambda f: f, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(jax.jit(f)))]
)
def test_users_checkpoint_is_a_hint(hint):
    def loss(w, x):
        for _ in range(3):
            x = hint(lambda x: jnp.tanh(x @ w))(x)
        return x.sum()

    found = program(sgd(loss), W, X)
    assert ops(found).count("dot_general") == 3 + 3 + 2  # forward, weights, inputs
    assert ops(found, Phase.FORWARD).count("dot_general") == 3


def test_what_is_looked_at_for_a_kernel_does_not_grow_with_the_depth(monkeypatch):
    """A residual stream is read: the layers in front of it are not looked at."""
    priced = []

    class Counted(fuse.Walk):
        def visit_all(self, atoms):
            super().visit_all(atoms)
            priced.append(len(self.prices.keys() | self.above.keys()))

    monkeypatch.setattr(fuse, "Walk", Counted)

    def most(layers):
        def loss(params, x, key):
            for w in params:
                y = jax.nn.standardize(x) @ w
                key, own = jax.random.split(key)
                x = x + jnp.where(jax.random.bernoulli(own, 0.9, y.shape), y / 0.9, 0)
            return jnp.sum(x**2)

        priced.clear()
        program(sgd(loss), [W] * layers, X, jax.random.key(0))
        return max(priced)

    assert most(16) == most(8) < 100


# -- control flow and effects


@pytest.mark.parametrize("name", ["scan", "while", "cond"])
def test_control_flow_is_one_opaque_step_with_workspace(name):
    def body(x):
        return (jnp.tanh(x @ W) @ W) @ W

    funs = {
        "scan": lambda x: lax.scan(lambda c, _: (body(c), None), x, None, length=3)[0],
        "while": lambda x: lax.fori_loop(0, x[0, 0].astype(int), lambda i, c: body(c), x),
        "cond": lambda x: lax.cond(x[0, 0] > 0, body, lambda x: x, x),
    }
    found = program(funs[name], X)
    (step,) = [s for s in found.steps if s.op == name]
    assert step.workspace >= 64 * 32 * 4
    assert step.pure and not step.fusible
    assert "dot_general" not in ops(found)


def test_scans_flops_count_every_iteration():
    found = program(lambda x: lax.scan(lambda c, _: (c @ W, None), x, None, length=5)[0], X)
    (step,) = [s for s in found.steps if s.op == "scan"]
    assert step.flops >= 5 * 2 * 64 * 32 * 32


def test_effects_are_impure_and_keep_their_order():
    def fun(x):
        jax.debug.print("a {}", x.sum())
        x = jnp.tanh(x @ W)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = jax.experimental.io_callback(lambda v: v, shape, x, ordered=True)
        jax.debug.callback(lambda v: None, x)
        return jnp.sin(x) @ W

    found = program(fun, X)
    effects = [s.op for s in found.steps if not s.pure]
    assert len(effects) == 3 and "io_callback" in effects[1]
    assert all(s.pure for s in found.steps if s.op in ("dot_general", "sin", "tanh"))


# -- what people see


def test_layers_and_lines():
    def fun(w, x):
        with jax.named_scope("encoder"), jax.named_scope("first"):
            x = x @ w
        with jax.named_scope("head"):
            return jnp.square(x @ w).sum()

    found = program(sgd(fun), W, X)
    products = [s for s in found.steps if s.op == "dot_general"]
    assert {s.layer for s in products} == {"encoder/first", "head"}
    assert {s.phase for s in products if s.layer == "head"} == {Phase.FORWARD, Phase.BACKWARD}
    assert all(s.source.startswith("test_capture.py:") for s in products)
    line = fun.__code__.co_firstlineno
    assert products[0].source == f"test_capture.py:{line + 2}"
    assert f"encoder/first: dot_general (forward) at test_capture.py:{line + 2}" in [
        s.where for s in found.steps
    ]


def test_layers_of_linen_modules():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(4, (3, 3), name="stem")(x)
            return nn.Dense(2, name="head")(nn.relu(x).mean((1, 2)))

    net, x = Net(), jnp.ones((2, 8, 8, 3))
    params = net.init(jax.random.key(0), x)
    found = program(sgd(lambda p, x: jnp.square(net.apply(p, x)).sum()), params, x)
    convs = {s.layer for s in found.steps if s.op == "conv_general_dilated"}
    assert convs == {"Net/stem"}
    assert {s.layer for s in found.steps if s.op == "dot_general"} == {"Net/head"}


def test_names_of_inputs():
    found = program(lambda x, w: x @ w, X, W, names=["batch", "params['w']"])
    assert found.buffers[1].label == "params['w'] float32[32,32]"


# -- phases, kinds, aliases


def adam_step():
    tx = optax.adam(1e-3)

    def loss_of(params, x, y):
        return jnp.square(jnp.tanh(x @ params["a"]) @ params["b"] - y).mean()

    def step(state, x, y):
        params, opt = state
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    params = {"a": W, "b": W + 1}
    return step, (params, tx.init(params)), X, X


def test_phases():
    step, *args = adam_step()
    found = program(step, *args)
    products = [s for s in found.steps if s.op == "dot_general"]
    assert [s.phase for s in products].count(Phase.FORWARD) == 2
    assert [s.phase for s in products].count(Phase.BACKWARD) == 3
    order = [s.phase for s in found.steps]
    assert order.index(Phase.FORWARD) < order.index(Phase.BACKWARD) < order.index(Phase.UPDATE)
    assert "dot_general" not in ops(found, Phase.UPDATE)


def test_forward_only_has_one_phase():
    assert {s.phase for s in program(lambda x: jnp.tanh(x @ W) @ W, X).steps} == {Phase.FORWARD}


def test_kinds():
    step, *args = adam_step()
    found = program(step, *args)
    kinds = [found.buffers[b].kind for b in found.inputs]
    # params a and b; Adam's count, mu and nu of both; x and y
    assert kinds[:2] == [Kind.PARAMETER] * 2
    assert kinds[3:7] == [Kind.OPTIMISER] * 4
    # the count is read before any gradient exists: it is taken for a batch (4 bytes)
    assert found.buffers[found.inputs[2]].nbytes == 4
    assert kinds[7:9] == [Kind.BATCH] * 2
    assert {found.buffers[b].kind for b in found.outputs} <= {Kind.OUTPUT, Kind.OPTIMISER}


def test_donated_inputs_are_aliased_to_outputs_of_their_shape():
    step, *args = adam_step()
    leaves = len(jax.tree.leaves(args[0]))
    found = program(step, *args, donate=range(leaves))
    assert len(found.aliases) == leaves
    assert len({o for _, o in found.aliases}) == leaves
    assert program(step, *args).aliases == ()
    aliased = sum(found.buffers[i].nbytes for i, _ in found.aliases)
    assert found.resident_nbytes == program(step, *args).resident_nbytes - aliased


def test_residents_are_what_the_compiler_counts():
    step, *args = adam_step()
    for donate in ((), (0,)):
        compiled = jax.jit(step, donate_argnums=donate, keep_unused=True).lower(*args).compile()
        stats = compiled.memory_analysis()
        leaves = range(len(jax.tree.leaves(args[0]))) if donate else ()
        counted = (
            stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        )
        # the compiler adds a table of pointers for the tuple of outputs
        assert 0 <= counted - program(step, *args, donate=leaves).resident_nbytes < 512


def test_input_returned_as_it_is():
    found = program(lambda x, y: (x, y + 1), X, X, donate=(0,))
    assert found.aliases == ((0, 0),)
    assert found.resident_nbytes == 3 * X.nbytes
    assert program(lambda x, y: (x, y + 1), X, X).resident_nbytes == 4 * X.nbytes


def test_same_step_same_fingerprint_and_other_shapes_another():
    step, *args = adam_step()
    assert program(step, *args).fingerprint == program(step, *args).fingerprint
    halved = (args[0], args[1][:32], args[2][:32])
    assert program(step, *args).fingerprint != program(step, *halved).fingerprint


def test_a_checkpointed_layer_in_a_loop_computes_what_it_holds():
    """Backwards it runs again, and then twice as much."""
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    loss = lambda w, x: lax.scan(layer, x, w)[0].sum()
    closed = jax.jit(jax.grad(loss)).trace(jnp.ones((4, 64, 64)), jnp.ones((8, 64))).jaxpr
    forward, backward = [s.flops for s in capture(closed).program.steps if s.op == "scan"]
    product, tanh = 2 * 8 * 64 * 64, 62 * 8 * 64
    assert forward == pytest.approx(4 * (product + tanh), rel=0.01)
    assert backward == pytest.approx(4 * (3 * product + tanh), rel=0.1)


@pytest.mark.parametrize("platform, passes", [("cpu", 0), ("gpu", 1)])
def test_the_last_product_of_a_sum_adds_the_others(platform, passes):
    """So the first ones do not wait for it, with what they alone read. XLA:GPU adds where
    the sum is read."""

    def step(a, b, c, w):
        return jnp.tanh(a @ w + b @ w + c @ w)

    w, x = jnp.ones((8, 8)), jnp.ones((64, 8))
    closed = jax.jit(step).trace(x, 2 * x, 3 * x, w).jaxpr
    program = capture(closed, platform=platform).program
    products = [s for s in program.steps if s.is_heavy]
    assert [len(s.reads) for s in products] == [2, 3, 3]
    assert all({*s.writes} <= {*t.reads} for s, t in itertools.pairwise(products))
    once = program.buffers[products[0].writes[0]].nbytes
    assert [s.behind for s in products] == [0, passes * once, passes * once]


@pytest.mark.parametrize("shape", [(8,), (1, 8)])
@pytest.mark.parametrize("cast, is_added", [(False, True), (True, False)])
def test_a_product_adds_a_bias_that_is_an_argument(cast, is_added, shape):
    """XLA:GPU has a pass of its own for a bias that is cast: what reads the sum computes it.

    JAX adds a single row, as Flax has its biases, without spreading it first (0.11.2).
    """

    def step(x, w, bias):
        bias = bias.astype(jnp.bfloat16) if cast else bias
        h = x @ w + bias.reshape(shape)
        return lax.reduce_sum(jnp.exp(h), (0,)), lax.reduce_max(h, (0,))

    x, w = jnp.ones((64, 8), jnp.bfloat16), jnp.ones((8, 8), jnp.bfloat16)
    bias = jnp.ones(8, jnp.float32 if cast else jnp.bfloat16)
    program = capture(jax.jit(step).trace(x, w, bias).jaxpr, platform="gpu").program
    [product] = (s for s in program.steps if s.is_heavy)
    assert len(product.reads) == 2 + is_added and product.behind == 0
    sums = [s for s in program.steps if {*product.writes} & {*s.reads}]
    assert {s.op for s in sums} <= {"reduce_sum", "reduce_max"}
    assert all((len(s.reads) > 1) != is_added for s in sums)


@pytest.mark.parametrize(
    "read, passes",
    [
        (lambda h: jnp.exp(h), 1),
        (lambda h: (lax.reduce_max(h, (0,)), jnp.exp(h)), 2),
        (lambda h: lax.dot(h, h.T), 3),
    ],
)
def test_a_bias_in_front_of_a_residual_is_added_with_it(read, passes):
    """In a chain that reads the sum, in the first of several, or in a pass of its own."""

    def step(x, w, bias):
        y = jnp.sin(x)
        return read(y @ w + bias.astype(jnp.bfloat16) + y)

    x, w = jnp.ones((64, 8), jnp.bfloat16), jnp.ones((8, 8), jnp.bfloat16)
    program = capture(jax.jit(step).trace(x, w, jnp.ones(8)).jaxpr, platform="gpu").program
    product = next(s for s in program.steps if s.is_heavy)
    assert len(product.reads) == 3 and product.behind == passes * x.nbytes


@pytest.mark.parametrize("norms", [1, 2])
def test_what_a_relu_lets_through_is_computed_once_where_norms_read_it(norms):
    """As XLA has it: the first norm's sums write it, so what they read is not read again. One norm's
    are one kernel with it."""

    def step(ws, x):
        def loss(ws):
            normed = []
            for w in ws[:norms]:
                h = x @ w
                normed.append((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1))
            return (jax.nn.relu(sum(normed)) @ ws[-1]).sum()

        return jax.grad(loss)(ws)

    w = jnp.ones((64, 64))
    found = capture(jax.jit(step).trace([w] * (norms + 1), jnp.ones((512, 64))).jaxpr)
    eqns = compat.open_jaxpr(found.flat).eqns
    [masked] = [
        i
        for i, eqn in enumerate(eqns)
        if eqn.primitive.name == "select_n" and eqn.outvars[0].aval.shape == (512, 64)
    ]
    [computing] = [s for s in found.program.steps if masked in s.equations]
    assert len(computing.writes) == (2 if norms == 1 else 1)
    over = {r for s in found.program.steps for r, _ in s.in_place}
    assert over.isdisjoint(computing.writes) or norms == 2  # an element of a tuple


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.relu6, jax.nn.silu, jax.nn.gelu])
def test_what_an_activation_lets_through_is_written_once_and_narrow(activation):
    """As XLA has it: in the type of the activation, though norms add it up in float32."""

    def step(ws, x):
        def loss(ws):
            h = (x @ ws[0]).astype(jnp.float32)
            normed = (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1)
            return (activation(normed.astype(jnp.bfloat16)) @ ws[1]).astype(jnp.float32).sum()

        return jax.grad(loss)(ws)

    w, x = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((512, 64), jnp.bfloat16)
    found = capture(jax.jit(step).trace([w, w], x).jaxpr)
    variables, steps = found.variables, found.program.steps
    large = {b for b, v in enumerate(variables) if v.aval.shape == x.shape}
    assert {str(variables[b].aval.dtype) for b in large} == {"bfloat16"}
    made = [s for s in steps if s.phase is Phase.BACKWARD and s.is_heavy and large & {*s.writes}]
    [cotangent] = [b for s in made for b in s.writes if b in large]
    [behind] = [s for s in steps if cotangent in s.reads]
    assert behind.op == "reduce_sum" and large & {*behind.writes}
