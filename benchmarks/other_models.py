"""Networks that nothing was fitted to: they tell how far predictions hold.

Weights are float32, the computation is in bfloat16. Each function takes the batch and what is applied
to a layer, and gives a loss (parameters, batch, key) -> number, key -> parameters, and key -> batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

Wrap = Callable[[Callable], Callable]
Given = tuple[Callable[[Any, Any, jax.Array], jax.Array], Callable, Callable]

_HALF = jnp.bfloat16


def dit(batch: int, wrap: Wrap, layers: int = 12, width: int = 768) -> Given:
    """DiT-B/2 (Peebles and Xie, "Scalable diffusion models with transformers", 2023), which learns
    the velocity from latents of 32 x 32 x 4 to noise."""
    side, patch, features = 16, 2, 256

    def init(key: jax.Array) -> Any:
        draw = _drawing(key)
        ends = {"patch": draw(patch**2 * 4, width), "out": draw(width, patch**2 * 4)}
        ends |= {"time": draw(features, width), "hidden": draw(width, width)}
        ends |= {"labels": draw(1000, width), "places": jnp.zeros((side**2, width))}
        return ends | {
            "last": draw(width, 2 * width),
            "layers": [
                {"shifts": draw(width, 6 * width), **_attention(draw, width), **_mlp(draw, width)}
                for _ in range(layers)
            ],
        }

    def layer(x: jax.Array, w: Any, condition: jax.Array) -> jax.Array:
        shifts = jnp.split(condition @ w["shifts"].astype(_HALF), 6, -1)
        a, b, gate, c, d, last = (shift[:, None] for shift in shifts)
        with jax.named_scope("attention"):
            x = x + gate * _attended(_centred(x) * (1 + b) + a, w)
        with jax.named_scope("feed_forward"):
            y = (_centred(x) * (1 + d) + c) @ w["up"].astype(_HALF)
            return x + last * (jax.nn.gelu(y) @ w["down"].astype(_HALF))

    def loss(params: Any, data: Any, key: jax.Array) -> jax.Array:
        latents, labels = data
        keys = jax.random.split(key)
        t = jax.random.uniform(keys[0], (batch, 1))
        noise = jax.random.normal(keys[1], latents.shape)
        apart = lambda x: x.reshape(batch, side, patch, side, patch, 4).transpose(0, 1, 3, 2, 4, 5)
        patches = lambda x: apart(x).reshape(batch, side**2, -1)
        mixed = (1 - t)[..., None] * patches(latents) + t[..., None] * patches(noise)
        angle = 1000 * t * jnp.exp(-9 * jnp.arange(features // 2) / (features // 2))
        time = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1).astype(_HALF)
        time = jax.nn.silu(time @ params["time"].astype(_HALF)) @ params["hidden"].astype(_HALF)
        condition = jax.nn.silu(time + params["labels"].astype(_HALF)[labels])
        x = mixed.astype(_HALF) @ params["patch"].astype(_HALF) + params["places"].astype(_HALF)
        for w in params["layers"]:
            x = wrap(layer)(x, w, condition)
        a, b = jnp.split((condition @ params["last"].astype(_HALF))[:, None], 2, -1)
        found = (_centred(x) * (1 + b) + a) @ params["out"].astype(_HALF)
        return jnp.mean((found.astype(jnp.float32) - patches(noise - latents)) ** 2)

    def draw(key: jax.Array) -> Any:
        latents = jax.random.normal(key, (batch, 2 * side, 2 * side, 4))
        return latents, jax.random.randint(key, (batch,), 0, 1000)

    return loss, init, draw


def t5(batch: int, wrap: Wrap, layers: int = 8, width: int = 768) -> Given:
    """An encoder and a decoder as those of T5 v1.1 (Raffel et al., "Exploring the limits of transfer
    learning", 2020), with dropout and without biases but those of relative positions; 512 tokens."""
    tokens, vocabulary, heads, rate = 512, 32_128, width // 64, 0.1
    distance = np.clip(np.arange(tokens)[None] - np.arange(tokens)[:, None], -16, 15) + 16

    def init(key: jax.Array) -> Any:
        draw = _drawing(key)
        part = lambda: {**_attention(draw, width), "scale": jnp.ones(width)}
        gated = lambda: {"gate": draw(width, 2048), **_mlp(draw, width, 2048)}
        forward = lambda: {**gated(), "scale": jnp.ones(width)}
        encoder = [{"own": part(), "forward": forward()} for _ in range(layers)]
        decoder = [{"own": part(), "other": part(), "forward": forward()} for _ in range(layers)]
        bias = lambda: 0.1 * draw(32, heads)
        ends = {"tokens": draw(vocabulary, width), "near": bias(), "near_decoder": bias()}
        ends |= {"scale": jnp.ones(width), "scale_decoder": jnp.ones(width)}
        return {"encoder": encoder, "decoder": decoder, **ends}

    def attention(x: jax.Array, w: Any, key: jax.Array, bias: Any, other: Any = None) -> jax.Array:
        y = _scaled(x, w["scale"])
        keys = jax.random.split(key)
        weighed = lambda p: dropped(p, rate, keys[0])
        return x + dropped(_attended(y, w, other, bias, weighed), rate, keys[1])

    def forward(x: jax.Array, w: Any, key: jax.Array) -> jax.Array:
        y, keys = _scaled(x, w["scale"]), jax.random.split(key)
        y = jax.nn.gelu(y @ w["gate"].astype(_HALF)) * (y @ w["up"].astype(_HALF))
        return x + dropped(dropped(y, rate, keys[0]) @ w["down"].astype(_HALF), rate, keys[1])

    def encode(x: jax.Array, w: Any, key: jax.Array, bias: jax.Array) -> jax.Array:
        keys = jax.random.split(key)
        return forward(attention(x, w["own"], keys[0], bias), w["forward"], keys[1])

    def decode(x: jax.Array, w: Any, key: jax.Array, bias: jax.Array, other: Any) -> jax.Array:
        keys = jax.random.split(key, 3)
        x = attention(x, w["own"], keys[0], bias)
        x = attention(x, w["other"], keys[1], None, other)
        return forward(x, w["forward"], keys[2])

    def loss(params: Any, data: Any, key: jax.Array) -> jax.Array:
        source, target = data
        table, keys = params["tokens"].astype(_HALF), iter(jax.random.split(key, 2 * layers + 2))
        near = lambda name: params[name][distance].transpose(2, 0, 1)
        x = dropped(table[source], rate, next(keys))
        for w in params["encoder"]:
            x = wrap(encode)(x, w, next(keys), near("near"))
        x = _scaled(x, params["scale"])
        seen = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), near("near_decoder"), -1e9)
        y = dropped(table[target[:, :-1]], rate, next(keys))
        for w in params["decoder"]:
            y = wrap(decode)(y, w, next(keys), seen, x)
        logits = (_scaled(y, params["scale_decoder"]) * width**-0.5) @ table.T
        return _cross_entropy(logits, target[:, 1:])

    def draw(key: jax.Array) -> Any:
        drawn = lambda n: jax.random.randint(key, (batch, n), 0, vocabulary)
        return drawn(tokens), drawn(tokens + 1)

    return loss, init, draw


