"""FSDP: weights and batch are split over a mesh; the budget is of each device. Try it on CPU devices:
XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/fsdp.py"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import vmem_jax

LAYERS, WIDTH, BATCH = 6, 64, 512
mesh = jax.make_mesh((jax.device_count(),), ("data",))
split = NamedSharding(mesh, PartitionSpec("data"))  # the first dimension, over all devices
keys = jax.random.split(jax.random.key(0), LAYERS)
weights = [jax.device_put(jax.random.normal(key, (WIDTH, WIDTH)) / 8, split) for key in keys]
batch = jax.device_put(jax.random.normal(jax.random.key(1), (BATCH, WIDTH)), split)


def train_step(weights, x):
    def loss(weights):
        y = x
        for i, w in enumerate(weights):
            with jax.named_scope(f"layer{i}"):
                y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.5 * g, weights, grads), value


step = vmem_jax.jit(train_step, budget=0.8, donate_argnums=0)
losses = []
for _ in range(3):
    weights, value = step(weights, batch)
    losses.append(float(value))
print("losses", losses, "on", jax.device_count(), "devices")
