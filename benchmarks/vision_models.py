"""Two networks of convolutions: ConvNeXt, and the U-Net of a latent diffusion model.

Weights are float32, the computation is in bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

Wrap = Callable[[Callable], Callable]
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ConvNeXt:
    """Liu et al., "A ConvNet for the 2020s" (2022), section 2; the default is ConvNeXt-B.

    Attributes:
      depths: blocks of each stage.
      width: channels of the first stage; each stage doubles them.
      classes: number of classes.
      wrap: what is applied to a block.
    """

    depths: tuple[int, ...] = (3, 3, 27, 3)
    width: int = 128
    classes: int = 1000
    wrap: Wrap = lambda block: block

    def init(self, key: jax.Array) -> Params:
        keys = _keys(key)
        params: Params = {}
        before = 3
        for s, depth in enumerate(self.depths):
            d, patch = self.width << s, 4 if s == 0 else 2
            params[f"down{s}"] = _drawn(keys, patch, patch, before, d)
            params[f"down{s}_norm"] = _norm_params(d if s == 0 else before)
            for i in range(depth):
                params[f"block{s}_{i}"] = {
                    "depthwise": _drawn(keys, 7, 7, 1, d),
                    "norm": _norm_params(d),
                    "up": _drawn(keys, d, 4 * d),
                    "up_bias": jnp.zeros(4 * d),
                    "down": _drawn(keys, 4 * d, d),
                    "down_bias": jnp.zeros(d),
                    "scale": jnp.full(d, 1e-6),
                }
            before = d
        return params | {"norm": _norm_params(before), "head": _drawn(keys, before, self.classes)}

    def __call__(self, params: Params, x: jax.Array) -> jax.Array:
        """Logits f32[n, classes] of images bf16[n, h, w, 3]."""
        block = self.wrap(_convnext_block)
        for s, depth in enumerate(self.depths):
            with jax.named_scope(f"stage{s}"):
                patch, norm = (4 if s == 0 else 2), params[f"down{s}_norm"]
                x = x if s == 0 else _layer_norm(x, norm)
                x = _convolved(x, params[f"down{s}"], patch, "VALID")
                x = _layer_norm(x, norm) if s == 0 else x
                for i in range(depth):
                    x = block(x, params[f"block{s}_{i}"])
        x = _layer_norm(x.mean((1, 2)), params["norm"]).astype(jnp.float32)
        return x @ params["head"]


def _convnext_block(x: jax.Array, w: Params) -> jax.Array:
    y = _convolved(x, w["depthwise"], 1, "SAME", groups=x.shape[-1])
    y = _layer_norm(y, w["norm"])
    y = jax.nn.gelu(y @ w["up"].astype(y.dtype) + w["up_bias"].astype(y.dtype))
    y = y @ w["down"].astype(y.dtype) + w["down_bias"].astype(y.dtype)
    return x + y * w["scale"].astype(y.dtype)


@dataclasses.dataclass(frozen=True)
class UNet:
    """Rombach et al., "High-resolution image synthesis with latent diffusion models" (2022), without
    cross-attention: residual blocks and self-attention of all but the first resolution.

    Attributes:
      width: channels of the first resolution.
      multiples: of the channels, for each resolution; each halves the image.
      blocks: residual blocks of a resolution on the way down; one more on the way up.
      wrap: what is applied to a residual block and to an attention.
    """

    width: int = 320
    multiples: tuple[int, ...] = (1, 2, 4, 4)
    blocks: int = 2
    wrap: Wrap = lambda block: block

    def init(self, key: jax.Array) -> Params:
        keys, d = _keys(key), self.width
        params: Params = {
            "first": _drawn(keys, 3, 3, 4, d),
            "time1": _drawn(keys, d, 4 * d),
            "time2": _drawn(keys, 4 * d, 4 * d),
        }

        def block(name: str, before: int, after: int, attends: bool) -> None:
            params[name] = {
                "norm1": _norm_params(before),
                "conv1": _drawn(keys, 3, 3, before, after),
                "time": _drawn(keys, 4 * d, after),
                "norm2": _norm_params(after),
                "conv2": _drawn(keys, 3, 3, after, after),
            }
            if before != after:
                params[name]["skip"] = _drawn(keys, before, after)
            if attends:
                params[name + "_attention"] = {
                    "norm": _norm_params(after),
                    "qkv": _drawn(keys, after, 3 * after),
                    "out": _drawn(keys, after, after),
                }

        widths, now = [d], d
        for r, multiple in enumerate(self.multiples):
            for i in range(self.blocks):
                block(f"down{r}_{i}", now, d * multiple, r > 0)
                now = d * multiple
                widths.append(now)
            if r + 1 < len(self.multiples):
                params[f"down{r}"] = _drawn(keys, 3, 3, now, now)
                widths.append(now)
        block("middle1", now, now, True)
        block("middle2", now, now, False)
        for r, multiple in reversed([*enumerate(self.multiples)]):
            for i in range(self.blocks + 1):
                block(f"up{r}_{i}", now + widths.pop(), d * multiple, r > 0)
                now = d * multiple
            if r:
                params[f"up{r}"] = _drawn(keys, 3, 3, now, now)
        return params | {"norm": _norm_params(now), "last": _drawn(keys, 3, 3, now, 4)}

    def __call__(self, params: Params, x: jax.Array, t: jax.Array) -> jax.Array:
        """The noise bf16[n, h, w, 4] in latents bf16[n, h, w, 4] at times f32[n] of 0 to 1."""
        residual, attention = self.wrap(_unet_block), self.wrap(_attention)
        rates = jnp.exp(-jnp.log(10_000.0) * jnp.arange(self.width // 2) / (self.width // 2))
        angle = 1000 * t[:, None] * rates
        time = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1).astype(x.dtype)
        time = jax.nn.silu(time @ params["time1"].astype(x.dtype)) @ params["time2"].astype(x.dtype)

        def block(name: str, x: jax.Array) -> jax.Array:
            with jax.named_scope(name):
                x = residual(x, time, params[name])
                known = params.get(name + "_attention")
                return x if known is None else attention(x, known)

        x = _convolved(x, params["first"])
        skips = [x]
        for r in range(len(self.multiples)):
            for i in range(self.blocks):
                x = block(f"down{r}_{i}", x)
                skips.append(x)
            if f"down{r}" in params:
                x = _convolved(x, params[f"down{r}"], 2)
                skips.append(x)
        x = block("middle2", block("middle1", x))
        for r in reversed(range(len(self.multiples))):
            for i in range(self.blocks + 1):
                x = block(f"up{r}_{i}", jnp.concatenate([x, skips.pop()], -1))
            if r:
                n, h, w, c = x.shape
                x = jnp.broadcast_to(x[:, :, None, :, None], (n, h, 2, w, 2, c))
                x = _convolved(x.reshape(n, 2 * h, 2 * w, c), params[f"up{r}"])
        return _convolved(jax.nn.silu(_group_norm(x, params["norm"])), params["last"])


def _unet_block(x: jax.Array, time: jax.Array, w: Params) -> jax.Array:
    y = _convolved(jax.nn.silu(_group_norm(x, w["norm1"])), w["conv1"])
    y = y + (jax.nn.silu(time) @ w["time"].astype(x.dtype))[:, None, None]
    y = _convolved(jax.nn.silu(_group_norm(y, w["norm2"])), w["conv2"])
    return y + (x @ w["skip"].astype(x.dtype) if "skip" in w else x)


def _attention(x: jax.Array, w: Params) -> jax.Array:
    n, h, width, c = x.shape
    y = _group_norm(x, w["norm"]).reshape(n, h * width, c) @ w["qkv"].astype(x.dtype)
    q, k, v = jnp.moveaxis(y.reshape(n, h * width, 3, c // 64, 64), 2, 0)
    y = jax.nn.dot_product_attention(q, k, v)
    return x + (y.reshape(n, h * width, c) @ w["out"].astype(x.dtype)).reshape(x.shape)


def _convolved(
    x: jax.Array, w: jax.Array, stride: int = 1, padding: str = "SAME", groups: int = 1
) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, w.astype(x.dtype), (stride, stride), padding, None, None, layout, groups
    )


def _layer_norm(x: jax.Array, w: Params) -> jax.Array:
    y = jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6)
    return (y * w["scale"] + w["bias"]).astype(x.dtype)


def _group_norm(x: jax.Array, w: Params) -> jax.Array:
    """Wu and He (2018), 32 groups of channels."""
    n, h, width, c = x.shape
    y = x.astype(jnp.float32).reshape(n, h, width, 32, c // 32)
    y = jax.nn.standardize(y, axis=(1, 2, 4), epsilon=1e-5).reshape(x.shape)
    return (y * w["scale"] + w["bias"]).astype(x.dtype)


def _norm_params(size: int) -> Params:
    return {"scale": jnp.ones(size), "bias": jnp.zeros(size)}


def _keys(key: jax.Array) -> Iterator[jax.Array]:
    count = 0
    while True:
        yield jax.random.fold_in(key, count)
        count += 1


def _drawn(keys: Iterator[jax.Array], *shape: int) -> jax.Array:
    return 0.02 * jax.random.normal(next(keys), shape)
