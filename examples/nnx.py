"""Flax NNX: the model and its optimiser are arguments, updated in place as with `nnx.jit`."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import vmem_jax

LAYERS, WIDTH, BATCH = 6, 64, 1024


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return x


def train_step(model, optimizer, x, y):
    loss = lambda model: jnp.mean((model(x) - y) ** 2)
    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


step = vmem_jax.jit(train_step, budget=0.7, donate_argnums=(0, 1))
model = MLP(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
x, y = jax.random.normal(jax.random.key(1), (BATCH, WIDTH)), jnp.zeros((BATCH, WIDTH))
losses = [float(step(model, optimizer, x, y)) for _ in range(3)]
print("losses", losses)
