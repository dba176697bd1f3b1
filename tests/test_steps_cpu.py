"""Every model family on the CPU: inside its budget, with plain jit's results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import CASES, Case, arrays_of

import vmem_jax
from vmem_jax.core.need import need_nbytes

# In bfloat16 one family for each way to use it; tests/test_steps_h200.py compiles more of them in it.
IN_BFLOAT16 = ("vgg", "mixed")
# bfloat16 is rounded where a fusion ends, and fences end fusions: 8 bits of mantissa through two
# steps of batch norm differ visibly. Op by op all bits are the same (test_rewrite.py).
TOLERANCE = {jnp.float32: 1e-3, jnp.bfloat16: 0.25}
STEPS = 2


def run(step, args, case: Case) -> list[np.ndarray]:
    """All arrays after `STEPS` steps: results, and the arguments that are updated in place."""
    state, rest = args[0], args[1:]
    out = None
    for _ in range(STEPS):
        out = step(state, *rest)
        if case.jit is jax.jit:
            state = out[0]
        elif isinstance(out, tuple):  # Equinox: model, optimiser state, loss
            state, rest = out[0], (out[1], *rest[1:])
    return arrays_of((out, args[:2] if not isinstance(out, tuple) else ()))


def plain(case: Case, step, args):
    """(arrays, need in bytes) of plain jit; NNX and Equinox go through `keep`, the same program."""
    if case.jit is jax.jit:
        compiled = jax.jit(step, donate_argnums=case.donate).lower(*args).compile()
        return run(compiled, args, case), need_nbytes(compiled)
    kept = vmem_jax.jit(step, budget="8GiB", policy="keep", donate_argnums=case.donate)
    need = kept.lower(*args).compile().need_nbytes
    return run(kept, args, case), need


ROWS = [
    pytest.param(case, dtype, id=f"{case.name}-{jnp.dtype(dtype).name}")
    for dtype in (jnp.float32, jnp.bfloat16)
    for case in CASES
    if dtype == jnp.float32 or case.name in IN_BFLOAT16
]


@pytest.mark.parametrize("case, dtype", ROWS)
def test_step_fits_and_trains_as_plain_jit_does(case, dtype):
    step, args = case.make(dtype, 1)
    expected, plain_need = plain(case, step, args)
    budget = int(case.cpu * plain_need)
    budgeted = vmem_jax.jit(step, budget=budget, donate_argnums=case.donate)
    step, args = case.make(dtype, 1)  # the first arguments were donated or updated in place
    entry = budgeted._entry_for(args, {}, None)
    assert need_nbytes(entry.best.compiled) == entry.best.need <= budget
    assert entry.best.plan.fenced or case.cpu == 1.0
    got = run(budgeted, args, case)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if np.issubdtype(a.dtype, np.integer) or a.dtype == bool:
            np.testing.assert_array_equal(a, b)  # counters, and the keys of dropout
        else:
            scale = float(np.abs(b).max(initial=1e-3))
            np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[dtype] * scale)
