"""Stacks of scanned layers in pinned host memory come and go by slices, with the same results."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transfer_cases as cases
from jax import lax
from test_loops import needs_calls
from test_transports import FAST
from test_updates import EXACT, MODELS, OPTIMISERS, PLAIN, W, X, same, scanned, training

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.core.cards import CARDS
from vmem_jax.core.machine import Machine
from vmem_jax.core.planned import techniques_of
from vmem_jax.core.validate import violations

CLIPPED = optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(1e-3))


def placed(tree, hosted):
    """A copy of `tree`, whose stacks for which `hosted` holds are in host memory."""
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    put = lambda path, x: jax.device_put(x, host) if x.ndim > 1 and hosted(path) else x + 0
    return jax.tree_util.tree_map_with_path(put, tree)


def everything(path):
    return True


def moments(path):
    return path[0].idx > 0


def nothing(path):
    return False


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim > 1}


def entry_for(step, *args, **options):
    options = {"budget": "1GiB", "donate_argnums": 0, **options}
    return vmem_jax.jit(step, **options)._entry_for(args, {}, None)


def after_two_steps(step, state, hosted, **options):
    budgeted = vmem_jax.jit(
        step, budget="1GiB", donate_argnums=0, compiler_options=EXACT, **options
    )
    state = placed(state, hosted)
    for _ in range(2):
        state, out = budgeted(state, X)
    return state, out


CASES = [(model, "adamw", everything) for model in MODELS if model != "odd unroll"]
CASES += [("odd unroll", "sgd", everything), ("lax", "lion", everything), ("lax", "adamw", moments)]
CASES += [("lax", "clipped", moments), ("shared", "clipped", everything)]


@pytest.mark.parametrize(("model", "optimiser", "hosted"), CASES)
def test_they_come_by_slices_and_results_keep_every_bit(model, optimiser, hosted):
    step, state = training(MODELS[model], {**OPTIMISERS, "clipped": CLIPPED}[optimiser])
    ours = after_two_steps(step, state, hosted)
    assert same(ours, after_two_steps(step, state, nothing))
    there = placed(state, hosted)
    for before, after in zip(jax.tree.leaves(there), jax.tree.leaves(ours[0]), strict=True):
        assert before.sharding.memory_kind == after.sharding.memory_kind
    traced = entry_for(step, there, X).traced
    assert len(traced.captured.sliced) == len(traced.hosted)
    assert traced.captured.whole == () == traced.captured.program.hosted
    compat.check_jaxpr(traced.captured.flat)


PARTS = [("lax", "adamw", everything, 2), ("checkpointed", "adamw", everything, 2)]
PARTS += [("two loops", "sgd", everything, 3), ("lax", "clipped", moments, 3)]


@pytest.mark.parametrize(("model", "optimiser", "hosted", "count"), PARTS)
def test_in_sub_batches_they_come_in_each_and_what_is_updated_once(model, optimiser, hosted, count):
    """Three of four samples are two and a smaller one."""
    step, state = training(MODELS[model], {**OPTIMISERS, "clipped": CLIPPED}[optimiser])
    ours = after_two_steps(step, state, hosted, sub_batches=count)
    assert same(ours, after_two_steps(step, state, nothing, sub_batches=count))
    there = placed(state, hosted)
    assert kinds(ours[0][1]) <= {"pinned_host"}
    captured = entry_for(step, there, X, sub_batches=count).best.variant.origin.captured
    assert len(captured.sliced) == len(captured.inputs.hosted)
    assert captured.whole == () == captured.program.hosted
    ran = sum(s.times * s.returned for s in captured.program.steps)
    assert ran == sum(x.nbytes for x in jax.tree.leaves(there) if is_there(x))


def is_there(x):
    return x.sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("model", ["lax", "nested"])
def test_stacks_that_wait_for_a_norm_of_all_gradients_come_by_slices(model):
    step, state = training(MODELS[model], CLIPPED)
    captured = entry_for(step, placed(state, moments), X).traced.captured
    assert len(captured.sliced) == len(captured.inputs.hosted) and captured.whole == ()


def test_what_is_only_read_comes_by_slices_and_stays_where_it_is():
    """Frozen weights of scanned layers, as of LoRA."""

    def step(small, frozen, x):
        def loss(small):
            body = lambda y, p: (y + jnp.tanh(y @ p[0] + p[1]), None)
            return jnp.square(lax.scan(body, x, (frozen, small))[0]).mean()

        return small - 0.1 * jax.grad(loss)(small), frozen

    small, there = PLAIN["b"], placed([W], everything)[0]
    for donate in ((0,), (0, 1)):
        entry = entry_for(step, small, there, X, donate_argnums=donate)
        assert entry.traced.captured.sliced == (1,) and entry.best.plan.transfers == ()
        budgeted = vmem_jax.jit(step, budget="1GiB", donate_argnums=donate, compiler_options=EXACT)
        given = placed([W], everything)[0]
        found, kept = budgeted(small + 0, given, X)
        on_device = vmem_jax.jit(step, budget="1GiB", compiler_options=EXACT)(small + 0, W, X)
        assert same((found, kept), on_device) and kept.sharding.memory_kind == "pinned_host"


def test_what_moves_is_counted():
    step, state = training((scanned(), PLAIN), OPTIMISERS["momentum"])
    budgeted = vmem_jax.jit(step, budget="1GiB", donate_argnums=0)
    compiled = budgeted.lower(placed(state, everything), X).compile()
    program = compiled._entry.traced.captured.program
    stacks = sum(x.nbytes for x in jax.tree.leaves(state))
    assert compiled.moved_nbytes == stacks  # weights and momentum, once each
    assert sum(s.fetched for s in program.steps) == stacks + sum(a.nbytes for a in PLAIN.values())
    assert "stream" in techniques_of(program, compiled.plan)
    # on a CPU host memory counts as the device's, once for each donated stack
    compiled = budgeted.lower(placed(state, moments), X).compile()
    assert compiled.attempts[-1].predicted_need == pytest.approx(compiled.need_nbytes, rel=0.1)


@pytest.mark.gpu_compile
def test_where_a_slice_lies_in_host_memory_is_said_to_its_copy():
    """What cuts a slice there, and what puts one there, takes no time of its own."""
    step, state = training((scanned(), PLAIN), OPTIMISERS["momentum"])
    compiled = vmem_jax.jit(step, budget="1GiB", donate_argnums=0).lower(placed(state, moments), X)
    program = compiled.compile(target="h200")._entry.traced.captured.program
    machine = CARDS["h200"].machine
    [loop] = [s for s in program.steps if s.returned]
    there = {b for s in loop.body if s.fetched for b in s.reads}
    put = {b for s in loop.body if s.returned for b in s.writes}
    copied = [s for s in loop.body if there & {*s.writes} or put & {*s.reads}]
    assert {s.op for s in copied} == {"dynamic_slice", "dynamic_update_slice"}
    assert len(copied) == 2 * len(there) == 2 * len(PLAIN)
    assert not any(map(machine.seconds, copied))


def test_a_slow_link_takes_its_time():
    """A loop takes no less than its slices take on the link."""
    step, state = training((scanned(), PLAIN), OPTIMISERS["momentum"])
    seconds = []
    for rate in (1e12, 1e6):
        machine = Machine(
            "m", {"": 1e12}, 1e12, 0.0, 2**40, link_out=rate, link_in=rate, link_both=2 * rate
        )
        seconds.append(entry_for(step, placed(state, moments), X, machine=machine).best.plan)
    assert seconds[1].predicted_seconds > sum(a.nbytes for a in PLAIN.values()) / 1e6
    assert seconds[0].predicted_seconds < seconds[1].predicted_seconds / 1000


def with_norm(state, x):
    """It reads the momentum of all layers at once."""
    step, _ = training((scanned(), PLAIN), OPTIMISERS["momentum"])
    (p, s), (loss, _) = step(state, x)
    return (p, s), loss + optax.tree.norm(state[1])


def with_more(state, x):
    """It returns a stack in host memory once more."""
    step, _ = training((scanned(), PLAIN), OPTIMISERS["momentum"])
    new, out = step(state, x)
    return new, (out, state[1])


def pairs_of(eqns, name):
    """The stacks in host memory that equations of this name touch, two moments at a time."""
    origin, found = {}, {}
    for eqn in eqns:
        if eqn.primitive.name == "optimization_barrier":
            origin |= {v: origin.get(a, a) for a, v in zip(eqn.invars, eqn.outvars, strict=True)}
        elif eqn.primitive.name == name and compat.is_in_host_memory(eqn.outvars[0].aval):
            found[origin.get(eqn.invars[0], eqn.invars[0])] = None
    found = [*found]
    return [{*pair} for pair in zip(found[::2], found[1::2], strict=True)]


def held_slices(eqns):
    """For each barrier that holds slices which came: which."""
    origin, found = {}, []
    for eqn in eqns:
        if eqn.primitive.name == "device_put" and not compat.is_in_host_memory(eqn.outvars[0].aval):
            origin[eqn.outvars[0]] = eqn.outvars[0]
        elif eqn.primitive.name == "optimization_barrier":
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            origin |= {v: origin[a] for a, v in pairs if a in origin}
            found.append({origin[a] for a in eqn.invars if a in origin})
    return [slices for slices in found if slices]


def test_slices_come_and_go_while_the_layer_computes():
    """Each update follows its gradient, and what it writes has left before the last product. What is
    updated first comes first, and is there an update earlier."""

    def deep(y, p):
        for w in p.values():
            y = y + 0.1 * jnp.tanh(y @ w)
        return y, None

    weights = {name: W * (1 + n / 10) for n, name in enumerate("abcdef")}
    step, state = training((scanned(jax.checkpoint(deep)), weights), OPTIMISERS["adamw"])
    for hosted in (moments, everything):
        flat = entry_for(step, placed(state, hosted), X).traced.captured.flat
        *_, loop = (e for e in compat.open_jaxpr(flat).eqns if e.primitive.name == "scan")
        eqns = compat.open_jaxpr(loop.params["jaxpr"]).eqns
        at = {
            name: [i for i, e in enumerate(eqns) if e.primitive.name == name]
            for name in ("dot_general", "dynamic_update_slice", "optimization_barrier")
        }
        products = at["dot_general"]
        away = [
            i
            for i in at["dynamic_update_slice"]
            if compat.is_in_host_memory(eqns[i].outvars[0].aval)
        ]
        if hosted is moments:
            assert pairs_of(eqns, "dynamic_slice") == pairs_of(eqns, "dynamic_update_slice")
            *held, last = held_slices(eqns)  # of one update and of the one behind it
            assert all(
                len(one) == 4 and len(one & new) == 2 for one, new in itertools.pairwise(held)
            )
            assert last < held[-1] and len(set().union(*held)) == 2 * len(weights)
        early = [i for i in away if i < products[-1]]
        assert len(early) >= len(away) / 2
        held = [
            {v.aval.shape for v in eqns[i].invars if compat.is_in_host_memory(v.aval)}
            for i in at["optimization_barrier"]
            if i < products[-1]
        ]
        assert {W.shape} in held  # so that the copy is over by then
        pairs = (after_two_steps(step, state, where) for where in (hosted, nothing))
        for a, b in zip(*map(jax.tree.leaves, pairs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("step", "options", "why"),
    [
        (with_norm, {}, "reads all of it"),
        (with_more, {}, "reads all of it"),
        (with_norm, {"donate_argnums": ()}, "the state is not donated"),
        (with_norm, {"sub_batches": 2}, "reads all of it"),
    ],
)
def test_what_comes_as_a_whole_is_named_with_the_reason(step, options, why, caplog):
    _, state = training((scanned(), PLAIN), OPTIMISERS["momentum"])
    there = placed(state, moments)
    entry = entry_for(step, there, X, **options)
    captured = entry.best.variant.origin.captured
    assert captured.sliced == () and entry.best.plan.transfers
    names = "`state[1][1][0].trace['w']`, `state[1][1][0].trace['b']`"
    said = f"{names}, 260.00 KiB in host memory, come as a whole: "
    assert any(said in text and why in text for text in map(str, caplog.messages))
    budgeted = vmem_jax.jit(step, budget="1GiB", **{"donate_argnums": 0, **options})
    told = " ".join(str(budgeted.explain(there, X)).split())  # it is wrapped
    assert said in told and why in told.split(said)[1]


def test_arguments_that_are_no_stacks_of_a_loop_are_not_mentioned():
    """Of unrolled layers each comes alone, and is a whole."""
    step = lambda s, x: (jax.tree.map(lambda a: a + x.sum(), s), x)
    found = entry_for(step, placed([W], everything), X).traced
    assert len(found.hosted) == 1 and found.captured.whole == () == found.captured.sliced


@needs_calls
def test_looped_stacks_and_hosted_ones_move_in_one_loop():
    """Our own calls move residuals in the loops whose slices of state XLA moves."""
    step, state = training((scanned(), PLAIN), OPTIMISERS["momentum"])
    how = {"allow": ("order", "offload", "stream"), "machine": FAST}
    there = placed(state, moments)
    entry = entry_for(step, there, X, **how)
    program = entry.traced.captured.program
    plan = entry.policy.plan(program, entry.costs, None)
    plan = plan.__class__(
        **{
            **plan.__dict__,
            "looped": tuple(b for b, x in enumerate(program.buffers) if x.slices > 1),
            "fenced": True,
        }
    )
    assert plan.looped and violations(program, plan) == []
    budgeted = vmem_jax.jit(step, plan=plan, donate_argnums=0, **how)
    with cases.injected(delay_seconds=1e-3, poison=True):
        ours = budgeted(there, X)
    kept = vmem_jax.jit(step, budget="1GiB", policy="exact", donate_argnums=0)
    assert same(ours, kept(placed(state, nothing), X)) and kinds(ours[0][1]) == {"pinned_host"}


def test_a_compiled_plan_is_saved_and_run_again(tmp_path):
    step, state = training((scanned(), PLAIN), OPTIMISERS["adamw"])
    entry = entry_for(step, placed(state, moments), X)
    entry.best.plan.save(tmp_path / "plan.json")
    again = vmem_jax.jit(step, plan=vmem_jax.Plan.load(tmp_path / "plan.json"), donate_argnums=0)
    ours = again(placed(state, moments), X)
    assert same(ours, vmem_jax.jit(step, budget="1GiB")(state, X))
    with pytest.raises(vmem_jax.PlanError, match="another step"):
        again(placed(state, nothing), X)
