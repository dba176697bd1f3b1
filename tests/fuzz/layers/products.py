"""Matrix products, attention, convolutions, small linear algebra."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import vmem_jax

from .base import Draw, Dtypes, Layer, Maker, divisor, image_of

Shape = tuple[int, int, int]


def dense(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    c = shape[-1]
    out = draw.one([c, c, 2 * c, max(c // 2, 1)])
    act = draw.one([jnp.tanh, jax.nn.relu, jax.nn.gelu, jax.nn.silu, lambda x: x])

    def apply(p, x, key):
        return act(x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype))

    return Layer({"w": draw.kernel(c, out), "b": draw.normal(out, scale=0.1)}, apply)


def mlp(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    c = shape[-1]
    wide = draw.one([2, 4]) * c

    def apply(p, x, key):
        return x + jax.nn.gelu(x @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)

    return Layer({"up": draw.kernel(c, wide), "down": draw.kernel(wide, c)}, apply)


def gated(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    c = shape[-1]

    def apply(p, x, key):
        a, b = jnp.split(x @ p["w"].astype(x.dtype), 2, -1)
        return jax.nn.sigmoid(a) * b

    return Layer({"w": draw.kernel(c, 2 * c)}, apply)


def einsum(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    _b, t, c = shape
    if not t:
        return None

    def apply(p, x, key):
        y = jnp.einsum("btc,ts->bsc", x, p["mix"].astype(x.dtype))
        return jnp.einsum("bsc,cgd->bsgd", y, p["w"].astype(x.dtype)).sum(2)

    return Layer({"mix": draw.kernel(t, t), "w": draw.kernel(c, 2, c)}, apply)


def batched(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    _b, t, c = shape
    if not t:
        return None
    return Layer(
        {"w": draw.kernel(t, c, c)},
        lambda p, x, key: jnp.tanh(jnp.einsum("btc,tcd->btd", x, p["w"].astype(x.dtype))),
    )


def gram(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    c = shape[-1]
    return Layer({}, lambda p, x, key: jnp.tanh((x @ jnp.swapaxes(x, 1, 2)) / c) @ x)


def tied(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    def apply(p, x, key):
        w = p["w"].astype(x.dtype)
        return jnp.tanh(x @ w) @ w.T

    return Layer({"w": draw.kernel(shape[-1], shape[-1])}, apply)


def low_rank(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    c, frozen = shape[-1], draw.kernel(shape[-1], shape[-1])

    def apply(p, x, key):
        return x @ jnp.asarray(frozen, x.dtype) + x @ (p["a"] @ p["b"]).astype(x.dtype)

    return Layer({"a": draw.kernel(c, 2), "b": draw.kernel(2, c)}, apply)


def half(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    def apply(p, x, key):
        y = lax.dot_general(
            x.astype(dtypes.half),
            p["w"].astype(dtypes.half),
            (((2,), (0,)), ((), ())),
            preferred_element_type=dtypes.single,
        )
        return jnp.tanh(y).astype(x.dtype)

    return Layer({"w": draw.kernel(shape[-1], shape[-1])}, apply)


def quantised(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    """Weights rounded to eighths; the gradient passes as if they were not."""

    def apply(p, x, key):
        w = p["w"] + lax.stop_gradient(jnp.round(p["w"] * 8) / 8 - p["w"])
        return x @ w.astype(x.dtype)

    return Layer({"w": draw.kernel(shape[-1], shape[-1])}, apply)


def _attention(draw: Draw, shape: Shape, attend) -> Layer | None:
    b, t, c = shape
    if not (b and t):
        return None
    heads = divisor(draw, c)

    def apply(p, x, key):
        qkv = x @ p["qkv"].astype(x.dtype)
        q, k, v = (y.reshape(b, t, heads, c // heads) for y in jnp.split(qkv, 3, -1))
        return x + attend(q, k, v).reshape(b, t, c) @ p["out"].astype(x.dtype)

    return Layer({"qkv": draw.kernel(c, 3 * c), "out": draw.kernel(c, c)}, apply)


def attention(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    causal = draw.chance(0.5)

    def attend(q, k, v):
        wide = jnp.float16 == q.dtype  # of which XLA:CPU knows no such product
        cast = lambda x: x.astype(dtypes.single) if wide else x
        out = jax.nn.dot_product_attention(cast(q), cast(k), cast(v), is_causal=causal)
        return out.astype(q.dtype)

    return _attention(draw, shape, attend)


def masked_attention(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    def attend(q, k, v):
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)

    return _attention(draw, shape, attend)


def linear_attention(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    def attend(q, k, v):
        q, k = jax.nn.softmax(q), jax.nn.softmax(k, axis=1)
        return jnp.einsum("bthd,bhde->bthe", q, jnp.einsum("bthd,bthe->bhde", k, v))

    return _attention(draw, shape, attend)


def _convolution(
    draw: Draw, shape: Shape, spatial: tuple[int, ...], groups: int = 1, limited=False
) -> Layer | None:
    """One over (batch, *spatial, channels), with the spatial dimensions made one again."""
    if 0 in spatial or not shape[0]:
        return None
    c = shape[-1]
    if c % groups:
        return None
    window = tuple(draw.one([1, 2, 3]) for _ in spatial)
    strides = tuple(draw.one([1, 1, 2]) for _ in spatial)
    dilation = tuple(draw.one([1, 1, 2]) for _ in spatial)
    padding = draw.one(["SAME", "SAME", "VALID"])
    if padding == "VALID" and any(
        n < (w - 1) * d + 1 for n, w, d in zip(spatial, window, dilation, strict=True)
    ):
        padding = "SAME"
    letters = "DHW"[-len(spatial) :]
    numbers = ("N" + letters + "C", letters + "IO", "N" + letters + "C")
    more = {"workspace_limit": "1GiB"} if limited else {}
    convolve = vmem_jax.conv_general_dilated if limited else lax.conv_general_dilated
    act = draw.one([jnp.tanh, jax.nn.relu, lambda x: x])

    def apply(p, x, key):
        x = x.reshape(x.shape[0], *spatial, c)
        y = convolve(
            x,
            p["w"].astype(x.dtype),
            strides,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=numbers,
            feature_group_count=groups,
            **more,
        )
        y = act(y + p["b"].astype(x.dtype))
        return y.reshape(y.shape[0], -1, y.shape[-1])

    return Layer({"w": draw.kernel(*window, c // groups, c), "b": draw.normal(c, scale=0.1)}, apply)


def conv1d(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    return _convolution(draw, shape, (shape[1],))


def conv2d(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    return _convolution(draw, shape, image_of(shape[1]))


def conv3d(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    h, w = image_of(shape[1])
    return _convolution(draw, shape, (*image_of(h), w))


def grouped(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    return _convolution(draw, shape, image_of(shape[1]), groups=draw.one([2, 4]))


def depthwise(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    return _convolution(draw, shape, draw.one([(shape[1],), image_of(shape[1])]), groups=shape[2])


def limited_conv(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    return _convolution(draw, shape, image_of(shape[1]), limited=True)


def transposed(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    b, t, c = shape
    h, w = image_of(t)
    if not b or not t or t > 64:
        return None
    stride, padding = draw.one([1, 2]), draw.one(["SAME", "VALID"])

    def apply(p, x, key):
        y = lax.conv_transpose(
            x.reshape(b, h, w, c),
            p["w"].astype(x.dtype),
            (stride, stride),
            padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y.reshape(b, -1, c)

    return Layer({"w": draw.kernel(2, 2, c, c)}, apply)


def channels_first(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    b, t, c = shape
    h, w = image_of(t)
    if not b or not t:
        return None

    def apply(p, x, key):
        x = x.reshape(b, h, w, c).transpose(0, 3, 1, 2)
        y = lax.conv(x, p["w"].astype(x.dtype).transpose(3, 2, 0, 1), (1, 1), "SAME")
        return y.transpose(0, 2, 3, 1).reshape(b, t, c)

    return Layer({"w": draw.kernel(3, 3, c, c)}, apply)


def cholesky(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    """Whitens the channels by the triangular factor of their covariance."""
    if shape[2] > 16 or not shape[1]:
        return None

    def apply(p, x, key):
        y = x.astype(dtypes.single)
        cov = jnp.einsum("btc,btd->bcd", y, y) / y.shape[1] + 2 * jnp.eye(y.shape[2], dtype=y.dtype)
        factor = jnp.linalg.cholesky(cov)
        solved = lax.linalg.triangular_solve(
            factor, jnp.swapaxes(y, 1, 2), left_side=True, lower=True
        )
        return jnp.swapaxes(solved, 1, 2).astype(x.dtype)

    return Layer({}, apply)


def solve(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    c = shape[2]
    if c > 16:
        return None

    def apply(p, x, key):
        a = 3 * np.eye(c, dtype=np.float32) + jnp.tanh(p["a"].astype(dtypes.single))
        return jnp.linalg.solve(a, x.astype(dtypes.single)[..., None])[..., 0].astype(x.dtype)

    return Layer({"a": draw.kernel(c, c)}, apply)


PRODUCTS: dict[str, Maker] = {
    f.__name__: f
    for f in (
        dense,
        mlp,
        gated,
        einsum,
        batched,
        gram,
        tied,
        low_rank,
        half,
        quantised,
        attention,
        masked_attention,
        linear_attention,
        conv1d,
        conv2d,
        conv3d,
        grouped,
        depthwise,
        limited_conv,
        transposed,
        channels_first,
        cholesky,
        solve,
    )
}
