"""The exact residual rules: they fire where they should, free the value, and keep every bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture import exact
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.unpool import unpool, window_index

DTYPES = [jnp.float32, jnp.bfloat16]
COMPARISONS = {"gt", "lt", "ge", "le", "eq", "and"}
VIEWS = {"broadcast_in_dim", "reshape", "squeeze", "transpose"}


def specials(shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
    """Mostly ties, both zeros, NaN, infinities and denormals, among random numbers."""
    rng = np.random.default_rng(seed)
    # f32 atomics of a GPU flush denormals, and XLA:GPU's select_and_scatter_add is made of them.
    cpu = jax.default_backend() == "cpu"
    tiny = np.asarray(jnp.finfo(dtype).smallest_subnormal, np.float32) if cpu else np.float32(2)
    pool = [np.nan, np.inf, -np.inf, 0.0, -0.0, tiny, -tiny, 0.5, 1.0, 6.0, -1.0, 7.0]
    values = rng.choice(np.array(pool, np.float32), size=shape)
    plain = rng.integers(-4, 8, size=shape).astype(np.float32)
    values = np.where(rng.random(shape) < 0.4, plain, values)
    return jnp.asarray(values.astype(dtype))


def plain(shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def traced(outputs: Callable[..., jax.Array], *args: jax.Array) -> jexc.ClosedJaxpr:
    """The flat jaxpr of a step: the outputs, and the gradient of their sum by the first argument.

    Not the sum itself, which compiled programs may round differently.
    """

    def loss(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = outputs(*args)
        return out.sum(), out

    return flatten(jax.make_jaxpr(jax.grad(loss, has_aux=True))(*args))


def backward_reads(closed: jexc.ClosedJaxpr) -> list[tuple[str, Any]]:
    """(primitive, aval) of the forward values that the backward pass, or a mask of it, reads."""
    opened = compat.open_jaxpr(closed)
    source: dict[Any, Any] = {}
    late: set[int] = set()
    wanted: list[Any] = []
    for eqn in opened.eqns:
        inputs = [v for v in eqn.invars if isinstance(v, jexc.Var)]
        known = [v for v in inputs if v in source]
        if "transpose(" in compat.name_stack(eqn) or any(id(source[v]) in late for v in known):
            late.add(id(eqn))
            wanted += [v for v in known if id(source[v]) not in late]
        source.update((v, eqn) for v in eqn.outvars)
    reads, seen = [], set()
    while wanted:
        var = wanted.pop()
        eqn = source.get(var)
        if eqn is None or var in seen:
            continue
        seen.add(var)
        if eqn.primitive.name in COMPARISONS | VIEWS:
            wanted += [v for v in eqn.invars if isinstance(v, jexc.Var)]
        if eqn.primitive.name not in VIEWS:
            reads.append((eqn.primitive.name, var.aval))
    return reads


def assert_same_bits(a: Any, b: Any) -> None:
    """Any NaN is the same as any other: which one an operation gives is the processor's to say."""
    a, b = np.asarray(a), np.asarray(b)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    number = ~(np.isnan(a) & np.isnan(b)) if jnp.issubdtype(a.dtype, jnp.inexact) else ...
    bits = f"u{a.dtype.itemsize}"
    np.testing.assert_array_equal(a.view(bits)[number], b.view(bits)[number])


def assert_exact(
    before: jexc.ClosedJaxpr, after: jexc.ClosedJaxpr, args: Any, compiled: bool = True
) -> None:
    """The two programs give the same bits, op by op and compiled."""
    compat.check_jaxpr(after)
    programs = jexc.jaxpr_as_fun(before), jexc.jaxpr_as_fun(after)
    leaves = jax.tree.leaves(args)
    for how in (lambda f: f, jax.jit) if compiled else (lambda f: f,):
        old, new = (how(f)(*leaves) for f in programs)
        for x, y in zip(old, new, strict=True):
            assert_same_bits(x, y)


