"""1×1 convolutions that carry what stands around them: what is found in networks, and its values."""

from __future__ import annotations

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.carried import find_carrying
from vmem_jax.core.plan import Plan
from vmem_jax.errors import TechniqueError
from vmem_jax.rewrite.carried import with_carried
from vmem_jax.techniques.carry import carry_contexts

BATCH, SIZE, WIDE, NARROW = 4, 8, 32, 16
SMALL, LARGE = (BATCH, SIZE, SIZE, NARROW), (BATCH, SIZE, SIZE, WIDE)


def conv(x, kernel, stride=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=numbers
    )


def batch_norm(y, scale, bias, two_passes=False):
    """Over batch and space, with statistics in float32."""
    y32 = y.astype(jnp.float32)
    mean = y32.mean((0, 1, 2))
    if two_passes:
        var = jnp.square(y32 - mean).mean((0, 1, 2))
    else:
        var = jnp.square(y32).mean((0, 1, 2)) - jnp.square(mean)
    factor = jax.lax.rsqrt(var + 1e-5) * scale
    return ((y32 - mean) * factor + bias).astype(y.dtype)


def raw(block, dtype="bfloat16", kernels=(1, 3, 1)):
    """A step on a residual network of two bottleneck blocks, by hand."""
    keys = iter(jax.random.split(jax.random.key(0), 16))
    widths = [(WIDE, NARROW), (NARROW, NARROW), (NARROW, WIDE)]
    params = [
        [
            (jax.random.normal(next(keys), (k, k, a, b)) / k / a**0.5, jnp.ones(b), jnp.zeros(b))
            for k, (a, b) in zip(kernels, widths, strict=True)
        ]
        for _ in range(2)
    ]
    x = jax.random.normal(next(keys), LARGE)

    def step(params, x):
        def loss(params):
            y = x.astype(dtype)
            for layers in params:
                y = block(y, [(k.astype(dtype), s, b) for k, s, b in layers])
            return jnp.square(y.astype(jnp.float32) - 1).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, (params, x)


def bottleneck(x, layers):
    y = x
    for i, (kernel, scale, bias) in enumerate(layers):
        y = batch_norm(conv(y, kernel), scale, bias)
        y = jax.nn.relu(y) if i < 2 else y
    return jax.nn.relu(x + y)


def without_statistics(x, layers):
    y = x
    for kernel, scale, bias in layers:
        y = jax.nn.relu(conv(y, kernel) * scale.astype(x.dtype) + bias.astype(x.dtype))
    return x + y


def two_ways(x, layers):
    """Two products read one gradient to their sum."""
    (first, *_), (second, *_), (third, *_) = layers
    y = jax.nn.relu(conv(x, first))
    return conv(y, third) + conv(jax.nn.relu(conv(y, second)), third)


def without_relu(x, layers):
    y = x
    for kernel, scale, bias in layers:
        y = batch_norm(conv(y, kernel), scale, bias)
    return x + y


def in_two_passes(x, layers):
    y = x
    for kernel, scale, bias in layers:
        y = jax.nn.relu(batch_norm(conv(y, kernel), scale, bias, two_passes=True))
    return y


def gelu(x, layers):
    y = x
    for kernel, scale, bias in layers:
        y = jax.nn.gelu(batch_norm(conv(y, kernel), scale, bias))
    return y


def layer_norm(x, layers):
    """A norm over channels is none over the batch: nothing of it is a value for each channel."""
    y = x
    for kernel, scale, bias in layers:
        y32 = conv(y, kernel).astype(jnp.float32)
        y32 = (y32 - y32.mean(-1, keepdims=True)) * jax.lax.rsqrt(y32.var(-1, keepdims=True) + 1e-5)
        y = jax.nn.relu(y32 * scale + bias).astype(x.dtype)
    return y


def strided(x, layers):
    y = x
    for kernel, scale, bias in layers:
        y = jax.nn.relu(batch_norm(conv(y, kernel, 2), scale, bias))
    return y


class Bottleneck(nn.Module):
    dtype: str

    @nn.compact
    def __call__(self, x):
        norm = lambda y: nn.BatchNorm(use_running_average=False, dtype=self.dtype)(y)
        make = lambda width, size: nn.Conv(width, (size, size), use_bias=False, dtype=self.dtype)
        y = nn.relu(norm(make(NARROW, 1)(x)))
        y = nn.relu(norm(make(NARROW, 3)(y)))
        return nn.relu(x + norm(make(WIDE, 1)(y)))


class Linen(nn.Module):
    dtype: str

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = Bottleneck(self.dtype)(x)
        return x


