"""One kernel for what is made of a softmax's rows: what is found, its values, and plans with it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture import row_kernels as finding
from vmem_jax.capture.packed_masks import with_packed_masks
from vmem_jax.capture.shards import Shards
from vmem_jax.conv.reduced_rows import by_passes, in_tiles, reduced_rows_p, tiling_of
from vmem_jax.core.cards import machine_for
from vmem_jax.core.costs import analytic
from vmem_jax.rewrite.row_kernels import with_row_kernels

N, H, T, D = 2, 8, 19, 8
"""Of 19 tokens, which are padded to 24."""

WEIGHTS, GRADIENT = 1, 2
"""Arrays of scores that the kernel of the weights reads, and that of the gradient to the scores."""


def heads(x, w):
    return jnp.einsum("ntc,chd->nthd", x, w)


def attention(weigh, x, params):
    q, k, v = (heads(x, params[name]) for name in "qkv")
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k)
    return jnp.einsum("nhqk,nkhd->nqhd", weigh(scores, x, params).astype(v.dtype), v)


def softmax(scores, x, params):
    return jax.nn.softmax(scores.astype(jnp.float32) / 3)


def in_bfloat16(scores, x, params):
    return jax.nn.softmax(scores)


def causal(scores, x, params):
    seen = jnp.tril(jnp.ones((T, T), bool))
    return softmax(jnp.where(seen, scores, -1e9), x, params)


def of_keys(scores, x, params):
    return softmax(jnp.where(x[:, None, None, :, 0] > -1, scores, -1e9), x, params)


def with_slopes(scores, x, params):
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    slopes = 2.0 ** -jnp.arange(H)
    return softmax(scores - slopes[:, None, None] * abs(distance), x, params)


def capped(scores, x, params):
    return softmax(5 * jnp.tanh(scores / 5), x, params)


def dropped(scores, x, params):
    weights = softmax(scores, x, params).astype(scores.dtype)
    kept = jax.random.bernoulli(jax.random.key(1), 0.9, weights.shape)
    return jnp.where(kept, weights / 0.9, 0)


def biased(scores, x, params):
    return softmax(scores + params["bias"], x, params)


def by_logsumexp(scores, x, params):
    sums = jax.nn.logsumexp(scores.astype(jnp.float32), -1, keepdims=True)
    return jnp.exp(scores - sums) * jnp.tanh(sums)


def of_all_rows(scores, x, params):
    sums = jax.nn.logsumexp(scores.astype(jnp.float32), -1, keepdims=True)
    return jnp.exp(scores - sums) * jnp.mean(sums)


CASES = {
    "softmax": (softmax, 0),
    "in bfloat16": (in_bfloat16, 0),
    "causal": (causal, 1),
    "of keys": (of_keys, 1),
    "with slopes": (with_slopes, 1),
    "capped": (capped, 0),
    "by logsumexp": (by_logsumexp, 0),
    "dropped": (dropped, 1),
}
"""How scores are weighed, and the masks or biases that both kernels read."""

LEFT = {
    "a bias is learned": biased,  # the gradient to scores is summed over samples
    "something is made of all sums": of_all_rows,
}
"""Softmaxes that something else reads than products."""


def step_of(weigh):
    def step(params, x):
        def loss(params):
            made = attention(weigh, x, params)
            return jnp.square(made.astype(jnp.float32)).sum()

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def arguments(tokens=T, samples=N, width=16, size=D):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    params = {name: 0.3 * draw(width, H, size) for name in "qkv"}
    params["bias"] = jnp.zeros((H, tokens, tokens), jnp.bfloat16)
    return params, draw(samples, tokens, width)


@pytest.fixture
def of_any_size(monkeypatch):
    monkeypatch.setattr(finding, "_LEAST", 1)


def captured(weigh, args=None):
    args = args or arguments()
    closed = jax.jit(step_of(weigh)).trace(*args).jaxpr
    count = len(compat.open_jaxpr(closed).invars)
    return capture(closed, [f"x{i}" for i in range(count)], [False] * count, platform="gpu")


def replaced(flat):
    """`flat` with its kernels, and what these compute."""
    [ours], count = with_row_kernels([flat])
    eqns = [eqn for eqn in compat.open_jaxpr(ours).eqns if eqn.primitive is reduced_rows_p]
    assert len(eqns) == count
    return ours, [eqn.params["reduced"] for eqn in eqns]


def random(aval, rng):
    if aval.dtype == jnp.uint8:
        return jnp.asarray(rng.integers(256, size=aval.shape), aval.dtype)
    drawn = rng.normal(size=aval.shape)
    return jnp.asarray(drawn > 0 if aval.dtype == bool else drawn, aval.dtype)


def assert_tiles_have_the_values_of_passes(reduced, tiling, rtol=1e-2, interpret=True):
    rng = np.random.default_rng(0)
    operands = [random(v.aval, rng) for v in reduced.operands]
    found = in_tiles(reduced, tiling, *operands, interpret=interpret)
    [expected] = jax.jit(lambda *x: by_passes(*x, reduced=reduced))(*operands)
    assert found.dtype == expected.dtype
    expected = np.asarray(expected, np.float32)
    assert abs(expected).max() > 1e-3
    np.testing.assert_allclose(
        np.asarray(found, np.float32), expected, rtol=rtol, atol=rtol * abs(expected).max()
    )


@pytest.mark.parametrize("name", CASES)
def test_two_kernels_make_what_products_read(name, of_any_size):
    weigh, beside = CASES[name]
    ours, [weights, gradient] = replaced(captured(weigh).flat)
    for reduced, scores in ((weights, WEIGHTS), (gradient, GRADIENT)):
        assert reduced.size == (N * H * T, 24)
        assert len(reduced.operands) == scores + beside
    # nothing else has an element for each score but products and their operands
    rows = [eqn for eqn in compat.open_jaxpr(ours).eqns if eqn.outvars[0].aval.shape[-1:] == (24,)]
    names = {eqn.primitive.name for eqn in rows if eqn.outvars[0].aval.dtype == jnp.float32}
    assert not names & {"exp", "div", "sub"}


@pytest.mark.parametrize("name", CASES)
def test_tiles_have_the_values_of_passes(name, of_any_size):
    _, found = replaced(captured(CASES[name][0]).flat)
    for reduced in found:
        assert_tiles_have_the_values_of_passes(reduced, reduced.tiling)


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_same_values(name, of_any_size):
    """On a CPU, where the equations of the kernels run."""
    flat = captured(CASES[name][0]).flat
    ours, _ = replaced(flat)
    leaves = jax.tree.leaves(arguments())
    theirs = jax.jit(jaxpr_as_fun(flat))(*leaves)
    for a, b in zip(jax.jit(jaxpr_as_fun(ours))(*leaves), theirs, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-2 * abs(b).max())


def test_bits_are_unpacked_in_the_kernels(of_any_size):
    flat = with_packed_masks(captured(dropped).separate, Shards(), 1)
    _, found = replaced(flat)
    assert len(found) == 2
    for reduced in found:
        assert [v.aval.dtype for v in reduced.operands].count(jnp.uint8) == 1
        assert_tiles_have_the_values_of_passes(reduced, reduced.tiling)


@pytest.mark.parametrize("name", LEFT)
def test_what_others_read_stays(name, of_any_size):
    assert replaced(captured(LEFT[name]).flat)[1] == []


def test_small_rows_and_those_that_xla_reduces_at_once_stay(of_any_size, monkeypatch):
    aligned = arguments(tokens=32)
    assert replaced(captured(softmax, aligned).flat)[1] == []
    monkeypatch.undo()
    assert replaced(captured(softmax).flat)[1] == []


@pytest.mark.parametrize(
    ("rows", "length", "expected"),
    [
        (1024, 200, (4, 256, 2)),
        (1024, 1504, (1, 2048, 4)),
        (3, 40, (1, 64, 1)),
        (8, 24, (8, 32, 1)),
    ],
)
def test_tiles_hold_whole_rows(rows, length, expected):
    tiling = tiling_of(rows, length)
    assert (tiling.rows, tiling.columns, tiling.warps) == expected


@pytest.mark.parametrize(("rows", "length"), [(8, 5000), (2**26, 56)])
def test_too_long_and_too_many_rows_have_no_tiles(rows, length):
    assert tiling_of(rows, length) is None


def test_a_row_without_an_element_is_not_a_number(of_any_size):
    """As the softmax of a row that is masked as a whole."""
    _, [weights, _] = replaced(captured(softmax).flat)
    [scores] = (jnp.full(v.aval.shape, -jnp.inf, v.aval.dtype) for v in weights.operands)
    found = in_tiles(weights, weights.tiling, scores, interpret=True)
    assert np.isnan(np.asarray(found, np.float32)[..., :T]).all()


def costs_of(flat_of):
    program = flat_of.program
    seconds = analytic(program, machine_for("h200")).seconds
    return program, seconds


def test_rows_are_read_once_and_take_less():
    args = arguments(tokens=197, samples=32, width=64, size=64)
    before = captured(softmax, args)
    [flat], count = with_row_kernels([before.flat])
    after = before.with_row_kernels(flat, None, count)
    (old, theirs), (new, ours) = costs_of(before), costs_of(after)
    assert new.row_kernels == count == 2
    scores = 2 * 32 * H * 197 * 200
    kernels = [step for step in new.steps if step.op == "reduced_rows"]
    assert [step.nbytes // scores for step in kernels] == [2, 3]
    rows = lambda program: sum(s.nbytes for s in program.steps if s.op != "dot_general")
    assert rows(old) - rows(new) > 3 * scores
    assert sum(ours) < 0.9 * sum(theirs)


@pytest.mark.parametrize("options", [{}, {"sub_batches": 2}, {"policy": "exact"}])
@pytest.mark.gpu_compile
def test_a_plan_has_the_kernels(options):
    args = arguments(tokens=197, samples=32, width=64, size=64)
    made = vmem_jax.jit(step_of(dropped), budget=0.95, batch_argnums=1, **options)
    made = made.lower(*args).compile(target="h200")
    assert made.plan.row_kernels == 2 and "2 kernels of rows" in str(made.plan)
    text = made.as_text()
    assert len(re.findall(r'custom_call_target="__gpu\$xla.gpu.triton"', text)) == 2
    assert not re.search(r"f32\[\d+,8,197\]\S* fusion", text)  # maxima or sums
    again = vmem_jax.jit(step_of(dropped), plan=made.plan, batch_argnums=1, **options)
    assert again.lower(*args).compile(target="h200").plan == made.plan


@pytest.mark.gpu_compile
def test_a_smaller_sub_batch_has_them_too():
    args = arguments(tokens=197, samples=32, width=64, size=64)
    made = vmem_jax.jit(step_of(dropped), budget=0.95, batch_argnums=1, sub_batches=3)
    made = made.lower(*args).compile(target="h200")
    assert made.plan.row_kernels == 2 and made.plan.sub_batches == 3
    sizes = re.findall(r"bf16\[(\d+)\]\S* custom-call\(.*gpu.triton", made.as_text())
    assert sorted(int(n) // (H * 197 * 200) for n in sizes) == [10, 10, 11, 11]


@pytest.mark.parametrize("options", [{"policy": "keep"}, {"allow": ("order", "recompute")}])
@pytest.mark.gpu_compile
def test_a_plan_without_the_technique_has_none(options):
    args = arguments(tokens=197, samples=32, width=64, size=64)
    made = vmem_jax.jit(step_of(dropped), budget=1.0, **options)
    made = made.lower(*args).compile(target="h200")
    assert made.plan.row_kernels == 0 and "gpu.triton" not in made.as_text()


def test_a_step_says_why_it_has_none():
    args = arguments()
    step = vmem_jax.jit(step_of(softmax), budget=0.9, allow="row_kernels")
    with pytest.raises(vmem_jax.TechniqueError, match="its kernels are for GPUs"):
        step.lower(*args).compile()


@pytest.mark.gpu_compile
def test_policy_keep_refuses_it_where_it_is_named():
    step = vmem_jax.jit(step_of(softmax), budget=1.0, policy="keep", allow="row_kernels")
    with pytest.raises(vmem_jax.TechniqueError, match="policy `keep` leaves the step as it is"):
        step.lower(*arguments()).compile(target="h200")
