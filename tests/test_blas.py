"""The workspaces of products that cuBLAS computes on a card that is there."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

import vmem_jax
from vmem_jax.api import jit
from vmem_jax.capture import capture
from vmem_jax.capture.blas import LARGE_FLOPS, blas_workspace_nbytes
from vmem_jax.capture.capture import capture_pair
from vmem_jax.capture.loop_pairs import find_pairs
from vmem_jax.core.cards import CARDS
from vmem_jax.core.costs import analytic
from vmem_jax.core.simulate import simulate
from vmem_jax.devices import device

HOPPER = 32 << 20
ROWS, WIDTH = 8192, 1024  # a product of 17 GFLOP
X, W = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((ROWS, WIDTH), (WIDTH, WIDTH)))


def captured(fun, *args, most=HOPPER, **options):
    closed = jax.jit(fun).trace(*args).jaxpr
    return capture(closed, platform="gpu", blas_workspace=most, **options)


def workspaces(fun, *args, most=HOPPER, **options):
    return [
        s.workspace for s in captured(fun, *args, most=most, **options).program.steps if s.flops
    ]


def peak(program):
    costs = analytic(program, CARDS["h100"].machine)
    return simulate(program, range(len(program.steps)), costs).peak


def product(x, w):
    return x @ w


def wide(rows, inner, columns):
    """Operands of a product."""
    return (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((rows, inner), (inner, columns)))


@pytest.mark.parametrize(
    ("capability", "nbytes"),
    [("9.0", HOPPER), ("10.0", HOPPER), ("8.0", 4 << 20), ("", 0), ("gfx942", 0)],
)
def test_what_cards_have(capability, nbytes):
    assert blas_workspace_nbytes(capability) == nbytes


def test_large_products_have_one_and_small_ones_none():
    assert workspaces(product, *wide(32768, 1024, 1024)) == [HOPPER]
    small = int(LARGE_FLOPS) // (2 * 1024 * 1024) // 2
    assert workspaces(product, *wide(small, 1024, 1024)) == [0]
    assert workspaces(product, *wide(32768, 1024, 1024), most=0) == [0]


def test_it_is_no_larger_than_the_operands():
    assert workspaces(product, X, W) == [2 * (ROWS * WIDTH + WIDTH * WIDTH)]


def test_batched_products_and_those_of_one_device_of_several():
    heads = jax.ShapeDtypeStruct((64, 1024, 512), "bfloat16")
    scores = lambda q, k: jnp.einsum("bqd,bkd->bqk", q, k)
    assert workspaces(scores, heads, heads) == [HOPPER]
    mesh = jax.sharding.AbstractMesh((16,), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = [*wide(32768, 1024, 1024)]  # 4.3 GFLOP of each device
    each = 2 * (32768 // 16 * 1024 + 1024 * 1024)
    assert workspaces(product, *args, shardings=(split, whole)) == [each]
    args = [*wide(16384, 1024, 1024)]
    assert workspaces(product, *args, shardings=(split, whole)) == [0]


def test_the_peak_is_higher_only_where_such_a_product_runs_at_it():
    args = [*wide(32768, 1024, 1024)]
    programs = [captured(product, *args, most=most).program for most in (0, HOPPER)]
    without, own = map(peak, programs)
    assert own == without + HOPPER

    def later(x, w):  # the peak is where its result and that in order are there
        return jnp.sort(x @ w).sum()

    programs = [captured(later, *args, most=most).program for most in (0, HOPPER)]
    without, own = map(peak, programs)
    assert without == own


def test_in_loops():
    """In the body of a scan, of one that is differentiated, and of a while loop."""
    x, w = wide(32768, 1024, 1024)

    def scanned(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=4)[0]

    def until(x, w):
        return jax.lax.fori_loop(0, x[0, 0].astype(int), lambda _, x: x @ w, x)

    for fun in (scanned, until):
        without, own = (max(workspaces(fun, x, w, most=most)) for most in (0, HOPPER))
        assert own == without + HOPPER
    loss = lambda x, w: scanned(x, w).astype("float32").sum()
    found = captured(jax.grad(loss, 1), x, w)
    [pair] = find_pairs(found.separate)
    body = capture_pair(pair, None, found.inputs)[0].program
    assert [s.workspace for s in body.steps if s.op == "dot_general"] == [HOPPER] * 3


def test_only_a_card_that_is_there_has_one(monkeypatch):
    step = vmem_jax.jit(product, budget="1GiB")
    args = [*wide(32768, 1024, 1024)]
    given = lambda target=None: step.context(tuple(args), {}, target).traced.captured
    assert given().inputs.blas_workspace == 0  # a CPU
    assert given("h100").inputs.blas_workspace == 0
    card = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    for module in (device, jit):
        monkeypatch.setattr(module, "devices_of", lambda avals: [card])
    assert given().inputs.blas_workspace == HOPPER
    assert [s.workspace for s in given().program.steps] == [HOPPER]
    assert given("h100").inputs.blas_workspace == 0
