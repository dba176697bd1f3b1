"""A decoder-only transformer of the Llama form, in plain JAX, with its layers in a scan or unrolled.

Touvron et al., "LLaMA: Open and efficient foundation language models" (2023), section 2.2: root mean
square norms before each part, rotary positions, SwiGLU; grouped queries as in Llama 2 (2023).
Weights are float32, and stacked over the layers or apart; the computation is in `Decoder.dtype`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from vmem_jax.models.attention import chunked_attention

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The shape of the network, and how its layers are written.

    The default is a network of 1.1 billion weights.

    Attributes:
      layers: how many there are, all alike.
      width: of the residual stream.
      hidden: of the feed-forward part.
      heads, kv_heads: of the queries, and of keys and values.
      vocabulary: number of tokens; input and output weights are separate.
      dtype: type of the computation.
      attention: "xla" or "cudnn", as `jax.nn.dot_product_attention` takes it; or "chunks", in scans
        over chunks of 1,024 tokens.
      scanned: layers in one `lax.scan`; else in a Python loop.
      wrap: what is applied to a layer, for instance `jax.checkpoint`.
      scan: what runs the layers if they are scanned, as `jax.lax.scan` does.
    """

    layers: int = 16
    width: int = 2048
    hidden: int = 8192
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32_000
    dtype: Any = jnp.bfloat16
    attention: Literal["xla", "cudnn", "chunks"] = "xla"
    scanned: bool = True
    wrap: Callable[[Callable], Callable] = lambda layer: layer
    scan: Callable[..., Any] = jax.lax.scan

    def init(self, key: jax.Array) -> Params:
        """Weights in float32, from a normal distribution of deviation 0.02."""
        d, size = self.width, self.width // self.heads
        shapes = {
            "query": (d, d),
            "key": (d, self.kv_heads * size),
            "value": (d, self.kv_heads * size),
            "out": (d, d),
            "gate": (d, self.hidden),
            "up": (d, self.hidden),
            "down": (self.hidden, d),
        }
        keys = iter(jax.random.split(key, len(shapes) + 2))
        draw = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
        layers = {name: draw(self.layers, *shape) for name, shape in shapes.items()}
        layers |= {name: jnp.ones((self.layers, d)) for name in ("norm1", "norm2")}
        return {
            "tokens": draw(self.vocabulary, d),
            "layers": layers,
            "norm": jnp.ones(d),
            "head": draw(d, self.vocabulary),
        }

    def logits(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Logits [n, t, vocabulary], of `dtype`, of tokens i32[n, t]."""
        layer = self.wrap(self._layer)
        x = params["tokens"].astype(self.dtype)[tokens]
        if self.scanned:
            x, _ = self.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
        else:
            for w in unstacked(params["layers"]):
                x = layer(x, w)
        x = _norm(x, params["norm"])
        return x @ params["head"].astype(self.dtype)

    def loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Mean cross entropy of each token of i32[n, t + 1] but the first."""
        logits = self.logits(params, tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def _layer(self, x: jax.Array, w: Params) -> jax.Array:
        n, t, d = x.shape
        size = d // self.heads
        product = lambda x, name: _product(x, w, name, self.dtype)
        with jax.named_scope("attention"):
            y = _norm(x, w["norm1"])
            split = lambda y: y.reshape(n, t, -1, size)
            q, k, v = (split(product(y, name)) for name in ("query", "key", "value"))
            q, k = _rotated(q), _rotated(k)
            y = self._attended(q, k, v)
            y = checkpoint_name(y, "attention")
            x = x + product(y.reshape(n, t, d), "out")
        with jax.named_scope("feed_forward"):
            y = _norm(x, w["norm2"])
            y = jax.nn.silu(product(y, "gate")) * product(y, "up")
            return x + product(y, "down")

    def _attended(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if self.attention == "chunks":
            return chunked_attention(q, k, v)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)


def unstacked(layers: Params | list[Params]) -> list[Params]:
    """The weights of each layer, of stacks of them or of a list; unrolled layers take either.

    In a list each weight is an argument of the step, which can lie in other memory than the rest.
    """
    if not isinstance(layers, dict):
        return layers
    count = len(jax.tree.leaves(layers)[0])
    return [jax.tree.map(lambda w, i=i: w[i], layers) for i in range(count)]


def adapters(layers: Params, rank: int, key: jax.Array) -> Params:
    """Adapters of low rank for each matrix of stacked `layers`, as their "adapters".

    The product of the two matrices of an adapter is added to a weight, and is zero at first (Hu et
    al., "LoRA: Low-rank adaptation of large language models", 2022, section 4.1, with alpha = rank).
    """
    matrices = {name: w.shape for name, w in layers.items() if w.ndim == 3}
    keys = jax.random.split(key, len(matrices))
    return {
        name: {
            "in": jax.random.normal(k, (n, d, rank)) / d**0.5,
            "out": jnp.zeros((n, rank, width)),
        }
        for k, (name, (n, d, width)) in zip(keys, matrices.items(), strict=True)
    }


def train_step(
    model: Decoder, optimiser: optax.GradientTransformation
) -> Callable[[tuple[Params, Any], jax.Array], tuple[tuple[Params, Any], jax.Array]]:
    """A step ((params, optimiser state), tokens i32[n, t + 1]) -> (the same, loss)."""

    def step(state: tuple[Params, Any], tokens: jax.Array) -> Any:
        params, rest = state
        loss, grads = jax.value_and_grad(model.loss)(params, tokens)
        updates, rest = optimiser.update(grads, rest, params)
        return (optax.apply_updates(params, updates), rest), loss

    return step


def _product(x: jax.Array, w: Params, name: str, dtype: Any) -> jax.Array:
    """`x` times a weight, and times its adapter, if `w` has one."""
    y = x @ w[name].astype(dtype)
    if (adapter := w.get("adapters", {}).get(name)) is None:
        return y
    return y + x @ adapter["in"].astype(dtype) @ adapter["out"].astype(dtype)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return (y * scale).astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al., 2021, section 3.4) of [n, t, heads, size]."""
    half = x.shape[-1] // 2
    rate = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * rate
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
