"""Budgeted steps that move buffers, on the CPU's twins of the calls: memory, bits, faults."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transfer_cases as cases
from helpers import FAST, unit_costs
from test_jit import assert_close, batch, need, params, plain_need, step
from threads import in_threads

import vmem_jax
from vmem_jax import BudgetError, HostMemoryError, Plan
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.core.parked import parked
from vmem_jax.core.plan import Transfer
from vmem_jax.core.validate import violations
from vmem_jax.policy import AbstractPolicy, Auto, Infeasible
from vmem_jax.rewrite import rewrite
from vmem_jax.rewrite.transfers import layout_of
from vmem_jax.search.log import What
from vmem_jax.techniques import StepContext
from vmem_jax.transfer.arena import live_arenas
from vmem_jax.transfer.extension import describe
from vmem_jax.transfer.ffi import Ffi

built = pytest.mark.skipif(describe().startswith("none"), reason=f"native extension: {describe()}")
pytestmark = built


def offloading(fun=step, budget=0.5, **options):
    options = {"allow": ("order", "offload"), "machine": FAST, **options}
    if "plan" not in options and isinstance(options["allow"], tuple):
        options["policy"] = Auto(allow=options["allow"], cache=False)  # all crosses the link
    return vmem_jax.jit(fun, budget=budget, **options)


def same(a, b):
    leaves = jax.tree.leaves(a), jax.tree.leaves(b)
    return all(np.array_equal(x, y) for x, y in zip(*leaves, strict=True))


def test_it_fits_moves_and_keeps_every_bit():
    budgeted = offloading()
    compiled = budgeted.lower(params(), batch()).compile()
    assert compiled.need_nbytes <= 0.5 * plain_need()
    assert compiled.plan.transfers and not compiled.plan.recomputed
    kept = vmem_jax.jit(step, budget="1GiB", policy="exact")(params(), batch())
    for _ in range(2):
        assert same(budgeted(params(), batch()), kept)
    counters = compiled.arena.counters(jax.devices()[0])
    parked = sum(slot.nbytes for slot in compiled.arena.layout.slots)
    assert counters.link_nbytes_out == counters.link_nbytes_in == 2 * parked
    assert counters.parked == 0 and counters.resets == 0
    assert need(compiled._entry.best.compiled) == compiled.need_nbytes


def test_without_leave_to_move_the_same_budget_is_not_met():
    with pytest.raises(BudgetError):
        vmem_jax.jit(step, budget=0.5, allow="order", machine=FAST)(params(), batch())


@dataclasses.dataclass(frozen=True)
class Timid(AbstractPolicy):
    """Keeps all that is needed, and where that is too much asks others."""

    name = "timid"
    needs = ("offload",)
    others: tuple[AbstractPolicy, ...] = ()

    @property
    def instead(self):
        return self.others

    def plan(self, program, costs, budget):
        return Auto(allow=("order",)).plan(program, costs, budget)


def test_another_policy_is_asked_where_none_of_its_own_plans_fits():
    ask = lambda *others, budget=0.5: vmem_jax.jit(
        step, budget=budget, policy=Timid(others), machine=FAST
    ).lower(params(), batch())
    with pytest.raises(BudgetError) as alone:
        ask().compile()
    slow, fast = vmem_jax.POLICIES["recompute"](), vmem_jax.POLICIES["modnn"]()
    one, both = (ask(*others).compile() for others in ((slow,), (slow, fast)))
    assert max(one.need_nbytes, both.need_nbytes) <= 0.5 * plain_need()
    assert (one.plan.policy, both.plan.policy) == ("recompute", "modnn")
    assert both.plan.predicted_seconds < one.plan.predicted_seconds
    # where they have no plan either, the error is of what comes lowest
    with pytest.raises(BudgetError) as error:
        ask(slow, fast, budget="2KiB").compile()
    assert error.value.lowest_peak <= alone.value.lowest_peak
    assert {p.name for p in Auto().instead} == {"superneurons", "modnn", "vdnn", "vdnnpp"}
    assert Auto(allow=("order", "recompute")).instead == ()


@dataclasses.dataclass(frozen=True)
class Gloomy(Timid):
    """Says that its lowest plan needs too much, though it does not."""

    name = "gloomy"

    def plan(self, program, costs, budget):
        plan = vmem_jax.POLICIES["recompute"]().plan(program, costs, budget)
        return Infeasible(self.name, budget, 2 * budget, at="", plan=plan)


def test_the_lowest_plan_of_another_policy_is_compiled_where_it_is_near():
    ask = lambda budget: vmem_jax.jit(
        step, budget=budget, policy=Timid((Gloomy(),)), machine=FAST
    ).lower(params(), batch())
    found = ask(0.5).compile()
    assert found.plan.policy == "recompute" and found.need_nbytes <= 0.5 * plain_need()


@dataclasses.dataclass(frozen=True)
class Wasteful(Timid):
    """Makes again all that can be, whether the budget asks for it or not."""

    name = "wasteful"

    def plan(self, program, costs, budget):
        everything = Auto(allow=("order", "recompute"))
        lowest = everything.plan(program, costs, program.resident_nbytes + 1).plan
        return dataclasses.replace(lowest, policy=self.name, budget=budget)


def test_another_policy_is_asked_where_it_is_faster():
    def compiled(*others, **more):
        options = {"budget": 0.8, "policy": Wasteful(others), "machine": FAST, **more}
        return vmem_jax.jit(step, **options).lower(params(), batch()).compile()

    recompute, vdnn = vmem_jax.POLICIES["recompute"](), vmem_jax.POLICIES["vdnn"]()
    alone, one, both = (compiled(*others) for others in ((), (recompute,), (recompute, vdnn)))
    plans = [found.plan for found in (alone, one, both)]
    assert [plan.policy for plan in plans] == ["wasteful", "recompute", "vdnn"]
    for slow, fast in itertools.pairwise(plan.predicted_seconds for plan in plans):
        assert fast < 0.95 * slow
    assert max(one.need_nbytes, both.need_nbytes) <= 0.8 * plain_need()
    assert compiled(Wasteful()).plan.policy == "wasteful"  # as fast as itself
    within = compiled(recompute, vdnn, host_budget="1KiB")  # what vDNN moves does not fit there
    assert within.plan.policy == "recompute"


def test_slow_copies_and_poisoned_sources_change_nothing():
    budgeted = offloading()
    expected = budgeted(params(), batch())
    with cases.injected(delay_seconds=2e-3, poison=True):
        assert same(budgeted(params(), batch()), expected)


def test_a_failed_copy_is_an_error_and_the_next_step_is_right():
    budgeted = offloading()
    expected = jax.block_until_ready(budgeted(params(), batch()))
    with cases.injected(fail_slot=0), pytest.raises(jax.errors.JaxRuntimeError, match="slot 0"):
        jax.block_until_ready(budgeted(params(), batch()))
    assert same(budgeted(params(), batch()), expected)


def test_two_threads_run_one_step():
    budgeted = offloading()
    expected = budgeted(params(), batch())
    results = []
    run = lambda: results.extend(budgeted(params(), batch()) for _ in range(3))
    in_threads(run, run)
    assert len(results) == 6 and all(same(r, expected) for r in results)


def test_the_tensor_cache_takes_the_place_of_the_link():
    """SuperNeurons, Table 3: the same compiled step, fewer bytes over the link with more cache."""
    budgeted = offloading()
    compiled = budgeted.lower(params(), batch()).compile()
    device = jax.devices()[0]
    expected = jax.block_until_ready(budgeted(params(), batch()))
    moved = []
    for share in (0, 0.5, 1):
        compiled.arena.set_cache_capacity(device, int(share * 2 * compiled.arena.layout.nbytes))
        before = compiled.arena.counters(device)
        assert same(budgeted(params(), batch()), expected)
        after = compiled.arena.counters(device)
        moved.append(after.link_nbytes_out - before.link_nbytes_out)
    assert moved[0] > 0 and moved[2] == 0 and moved[0] >= moved[1] >= moved[2]


def test_the_arena_goes_with_the_step():
    gc.collect()
    before = live_arenas()
    budgeted = offloading()
    with cases.injected(delay_seconds=5e-3):
        result = budgeted(params(), batch())
        assert live_arenas() > before
        del budgeted  # while it runs
        gc.collect()
        jax.block_until_ready(result)
    gc.collect()
    jax.clear_caches()
    gc.collect()
    assert live_arenas() == before


def test_a_plan_with_transfers_is_given_back(tmp_path):
    budgeted = offloading()
    budgeted.plan(params(), batch()).save(tmp_path / "step.json")
    plan = Plan.load(tmp_path / "step.json")
    again = vmem_jax.jit(step, plan=plan, machine=FAST)
    assert same(again(params(), batch()), budgeted(params(), batch()))
    assert again.lower(params(), batch()).compile().arena is not None


def test_host_budget_is_said_before_the_step_runs():
    ran = []

    def noisy(params, x):
        jax.debug.callback(lambda: ran.append(1))
        return step(params, x)

    budgeted = offloading(noisy, host_budget=1024)
    with pytest.raises(HostMemoryError, match=r"1\.00 KiB"):
        budgeted(params(), batch())
    jax.effects_barrier()
    assert ran == []
    with pytest.raises(ValueError, match=r"`host_budget`=0.5 is no size"):
        offloading(host_budget=0.5)


def test_nothing_moves_on_a_cpu_unless_it_is_asked_for():
    compiled = vmem_jax.jit(step, budget=0.5, machine=FAST).lower(params(), batch()).compile()
    assert compiled.arena is None and not compiled.plan.transfers


def test_without_measured_times_it_moves_where_nothing_else_fits(monkeypatch):
    moving = Auto(allow=("order", "offload"))  # not by `jit(allow=...)`, which would name it
    monkeypatch.setattr(StepContext, "_moving", ("ffi", "its times are a roofline's"))
    budgeted = lambda budget: vmem_jax.jit(step, budget=budget, policy=moving, machine=FAST)
    compiled = lambda budget: budgeted(budget).lower(params(), batch()).compile()
    assert not compiled(1.0).plan.transfers
    within_half = compiled(0.5)
    lines = within_half._entry.log.lines
    assert any(line.what in (What.OVER, What.MISSED) for line in lines)  # what moves nothing
    assert within_half.plan.transfers and within_half.need_nbytes <= 0.5 * plain_need()
    kept = vmem_jax.jit(step, budget="1GiB", policy="exact")(params(), batch())
    assert same(budgeted(0.5)(params(), batch()), kept)
    # what is said of a budget that cannot be met is of plans that move
    with pytest.raises(BudgetError) as error:
        compiled("289KiB")
    assert error.value.compiled and error.value.lowest_plan.transfers


def test_where_it_cannot_be_and_nothing_else_is_allowed_it_says_why():
    outer = jax.jit(lambda p, x: offloading(allow="offload")(p, x))
    with pytest.raises(ValueError, match=r"`step` cannot offload: it is called inside another jit"):
        outer(params(), batch())


def test_where_it_cannot_be_the_other_techniques_are_used():
    entries = []

    def inlined(p, x):
        budgeted = offloading(allow=("order", "recompute", "offload"))
        out = budgeted(p, x)
        entries.extend(budgeted._entries.values())
        return out

    kept = vmem_jax.jit(step, budget="1GiB", policy="exact")(params(), batch())
    assert_close(jax.jit(inlined)(params(), batch()), kept)
    (entry,) = entries
    assert not entry.best.plan.transfers and entry.best.plan.recomputed
    assert "inside another jit" in entry.log.skipped["offload"]


def test_as_text_has_the_four_calls():
    text = offloading().lower(params(), batch()).as_text()
    for call in ("offload_start", "offload_done", "fetch_start", "fetch_done"):
        assert f"vmem_jax_{call}" in text


def test_every_call_is_fenced_on_both_sides():
    """Behind `fetch_done` too: the place in the arena may be another tensor's from there on."""
    entry = offloading()._entry_for((params(), batch()), {}, None)
    best = entry.best
    equations = compat.open_jaxpr(rewrite(entry.traced.captured, best.plan, entry.transport)).eqns
    fences = [e for e in equations if e.primitive.name == "optimization_barrier"]
    calls = [e for e in equations if e.primitive.name == "ffi_call"]
    assert len(calls) == 4 * len(best.plan.transfers)
    for call in calls:
        (out,) = call.outvars
        assert any(out in f.invars and len(f.invars) > 1 for f in fences)
        assert any(v in f.outvars and len(f.invars) > 1 for f in fences for v in call.invars)
        assert sum(out in e.invars for e in equations) == 1


