"""Training steps of many model families, small enough for a CPU: one table, `CASES`.

Every case is a step as its users write it (raw JAX, Linen with TrainState, NNX, Equinox; Optax),
and its arguments at a scale: 1 for the CPU, more for shapes that are only compiled. Data and
parameters come from NumPy: XLA compiles the libraries' initialisers for longer than the step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax

Args = tuple[Any, ...]

EPS = 1e-3
"""Adam's: with less it divides rounding noise by itself where a gradient is zero (a key's bias)."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One family.

    Attributes:
      name: the family.
      make: (dtype, scale) -> (step, arguments).
      jit: how plain JAX compiles it: `jax.jit`, `nnx.jit` or `eqx.filter_jit`.
      donate: arguments that the caller gives up.
      cpu, h200: the budget, as a fraction of plain jit's need there.
      h200_scale: the scale at which activations dominate on a GPU; 0 where it is not compiled.
    """

    name: str
    make: Callable[[Any, int], tuple[Callable, Args]]
    jit: Callable = jax.jit
    donate: tuple[int, ...] = (0,)
    cpu: float = 0.7
    h200: float = 0.7
    h200_scale: int = 8


def normal(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(np.float32(scale) * values).astype(dtype)


def labels(seed: int, count: int, classes: int = 10) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, classes, count), jnp.int32)


def filled(shapes: Any) -> Any:
    """Parameters for a tree of shapes: kernels of LeCun's variance, scales of one, zeros."""

    def fill(path: Any, x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(len(path))
        name = jax.tree_util.keystr(path)
        if len(x.shape) > 1:
            fan_in = np.prod(x.shape) / max(x.shape[0], x.shape[-1])
            return normal(sum(name.encode()), x.shape, x.dtype, fan_in**-0.5)
        one = any(word in name for word in ("scale", "var", "norms"))
        return jnp.asarray(np.full(x.shape, one and "bias" not in name, x.dtype))

    return jax.tree_util.tree_map_with_path(fill, shapes)


def filled_nnx(make: Callable[[], Any]) -> Any:
    """An NNX object as `make` makes it, with parameters of `filled`."""
    graph, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graph, filled(state))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def cast(tree: Any, dtype: Any) -> Any:
    floats = lambda x: eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(dtype) if floats(x) else x, tree)


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def kernel(seed: int, cin: int, cout: int, dtype: Any, size: int = 3) -> jax.Array:
    return normal(seed, (size, size, cin, cout), dtype, (2 / (size * size * cin)) ** 0.5)


# -- raw JAX


def make_vgg(dtype: Any, scale: int) -> tuple[Callable, Args]:
    """VGG: blocks of convolutions and max-pools, plain SGD, no library."""
    widths, cin, seed = ((16, 16), (32, 32), (32, 32)), 3, 0
    blocks = []
    for block in widths:
        layers = []
        for width in block:
            seed += 1
            layers.append((kernel(seed, cin, width, dtype), jnp.zeros(width, dtype)))
            cin = width
        blocks.append(layers)
    params = {"blocks": blocks, "dense": normal(99, (cin, 10), dtype, 0.1)}
    batch = (normal(100, (8 * scale, 32, 32, 3), dtype), labels(101, 8 * scale))

    def loss_of(params, batch):
        x, y = batch
        for i, block in enumerate(params["blocks"]):
            for j, (w, b) in enumerate(block):
                with jax.named_scope(f"conv{i}_{j}"):
                    x = jax.nn.relu(conv(x, w) + b)
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return cross_entropy(x.mean((1, 2)) @ params["dense"], y)

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - jnp.asarray(0.05, p.dtype) * g, params, grads), loss

    return step, (params, batch)


def make_lstm(dtype: Any, scale: int) -> tuple[Callable, Args]:
    """Two LSTM layers in `lax.scan`s, and a dense layer on every output."""
    width, length, count = 32, 16, 16 * scale
    cell = lambda seed: {
        "x": normal(seed, (width, 4 * width), dtype, width**-0.5),
        "h": normal(seed + 1, (width, 4 * width), dtype, width**-0.5),
        "b": jnp.zeros(4 * width, dtype),
    }
    params = {"cells": [cell(1), cell(3)], "out": normal(5, (width, 10), dtype, width**-0.5)}
    batch = (
        normal(6, (length, count, width), dtype),
        labels(7, length * count).reshape(length, count),
    )

    def layer(p, xs):
        def one(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((xs.shape[1], width), dtype)
        return lax.scan(one, (zero, zero), xs)[1]

    def loss_of(params, batch):
        xs, ys = batch
        for p in params["cells"]:
            xs = layer(p, xs)
        return cross_entropy(jax.nn.gelu(xs) @ params["out"], ys)

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - jnp.asarray(0.1, p.dtype) * g, params, grads), loss

    return step, (params, batch)


