"""Steps whose arguments are Flax NNX's: modules, optimisers, variables and states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import vmem_jax

WIDTH, BATCH = 32, 256


def batch(n=BATCH):
    return jax.random.normal(jax.random.key(1), (n, WIDTH))


def assert_close(a, b, rtol=2e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * float(jnp.abs(y).max()))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        for layer in self.layers:
            x = self.drop(jnp.tanh(layer(x)) * x)
        return self.norm(x)


def step(model, optimizer, x):
    # not the square alone: its mean is 1 behind a normalisation, and gradients are rounding errors
    loss, grads = nnx.value_and_grad(lambda m: jnp.square(jnp.tanh(m(x))).mean())(model)
    optimizer.update(model, grads)
    return loss


def test_objects_are_updated_in_place():
    def make():
        model = Net(nnx.Rngs(0, dropout=1))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    mine, theirs = make(), make()
    layer = mine[0].layers[0]
    budgeted, plain = vmem_jax.jit(step, budget=0.8), nnx.jit(step)
    for _ in range(3):
        assert_close(budgeted(*mine, batch()), plain(*theirs, batch()), 1e-4)
    assert mine[0].layers[0] is layer and int(mine[0].calls[...]) == 3

    def keys(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    for a, b in zip(mine, theirs, strict=True):
        states = [jax.tree.map(keys, jax.tree.leaves(nnx.state(m))) for m in (a, b)]
        assert_close(*states, 1e-3)


def test_with_a_tuple_among_the_arguments():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    budgeted = vmem_jax.jit(lambda model, batch: model(batch[0]) + batch[1], budget="1GiB")
    args = model, (jnp.ones((1, 2)), jnp.ones(2))
    assert_close(budgeted(*args), model(args[1][0]) + args[1][1])


def test_plan_from_shapes_alone():
    def make():
        model = Net(nnx.Rngs(0, dropout=1))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), {"x": batch()}

    def step_of_dict(model, optimizer, batch):
        return step(model, optimizer, batch["x"])

    budgeted = vmem_jax.jit(step_of_dict, budget=0.8)
    assert budgeted.plan(*nnx.eval_shape(make)) == budgeted.plan(*make())
    entry = budgeted._entry_for(make(), {}, None)
    labels = [b.label for b in entry.traced.captured.program.buffers]
    assert "model['layers'][0]['kernel'] float32[32,32]" in labels
    assert "batch['x'] float32[256,32]" in labels


def test_does_not_trace_again():
    traces = []

    def counted(model, x):
        traces.append(1)
        return model(x).sum()

    budgeted = vmem_jax.jit(counted, budget="1GiB")
    model = Net(nnx.Rngs(0))
    for _ in range(3):
        budgeted(model, batch())
    assert traces == [1]
    model.eval()
    budgeted(model, batch())
    assert traces == [1, 1]


# -- what comes back: nothing that the caller has already


def compiled(budgeted, *args):
    """XLA's sizes of the compiled step, in bytes."""
    return budgeted.lower(*args).compile().memory_analysis()


class Adapted(nnx.Module):
    """A frozen layer, and one that is trained beside it."""

    def __init__(self, rngs):
        self.base = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.adapter = nnx.LoRAParam(jnp.zeros((WIDTH, 1)))

    def __call__(self, x):
        return jnp.tanh(self.base(x)) + x @ self.adapter[...]


def adapted_step(model, x):
    loss = lambda model: jnp.square(model(x)).mean()
    value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    model.adapter[...] -= 0.1 * grads["adapter"][...]
    return value


def test_frozen_arrays_do_not_come_back():
    mine, theirs = Adapted(nnx.Rngs(0)), Adapted(nnx.Rngs(0))
    budgeted, plain = vmem_jax.jit(adapted_step, budget=1.0), nnx.jit(adapted_step)
    kernel = mine.base.kernel[...]
    for _ in range(2):
        assert_close(budgeted(mine, batch()), plain(theirs, batch()))
    assert mine.base.kernel[...] is kernel
    assert_close(nnx.state(mine), nnx.state(theirs))
    assert np.abs(mine.adapter[...]).max() > 0
    # the adapter and the loss; XLA adds a pointer for each
    assert compiled(budgeted, mine, batch()).output_size_in_bytes < kernel.nbytes / 2


def test_donated_arrays_come_back_where_they_were():
    mine, theirs = Adapted(nnx.Rngs(0)), Adapted(nnx.Rngs(0))
    budgeted = vmem_jax.jit(adapted_step, budget=1.0, donate_argnums=0)
    sizes = compiled(budgeted, mine, batch())
    assert sizes.alias_size_in_bytes >= mine.base.kernel[...].nbytes
    given = mine.base.kernel[...]
    for _ in range(2):
        assert_close(budgeted(mine, batch()), adapted_step(theirs, batch()))
    assert given.is_deleted()
    assert_close(nnx.state(mine), nnx.state(theirs))


def test_what_the_user_returns_comes_back_even_unchanged():
    model = Adapted(nnx.Rngs(0))
    budgeted = vmem_jax.jit(lambda model, x: (model.base.kernel[...], model), budget="1GiB")
    kernel, same = budgeted(model, batch())
    assert_close(kernel, model.base.kernel[...])
    assert kernel is not model.base.kernel[...]
    assert_close(nnx.state(same), nnx.state(model))


def test_a_state_is_a_pytree():
    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def functional(state, x):
        loss = lambda state: jnp.square(jnp.tanh(nnx.merge(graph, state)(x))).mean()
        loss, grads = jax.value_and_grad(loss, allow_int=True)(state)
        update = lambda p, g: p if g.dtype == jax.dtypes.float0 else p - 0.1 * g
        return jax.tree.map(update, state, grads), loss

    budgeted = vmem_jax.jit(functional, budget=1.0, donate_argnums=0)
    plain = jax.jit(functional, donate_argnums=0)
    mine, theirs = compiled(budgeted, state, batch()), compiled(plain, state, batch())
    assert mine.output_size_in_bytes == theirs.output_size_in_bytes
    assert mine.alias_size_in_bytes == theirs.alias_size_in_bytes > 0
    copy = jax.tree.map(jnp.copy, state)
    got, expected = budgeted(state, batch()), plain(copy, batch())
    assert isinstance(got[0], nnx.State)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert_close(got[1], expected[1], 1e-4)


def test_a_state_beside_a_module():
    model = Adapted(nnx.Rngs(0))
    other = nnx.state(Adapted(nnx.Rngs(1)))
    mixed = lambda model, other, x: (adapted_step(model, x), other["base"]["kernel"][...] * 2)
    budgeted = vmem_jax.jit(mixed, budget="1GiB")
    loss, doubled = budgeted(model, other, batch())
    assert_close(doubled, other["base"]["kernel"][...] * 2)
    assert_close(loss, adapted_step(Adapted(nnx.Rngs(0)), batch()))
    assert np.abs(model.adapter[...]).max() > 0
