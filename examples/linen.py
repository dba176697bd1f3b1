"""Flax Linen with its TrainState, which is donated."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import vmem_jax

LAYERS, WIDTH, BATCH = 6, 64, 1024


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(LAYERS):
            x = nn.gelu(nn.Dense(WIDTH, name=f"layer{i}")(x))
        return x


def train_step(state, x, y):
    loss = lambda params: jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)
    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


step = vmem_jax.jit(train_step, budget=0.7, donate_argnums=0)
x, y = jax.random.normal(jax.random.key(1), (BATCH, WIDTH)), jnp.zeros((BATCH, WIDTH))
model = MLP()
params = model.init(jax.random.key(0), x)["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
losses = []
for _ in range(3):
    state, value = step(state, x, y)
    losses.append(float(value))
print("losses", losses)
