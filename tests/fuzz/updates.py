"""What a step does with its loss: the kinds of updates, derivatives and inference. One table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Made = tuple[Callable[..., Any], Any]
"""(step, the optimiser's first state)."""


def _optimised(transform: Any) -> Callable[..., Made]:
    def make(forward: Any, loss: Any, params: Any) -> Made:
        def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, x, y, key)
            updates, state = transform.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return step, transform.init(jax.tree.map(jnp.asarray, params))

    return make


def sgd(forward: Any, loss: Any, params: Any) -> Made:
    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y, key)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), state + 1, value

    return step, jnp.int32(0)


def averaged(forward: Any, loss: Any, params: Any) -> Made:
    """With a running average of the parameters, and a norm of the gradient as a metric."""

    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y, key)
        params = jax.tree.map(lambda p, g: p - 0.5 * g.astype(p.dtype), params, grads)
        state = jax.tree.map(lambda s, p: s * 0.9 + p * 0.1, state, params)
        norm = jnp.sqrt(sum([jnp.sum(g.astype(value.dtype) ** 2) for g in jax.tree.leaves(grads)]))
        return params, state, {"loss": value, "norm": norm}

    return step, params


def gradients(forward: Any, loss: Any, params: Any) -> Made:
    """Gradients to everything, inputs too; no update."""

    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        return jax.value_and_grad(loss, (0, 1))(params, x, y, key)

    return step, ()


def with_aux(forward: Any, loss: Any, params: Any) -> Made:
    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        def both(params: Any) -> Any:
            value = loss(params, x, y, key)
            return value, forward(params, x, key)

        (value, out), grads = jax.value_and_grad(both, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state, value, out

    return step, ()


def accumulated(forward: Any, loss: Any, params: Any) -> Made:
    """The user's own micro-batches: a scan of gradients over halves of the batch."""

    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        parts = 2 if x.shape[0] % 2 == 0 and x.shape[0] else 1
        split = lambda a: a.reshape(parts, a.shape[0] // parts, *a.shape[1:])
        pad = lambda a: jnp.concatenate([a] * parts) if parts > 1 else a

        def body(total: Any, part: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, pad(part[0]), pad(part[1]), key)
            return jax.tree.map(jnp.add, total, grads), value

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, values = lax.scan(body, zeros, (split(x), split(y)))
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, total), state, values.mean()

    return step, ()


def repeated(forward: Any, loss: Any, params: Any) -> Made:
    """Several steps in one call: a scan, in reverse, that carries parameters and their averages."""

    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        def body(carry: Any, scale: Any) -> Any:
            params, average = carry
            value, grads = jax.value_and_grad(loss)(params, x * scale.astype(x.dtype), y, key)
            params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
            average = jax.tree.map(lambda s, p: s * 0.9 + p * 0.1, average, params)
            return (params, average), value

        scales = jnp.array([1.0, 0.5, 0.25], jnp.float32)
        (params, state), values = lax.scan(body, (params, state), scales, reverse=True)
        return params, state, values

    return step, params


def penalty(forward: Any, loss: Any, params: Any) -> Made:
    """A second derivative: the loss holds the norm of the gradient to the inputs."""

    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        def total(params: Any) -> Any:
            value, slope = jax.value_and_grad(loss, 1)(params, x, y, key)
            return value + 0.1 * jnp.sum(slope.astype(value.dtype) ** 2)

        value, grads = jax.value_and_grad(total)(params)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), state, value

    return step, ()


def curvature(forward: Any, loss: Any, params: Any) -> Made:
    """The Hessian times the parameters, forwards over backwards."""

    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        slope = lambda params: jax.grad(loss)(params, x, y, key)
        return jax.jvp(slope, (params,), (jax.tree.map(lambda p: p * 0.1, params),))

    return step, ()


def per_sample(forward: Any, loss: Any, params: Any) -> Made:
    """Gradients of two losses by `vmap`, clipped, and summed: private training."""

    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        def one(scale: Any) -> Any:
            grads = jax.grad(loss)(params, x * scale.astype(x.dtype), y, key)
            return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]

        grads = jax.vmap(one)(jnp.array([1.0, 0.5], jnp.float32))
        return jax.tree.map(lambda p, g: p - 0.05 * g.sum(0), params, grads), state

    return step, ()


def inference(forward: Any, loss: Any, params: Any) -> Made:
    return lambda params, state, x, y, key: forward(params, x, key), ()


def evaluated(forward: Any, loss: Any, params: Any) -> Made:
    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        return {"loss": loss(params, x, y, key), "params": params, "unused": state + 1}

    return step, jnp.float32(1)


def unrelated(forward: Any, loss: Any, params: Any) -> Made:
    """A loss that does not depend on the parameters: their gradients are zeros."""

    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: loss(params, x, y, key))(params)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), state, value

    return step, ()


def integer(forward: Any, loss: Any, params: Any) -> Made:
    """With the gradient of an integer array among the results, which has no bytes."""

    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        scaled = lambda params, table: loss(params, x, y, key) * table.sum()
        return jax.value_and_grad(scaled, (0, 1), allow_int=True)(params, state)

    return step, jnp.arange(3)


_adam = optax.adam(
    1e-2, eps=1e-3
)  # with less it divides rounding by itself where a gradient is zero
_adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))
_momentum = optax.sgd(0.1, momentum=0.9, nesterov=True)
_decayed = optax.chain(optax.add_decayed_weights(0.01), optax.trace(0.9), optax.scale(-0.05))

UPDATES: dict[str, Callable[..., Made]] = {
    "sgd": sgd,
    "momentum": _optimised(_momentum),
    "adam": _optimised(_adam),
    "adamw": _optimised(_adamw),
    "decayed": _optimised(_decayed),
    "averaged": averaged,
    "gradients": gradients,
    "with_aux": with_aux,
    "accumulated": accumulated,
    "penalty": penalty,
    "curvature": curvature,
    "per_sample": per_sample,
    "inference": inference,
    "evaluated": evaluated,
    "unrelated": unrelated,
    "integer": integer,
}
"""A new kind is a function and one entry."""

LATER: dict[str, Callable[..., Made]] = {"repeated": repeated}
"""Kinds that a step in twenty has in place of its own: an entry above would change all steps."""

TRAINING = ("sgd", "momentum", "adam", "adamw", "averaged", "gradients", "with_aux")
"""Those that most steps are."""
