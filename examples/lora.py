"""LoRA: frozen weights are an argument of their own, so only the small matrices have gradients."""

import jax
import jax.numpy as jnp
import optax

import vmem_jax

LAYERS, WIDTH, RANK, BATCH = 6, 64, 4, 512
optimizer = optax.adam(1e-3)
keys = jax.random.split(jax.random.key(0), 2 * LAYERS)
frozen = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[:LAYERS]]
adapters = [
    (0.01 * jax.random.normal(key, (WIDTH, RANK)), jnp.zeros((RANK, WIDTH)))
    for key in keys[LAYERS:]
]
state = adapters, optimizer.init(adapters)


def train_step(state, frozen, batch):
    adapters, moments = state
    x, wanted = batch

    def loss(adapters):
        y = x
        for i, (w, (a, b)) in enumerate(zip(frozen, adapters, strict=True)):
            with jax.named_scope(f"layer{i}"):  # the names of reports
                y = jnp.tanh(y @ w + y @ a @ b)
        return jnp.mean((y - wanted) ** 2)

    value, grads = jax.value_and_grad(loss)(adapters)
    updates, moments = optimizer.update(grads, moments)
    return (optax.apply_updates(adapters, updates), moments), value


step = vmem_jax.jit(train_step, budget=0.8, donate_argnums=0)
batch = jax.random.normal(jax.random.key(1), (BATCH, WIDTH)), jnp.zeros((BATCH, WIDTH))
losses = []
for _ in range(3):
    state, value = step(state, frozen, batch)
    losses.append(float(value))
print("losses", losses)
