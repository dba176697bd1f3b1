"""Equinox: a module is an argument as it is, and Optax sees its arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import vmem_jax

LAYERS, WIDTH, BATCH = 6, 64, 1024
optimizer = optax.adam(1e-3)


def train_step(model, moments, x, y):
    @eqx.filter_value_and_grad
    def loss(model):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    value, grads = loss(model)
    updates, moments = optimizer.update(grads, moments)
    return eqx.apply_updates(model, updates), moments, value


step = vmem_jax.jit(train_step, budget=0.7, donate_argnums=(0, 1))
model = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, LAYERS, jax.nn.gelu, key=jax.random.key(0))
moments = optimizer.init(eqx.filter(model, eqx.is_array))
x, y = jax.random.normal(jax.random.key(1), (BATCH, WIDTH)), jnp.zeros((BATCH, WIDTH))
losses = []
for _ in range(3):
    model, moments, value = step(model, moments, x, y)
    losses.append(float(value))
print("losses", losses)
