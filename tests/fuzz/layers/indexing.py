"""Pools, gather and scatter, sorts, scans of one operation, shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .base import Draw, Dtypes, Layer, Maker, image_of, stateless

Shape = tuple[int, int, int]


def pool(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    b, t, c = shape
    h, w = image_of(t)
    window, stride = draw.one([2, 3]), draw.one([1, 2, 3])
    padding = draw.one(["SAME", "VALID"])
    if not b or not t or (padding == "VALID" and min(h, w) < window):
        return None
    biggest = draw.chance(0.6)

    def apply(x):
        dims, strides = (1, window, window, 1), (1, stride, stride, 1)
        x = x.reshape(b, h, w, c)
        if biggest:
            y = lax.reduce_window(x, -jnp.inf, lax.max, dims, strides, padding)
        else:
            y = lax.reduce_window(x, 0.0, lax.add, dims, strides, padding) / window**2
        return y.reshape(b, -1, c)

    return stateless(apply)


def pool1d(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    if not (shape[0] and shape[1]):
        return None
    stride = draw.one([1, 2])
    return stateless(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1), (1, stride, 1), "SAME")
    )


def global_pool(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    if not shape[1]:
        return None
    return stateless(
        draw.one(
            [
                lambda x: x - x.mean(1, keepdims=True),
                lambda x: x - 0.5 * x.max(1, keepdims=True),
                lambda x: x * jax.nn.sigmoid(x.mean(1, keepdims=True)),
            ]
        )
    )


def embedding(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    _b, t, c = shape
    ids = draw.integers(11, (t,))
    by_value = draw.chance(0.5)

    def apply(p, x, key):
        table = p["table"].astype(x.dtype)
        if by_value:
            seen = jnp.clip((lax.stop_gradient(x[..., 0]) * 3).astype(jnp.int32) + 5, 0, 10)
            return x + table[seen]
        return x + table[jnp.asarray(ids)]

    return Layer({"table": draw.normal(11, c, scale=0.5)}, apply)


def gather(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    _b, t, c = shape
    if not t:
        return None
    ids, along = draw.integers(t, (draw.one([t, max(t // 2, 1)]),)), draw.chance(0.5)
    return stateless(
        lambda x: (
            jnp.take(x, jnp.asarray(ids), axis=1)
            if along
            else jnp.take_along_axis(
                x, jnp.broadcast_to(ids[None, :, None], (x.shape[0], len(ids), c)), 1
            )
        )
    )


def scatter(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    _b, t, _c = shape
    if not t:
        return None
    ids, perm, kind = (
        draw.integers(t, (t,)),
        draw.permutation(t),
        draw.one(["add", "set", "max", "mul"]),
    )

    def apply(x):
        zeros = jnp.zeros_like(x)
        if kind == "add":
            return zeros.at[:, jnp.asarray(ids)].add(x) / 2
        if kind == "set":
            return x.at[:, jnp.asarray(perm[: t // 2])].set(jnp.tanh(x[:, : t // 2]))
        if kind == "max":
            return x.at[:, jnp.asarray(perm)].max(x * 0.5)
        return x.at[:, jnp.asarray(perm[: t // 2])].multiply(0.5)

    return stateless(apply)


def segments(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    b, t, _c = shape
    if not (b and t):
        return None
    ids = draw.integers(4, (t,))

    def apply(x):
        sums = jax.ops.segment_sum(jnp.swapaxes(x, 0, 1), jnp.asarray(ids), 4)
        return x + jnp.swapaxes(sums[jnp.asarray(ids)], 0, 1) / t

    return stateless(apply)


def one_hot(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    c = shape[-1]

    def apply(p, x, key):
        return x + jax.nn.one_hot(jnp.argmax(x, -1), c, dtype=x.dtype) @ p["w"].astype(x.dtype)

    return Layer({"w": draw.kernel(c, c)}, apply)


def top_k(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    k = max(shape[-1] // 2, 1)

    def apply(x):
        values, ids = lax.top_k(x, k)
        return values + ids.astype(x.dtype) / 16

    return stateless(apply)


def sort(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    axis, by_key = draw.one([-1, 1]), draw.chance(0.4)

    def apply(x):
        if by_key:
            return jnp.take_along_axis(
                x, jnp.argsort(lax.stop_gradient(jnp.sin(3 * x)), axis), axis
            )
        return jnp.sort(x, axis)

    return stateless(apply)


def cumulate(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    axis = draw.one([1, 2])
    scale = max(shape[axis], 1) ** 0.5
    return stateless(
        draw.one(
            [
                lambda x: jnp.cumsum(x, axis) / scale,
                lambda x: lax.cumsum(x, axis, reverse=True) / scale,
                lambda x: lax.cummax(x, axis),
                lambda x: lax.cumlogsumexp(x, axis) / 2,
                lambda x: lax.associative_scan(lambda a, b: a * 0.5 + b, x, axis=axis),
                lambda x: jnp.cumprod(1 + jnp.tanh(x) / 16, axis),
            ]
        )
    )


def dynamic(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    _b, t, _c = shape
    if t < 2:
        return None

    def apply(x):
        at = jnp.argmax(jnp.abs(x).sum((0, 2))) // 2
        part = lax.dynamic_slice_in_dim(x, at, t // 2, 1)
        return lax.dynamic_update_slice_in_dim(x, jnp.tanh(part), t - t // 2 - at // 2, 1)

    return stateless(apply)


def reshaped(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    b, t, c = shape
    if not (b and t):
        return None
    kinds = [
        lambda x: x[:, ::-1],
        lambda x: x[..., ::-1] + x,
        lambda x: jnp.roll(x, 1, 1),
        lambda x: jnp.pad(x, ((0, 0), (1, 1), (0, 0))),
        lambda x: lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (-1, 1, 0), (0, 0, 0))),
        lambda x: jnp.triu(jnp.tanh(x)) + x,
        lambda x: x.reshape(b, c, t).swapaxes(1, 2),
    ]
    if t > 2:
        kinds += [lambda x: x[:, ::2], lambda x: jnp.concatenate([x[:, 1:], x[:, :1] * 2], 1)]
    if t <= 64:
        kinds += [lambda x: jnp.concatenate([x, jnp.tanh(x)], 1), lambda x: jnp.repeat(x, 2, 1)]
    if c > 4:
        kinds += [
            lambda x: x[..., : c // 2] * x[..., c - c // 2 :],
            lambda x: jnp.stack(jnp.split(x, c // 2, -1), -1).sum(2),
        ]
    return stateless(draw.one(kinds))


def patches(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    """The matrix of a convolution, product and all."""
    b, t, c = shape
    if not b or t < 4:
        return None

    def apply(p, x, key):
        y = lax.conv_general_dilated_patches(
            x, (3,), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return y @ p["w"].astype(x.dtype)

    return Layer({"w": draw.kernel(3 * c, c)}, apply)


def resized(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    b, t, c = shape
    h, w = image_of(t)
    if not b or not t or t > 64:
        return None
    to, method = (b, h + draw.one([1, h]), w, c), draw.one(["nearest", "linear"])

    def apply(x):
        return jax.image.resize(x.reshape(b, h, w, c), to, method).reshape(b, -1, c)

    return stateless(apply)


def reduced(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    if not shape[2] or not shape[1]:
        return None
    return stateless(
        draw.one(
            [
                lambda x: x * x.max(-1, keepdims=True),
                lambda x: x + x.min(1, keepdims=True),
                lambda x: x + (1 + jnp.tanh(x[..., :3]) / 4).prod(-1, keepdims=True),
                lambda x: x * (x > jnp.median(x, -1, keepdims=True)),
                lambda x: x + jnp.any(x > 2, 1, keepdims=True),
                lambda x: x - x.std(-1, keepdims=True) * 0.5,
            ]
        )
    )


INDEXING: dict[str, Maker] = {
    f.__name__: f
    for f in (
        pool,
        pool1d,
        global_pool,
        embedding,
        gather,
        scatter,
        segments,
        one_hot,
        top_k,
        sort,
        cumulate,
        dynamic,
        reshaped,
        patches,
        resized,
        reduced,
    )
}
