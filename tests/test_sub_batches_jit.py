"""Sub-batches through `jit`: chosen, proved, compiled once, explained, refused."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import steps
from helpers import FAST
from steps import arrays_of, normal

import vmem_jax
from vmem_jax import VDNN, BudgetError, Plan, PlanError
from vmem_jax.core.liveness import least_nbytes
from vmem_jax.core.need import need_nbytes
from vmem_jax.core.plan import Transfer
from vmem_jax.core.validate import check_program, violations
from vmem_jax.errors import SubBatchError
from vmem_jax.policy import AbstractPolicy, Auto, Infeasible, MoDNN
from vmem_jax.policy.base import Splitting
from vmem_jax.search.search import Search
from vmem_jax.search.variant import Family
from vmem_jax.techniques.sub_batches import Parts, counts_of
from vmem_jax.transfer.extension import describe

LAYERS, ROWS, WIDTH = 6, 512, 32


def loss_of(params, x, y):
    for i, (w, b) in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x @ w + b)
    return jnp.square(x - y).mean()


def step(params, x, y):
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def normed(params, x, y):
    with jax.named_scope("norm"):
        x = x @ params[0][0]
        x = (x - x.mean(0)) / x.std(0)
    return step(params, x, y)


def params():
    return [(normal(i, (WIDTH, WIDTH), jnp.float32, 0.2), jnp.zeros(WIDTH)) for i in range(LAYERS)]


def batch(rows=ROWS):
    return normal(8, (rows, WIDTH), jnp.float32), normal(9, (rows, WIDTH), jnp.float32)


def compiled(count, fun=step, budget="1GiB", **options):
    budgeted = vmem_jax.jit(fun, budget=budget, sub_batches=count, donate_argnums=0, **options)
    return budgeted.lower(params(), *batch()).compile()


def test_the_peak_falls_with_the_number_of_sub_batches():
    needs = {count: compiled(count, policy="exact") for count in (1, 2, 4, 8)}
    activations = LAYERS * ROWS * WIDTH * 4
    for few, many in ((1, 2), (2, 4), (4, 8)):
        saved = needs[few].need_nbytes - needs[many].need_nbytes
        assert saved > 0.6 * activations / many, (few, many, saved)
    for one in needs.values():
        assert one.need_nbytes <= 1.1 * one.plan.predicted_peak + 4096


def test_one_body_is_compiled_and_a_second_for_a_smaller_last_one():
    products = lambda one: len(re.findall(r"= \S+ dot\(|custom-call.*matmul", one.as_text()))
    whole = products(compiled(1, policy="exact"))
    assert products(compiled(8, policy="exact")) == whole
    assert products(compiled(3, policy="exact")) == 2 * whole


def test_auto_splits_where_recomputation_takes_longer_or_does_not_reach():
    plain = jax.jit(step, donate_argnums=0).lower(params(), *batch()).compile()
    assert compiled(None).plan.sub_batches == 1  # nothing asks for it
    budget = int(0.74 * need_nbytes(plain))
    auto, whole = compiled(None, budget=budget), compiled(1, budget=budget)
    assert auto.plan.sub_batches > 1 and auto.need_nbytes <= budget
    assert whole.plan.recomputed and whole.plan.predicted_seconds > auto.plan.predicted_seconds
    recomputing = compiled(None, budget=budget, allow=("order", "recompute"))
    assert recomputing.plan == whole.plan
    low = int(0.4 * need_nbytes(plain))
    assert compiled(None, budget=low).need_nbytes <= low
    with pytest.raises(BudgetError) as error:
        compiled(1, budget=low)
    assert compiled(None, plan=error.value.lowest_plan).need_nbytes == error.value.lowest_peak
    with pytest.raises(BudgetError) as error:
        compiled(None, budget=int(0.3 * need_nbytes(plain)))
    lowest = error.value.lowest_plan
    assert lowest.sub_batches > 1
    assert compiled(None, plan=lowest).need_nbytes == error.value.lowest_peak
    for a, b in zip(
        jax.tree.leaves(auto(params(), *batch())),
        jax.tree.leaves(plain(params(), *batch())),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", ["modnn", VDNN(sub_batches=True)])
def test_systems_of_the_papers_take_the_fewest_that_fit(policy):
    plain = jax.jit(step, donate_argnums=0).lower(params(), *batch()).compile()
    budget = int(0.4 * need_nbytes(plain))
    split = compiled(None, budget=budget, policy=policy)
    count = split.plan.sub_batches
    assert split.need_nbytes <= budget and count > 1
    tried = [a.plan.sub_batches for a in split.attempts]  # those with fewer compiled to too much
    assert tried == sorted(tried) and tried[-1] == count
    with pytest.raises(BudgetError):
        compiled(count // 2, budget=budget, policy=policy)
    for a, b in zip(
        jax.tree.leaves(split(params(), *batch())),
        jax.tree.leaves(plain(params(), *batch())),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(describe().startswith("none"), reason=describe())
def test_each_sub_batch_moves_its_own():
    kept = compiled(4, policy="exact")
    budget = kept.need_nbytes - ROWS * WIDTH
    policy = Auto(allow=("order", "offload", "sub_batches"), cache=False)  # all crosses the link
    how = {"policy": policy, "allow": policy.allow, "machine": FAST}
    moving = compiled(4, budget=budget, **how)
    plan, program = moving.plan, moving._entry.traced.captured.program
    assert moving.need_nbytes <= budget and plan.transfers and not plan.recomputed
    assert all(program.steps[program.producer[t.buffer]].times == 4 for t in plan.transfers)
    assert moving.moved_nbytes == 4 * moving.arena.layout.nbytes
    expected = kept(params(), *batch())
    for run in (1, 2):
        results = moving(params(), *batch())
        pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
        counters = moving.arena.counters(jax.devices()[0])
        assert counters.link_nbytes_out == counters.link_nbytes_in == run * moving.moved_nbytes
    with pytest.raises(BudgetError):
        compiled(4, budget=budget, allow="order")


@pytest.mark.skipif(describe().startswith("none"), reason=describe())
def test_nothing_moves_where_a_sub_batch_is_smaller():
    budget = compiled(3, policy="exact").need_nbytes
    moving = compiled(3, budget=budget, allow=("order", "offload"), machine=FAST)
    assert moving.plan.sub_batches == 3 and not moving.plan.moves
    crossing = Transfer(moving.plan.order[0], 0, 1, 2, len(moving.plan.order) - 1)
    program = moving._entry.traced.captured.program
    broken = violations(program, dataclasses.replace(moving.plan, transfers=(crossing,)))
    assert any("in and out of the loop over sub-batches" in each for each in broken)


def test_recomputation_happens_within_the_sub_batches():
    kept = compiled(4, policy="exact")
    low = compiled(4, policy="recompute", budget=kept.need_nbytes - ROWS * WIDTH)
    assert low.plan.recomputed and low.plan.sub_batches == 4
    assert low.need_nbytes < kept.need_nbytes
    for a, b in zip(
        jax.tree.leaves(low(params(), *batch())),
        jax.tree.leaves(kept(params(), *batch())),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", ["vgg", "mixer"])
def test_families_train_in_sub_batches_as_a_whole(family, monkeypatch):
    [case] = [case for case in steps.CASES if case.name == family]
    precise = lambda x, y: -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], -1).mean()
    monkeypatch.setattr(steps, "cross_entropy", precise)
    with jax.enable_x64(True):
        fun, args = case.make(jnp.float64, 1)
        whole = arrays_of((case.jit(fun)(*args), args))
        fun, args = case.make(jnp.float64, 1)
        budgeted = vmem_jax.jit(fun, budget="1GiB", policy="exact", sub_batches=3)
        parts = arrays_of((budgeted(*args), args))
    assert budgeted._entries and len(whole) == len(parts)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def test_the_program_of_a_split_step_is_sound_and_its_plans_are_checked(tmp_path):
    budgeted = vmem_jax.jit(step, budget="1GiB", sub_batches=4)
    entry = budgeted._entry_for((params(), *batch()), {}, None)
    program, plan = entry.traced.captured.program, entry.best.plan
    assert check_program(program) == [] and violations(program, plan) == []
    times = {step.op: step.times for step in program.steps}
    assert times["dot_general"] == 4 and times["sub"] == 1
    begin, _ = (s for s, step in enumerate(program.steps) if step.is_boundary)
    order = [*plan.order]
    for s, to in ((begin + 1, 0), (begin + 1, len(order)), (len(program.steps) - 1, begin + 2)):
        moved = [other for other in order if other != s]
        moved.insert(to, s)
        wrong = Plan.from_json(json.dumps({**json.loads(plan.to_json()), "order": moved}))
        assert violations(program, wrong)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.sub_batches == 4
    again = vmem_jax.jit(step, plan=loaded).lower(params(), *batch()).compile()
    assert again.need_nbytes == entry.best.need
    other = Plan.from_json(json.dumps({**json.loads(plan.to_json()), "sub_batches": 2}))
    with pytest.raises(PlanError, match="made for another step"):
        vmem_jax.jit(step, plan=other)(params(), *batch())


def test_explain_says_what_is_split_or_why_not():
    text = str(vmem_jax.jit(step, budget="1GiB", sub_batches=4).explain(params(), *batch()))
    assert re.search(r"the batch runs in 4 sub-batches: \d+ of \d+ steps, \d+% of the time", text)
    assert "4 sub-batches" in " ".join(text.split())
    text = str(vmem_jax.jit(normed, budget="1GiB").explain(params(), *batch()))
    assert "sub_batches is not used: norm: reduce_sum at test_sub_batches_jit.py:" in text
    with pytest.raises(
        BudgetError, match=r"sub_batches\W+is not used: norm: reduce_sum at \S+:\d+ needs"
    ):
        vmem_jax.jit(normed, budget=0.3)(params(), *batch())


def test_the_arguments_with_the_batch():
    find = lambda fun, *args, **options: vmem_jax.jit(
        fun, budget="1GiB", policy="exact", **options
    )._entry_for(args, {}, None)
    layouts = lambda entry: [layout is not None for layout in entry.traced.batch.layouts]
    split = [False] * 2 * LAYERS + [True] * 2
    assert layouts(find(step, params(), *batch())) == split  # the state is returned
    assert layouts(find(step, params(), *batch(), donate_argnums=0)) == split
    assert layouts(find(step, params(), *batch(), batch_argnums=(1, 2))) == split
    assert layouts(find(step, params(), *batch(), batch_argnames=("x", "y"))) == split
    keyed = lambda params, x, key: step(params, x, x + jax.random.normal(key, x.shape))
    x, _ = batch()
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        assert layouts(find(keyed, params(), x, key)) == [*split[:-1], False]
    two = lambda params, x, y: step(params, x, x)[1] + y.sum()
    assert "disagree" in find(two, params(), x, x[:3]).traced.batch.why


def sized(rows, **options):
    x, y = batch(rows)
    return vmem_jax.jit(step, budget="1GiB", **options)(params(), x, y)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (
            lambda: sized(8, sub_batches=9),
            SubBatchError,
            "in 9 sub-batches: its batch has 8 samples",
        ),
        (lambda: sized(1, sub_batches=2), SubBatchError, "the batch has 1 sample"),
        (lambda: sized(8, sub_batches=0), ValueError, "at least 1. Got 0"),
        (lambda: sized(8, sub_batches=2.0), TypeError, "int or None. Got 2.0"),
        (lambda: sized(8, sub_batches=2, policy="keep"), ValueError, "policy `keep` leaves"),
        (
            lambda: vmem_jax.jit(normed, budget="1GiB", sub_batches=2)(params(), *batch()),
            SubBatchError,
            r"norm: reduce_sum at test_sub_batches_jit.py:\d+ needs all samples at once, and \S+: "
            r"dot_general at test_sub_batches_jit.py:\d+ waits for it",
        ),
        (
            lambda: vmem_jax.jit(
                lambda x, y: x.sum() + y.sum(), budget="1GiB", batch_argnums=(0, 1)
            )(batch()[0], batch(4)[0]),
            ValueError,
            "512 samples by `x`, but 4 by `y`",
        ),
        (
            lambda: vmem_jax.jit(step, budget="1GiB", batch_argnums=5),
            ValueError,
            "batch_argnums` has 5",
        ),
        (
            lambda: vmem_jax.jit(lambda x, s: x * s, budget="1GiB", batch_argnums=1)(1.0, 2.0),
            ValueError,
            "no array with a dimension",
        ),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


@dataclasses.dataclass(frozen=True)
class Timid(AbstractPolicy):
    """Keeps all that is needed, of the whole batch, and where that is too much asks moDNN."""

    name = "timid"
    needs = ("offload",)
    splitting = Splitting.FASTEST
    instead = (MoDNN(),)

    def plan(self, program, costs, budget):
        if program.sub_batches > 1:
            most = Auto(allow=("order",)).plan(program, costs, None)
            return Infeasible(self.name, budget, 2**40, at="", plan=most)
        return Auto(allow=("order",)).plan(program, costs, budget)


@pytest.mark.skipif(describe().startswith("none"), reason=f"native extension: {describe()}")
def test_a_policy_that_is_asked_instead_chooses_its_own_number():
    """So that it comes as low as by itself, in no more parts: here the whole batch would not do. What
    parts compile to differs between CPUs by more than there is from one number to the next."""
    own = vmem_jax.jit(step, budget=0.4, policy="modnn", machine=FAST, donate_argnums=0)
    own = own.lower(params(), *batch()).compile()
    assert own.plan.sub_batches > 1
    asked = vmem_jax.jit(
        step, budget=own.need_nbytes, policy=Timid(), machine=FAST, donate_argnums=0
    )
    asked = asked.lower(params(), *batch()).compile()
    assert asked.plan.policy == "modnn" and 1 < asked.plan.sub_batches <= own.plan.sub_batches
    assert asked.need_nbytes <= own.need_nbytes


def test_a_batch_of_one_and_an_uneven_one_run():
    jax.block_until_ready(sized(1))
    whole, parts = sized(7), sized(7, sub_batches=4)  # 2, 2, 2 and 1
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_forms_of_the_step_that_do_not_divide_are_left_out():
    """Chunks of tokens mix samples, and a loop in segments may need all of them."""

    def classify(weights, x, labels):
        loss = lambda weights: optax.softmax_cross_entropy_with_integer_labels(
            jnp.tanh(x @ weights[0]) @ weights[1], labels
        ).mean()
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    weights = [normal(0, (64, 32), jnp.float32, 0.1), normal(1, (32, 4000), jnp.float32, 0.1)]
    args = weights, normal(2, (512, 64), jnp.float32), jnp.arange(512)
    expected = jax.jit(classify)(*args)
    split = vmem_jax.jit(classify, budget=0.35, sub_batches=2)
    assert split.plan(*args).sub_batches == 2
    for ours, theirs in zip(split(*args), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_integer_gradient_is_no_obstacle():
    def both(weights, x):
        loss = lambda weights, table: jnp.mean(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)
        return jax.value_and_grad(loss, (0, 1), allow_int=True)(weights, jnp.arange(3))

    args = [w for w, _ in params()[:2]], batch()[0]
    value, (grads, integer) = jax.jit(both)(*args)
    loss, (split, zeros) = vmem_jax.jit(both, budget="1GiB", sub_batches=4)(*args)
    assert zeros.dtype == integer.dtype == jax.dtypes.float0
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    for a, b in zip(split, grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_numbers_of_sub_batches_that_are_tried():
    assert counts_of(256) == tuple(2**n for n in range(9))
    assert counts_of(96) == (1, 2, 4, 8, 16, 32, 96)
    assert counts_of(255) == (1, 3, 5, 15, 17, 51, 85, 255) and counts_of(7) == (1, 2, 7)


def test_numbers_between_two_have_sub_batches_of_another_size():
    """Of 128 samples 96 sub-batches are the 64 of two samples, and 48 are 43."""
    between = Parts((1, 2, 4), lambda count: None, samples=128).between
    assert [between(64, 128), between(32, 64), between(43, 64)] == [0, 43, 0]
    for fewer, more in ((1, 2), (1, 128), (2, 3), (16, 32), (32, 43)):
        found = between(fewer, more)
        assert not found or (fewer < found < more and -(-128 // -(-128 // found)) == found)


def test_planning_ends_where_more_sub_batches_cannot_win():
    budgeted = vmem_jax.jit(step, budget="1GiB", sub_batches=1)
    entry = budgeted._entry_for((params(), *batch()), {}, None)
    one, need = entry.best.variant, entry.best.need
    one = dataclasses.replace(one, compile_plan=lambda plan: entry.best.compiled)
    assert (
        one.program.resident_nbytes
        < least_nbytes(one.program)
        <= one.policy.plan(one.program, one.costs, None).predicted_peak
    )
    asked = []

    def make(count):
        asked.append(count)
        return dataclasses.replace(one, name=f"in {count}")

    def name(budget, splitting):
        asked.clear()
        found = Search(budget).run([[Family((1, 2, 4, 8), make, splitting)]])
        return found.best.variant.name if found.fits else None

    # the others take no fewer seconds than the first
    assert name(need, Splitting.FASTEST) == "in 1" and 4 not in asked
    assert name(need, Splitting.FEWEST) == "in 1" and asked == [1]
    # where nothing fits all are looked at
    assert name(need // 100, Splitting.FASTEST) is None and asked == [1, 2, 4, 8]


@pytest.mark.gpu_compile
def test_the_peak_falls_on_a_gpu_too():
    [case] = [case for case in steps.CASES if case.name == "vgg"]
    fun, args = case.make(jnp.bfloat16, 16)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    needs = {}
    for count in (1, 4):
        budgeted = vmem_jax.jit(
            fun, budget="8GiB", policy="exact", sub_batches=count, donate_argnums=0
        )
        best = budgeted._entry_for(args, {}, "h200").best
        assert best.need <= 1.1 * best.plan.predicted_peak
        needs[count] = best.need
    assert needs[4] < 0.35 * needs[1]


@pytest.mark.gpu_compile
@pytest.mark.parametrize("count", [2, 3])  # of 128 samples, or of 84 and twice 86
def test_a_gradient_is_summed_in_place_before_the_next_is_made(count):
    def step(params, x):
        def loss(params):
            h = x
            for w in params:
                h = jax.nn.relu(h @ w)
            return jnp.square(h.astype(jnp.float32)).sum()

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    args = [shape(2048, 1024), shape(1024, 1024)], shape(256, 2048)
    how = dict(budget="1GiB", sub_batches=count, donate_argnums=0, batch_argnums=1)
    best = vmem_jax.jit(step, **how)._entry_for(args, {}, "h200").best
    smallest_gradient = 2 * 1024 * 1024
    assert best.need < best.predicted_need + smallest_gradient


@pytest.mark.parametrize("count", [2, 3])
def test_gradients_of_scanned_layers_are_added_up_where_a_loop_makes_them(count):
    """No stack of gradients of one sub-batch lies beside their total."""
    w, x = (normal(i, shape, jnp.float32, 0.1) for i, shape in enumerate([(8, 64, 64), (4, 64)]))
    layer = lambda y, w: (y + jnp.tanh(y @ w), None)
    loss = lambda w, x: jnp.square(jax.lax.scan(layer, x, w)[0]).mean()
    step = lambda w, x: w - 0.1 * jax.grad(loss)(w, x)
    parts = vmem_jax.jit(step, budget="1MiB", sub_batches=count, donate_argnums=0)
    compiled = parts.lower(w, x).compile()
    assert compiled.need_nbytes < 2.6 * w.nbytes
    assert compiled.attempts[-1].predicted_need == pytest.approx(compiled.need_nbytes, rel=0.1)
    np.testing.assert_allclose(parts(w + 0, x), step(w, x), rtol=1e-5, atol=1e-6)
