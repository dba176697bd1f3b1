"""Stacks in pinned host memory that are split over devices: each fetches slices of its own shard."""

from __future__ import annotations

import json

import pytest
from processes import in_subprocess

STEP = """
import json, re
import jax, jax.numpy as jnp, numpy as np, optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import vmem_jax

EXACT = {{"xla_backend_optimization_level": 0}}
LAYERS, WIDTH, ROWS, SPEC, KIND = {layers}, {width}, {rows}, {spec}, AxisType.{kind}
MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(KIND,) * 2)
ADAM = optax.adamw(1e-3, eps=1e-3)
TX = optax.chain(optax.clip_by_global_norm(1e-3), ADAM) if {clipped} else ADAM

def step(state, x):
    w, s = state
    layer = lambda y, w: (y + jnp.tanh(y @ w), None)
    loss, grads = jax.value_and_grad(lambda w: jnp.square(lax.scan(layer, x, w)[0]).mean())(w)
    updates, s = TX.update(grads, s, w)
    return (optax.apply_updates(w, updates), s), loss

def sharding(a, hosted):
    kind = "pinned_host" if hosted and a.ndim == 3 else "device"
    return NamedSharding(MESH, SPEC if a.ndim == 3 else P(), memory_kind=kind)

rows = NamedSharding(MESH, P("data"))
budgeted = vmem_jax.jit(step, budget="1GiB", donate_argnums=0,
                        compiler_options=EXACT if {exact} else None)
collectives = lambda compiled: sorted({{*re.findall(
    r" (all-(?:reduce|gather|to-all)|collective-\\w+|reduce-scatter)\\S*\\(", compiled.as_text())}})
"""

RUN = """
rng = np.random.default_rng(0)
x = jax.device_put(rng.normal(0, 1, (ROWS, WIDTH)).astype("float32"), rows)
w = rng.normal(0, 0.2, (LAYERS, WIDTH, WIDTH)).astype("float32")

def after_two(hosted):
    place = lambda a: jax.device_put(np.asarray(a), sharding(a, hosted))
    state = jax.tree.map(place, (w, TX.init(w)))
    before = [a.sharding for a in jax.tree.leaves(state)]
    entry = budgeted._entry_for((state, x), {}, None)
    for _ in range(2):
        state, loss = budgeted(state, x)
    stays = [a.sharding.is_equivalent_to(b, a.ndim) and a.sharding.memory_kind == b.memory_kind
             for a, b in zip(jax.tree.leaves(state), before, strict=True)]
    return entry, [np.asarray(a) for a in jax.tree.leaves((state, loss))], all(stays)

ours, values, stays = after_two(True)
other, expected, _ = after_two(False)
captured = ours.traced.captured
print(json.dumps({
    "same": all(map(np.array_equal, values, expected)),
    "close": all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(values, expected)),
    "stays": stays,
    "sliced": len(captured.sliced),
    "why": [each.why for each in captured.whole],
    "needs": [ours.best.need, ours.best.predicted_need],
    "collectives": [collectives(each.best.compiled) for each in (ours, other)],
}))
"""


def report(script, spec, *, clipped=False, kind="Auto", exact=False, sizes=(16, 64, 8)):
    layers, width, rows = sizes
    parts = {"spec": spec, "clipped": clipped, "kind": kind, "exact": exact}
    text = STEP.format(layers=layers, width=width, rows=rows, **parts) + script
    return json.loads(in_subprocess(text, 4).splitlines()[-1])


@pytest.mark.parametrize(
    ("spec", "clipped"),
    [("P()", False), ('P(None, "data")', True), ('P(None, None, "model")', False)],
    ids=["data parallel", "fully sharded, behind a norm", "tensor parallel"],
)
def test_slices_of_shards_come_and_go_and_results_are_the_same(spec, clipped):
    """To the bit where no device has part of a product; there XLA rounds in other fusions."""
    found = report(RUN, spec, clipped=clipped, exact=True)
    assert found["same"] if spec == "P()" else found["close"]
    assert found["stays"]
    assert found["sliced"] == 3 and found["why"] == []
    assert found["needs"][1] == pytest.approx(found["needs"][0], rel=0.25)
    ours, others = found["collectives"]
    assert ours == others  # nothing else is sent between devices for it


@pytest.mark.parametrize(
    ("spec", "kind", "why"),
    [
        ('P("data")', "Auto", "it is split over devices along the layers"),
        ('P(None, "data")', "Explicit", "its type says how it is split over devices"),
    ],
)
def test_stacks_that_come_as_a_whole_are_named_with_the_reason(spec, kind, why):
    found = report(RUN, spec, kind=kind)
    assert found["same"] and found["stays"] and found["sliced"] == 0 and found["why"] == [why]


@pytest.mark.gpu_compile
def test_shards_of_hosted_stacks_are_no_memory_of_described_cards():
    from vmem_jax.devices.targets import target

    target("h200").devices(4)
    found = report(
        """
place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding(a, True))
w = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32")
state = jax.tree.map(place, (w, jax.eval_shape(TX.init, w)))
x = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32", sharding=rows)
best = budgeted._entry_for((state, x), {}, "h200").best
memory, text = best.compiled.memory_analysis(), best.compiled.as_text()
shard = f"f32[1,{WIDTH // 2},{WIDTH}]"
print(json.dumps({
    "need": best.need,
    "host": [memory.host_argument_size_in_bytes, memory.host_temp_size_in_bytes],
    "fetched": len(re.findall(r"dynamic-slice-done\\S* = " + re.escape(shard), text)),
    "sent from host memory": [line for line in text.splitlines() if "S(5)" in line
                              and re.search(r" (all|collective|reduce)-[a-z-]+\\(", line)],
    "by the processor": "host_compute" in text,
}))
""",
        'P(None, "data")',
        sizes=(64, 256, 64),
    )
    stack = 4 * 64 * 256 * 256 // 2  # a shard of it
    assert found["need"] < 0.75 * stack and found["host"] == [3 * stack, 0]
    assert found["fetched"] == 4  # each once for updates, weights for the forward pass
    assert not found["sent from host memory"] and not found["by the processor"]