def make_autoencoder(dtype: Any, scale: int) -> tuple[Callable, Args]:
    """A convolutional autoencoder with Adam; outputs are the state, the loss and nothing more."""
    chain = (3, 16, 32, 32)
    down = [kernel(i, a, b, dtype) for i, (a, b) in enumerate(itertools.pairwise(chain))]
    up = [kernel(10 + i, a, b, dtype) for i, (a, b) in enumerate(itertools.pairwise(chain[::-1]))]
    params = {"down": down, "up": up}
    tx = optax.adam(1e-3, eps=EPS)
    images = normal(20, (8 * scale, 32, 32, 3), dtype)

    def loss_of(params, images):
        x = images
        for w in params["down"]:
            x = jnp.tanh(conv(x, w, 2))
        for i, w in enumerate(params["up"]):
            x = lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.silu(x) if i + 1 < len(params["up"]) else x
        return jnp.square(x - images).astype(jnp.float32).mean()

    def step(state, images):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, images)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return step, ((params, tx.init(params)), images)


def make_accumulate(dtype: Any, scale: int) -> tuple[Callable, Args]:
    """Gradients accumulated over two micro-batches in a Python loop."""
    step, (params, batch) = make_vgg(dtype, 2 * scale)
    del step
    halves = lambda x: x.reshape(2, x.shape[0] // 2, *x.shape[1:])

    def loss_of(params, x, y):
        for block in params["blocks"]:
            for w, b in block:
                x = jnp.maximum(conv(x, w) + b, 0)
            x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        return cross_entropy(x.mean((1, 2)) @ params["dense"], y)

    def step(params, batch):
        x, y = jax.tree.map(halves, batch)
        total, loss = jax.tree.map(jnp.zeros_like, params), 0.0
        for i in range(2):
            value, grads = jax.value_and_grad(loss_of)(params, x[i], y[i])
            total, loss = jax.tree.map(jnp.add, total, grads), loss + value / 2
        return jax.tree.map(lambda p, g: p - jnp.asarray(0.02, p.dtype) * g, params, total), loss

    return step, (params, batch)


# -- Flax Linen


class ResNet(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x):
        norm = lambda: nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)
        conv = lambda width, stride=1: nn.Conv(
            width, (3, 3), (stride, stride), use_bias=False, dtype=self.dtype
        )
        x = nn.relu(norm()(conv(16)(x)))
        for width, stride in ((16, 1), (32, 2), (32, 1)):
            y = nn.relu(norm()(conv(width, stride)(x)))
            y = norm()(conv(width)(y))
            if x.shape != y.shape:
                x = nn.Conv(width, (1, 1), (stride, stride), use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(x + y)
        return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2)))


class BatchNormState(TrainState):
    batch_stats: Any


def make_resnet(dtype: Any, scale: int) -> tuple[Callable, Args]:
    """ResNet with batch norm in Linen: TrainState with running statistics, momentum."""
    model = ResNet(dtype)
    batch = (normal(1, (8 * scale, 32, 32, 3), dtype), labels(2, 8 * scale))
    variables = filled(jax.eval_shape(model.init, jax.random.key(0), batch[0][:1]))
    state = BatchNormState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.05, momentum=0.9, nesterov=True),
    )

    def step(state, batch):
        def loss_of(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updated = state.apply_fn(variables, batch[0], mutable=["batch_stats"])
            accuracy = (logits.argmax(-1) == batch[1]).mean()
            return cross_entropy(logits, batch[1]), (accuracy, updated["batch_stats"])

        (loss, (accuracy, stats)), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=stats)
        return state, {"loss": loss, "accuracy": accuracy}

    return step, (state, batch)