def linen(dtype="bfloat16"):
    x = jax.random.normal(jax.random.key(1), LARGE)
    model = Linen(dtype)
    variables = model.init(jax.random.key(0), x)

    def step(variables, x):
        def loss(params):
            given = {"params": params, "batch_stats": variables["batch_stats"]}
            y, state = model.apply(given, x.astype(dtype), mutable=["batch_stats"])
            return jnp.square(y.astype(jnp.float32) - 1).mean(), state["batch_stats"]

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
        return {"params": params, "batch_stats": stats}, value

    return step, (variables, x)


class NnxBottleneck(nnx.Module):
    def __init__(self, dtype, rngs):
        make = lambda a, b, k: nnx.Conv(a, b, (k, k), use_bias=False, dtype=dtype, rngs=rngs)
        norm = lambda width: nnx.BatchNorm(width, dtype=dtype, rngs=rngs)
        self.convs = nnx.List(
            [make(WIDE, NARROW, 1), make(NARROW, NARROW, 3), make(NARROW, WIDE, 1)]
        )
        self.norms = nnx.List([norm(NARROW), norm(NARROW), norm(WIDE)])

    def __call__(self, x):
        y = x
        for i, (make, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(make(y))
            y = nnx.relu(y) if i < 2 else y
        return nnx.relu(x + y)


def of_nnx(dtype="bfloat16"):
    rngs = nnx.Rngs(0)
    graph, state = nnx.split(nnx.List([NnxBottleneck(dtype, rngs) for _ in range(2)]))
    x = jax.random.normal(jax.random.key(1), LARGE)

    def step(state, x):
        model = nnx.merge(graph, state)

        def loss(model):
            y = x.astype(dtype)
            for block in model:
                y = block(y)
            return jnp.square(y.astype(jnp.float32) - 1).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
        return nnx.state(model), value

    return step, (state, x)


def equinox():
    """Channels first and the batch by vmap: no product of rows."""
    keys = jax.random.split(jax.random.key(0), 2)
    conv, other = (eqx.nn.Conv2d(WIDE, WIDE, 1, use_bias=False, key=key) for key in keys)
    x = jax.random.normal(jax.random.key(1), (BATCH, WIDE, SIZE, SIZE)).astype(jnp.bfloat16)

    def step(convs, x):
        def loss(convs):
            y = x
            for each in convs:
                y = jax.vmap(jax.tree.map(lambda a: a.astype(jnp.bfloat16), each))(y)
                y = jax.nn.relu(y * 2 + 1)
            return jnp.square(y.astype(jnp.float32)).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, convs, jax.grad(loss)(convs))

    return step, ((conv, other), x)


def found_in(case):
    step, args = case
    flat = capture(jax.jit(step).trace(*args).jaxpr).separate
    return flat, find_carrying(flat)


def described(flat, found):
    """Each product by what it carries: rows before it, what it stores, sums, the gradient."""
    eqns = compat.open_jaxpr(flat).eqns
    texts = []
    for each in found:
        backward = "transpose(" in compat.name_stack(eqns[each.product])
        text = "backward" if backward else "forward"
        text += f", {len(each.before.rows)} rows" if each.before.equations else ""
        text += ", stores" if each.stores else ""
        text += f", {len(each.sums)} sums" if each.sums else ""
        text += ", gradient" if each.gradient else ""
        texts.append(text)
    return texts


END = "backward, 2 rows, 3 sums, gradient"  # a cotangent behind a ReLU is a row that exists
NORMALISED = [
    "forward, 1 rows, stores, 2 sums",
    "forward, 1 rows, 2 sums",
    "forward, 2 rows, stores, 2 sums",
    "forward, 1 rows, 2 sums",
    *[END] * 3,
]
CHAIN = ["forward, 1 rows, stores, 2 sums", *["forward, 1 rows, 2 sums"] * 3, *[END] * 3]
ROW = [
    *("forward, 1 rows, stores", "forward, 1 rows", "forward, 1 rows", "forward, 2 rows, stores"),
    *("forward, 1 rows", "forward, 1 rows", "backward, 2 rows, gradient"),
    *["backward, 1 rows, gradient"] * 4,
]
WAYS = [
    *("forward, 1 rows, stores", "forward, 1 rows", "forward, 2 rows", "forward, 1 rows"),
    *("backward, gradient", "backward, 3 rows, gradient", "backward, gradient"),
]
CASES = {
    "batch norm": (functools.partial(raw, bottleneck), NORMALISED),
    "Linen": (linen, NORMALISED),
    "NNX": (of_nnx, NORMALISED),
    "no ReLU": (functools.partial(raw, without_relu), NORMALISED),
    "GELU": (functools.partial(raw, gelu), CHAIN),
    "no statistics": (
        functools.partial(raw, without_statistics),
        [
            *("forward, 1 rows, stores", "forward, 1 rows", "forward, 2 rows, stores"),
            *("forward, 1 rows", "backward, 2 rows, gradient", *["backward, 1 rows, gradient"] * 2),
        ],
    ),
    "products in a row": (functools.partial(raw, without_statistics, kernels=(1, 1, 1)), ROW),
    "two ways": (functools.partial(raw, two_ways), WAYS),
    "two passes": (  # the second sum needs the first
        functools.partial(raw, in_two_passes),
        [
            *("forward, 1 rows, stores, 1 sums", *["forward, 1 rows, 1 sums"] * 3),
            *("backward, 3 sums, gradient", END, END),
        ],
    ),
}
"""Networks, and what each of their products carries."""

