"""Steps alone: the same values as in the whole, keys that equal steps share, parts of the batch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.policy.order import canonical_order
from vmem_jax.profile.isolate import folded_steps, isolate, smaller
from vmem_jax.profile.neighbours import neighbours
from vmem_jax.profile.steps import distinct_parts

FORM = ("NHWC", "HWIO", "NHWC")


def conv(x, kernel, stride=1):
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=FORM)


def captured(fun, *shapes, dtype=jnp.float32):
    avals = [s if hasattr(s, "dtype") else jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    return capture(jax.jit(fun).trace(*avals).jaxpr)


def alone(found, platform="cpu"):
    folded = folded_steps(found)
    steps = range(len(found.program.steps))
    return [isolate(found, (s,), folded, platform) for s in steps if s not in folded]


def keys(fun, *shapes, platform="cpu", **kwargs):
    return [i.key for i in alone(captured(fun, *shapes, **kwargs), platform)]


def mlp(params, x):
    for w, b in params:
        x = jax.nn.relu(x @ w + b)
    return jnp.sum(x**2)


def train(params, x):
    grads = jax.grad(mlp)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def mlp_step(widths, batch=8, dtype=jnp.float32):
    shape = lambda *s: jax.ShapeDtypeStruct(s, dtype)
    params = [(shape(m, n), shape(n)) for m, n in itertools.pairwise(widths)]
    return capture(jax.jit(train).trace(params, shape(batch, widths[0])).jaxpr)


def conv_step(params, x):
    def loss(params):
        y = x
        for k in params:
            y = jax.nn.relu(conv(y, k))
        return jnp.sum(y)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def conv_captured():
    kernels = [jax.ShapeDtypeStruct((3, 3, 4, 4), jnp.float32)] * 3
    x = jax.ShapeDtypeStruct((8, 6, 6, 4), jnp.float32)
    return capture(jax.jit(conv_step).trace(kernels, x).jaxpr)


def one_by_one(found, folded):
    return [(s,) for s in range(len(found.program.steps)) if s not in folded]


def with_neighbours(found, folded):
    order = canonical_order(found.program)
    groups = neighbours(found.program, order, folded)
    place = {s: g for g in groups for s in g}
    return dict.fromkeys(place.get(s, (s,)) for s in order if s not in folded)


@pytest.mark.parametrize("parts", [one_by_one, with_neighbours])
@pytest.mark.parametrize("found", [mlp_step([4, 4, 4]), conv_captured()], ids=["mlp", "conv"])
def test_parts_alone_in_order_make_the_whole(found, parts):
    opened = compat.open_jaxpr(found.flat)
    args = [
        jax.random.normal(jax.random.key(i), v.aval.shape, v.aval.dtype)
        for i, v in enumerate(opened.invars)
    ]
    expected = jaxpr_as_fun(found.flat)(*args)
    env = dict(zip(opened.invars, args, strict=True))
    env |= dict(zip(opened.constvars, compat.constants(found.flat), strict=True))
    folded = folded_steps(found)
    for steps in parts(found, folded):
        isolated = isolate(found, steps, folded, "cpu")
        compat.check_jaxpr(isolated.closed)
        alone = compat.open_jaxpr(isolated.closed)
        outs = jaxpr_as_fun(isolated.closed)(*[env[v] for v in alone.invars])
        env |= dict(zip(alone.outvars, outs, strict=True))
    for atom, value in zip(opened.outvars, expected, strict=True):
        np.testing.assert_allclose(env[atom], value, rtol=1e-5, atol=1e-5)


def test_what_only_neighbours_read_stays_inside():
    found = conv_captured()
    folded = folded_steps(found)
    groups = neighbours(found.program, canonical_order(found.program), folded)
    assert max(map(len, groups)) > 1
    for steps in groups:
        inside = {b for s in steps for b in found.program.steps[s].writes}
        wanted = {
            b for b in inside
            if found.program.is_resident[b] or set(found.program.readers[b]) - set(steps)
        }  # fmt: skip
        results = set(compat.open_jaxpr(isolate(found, steps, folded, "cpu").closed).outvars)
        assert results == {found.variables[b] for b in wanted}


def test_a_flipped_kernel_is_folded_into_its_convolution():
    found = conv_captured()
    folded = folded_steps(found)
    assert {found.program.steps[s].op for s in folded} == {"rev"} and len(folded) == 2
    for isolated in alone(found):
        names = [e.primitive.name for e in compat.open_jaxpr(isolated.closed).eqns]
        if "rev" in names:
            assert "conv_general_dilated" in names


def test_equal_layers_share_their_keys():
    few, many = (distinct_parts(mlp_step([16] * n), "cpu") for n in (4, 12))
    assert len(many.alone) > 2 * len(few.alone)
    assert set(many.parts) == set(few.parts)
    together = [key for _, key in many.together]
    counted = sum(part.count for part in many.parts.values())
    assert counted == len([k for k in many.alone if k]) + len(together)


def test_names_do_not_matter():
    def plain(x):
        return jnp.sum(jnp.sin(x) @ x)

    @jax.jit
    def inner(value):
        return jnp.sin(value)

    def named(anything):
        with jax.named_scope("some/layer"):
            y = checkpoint_name(inner(anything), "y")
            return jnp.sum(y @ anything)

    assert keys(plain, (8, 8)) == keys(named, (8, 8))


def test_an_effect_of_the_process_does_not_matter():
    import subprocess
    import sys

    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/profile']; import test_isolate as t;"
        "print([i.key for i in t.alone(t.conv_captured())])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**__import__("os").environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] and eval(runs[0]) == [i.key for i in alone(conv_captured())]


BASE = (lambda x, k: conv(x, k), (8, 6, 6, 4), (3, 3, 4, 4))


@pytest.mark.parametrize(
    "fun, shapes, kwargs",
    [
        (BASE[0], [(16, 6, 6, 4), (3, 3, 4, 4)], {}),
        (BASE[0], [(8, 6, 6, 4), (5, 5, 4, 4)], {}),
        (BASE[0], BASE[1:], {"dtype": jnp.bfloat16}),
        (lambda x, k: conv(x, k, 2), BASE[1:], {}),
        (lambda x, k: jax.nn.relu(conv(x, k)), BASE[1:], {}),
        (BASE[0], BASE[1:], {"platform": "gpu"}),
    ],
    ids=["batch", "kernel", "dtype", "stride", "epilogue", "platform"],
)
def test_what_does_matter(fun, shapes, kwargs):
    assert keys(*BASE) == keys(*BASE)
    assert not set(keys(*BASE)) & set(keys(fun, *shapes, **kwargs))


def test_the_layout_of_arguments_is_not_free_and_that_is_in_the_key():
    found = captured(lambda x, y: (x @ y) @ y, (8, 8), (8, 8))
    products = [i for i in alone(found) if i.what.startswith("dot_general")]
    assert products[0].free != products[1].free
    assert products[0].key != products[1].key


@pytest.mark.parametrize(
    "fun, says",
    [
        (
            lambda x: jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((8, 8), x.dtype), x),
            "calls",
        ),
        (lambda x: lax.while_loop(lambda v: v[0, 0] < 9, lambda v: v + 1, x), "length depends"),
        (
            lambda x: lax.scan(
                lambda c, _: (lax.while_loop(lambda v: v < 9, lambda v: v + 1, c), None),
                x[0, 0],
                None,
                length=3,
            )[0],
            "length depends",
        ),
    ],
    ids=["callback", "while", "while in scan"],
)
def test_what_cannot_run_alone_is_named(fun, says):
    found = distinct_parts(captured(fun, (8, 8)), "cpu")
    assert any(says in reason for reason in found.untimed)


def test_an_effect_is_not_run():
    def fun(x):
        jax.debug.print("{}", x[0, 0])
        return x + 1

    found = distinct_parts(captured(fun, (8, 8)), "cpu")
    assert any("debug" in r and "effect" in r for r in found.untimed)


def test_a_split_step_is_not_timed():
    import dataclasses

    found = captured(lambda x: jnp.sum(x, 0), (8, 8))
    program = found.program
    half = [dataclasses.replace(b, nbytes=b.nbytes // 2) for b in program.buffers]
    found = dataclasses.replace(found, program=dataclasses.replace(program, buffers=tuple(half)))
    assert all("split over devices" in r for r in distinct_parts(found, "cpu").untimed)
    assert not distinct_parts(found, "cpu").parts


def test_an_update_of_a_part_is_carried():
    def fun(x, y):
        return lax.dynamic_update_slice(jnp.sin(x), y, (0, 0)) @ x

    (update,) = [
        i for i in alone(captured(fun, (8, 8), (2, 8))) if i.what.startswith("dynamic_update")
    ]
    assert update.carried == ((0, 0),)


# -- parts of the batch


def cut(found, op, share=0.6):
    (isolated,) = [i for i in alone(found) if i.what.startswith(op)][:1]
    nbytes = sum(a.size * a.dtype.itemsize for a in (*isolated.avals, *isolated.out_avals))
    return isolated, smaller(isolated, int(share * nbytes))


def test_half_of_the_batch():
    _, (part, size, whole) = cut(captured(*BASE), "conv")
    assert (size, whole) == (4, 8)
    assert [a.shape for a in part.avals] == [(4, 6, 6, 4), (3, 3, 4, 4)]
    assert [a.shape for a in part.out_avals] == [(4, 6, 6, 4)]


def test_a_part_computes_a_part():
    fun = lambda x, w, b: jnp.tanh((x @ w).reshape(-1) * 2).reshape(64, 4) + b
    isolated, (part, size, _) = cut(captured(fun, (64, 16), (16, 4), (4,)), "add", 0.7)
    args = [jax.random.normal(jax.random.key(i), a.shape) for i, a in enumerate(isolated.avals)]
    few = [a[:size] if a.shape[:1] == (64,) else a for a in args]
    whole, some = (jaxpr_as_fun(i.closed)(*a)[0] for i, a in ((isolated, args), (part, few)))
    np.testing.assert_allclose(whole[:size], some, rtol=1e-6)


def test_as_many_channels_as_images():
    fun = lambda x, scale: jnp.sum(x * scale, axis=0)  # scale f32[8] is no batch
    _, (part, size, whole) = cut(captured(fun, (8, 6, 8), (8,)), "reduce")
    assert (size, whole) == (4, 8)
    assert {a.shape for a in part.avals} == {(4, 6, 8), (8,)}


def test_a_weight_gradient_keeps_its_shape():
    found = captured(
        lambda k, x: jax.grad(lambda k: jnp.sum(conv(x, k) ** 2))(k), (3, 3, 4, 4), (8, 6, 6, 4)
    )
    gradient = [i for i in alone(found) if i.out_avals[0].shape in ((3, 3, 4, 4), (4, 3, 3, 4))]
    part, size, whole = smaller(gradient[0], 6000)
    assert (size, whole) == (4, 8)
    assert part.out_avals == gradient[0].out_avals


@pytest.mark.parametrize(
    "fun, shapes",
    [
        (lambda x: jnp.sum(x), [()]),
        (lambda x: jnp.sin(x), [(7, 8)]),  # 7 images cannot be halved
        (lambda x: jnp.cumsum(x.reshape(-1)).sort(), [(8, 8)]),
    ],
)
def test_what_has_no_part_has_none(fun, shapes):
    isolated = alone(captured(fun, *shapes))[0]
    assert smaller(isolated, 0) is None