def bert(batch: int, wrap: Wrap, layers: int = 12, width: int = 768) -> Given:
    """BERT-base (Devlin et al., "BERT", 2019), which tells masked words; 512 tokens of two types."""
    tokens, vocabulary, masked, rate = 512, 30_522, 76, 0.1

    def init(key: jax.Array) -> Any:
        draw = _drawing(key)
        part = lambda: {**_attention(draw, width), **_mlp(draw, width)}
        tables = {"words": draw(vocabulary, width), "types": draw(2, width)}
        tables |= {"places": draw(tokens, width), "last": draw(width, width)}
        return {"layers": [part() for _ in range(layers)], **tables}

    def layer(x: jax.Array, w: Any, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 3)
        weighed = lambda p: dropped(p, rate, keys[0])
        x = _centred(x + dropped(_attended(x, w, weighed=weighed), rate, keys[1]))
        y = jax.nn.gelu(x @ w["up"].astype(_HALF)) @ w["down"].astype(_HALF)
        return _centred(x + dropped(y, rate, keys[2]))

    def loss(params: Any, data: Any, key: jax.Array) -> jax.Array:
        words, types, hidden, labels = data
        tables = {name: params[name].astype(_HALF) for name in ("words", "types", "places")}
        keys = iter(jax.random.split(key, layers + 1))
        x = tables["words"][words] + tables["types"][types] + tables["places"]
        x = dropped(_centred(x), rate, next(keys))
        for w in params["layers"]:
            x = wrap(layer)(x, w, next(keys))
        x = jnp.take_along_axis(x, hidden[..., None], 1)
        x = _centred(jax.nn.gelu(x @ params["last"].astype(_HALF)))
        return _cross_entropy(x @ tables["words"].T, labels)

    def draw(key: jax.Array) -> Any:
        keys = iter(jax.random.split(key, 4))
        drawn = lambda n, most: jax.random.randint(next(keys), (batch, n), 0, most)
        types = jnp.arange(tokens) >= drawn(1, tokens)  # a second sentence begins anywhere
        labels = drawn(masked, vocabulary)
        return drawn(tokens, vocabulary), types.astype(jnp.int32), drawn(masked, tokens), labels

    return loss, init, draw


