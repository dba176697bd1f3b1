"""The costs without a profile beside what cards took: kernels by their shapes, and whole steps."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import jax
import pytest

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.capture.kernel_gradients import as_misread
from vmem_jax.core.cards import CARDS
from vmem_jax.core.costs import analytic
from vmem_jax.models import job
from vmem_jax.policy.exact import Exact

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import rates
from step_models import MODELS

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"

# -- kernels: kind -> (median error, largest error) of those that take 20 us or more. Alone, a norm, a
# softmax, AdamW and a dropout are one kernel each; in steps they are not.

KINDS = {
    "product": (0.07, 0.35),
    "attention": (0.08, 0.2),
    "convolution": (0.12, 0.75),
    "depthwise": (0.15, 0.5),
    "add": (0.1, 0.25),
    "gelu": (0.06, 0.08),
    "heads": (0.05, 0.05),
    "transpose": (0.05, 0.05),
    "rotary": (0.05, 0.05),
    "stacked heads": (0.2, 0.2),
    "cuDNN's attention": (0.05, 0.12),
}
NARROW = {("h200", "convolution"): (0.13, 0.75)}
"""Of a card whose rows have convolutions of few channels, and with sums behind them, too."""
CUDNN = "cuDNN's attention"  # timed on the H200 alone, and traced where CUDA is
SLOWER_IN_A_STEP = {"product": 1.05, "attention": 1.05, CUDNN: 1.05}  # the rows' cards were cool
TIMED_ON_H100 = ("rotary", "stacked heads")  # alone


def rows(name):
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def kind_of(row):
    if row["kind"] == "attention":
        return CUDNN
    if row["kind"] == "convolution":
        return "convolution" if row["groups"] == 1 else "depthwise"
    return row.get("name") or ("attention" if row["batch"] > 1 else "product")


@pytest.mark.parametrize(
    ("card", "kind"),
    [("h100", kind) for kind in KINDS if kind != CUDNN]
    + [("h200", kind) for kind in KINDS if kind not in (*TIMED_ON_H100, CUDNN)]
    + [pytest.param("h200", CUDNN, marks=pytest.mark.gpu_compile)],
)
def test_kernels_take_what_the_card_took(card, kind):
    errors, timed = [], rows(f"rates_{card}")
    others = rates.attentions() if kind == CUDNN else (*rates.convolutions(), *rates.passes())
    for case in (*rates.products(["bfloat16"]), *others):
        about = json.loads(json.dumps(case.row))
        row = next((row for row in timed if about.items() <= row.items()), None)
        if row is None or kind_of(row) != kind or row["us"] < 20 or 50257 in about.values():
            continue
        closed = jax.jit(case.call).trace(*case.shapes).jaxpr
        found = capture(closed, platform="gpu")
        costs = analytic(found.program, CARDS[card].machine)
        predicted = sum(as_misread(costs, found.program, found.misread).seconds)
        expected = row["us"] * SLOWER_IN_A_STEP.get(kind, 1)
        errors.append(abs(1e6 * predicted / expected - 1))
    median, most = NARROW.get((card, kind), KINDS[kind])
    assert statistics.median(errors) <= median and max(errors) <= most


# -- steps by `exact`: name -> (step, shapes, milliseconds)


def network(name, batch):
    work = job(name, batch=batch, dtype="bfloat16")
    [row] = [
        r
        for r in rows("h200_recompute")
        if (r["model"], r["batch"], r["variant"]) == (name, batch, "exact")
    ]
    shapes = work.state_shapes(), work.batch
    return work.step, shapes, 1e3 * statistics.median(row["step_seconds"])


def trained(name, batch, way="1.0", card="h200", scans=False, **options):
    """By the last row of that way."""
    given = MODELS[name]("plain", batch, **options)
    about = name, way, batch, options.get("scanned", scans)
    others = ("layers", "stacked", "tokens", "attention", "mesh")
    *_, row = [
        r
        for r in rows(f"training_steps_{card}")
        if (r["model"], r["way"], r["batch"], r["scanned"]) == about
        and all(r.get(key) == options.get(key) for key in others)
        and "ms" in r
    ]
    shapes = (jax.eval_shape(made, jax.random.key(0)) for made in (given.init, given.batch))
    return given.step, tuple(shapes), row["ms"]


STEPS = {
    "resnet50": lambda: network("resnet50", 256),
    "resnet152": lambda: network("resnet152", 128),
    "vgg16": lambda: network("vgg16", 256),
    "vgg116": lambda: network("vgg116", 32),
    "vit": lambda: trained("vit_dropout", 128, scanned=False, stacked=False),
    "vit in 64 images": lambda: trained("vit", 64, scanned=False, stacked=False),
    "gpt": lambda: trained("gpt", 8, scanned=False, stacked=False),
    "dit": lambda: trained("dit", 128, "exact"),
    "segmenter": lambda: trained("segmenter", 16, "exact"),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_take_what_an_h200_took(name):
    step, shapes, taken = STEPS[name]()
    assert predicted_ms("h200", step, shapes) == pytest.approx(taken, rel=0.1)


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_short_iterations_take_what_the_card_took(card):
    """Some 10 kernels of 1 to 4 us each, and one that counts them."""
    step, shapes, taken = trained("lstm", 64, "exact", card=card, scanned=True)
    assert predicted_ms(card, step, shapes) == pytest.approx(taken, rel=0.05)


CUDA = pytest.mark.gpu_compile  # cuDNN's attention is traced there


@pytest.mark.parametrize(
    ("card", "name", "batch"),
    [
        ("h100", "gpt", 8),
        ("h100", "vit", 64),
        ("h200", "gpt", 8),
        ("h200", "vit", 64),
        ("h200", "resnet", 256),
        *(pytest.param(card, "decoder", 8, marks=CUDA) for card in ("h100", "h200")),
        *(pytest.param(card, "lora", 8, marks=CUDA) for card in ("h100", "h200")),
    ],
)
def test_scanned_layers_by_plain_jit_take_what_the_card_took(card, name, batch):
    """With the zeros in their stacks; without, they are up to 12 % too fast."""
    step, shapes, taken = trained(name, batch, "plain", card, scans=True)
    context = vmem_jax.jit(step, budget=1, donate_argnums=0).context(shapes, {}, card)
    assert 1e3 * sum(context.plain_costs.seconds) == pytest.approx(taken, rel=0.1)


def predicted_ms(card, step, shapes):
    """Of a step by `exact`."""
    state, data = map(jax.tree.leaves, shapes)
    donated = [True] * len(state) + [False] * len(data)
    captured = capture(jax.jit(step).trace(*shapes).jaxpr, (), donated, platform="gpu")
    costs = analytic(captured.program, CARDS[card].machine)
    return 1e3 * Exact().plan(captured.program, costs, None).predicted_seconds
