"""The tensor cache of what the budget leaves: its size, what it saves, what is predicted of it."""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FAST
from jax import lax
from test_jit import batch, params, step

import vmem_jax
from vmem_jax import Plan, SuperNeurons
from vmem_jax.core.tensor_cache import events_of, traffic
from vmem_jax.policy import Auto
from vmem_jax.transfer.executable import Moving
from vmem_jax.transfer.extension import describe
from vmem_jax.transfer.layout import Layout, Parked

built = pytest.mark.skipif(describe().startswith("none"), reason=f"native extension: {describe()}")

UNIT = 256
"""Bytes of a tensor that is aligned."""


def nested(slots):
    """All of `slots` leave, and return in the reverse order."""
    out = [(point, slot, 0) for slot in range(slots) for point in (0, 1)]
    return out + [(point, slot, 0) for slot in reversed(range(slots)) for point in (2, 3)]


def stacked(*sizes):
    layout = Layout.of([Parked(UNIT * n, i, 99 - i) for i, n in enumerate(sizes)])
    return layout.slots


@pytest.mark.parametrize("held", range(6))
def test_the_most_recently_used_stay(held):
    """Of equal tensors, which return in the reverse order, the cache holds the last that left."""
    found = traffic(nested(5), stacked(1, 1, 1, 1, 1), held * UNIT)
    assert (found.hits, found.misses) == (held, 5 - held)
    assert found.out == found.into == (5 - held) * UNIT


def test_what_does_not_fit_crosses_the_link():
    found = traffic(nested(2), stacked(4, 1), 2 * UNIT)
    assert (found.hits, found.misses) == (1, 1)
    assert found.out == found.into == 4 * UNIT


def test_what_a_copy_uses_does_not_leave():
    events = [
        (0, 0, 0),
        (0, 1, 0),
        (1, 0, 0),
        (1, 1, 0),
        (2, 1, 0),
        (3, 1, 0),
        (2, 0, 0),
        (3, 0, 0),
    ]
    found = traffic(events, stacked(1, 1), UNIT)  # slot 0 is on its way as slot 1 comes
    assert (found.hits, found.misses, found.out) == (1, 1, UNIT)


@pytest.mark.parametrize("seed", range(20))
def test_a_cache_as_large_as_what_is_parked_keeps_the_link_idle(seed):
    rng = random.Random(seed)
    slots = stacked(*(rng.randint(1, 9) for _ in range(12)))
    full = sum(slot.stride for slot in slots)
    last = traffic(nested(12), slots, 0)
    assert last.out == last.into == sum(slot.nbytes for slot in slots)
    assert last.hits == 0
    assert traffic(nested(12), slots, full).out == 0
    for capacity in range(0, full, UNIT):
        found = traffic(nested(12), slots, capacity)
        assert found.out == found.into <= last.out and found.hits + found.misses == 12


# -- against the native extension's own


def looping(w, x):
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    grad = jax.grad(lambda w: jnp.square(lax.scan(layer, x, w)[0]).mean())(w)
    return w - 0.1 * grad


def loop_arguments():
    w = jax.random.normal(jax.random.key(0), (8, 32, 32)) / 8
    return w, jnp.ones((256, 32))


def sub_batched(w, x):
    def loss(w):
        y = x
        for each in w:
            y = jnp.tanh(y @ each)
        return jnp.square(y).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))


MOVING = Auto(allow=("order", "offload"), cache=False)


@built
@pytest.mark.parametrize("what", ["layers", "loops", "sub-batches"])
def test_the_prediction_is_what_the_extension_counts(what):
    """Every counter of a step, for caches of many sizes."""
    options = {"allow": ("order", "offload"), "machine": FAST, "transport": "ffi"}
    fun, args, budget, policy = step, (params(), batch()), 0.5, MOVING
    if what == "loops":
        fun, args, budget = looping, loop_arguments(), 0.6
    if what == "sub-batches":
        options |= {"allow": ("order", "offload", "sub_batches"), "sub_batches": 2}
        w, x = loop_arguments()
        fun, args, budget = sub_batched, ([*w], x), 0.4
    budgeted = vmem_jax.jit(fun, budget=budget, policy=policy, **options)
    compiled = budgeted.lower(*args).compile()
    plan, arena, device = compiled.plan, compiled.arena, jax.devices()[0]
    assert {"layers": plan.transfers, "loops": plan.looped, "sub-batches": plan.transfers}[what]
    assert plan.sub_batches == (2 if what == "sub-batches" else 1)
    jax.block_until_ready(budgeted(*args))
    program = compiled._entry.traced.captured.program
    events = [*events_of(program, plan)]
    seen = set()
    for share in range(9):
        capacity = share * arena.layout.nbytes // 8
        arena.set_cache_capacity(device, capacity)
        before = arena.counters(device)
        jax.block_until_ready(budgeted(*args))
        after = arena.counters(device)
        of = lambda name, a=after, b=before: getattr(a, name) - getattr(b, name)
        found = traffic(events, arena.layout.slots, capacity)
        assert (found.hits, found.misses) == (of("hits"), of("misses"))
        assert found.into == of("link_nbytes_in")
        if not of("recopies"):  # of values that XLA had moved meanwhile
            assert found.out == of("link_nbytes_out")
        seen.add(found.out)
    assert 0 in seen and len(seen) > 2


