"""shards: what each device holds of a split step, by the rules and by the compiler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import in_subprocess

from vmem_jax import jax_compat as compat
from vmem_jax.capture.capture import capture, capture_pair
from vmem_jax.capture.collectives import Collectives
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.loop_pairs import find_pairs
from vmem_jax.capture.shards import Shards, follow_shards
from vmem_jax.capture.stated import with_stated_splits

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def followed(fun, *arguments):
    """(jaxpr, shards) of `fun` on (shape, spec) pairs."""
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in arguments]
    closed = flatten(jax.jit(fun).trace(*avals).jaxpr)
    shardings = [NamedSharding(MESH, P(*spec)) for _, spec in arguments]
    return compat.open_jaxpr(closed), follow_shards(closed, shardings)


def dropout(x):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0)


CONV = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
CASES = {
    "elementwise": (lambda x: jnp.tanh(x) * 2, [((8, 6), ("data",))], [("data",), ()]),
    "product": (
        lambda x, w: x @ w,
        [((8, 6), ("data",)), ((6, 4), (None, "model"))],
        [("data",), ("model",)],
    ),
    "contracted": (
        lambda x, g: x.T @ g,
        [((8, 6), ("data",)), ((8, 4), ("data",))],
        [(), ()],
    ),
    "fully sharded": (
        lambda x, w: x @ w,
        [((8, 8), ("data",)), ((8, 4), ("data",))],
        [("data",), ()],
    ),
    "convolution": (
        lambda x, w: lax.conv_general_dilated(x, w, **CONV),
        [((8, 4, 4, 3), ("data",)), ((3, 3, 3, 6), (None, None, None, "model"))],
        [("data",), (), (), ("model",)],
    ),
    "reduction": (
        lambda x: x.sum(1),
        [((8, 6, 2), ("data", None, "model"))],
        [("data",), ("model",)],
    ),
    "lost in a reduction": (lambda x: x.sum(0), [((8, 6), ("data",))], [()]),
    "joined": (lambda x: x.reshape(8 * 6), [((8, 6), ("data",))], [("data",)]),
    "parted": (lambda x: x.reshape(4, 2, 6), [((8, 6), ("data",))], [("data",), (), ()]),
    "parted too small": (lambda x: x.reshape(2, 4, 6), [((8, 6), ("data",))], [(), (), ()]),
    "unstacked": (lambda x: sum(x), [((3, 8, 6), (None, "data"))], [("data",), ()]),
    "stacked": (
        jax.grad(lambda x: jnp.square(sum(x)).sum()),
        [((3, 8, 6), (None, "data"))],
        [(), ("data",), ()],
    ),
    "the larger operand stays split": (
        lambda w, x: w.T @ x,
        [((4, 8), (None, "data")), ((4, 64), (None, "data"))],
        [(), ("data",)],
    ),
    "transposed": (lambda x: x.T, [((8, 6), ("data",))], [(), ("data",)]),
    "gathered rows": (
        lambda table, i: table[i.astype(int)],
        [((16, 6), ()), ((8,), ("data",))],
        [("data",), ()],
    ),
    "loop": (
        lambda x, w: lax.scan(lambda c, w: (jnp.tanh(c @ w), c), x, w)[1],
        [((8, 6), ("data",)), ((3, 6, 6), ())],
        [(), ("data",), ()],
    ),
    "two axes": (lambda x: x + 1, [((8, 6), (("data", "model"),))], [("data", "model"), ()]),
    "random bits, from their reader": (dropout, [((8, 6), ("data",))], [("data",), ()]),
    "constraint": (
        lambda x: lax.with_sharding_constraint(x + 1, NamedSharding(MESH, P("data"))),
        [((8, 6), ())],
        [("data",), ()],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_split_as_the_partitioner_does(name):
    fun, arguments, expected = CASES[name]
    jaxpr, shards = followed(fun, *arguments)
    split = shards.splits.get(jaxpr.outvars[0], ())
    assert [*split, *[()] * (len(expected) - len(split))] == expected
    sizes = {"data": 4, "model": 2}
    count = 1
    for axis in {a for axes in expected for a in axes}:
        count *= sizes[axis]
    assert shards.count(jaxpr.outvars[0]) == count


def test_random_bits_are_split_where_they_are_made():
    jaxpr, shards = followed(dropout, ((8, 6), ("data",)))

    def counts(jaxpr):
        for eqn in jaxpr.eqns:
            for v in eqn.outvars:
                if getattr(v.aval, "shape", ()) == (8, 6):
                    yield eqn.primitive.name, shards.count(v)

    found = list(counts(jaxpr))
    assert found and all(count == 4 for name, count in found if name != "random_bits")


def test_work_is_split_over_contracted_dimensions_too():
    jaxpr, shards = followed(lambda x, g: x.T @ g, ((8, 6), ("data",)), ((8, 4), ("data",)))
    product = next(e for e in jaxpr.eqns if e.primitive.name == "dot_general")
    assert shards.work(product) == 4 and shards.gathered(product) == []


def test_an_operand_split_by_the_axis_of_the_batch_is_gathered():
    jaxpr, shards = followed(lambda x, w: x @ w, ((8, 8), ("data",)), ((8, 4), ("data",)))
    product = next(e for e in jaxpr.eqns if e.primitive.name == "dot_general")
    assert shards.gathered(product) == [jaxpr.invars[1]]


def test_an_operand_whose_own_dimension_the_result_cannot_split_is_gathered():
    jaxpr, shards = followed(lambda g, w: g @ w.T, ((64, 4), ("data",)), ((16, 4), ("data",)))
    product = next(e for e in jaxpr.eqns if e.primitive.name == "dot_general")
    assert shards.gathered(product) == [product.invars[1]]
    assert shards.splits[jaxpr.outvars[0]] == (("data",), ())
    jaxpr, shards = followed(lambda g, w: g @ w.T, ((64, 4), ("data",)), ((16, 4), ("model",)))
    product = next(e for e in jaxpr.eqns if e.primitive.name == "dot_general")
    assert shards.gathered(product) == []


def sent(fun, *arguments):
    """What the products of `fun` send, one after another."""
    jaxpr, shards = followed(fun, *arguments)
    collectives = Collectives(jaxpr.eqns, shards)
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    return [collectives.sent(eqn, "forward") for eqn in products]


def test_what_is_made_for_a_loop_is_split_as_its_iterations_read_it():
    """A mask that every iteration reads; an argument that they read is as it is given."""

    def fun(x, given):
        mask = jnp.broadcast_to(jnp.arange(6) < 3, (8, 6))
        return lax.scan(lambda c, _: (jnp.where(mask, c, given), None), x, length=2)[0]

    jaxpr, shards = followed(fun, ((8, 6), ("data",)), ((8, 6), ()))
    [loop] = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    found = {v.aval.str_short(): shards.count(v) for v in loop.invars if v not in jaxpr.invars}
    assert found == {"bool[8,6]": 4}
    assert shards.count(jaxpr.invars[1]) == 1


def test_a_device_sends_its_shard_of_what_is_gathered_and_parts_of_what_is_summed():
    x, w = ((64, 8), ("data",)), ((8, 16), ("data",))
    whole = 8 * 16 * 4
    assert sent(lambda x, w: x @ w, x, w) == [whole * 3 / 4]
    assert sent(lambda x, w: x @ w, x, ((8, 16), ())) == [0]
    # once for two products, and the gradient of what is gathered is scattered
    both = lambda x, w: (y := x @ w, x.T @ y, jnp.einsum("ij,kj->ik", y, w))
    assert sent(both, x, w) == [whole * 3 / 4, whole * 3 / 4, 0]
    # the gradient of a weight that every device has is whole on each
    toward = lambda x, w: (y := x @ w, x.T @ y)
    assert sent(toward, x, ((8, 16), ())) == [0, 2 * whole * 3 / 4]
    # rows by columns: each device has a part of the sum, and its own rows of that
    assert sent(lambda x, w: x @ w, ((64, 8), ("data", "model")), ((8, 16), ("model",))) == [
        2 * (64 * 16 * 4 / 4) / 2
    ]


def test_a_gradient_that_each_device_keeps_a_shard_of_is_a_sum_that_is_scattered():
    """Both operands are split by the batch, and neither is gathered, however the result is split."""

    def update(w, x, y):
        return w - jnp.einsum("nv,nd->vd", y, x)

    w, x, y = ((16, 8), ("data",)), ((64, 8), ("data",)), ((64, 16), ("data",))
    jaxpr, shards = followed(update, w, x, y)
    [product] = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    whole = 16 * 8 * 4
    assert shards.gathered(product) == [] and shards.scattered_nbytes(product) == whole
    assert sent(update, w, x, y) == [whole * 3 / 4]
    assert shards.summed(product) == 4
    out = in_subprocess(
        """
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec as P
        mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        split = NamedSharding(mesh, P("data"))
        update = lambda w, x, y: w - jnp.einsum("nv,nd->vd", y, x)
        args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=split)
                for s in [(16, 8), (64, 8), (64, 16)]]
        text = jax.jit(update).lower(*args).compile().as_text()
        print("all-gather" in text, "all-reduce" in text or "reduce-scatter" in text)
        """,
        4,
    )
    assert out.split() == ["False", "True"]


def test_a_sharded_head_gathers_no_logits():
    """A step whose head is split by the axis of the batch needs less than one with a whole head."""
    out = in_subprocess(
        """
        import jax, jax.numpy as jnp, vmem_jax
        from jax.sharding import NamedSharding, PartitionSpec as P
        mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        put = lambda dtype, shape, *spec: jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

        def step(head, x, labels):
            def loss(head):
                logits = x @ head
                picked = jnp.take_along_axis(logits, labels[..., None], -1)
                return (jax.nn.logsumexp(logits, -1, keepdims=True) - picked).mean()
            return head - 0.1 * jax.grad(loss)(head)

        def predicted(*spec):
            args = (put(jnp.float32, (32, 4000), *spec), put(jnp.float32, (16, 64, 32), "data"),
                    put(jnp.int32, (16, 64), "data"))
            made = vmem_jax.jit(step, budget="1GiB", donate_argnums=0).lower(*args).compile()
            return made.attempts[-1].predicted_need

        print(predicted(), predicted(None, "data"))
        """,
        4,
    )
    whole, split = map(int, out.split())
    assert split < whole


def test_a_step_may_split_what_it_is_given_whole():
    split = NamedSharding(MESH, P("data"))
    fun = lambda x: jnp.tanh(lax.with_sharding_constraint(x + 1, split))
    closed = flatten(jax.jit(fun).trace(jax.ShapeDtypeStruct((8, 6), jnp.float32)).jaxpr)
    shards = follow_shards(closed, [None])
    assert shards.count(compat.open_jaxpr(closed).outvars[0]) == 4


def test_one_device_has_everything_whole():
    closed = jax.jit(lambda x: x @ x).trace(jnp.ones((4, 4))).jaxpr
    assert follow_shards(closed, [None]).splits == {}


def test_prediction_counts_what_one_device_holds():
    """The same step on one device and on four: a quarter of the activations, and so compiled."""
    out = in_subprocess(
        """
        import jax, jax.numpy as jnp, vmem_jax
        from jax.sharding import NamedSharding, PartitionSpec as P, AxisType
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

        def step(w, x):
            def loss(w):
                y = x
                for i in range(4):
                    y = jnp.tanh(y @ w[i])
                return jnp.square(y).sum()
            return w - 0.1 * jax.grad(loss)(w)

        def entry(shardings):
            shapes = [(4, 64, 64), (2048, 64)]
            args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=p)
                    for s, p in zip(shapes, shardings)]
            return vmem_jax.jit(step, budget="1GiB", donate_argnums=0)._entry_for(args, {}, None)

        spec = lambda *p: NamedSharding(mesh, P(*p))
        whole, split = entry([None, None]), entry([spec(), spec("data")])
        print(whole.best.plan.predicted_peak, split.best.plan.predicted_peak,
              whole.best.need, split.best.need)
        """,
        4,
    )
    whole, split, whole_need, split_need = map(int, out.split())
    assert split < 0.4 * whole and split_need < 0.4 * whole_need
    assert 0.75 < split / split_need < 1.1


def spec_of(fun, *arguments):
    """The certain spec of the only result of `fun`; None where it is not certain."""
    jaxpr, shards = followed(fun, *arguments)
    return shards.spec(jaxpr.outvars[0])


@pytest.mark.parametrize("name", [n for n in CASES if n != "parted too small"])
def test_what_the_rules_follow_is_told(name):
    fun, arguments, expected = CASES[name]
    spec = spec_of(fun, *arguments)
    assert spec is not None
    assert NamedSharding(MESH, spec).is_equivalent_to(
        NamedSharding(MESH, P(*(axes or None for axes in expected))), len(expected)
    )


ROWS = ((8, 6), ("data",))
UNTOLD = {
    "an axis lost in a reshape": (lambda x: x.reshape(2, 4, 6), [ROWS]),
    "an axis lost in a concatenation": (lambda x: jnp.concatenate([x, x]), [ROWS]),
    "no rule": (lambda x: lax.sort(x, dimension=1), [ROWS]),
    "behind no rule": (lambda x, w: lax.sort(x, dimension=1) @ w, [ROWS, ((6, 4), ())]),
    "no rule in a loop": (
        lambda x: lax.scan(lambda c, _: (lax.sort(c, dimension=1), None), x, length=2)[0],
        [ROWS],
    ),
    "a loop of unknown length": (
        lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x),
        [ROWS],
    ),
    "made from nothing": (lambda x: jnp.zeros((8, 6)), [ROWS]),
    "broadcast": (lambda b: jnp.broadcast_to(b, (8, 6)), [((6,), ())]),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_what_the_partitioner_may_split_otherwise_is_not_told(name):
    fun, arguments = UNTOLD[name]
    assert spec_of(fun, *arguments) is None


def test_elementwise_results_are_told_by_one_operand():
    assert spec_of(lambda x, y: x + lax.sort(y, dimension=1), ROWS, ROWS) == P("data", None)
    assert spec_of(lambda x, b: x * b, ROWS, ((6,), ())) == P("data", None)


def test_shards_of_unequal_size_have_no_spec():
    v = compat.new_var(jax.core.ShapedArray((6, 4), jnp.float32))
    shards = lambda axis: Shards({"data": 4, "model": 2}, {v: ((axis,), ())}, {v}, 8, MESH)
    assert shards("model").spec(v) == P("model", None)
    assert shards("data").spec(v) is None
    assert Shards({"row": 2}, {v: (("row",), ())}, {v}, 8, MESH).spec(v) is None


def test_arguments_over_two_meshes_have_no_mesh():
    other = AbstractMesh((8,), ("row",), axis_types=(AxisType.Auto,))
    closed = flatten(jax.jit(lambda x, y: x + y).trace(*[jnp.ones((8, 6))] * 2).jaxpr)
    one, two = NamedSharding(MESH, P("data")), NamedSharding(other, P("row"))
    assert follow_shards(closed, [one, one]).mesh == MESH
    assert follow_shards(closed, [one, None]).mesh == MESH
    assert follow_shards(closed, [one, two]).mesh is None
    assert follow_shards(closed, [one, two]).device_count == 8


def scanned(w, x):
    def loss(w):
        layer = lambda y, w: (y + jnp.tanh(jnp.tanh(y @ w[0]) @ w[1]), None)
        return jnp.square(lax.scan(layer, x, w)[0]).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))


def test_an_iteration_of_a_loop_is_what_one_device_holds_of_it():
    """As in fully sharded data parallelism: weights and batch are split over one axis."""
    shapes = [(4, 8, 16), (4, 16, 8), (32, 8)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    closed = jax.jit(lambda a, b, x: scanned((a, b), x)).trace(*args).jaxpr
    split = [NamedSharding(MESH, P(*spec)) for spec in ((None, "data"), (None, "data"), ("data",))]
    whole, ours = capture(closed), capture(closed, shardings=split)

    def largest(captured, shardings):
        [pair] = find_pairs(captured.separate)
        loop, variables = capture_pair(pair, follow_shards(captured.separate, shardings))
        made = {v: b.nbytes for v, b in zip(variables, loop.program.buffers, strict=True)}
        return {v.aval.shape: made[v] for v in variables}, loop.program

    of_one, of_four = largest(whole, [None] * 3), largest(ours, split)
    for shape in ((32, 16), (32, 8)):
        assert of_four[0][shape] == of_one[0][shape] / 4
    # both weights in either loop, and the sums of their gradients
    assert sum(step.sent for step in of_four[1].steps) == (2 + 2 + 2) * 8 * 16 * 4 * 3 / 4
    assert not any(step.sent for step in of_one[1].steps)
    flops = lambda program: sum(step.flops for step in program.steps)
    assert flops(of_four[1]) == flops(of_one[1]) / 4
    # a weight is held whole for its product, and only there
    products = [step for step in of_four[1].steps if step.op == "dot_general"]
    assert any(step.workspace >= 8 * 16 * 4 for step in products)
    loops = [
        next(s for s in captured.program.steps if s.op == "scan" and s.phase == "backward")
        for captured in (whole, ours)
    ]
    count = lambda step: sum(inner.flops for inner in step.body)
    assert count(loops[1]) == count(loops[0]) / 4


def test_an_iteration_of_a_loop_may_be_given_a_number():
    """As where keys are split in a loop, whose first carry is a literal."""
    fun = lambda x: lax.scan(lambda c, _: (c + 1, x * c), 2.0, length=3)
    jaxpr, shards = followed(fun, ((8, 6), ("data",)))
    [loop] = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    body = flatten(loop.params["jaxpr"])
    invars = compat.open_jaxpr(body).invars
    within = shards.within(body, dict(zip(invars, loop.invars, strict=True)), ())
    assert within.certain.issuperset(invars)


def stated(fun, *arguments, mesh=MESH):
    """The equations of `fun` with its constraints, those of loops included."""
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in arguments]
    shardings = [NamedSharding(mesh, P(*spec)) for _, spec in arguments]
    flat = flatten(jax.jit(fun).trace(*avals).jaxpr)
    found = with_stated_splits(flat, shardings)
    compat.check_jaxpr(found)

    def equations(jaxpr):
        for eqn in compat.open_jaxpr(jaxpr).eqns:
            yield eqn
            if eqn.primitive.name == "scan":
                yield from equations(eqn.params["jaxpr"])

    return list(equations(found))


def specs(eqns):
    return [e.params["sharding"].spec for e in eqns if e.primitive.name == "sharding_constraint"]


def test_a_product_that_gathers_an_operand_states_how_its_result_is_split():
    toward = (lambda g, w: g @ w.T, ((64, 4), ("data",)), ((16, 4), ("data",)))
    assert specs(stated(*toward)) == [P("data", None)]
    summed = (lambda x, w: x @ w, ((8, 16), ("data",)), ((16, 4), ("data",)))
    assert specs(stated(*summed)) == [P("data", None)]
    tensor_parallel = (lambda x, w: x @ w, ((8, 16), ("data",)), ((16, 4), (None, "model")))
    assert specs(stated(*tensor_parallel)) == []
    explicit = MESH.update(axis_types=(AxisType.Explicit,) * 2)
    assert specs(stated(*toward, mesh=explicit)) == []


def test_products_in_loops_state_it_too():
    shapes = ((4, 8, 16), (None, "data")), ((4, 16, 8), (None, "data")), ((32, 8), ("data",))
    found = stated(lambda a, b, x: scanned((a, b), x), *shapes)
    assert specs(found) == [P("data", None)] * 4  # two products forward, and two of cotangents


FULLY_SHARDED = """
import re
import jax, jax.numpy as jnp, vmem_jax
from jax.sharding import NamedSharding, PartitionSpec as P, AxisType
from vmem_jax.core.need import need_nbytes
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