def test_a_value_that_is_back_may_leave_again_at_once():
    """Read, and parked for its next reader: the second transfer starts where the first one ends."""
    plan = offloading().plan(params(), batch())
    program = capture(jax.jit(step).trace(params(), batch()).jaxpr).program
    reads = lambda b: [p for p, s in enumerate(plan.order) if b in program.steps[s].reads]
    away, [*_, read, last] = next((t, r) for t in plan.transfers if len(r := reads(t.buffer)) > 3)
    first = dataclasses.replace(away, fetch=read, back=read)
    second = dataclasses.replace(away, start=read, gone=last, fetch=last, back=last)
    plan = dataclasses.replace(plan, transfers=(first, second), budget=None)
    budgeted = vmem_jax.jit(step, plan=plan)
    text = budgeted.lower(params(), batch()).compile().as_text()
    calls = re.findall(r"vmem_jax_(\w+)\".*slot = (\d)", text)
    assert calls.index(("fetch_done", "0")) < calls.index(("offload_start", "1"))
    kept = vmem_jax.jit(step, budget="1GiB", policy="exact")(params(), batch())
    assert same(budgeted(params(), batch()), kept)


def unordered(captured, plan):
    """Pairs of slots in one place of which the second does not wait for the first to be back."""
    layout = layout_of(captured.program, plan)
    before, made, call = [], {}, {}
    for i, eqn in enumerate(rewrite(captured, plan, Ffi(layout)).jaxpr.eqns):
        makers = {made[v] for v in eqn.invars if isinstance(v, compat.Var) and v in made}
        before.append(makers.union(*(before[m] for m in makers)))
        made.update((v, i) for v in eqn.outvars)
        if eqn.primitive.name == "ffi_call":
            slot = int(dict(eqn.params["attributes"])["slot"])
            call[eqn.params["target_name"].removeprefix("vmem_jax_"), slot] = i
    ends = [slot.offset + slot.stride for slot in layout.slots]
    slots = [*enumerate(zip(layout.slots, ends, parked(captured.program, plan), strict=True))]
    for (a, (first, until, over)), (b, (second, end, then)) in itertools.product(slots, repeat=2):
        shares = first.offset < end and second.offset < until and over.back < then.start
        if shares and call["fetch_done", a] not in before[call["offload_start", b]]:
            yield over, then


