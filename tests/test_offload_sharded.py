"""Budgeted steps that move buffers on several devices: each its own shards, in its own arena."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import pytest
from built import needs_cuda
from processes import in_subprocess

from vmem_jax.transfer.extension import describe
from vmem_jax.transfer.ffi import unusable

pytestmark = pytest.mark.skipif(
    describe().startswith("none"), reason=f"native extension: {describe()}"
)

STEP = """
import dataclasses, json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import transfer_cases as cases
import vmem_jax
from vmem_jax.core.cards import CARDS
from vmem_jax.policy import Auto

KIND = AxisType.Auto
SPECS = P(None, "model"), P("model"), P("data")  # two weights a layer, the batch
FAST = dataclasses.replace(CARDS["cpu"].machine, link_out=1e12, link_in=1e12, link_both=2e12)

def arguments(specs=None, kind=None):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind or KIND,) * 2)
    rng = np.random.default_rng(0)
    put = lambda shape, spec: jax.device_put(
        rng.normal(0, 0.1, shape).astype("float32"), NamedSharding(mesh, spec))
    up, down, rows = specs or SPECS
    w = [(put((64, 128), up), put((128, 64), down)) for _ in range(6)]
    return w, put((2048, 64), rows)

def step(w, x):
    def loss(w):
        y = x
        for up, down in w:
            y = jnp.tanh(jnp.tanh(y @ up) @ down) + y
        return jnp.square(y).mean()
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

def collectives(compiled):
    return sorted(re.findall(r" (all-(?:reduce|gather|to-all)|collective-\\w+|reduce-scatter)\\S*\\(",
                             compiled.as_text()))

same = lambda a, b: all(map(np.array_equal, *map(jax.tree.leaves, (a, b))))

def moved_and_kept(share=0.65, fun=step, arguments=arguments):
    args = arguments()
    kept = vmem_jax.jit(fun, budget="1GiB", policy="exact", machine=FAST).lower(*args).compile()
    budget = int(share * kept.need_nbytes)
    policy = Auto(allow=("order", "offload"), cache=False)  # all that moves crosses the link
    moving = vmem_jax.jit(fun, budget=budget, policy=policy, allow=policy.allow, machine=FAST)
    return moving, moving.lower(*args).compile(), kept, args
"""

REPORT = """
moving, moved, kept, args = moved_and_kept()
expected = kept(*args)
bits = [same(moving(*args), expected) for _ in range(2)]
counters = [moved.arena.counters(d) for d in jax.devices()]
print(json.dumps({
    "bits": bits,
    "needs": [moved.need_nbytes, kept.need_nbytes],
    "slots": sum(s.nbytes for s in moved.arena.layout.slots),
    "out": [c.link_nbytes_out for c in counters],
    "in": [c.link_nbytes_in for c in counters],
    "parked": [c.parked for c in counters],
    "collectives": [collectives(moved), collectives(kept)],
    "layers": sum(t.back - t.start for t in moved.plan.transfers),
}))
"""


def report(change=""):
    """What a step did on four CPU devices, after `change` to the script."""
    return json.loads(in_subprocess(STEP + change + REPORT, 4).splitlines()[-1])


@pytest.mark.parametrize(
    "change",
    [
        "",
        'SPECS = P(), P(), P("data"); KIND = AxisType.Explicit\n',
        'SPECS = P(), P(), P(("data", "model"))\n',
        'SPECS = P("data"), P("data"), P("data")\n',
        'jax.config.update("jax_use_shardy_partitioner", False)\n',
    ],
    ids=["data and model", "explicit", "all axes on one dimension", "fully sharded", "gspmd"],
)
def test_every_device_moves_its_own_shards(change):
    found = report(change)
    assert found["bits"] == [True, True]
    assert found["needs"][0] <= 0.65 * found["needs"][1]
    assert found["slots"] > 0
    assert found["out"] == found["in"] == [2 * found["slots"]] * 4  # bytes of a shard, two runs
    assert found["parked"] == [0] * 4
    moved, kept = found["collectives"]
    assert moved == kept  # nothing is sent between the devices for a move


def test_a_value_whose_split_is_not_known_stays():
    """A sort is split by no rule: what hangs on it alone is not moved, the rest is."""
    out = in_subprocess(
        STEP
        + """
def sorting(w, x):
    def loss(w):
        y = x
        for up, down in w:
            y = jnp.tanh(y @ up)
            y = (y * jnp.sort(jax.lax.stop_gradient(y), 1)) @ down
        return jnp.square(y).mean()
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

SPECS = P(), P(), P("data")
moving, moved, kept, args = moved_and_kept(0.9, sorting)
program = moving._entry_for(args, {}, None).traced.captured.program
sorts = [b for s in program.steps if s.op == "sort" for b in s.writes]
away = {t.buffer for t in moved.plan.transfers}
print(len(sorts) > 0, len(away) > 0, any(program.buffers[b].movable for b in sorts),
      all(program.buffers[b].movable for b in away), same(moving(*args), kept(*args)))
""",
        4,
    )
    assert out.split() == ["True", "True", "False", "True", "True"]


def test_xlas_own_copies_move_values_whatever_their_split():
    """The same step: a sort is movable then, and so is all of a step over two meshes."""
    out = in_subprocess(
        STEP
        + """
