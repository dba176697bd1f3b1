"""Where plans are timed: buffers that are apart, in memory that is there, more than a cache holds."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolutions import convolution

from vmem_jax.conv import scratch as module
from vmem_jax.conv.scratch import Scratch
from vmem_jax.conv.slices import layouts, roles
from vmem_jax.core.convolution import Epilogue, Pass


def test_random_values_are_drawn_in_few_sizes():
    sizes = {module._eighths(n) for n in range(1 << 10, 1 << 20, 97)}
    assert len(sizes) <= 10 * 8 + 1
    assert all(n <= module._eighths(n) <= 1.25 * n for n in (3, 100, 12345, 1 << 33))


@pytest.mark.parametrize("which", Pass)
@pytest.mark.parametrize(("batch", "count"), [(1, 4), (64, 3)])
def test_sets_are_apart_and_fill_the_cache(which, batch, count, monkeypatch):
    c = dataclasses.replace(convolution(batch), which=which, features_in=4, features_out=8)
    shapes = layouts(c)
    nbytes = {role: 4 * math.prod(shape) for role, shape in shapes.items()}
    monkeypatch.setattr(module, "_CACHES", 5 * sum(nbytes.values()) // 2 if batch == 64 else 10**9)
    scratch = Scratch(jax.devices("cpu")[0])
    found = scratch.sets(c, 1000, 4)
    assert len(found) == count
    *operands, result = roles(which)
    taken = [(found[0][3], found[0][3] + 1000)]
    for *addresses, workspace, bias in found:
        assert (workspace, bias) == (found[0][3], 0)
        at = dict(zip("xwy", addresses, strict=True))
        taken += [(at[role], at[role] + nbytes[role]) for role in at]
        assert all(at[role] % 256 == found[0]["xwy".index(role)] % 256 for role in at)
        # as a second micro-batch's, whose first value stands behind one sample of the first
        base = {result: scratch._bytes}.get
        one = {role: n if role == "w" else n // batch for role, n in nbytes.items()}
        for role in at:
            memory = base(role, scratch._values["float32"]).unsafe_buffer_pointer()
            assert (at[role] - memory) % 256 == one[role] % 256
    taken.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
    values, written = scratch._values["float32"], scratch._bytes
    spans = {
        role: (array.unsafe_buffer_pointer(), array.unsafe_buffer_pointer() + array.nbytes)
        for role, array in [*((role, values) for role in operands), (result, written)]
    }
    for addresses in found:
        for role, address in zip("xwy", addresses, strict=False):
            low, high = spans[role]
            assert low <= address and address + nbytes[role] <= high
    biased = c.with_epilogue(Epilogue.BIAS)
    assert all(w == bias for _, w, _, _, bias in scratch.sets(biased, 1000, 4))
    assert np.std(values) > 0.9 and jnp.unique(values[:100]).size > 90
    assert scratch.sets(c, 10, 4)[0][0] == found[0][0]  # nothing new is taken for less


def test_scale_bias_and_sums_have_memory_of_their_own():
    c = dataclasses.replace(
        convolution(1), features_in=8, features_out=6, epilogue=Epilogue.SUMS, prologue=True
    )
    found = Scratch(jax.devices("cpu")[0]).sets(c, 1000, 4)
    assert len(found) == 4
    taken = [(found[0][3], found[0][3] + 1000)]
    for x, _, y, _, bias, scale, shift, sums, squares in found:
        assert bias == 0 and x <= scale and shift - scale == 8 * 4
        taken += [(y, y + 4 * math.prod(c.y_shape)), (sums, sums + 24), (squares, squares + 24)]
    taken.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
    backward = dataclasses.replace(c, which=Pass.BACKWARD_FILTER, epilogue=Epilogue.NONE)
    [*_, scale, shift, sums, squares] = Scratch(jax.devices("cpu")[0]).sets(backward, 0, 1)[0]
    assert shift - scale == 8 * 4 and sums == squares == 0
