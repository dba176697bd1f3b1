"""Pairs of scans in segments, on one level or several, of which only the carry-ins are stacked."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FAST
from jax import lax
from test_loop_residuals import BODIES, MACHINE, assert_near, captured_of, run, temporaries

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture.capture import capture_pair
from vmem_jax.capture.loop_pairs import find_pairs
from vmem_jax.capture.loop_residuals import with_stacks
from vmem_jax.capture.loop_segments import Segments, segmented
from vmem_jax.core.paired import Division
from vmem_jax.policy.params import PARAMS
from vmem_jax.policy.residuals import Kept, Stacks, choose
from vmem_jax.policy.segment_lengths import Divided, divisions

WIDTH = 16


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 0.3, shape), jnp.float32)


def recurrent_step(length, rows=64):
    """A recurrent network over `length` inputs, and its arguments."""

    def step(w, xs):
        start = jnp.zeros((rows, WIDTH))
        cell = lambda w: lambda h, x: (jnp.tanh(h @ w + x), None)
        loss = lambda w: jnp.square(lax.scan(cell(w), start, xs)[0]).mean()
        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    return step, (normal(1, WIDTH, WIDTH), normal(2, length, WIDTH))


class Loops:
    """The pairs of a step, and the step made again by a choice."""

    def __init__(self, step, args):
        self.args = args
        self.closed, captured = captured_of(step, args)
        self.flat = captured.separate
        self.pairs = find_pairs(self.flat)
        self.loops, self.variables = zip(*map(capture_pair, self.pairs), strict=True)

    def by(self, kept: Kept):
        chosen = [
            (pair, [vs[b] for b in sorted(buffers)])
            for pair, vs, buffers in zip(self.pairs, self.variables, kept.buffers, strict=True)
        ]
        made, stacks = with_stacks(self.flat, chosen)
        each = zip(kept.every, kept.parts, self.variables, stacks, self.pairs, strict=True)
        divided = [
            Segments(every, frozenset(own[vs[b]] for b in part), len(pair.given.backward))
            for every, part, vs, own, pair in each
            if every
        ]
        again = segmented(made, divided)
        compat.check_jaxpr(again)
        return again


# -- the segments


def walked(division: Division, kept=0):
    """(iterations in the order in which they run backwards, how many run forwards again, the most
    carry-ins at a time) of a division, by running it."""
    numbers = list(range(division.length - division.last, division.length))[::-1]
    again, levels = 0, division.levels
    most = [kept + sum(level.count for level in levels)]
    for i, level in reversed([*enumerate(levels)]):
        before = kept + sum(each.count for each in levels[: i + 1])
        for segment in reversed(range(level.count)):
            own, more, held = walked(level.deeper, before)
            numbers += [n + level.at + segment * level.every for n in own]
            again += level.every + more
            most.append(held)
    return numbers, again, max(most)


@pytest.mark.parametrize("length", [4, 5, 7, 13, 16, 60])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_segments_cover_all_iterations(length, levels):
    for every in itertools.combinations(range(min(length, 14) - 1, 1, -1), levels):
        division = Division(length, every)
        numbers, again, most = walked(division)
        assert numbers == [*range(length)][::-1]
        assert 1 <= division.last <= every[-1] == division.slices
        assert (division.again, division.carry_ins_at_once) == (again, most)
        assert division.levels[0].count >= 1


@pytest.mark.parametrize("name", BODIES)
def test_segments_give_the_same_results(name):
    made = Loops(*BODIES[name]())
    expected = run(made.closed, made.args)
    for every in divisions(made.loops)[-1:]:
        kept = choose(made.loops, MACHINE, fewest=True, every=every)
        assert kept.every == every
        assert_near(run(made.by(kept), made.args), expected)


@pytest.mark.parametrize(
    ("length", "every"),
    [
        *[(4, (2,)), (5, (2,)), (7, (3,)), (13, (4,)), (13, (11,)), (12, (3,))],
        *[(8, (4, 2)), (13, (5, 2)), (13, (9, 8)), (60, (20, 6)), (31, (16, 8, 4, 2))],
    ],
)
def test_any_number_of_iterations_can_be_divided(length, every):
    made = Loops(*recurrent_step(length))
    kept = choose(made.loops, MACHINE, fewest=True, every=(every,))
    assert kept.every == (every,)
    assert_near(run(made.by(kept), made.args), run(made.closed, made.args))


def test_segments_of_segments_give_the_same_bits_as_no_stack():
    made = Loops(*recurrent_step(31))
    whole, divided = (choose(made.loops, MACHINE, fewest=True, every=e) for e in ((), ((9, 3),)))
    results = (run(made.by(kept), made.args) for kept in (whole, divided))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["dropout", "carried_key", "nested", "reverse", "unrolled"])
def test_any_values_can_be_stacked_whole_or_for_a_segment(name, seed):
    made = Loops(*BODIES[name]())
    rng = np.random.default_rng(seed)
    loop = made.loops[0]
    early = [b for b in loop.keepable if rng.random() < 0.4]
    parts = frozenset(b for b in early if rng.random() < 0.5) | loop.carried
    every = [(2,), (4, 2)][seed]
    kept = Kept((frozenset(early) | parts,), 0, 0.0, (every,), (parts,))
    assert_near(run(made.by(kept), made.args), run(made.closed, made.args))


def test_segments_need_less_memory_than_a_stack_of_all_that_is_carried():
    made = Loops(*recurrent_step(100, rows=256))
    whole = choose(made.loops, MACHINE, fewest=True)
    divided = fewest_in_segments(made)
    assert divided.segments is not None
    assert divided.nbytes < 0.25 * whole.nbytes
    once = choose(made.loops, MACHINE, fewest=True, every=((10,),))
    needs = [temporaries(made.by(kept), made.args) for kept in (whole, once, divided)]
    assert needs[1] < 0.35 * needs[0]
    assert needs[2] <= needs[1] + 0.95 * (divided.nbytes - once.nbytes) < 0.8 * needs[1]


# -- the choice


def fewest_in_segments(made):
    """The choice with the fewest bytes, on as many levels as are of use."""
    *_, fewest = Divided(made.loops, MACHINE).by_levels()
    return fewest


@pytest.mark.parametrize(("length", "levels"), [(16, 1), (60, 1), (100, 1), (60, 2), (100, 2)])
def test_the_fewest_slices_are_near_the_best_of_all_lengths(length, levels):
    """On one level these are the lengths near the square root."""
    made = Loops(*recurrent_step(length))
    chosen = [
        choose(made.loops, MACHINE, fewest=True, every=every)
        for every in divisions(made.loops, levels)
    ]
    slices = lambda every: (
        Division(length, every).slices + Division(length, every).carry_ins_at_once
    )
    size = 4 * 64 * WIDTH
    for kept in chosen:
        assert kept.nbytes == size * slices(*kept.every)
    every = itertools.combinations(range(length - 1, 1, -1), levels)
    assert min(kept.nbytes for kept in chosen) <= 1.06 * size * min(map(slices, every))


def test_further_levels_store_fewer_slices_and_take_longer():
    made = Loops(*recurrent_step(1024))
    fewest = [
        min(
            (choose(made.loops, MACHINE, fewest=True, every=every) for every in found),
            key=lambda kept: kept.nbytes,
        )
        for found in ([()], *(divisions(made.loops, levels) for levels in (1, 2, 3)))
    ]
    nbytes = [kept.nbytes for kept in fewest]
    assert nbytes[1] == 63 * 4 * 64 * WIDTH
    assert all(b <= 0.8 * a for a, b in itertools.pairwise(nbytes))
    seconds = [kept.seconds for kept in fewest]
    assert seconds == sorted(seconds)
    assert fewest_in_segments(made).nbytes <= nbytes[-1]
    for limit, slowest in zip(nbytes, seconds, strict=True):
        assert Divided(made.loops, MACHINE).within(limit).seconds <= slowest
    assert Divided(made.loops, MACHINE).within().segments is None


def test_a_loop_is_divided_only_where_that_is_faster():
    """Within a number of bytes segments take no longer. Without a limit nothing is divided."""
    made = Loops(*BODIES["plain"]())
    free = Divided(made.loops, MACHINE).within()
    assert free.segments is None
    fewest = choose(made.loops, MACHINE, fewest=True).nbytes
    for share in (1.0, 1.3, 1.7):
        limit = int(share * fewest)
        kept = Divided(made.loops, MACHINE).within(limit)
        assert kept.nbytes <= limit
        assert kept.seconds <= choose(made.loops, MACHINE, limit).seconds * 1.001


def test_each_iteration_but_those_of_the_last_segment_runs_forwards_once_more():
    made = Loops(*recurrent_step(12))
    [loop] = made.loops
    forward = sum(MACHINE.seconds(loop.program.steps[s]) for s in loop.first_steps)
    seconds = []
    for every in (2, 3, 4, 6):
        kept = choose(made.loops, MACHINE, fewest=True, every=((every,),))
        [count] = [level.count for level in Division(12, (every,)).levels]
        copy = 2 * 4 * 64 * WIDTH / MACHINE.bandwidth + MACHINE.launch
        # to a stack, and out of it for the product, which waits for it
        stacks = (12 + count) * (2 * copy + MACHINE.latency)
        again = kept.seconds - stacks - 12 * forward  # and for the backward loop once again
        assert again <= count * every * (forward + MACHINE.launch) * 1.01
        seconds.append(kept.seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_lengths_of_segments_are_tried_by_octaves():
    made = Loops(*recurrent_step(128))
    found = [every for ((every,),) in divisions(made.loops)]
    assert min(found) == 2
    assert max(found) == 64
    assert all(b <= 1.6 * a for a, b in itertools.pairwise(sorted(found)))


def within_some_bytes(length):
    """The loops of a recurrent step, and 1.5 times the fewest bytes on one level of segments."""
    made = Loops(*recurrent_step(length))
    of_all = [
        functools.partial(choose, made.loops, MACHINE, every=e) for e in divisions(made.loops)
    ]
    return made, of_all, int(1.5 * min(one(fewest=True).nbytes for one in of_all))


@pytest.fixture
def solved(monkeypatch):
    """What is solved: the choices, and those of relaxations."""
    found = {"solve": [], "least": []}
    for name, calls in found.items():
        own = getattr(Stacks, name)
        record = lambda *args, own=own, calls=calls: calls.append(own(*args)) or calls[-1]
        monkeypatch.setattr(Stacks, name, record)
    return found


def test_lengths_of_segments_are_as_good_as_the_best_and_few_programs_are_solved(solved):
    made, of_all, limit = within_some_bytes(128)
    best = min(kept.seconds for one in of_all if (kept := one(limit)) is not None)
    solved["solve"].clear()
    kept = Divided(made.loops, MACHINE).within(limit)
    assert kept.segments is not None and kept.nbytes <= limit
    assert kept.seconds <= best / (1 - PARAMS.division_gap)
    assert len(solved["solve"]) <= len(of_all) / 2


def test_what_was_found_within_more_bytes_is_not_looked_for_again(solved):
    made, _, limit = within_some_bytes(128)
    divided = Divided(made.loops, MACHINE)
    kept = divided.within(limit)
    solved["solve"].clear()
    assert divided.within(kept.nbytes) == kept
    assert not solved["solve"]
    fewer = divided.within(kept.nbytes - 1)
    assert solved["solve"]
    assert fewer.nbytes < kept.nbytes
    alone = Divided(made.loops, MACHINE).within(kept.nbytes - 1)
    assert fewer.seconds == pytest.approx(alone.seconds, rel=PARAMS.division_gap)


def test_one_relaxation_tells_that_no_length_can_be_better(solved):
    """Where all that the fastest choice stacks fits, segments are not of use."""
    made = Loops(*recurrent_step(128))
    whole = choose(made.loops, MACHINE)
    solved["solve"].clear()
    assert Divided(made.loops, MACHINE).within(whole.nbytes).buffers == whole.buffers
    assert (len(solved["solve"]), len(solved["least"])) == (1, 1)


# -- the whole of it


@pytest.mark.parametrize(("slices", "levels"), [(48, 1), (23, 2)])
def test_a_step_runs_in_less_than_its_carry_ins_take(tmp_path, slices, levels):
    step, args = recurrent_step(97, rows=512)
    given = sum(a.nbytes for a in args)
    budget = given + slices * 512 * WIDTH * 4  # of 97; 5 or so are the body's
    budgeted = vmem_jax.jit(step, budget=budget, machine=FAST, sub_batches=1)
    plan = budgeted.plan(*args)
    [(every, _)] = plan.segments
    assert len(every) == levels
    assert "segments of " + "/".join(map(str, every)) in str(plan)
    assert_near(jax.tree.leaves(budgeted(*args)), jax.tree.leaves(jax.jit(step)(*args)))
    plan.save(tmp_path / "plan.json")
    again = vmem_jax.jit(step, plan=vmem_jax.Plan.load(tmp_path / "plan.json"))
    assert again.plan(*args).segments == plan.segments
    [(_, parts)] = plan.segments
    for wrong in ((97,), (8, 8), (4, 8), (8, 1), (8, 0)):
        edited = dataclasses.replace(plan, segments=((wrong, parts),))
        with pytest.raises(vmem_jax.PlanError):
            vmem_jax.jit(step, plan=edited).plan(*args)


def test_weights_are_not_copied_by_segments():
    """Donated weights, updated in the loop, are read where they are written, so that neither a second
    stack of them nor one of their gradients exists."""

    def step(w, x):
        layer = lambda x, w: (jnp.tanh(x @ w), None)
        value, grad = jax.value_and_grad(lambda w: jnp.square(lax.scan(layer, x, w)[0]).mean())(w)
        return w - 0.1 * grad, value

    args = normal(1, 40, 64, 64), normal(2, 32, 64)
    weights = args[0].nbytes
    budget = weights + args[1].nbytes + 40 * 32 * 64 * 4 // 2  # half of what is carried in
    kwargs = {"machine": FAST, "sub_batches": 1, "donate_argnums": 0}
    compiled = vmem_jax.jit(step, budget=budget, **kwargs).lower(*args).compile()
    assert compiled.plan.segments is not None
    assert compiled.need_nbytes <= budget < 1.5 * weights
    expected = jax.jit(step)(*args)
    donated = jnp.array(args[0])
    assert_near(vmem_jax.jit(step, budget=budget, **kwargs)(donated, args[1]), expected)


@pytest.mark.gpu_compile
def test_segments_reach_what_the_square_root_by_hand_reaches():
    length, rows, every = 36, 4096, 6

    def by_hand(w, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w.T), None))
        inner = jax.checkpoint(lambda x, w: lax.scan(layer, x, w))
        loss = lambda w: jnp.square(
            lax.scan(inner, x, w.reshape(-1, every, *w.shape[1:]))[0]
        ).mean()
        return update(w, *jax.value_and_grad(loss)(w))

    def plain(w, x):
        layer = lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w.T), None)
        loss = lambda w: jnp.square(lax.scan(layer, x, w)[0]).mean()
        return update(w, *jax.value_and_grad(loss)(w))

    def update(w, value, grad):
        return optax.apply_updates(w, jax.tree.map(lambda g: -0.1 * g, grad)), value

    shapes = ((length, 128, 128), (rows, 128))
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def compiled(step, **options):
        step = vmem_jax.jit(step, donate_argnums=0, **options)
        return step.lower(*args).compile(target="h200")

    theirs = compiled(by_hand, budget="100GiB", policy="keep").need_nbytes
    ours = compiled(plain, budget=int(1.05 * theirs), allow=("order", "recompute"))
    assert ours.plan.segments is not None
    assert ours.need_nbytes <= 1.05 * theirs
