"""The networks of `training_steps.py`, by name, and what is picked by hand for their layers.

"decoder" is `vmem_jax.models.Decoder`, and "lora" trains adapters of its frozen weights; "vit" is
ViT-L/16 (Dosovitskiy et al., "An image is worth 16x16 words", 2021) with dropout behind each product,
"vit_dropout" the same with dropout of the attention weights, and "vit_flax" of Flax's own layers;
"gpt" is GPT-2 medium (Radford et al., 2019), which drops these as well; "resnet" is ResNet-152 with
the identical blocks of each stage in a scan. Their layers are scanned, or unrolled with
`scanned=False`. "lstm", "gru" and "rnn" scan over tokens. "convnext" and "unet" are in
`vision_models`, "vit_flax" in `flax_vit`, those that nothing was fitted to in `other_models`, the
others in `vmem_jax.models`; their layers are unrolled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from by_hand import POLICIES, SEGMENTS, Wrap, layers_by_hand, wrapping
from flax import linen
from flax_vit import Block, ViT
from jax.ad_checkpoint import checkpoint_name
from other_models import OTHERS, dropped
from vision_models import ConvNeXt, UNet

from vmem_jax.models.decoder import Decoder, adapters, train_step, unstacked
from vmem_jax.models.jobs import cross_entropy, job
from vmem_jax.models.scanned_resnet import ScannedResNet


@dataclasses.dataclass(frozen=True)
class Training:
    """A step (state, batch) -> (state, loss), and what it needs.

    Attributes:
      init: key -> state.
      batch: key -> batch.
      accumulated: (parts) -> the same with the gradients of so many parts of the batch added in a
        scan; None of those that have no such form.
    """

    step: Callable[[Any, Any], tuple[Any, jax.Array]]
    init: Callable[[jax.Array], Any]
    batch: Callable[[jax.Array], Any]
    accumulated: Callable[[int], Training] | None = None


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A pre-normalised transformer, its layers in one scan: weights in float32, computed in bfloat16.

    Attributes:
      layers, width: of the network; heads are 64 wide.
      dropout: share of what is dropped behind each product of a layer.
      weights_dropout: share of the attention weights that is dropped.
      causal: whether a token attends to those before it alone.
      scanned: layers in one scan; else in a Python loop.
      stacked: whether a weight of all layers is one array; needed where they are scanned.
      wrap: what is applied to a layer.
      scan: what runs the layers if they are scanned.
    """

    layers: int = 24
    width: int = 1024
    dropout: float = 0.1
    weights_dropout: float = 0.0
    causal: bool = False
    scanned: bool = True
    stacked: bool = True
    wrap: Wrap = lambda layer: layer
    scan: Callable[..., Any] = jax.lax.scan

    def init(self, key: jax.Array) -> Any:
        """The weights of the layers, stacked or a list of each layer's."""
        d, keys = self.width, iter(jax.random.split(key, 4))
        shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
        draw = lambda shape: 0.02 * jax.random.normal(next(keys), (self.layers, *shape))
        layers = {name: draw(shape) for name, shape in shapes.items()}
        ones, zeros = jnp.ones((self.layers, d)), jnp.zeros((self.layers, d))
        layers |= {"scale1": ones, "scale2": ones, "bias1": zeros, "bias2": zeros}
        return layers if self.stacked else unstacked(layers)

    def __call__(self, x: jax.Array, layers: Any, key: jax.Array) -> jax.Array:
        """[n, t, width] -> the same."""
        keys = jax.random.split(key, self.layers)
        layer = self.wrap(self._layer)
        if self.scanned:
            once = lambda x, given: (layer(x, *given), None)
            return self.scan(once, x, (layers, keys))[0]
        for w, key in zip(unstacked(layers), keys, strict=True):
            x = layer(x, w, key)
        return x

    def _layer(self, x: jax.Array, w: Any, key: jax.Array) -> jax.Array:
        n, t, d = x.shape
        keys = jax.random.split(key, 4)
        product = lambda x, name: x @ w[name].astype(x.dtype)
        with jax.named_scope("attention"):
            y = product(_norm(x, w["scale1"], w["bias1"]), "qkv")
            q, k, v = jnp.moveaxis(y.reshape(n, t, 3, d // 64, 64), 2, 0)
            scores = jnp.einsum("nqhd,nkhd->nhqk", q, k).astype(jnp.float32) / 8
            if self.causal:
                scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
            weights = dropped(jax.nn.softmax(scores).astype(x.dtype), self.weights_dropout, keys[0])
            y = jnp.einsum("nhqk,nkhd->nqhd", weights, v).reshape(n, t, d)
            y = product(checkpoint_name(y, "attention"), "out")
            x = x + dropped(y, self.dropout, keys[1])
        with jax.named_scope("feed_forward"):
            y = checkpoint_name(product(_norm(x, w["scale2"], w["bias2"]), "up"), "hidden")
            y = product(dropped(jax.nn.gelu(y), 0.0, keys[2]), "down")
            return x + dropped(y, self.dropout, keys[3])


def _norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    y = jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6)
    return (y * scale + bias).astype(x.dtype)


def _trained(loss_of: Callable, init: Callable, batch: Callable, optimiser: Any = None) -> Training:
    """AdamW on `loss_of(params, batch, key)`; the key is drawn from the number of the step."""
    optimiser = optax.adamw(1e-4) if optimiser is None else optimiser

    def start(key: jax.Array) -> Any:
        params = init(key)
        return params, optimiser.init(params), jnp.int32(0)

    def step(state: Any, batch: Any, parts: int = 1) -> Any:
        params, rest, count = state
        key = jax.random.fold_in(jax.random.key(0), count)
        gradients = functools.partial(jax.value_and_grad(loss_of), params)

        def add(total: Any, part: Any) -> Any:
            loss, grads = gradients(*part)
            return jax.tree.map(jnp.add, total, grads), loss

        if parts == 1:
            loss, grads = gradients(batch, key)
        else:
            split = lambda a: a.reshape(parts, a.shape[0] // parts, *a.shape[1:])
            each = jax.tree.map(split, batch), jax.random.split(key, parts)
            grads, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), each)
            loss, grads = losses.mean(), jax.tree.map(lambda g: g / parts, grads)
        updates, rest = optimiser.update(grads, rest, params)
        return (optax.apply_updates(params, updates), rest, count + 1), loss

    in_parts = lambda parts: Training(functools.partial(step, parts=parts), start, batch)
    return Training(step, start, batch, in_parts)