from vmem_jax.core.costs import analytic
from vmem_jax.policy import Auto

def step(w, x):
    def loss(w):
        y = x
        for up, down in w:
            y = jnp.sort(jnp.tanh(y @ up), 1) @ down
        return jnp.square(y).mean()
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

SPECS = P(), P(), P("data")
w, x = arguments()
other = jax.sharding.Mesh(np.array(jax.devices()), ("row",))
for x in (x, jax.device_put(x, NamedSharding(other, P("row")))):
    how = dict(allow=("order", "offload"), machine=FAST, transport="memory_kinds")
    entry = vmem_jax.jit(step, budget="1GiB", **how)._entry_for((w, x), {}, None)
    program = entry.traced.captured.program
    budget = int(0.75 * entry.best.plan.predicted_peak)
    plan = Auto(allow=how["allow"]).plan(program, analytic(program, FAST), budget)
    moving = vmem_jax.jit(step, plan=dataclasses.replace(plan, budget=None), **how)
    kept = vmem_jax.jit(step, budget="1GiB", policy="exact", machine=FAST)(w, x)
    close = lambda a, b: np.allclose(a, b, rtol=1e-5, atol=1e-6)
    print(len(plan.transfers) > 0, all(b.movable for b in program.buffers),
          all(map(close, *map(jax.tree.leaves, (moving(w, x), kept)))))
""",
        4,
    )
    assert out.split() == ["True"] * 6


def test_a_copy_that_fails_on_every_device_is_an_error_and_the_next_step_is_right():
    """Without a collective: a device that stops early would leave the others waiting in one."""
    out = in_subprocess(
        STEP
        + """
def toward(w, x):
    def loss(x):
        for up, down in w:
            x = jnp.tanh(jnp.tanh(x @ up) @ down) + x
        return jnp.square(x).sum()
    return jax.grad(loss)(x)

SPECS = P(), P(), P(("data", "model"))
moving, moved, kept, args = moved_and_kept(0.65, toward)
print(collectives(moved) == [])
expected = kept(*args)
try:
    with cases.injected(fail_slot=0):
        jax.block_until_ready(moving(*args))
    print("no error")
except jax.errors.JaxRuntimeError as error:
    print("slot 0" in str(error))
with cases.injected(delay_seconds=2e-3, poison=True):
    print(same(moving(*args), expected))
""",
        4,
    )
    assert out.split() == ["True", "True", "True"]


def test_the_host_budget_is_for_all_devices_together():
    out = in_subprocess(
        STEP
        + """
moving, moved, kept, args = moved_and_kept()
nbytes = moved.arena.layout.nbytes
for devices in (3, 4):
    limited = vmem_jax.jit(step, plan=moved.plan, machine=FAST, host_budget=devices * nbytes)
    try:
        print(same(limited(*args), kept(*args)))
    except vmem_jax.HostMemoryError:
        print("refused")
""",
        4,
    )
    assert out.split() == ["refused", "True"]


def test_arguments_over_two_meshes_are_refused_with_the_reason():
    out = in_subprocess(
        STEP
        + """
w, x = arguments()
other = jax.sharding.Mesh(np.array(jax.devices()), ("row",))
x = jax.device_put(x, NamedSharding(other, P("row")))
try:
    vmem_jax.jit(step, budget="1MiB", allow=("order", "offload"), machine=FAST)(w, x)
except ValueError as error:
    print(error)
""",
        4,
    )
    assert '"offload" is not used: it runs on 4 devices' in out and "over one mesh" in out


def test_devices_of_other_processes_are_refused_with_the_reason():
    here, there = SimpleNamespace(process_index=0), SimpleNamespace(process_index=1)
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    assert unusable("cpu", [here, here], mesh, False) == ""
    assert "1 of its 2 devices belong to other processes" in unusable(
        "cpu", [here, there], mesh, False
    )


@pytest.mark.gpu_compile
def test_the_need_of_described_cards_falls():
    """Four H200s that are not there: each moves a quarter, and no buffer is copied for it."""
    needs_cuda()
    out = in_subprocess(
        STEP
        + """
FAST = dataclasses.replace(CARDS["h200"].machine, link_out=1e13, link_in=1e13, link_both=2e13)
args = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape[:-2] + (16 * a.shape[-2], a.shape[-1])
                                   if a.shape[0] == 2048 else a.shape, a.dtype,
                                   sharding=a.sharding), arguments())
entry = lambda **how: vmem_jax.jit(step, machine=FAST, **how)._entry_for(args, {}, "h200")
kept = entry(budget="1GiB", policy="exact").best
moved = entry(budget=int(0.75 * kept.need), allow=("order", "offload")).best
print(json.dumps([moved.need, kept.need, len(moved.plan.transfers),
                  sorted({*collectives(moved.compiled)}), sorted({*collectives(kept.compiled)})]))
""",
        4,
    )
    moved, kept, transfers, *collectives = json.loads(out.splitlines()[-1])
    assert transfers > 0 and moved <= 0.75 * kept
    assert collectives[0] == collectives[1] == ["all-reduce"]  # combined in another way only