def check(step: Callable[..., jax.Array], args: Any, fires: list[str], freed: str) -> None:
    """The rules fire, the backward pass no longer reads float results of `freed`, bits stay."""
    before = traced(step, *args)
    after, applied = exact.apply_exact_rules(before)
    assert [a.rule for a in applied] == fires

    def large(closed: jexc.ClosedJaxpr) -> list[str]:
        floats = [r for r in backward_reads(closed) if jnp.issubdtype(r[1].dtype, jnp.floating)]
        return [name for name, aval in floats if aval.size == args[0].size]

    assert freed in large(before)
    assert freed not in large(after)
    assert all(a.freed == args[0].size * args[0].dtype.itemsize for a in applied)
    assert_exact(before, after, args)
    assert exact.apply_exact_rules(after)[1] == ()


def unchanged(step: Callable[..., jax.Array], *args: jax.Array) -> bool:
    before = traced(step, *args)
    after, applied = exact.apply_exact_rules(before)
    return not applied and after is before


def activation_step(act: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """The gradient by x is act'(x) * 2 * act(x) * v: the next layer reads act(x)."""
    return lambda x, v: jnp.square(act(x + 0.0)) * v


def pool_step(pool: Callable, act: Callable = jax.nn.relu) -> Callable[..., jax.Array]:
    """The gradient by x is the unpooled and masked v: v's own special values reach it."""
    return lambda x, v: pool(act(x + 0.0)) * v


def max_pool(window: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Callable:
    return functools.partial(nn.max_pool, window_shape=window, strides=strides or window)


CLAMPS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "flax": nn.relu,
    "clamp": lambda x: lax.clamp(jnp.asarray(-1, x.dtype), x, jnp.asarray(6, x.dtype)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", CLAMPS.values(), ids=CLAMPS)
def test_relu_mask(act: Callable, dtype: Any) -> None:
    args = specials((64, 33), dtype, 0), specials((64, 33), dtype, 1)
    check(activation_step(act), args, ["relu_mask"], "add")


@pytest.mark.parametrize(
    "name,limit,exact_there",
    [
        ("gt", 0.0, True),
        ("gt", 2.0, True),
        ("gt", -1.0, False),
        ("gt", 6.0, False),
        ("le", 0.0, True),
        ("lt", 6.0, True),
        ("lt", 0.0, False),
        ("ge", 6.0, True),
        ("ge", 0.0, False),
        ("ge", 0.5, True),
        ("le", 6.0, False),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_which_comparisons_a_clamp_keeps(
    name: str, limit: float, exact_there: bool, swapped: bool
) -> None:
    """The rule against the truth, y = clamp(0, x, 6). Swapped: `c < x`, before the clamp."""
    compare = {"gt": lax.gt, "lt": lax.lt, "ge": lax.ge, "le": lax.le}
    flip = {"gt": "lt", "lt": "gt", "ge": "le", "le": "ge"}

    @jax.custom_vjp
    def act(x: jax.Array) -> jax.Array:
        return lax.clamp(0.0, x, 6.0)

    def forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = None if swapped else lax.clamp(0.0, x, 6.0)
        c = lax.full_like(x, limit)
        mask = compare[flip[name]](c, x) if swapped else compare[name](x, c)
        return lax.clamp(0.0, x, 6.0) if y is None else y, mask

    act.defvjp(forward, lambda mask, g: (jnp.where(mask, g, 0.0),))
    args = specials((512,), jnp.float32, 2), specials((512,), jnp.float32, 3)
    before = traced(lambda x, v: act(x + 0.0) * v, *args)
    after, applied = exact.apply_exact_rules(before)
    assert bool(applied) == exact_there
    assert_exact(before, after, args)
    x = args[0]
    same = compare[name](x, limit) == compare[name](lax.clamp(0.0, x, 6.0), limit)
    assert bool(same.all()) == exact_there


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("larger", [True, False])
def test_larger_of_two(larger: bool, dtype: Any) -> None:
    """As JAX before 0.11 writes the gradient: whether the result is this operand."""
    pick = jnp.maximum if larger else jnp.minimum

    @jax.custom_vjp
    def act(x: jax.Array, y: jax.Array) -> jax.Array:
        return pick(x, y)

    def forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        z = pick(x, y)
        return z, (x == z, z == y)

    act.defvjp(forward, lambda masks, g: (jnp.where(masks[0], g, 2), jnp.where(masks[1], g, 3)))
    args = specials((64, 33), dtype, 0), specials((64, 33), dtype, 1)
    for other in (lambda v: v + 0.5, lambda v: jnp.zeros_like(v)):
        before = traced(lambda x, v, other=other: act(x + 0.5, other(v)) * v, *args)
        after, applied = exact.apply_exact_rules(before)
        assert {a.rule for a in applied} >= {"larger_of_two"}
        assert "eq" not in [eqn.primitive.name for eqn in compat.open_jaxpr(after).eqns]
        assert_exact(before, after, args)


def test_relu_mask_keeps_out() -> None:
    x, v, k = plain((8, 8), jnp.float32, 0), plain((8, 8), jnp.float32, 1), jnp.arange(8)
    assert unchanged(lambda x, v: jax.nn.relu(x) ** 2 * v, x, v)  # x is an argument
    # the input is read for its own sake
    assert unchanged(lambda x, v: jax.nn.relu(x + 1) * jnp.sin(x + 1) * v, x, v)
    for act in (jax.nn.leaky_relu, jax.nn.elu, jnp.abs):
        assert unchanged(activation_step(act), x, v)
    _, applied = exact.apply_exact_rules(traced(activation_step(lambda x: jnp.maximum(x, 0)), x, v))
    assert "relu_mask" not in [a.rule for a in applied]  # it asks for ties, too
    # an integer's clamp stands beside a mask of the same integer
    assert unchanged(lambda x, k: jnp.where(k + 1 > 0, x, 0) ** 2 * lax.max(k + 1, 0), x, k)


POOLS = {
    "2x2": ((8, 16, 12, 5), (2, 2)),
    "odd": ((8, 17, 13, 3), (2, 2)),
    "2x3": ((8, 12, 15, 3), (2, 3)),
    "3x3": ((4, 16, 20, 2), (3, 3)),
    "tall": ((6, 8, 15, 2), (4, 1)),
    "1d": ((3, 103, 4), (3,)),
    "3d": ((4, 8, 9, 6, 3), (2, 2, 2)),
    "global": ((16, 7, 7, 3), (7, 7)),
    "one image": ((16, 18, 5), (2, 2)),
}


POOL_ROWS = [
    pytest.param(*POOLS[name], dtype, id=f"{name}-{jnp.dtype(dtype).name}")
    for dtype in (*DTYPES, jnp.float16)
    for name in POOLS
    if dtype == jnp.float32 or name in ("odd", "1d", "global")
]


@pytest.mark.parametrize("folded", [False, True], ids=["pool", "relu-pool"])
@pytest.mark.parametrize("shape,window,dtype", POOL_ROWS)
def test_max_pool_index(shape: tuple, window: tuple, folded: bool, dtype: Any) -> None:
    x, pool = specials(shape, dtype, 0), max_pool(window)
    v = specials(jax.eval_shape(pool, x).shape, dtype, 1)
    if folded:
        check(pool_step(pool), (x, v), ["relu_mask", "max_pool_index"], "max")
    else:
        check(pool_step(pool, lambda x: x), (x, v), ["max_pool_index"], "add")


def test_the_folded_index_is_the_only_residual() -> None:
    x, pool = specials((2, 8, 8, 4), jnp.float32, 0), max_pool((2, 2))
    after, _ = exact.apply_exact_rules(traced(pool_step(pool), x, pool(x)))
    assert [aval.str_short() for _, aval in backward_reads(after)] == ["uint8[2,4,4,4]"]


def test_same_padding_that_pads_nothing() -> None:
    pool = functools.partial(max_pool((2, 2)), padding="SAME")
    x, v = specials((2, 6, 8, 5), jnp.float32, 0), specials((2, 3, 4, 5), jnp.float32, 1)
    check(pool_step(pool), (x, v), ["relu_mask", "max_pool_index"], "max")


def test_pool_of_examples_under_vmap() -> None:
    """Equinox pools channels first, one image at a time: views stand between pool and mask."""
    pool = eqx.nn.MaxPool2d(2, 2)
    step = pool_step(lambda y: y, jax.vmap(lambda x: pool(jax.nn.relu(x))))
    args = specials((4, 3, 6, 9), jnp.float32, 0), specials((4, 3, 3, 4), jnp.float32, 1)
    check(step, args, ["relu_mask", "max_pool_index"], "max")
    after, _ = exact.apply_exact_rules(traced(step, *args))
    assert all(aval.dtype == jnp.uint8 for _, aval in backward_reads(after))


def test_pool_under_checkpoint() -> None:
    """flatten merges what the checkpoint repeats; the mask then stands in the backward pass."""
    pool = max_pool((2, 2))
    loss = jax.checkpoint(pool_step(pool))
    args = specials((2, 6, 8, 5), jnp.float32, 0), specials((2, 3, 4, 5), jnp.float32, 1)
    before = traced(loss, *args)
    after, applied = exact.apply_exact_rules(before)
    assert [a.rule for a in applied] == ["relu_mask", "max_pool_index"]
    assert "select_and_scatter_add" not in str(after)
    assert_exact(before, after, args)


def test_pool_keeps_out() -> None:
    x = plain((2, 9, 9, 3), jnp.float32, 0)

    def fires(pool: Callable, act: Callable = jax.nn.relu) -> bool:
        v = plain(jax.eval_shape(pool, x).shape, jnp.float32, 1)
        _, applied = exact.apply_exact_rules(traced(pool_step(pool, act), x, v))
        return "max_pool_index" in [a.rule for a in applied]

    assert fires(max_pool((2, 2)))
    assert not fires(max_pool((3, 3), (2, 2)))  # overlapping windows
    assert not fires(max_pool((2, 2), (3, 3)))  # gaps between windows
    assert not fires(functools.partial(max_pool((2, 2)), padding="SAME"))  # padded
    assert not fires(max_pool((9, 9)))  # more places than are worth unrolling
    assert not fires(lambda y: nn.avg_pool(y, (2, 2), (2, 2)))
    # The pool's input is itself a residual of another reader.
    assert not fires(lambda y: max_pool((2, 2))(y) * jnp.sin(y).sum())
    # Two pools of one input keep it for each other.
    assert not fires(lambda y: max_pool((2, 2))(y)[:, :3, :3] + max_pool((3, 3))(y))


def test_a_mask_with_another_reader_is_not_folded() -> None:
    """Dropout between ReLU and pool: its mask serves the forward pass too."""
    args = specials((2, 6, 8, 5), jnp.float32, 0), specials((2, 3, 4, 5), jnp.float32, 1)
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, args[0].shape)

    def loss(x: jax.Array, v: jax.Array, keep: jax.Array) -> jax.Array:
        y = jax.nn.relu(x + 0.0)
        return max_pool((2, 2))(jnp.where(keep, y / 0.5, 0.0)) * v

    before = traced(loss, *args, keep)
    after, applied = exact.apply_exact_rules(before)
    assert [a.rule for a in applied] == ["relu_mask", "max_pool_index"]
    assert "select_n" not in [n for n, a in backward_reads(after) if a.size == args[0].size]
    assert_exact(before, after, (*args, keep))


def test_a_convolutional_training_step() -> None:
    dtype = jnp.float32

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for features in (4, 6):
                for _ in range(2):
                    x = nn.relu(nn.Conv(features, (3, 3), dtype=dtype, param_dtype=dtype)(x))
                x = nn.max_pool(x, (2, 2), (2, 2))
            return nn.log_softmax(nn.Dense(3)(x.reshape(len(x), -1)))

    net, x = Net(), plain((4, 9, 8, 3), dtype, 0)
    params = net.init(jax.random.key(0), x)

    def step(params: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: -net.apply(p, x)[:, 0].mean())(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, grads)

    before = flatten(jax.make_jaxpr(step)(params, x))
    after, applied = exact.apply_exact_rules(before)
    assert [a.rule for a in applied] == ["relu_mask"] * 4 + ["max_pool_index"] * 2
    # Only the ReLU outputs that a convolution reads stay, of the four and their four inputs.
    kept = [a.shape for n, a in backward_reads(after) if n in ("max", "add") and a.ndim == 4]
    assert sorted(kept) == [(4, 4, 4, 6), (4, 9, 8, 4)]
    # Op by op: compiled, a bias gradient's sum is in another fusion and may add in another order.
    assert_exact(before, after, (params, x), compiled=False)


def labels_step(x: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(x), labels[..., None], -1)[..., 0]


def test_the_gradient_of_a_picked_label_is_no_scatter() -> None:
    x = plain((4, 3, 7), jnp.float32, 0)
    labels = jnp.array([[0, 6, 2], [1, 1, 1], [5, 4, 3], [6, 0, 9]])  # the last is out of bounds
    before = traced(labels_step, x, labels)
    after, applied = exact.apply_exact_rules(before)
    assert [a.rule for a in applied] == ["label_scatter"]
    large = lambda closed: [
        e.primitive.name
        for e in compat.open_jaxpr(closed).eqns
        if "scatter" in e.primitive.name and e.outvars[0].aval.shape == x.shape
    ]
    assert large(before) and not large(after)
    assert_exact(before, after, (x, labels))


def test_a_scatter_of_several_numbers_to_a_row_stays() -> None:
    x, places = plain((4, 7), jnp.float32, 0), jnp.array([[0, 0], [1, 2], [3, 3], [6, 5]])
    assert unchanged(lambda x, i: jnp.take_along_axis(x, i, -1), x, places)


def flax_dropout(x: jax.Array, key: jax.Array) -> jax.Array:
    return nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": key})


def equinox_dropout(x: jax.Array, key: jax.Array) -> jax.Array:
    return eqx.nn.Dropout(0.5)(x, key=key)


@pytest.mark.parametrize("dropout", [flax_dropout, equinox_dropout])
def test_dropout_saves_its_bool_mask(dropout: Callable) -> None:
    """No rule needed: of all that dropout computes, the backward pass reads the mask."""
    x, key = plain((8, 16), jnp.float32, 0), jax.random.key(0)
    before = traced(lambda x, v, key: dropout(x + 0.0, key) * v, x, x, key)
    eqns = compat.open_jaxpr(before).eqns
    late = [e for e in eqns if "transpose(" in compat.name_stack(e)]
    made = {v: e.primitive.name for e in eqns if e not in late for v in e.outvars}
    reads = [v for e in late for v in e.invars if isinstance(v, jexc.Var) and v in made]
    large = [(made[v], v.aval.dtype) for v in reads if v.aval.shape == x.shape]
    assert ("lt", jnp.dtype(bool)) in large
    assert {name for name, _ in large} <= {"lt", "broadcast_in_dim"}  # and a fill of zeros


@pytest.mark.parametrize(
    "act",
    [jnp.tanh, jax.nn.sigmoid, jax.nn.silu, jax.nn.gelu, jax.nn.softmax, jax.nn.log_softmax],
)
def test_smooth_activations_are_left_to_recomputation(act: Callable) -> None:
    x = plain((8, 16), jnp.float32, 0)
    assert unchanged(activation_step(act), x, x)


# The tests above must fail for rules that do nothing, and for arithmetic that is almost right.


@pytest.mark.parametrize("rule", ["relu_mask", "max_pool_index"])
def test_a_missing_rule_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "RULES", tuple(r for r in exact.RULES if r.name != rule))
    args = specials((2, 6, 8, 5), jnp.float32, 0), specials((2, 3, 4, 5), jnp.float32, 1)
    with pytest.raises(AssertionError):
        check(pool_step(max_pool((2, 2))), args, ["relu_mask", "max_pool_index"], "max")


def last_of_ties(window: tuple, y: jax.Array, *mask: jax.Array) -> jax.Array:
    flip = tuple(d for d, w in enumerate(window) if w > 1)
    index = window_index(window, lax.rev(y, flip), *(lax.rev(m, flip) for m in mask))
    place = lax.rev(index, flip)
    return jnp.where(place == 255, place, np.prod(window, dtype=np.uint8) - 1 - place)


def wrong_zero(window: tuple, shape: tuple, g: jax.Array, index: jax.Array) -> jax.Array:
    return -unpool(window, shape, -g, index)


@pytest.mark.parametrize("name,wrong", [("window_index", last_of_ties), ("unpool", wrong_zero)])
def test_almost_exact_arithmetic_is_noticed(
    name: str, wrong: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = specials((2, 6, 8, 5), jnp.float32, 0), specials((2, 3, 4, 5), jnp.float32, 1)
    check(pool_step(max_pool((2, 2))), args, ["relu_mask", "max_pool_index"], "max")
    monkeypatch.setattr(exact, name, wrong)
    before = traced(pool_step(max_pool((2, 2))), *args)
    after, _ = exact.apply_exact_rules(before)
    with pytest.raises(AssertionError):
        assert_exact(before, after, args)