def _images(batch: int) -> Callable[[jax.Array], Any]:
    """key -> images bf16[n, 224, 224, 3] and their labels, of 1,000 classes."""

    def draw(key: jax.Array) -> Any:
        images = jax.random.normal(key, (batch, 224, 224, 3), jnp.bfloat16)
        return images, jax.random.randint(key, (batch,), 0, 1000, jnp.int32)

    return draw


def _decoder(hand: str, layers: int = 16, width: int = 2048, **options: Any) -> Decoder:
    """Heads are 64 wide, four queries share a key, and the hidden layer is four times as wide."""
    sizes = {"width": width, "hidden": 4 * width, "heads": width // 64, "kv_heads": width // 256}
    options = {"attention": "cudnn", **sizes, **options}
    return Decoder(layers=layers, **layers_by_hand(hand, options.get("scanned", True)), **options)


def _texts(batch: int, tokens: int, vocabulary: int) -> Callable[[jax.Array], Any]:
    """key -> tokens i32[batch, tokens + 1]."""
    size = batch, tokens + 1
    return lambda key: jax.random.randint(key, size, 0, vocabulary, jnp.int32)


def decoder(
    hand: str, batch: int, tokens: int = 2048, stacked: bool = True, **options: Any
) -> Training:
    """All weights are trained; `stacked` ones are those of all layers in one array."""
    model = _decoder(hand, **options)
    optimiser = optax.adamw(1e-4)

    def start(key: jax.Array) -> Any:
        params = model.init(key)
        if not stacked:
            params["layers"] = unstacked(params["layers"])
        return params, optimiser.init(params)

    draw = _texts(batch, tokens, model.vocabulary)
    return Training(train_step(model, optimiser), start, draw)


def lora(hand: str, batch: int, tokens: int = 2048, rank: int = 16, **options: Any) -> Training:
    """Weights are frozen, in bfloat16; adapters of the layers' products are trained, in float32."""
    model = _decoder(hand, **options)
    optimiser = optax.adamw(1e-4)

    def start(key: jax.Array) -> Any:
        base = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model.init(key))
        trained = adapters(base["layers"], rank, jax.random.fold_in(key, 1))
        return base, trained, optimiser.init(trained)

    def step(state: Any, batch: Any) -> Any:
        base, trained, rest = state

        def loss_of(trained: Any) -> jax.Array:
            layers = {**base["layers"], "adapters": trained}
            return model.loss({**base, "layers": layers}, batch)

        loss, grads = jax.value_and_grad(loss_of)(trained)
        updates, rest = optimiser.update(grads, rest, trained)
        return (base, optax.apply_updates(trained, updates), rest), loss

    return Training(step, start, _texts(batch, tokens, model.vocabulary))