def step(w, x):
    def loss(w):
        def layer(y, w):
            up, gate, down = w
            return y + (jnp.tanh(y @ up) * jnp.sin(y @ gate)) @ down, None
        return jnp.square(jax.lax.scan(layer, x, w)[0]).mean()
    w = jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))
    return jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P(None, "data")))

spec = lambda *p: NamedSharding(mesh, P(*p))
shapes = [(4, 48, 80), (4, 48, 80), (4, 80, 48)]
w = [jax.device_put(jax.random.normal(jax.random.key(i), s) / 9, spec(None, "data"))
     for i, s in enumerate(shapes)]
x = jax.device_put(jax.random.normal(jax.random.key(9), (1024, 48)), spec("data"))
plain = jax.jit(step).lower(w, x).compile()
need = need_nbytes(plain)
made = vmem_jax.jit(step, budget=0.6).lower(w, x).compile()
"""


def test_weights_of_a_layer_are_gathered_again_in_the_backward_loop_and_never_stacked():
    out = in_subprocess(
        FULLY_SHARDED
        + """
text = made.as_text()
weights = r"(?:48,80|80,48)"
print(len(re.findall(rf"= f32\\[{weights}\\]\\S* all-gather", text)),
      len(re.findall(r"= \\S+ all-(?:gather|to-all)", text)),
      len(re.findall(rf"f32\\[4,{weights}\\]", text)), need_nbytes(made) <= 0.6 * need)
plain = jax.tree.leaves(jax.jit(step)(w, x))
print(all(jnp.allclose(a, b, rtol=1e-4, atol=1e-5)
          for a, b in zip(plain, jax.tree.leaves(made(w, x)), strict=True)))
""",
        4,
    )
    # each of three weights once in each loop, and nothing else
    assert out.split() == ["6", "6", "0", "True", "True"]
