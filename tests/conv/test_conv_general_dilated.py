"""`vmem_jax.conv_general_dilated`: lax's results, its gradients, and less workspace."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_cases import LAYERS
from flax import linen, nnx
from jax import lax

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.conv.pick import by_xla, choose, slice_by_xla, undivided
from vmem_jax.conv.primitive import micro_convolution
from vmem_jax.conv.slices import layouts, roles
from vmem_jax.core.convolution import Convolution, Pass
from vmem_jax.errors import WorkspaceError

LAYER = LAYERS[0]
limited = functools.partial(vmem_jax.conv_general_dilated, workspace_limit=1 << 30)


def convolution_of(layer, which=Pass.FORWARD, **kwargs):
    batch, c, k = layer.sizes
    facts = dict(dtype="float32", strict=False, batch=batch, features_in=c, features_out=k)
    facts |= dict(size=layer.space, kernel=layer.kernel, strides=layer.strides)
    facts |= dict(padding=layer.padding)
    facts |= dict(dilation=layer.dilation, groups=layer.groups, channels_last=layer.channels_last)
    return Convolution(which, **facts | kwargs)


def least(layer, dtype="float32") -> int:
    """What the hungriest pass of `layer` takes for one sample."""
    ones = [convolution_of(layer, which, batch=1, dtype=dtype) for which in Pass]
    return max(slice_by_xla(one).workspace for one in ones)


def passes(layer, conv):
    def f(x, w, ct):
        y, back = jax.vjp(functools.partial(layer.apply, conv=conv), x, w)
        return y, *back(ct)

    return jax.jit(f)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_as_lax_forward_and_backward(layer):
    """By as few samples at a time as the limit takes."""
    args = layer.arrays()
    conv = functools.partial(vmem_jax.conv_general_dilated, workspace_limit=max(1, least(layer)))
    for got, expected in zip(
        passes(layer, conv)(*args), passes(layer, lax.conv_general_dilated)(*args), strict=True
    ):
        assert got.shape == expected.shape and got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * float(abs(expected).max()))


@pytest.mark.parametrize("which", Pass)
def test_less_workspace_is_compiled_in(which):
    """The compiled temp is within what the configuration says, and that within the limit."""
    layer = LAYERS[1]
    convolution = convolution_of(layer, which, batch=64, size=(32, 32))
    whole = by_xla(convolution)
    one = slice_by_xla(convolution.with_batch(1))
    assert one.workspace < whole.workspace / 8, (one, whole)
    configuration = choose(convolution, whole.workspace // 4)
    assert 1 < len(configuration.micros) and configuration.batch == 64
    assert configuration.workspace <= whole.workspace // 4
    shapes = [layouts(convolution)[role] for role in roles(which)]
    call = functools.partial(micro_convolution, convolution, configuration)
    lowered = jax.jit(call).lower(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes[:2]))
    compiled = lowered.compile(compiler_options=compat.FENCE_OPTIONS["cpu"])
    assert compiled.memory_analysis().temp_size_in_bytes <= configuration.workspace


def test_no_more_micro_batches_than_the_limit_takes():
    convolution = convolution_of(LAYERS[1], batch=64, size=(32, 32))
    whole, half = by_xla(convolution), slice_by_xla(convolution.with_batch(8))
    assert half.workspace < whole.workspace
    assert choose(convolution, whole.workspace).micros == (whole,)
    assert set(choose(convolution, half.workspace).micros) == {half}
    assert choose(convolution, None) == undivided(convolution)
    with pytest.raises(
        WorkspaceError, match=r"forward 3×3.* cannot be done within a workspace"
    ) as e:
        choose(convolution, 1)
    assert (
        e.value.limit == 1
        and e.value.least == slice_by_xla(convolution.with_batch(1)).workspace > 1
    )


def test_second_derivatives_and_vmap():
    x, w, ct = LAYER.arrays()

    def f(conv):
        def energy(x, w):
            return jnp.vdot(jnp.tanh(LAYER.apply(x, w, conv=conv)), ct)

        def step(x, w):
            along = jax.jvp(jax.grad(energy, argnums=(0, 1)), (x, w), (jnp.sin(x), jnp.cos(w)))
            kernels = jnp.stack([w, 2 * w, -w])
            both = jax.vmap(
                lambda x, w: LAYER.apply(x, w, conv=conv), in_axes=(None, 3), out_axes=1
            )
            return *along, both(x, kernels.transpose(1, 2, 3, 0, 4))

        return jax.jit(step)(x, w)

    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(abs(b).max()))
    jax.tree.map(close, f(limited), f(lax.conv_general_dilated))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_sums_kernels_in_float32(dtype):
    """Micro-batches round no more than the whole batch does."""
    layer = LAYERS[1]
    exact = passes(layer, lax.conv_general_dilated)(*layer.arrays(jnp.float32))
    args = [jnp.asarray(a, dtype) for a in layer.arrays(jnp.float32)]
    limit = least(layer, dtype.__name__)
    conv = functools.partial(vmem_jax.conv_general_dilated, workspace_limit=limit)
    error = lambda conv: [
        float(abs(np.float32(a) - b).max() / abs(b).max())
        for a, b in zip(passes(layer, conv)(*args), exact, strict=True)
    ]
    for mine, theirs in zip(error(conv), error(lax.conv_general_dilated), strict=True):
        assert mine <= 1.5 * theirs + float(jnp.finfo(dtype).eps)


def test_flax_takes_it():
    x = jnp.ones((4, 8, 8, 3))
    plain = nnx.Conv(3, 5, (3, 3), rngs=nnx.Rngs(0))
    mine = nnx.Conv(3, 5, (3, 3), rngs=nnx.Rngs(0), conv_general_dilated=limited)
    np.testing.assert_allclose(mine(x), plain(x), rtol=1e-6)
    make = lambda **kwargs: linen.Conv(5, (3, 3), strides=2, **kwargs)
    variables = make().init(jax.random.key(0), x)
    got = make(conv_general_dilated=limited).apply(variables, x)
    np.testing.assert_allclose(got, make().apply(variables, x), rtol=1e-6)


def test_a_budgeted_step_captures_it():
    """Inside `vmem_jax.jit` it is a kernel of its own, and the step's results are the same."""
    x, w, _ = LAYER.arrays()

    def step(w, x):
        loss = lambda w: jnp.square(LAYER.apply(x, w, conv=limited)).mean()
        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    got = vmem_jax.jit(step, budget="1GiB")(w, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, jax.jit(step)(w, x))


@pytest.mark.parametrize(
    "limit, error",
    [
        (0, "`workspace_limit` must be more than 0 bytes. Got 0"),
        (-5, "Got -5"),
        ("64", "has no unit"),
        ("much", "is no size"),
        (0.5, r"must be bytes as an int, or a size such as '64MiB'.* Got 0.5 \(float\)"),
    ],
)
def test_bad_limits(limit, error):
    x, w, _ = LAYER.arrays()
    with pytest.raises((ValueError, TypeError), match=error):
        LAYER.apply(x, w, conv=functools.partial(limited, workspace_limit=limit))


def test_what_has_no_micro_batches_is_said():
    x, w, _ = LAYER.arrays()
    with pytest.raises(ValueError, match=r"int32\[6, 7, 9, 4\] and int32.*one dtype of float32"):
        LAYER.apply(jnp.int32(x), jnp.int32(w), conv=limited)
