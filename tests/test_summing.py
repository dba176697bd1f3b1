"""One pass for the sums of a batch norm's backward pass: what is found, and its values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_carried as networks

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.capture.carried import find_carrying
from vmem_jax.capture.summing import find_summing
from vmem_jax.core.plan import Plan
from vmem_jax.profile.isolate import isolate
from vmem_jax.rewrite.carried import with_carried
from vmem_jax.rewrite.summing import with_summing

raw = networks.raw
threes = functools.partial(raw, networks.bottleneck, kernels=(3, 3, 3))


def found_in(case):
    step, args = case
    flat = capture(jax.jit(step).trace(*args).jaxpr).separate
    return flat, find_summing(flat)


def shortcut(x, layers):
    """Both norms behind a join read the gradient behind its ReLU."""
    y = x
    for i, (kernel, scale, bias) in enumerate(layers):
        y = networks.batch_norm(networks.conv(y, kernel), scale, bias)
        y = jax.nn.relu(y) if i < 2 else y
    first, second = layers[0], layers[2]
    kernel = jnp.tile(first[0], (1, 1, 1, 2)).astype(x.dtype)
    return jax.nn.relu(networks.batch_norm(networks.conv(x, kernel), *second[1:]) + y)


OWN = (3, 2, False)  # sums, arrays that are read, whether dy is stored: the mask is made of y
JOIN = (3, 3, True)  # it is of the output of the block, and dy is the gradient to what joins, too
BOTH = (5, 3, True)  # the mask is made of what both norms read
BLOCKS = [OWN, OWN, JOIN, OWN, OWN]  # the last gradient is of a loss, and made of a scalar
CASES = {
    "batch norm": (functools.partial(raw, networks.bottleneck), BLOCKS),
    "Linen": (networks.linen, BLOCKS),
    "Linen in float16": (functools.partial(networks.linen, "float16"), BLOCKS),
    "NNX": (networks.of_nnx, BLOCKS),
    "two passes": (functools.partial(raw, networks.in_two_passes), [OWN] * 5),
    "a shortcut": (functools.partial(raw, shortcut), [OWN, OWN, BOTH, OWN, OWN]),
}
"""Networks, and the passes in each."""

NONE = {
    "no ReLU": functools.partial(raw, networks.without_relu),
    "no statistics": functools.partial(raw, networks.without_statistics),
    "norms over channels": functools.partial(raw, networks.layer_norm),
    "float32": functools.partial(raw, networks.bottleneck, dtype="float32"),
    "Equinox": networks.equinox,
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_found(name):
    make, expected = CASES[name]
    _, found = found_in(make())
    assert [(len(p.sums), len(p.tile.rows), bool(p.stored)) for p in found] == expected


@pytest.mark.parametrize("name", NONE)
def test_what_one_kernel_of_xlas_does_is_left_alone(name):
    assert not found_in(NONE[name]())[1]


def test_products_that_carry_sums_leave_others():
    """Of a bottleneck block the sums before the 3×3 convolution."""
    flat, _ = found_in(raw(networks.bottleneck))
    rest = with_carried(flat, find_carrying(flat))
    both = with_summing(rest, find_summing(rest))
    compat.check_jaxpr(both)
    names = [eqn.primitive.name for eqn in compat.open_jaxpr(both).eqns]
    assert names.count("carried_product") == 7 and names.count("summed_rows") == 2


@pytest.mark.parametrize("name", CASES)
def test_its_values_are_those_of_the_step(name):
    step, args = CASES[name][0]()
    flat, found = found_in((step, args))
    ours = with_summing(flat, found)
    compat.check_jaxpr(ours)
    over = lambda jaxpr: [  # sums over rows
        eqn
        for eqn in compat.open_jaxpr(jaxpr).eqns
        if eqn.primitive.name == "reduce_sum" and len(eqn.invars[0].aval.shape) == 4
    ]
    assert len(over(ours)) == len(over(flat)) - sum(len(each.sums) for each in found)
    for a, b in zip(networks.rounded(ours, args), networks.rounded(flat, args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_plan_has_one_pass_where_allow_names_it(tmp_path):
    """The CPU is not asked otherwise."""
    step, args = threes()  # 3×3 convolutions carry nothing
    allow = ("order", "recompute", "carry")
    summing = vmem_jax.jit(step, budget=1.0, policy="exact", allow=allow)
    plan = summing.plan(*args)
    assert plan.summed == len(found_in((step, args))[1]) > 0 and not plan.carried
    assert f"{plan.summed} passes for several sums each" in str(plan)
    assert not vmem_jax.jit(step, budget=1.0, policy="exact").plan(*args).summed
    plan.save(tmp_path / "plan.json")
    again = vmem_jax.jit(step, plan=Plan.load(tmp_path / "plan.json"), allow=allow)
    for a, b in zip(*(jax.tree.leaves(each(*args)) for each in (summing, again)), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(
        jax.tree.leaves(again(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=0.01)


def test_equal_passes_are_timed_once():
    """Of a network of two blocks the norms of the second are like those of the first."""
    step, args = raw(networks.bottleneck)
    captured = capture(jax.jit(step).trace(*args).jaxpr)
    keys = set()
    for _ in range(2):
        flat = with_summing(captured.separate, find_summing(captured.separate))
        summing = captured.rewritten(flat)
        for s, each in enumerate(summing.program.steps):
            if each.op == "summed_rows":
                keys.add(isolate(summing, (s,), frozenset(), "cpu").key)
    assert len(keys) == 2  # those of a join, and the others


@pytest.mark.gpu_compile
def test_cards_on_which_it_was_timed_use_it_unasked():
    """Of a batch with which passes take longer than launches."""
    step, (params, x) = raw(networks.bottleneck)
    x = jax.ShapeDtypeStruct((8192, *x.shape[1:]), x.dtype)

    def compiled(target, **options):
        run = vmem_jax.jit(step, budget="1GiB", policy="exact", **options)
        return run.lower(params, x).compile(target=target)

    ours = compiled("h100")
    assert ours.plan.summed == 5 == ours.as_text().count("gpu.triton")
    without = compiled("h100", allow="order").plan
    assert ours.plan.predicted_seconds < 0.95 * without.predicted_seconds
    assert not compiled("a100").plan.summed