NONE = {
    "3×3": lambda: raw(bottleneck, kernels=(3, 3, 3)),
    "strides": lambda: raw(strided),
    "float32": lambda: raw(bottleneck, dtype="float32"),
    "Equinox": equinox,
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_found(name):
    make, expected = CASES[name]
    assert described(*found_in(make())) == expected


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_product_of_rows_is_left_alone(name):
    assert not found_in(NONE[name]())[1]


def test_a_norm_over_channels_is_not_carried():
    flat, found = found_in(raw(layer_norm))
    for each in found:
        assert not each.sums or "backward" in described(flat, [each])[0]


def _large(jaxpr):
    """Bytes of the values as large as activations that equations make."""
    sizes = [v.aval.size for eqn in compat.open_jaxpr(jaxpr).eqns for v in eqn.outvars]
    return sum(size for size in sizes if size >= np.prod(SMALL))


def rounded(jaxpr, args):
    """What `jaxpr` returns with each rounding that it has: by default XLA leaves out some, here and
    there others."""
    options = {"xla_allow_excess_precision": False}
    return jax.jit(jaxpr_as_fun(jaxpr), compiler_options=options)(*jax.tree.leaves(args))


@pytest.mark.parametrize("name", CASES)
def test_its_values_are_as_near_to_float32_as_those_of_the_step(name):
    step, args = CASES[name][0]()
    flat, found = found_in((step, args))
    ours = with_carried(flat, found)
    compat.check_jaxpr(ours)
    assert _large(ours) < _large(flat)
    exact = jax.tree.leaves(jax.jit(CASES[name][0]("float32")[0])(*args))
    off = lambda x, y: float(np.sqrt(np.square(np.asarray(x) - np.asarray(y)).mean()))
    for a, b, value in zip(rounded(ours, args), rounded(flat, args), exact, strict=True):
        # the root mean square of n errors is itself off by some (2 n) ** -0.5, one of many by more
        assert off(a, value) <= (1.1 + 3 * (2 * value.size) ** -0.5) * off(b, value) + 1e-7


def test_a_plan_carries_where_allow_names_it(tmp_path):
    step, args = raw(bottleneck)
    allow = ("order", "recompute", "carry")
    carrying = vmem_jax.jit(step, budget=1.0, policy="exact", allow=allow)
    plan = carrying.plan(*args)
    assert plan.carried == tuple(range(7))
    assert "7 convolutions with what stands around them" in str(plan)
    assert not vmem_jax.jit(step, budget=1.0, policy="exact").plan(*args).carried
    plan.save(tmp_path / "plan.json")
    again = vmem_jax.jit(step, plan=Plan.load(tmp_path / "plan.json"), allow=allow)
    for a, b in zip(*(jax.tree.leaves(each(*args)) for each in (carrying, again)), strict=True):
        np.testing.assert_array_equal(a, b)
    exact = jax.tree.leaves(jax.jit(raw(bottleneck, dtype="float32")[0])(*args))
    for a, value in zip(jax.tree.leaves(again(*args)), exact, strict=True):
        np.testing.assert_allclose(a, value, atol=0.01)


def test_a_carrying_plan_keeps_less_at_once():
    """Of two batch norms before 1×1 convolutions nothing is kept but the convolutions' results."""
    step, args = raw(bottleneck)
    peaks = {}
    for name, allow in {"all": ("order", "carry"), "order": ("order",)}.items():
        plan = vmem_jax.jit(step, budget=1.0, policy="exact", allow=allow).plan(*args)
        peaks[name] = plan.predicted_peak
    assert peaks["all"] < peaks["order"]


def test_it_has_forms_with_passes_for_several_sums_and_without():
    """A pass touches all that it sums: where that is the peak, a form without needs less."""
    step, args = raw(bottleneck)
    budgeted = vmem_jax.jit(step, budget=0.5, allow=("order", "recompute", "carry"))
    forms = carry_contexts(budgeted.context(args, {}, None))
    programs = [form.traced.captured.program for form in forms]
    assert [bool(program.summed) for program in programs] == [True, False]
    assert all(program.carried for program in programs)


def test_a_step_without_such_convolutions_says_so():
    step, args = raw(bottleneck, dtype="float32")
    with pytest.raises(TechniqueError, match="no 1×1 convolution in 16 bits"):
        vmem_jax.jit(step, allow="carry", budget=0.9)(*args)