class Transformer(nn.Module):
    dtype: Any
    width: int = 64
    layers: int = 2

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, self.width, dtype=self.dtype)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            y = nn.MultiHeadDotProductAttention(4, dtype=self.dtype, dropout_rate=0.1)(
                y, y, mask=mask, deterministic=False
            )
            x = x + nn.Dropout(0.1, deterministic=False)(y)
            y = nn.LayerNorm(dtype=self.dtype)(x)
            y = nn.Dense(self.width, dtype=self.dtype)(
                nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(y))
            )
            x = x + nn.Dropout(0.1, deterministic=False)(y)
        return nn.Dense(64, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


def make_transformer(dtype: Any, scale: int) -> tuple[Callable, Args]:
    """A language model in Linen: dropout, AdamW, clipped gradients, new-style keys."""
    model = Transformer(dtype)
    tokens = labels(3, 4 * scale * 65, 64).reshape(4 * scale, 65)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=EPS))
    variables = filled(jax.eval_shape(model.init, keys, tokens[:1, :-1]))
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)

    def step(state, tokens, key):
        def loss_of(params):
            logits = state.apply_fn(
                {"params": params},
                tokens[:, :-1],
                rngs={"dropout": jax.random.fold_in(key, state.step)},
            )
            return cross_entropy(logits, tokens[:, 1:])

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    return step, (state, tokens, jax.random.key(7, impl="rbg"))  # compiles fast


class Critic(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x):
        for width in (16, 32):
            x = nn.leaky_relu(nn.Conv(width, (4, 4), (2, 2), dtype=self.dtype)(x), 0.2)
        return nn.Dense(1, dtype=self.dtype)(x.reshape(x.shape[0], -1)).astype(jnp.float32)


class Generator(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, z):
        x = nn.Dense(8 * 8 * 32, dtype=self.dtype)(z).reshape(z.shape[0], 8, 8, 32)
        x = nn.relu(nn.ConvTranspose(16, (4, 4), (2, 2), dtype=self.dtype)(nn.relu(x)))
        return jnp.tanh(nn.ConvTranspose(3, (4, 4), (2, 2), dtype=self.dtype)(x))


def make_gan(dtype: Any, scale: int) -> tuple[Callable, Args]:
    """Two losses, two optimisers, two backward passes; the second reads the updated critic."""
    critic, generator = Critic(dtype), Generator(dtype)
    images = normal(1, (16 * scale, 32, 32, 3), dtype)
    z = normal(2, (16 * scale, 16), dtype)
    txs = {
        "critic": optax.adam(2e-4, b1=0.5, eps=EPS),
        "generator": optax.adam(1e-4, b1=0.5, eps=EPS),
    }
    params = {
        "critic": filled(jax.eval_shape(critic.init, jax.random.key(0), images[:1])),
        "generator": filled(jax.eval_shape(generator.init, jax.random.key(1), z[:1])),
    }
    state = (params, {name: tx.init(params[name]) for name, tx in txs.items()})

    def step(state, images, z):
        params, opt = state
        bce = optax.sigmoid_binary_cross_entropy

        def critic_loss(p):
            real = critic.apply(p, images)
            fake = critic.apply(p, generator.apply(params["generator"], z))
            return bce(real, jnp.ones_like(real)).mean() + bce(fake, jnp.zeros_like(fake)).mean()

        critic_value, grads = jax.value_and_grad(critic_loss)(params["critic"])
        updates, critic_opt = txs["critic"].update(grads, opt["critic"])
        new_critic = optax.apply_updates(params["critic"], updates)

        def generator_loss(p):
            fake = critic.apply(new_critic, generator.apply(p, z))
            return bce(fake, jnp.ones_like(fake)).mean()

        generator_value, grads = jax.value_and_grad(generator_loss)(params["generator"])
        updates, generator_opt = txs["generator"].update(grads, opt["generator"])
        new_generator = optax.apply_updates(params["generator"], updates)
        state = (
            {"critic": new_critic, "generator": new_generator},
            {"critic": critic_opt, "generator": generator_opt},
        )
        return state, (critic_value, generator_value)

    return step, (state, images, z)


class MixedNet(nn.Module):
    @nn.compact
    def __call__(self, x, dtype):
        for i in range(6):
            x = nn.Conv(24, (3, 3), dtype=dtype, name=f"conv{i}")(x)
            x = nn.gelu(nn.GroupNorm(4, dtype=dtype)(x))
        return nn.Dense(10, dtype=dtype)(x.mean((1, 2)))


