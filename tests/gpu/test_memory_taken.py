"""Another process takes the card's memory between planning and running."""

from __future__ import annotations

import pytest
from processes import run_script

pytestmark = pytest.mark.gpu

HOLDER = """
    import os, sys
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
    import jax, jax.numpy as jnp

    held, nbytes = [], 1 << 32
    while nbytes >= 1 << 28:
        try:
            held.append(jax.block_until_ready(jnp.zeros(nbytes, "uint8")))
        except jax.errors.JaxRuntimeError:
            nbytes //= 2
    print("taken", flush=True)
    sys.stdin.read()
"""
"""Takes all but some hundred MiB."""


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_memory_that_another_process_takes_is_said_and_the_next_step_runs(donated, devices):
    run_script(
        f"""
        import jax, jax.numpy as jnp, numpy as np
        import vmem_jax
        from gpu.test_memory_taken import HOLDER
        from memory_gone import notes_without_memory, train
        from processes import meanwhile

        w, x = jnp.eye(1024) / 2, jnp.ones((1 << 18, 1024))
        given, other = w + 0, w + 0
        budgeted = vmem_jax.jit(train, budget="device", policy="exact", donate_argnums={donated})
        need = budgeted.lower(w, x).compile().need_nbytes
        assert need > 4 << 30, need
        with meanwhile(HOLDER):
            says = notes_without_memory(budgeted, given, x)
        assert f"planned to need {{need / 2**30:.2f}} GiB" in says, says
        assert "are not in use" in says and "another process holds" in says, says
        assert bool(jnp.isfinite(budgeted(other, x)).all())
        """,
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
    )
