"""Which equation makes a value, and which ones read it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vmem_jax import jax_compat as compat
from vmem_jax.capture.def_use import makers, readers


def test_each_equation_counts_once_and_literals_are_nobodys():
    closed = jax.make_jaxpr(lambda x, y: (jnp.sin(x) * jnp.sin(x), x * x, y * 2.0))(1.0, 1.0)
    opened = compat.open_jaxpr(closed)
    eqns, [x, y] = opened.eqns, opened.invars
    made, read = makers(eqns), readers(eqns)
    assert all(v in eqns[i].outvars for v, i in made.items())
    assert len(made) == len(eqns) and not {x, y} & made.keys()
    assert read[y] == [len(eqns) - 1]
    assert read[x] == [i for i, eqn in enumerate(eqns) if x in eqn.invars]
    assert all(sorted({*found}) == found for found in read.values())
