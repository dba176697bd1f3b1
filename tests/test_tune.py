"""tune: a measured step against its prediction, on a clock that tests set."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import jax
import pytest
from helpers import plan_of
from test_jit import assert_close, batch, params, step
from test_moves import CHAIN, ORDER, costs_of
from test_offload import FAST, built, same

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.api import rivals, tune
from vmem_jax.compiler import compile
from vmem_jax.core.costs import Source
from vmem_jax.core.plan import Transfer
from vmem_jax.core.simulate import simulate
from vmem_jax.core.tuning import Timed, Tuning, agree
from vmem_jax.policy import AbstractPolicy, Auto

STEPS = len(CHAIN.steps)

# -- agree


def total(costs, plan):
    return simulate(CHAIN, plan.order, costs, plan.transfers).seconds


def test_what_was_measured_stays_and_the_guesses_are_scaled():
    sources = (Source.MEASURED, Source.SCALED, *[Source.ROOFLINE] * (STEPS - 2))
    costs = dataclasses.replace(costs_of(CHAIN), sources=sources)
    plan = plan_of(CHAIN, ORDER)
    found = agree(CHAIN, costs, plan, 2 * total(costs, plan))
    assert total(found, plan) == pytest.approx(2 * total(costs, plan))
    assert found.seconds[:2] == costs.seconds[:2] and found.sources[:2] == sources[:2]
    assert len(set(found.seconds[2:])) == 1 and found.seconds[2] > 2
    assert set(found.sources[2:]) == {Source.CALIBRATED} and found.link == costs.link


@pytest.mark.parametrize("source", [Source.MEASURED, Source.ROOFLINE])
def test_where_nothing_else_can_be_wrong_all_steps_are(source):
    sources = (*[Source.MEASURED] * (STEPS - 1), source)
    costs = dataclasses.replace(costs_of(CHAIN), sources=sources)
    plan = plan_of(CHAIN, ORDER)
    found = agree(CHAIN, costs, plan, 3 * total(costs, plan))
    assert total(found, plan) == pytest.approx(3 * total(costs, plan))
    assert found.seconds == pytest.approx([3.0] * STEPS)


def test_stalls_are_not_scaled_with_the_steps():
    """The link is slow: half of the time is stalls, which slower steps hide."""
    plan = plan_of(CHAIN, ORDER, transfers=(Transfer(2, 3, 4, 13, 14),))
    costs = costs_of(CHAIN, link=1.0)
    found = agree(CHAIN, costs, plan, 1.25 * total(costs, plan))
    assert total(found, plan) == pytest.approx(1.25 * total(costs, plan))
    assert found.link == costs.link and found.seconds[0] > 1.25


def test_a_step_faster_than_its_link_makes_the_link_faster_too():
    plan = plan_of(CHAIN, ORDER, transfers=(Transfer(2, 3, 4, 13, 14),))
    costs = costs_of(CHAIN, link=0.01)
    found = agree(CHAIN, costs, plan, 0.1 * total(costs, plan))
    assert total(found, plan) == pytest.approx(0.1 * total(costs, plan))
    assert found.link.out == pytest.approx(0.1)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="by the clock"):
        agree(CHAIN, costs_of(CHAIN), plan_of(CHAIN, ORDER), 0.0)


def test_tuning_is_told_in_one_line():
    first = Timed("auto", 58.9e-3, 61.2e-3)
    line = "auto: measured 61.20 ms, predicted 58.90 ms (-4%), kept"
    assert str(Tuning(first)) == line and Tuning(first).kept is first
    faster, failed = Timed("bits", 1.0, 0.05), Timed("parts", 1.0, None, "no room")
    tuning = Tuning(first, (faster, failed), "no other plan")
    assert tuning.kept is faster
    assert str(tuning).startswith("auto: measured 61.20 ms, predicted 58.90 ms (-4%); bits: ")
    assert str(tuning).endswith(", kept; parts: no room; no other plan")


# -- jit(tune=True)


class Wasteful(AbstractPolicy):
    """Recomputes more than it has to."""

    name = "wasteful"

    def plan(self, program, costs, budget):
        return Auto(allow=("order", "recompute")).plan(program, costs, int(0.75 * budget))


WASTEFUL, AUTO = Wasteful(), Auto(allow=("order", "recompute"))


@dataclasses.dataclass(frozen=True)
class Learns(AbstractPolicy):
    """`first` by the costs that it is given at first, `then` by any others."""

    name = "learns"
    first: AbstractPolicy = WASTEFUL
    then: AbstractPolicy = AUTO
    made: list = dataclasses.field(default_factory=list, compare=False)

    def plan(self, program, costs, budget):
        self.made.append(costs)
        policy = self.first if costs.seconds == self.made[0].seconds else self.then
        return policy.plan(program, costs, budget)


class Clock:
    """Says that the timed calls take `seconds`, one after the other; then the last of them."""

    def __init__(self, monkeypatch, *seconds):
        self.seconds, self.reads = seconds, 0
        monkeypatch.setattr(tune, "_clock", self)

    @property
    def timed(self) -> int:
        return self.reads // 2

    def __call__(self) -> float:
        self.reads += 1
        which = min((self.reads - 1) // 2, len(self.seconds) - 1)
        return 1000.0 * self.reads + (self.seconds[which] - 1000.0 if self.reads % 2 == 0 else 0.0)


def tuned(policy=None, **options):
    options = {"budget": 0.5, "machine": FAST, "tune": True, **options}
    return vmem_jax.jit(step, policy=policy or Learns(), **options)


def calls(budgeted, count):
    return [jax.block_until_ready(budgeted(params(), batch())) for _ in range(count)]


EACH = tune.WARM_UP + tune.TIMED


def test_nothing_is_timed_unless_asked(monkeypatch):
    clock = Clock(monkeypatch, 1.0)
    budgeted = tuned(tune=False)
    calls(budgeted, EACH + 1)
    assert clock.reads == 0 and budgeted.explain(params(), batch()).tuning is None


def test_a_good_prediction_is_measured_and_left_alone(monkeypatch):
    budgeted = tuned()
    plan = budgeted.plan(params(), batch())
    clock = Clock(monkeypatch, 9.0, 1.04 * plan.predicted_seconds, 0.0)  # the median counts
    policy = budgeted._settings.policy
    made = len(policy.made)
    results = calls(budgeted, EACH + 3)
    assert clock.timed == tune.TIMED and len(policy.made) == made
    explanation = budgeted.explain(params(), batch())
    assert explanation.tuning.first.measured == pytest.approx(1.04 * plan.predicted_seconds)
    assert "(-4%)" in explanation.summary() and explanation.plan == plan
    assert all(same(r, results[0]) for r in results)
    assert budgeted._last is not None  # the usual, short way from here on


def test_a_bad_prediction_is_planned_again_once_and_the_faster_stays(monkeypatch):
    budgeted = tuned()
    first = budgeted.plan(params(), batch())
    wrong, right = 2 * first.predicted_seconds, 1.5 * first.predicted_seconds
    clock = Clock(monkeypatch, *[wrong] * tune.TIMED, *[right] * tune.TIMED)
    results = calls(budgeted, 4 * EACH)
    assert clock.timed == 2 * tune.TIMED  # once more, and never again
    explanation = budgeted.explain(params(), batch())
    [other] = explanation.tuning.others
    assert explanation.plan.order != first.order and explanation.tuning.kept is other
    assert explanation.tuning.first.measured == pytest.approx(wrong)
    assert other.measured == pytest.approx(right)
    assert explanation.plan == budgeted.plan(params(), batch())
    assert explanation.compiled_need <= explanation.budget
    assert "kept" in explanation.summary()
    for result in results:
        assert_close(result, results[0])
    assert_close(results[-1], jax.jit(step)(params(), batch()))


def test_the_slower_is_not_kept(monkeypatch):
    budgeted = tuned()
    first = budgeted.plan(params(), batch())
    wrong, worse = 2 * first.predicted_seconds, 2.5 * first.predicted_seconds
    clock = Clock(monkeypatch, *[wrong] * tune.TIMED, *[worse] * tune.TIMED)
    calls(budgeted, 3 * EACH)
    assert clock.timed == 2 * tune.TIMED
    explanation = budgeted.explain(params(), batch())
    assert explanation.plan == first and explanation.tuning.kept is explanation.tuning.first
    assert len(explanation.tuning.others) == 1


def test_a_plan_that_is_no_better_is_not_compiled(monkeypatch):
    budgeted = tuned(Learns(first=AUTO, then=WASTEFUL))
    first = budgeted.plan(params(), batch())
    clock = Clock(monkeypatch, 2 * first.predicted_seconds)
    compiled = []
    compiles = lambda *args, **how: compiled.append(args)
    monkeypatch.setattr("vmem_jax.techniques.context.compile_jaxpr", compiles)
    calls(budgeted, 2 * EACH)
    assert clock.timed == tune.TIMED and compiled == []
    tuning = budgeted._entry_for((params(), batch()), {}, None).tuning
    assert not tuning.others and "no other plan" in tuning.note


def test_errors_of_tuning_do_not_reach_training(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Fails(Learns):
        def plan(self, program, costs, budget):
            if self.made and costs.seconds != self.made[0].seconds:
                raise RuntimeError("no plan today")
            return super().plan(program, costs, budget)

    budgeted = tuned(Fails())
    first = budgeted.plan(params(), batch())
    clock = Clock(monkeypatch, 2 * first.predicted_seconds)
    results = calls(budgeted, 2 * EACH)
    assert clock.timed == tune.TIMED and all(same(r, results[0]) for r in results)
    tuning = budgeted.explain(params(), batch()).tuning
    assert tuning.note == "planning again failed: RuntimeError: no plan today"


def test_another_plan_that_fails_gives_way_to_the_first(monkeypatch):
    budgeted = tuned()
    first = budgeted.plan(params(), batch())
    Clock(monkeypatch, 2 * first.predicted_seconds)
    results = calls(budgeted, EACH)
    tuner = budgeted._entry_for((params(), batch()), {}, None).tuner
    assert tuner._running.attempt.plan != first

    def broken(*args):
        raise MemoryError("no room")

    other = dataclasses.replace(tuner._running.attempt, compiled=broken)
    tuner._running = tuner._running._replace(attempt=other)
    assert same(calls(budgeted, 1)[0], results[0])
    explanation = budgeted.explain(params(), batch())
    [failed] = explanation.tuning.others
    assert explanation.plan == first and failed.measured is None and "no room" in failed.note


def test_an_error_of_the_step_itself_is_the_users(monkeypatch):
    Clock(monkeypatch, 1.0)
    budgeted = tuned()

    def broken(*args):
        raise MemoryError("no room")

    entry = budgeted._entry_for((params(), batch()), {}, None)
    tuner = entry.tuner
    other = dataclasses.replace(entry.best, compiled=broken)
    tuner._running = tuner._running._replace(attempt=other)
    with pytest.raises(MemoryError, match="no room"):
        budgeted(params(), batch())


def test_every_set_of_shapes_has_its_own_tuning(monkeypatch):
    budgeted = tuned(budget="1GiB")
    clock = Clock(monkeypatch, 1.0)
    for n in (256, 128):
        for _ in range(EACH + 1):
            budgeted(params(), batch(n))
        assert budgeted.explain(params(), batch(n)).tuning is not None
    assert clock.timed >= 2 * tune.TIMED


def test_donated_arguments_and_static_ones_are_tuned_too(monkeypatch):
    def scaled(params, x, scale):
        new, loss = step(params, x)
        return jax.tree.map(lambda p: scale * p, new), loss

    budgeted = vmem_jax.jit(
        scaled, budget=0.5, donate_argnums=0, static_argnums=2, policy=Learns(), tune=True,
        machine=FAST,
    )  # fmt: skip
    first = budgeted.plan(params(), batch(), 1.0)
    wrong, right = 2 * first.predicted_seconds, 1.5 * first.predicted_seconds
    clock = Clock(monkeypatch, *[wrong] * tune.TIMED, *[right] * tune.TIMED)
    state, expected = params(), params()
    plain = jax.jit(lambda p, x: scaled(p, x, 1.0))
    for _ in range(2 * EACH + 1):
        state, _ = budgeted(state, batch(), 1.0)
        expected, _ = plain(expected, batch())
    assert clock.timed == 2 * tune.TIMED and budgeted.plan(params(), batch(), 1.0) != first
    assert_close(state, expected, rtol=1e-3)


def test_a_given_plan_is_not_tuned():
    plan = vmem_jax.jit(step, budget=0.5).plan(params(), batch())
    with pytest.raises(ValueError, match="`tune` may make another plan"):
        vmem_jax.jit(step, plan=plan, tune=True)


@built
def test_the_host_memory_of_the_slower_plan_is_given_back(monkeypatch):
    moves = Learns(first=Auto(allow=("order", "offload")), then=AUTO)
    budgeted = tuned(moves, allow=("order", "offload", "recompute"))
    first = budgeted.plan(params(), batch())
    assert first.transfers
    arena = weakref.ref(budgeted.lower(params(), batch()).compile().arena)
    # by the clock it is slow, and so are its guessed steps: recomputing is not predicted to be better
    monkeypatch.setattr(rivals, "agree", lambda program, costs, plan, seconds: slow_link(costs))
    wrong, right = 2 * first.predicted_seconds, first.predicted_seconds
    Clock(monkeypatch, *[wrong] * tune.TIMED, *[right] * tune.TIMED)
    results = calls(budgeted, 2 * EACH + 1)
    assert not budgeted.plan(params(), batch()).transfers
    assert_close(results[-1], results[0])
    gc.collect()
    assert arena() is None


def slow_link(costs):
    link = dataclasses.replace(costs.link, out=1e6, into=1e6, both=1e6)
    seconds = tuple(1.5 * s for s in costs.seconds)
    return dataclasses.replace(costs, link=link, seconds=seconds)


# -- rivals: what the search left, and other kernels


def test_what_the_search_left_is_timed_and_the_fastest_stays(monkeypatch):
    budgeted = tuned("auto")
    first = budgeted.plan(params(), batch())
    assert first.sub_batches == 1
    right = first.predicted_seconds
    clock = Clock(monkeypatch, *[right] * tune.TIMED, *[0.9 * right] * tune.TIMED)
    results = calls(budgeted, 4 * EACH)
    explanation = budgeted.explain(params(), batch())
    [other] = explanation.tuning.others  # a third is predicted to be slower by more than the error
    assert other.what == "auto in 2 sub-batches" and explanation.tuning.kept is other
    assert explanation.plan.sub_batches == 2 and explanation.compiled_need <= explanation.budget
    assert clock.timed == 2 * tune.TIMED and budgeted._entries  # and no more
    assert all(not entry.rivals for entry in budgeted._entries.values())
    assert_close(results[-1], jax.jit(step)(params(), batch()))


def test_nothing_is_left_to_be_made_unless_asked():
    budgeted = tuned("auto", tune=False)
    budgeted(params(), batch())
    assert all(not entry.rivals for entry in budgeted._entries.values())


OTHER = {"xla_cpu_enable_fast_min_max": True}
OTHERS = {"cpu": (compat.OtherOptions("others", "dot_general", OTHER),)}


def test_the_fastest_plan_is_timed_with_other_kernels_for_products(monkeypatch, tmp_path):
    monkeypatch.setattr(
        compat, "OTHER_OPTIONS", {"cpu": (compat.OtherOptions("others", "dot_general", OTHER),)}
    )
    budgeted = tuned(Auto(allow=("order", "recompute")))
    first = budgeted.plan(params(), batch())
    right = first.predicted_seconds
    Clock(monkeypatch, *[right] * tune.TIMED, *[0.9 * right] * tune.TIMED)
    calls(budgeted, 4 * EACH)
    explanation = budgeted.explain(params(), batch())
    assert [one.what for one in explanation.tuning.others] == ["others"]
    plan = explanation.plan
    assert plan.options == (*OTHER.items(),) and plan.order == first.order
    plan.save(tmp_path / "plan.json")

    given = []
    compiles = compile.with_ours
    monkeypatch.setattr(
        compile, "with_ours", lambda own, *a: given.append(own) or compiles(own, *a)
    )
    again = vmem_jax.jit(step, plan=vmem_jax.Plan.load(tmp_path / "plan.json"))
    assert_close(again(params(), batch()), jax.jit(step)(params(), batch()))
    assert OTHER in given


@pytest.mark.parametrize("how", ["compiler_options", "XLA_FLAGS", "no products"])
def test_kernels_that_the_user_chose_or_has_not_are_left(how, monkeypatch):
    monkeypatch.setattr(
        compat, "OTHER_OPTIONS", {"cpu": (compat.OtherOptions("others", "dot_general", OTHER),)}
    )
    options = {"compiler_options": {**OTHER}} if how == "compiler_options" else {}
    budgeted = tuned(Auto(allow=("order", "recompute")), **options)
    first = budgeted.plan(params(), batch())
    if how == "XLA_FLAGS":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_min_max=false")
    if how == "no products":
        monkeypatch.setattr(rivals, "has", lambda jaxpr, primitive: False)
    Clock(monkeypatch, first.predicted_seconds)
    calls(budgeted, 2 * EACH)
    assert not budgeted.explain(params(), batch()).tuning.others


@pytest.mark.gpu_compile
def test_without_triton_products_are_cublas_calls():
    def product(w, x):
        return (jax.nn.gelu(x @ w) @ w.T).sum()

    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in [(1024, 1024), (512, 1024)]]
    step = vmem_jax.jit(jax.grad(product), budget="1GiB", policy="exact")
    made = step.lower(*args).compile(target="h200")
    [others] = compat.OTHER_OPTIONS["gpu"]
    plan = dataclasses.replace(made.plan, options=(*others.options.items(),))
    other = vmem_jax.jit(jax.grad(product), plan=plan).lower(*args).compile(target="h200")
    assert "__triton" in made.as_text() and "__cublas$" not in made.as_text()
    assert "__triton" not in other.as_text() and "__cublas$" in other.as_text()


# -- corrections


def test_what_was_measured_corrects_later_predictions(monkeypatch, tmp_path):
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    allow = {"allow": ("order", "recompute"), "machine": None}
    budgeted = tuned(Auto(), **allow)
    first = budgeted.plan(params(), batch())
    Clock(monkeypatch, 3 * first.predicted_seconds)
    calls(budgeted, 4 * EACH)

    again = tuned(Auto(), tune=False, **allow).plan(params(), batch())
    assert again.predicted_seconds == pytest.approx(3 * first.predicted_seconds, rel=0.01)
    smaller = tuned(Auto(), tune=False, budget=0.45, **allow).plan(params(), batch())
    assert smaller.predicted_seconds > 2.9 * first.predicted_seconds  # whatever the budget
    ignored = tuned(Auto(), tune=False, profile=False, **allow).plan(params(), batch())
    assert ignored.predicted_seconds == pytest.approx(first.predicted_seconds)

    # what is measured again is measured against what was predicted before any correction
    second = tuned(Auto(), **allow)
    assert second.plan(params(), batch()) == again
    Clock(monkeypatch, 2 * first.predicted_seconds)
    calls(second, 4 * EACH)
    last = tuned(Auto(), tune=False, **allow).plan(params(), batch())
    assert last.predicted_seconds == pytest.approx(2 * first.predicted_seconds, rel=0.01)


def test_forms_that_were_not_timed_are_corrected_by_the_mean(monkeypatch, tmp_path):
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    budgeted = tuned("auto", machine=None)
    first = budgeted.plan(params(), batch())
    Clock(monkeypatch, 4 * first.predicted_seconds)
    calls(budgeted, 6 * EACH)
    plain = tuned("auto", machine=None, tune=False, sub_batches=8, profile=False)
    later = tuned("auto", machine=None, tune=False, sub_batches=8)
    ratio = later.plan(params(), batch()).predicted_seconds
    assert ratio > 2 * plain.plan(params(), batch()).predicted_seconds
