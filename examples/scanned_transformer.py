"""A transformer whose layers are scanned: the plan chooses what the loops keep. Runs on a CPU."""

import jax
import jax.numpy as jnp
import optax

import vmem_jax

LAYERS, WIDTH, HEADS, TOKENS, BATCH = 4, 32, 4, 32, 8
optimizer = optax.adamw(1e-3)


def init(key):
    normal = lambda i, *shape: 0.1 * jax.random.normal(jax.random.fold_in(key, i), shape)
    params = {
        "qkv": normal(0, LAYERS, WIDTH, 3 * WIDTH),
        "out": normal(1, LAYERS, WIDTH, WIDTH),
        "up": normal(2, LAYERS, WIDTH, 4 * WIDTH),
        "down": normal(3, LAYERS, 4 * WIDTH, WIDTH),
    }
    return params, optimizer.init(params)


def layer(x, weights):
    q, k, v = (
        part.reshape(*x.shape[:2], HEADS, -1) for part in jnp.split(x @ weights["qkv"], 3, -1)
    )
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    x = x + mixed @ weights["out"]
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None


def train_step(state, batch):
    params, moments = state

    def loss(params):
        y, _ = jax.lax.scan(layer, batch, params)
        return jnp.mean((y[:, :-1] - batch[:, 1:]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, moments = optimizer.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


step = vmem_jax.jit(train_step, budget=0.8, donate_argnums=0)
state = init(jax.random.key(0))
batch = jax.random.normal(jax.random.key(1), (BATCH, TOKENS, WIDTH))
losses = []
for _ in range(3):
    state, value = step(state, batch)
    losses.append(float(value))
print("losses", losses)