def wavenet(batch: int, wrap: Wrap, layers: int = 20, width: int = 128) -> Given:
    """Dilated, gated convolutions over 16,000 samples of sound (van den Oord et al., "WaveNet", 2016,
    sections 2.1 to 2.4)."""
    samples = 16_000

    def init(key: jax.Array) -> Any:
        draw = _drawing(key)
        kernel = lambda taps, before, after: draw(taps * before, after).reshape(taps, before, after)
        return {
            "first": kernel(1, 1, width),
            "layers": [
                {
                    **{name: kernel(2, width, width) for name in ("filter", "gate")},
                    **{name: kernel(1, width, width) for name in ("residual", "skip")},
                }
                for _ in range(layers)
            ],
            "hidden": kernel(1, width, width),
            "out": kernel(1, width, 256),
        }

    def convolved(x: jax.Array, w: jax.Array, dilation: int = 1) -> jax.Array:
        before = [((w.shape[0] - 1) * dilation, 0)]
        layout = ("NWC", "WIO", "NWC")
        w = w.astype(x.dtype)
        return lax.conv_general_dilated(x, w, (1,), before, None, (dilation,), layout)

    def layer(x: jax.Array, w: Any, dilation: int) -> tuple[jax.Array, jax.Array]:
        gate = jax.nn.sigmoid(convolved(x, w["gate"], dilation))
        y = jnp.tanh(convolved(x, w["filter"], dilation)) * gate
        return x + convolved(y, w["residual"]), convolved(y, w["skip"])

    def loss(params: Any, data: Any, key: jax.Array) -> jax.Array:
        del key
        sound, following = data
        x, total = convolved(sound[..., None].astype(_HALF), params["first"]), 0
        for i, w in enumerate(params["layers"]):
            of = lambda x, w, dilation=2 ** (i % 10): layer(x, w, dilation)
            x, skipped = wrap(of)(x, w)
            total = total + skipped
        y = jax.nn.relu(convolved(jax.nn.relu(total), params["hidden"]))
        return _cross_entropy(convolved(y, params["out"]), following)

    def draw(key: jax.Array) -> Any:
        sound = jax.random.normal(key, (batch, samples))
        return sound, jax.random.randint(key, (batch, samples), 0, 256)

    return loss, init, draw