# -- in a budgeted step


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


HOW: dict = {"allow": ("order", "offload"), "machine": FAST, "transport": "ffi"}


@pytest.fixture(scope="module")
def tight():
    """A plan that moves much, what it needs, and what a step gives."""
    budgeted = vmem_jax.jit(step, budget=0.5, policy=MOVING, **HOW)
    compiled = budgeted.lower(params(), batch()).compile()
    return compiled.plan, compiled.need_nbytes, budgeted(params(), batch())


@dataclasses.dataclass(frozen=True)
class Given(Auto):
    """Has one plan, whatever the budget."""

    made: Plan | None = None
    allow: tuple[str, ...] = HOW["allow"]

    def plan(self, program, costs, budget):
        return dataclasses.replace(self.made, budget=budget)


@built
@pytest.mark.parametrize("policy", [Auto(allow=HOW["allow"]), SuperNeurons()], ids=type)
def test_what_the_budget_leaves_is_the_cache(tight, policy):
    plan, need, expected = tight
    moved = []
    for left in (0, 32, 64, 96, 10_000):  # KiB
        how = {"allow": ("order", "recompute", "offload"), "policy": policy, "plan": plan}
        budgeted = vmem_jax.jit(step, budget=need + left * 1024, **{**HOW, **how})
        compiled = budgeted.lower(params(), batch()).compile()
        for _ in range(2):
            assert same(budgeted(params(), batch()), expected)
        counters = compiled.arena.counters(jax.devices()[0])
        moved.append(counters.link_nbytes_out // 2)
        explained = budgeted.explain(params(), batch()).summary()
        if compiled.cache is None:
            assert counters.cache_nbytes == 0 and "tensor cache" not in explained
            continue
        uncached, cached = compiled.cache
        assert counters.cache_nbytes == cached.capacity
        assert cached.capacity == min(left * 1024, compiled.arena.layout.nbytes)
        assert compiled.need_nbytes + counters.cache_nbytes <= need + left * 1024
        assert (uncached.out, cached.out) == (moved[0], moved[-1])
        assert f"{cached.hits} of {uncached.misses} fetches hit" in explained
    assert moved[0] > 0 == moved[-1]
    assert moved == sorted(moved, reverse=True) and len({*moved}) >= 4


@built
@pytest.mark.parametrize(
    "policy", ["vdnn", SuperNeurons(cache=False), Auto(allow=HOW["allow"], cache=False)], ids=str
)
def test_who_has_no_cache(tight, policy):
    plan, need, expected = tight
    how = {"allow": ("order", "recompute", "offload"), "policy": policy, "plan": plan}
    budgeted = vmem_jax.jit(step, budget=2 * need, **{**HOW, **how})
    assert same(budgeted(params(), batch()), expected)
    compiled = budgeted.lower(params(), batch()).compile()
    assert compiled.cache is None
    assert compiled.arena.counters(jax.devices()[0]).link_nbytes_out > 0


@built
def test_a_tuned_step_has_its_cache_once_it_is_tuned(tight):
    plan, need, _ = tight
    budgeted = vmem_jax.jit(step, budget=2 * need, policy=Given(made=plan), tune=True, **HOW)
    for _ in range(12):
        jax.block_until_ready(budgeted(params(), batch()))
    entry = budgeted._entry_for((params(), batch()), {}, None)
    assert entry.tuning is not None and entry.cache is not None
    counters = entry.best.compiled.arena.counters(jax.devices()[0])
    assert counters.cache_nbytes == entry.cache[1].capacity


class Poor:
    """An arena on a device without memory for a cache."""

    def __init__(self):
        self.asked = []

    def set_cache_capacity(self, device, nbytes):
        self.asked.append(nbytes)
        if nbytes:
            raise MemoryError("8 of 64 MiB are free")


def test_without_memory_for_the_cache_the_step_runs_and_says_so():
    arena = Poor()
    moves = Moving(lambda x: x + 1, None, None, jax.devices()[:1])
    moves.cache_nbytes = 64 * 2**20
    message = r"64.00 MiB of device memory for a tensor cache \(8 of 64 MiB are free\)"
    with pytest.warns(UserWarning, match=message):
        moves._take_cache(arena)
    assert arena.asked == [64 * 2**20, 0] and moves.cache_nbytes == 0
    assert moves(jnp.ones(2))[0] == 2
