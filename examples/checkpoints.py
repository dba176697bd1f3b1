"""Checkpoints by Orbax, and the plan beside them: a restarted run plans nothing and trains on."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import vmem_jax

LAYERS, WIDTH, BATCH = 6, 64, 1024
optimizer = optax.adam(1e-3)


def init(key):
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / 8 for k in jax.random.split(key, LAYERS)]
    return params, optimizer.init(params)


def train_step(state, x):
    def loss(params):
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    params, moments = state
    value, grads = jax.value_and_grad(loss)(params)
    updates, moments = optimizer.update(grads, moments)
    return (optax.apply_updates(params, updates), moments), value


folder = Path(tempfile.mkdtemp())
x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
state = init(jax.random.key(0))
step = vmem_jax.jit(train_step, budget=0.7, donate_argnums=0)
step.plan(state, x).save(folder / "plan.json")
state, first = step(state, x)
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "state", state)

# a new process begins here
plan = vmem_jax.Plan.load(folder / "plan.json")
step = vmem_jax.jit(train_step, plan=plan, donate_argnums=0)
with ocp.StandardCheckpointer() as checkpointer:
    state = checkpointer.restore(folder / "state", jax.eval_shape(init, jax.random.key(0)))
losses = [float(first)]
for _ in range(2):
    state, value = step(state, x)
    losses.append(float(value))
print("losses", losses)
