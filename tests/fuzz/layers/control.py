"""Loops, branches, checkpoints, and calls inside the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .base import Draw, Dtypes, Layer, Maker

Shape = tuple[int, int, int]


def _maybe_checkpoint(draw: Draw, f):
    kind = draw.one(["", "", "all", "dots", "names"])
    if kind == "all":
        return jax.checkpoint(f)
    if kind == "dots":
        return jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)
    if kind == "names":
        return jax.checkpoint(f, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
    return f


def checkpointed(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    c = shape[-1]

    @jax.checkpoint
    def block(x, a, b):
        return jnp.tanh(jnp.tanh(x @ a) @ b)

    def apply(p, x, key):
        return block(x, p["a"].astype(x.dtype), p["b"].astype(x.dtype))

    return Layer({"a": draw.kernel(c, c), "b": draw.kernel(c, c)}, apply)


def fori(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    count = draw.one([1, 2, 3, 5])
    return Layer({}, lambda p, x, key: lax.fori_loop(0, count, lambda t, x: jnp.tanh(x) * 1.1, x))


def fori_product(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    c = shape[-1]

    def apply(p, x, key):
        w = p["w"].astype(x.dtype)
        return lax.fori_loop(0, 3, lambda t, x: jnp.tanh(x @ w) + x * 0.5, x)

    return Layer({"w": draw.kernel(c, c)}, apply)


def recurrent(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    """A network over time, forwards or in reverse, with or without checkpoints."""
    _b, t, c = shape
    if not t:
        return None
    reverse, unroll, gates = draw.chance(0.4), draw.one([1, 1, 2]), draw.chance(0.4)

    def apply(p, x, key):
        i, j = p["i"].astype(x.dtype), p["j"].astype(x.dtype)

        def cell(h, t):
            new = jnp.tanh(t @ i[:, :c] + h @ j[:, :c])
            if gates:
                keep = jax.nn.sigmoid(t @ i[:, c:] + h @ j[:, c:])
                new = keep * h + (1 - keep) * new
            return new, new

        h = jnp.zeros_like(x[:, 0])
        ys = lax.scan(step(cell), h, jnp.moveaxis(x, 1, 0), reverse=reverse, unroll=unroll)[1]
        return jnp.moveaxis(ys, 0, 1)

    kind = draw.one(range(1000))
    step = lambda cell: _maybe_checkpoint(Draw(kind), cell)
    return Layer({"i": draw.kernel(c, 2 * c), "j": draw.kernel(c, 2 * c)}, apply)


def stacked(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    """Layers in a scan over stacked parameters."""
    c, depth, seed = shape[-1], draw.one([1, 2, 3, 4, 6]), draw.one(range(1000))
    unroll = draw.one([1, 1, 1, 2])

    def apply(p, x, key):
        def block(x, w):
            up, down = (a.astype(x.dtype) for a in w)
            y = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-2)
            return x + jax.nn.gelu(y @ up) @ down, None

        body = _maybe_checkpoint(Draw(seed), block)
        return lax.scan(body, x, (p["up"], p["down"]), unroll=unroll)[0]

    up, down = (
        draw.normal(depth, c, 2 * c, scale=c**-0.5),
        draw.normal(depth, 2 * c, c, scale=(2 * c) ** -0.5),
    )
    return Layer({"up": up, "down": down}, apply)


def stacked_convs(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    b, t, c = shape
    if not (b and t):
        return None
    seed, reverse = draw.one(range(1000)), draw.chance(0.3)

    def apply(p, x, key):
        def block(carry, inputs):
            x, total = carry
            w, i = inputs
            y = lax.conv_general_dilated(
                x, w.astype(x.dtype), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )
            kept = jax.random.uniform(jax.random.fold_in(key, i), y.shape, jnp.float32) < 0.9
            x = jax.nn.relu(x + jnp.where(kept, y, 0) * 0.5)
            return (x, total + x.mean()), x[:, 0]

        body = _maybe_checkpoint(Draw(seed), block)
        begin = x, jnp.zeros((), x.dtype)
        count = p["w"].shape[0]
        (x, total), tops = lax.scan(body, begin, (p["w"], jnp.arange(count)), reverse=reverse)
        return x + total + tops.mean(0)[:, None]

    return Layer({"w": draw.normal(3, 3, c, c, scale=(3 * c) ** -0.5)}, apply)


def nested(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    c, seed = shape[-1], draw.one(range(1000))

    def apply(p, x, key):
        def outer(x, ws):
            def inner(x, w):
                return jnp.tanh(x @ w.astype(x.dtype)) + 0.5 * x, None

            return lax.scan(_maybe_checkpoint(Draw(seed), inner), x, ws)[0], x.sum()

        x, sums = lax.scan(_maybe_checkpoint(Draw(seed, 1), outer), x, p["w"])
        return x + 0.001 * sums.astype(x.dtype).mean()

    return Layer({"w": draw.normal(2, 2, c, c, scale=c**-0.5)}, apply)


def while_loop(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer | None:
    """A loop of unknown length, which has no derivative of its own."""
    if not (shape[0] and shape[1]):
        return None

    def apply(p, x, key):
        small = lambda state: (state[0] < 8) & (jnp.abs(state[1]).max() > 0.25)
        halve = lambda state: (state[0] + 1, state[1] * 0.5)
        count, y = lax.while_loop(small, halve, (0, lax.stop_gradient(x)))
        return x + y + p["w"].astype(x.dtype) * count.astype(x.dtype)

    return Layer({"w": draw.normal(scale=0.01)}, apply)


def cond(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    c = shape[-1]
    switch = draw.chance(0.4)

    def apply(p, x, key):
        w = p["w"].astype(x.dtype)
        branches = [lambda x: jnp.tanh(x @ w), lambda x: x * 0.5, lambda x: jax.nn.relu(x) @ w]
        if switch:
            which = (jnp.abs(x).sum() * 10).astype(jnp.int32) % 3
            return lax.switch(which, branches, x)
        return lax.cond(x.sum() > 0, *branches[:2], x)

    return Layer({"w": draw.kernel(c, c)}, apply)


def mapped(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    """`vmap` inside, of a product, a loop, or over parameters."""
    b, t, c = shape
    kind = draw.one(["product", "scan", "experts", "map"] if b and t else ["product"])
    w = draw.kernel(c, c)

    def apply(p, x, key):
        w = p["w"].astype(x.dtype)
        if kind == "product":
            return jax.vmap(lambda row: jax.nn.relu(row @ w))(x)
        if kind == "scan":
            cell = lambda h, t: ((h * 0.5 + t @ w),) * 2
            return jax.vmap(lambda row: lax.scan(cell, jnp.zeros_like(row[0]), row)[1])(x)
        if kind == "map":
            return lax.map(lambda row: jnp.tanh(row @ w), x)
        return jax.vmap(lambda w: jnp.tanh(x @ w))(jnp.stack([w, 2 * w])).mean(0)

    return Layer({"w": w}, apply)


def jitted(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    c, inline = shape[-1], draw.chance(0.3)

    @jax.jit
    def twice(x, w):
        return jax.jit(lambda x: jnp.tanh(x @ w), inline=inline)(x) * 2

    def apply(p, x, key):
        with jax.named_scope("jitted"):
            return twice(x, p["w"].astype(x.dtype))

    return Layer({"w": draw.kernel(c, c)}, apply)


def gradient(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    """A derivative in the forward pass: one step down a potential."""
    c = shape[-1]

    def apply(p, x, key):
        w = p["w"].astype(x.dtype)
        return x - 0.1 * jax.grad(lambda x: jnp.sum(jnp.cos(x @ w)))(x)

    return Layer({"w": draw.kernel(c, c)}, apply)


def tangent(draw: Draw, shape: Shape, dtypes: Dtypes) -> Layer:
    c = shape[-1]

    def apply(p, x, key):
        w = p["w"].astype(x.dtype)
        y, dy = jax.jvp(lambda x: jnp.tanh(x @ w), (x,), (jnp.ones_like(x),))
        return y + dy * 0.1

    return Layer({"w": draw.kernel(c, c)}, apply)


CONTROL: dict[str, Maker] = {
    f.__name__: f
    for f in (
        checkpointed,
        fori,
        fori_product,
        recurrent,
        stacked,
        stacked_convs,
        nested,
        while_loop,
        cond,
        mapped,
        jitted,
        gradient,
        tangent,
    )
}
