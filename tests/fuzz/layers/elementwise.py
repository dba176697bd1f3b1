"""Activations, normalisations, dropout, selects, complex numbers, custom derivatives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .base import Draw, Dtypes, Layer, Maker, divisor, stateless

Shape = tuple[int, int, int]


def activation(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    return stateless(
        draw.one(
            [
                jnp.tanh,
                jax.nn.relu,
                jax.nn.gelu,
                jax.nn.silu,
                jax.nn.softplus,
                jax.nn.elu,
                jnp.sin,
                jax.nn.leaky_relu,
                jax.nn.sigmoid,
                jax.nn.relu6,
                jax.nn.hard_swish,
                jnp.arctan,
            ]
        )
    )


def norm(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    b, t, c = shape
    if not (b and t):
        return None
    axes = draw.one([(2,), (0, 1), (1,), (1, 2)])

    def apply(p, x, key):
        y = x.astype(dtypes.single)
        y = (y - y.mean(axes, keepdims=True)) * lax.rsqrt(y.var(axes, keepdims=True) + 1e-2)
        return (y * p["scale"].astype(y.dtype) + p["shift"].astype(y.dtype)).astype(x.dtype)

    return Layer(
        {"scale": 1 + draw.normal(c, scale=0.1), "shift": draw.normal(c, scale=0.1)}, apply
    )


def group_norm(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    b, t, c = shape
    if not (b and t):
        return None
    groups = divisor(draw, c)

    def apply(p, x, key):
        y = x.reshape(b, t, groups, c // groups)
        y = (y - y.mean((1, 3), keepdims=True)) * lax.rsqrt(y.var((1, 3), keepdims=True) + 1e-2)
        return y.reshape(b, t, c) * p["scale"].astype(x.dtype)

    return Layer({"scale": 1 + draw.normal(c, scale=0.1)}, apply)


def rms_norm(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    def apply(p, x, key):
        return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-2) * p["scale"].astype(x.dtype)

    return Layer({"scale": 1 + draw.normal(shape[-1], scale=0.1)}, apply)


def softmax(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    axis = draw.one([-1, 1])
    if not shape[axis]:
        return None
    log = draw.chance(0.5)
    return stateless(
        lambda x: (
            jax.nn.log_softmax(x, axis) / 4 if log else jax.nn.softmax(x, axis) * x.shape[axis] / 4
        )
    )


def logsumexp(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    return stateless(lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True) / 4)


def dropout(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    keep, salt = draw.one([0.5, 0.9]), draw.one(range(100))

    def apply(p, x, key):
        # the dtype is named, or double precision would draw other bits
        kept = jax.random.uniform(jax.random.fold_in(key, salt), x.shape, jnp.float32) < keep
        return jnp.where(kept, x / keep, 0)

    return Layer({}, apply)


def noise(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    def apply(p, x, key):
        bits = jax.random.normal(jax.random.fold_in(key, 7), x.shape, jnp.float32)
        return x + p["scale"].astype(x.dtype) * bits.astype(x.dtype)

    return Layer({"scale": draw.normal(scale=0.1)}, apply)


def scalar(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    return Layer(
        {"a": draw.normal(scale=1.0), "b": draw.normal(1, scale=1.0)},
        lambda p, x, key: x * p["a"].astype(x.dtype) + p["b"].astype(x.dtype)[0],
    )


def where_safe(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    """The usual double `where`: the branch not taken is NaN or infinite without the inner one."""
    return stateless(lambda x: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), x * 0.5))


def where_infinite(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    """Infinities and NaN made and selected away, with a derivative of exact zeros."""

    def apply(x):
        y = lax.stop_gradient(jnp.where(x > 1, jnp.inf, jnp.where(x < -1, jnp.nan, x)))
        return jnp.where(jnp.isfinite(y), x, 0.1 * x)

    return stateless(apply)


def where_nan(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    """The single `where`, whose derivative is NaN where its input is negative."""
    return stateless(lambda x: jnp.where(x > -3, jnp.sqrt(x + 3), 0) - 1.7)


def clip(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    return stateless(
        draw.one(
            [
                lambda x: jnp.clip(x, -1, 1),
                lambda x: jnp.maximum(x, -0.5 * x),
                lambda x: jnp.abs(x) - 0.5,
                lambda x: jnp.maximum(x, 0) - jnp.minimum(x, 0.25),
            ]
        )
    )


def integers(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    """Masks by integer arithmetic: comparisons, shifts, bytes."""

    def apply(x):
        y = (lax.stop_gradient(x.astype(dtypes.single)) * 16).astype(jnp.int32)
        mask = ((y >> 1) ^ y).astype(jnp.uint8) & 3
        return x * (mask != 1) + mask.astype(x.dtype) / 8

    return stateless(apply)


def complex_turn(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    def apply(p, x, key):
        z = lax.complex(
            x.astype(dtypes.single),
            p["phase"].astype(dtypes.single) + jnp.zeros_like(x, dtypes.single),
        )
        z = jnp.exp(1j * z.real).astype(dtypes.complex) * (1 + z)
        return (jnp.real(z) + jnp.abs(z)).astype(x.dtype) / 2

    return Layer({"phase": draw.normal(shape[-1])}, apply)


def fft(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    if not (shape[0] and shape[1]):
        return None

    def apply(p, x, key):
        z = jnp.fft.fft(x.astype(dtypes.single), axis=1)
        z = z * lax.complex(p["re"], p["im"]).astype(z.dtype)[None, :, None]
        return jnp.real(jnp.fft.ifft(z, axis=1)).astype(x.dtype)

    def real(p, x, key):
        n = x.shape[1]
        z = jnp.fft.rfft(x.astype(dtypes.single), axis=1)
        z = z * lax.complex(p["re"], p["im"]).astype(z.dtype)[None, : z.shape[1], None]
        return jnp.fft.irfft(z, n, axis=1).astype(x.dtype)

    # lax.complex takes two of single or double precision
    def cast(apply):
        return lambda p, x, key: apply({n: a.astype(dtypes.single) for n, a in p.items()}, x, key)

    t = shape[1]
    return Layer({"re": draw.normal(t), "im": draw.normal(t)}, cast(draw.one([apply, real])))


def rotary(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    t, c = shape[1:]
    if c % 2 or not t:
        return None

    def apply(x):
        angle = jnp.arange(t)[:, None] / (10.0 ** (jnp.arange(c // 2) / c))
        a, b = jnp.split(x, 2, -1)
        sin, cos = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    return stateless(apply)


@jax.custom_jvp
def _softer(x):
    return jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0)


@_softer.defjvp
def _softer_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return _softer(x), jax.nn.sigmoid(x) * t


def custom_jvp(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    return stateless(_softer)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _limited(x, limit):
    return x * 1.0


_limited.defvjp(
    lambda x, limit: (x * 1.0, jnp.mean(jnp.abs(x))),
    lambda limit, mean, g: (jnp.clip(g, -limit, limit) / (1 + mean),),
)


@jax.custom_vjp
def _bilinear(x, w):
    return jnp.tanh(x @ w)


_bilinear.defvjp(
    lambda x, w: (y := jnp.tanh(x @ w), (x, w, y)),
    lambda res, g: (
        (d := g * (1 - res[2] ** 2)) @ res[1].T,
        jnp.einsum("btc,btd->cd", res[0], d),
    ),
)


def custom_vjp(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    if draw.chance(0.5):
        return stateless(lambda x: _limited(x, 0.5))
    c = shape[-1]
    return Layer({"w": draw.kernel(c, c)}, lambda p, x, key: _bilinear(x, p["w"].astype(x.dtype)))


def stop(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    return stateless(lambda x: x - 0.5 * lax.stop_gradient(jnp.tanh(x)))


def empty(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    """Arrays without elements, in the parameters and on the way."""

    def apply(p, x, key):
        x = jnp.concatenate(
            [x[:, :0], x, p["none"].astype(x.dtype)[None, :, : x.shape[2]].repeat(x.shape[0], 0)], 1
        )
        return x + jnp.sum(p["none"]).astype(x.dtype)

    return Layer({"none": draw.normal(0, shape[-1])}, apply)


def constant(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    table = draw.normal(*shape, scale=0.5)
    return stateless(lambda x: x * jnp.asarray(table, x.dtype) + x)


def halves(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    """A cast down and up again."""
    return stateless(lambda x: (x.astype(dtypes.half) * 1.5).astype(x.dtype))


def power(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    return stateless(
        draw.one(
            [
                lambda x: x**2 / (1 + x * x),
                lambda x: jnp.exp(-x * x),
                lambda x: jnp.log1p(jnp.abs(x)),
                lambda x: lax.rsqrt(1 + x * x) * x,
                lambda x: jnp.expm1(jnp.minimum(x, 1)),
                lax.erf,
            ]
        )
    )


ELEMENTWISE: dict[str, Maker] = {
    f.__name__: f
    for f in (
        activation,
        norm,
        group_norm,
        rms_norm,
        softmax,
        logsumexp,
        dropout,
        noise,
        scalar,
        where_safe,
        where_infinite,
        where_nan,
        clip,
        integers,
        complex_turn,
        fft,
        rotary,
        custom_jvp,
        custom_vjp,
        stop,
        empty,
        constant,
        halves,
        power,
    )
}