def segmenter(batch: int, wrap: Wrap, layers: int = 4, width: int = 64) -> Given:
    """A U-Net, which tells 20 classes apart in images of 256 x 256: halves them `layers` times, and
    doubles them by transposed convolutions (Ronneberger et al., "U-Net", 2015, figure 1)."""
    side, classes, layout = 256, 20, ("NHWC", "HWIO", "NHWC")

    def init(key: jax.Array) -> Any:
        draw = _drawing(key)
        kernel = lambda taps, before, after: draw(taps**2 * before, after).reshape(
            taps, taps, before, after
        )
        pair = lambda before, after: [kernel(3, before, after), kernel(3, after, after)]
        sizes = [width * 2**i for i in range(layers + 1)]
        above = [*zip(sizes[1:], sizes, strict=False)][::-1]
        return {
            "down": [pair(a, b) for a, b in zip([3, *sizes], sizes, strict=False)],
            "up": [kernel(2, a, b) for a, b in above],
            "joined": [pair(a, b) for a, b in above],
            "out": kernel(1, width, classes),
        }

    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w.astype(_HALF), (1, 1), "SAME", dimension_numbers=layout
        )

    def doubled(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_transpose(x, w.astype(_HALF), (2, 2), "SAME", dimension_numbers=layout)

    def layer(x: jax.Array, kernels: Any) -> jax.Array:
        for w in kernels:
            x = jax.nn.relu(convolved(x, w))
        return x

    def loss(params: Any, data: Any, key: jax.Array) -> jax.Array:
        del key
        images, labels = data
        x, beside = images.astype(_HALF), []
        first, *down = params["down"]
        x = wrap(layer)(x, first)
        for w in down:
            beside.append(x)
            x = wrap(layer)(lax.reduce_window(x, -jnp.inf, lax.max, *_PAIRS, "VALID"), w)
        for w, joined in zip(params["up"], params["joined"], strict=True):
            x = wrap(layer)(jnp.concatenate([beside.pop(), doubled(x, w)], -1), joined)
        return _cross_entropy(convolved(x, params["out"]), labels)

    def draw(key: jax.Array) -> Any:
        keys = jax.random.split(key)
        images = jax.random.normal(keys[0], (batch, side, side, 3))
        return images, jax.random.randint(keys[1], (batch, side, side), 0, classes)

    return loss, init, draw


_PAIRS = (1, 2, 2, 1), (1, 2, 2, 1)
"""The window of a max-pool, and its strides."""

OTHERS: dict[str, Callable[..., Given]] = {
    "bert": bert,
    "dit": dit,
    "segmenter": segmenter,
    "t5": t5,
    "wavenet": wavenet,
}
"""By name."""


def _drawing(key: jax.Array) -> Callable[[int, int], jax.Array]:
    """What draws the next matrix, of so many rows and columns."""
    keys: Iterator[jax.Array] = (jax.random.fold_in(key, i) for i in range(10_000))
    return lambda rows, columns: rows**-0.5 * jax.random.normal(next(keys), (rows, columns))


def _attention(draw: Callable, width: int) -> Any:
    return {name: draw(width, width) for name in ("query", "key", "value", "join")}


def _mlp(draw: Callable, width: int, hidden: int | None = None) -> Any:
    hidden = hidden or 4 * width
    return {"up": draw(width, hidden), "down": draw(hidden, width)}


def _attended(
    x: jax.Array,
    w: Any,
    other: jax.Array | None = None,
    bias: jax.Array | None = None,
    weighed: Callable[[jax.Array], jax.Array] = lambda p: p,
) -> jax.Array:
    """Attention of x[n, t, width] to itself, or to `other`; heads are 64 wide."""
    n, t, width = x.shape
    split = lambda x, name: (x @ w[name].astype(_HALF)).reshape(n, -1, width // 64, 64)
    y = x if other is None else other
    scores = jnp.einsum("nqhd,nkhd->nhqk", split(x, "query"), split(y, "key"))
    scores = scores.astype(jnp.float32) / 8 + (0 if bias is None else bias)
    p = weighed(jax.nn.softmax(scores).astype(_HALF))
    found = jnp.einsum("nhqk,nkhd->nqhd", p, split(y, "value")).reshape(n, t, width)
    return found @ w["join"].astype(_HALF)


def _centred(x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6).astype(x.dtype)


def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root mean squares of 1 (Zhang and Sennrich, 2019)."""
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def dropped(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """`x` with a share of it dropped: itself, where that is 0."""
    if not rate:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
