"""Convolutions that normalise their operand, and sum their result, on a GPU. `pytest -m gpu`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolutions import of_a_residual_network

from vmem_jax.conv import cudnn
from vmem_jax.conv.prologue import normalising_convolution
from vmem_jax.conv.slices import layouts, roles, sums_of, whole, with_prologue
from vmem_jax.core.convolution import Configuration, Convolution, Epilogue, Micro, Pass

pytestmark = pytest.mark.gpu

BATCH = 12
LAYERS = {  # channels, kernel, strides
    "1×1": ((64, 32), 1, 1),
    "3×3": ((32, 64), 3, 1),
    "3×3, strides": ((32, 64), 3, 2),
    "1×1, strides": ((64, 32), 1, 2),
}


def layer(name: str, which: Pass, prologue: bool = True) -> Convolution:
    return of_a_residual_network(*LAYERS[name], (14, 16), BATCH, which, prologue=prologue)


def drawn(c: Convolution) -> list[np.ndarray]:
    """Operands, then scale and bias; of a bias far from zero it shows whether padding has it."""
    rng = np.random.default_rng(0)
    shapes = layouts(c)
    made = [rng.standard_normal(shapes[role]) for role in roles(c.which)[:2]]
    if c.prologue:
        made += [rng.standard_normal(c.features_in), 2 + rng.standard_normal(c.features_in)]
    return [a.astype(np.float16) for a in made]


def expected(c: Convolution, x, other, *vectors) -> list[np.ndarray]:
    """By XLA on the CPU: the prologue rounded, the products in float64, sums of what is rounded."""
    alone = dataclasses.replace(c, epilogue=Epilogue.NONE, prologue=False, dtype="float64")
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        if c.prologue:
            x = with_prologue(c, *map(jnp.asarray, (x, *vectors)))
        y = jax.jit(functools.partial(whole, alone))(*(np.float64(a) for a in (x, other)))
        sums = sums_of(c, y.astype(jnp.float16)) if c.epilogue else ()
        return [np.asarray(y), *map(np.asarray, sums)]


def off(result, wanted: np.ndarray) -> float:
    assert result.shape == wanted.shape
    return float(np.abs(np.float64(result) - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("batches", [(BATCH,), (5, 1, 6)])
@pytest.mark.parametrize("which", [Pass.FORWARD, Pass.BACKWARD_FILTER])
@pytest.mark.parametrize("name", LAYERS)
def test_every_plan_is_right_or_refused(name, which, batches, device):
    """One that is taken gives what XLA's passes give."""
    c = layer(name, which)
    operands = drawn(c)
    wanted = expected(c, *operands)
    right = 0
    for n in range(len(cudnn.plans(c.with_batch(batches[0]), device))):
        micros = []
        for batch in batches:
            plans = cudnn.plans(c.with_batch(batch), device)
            plan = plans[min(n, len(plans) - 1)]
            micros.append(Micro(batch, plan.engine, plan.knobs, plan.workspace, 0.0))
        try:
            for micro in micros:
                cudnn.check(c.with_batch(micro.batch), micro, device)
        except RuntimeError:
            continue
        call = functools.partial(normalising_convolution, c, Configuration(tuple(micros)))
        made = jax.jit(call)(*jax.device_put(operands, device))
        assert [off(a, b) < 5e-3 for a, b in zip(made, wanted, strict=True)] == [True] * len(made)
        right += 1
    assert right


@pytest.mark.parametrize("name", LAYERS)
def test_sums_alone(name, device):
    c = layer(name, Pass.FORWARD, prologue=False)
    operands = drawn(c)
    [plan, *_] = cudnn.plans(c, device)
    cudnn.check(c, plan, device)
    micro = Micro(BATCH, plan.engine, plan.knobs, plan.workspace, 0.0)
    call = functools.partial(normalising_convolution, c, Configuration((micro,)))
    made = jax.jit(call)(*jax.device_put(operands, device))
    for a, b in zip(made, expected(c, *operands), strict=True):
        assert off(a, b) < 5e-3


@pytest.mark.parametrize("which", [Pass.FORWARD, Pass.BACKWARD_FILTER])
def test_nothing_is_listed_in_bfloat16(which, device):
    assert not cudnn.plans(dataclasses.replace(layer("3×3", which), dtype="bfloat16"), device)