def test_a_place_is_free_before_the_next_tensor_comes():
    """Where all that is live is on its way itself, nothing but a token holds the calls in order."""

    def fun(x, wide, w):
        a, b, u = wide @ w, x @ w, x @ x
        d = (a.T @ a) @ u
        return b @ x, x @ w.T, d @ w, b @ w

    shapes = ((64, 64), (128, 64), (64, 64))
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    captured = capture(jax.jit(fun).trace(*args).jaxpr)
    program = captured.program
    plan = vmem_jax.POLICIES["keep"]().plan(program, unit_costs(program), None)
    assert plan.order == tuple(range(9))
    a, b, d = (program.steps[s].writes[0] for s in (0, 1, 4))
    moved = (
        Transfer(a, 1, 1, 3, 3),
        Transfer(b, 2, 2, 3, 5),
        Transfer(d, 5, 6, 7, 7),
        Transfer(b, 6, 6, 7, 8),  # in the place of `a`
    )
    plan = dataclasses.replace(plan, transfers=moved, fenced=True)
    assert violations(program, plan) == []
    places = layout_of(program, plan).slots
    assert places[0].offset < places[3].offset < places[0].offset + places[0].stride
    assert [*unordered(captured, plan)] == []


def test_explain_says_what_moves():
    text = str(offloading().explain(params(), batch()))
    assert "buffers moved" in text