def make_mixed(dtype: Any, scale: int) -> tuple[Callable, Args]:
    """Mixed precision by hand: float32 masters, a scaled loss, a step skipped on overflow."""
    model = MixedNet()
    batch = (normal(1, (8 * scale, 16, 16, 3), jnp.float32), labels(2, 8 * scale))
    init = functools.partial(model.init, dtype=jnp.float32)
    params = filled(jax.eval_shape(init, jax.random.key(0), batch[0][:1]))
    tx = optax.sgd(0.05, momentum=0.9)

    def step(state, batch):
        params, opt_state, scaling = state

        def loss_of(params):
            low = jax.tree.map(lambda p: p.astype(dtype), params)
            loss = cross_entropy(model.apply(low, batch[0].astype(dtype), dtype), batch[1])
            return loss * scaling, loss

        grads, loss = jax.grad(loss_of, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scaling, grads)
        finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        updates, new_opt = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        pick = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
        scaling = jnp.where(finite, scaling, scaling / 2)
        return (pick(new_params, params), pick(new_opt, opt_state), scaling), loss

    return step, ((params, tx.init(params), jnp.float32(128.0)), batch)


# -- Flax NNX


class InceptionBlock(nnx.Module):
    def __init__(self, cin: int, width: int, dtype: Any, rngs: nnx.Rngs):
        conv = lambda a, b, size: nnx.Conv(a, b, (size, size), dtype=dtype, rngs=rngs)
        self.one = conv(cin, width, 1)
        self.three = nnx.List([conv(cin, width, 1), conv(width, width, 3)])
        self.five = nnx.List([conv(cin, width // 2, 1), conv(width // 2, width, 5)])
        self.pooled = conv(cin, width, 1)

    def __call__(self, x):
        branches = [nnx.relu(self.one(x))]
        for branch in (self.three, self.five):
            y = x
            for layer in branch:
                y = nnx.relu(layer(y))
            branches.append(y)
        pooled = nnx.max_pool(x, (3, 3), (1, 1), "SAME")
        branches.append(nnx.relu(self.pooled(pooled)))
        return jnp.concatenate(branches, -1)


class Inception(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 16, (3, 3), dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            [InceptionBlock(16, 8, dtype, rngs), InceptionBlock(32, 8, dtype, rngs)]
        )
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(32, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = self.drop(block(x))
        return self.head(x.mean((1, 2)))


def nnx_step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
    def loss_of(model):
        return cross_entropy(model(batch["x"]), batch["y"])

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def make_inception(dtype: Any, scale: int) -> tuple[Callable, Args]:
    """Inception in NNX: branches, concatenation, overlapping pools, dropout; updated in place."""
    model = filled_nnx(lambda: Inception(dtype, nnx.Rngs(0, dropout=1)))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3, eps=EPS), wrt=nnx.Param)
    batch = {"x": normal(1, (8 * scale, 16, 16, 3), dtype), "y": labels(2, 8 * scale)}
    return nnx_step, (model, optimizer, batch)


class UNet(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        conv = lambda a, b: nnx.Conv(a, b, (3, 3), dtype=dtype, rngs=rngs)
        self.down = nnx.List([conv(3, 16), conv(16, 24)])
        self.norms = nnx.List(
            [nnx.BatchNorm(16, dtype=dtype, rngs=rngs), nnx.BatchNorm(24, dtype=dtype, rngs=rngs)]
        )
        self.middle = conv(24, 32)
        self.up = nnx.List([conv(32 + 24, 24), conv(24 + 16, 16)])
        self.out = conv(16, 10)

    def __call__(self, x):
        skips = []
        for layer, norm in zip(self.down, self.norms, strict=True):
            x = nnx.relu(norm(layer(x)))
            skips.append(x)
            x = nnx.max_pool(x, (2, 2), (2, 2))
        x = nnx.relu(self.middle(x))
        for layer in self.up:
            skip = skips.pop()
            x = jax.image.resize(x, (*skip.shape[:3], x.shape[-1]), "nearest")
            x = nnx.relu(layer(jnp.concatenate([x, skip], -1)))
        return self.out(x)


def make_unet(dtype: Any, scale: int) -> tuple[Callable, Args]:
    """U-Net in NNX: long skips, batch norm whose statistics are updated in place, dense labels."""
    model = filled_nnx(lambda: UNet(dtype, nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)
    count = 4 * scale
    batch = {
        "x": normal(1, (count, 32, 32, 3), dtype),
        "y": labels(2, count * 32 * 32).reshape(count, 32, 32),
    }
    return nnx_step, (model, optimizer, batch)


# -- Equinox


class DenseNet(eqx.Module):
    layers: list
    head: eqx.nn.Linear
    growth: int = eqx.field(static=True)

    def __init__(self, growth: int, depth: int, key: jax.Array):
        keys = jax.random.split(key, depth + 2)
        self.growth = growth
        self.layers = [eqx.nn.Conv2d(3, growth, 3, padding=1, key=keys[0])]
        for i in range(depth):
            cin = growth * (i + 1)
            self.layers.append(eqx.nn.Conv2d(cin, growth, 3, padding=1, key=keys[i + 1]))
        self.head = eqx.nn.Linear(growth * (depth + 1), 10, key=keys[-1])

    def __call__(self, x):
        found = [jax.nn.relu(self.layers[0](x))]
        for layer in self.layers[1:]:
            found.append(jax.nn.relu(layer(jnp.concatenate(found))))
        return self.head(jnp.concatenate(found).mean((1, 2)))


def eqx_step(tx: optax.GradientTransformation) -> Callable:
    def step(model, opt_state, batch):
        def loss_of(model):
            return cross_entropy(jax.vmap(model)(batch[0]), batch[1])

        loss, grads = eqx.filter_value_and_grad(loss_of)(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    return step


def make_densenet(dtype: Any, scale: int) -> tuple[Callable, Args]:
    """DenseNet in Equinox: every layer reads all before it; a static field."""
    model = cast(filled(eqx.filter_eval_shape(DenseNet, 8, 5, jax.random.key(0))), dtype)
    tx = optax.sgd(0.05, momentum=0.9)
    batch = (normal(1, (8 * scale, 3, 24, 24), dtype), labels(2, 8 * scale))
    return eqx_step(tx), (model, tx.init(eqx.filter(model, eqx.is_array)), batch)


class MixerBlock(eqx.Module):
    tokens: eqx.nn.MLP
    channels: eqx.nn.MLP
    norms: list

    def __init__(self, patches: int, width: int, key: jax.Array):
        a, b = jax.random.split(key)
        self.tokens = eqx.nn.MLP(patches, patches, 2 * patches, 1, jax.nn.gelu, key=a)
        self.channels = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=b)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]

    def __call__(self, x):
        x = x + jax.vmap(self.tokens)(jax.vmap(self.norms[0])(x).T).T
        return x + jax.vmap(self.channels)(jax.vmap(self.norms[1])(x))


class Mixer(eqx.Module):
    embed: eqx.nn.Linear
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Linear(48, 32, key=keys[0])
        self.blocks = [MixerBlock(64, 32, k) for k in keys[1:3]]
        self.head = eqx.nn.Linear(32, 10, key=keys[3])

    def __call__(self, patches):
        x = jax.vmap(self.embed)(patches)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(0))


def make_mixer(dtype: Any, scale: int) -> tuple[Callable, Args]:
    """MLP-Mixer in Equinox: activation functions among the leaves of the module."""
    model = cast(filled(eqx.filter_eval_shape(Mixer, jax.random.key(0))), dtype)
    tx = optax.adamw(1e-3, eps=EPS)
    batch = (normal(1, (16 * scale, 64, 48), dtype), labels(2, 16 * scale))
    return eqx_step(tx), (model, tx.init(eqx.filter(model, eqx.is_array)), batch)


CASES: tuple[Case, ...] = (
    Case("vgg", make_vgg, cpu=0.6, h200=0.55),
    Case("resnet", make_resnet, cpu=0.7, h200=0.75),
    Case("densenet", make_densenet, eqx.filter_jit, (), cpu=0.75, h200=0.9),
    Case("inception", make_inception, nnx.jit, (), cpu=0.8, h200=0.8),
    Case("unet", make_unet, nnx.jit, (), cpu=0.8, h200=0.8),
    Case("transformer", make_transformer, cpu=0.65, h200=0.6),
    Case("mixer", make_mixer, eqx.filter_jit, (), cpu=0.6, h200_scale=0),
    Case("lstm", make_lstm, cpu=1.0, h200_scale=0),
    Case("autoencoder", make_autoencoder, cpu=0.7, h200_scale=0),
    Case("gan", make_gan, cpu=0.65, h200_scale=0),
    Case("accumulate", make_accumulate, cpu=0.85, h200_scale=0),
    Case("mixed", make_mixed, cpu=0.7, h200=0.6),
)
"""A new family is a function and one row here."""


def arrays_of(tree: Any) -> list[np.ndarray]:
    """The arrays of anything that a step takes or returns, NNX objects included, as float32."""
    is_node = lambda x: isinstance(x, nnx.Object)
    found: list[np.ndarray] = []
    for leaf in jax.tree.leaves(tree, is_leaf=is_node):
        leaves = jax.tree.leaves(nnx.state(leaf)) if is_node(leaf) else [leaf]
        for x in leaves:
            if not eqx.is_array(x):
                continue
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                x = jax.random.key_data(x)
            found.append(np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x))
    return found
