"""Small loops with barriers in them, on the CPU: XLA makes one kernel of such a loop, and the emitter
of that kernel aborts the process at a barrier. So each test has a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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

    def scanned(ws, x):
        once = lambda x, w: jnp.tanh(jnp.sin(x * w) + x)
        body = lambda x, w: (once(once(x, w), w), None)
        return jax.grad(lambda ws: lax.scan(body, x, ws)[0].sum())(ws)

    def close(got, expected):
        return jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, atol=1e-5), got, expected))

    args = jnp.ones((12, 4, 12)), jnp.ones((96, 12)), jnp.zeros((96, 12))
    parts = vmem_jax.jit(dense, budget=1 << 20, sub_batches=96)
    loop = vmem_jax.jit(checkpointed, budget=1 << 20, policy="exact")
    stacks = jnp.ones((8, 8)), jnp.ones(8)
    plan = vmem_jax.lowest(scanned, *stacks, allow=["recompute"]).plan
    assert plan.kept  # both loops stack less than plain's
    chosen = vmem_jax.jit(scanned, plan=plan)
    steps = [(parts, dense, args), (loop, checkpointed, (jnp.ones(8),)), (chosen, scanned, stacks)]
"""


def test_loops_of_one_sample_of_checkpoints_and_of_chosen_stacks_compile_with_their_barriers():
    run_script(
        STEPS
        + """
    assert parts.lower(*args).compile().plan.sub_batches == 96
    for step, plain, given in steps:
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
    for step, plain, given in steps:
        assert close(jax.jit(lambda *a: step(*a))(*given), jax.jit(plain)(*given))
    """
    )


def on_the_page():
    """The HLO and the Python block that docs/troubleshooting.md shows of the defect."""
    page = (Path(__file__).parents[1] / "docs/troubleshooting.md").read_text()
    section = page[page.index("## XLA:CPU aborts on barriers in small loops") :]
    return re.findall(r"^```\w*\n(.*?)^```$", section, re.M | re.S)


def instructions(hlo):
    """(shape, opcode) of each instruction, in order."""
    return re.findall(r"%\S+ = (\(?\w+\[.*?) ([a-z-]+)\(%", hlo)


def test_the_hlo_of_the_page_is_that_of_its_loop():
    shown, code = on_the_page()
    space = {}
    exec(code, space)
    text = space["compiled"].as_text()
    assert instructions(shown)[-1] == ("(f32[2]{0}, f32[2]{0})", "opt-barrier")
    made = iter(instructions(text))
    assert all(one in made for one in instructions(shown)), text


def test_without_the_second_option_that_loop_ends_the_process():
    """Once it does not, budgeted steps need not leave out the pass either (`FENCE_OPTIONS`)."""
    _, code = on_the_page()
    code = code.replace(",small-while-loop-hoisting", "")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode < 0 and "Check failed: buffer != nullptr" in run.stderr