def vit(hand: str, batch: int, layers: int = 24, width: int = 1024, **options: Any) -> Training:
    """Images of 224 x 224 in patches of 16 x 16, and a token for the class."""
    by_hand = layers_by_hand(hand, options.get("scanned", True))
    network = Transformer(layers, width, **by_hand, **options)

    def init(key: jax.Array) -> Any:
        first, *keys = jax.random.split(key, 4)
        draw = lambda key, *shape: 0.02 * jax.random.normal(key, shape)
        ends = {"patches": draw(keys[0], 768, width), "head": draw(keys[1], width, 1000)}
        return {"layers": network.init(first), "places": draw(keys[2], 197, width), **ends}

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        images, labels = batch
        n = images.shape[0]
        x = images.reshape(n, 14, 16, 14, 16, 3).swapaxes(2, 3).reshape(n, 196, 768)
        x = x.astype(jnp.bfloat16) @ params["patches"].astype(jnp.bfloat16)
        x = jnp.pad(x, ((0, 0), (1, 0), (0, 0))) + params["places"].astype(x.dtype)
        x = network(x, params["layers"], key)[:, 0].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], labels).mean()

    return _trained(loss, init, _images(batch))


def vit_flax(hand: str, batch: int, layers: int = 24, width: int = 1024) -> Training:
    """ViT-L/16 of Flax's layers, unrolled."""
    block = Block if hand == "plain" else linen.remat(Block, policy=POLICIES[hand])
    network = ViT(layers, width, block)

    def init(key: jax.Array) -> Any:
        images = jnp.zeros((1, 224, 224, 3), jnp.bfloat16)
        return network.init({"params": key, "dropout": key}, images)["params"]

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        images, labels = batch
        logits = network.apply({"params": params}, images, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return _trained(loss, init, _images(batch))


def gpt(
    hand: str,
    batch: int,
    layers: int = 24,
    width: int = 1024,
    vocabulary: int = 50_257,
    tokens: int = 1024,
    **options: Any,
) -> Training:
    """The weights of the output are those of the input."""
    by_hand = layers_by_hand(hand, options.get("scanned", True))
    network = Transformer(layers, width, weights_dropout=0.1, causal=True, **by_hand, **options)

    def init(key: jax.Array) -> Any:
        first, *keys = jax.random.split(key, 3)
        draw = lambda key, *shape: 0.02 * jax.random.normal(key, shape)
        ends = {"tokens": draw(keys[0], vocabulary, width), "places": draw(keys[1], tokens, width)}
        return {"layers": network.init(first), **ends}

    def loss(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        table = params["tokens"].astype(jnp.bfloat16)
        x = table[batch[:, :-1]] + params["places"].astype(jnp.bfloat16)
        logits = (network(x, params["layers"], key) @ table.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    draw = lambda key: jax.random.randint(key, (batch, tokens + 1), 0, vocabulary, jnp.int32)
    return _trained(loss, init, draw)


def lstm(
    hand: str,
    batch: int,
    layers: int = 2,
    width: int = 512,
    vocabulary: int = 1000,
    tokens: int = 512,
    scanned: bool = True,
) -> Training:
    """A language model of LSTM layers, each in a scan over the tokens, computed in bfloat16.

    Hochreiter and Schmidhuber, "Long short-term memory", 1997; with the forget gate of Gers et al.,
    2000.
    """
    if not scanned or hand == SEGMENTS:
        raise ValueError("lstm has one scan over all tokens.")

    def init(key: jax.Array) -> Any:
        first, last, *keys = jax.random.split(key, 2 + layers)
        draw = lambda key, *shape: shape[0] ** -0.5 * jax.random.normal(key, shape)
        cells = [{"w": draw(key, 2 * width, 4 * width), "b": jnp.zeros(4 * width)} for key in keys]
        return {
            "tokens": draw(first, vocabulary, width),
            "cells": cells,
            "head": draw(last, width, vocabulary),
        }

    @wrapping(hand)
    def cell(carry: Any, x: jax.Array, w: jax.Array, b: jax.Array) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w + b, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def loss(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        del key
        params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        x = params["tokens"][batch[:, :-1].T]  # [tokens, batch, width]
        zeros = jnp.zeros(x.shape[1:], x.dtype)
        for p in params["cells"]:
            _, x = jax.lax.scan(lambda carry, x, p=p: cell(carry, x, **p), (zeros, zeros), x)
        logits = (x @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:].T).mean()

    return _trained(loss, init, _texts(batch, tokens, vocabulary))


def recurrent(
    hand: str,
    batch: int,
    cell: str,
    width: int = 512,
    vocabulary: int = 1000,
    tokens: int = 256,
    scanned: bool = True,
) -> Training:
    """A language model of one layer of Flax's cells, in float32, trained by gradient descent."""
    if not scanned or hand != "plain":
        raise ValueError("recurrent networks have one scan over all tokens, and nothing by hand.")
    embed, head = linen.Embed(vocabulary, width), linen.Dense(vocabulary)
    network = linen.Sequential([embed, linen.RNN(getattr(linen, cell)(width)), head])

    def loss(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        del key
        logits = network.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    init = lambda key: network.init(key, jnp.zeros((1, tokens), jnp.int32))
    return _trained(loss, init, _texts(batch, tokens, vocabulary), optax.sgd(0.1))


def resnet(hand: str, batch: int, layers: int = 36, width: int = 64, **options: Any) -> Training:
    """ResNet-152, or one with so many blocks in its third stage; batch statistics are not kept."""
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}
    blocks = (3, 8, layers, 3) if layers > 8 else (2, 2, layers, 2)
    checkpoint = {"checkpoint": hand != "plain", "policy": POLICIES[hand]}
    model = ScannedResNet(blocks, 1000, width=width, **checkpoint, **types, **options)

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, 224, 224, 3)), train=False)

    def loss(variables: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        return cross_entropy(model, variables["params"], variables["batch_stats"], batch)[0]

    return _trained(loss, init, _images(batch), optax.sgd(0.1, momentum=0.9))


def published(hand: str, batch: int, name: str, dtype: str = "bfloat16") -> Training:
    """Of `vmem_jax.models`, all in `dtype`, with momentum; "checkpoint" is around each block."""
    wrap: Any = None if hand == "plain" else hand
    made = job(name, batch=batch, dtype=dtype, optimizer="momentum", wrap=wrap)

    def step(state: Any, batch: Any) -> Any:
        state, metrics = made.step(state, batch)
        return state, metrics["loss"]

    return Training(step, made.init, made.random_batch)


def convnext(hand: str, batch: int, **options: Any) -> Training:
    """ConvNeXt-B, 224 x 224, AdamW."""
    network = ConvNeXt(wrap=wrapping(hand), **options)

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        images, labels = batch
        logits = network(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return _trained(loss, network.init, _images(batch))


def unet(hand: str, batch: int, **options: Any) -> Training:
    """Predicts the noise of latents of 64 x 64 x 4 (Ho et al., 2020, Algorithm 1), AdamW."""
    network = UNet(wrap=wrapping(hand), **options)

    def loss(params: Any, latents: jax.Array, key: jax.Array) -> jax.Array:
        times, noise = jax.random.split(key)
        t = jax.random.uniform(times, (batch,))
        e = jax.random.normal(noise, latents.shape, latents.dtype)
        angle = (jnp.pi / 2 * t)[:, None, None, None].astype(latents.dtype)
        found = network(params, jnp.cos(angle) * latents + jnp.sin(angle) * e, t)
        return jnp.mean((found - e).astype(jnp.float32) ** 2)

    draw = lambda key: jax.random.normal(key, (batch, 64, 64, 4), jnp.bfloat16)
    return _trained(loss, network.init, draw)


def other(hand: str, batch: int, name: str, **options: Any) -> Training:
    """One of `other_models`, AdamW."""
    return _trained(*OTHERS[name](batch, wrapping(hand), **options))


MODELS: dict[str, Callable[..., Training]] = {
    "decoder": decoder,
    "lora": lora,
    "vit": vit,
    "vit_dropout": functools.partial(vit, weights_dropout=0.1),
    "vit_flax": vit_flax,
    "gpt": gpt,
    "lstm": lstm,
    "gru": functools.partial(recurrent, cell="GRUCell"),
    "rnn": functools.partial(recurrent, cell="SimpleCell"),
    "resnet": resnet,
    **{
        f"{name}{ending}": functools.partial(published, name=name, dtype=dtype)
        for name in ("resnet50", "resnet152")
        for ending, dtype in (("", "bfloat16"), ("_float16", "float16"))
    },
    "googlenet": functools.partial(published, name="googlenet"),
    **{
        name: functools.partial(published, name=name)
        for name in ("inception4", "mobilenet2", "swint")
    },
    "convnext": convnext,
    "unet": unet,
    **{name: functools.partial(other, name=name) for name in OTHERS},
}
"""(what is picked by hand, batch, further options of the network) -> its training."""

RESNETS = ("resnet50", "resnet50_float16", "resnet152", "resnet152_float16")
UNROLLED = (
    *(*RESNETS, "googlenet", "inception4", "mobilenet2", "swint"),
    *("convnext", "unet", "vit_flax", *OTHERS),
)
"""Those without a scan."""

BATCHES: dict[str, int] = {
    "decoder": 8,
    "lora": 8,
    "vit": 256,
    "vit_dropout": 128,
    "vit_flax": 128,
    "gpt": 8,
    "lstm": 64,
    "gru": 64,
    "rnn": 64,
    "resnet": 256,
    "resnet50": 256,
    "resnet50_float16": 256,
    "resnet152": 128,
    "resnet152_float16": 128,
    "googlenet": 128,
    "inception4": 32,
    "mobilenet2": 128,
    "swint": 128,
    "convnext": 128,
    "unet": 16,
    "bert": 32,
    "dit": 128,
    "segmenter": 16,
    "t5": 32,
    "wavenet": 8,
}
"""The batch of each, where nothing else is asked for."""
