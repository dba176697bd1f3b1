"""Scales of dropout, which stand behind their masks in a rewritten step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.capture.flatten import flatten
from vmem_jax.rewrite.late_scales import with_late_scales

X = jnp.array([1.0, -3.5, 0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan, 3e38, -1e-40, 0.7] * 2)
KEPT = jnp.arange(20) < 10


def dropped(x, kept):
    return lax.select(kept, x / 0.9, jnp.zeros_like(x))


def inverted(x, kept):
    return lax.select(kept, jnp.zeros_like(x), x / 0.9)


def multiplied(x, kept):
    return jnp.where(kept, x * 1.25, 0.0)


def in_a_loop(x, kept):
    return lax.scan(lambda c, _: (dropped(c, kept), c.sum()), x, None, length=3)


def negative(x, kept):
    return jnp.where(kept, x / -0.9, 0.0)


def by_a_value(x, kept):
    return jnp.where(kept, x / x.max(), 0.0)


def beside_others(x, kept):
    return jnp.where(kept, x / 0.9, 1.0)


def beside_negative_zeros(x, kept):
    return jnp.where(kept, x / 0.9, -0.0)


def read_twice(x, kept):
    scaled = x / 0.9
    return jnp.where(kept, scaled, 0.0) + jnp.sin(scaled)


def returned(x, kept):
    scaled = x / 0.9
    return jnp.where(kept, scaled, 0.0), scaled


def order(closed):
    """The names of equations that select or scale, in order, with those of loops."""
    found = []
    for eqn in compat.open_jaxpr(closed).eqns:
        if eqn.primitive.name == "scan":
            found += order(eqn.params["jaxpr"])
        elif eqn.primitive.name in ("select_n", "div", "mul"):
            found.append(eqn.primitive.name)
    return found


@pytest.mark.parametrize("step", [dropped, inverted, multiplied, in_a_loop])
def test_what_is_kept_is_scaled_behind_the_mask_and_keeps_every_bit(step):
    closed = flatten(jax.make_jaxpr(step)(X, KEPT))
    late = with_late_scales(closed)
    assert order(closed)[-1] == "select_n" and order(late) == order(closed)[::-1]
    bits = lambda a: np.asarray(a).view(np.uint32)
    for a, b in zip(jaxpr_as_fun(late)(X, KEPT), jaxpr_as_fun(closed)(X, KEPT), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize(
    "step", [negative, by_a_value, beside_others, beside_negative_zeros, read_twice, returned]
)
def test_what_would_differ_or_is_read_elsewhere_stays(step):
    closed = flatten(jax.make_jaxpr(step)(X, KEPT))
    assert str(with_late_scales(closed)) == str(closed)
