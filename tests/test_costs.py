"""Costs of a step in sub-batches, from those of its batch as a whole."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import BACKWARD, FORWARD, Builder

from vmem_jax.core.cards import CARDS, machine_for
from vmem_jax.core.costs import Costs, Source, analytic, of_parts
from vmem_jax.core.program import BEGIN

H200 = CARDS["h200"].machine
LARGE = 2**30  # bytes, of which launches are no part


def program(kernels, nbytes=LARGE, sub_batches=1):
    """A step for each (layer, phase, op) of `kernels`, each reading what the one before it writes."""
    b = Builder()
    value = b.input(8)
    for layer, phase, op in kernels:
        value = b.step([value], nbytes, phase, op=op, fusible=True)
        times = 1 if op == BEGIN else sub_batches
        b.steps[-1] = dataclasses.replace(b.steps[-1], layer=layer, times=times)
    return b.program([value])


WHOLE = [
    ("a", FORWARD, "max"),
    ("b", FORWARD, "max"),
    ("b", FORWARD, "max"),
    ("b", BACKWARD, "max"),
]


def test_each_step_of_a_part_is_above_its_roofline_as_in_the_whole_batch():
    whole = program(WHOLE)
    factors = (2.0, 3.0, 5.0, 0.5)
    seconds = tuple(f * s for f, s in zip(factors, analytic(whole, H200).seconds, strict=True))
    measured = Costs("a card", seconds, sources=(Source.MEASURED,) * 4)
    # its first kernels changed places, and a boundary and a sum are new
    parts = program(
        [WHOLE[1], WHOLE[0], WHOLE[2], ("", FORWARD, BEGIN), WHOLE[3], ("b", BACKWARD, "add")],
        LARGE // 4,
        sub_batches=4,
    )
    found = of_parts(parts, H200, whole, measured)
    rooflines = analytic(parts, H200).seconds
    got = [s / roofline for s, roofline in zip(found.seconds, rooflines, strict=True)]
    together = sum(seconds) / sum(analytic(whole, H200).seconds)
    assert got == pytest.approx([3.0, 2.0, 5.0, together, 0.5, together])
    assert found.machine == "a card" and {*found.sources} == {Source.CALIBRATED}


def test_what_was_not_measured_is_the_roofline():
    whole, parts = program(WHOLE), program(WHOLE, LARGE // 2, sub_batches=2)
    found = of_parts(parts, H200, whole, analytic(whole, H200))
    assert found.seconds == pytest.approx(analytic(parts, H200).seconds) and found.sources == ()


@pytest.mark.parametrize("name", CARDS)
def test_every_card_has_rates_of_its_own(name):
    """A target is costed as itself: "a100-40gb" is neither an H200 nor the 80 GB card."""
    machine = machine_for(name)
    assert machine is CARDS[name].machine and machine.name == name
    if (hardware := CARDS[name].hardware) is not None:
        assert machine_for(hardware.title) is machine and machine.memory == hardware.memory_nbytes
    others = [card.machine for card in CARDS.values() if card.name != name]
    assert all(machine.bandwidth != other.bandwidth for other in others)


def test_an_unaligned_product_is_within_a_fifth_of_what_an_h200_took():
    """The three of GPT-2's head, 50,257 words: 1.32, 3.43 and 2.78 ms."""
    builder = Builder()
    x = builder.input(2 * 8192 * 1024)
    builder.step([x], 2 * 8192 * 50257, op="dot_general", flops=2 * 8192 * 1024 * 50257)
    step = dataclasses.replace(builder.steps[0], aligned=False, dtype="bfloat16")
    assert H200.seconds(step) == pytest.approx((1.32e-3 + 3.43e-3 + 2.78e-3) / 3, rel=0.2)


def test_what_a_device_sends_takes_its_time_in_each_iteration_of_a_loop():
    builder = Builder()
    builder.step([builder.input(8)], 8, op="dot_general")
    alone = builder.steps[0]
    sending = dataclasses.replace(alone, sent=2**20)
    more = H200.seconds(sending) - H200.seconds(alone)
    assert more == pytest.approx(2**20 / H200.between)
    loop = dataclasses.replace(alone, op="scan", body=(sending,), length=16)
    quiet = dataclasses.replace(loop, body=(alone,))
    assert H200.seconds(loop) - H200.seconds(quiet) == pytest.approx(16 * more)


@pytest.mark.parametrize(
    ("op", "megabytes", "gigaflops", "micros"),
    [
        ("reduce_max", 2149, 2.6, 685),
        ("reduce_sum", 3224, 5.3, 1019),
        ("convert_element_type", 3223, 4.7, 1091),
        ("select_n", 5372, 8.0, 1753),
        ("mul", 403, 0.2, 132),
        ("dot_general", 2189, 68.7, 765),  # few flops: it waits for memory
        ("dot_general", 1116, 68.7, 370),
        ("dot_general", 201, 274.9, 344),
    ],
)
def test_kernels_take_on_an_h100_what_a_trace_of_a_decoder_with_xlas_attention_has(
    op, megabytes, gigaflops, micros
):
    [step] = program([("attention", FORWARD, op)]).steps
    dtype = "bfloat16" if op == "dot_general" else ""
    work = {"nbytes": megabytes * 10**6, "flops": int(gigaflops * 1e9), "dtype": dtype}
    seconds = CARDS["h100"].machine.seconds(dataclasses.replace(step, **work))
    # the card was cool: products take 5 % longer in steady steps, which is what machines have
    assert seconds == pytest.approx(1e-6 * micros, rel=0.13)


@pytest.mark.parametrize(
    ("op", "megabytes", "as_long"),
    [("dot_general", 8.8, True), ("dot_general", 88, False), ("mul", 8.8, False)],
)
def test_products_of_recurrent_layers_take_as_long_on_an_h100_as_on_an_h200(op, megabytes, as_long):
    [step] = program([("cell", FORWARD, op)]).steps
    step = dataclasses.replace(step, nbytes=int(megabytes * 1e6), flops=10**8, dtype="bfloat16")
    h100, h200 = (CARDS[name].machine.seconds(step) for name in ("h100", "h200"))
    assert (h100 == pytest.approx(h200)) == as_long
    assert h100 >= h200


@pytest.mark.parametrize(("rows", "micros"), [(64, 2.40), (32, 2.19), (22, 2.09), (8, 1.85)])
def test_products_of_few_rows_take_what_traces_of_recurrent_layers_have(rows, micros):
    """Of 512 columns, 512 summed, in float32 on an H200; 9 % of them lie under other kernels. What
    reads such a product adds up the parts of its sum, and takes longer by a third of a latency."""
    n = 512
    work = {"nbytes": 4 * (2 * rows * n + n * n), "flops": 2 * rows * n * n, "dtype": "float32"}
    [step] = program([("cell", FORWARD, "dot_general")]).steps
    machine = CARDS["h200"].machine
    seconds = machine.seconds(dataclasses.replace(step, **work)) - machine.latency / 3
    assert seconds == pytest.approx(0.91e-6 * micros, rel=0.03)
