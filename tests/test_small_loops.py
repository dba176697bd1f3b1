"""Small loops with barriers in them, on the CPU: XLA makes one kernel of such a loop, and the emitter
of that kernel aborts the process at a barrier. So each test has a process of its own."""

from __future__ import annotations

from processes import run_script

STEPS = """
    import jax
    import jax.numpy as jnp
    from jax import lax
    import vmem_jax

    def dense(w, x, y):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w.sum(1) - y) ** 2))(w)
        return w - 0.05 * grad, loss

    layer = jax.checkpoint(lambda x: jnp.tanh(jnp.sin(x)))

    def checkpointed(x):
        return jax.grad(lambda x: lax.fori_loop(0, 3, lambda i, c: layer(c), x).sum())(x)

    def close(got, expected):
        return jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, atol=1e-5), got, expected))

    args = jnp.ones((12, 4, 12)), jnp.ones((96, 12)), jnp.zeros((96, 12))
    parts = vmem_jax.jit(dense, budget=1 << 20, sub_batches=96)
    loop = vmem_jax.jit(checkpointed, budget=1 << 20)
"""


def test_loops_of_one_sample_and_of_checkpoints_compile_with_their_barriers():
    run_script(
        STEPS
        + """
    assert parts.lower(*args).compile().plan.sub_batches == 96
    for step, plain, given in ((parts, dense, args), (loop, checkpointed, (jnp.ones(8),))):
        text = step.lower(*given).compile().as_text()
        assert "while(" in text and "opt-barrier" in text
        assert close(step(*given), jax.jit(plain)(*given))
    """
    )


def test_the_same_loops_inlined_in_the_users_own_jit():
    """JAX's own options hold there, which remove the barriers before they meet that kernel."""
    run_script(
        STEPS
        + """
    for step, plain, given in ((parts, dense, args), (loop, checkpointed, (jnp.ones(8),))):
        assert close(jax.jit(lambda *a: step(*a))(*given), jax.jit(plain)(*given))
    """
    )