def test_explain_saves_the_lanes(tmp_path):
    explanation = offloading().explain(params(), batch())
    explanation.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copies = [e for e in events if e.get("cat") == "copy"]
    assert len(copies) == 2 * len(explanation.plan.transfers) > 0
    moved = sum(e["args"]["nbytes"] for e in copies)
    buffers = explanation.program.buffers
    assert moved == 2 * sum(buffers[t.buffer].nbytes for t in explanation.plan.transfers)
    assert sum(e.get("cat") == "step" for e in events) == len(explanation.plan.order)


def test_scaled_batch_keys_and_integers_move_too():
    """Residuals of other dtypes: a mask of booleans, an index."""

    def fun(w, x):
        def loss(w):
            y = x
            for i in range(6):
                y = jnp.where(y > 0, y, 0.1 * y) @ w[i]
                y = y.at[jnp.argmax(y, 0), jnp.arange(32)].multiply(2.0)
            return jnp.square(y).mean()

        return w - 0.1 * jax.grad(loss)(w)

    w = jnp.stack(params()[:6])
    expected = vmem_jax.jit(fun, budget="1GiB", policy="exact")(w, batch())
    for share in (0.9, 0.8, 0.7):
        try:
            budgeted = offloading(fun, budget=share)
            got = budgeted(w, batch())
        except BudgetError:
            break
        assert same(got, expected)
