"""What products have in memory while they run: cuBLAS's bytes, and the parts they are made in."""

from __future__ import annotations

import re
import types

import jax
import jax.numpy as jnp
import pytest
from built import needs_cuda

import vmem_jax
from vmem_jax.api import jit
from vmem_jax.capture import capture
from vmem_jax.capture.capture import capture_pair
from vmem_jax.capture.loop_pairs import find_pairs
from vmem_jax.capture.product_workspaces import LARGE_FLOPS, Products, Size, products_on
from vmem_jax.core.cards import CARDS
from vmem_jax.core.costs import analytic
from vmem_jax.core.simulate import simulate
from vmem_jax.devices import device
from vmem_jax.jax_compat import SPLITS_PRODUCTS

HOPPER = 32 << 20
ROWS, WIDTH = 8192, 1024  # a product of 17 GFLOP
X, W = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((ROWS, WIDTH), (WIDTH, WIDTH)))


def captured(fun, *args, most=HOPPER, **options):
    closed = jax.jit(fun).trace(*args).jaxpr
    return capture(closed, platform="gpu", products=Products(most), **options)


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
    assert products_on(capability, 132, is_there=True, large=False).most == nbytes
    assert products_on(capability, 132, is_there=False, large=False).most == 0


def test_large_products_have_one_and_small_ones_none():
    assert workspaces(product, *wide(32768, 1024, 1024)) == [HOPPER]
    small = int(LARGE_FLOPS) // (2 * 1024 * 1024) // 2
    assert workspaces(product, *wide(small, 1024, 1024)) == [0]
    assert workspaces(product, *wide(32768, 1024, 1024), most=0) == [0]


def test_it_is_as_large_whatever_the_operands_are():
    assert workspaces(product, X, W) == [HOPPER] > [2 * (X.size + W.size)]


def test_batched_products_and_those_of_one_device_of_several():
    heads = jax.ShapeDtypeStruct((64, 1024, 512), "bfloat16")
    scores = lambda q, k: jnp.einsum("bqd,bkd->bqk", q, k)
    assert workspaces(scores, heads, heads) == [HOPPER]
    mesh = jax.sharding.AbstractMesh((16,), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = [*wide(32768, 1024, 1024)]  # 4.3 GFLOP of each device
    assert workspaces(product, *args, shardings=(split, whole)) == [HOPPER]
    args = [*wide(8192, 1024, 1024)]
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
    assert given().inputs.products.most == 0  # a CPU
    assert given("h100").inputs.products.most == 0
    card = types.SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)
    for module in (device, jit):
        monkeypatch.setattr(module, "devices_of", lambda avals: [card])
    assert given().inputs.products.most == HOPPER
    assert [s.workspace for s in given().program.steps] == [HOPPER]
    assert given("h100").inputs.products.most == 0


def test_small_results_are_made_in_parts():
    """XLA's formula: as many parts as keep all multiprocessors at work, where adding them up costs
    less."""
    h200 = Products(cores=132, major=9)
    parts = lambda rows, columns, inner: h200.parts(Size(1, rows, columns, inner, 4, 4, 4, 4))
    assert parts(1000, 512, 8192) == 4 and parts(64, 64, 100_000) == 128
    assert parts(4096, 4096, 8192) == 1  # it occupies the card
    assert parts(512, 512, 16) == 1  # nothing to split
    assert parts(0, 512, 8192) == 1
    assert Products(cores=108, major=8).parts(Size(1, 512, 512, 4096, 4, 4, 4, 4)) > 1
    assert Products().parts(Size(1, 1000, 512, 8192, 4, 4, 4, 4)) == 1


def test_parts_lie_beside_what_is_read_in_the_type_of_sums():
    args = [*wide(1024, 8192, 1024)]
    h200 = Products(cores=132, major=9)
    closed = jax.jit(product).trace(*args).jaxpr
    [step] = capture(closed, platform="gpu", products=h200).program.steps
    assert step.workspace == 2 * 1024 * 1024 * 4 - 1024 * 1024 * 2
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    split = {"shardings": (whole, whole), "products": h200, "platform": "gpu"}
    assert [s.workspace for s in capture(closed, **split).program.steps] == [0]


def test_programs_without_triton_have_none():
    size = Size(1, 512, 512, 4096, 4, 4, 4, 4)
    parts = lambda **card: products_on("9.0", 132, **card).parts(size)
    assert parts(large=True, is_there=False) == 1
    assert parts(large=True, is_there=True) == parts(large=False, is_there=False)
    assert (parts(large=False, is_there=False) > 1) == SPLITS_PRODUCTS


@pytest.mark.gpu_compile
def test_xla_makes_these_parts():
    needs_cuda()
    sizes = [(992, 224, 864), (240, 208, 14304), (1024, 1024, 8192), (2048, 2048, 4096)]
    args = [a for rows, columns, inner in sizes for a in wide(rows, inner, columns)]
    every = lambda *args: [x @ w for x, w in zip(args[::2], args[1::2], strict=True)]
    step = vmem_jax.jit(every, budget="1GiB", policy="exact").lower(*args)
    text = step.compile(target="h200").as_text()
    h200 = products_on("9.0", 132, is_there=False, large=False)
    for rows, columns, inner in sizes:
        parts = h200.parts(Size(1, rows, columns, inner, 2, 2, 4, 2))
        made = {int(n) for n in re.findall(rf"f32\[(\d+),{rows},{columns}\]", text)}
        assert made == ({parts} if parts > 1 else set())
