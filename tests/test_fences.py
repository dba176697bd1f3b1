"""fences: exact on programs drawn by hand; laws on random ones."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import BACKWARD, SHAPES, UPDATE, Builder, chain, orders, programs, unit_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from vmem_jax.core.fences import Fence, fences
from vmem_jax.core.liveness import last_reads
from vmem_jax.core.program import BEGIN, END
from vmem_jax.core.spines import spines
from vmem_jax.policy.executor import Execution


def test_chain_fences_each_residual_behind_the_cotangent():
    # 1, 2, 3 are the layers' outputs, 4 the loss, 5… the cotangents. Each backward run begins by a
    # fence over the cotangent made last and the residual that the run reads; x (0) is an input.
    assert fences(chain(3), range(7), small=0) == (
        Fence(4, (4, 2)),
        Fence(5, (5, 1)),
    )


def test_transfers_hang_on_the_cotangent_not_on_a_flipped_weight():
    """A weight is flipped just before it is read, but it could be at any time."""
    b = Builder()
    w, x = b.input(8), b.input(64)
    h = b.step([x, w], 64)
    cotangent = b.step([b.step([h, w], 64)], 64, BACKWARD)
    flipped = b.step([w], 8, BACKWARD, op="rev")
    earlier = b.step([cotangent, flipped], 64, BACKWARD)
    program = b.program([b.step([earlier, h], 8, BACKWARD)])
    order = range(len(program.steps))
    first = lambda order, *at: [spines(program, order, dict.fromkeys(at, ()))[p][0] for p in at]
    assert first(order, 4, 5) == [cotangent, earlier]
    # what runs again comes after all that came before, however few steps lead up to it
    again = [*range(4), 0, *range(4, 6)]
    assert first(again, 5) == [h]


def test_a_point_of_a_transfer_holds_all_that_runs_there_and_nothing_that_is_dead():
    b = Builder()
    x = b.input(64)
    kept, dropped = b.step([x], 64), b.step([x], 64)
    late = b.step([kept, dropped], 64)
    cotangent = b.step([late], 64, BACKWARD)
    other = b.step([cotangent], 64, BACKWARD)
    program = b.program([b.step([other, cotangent, dropped, kept], 8, BACKWARD)])
    order = range(len(program.steps))
    assert set(spines(program, order, {5: ()})[5]) == {other, cotangent, dropped, kept}
    assert set(spines(program, order, {5: (kept,)})[5]) == {other, cotangent, dropped}
    again = [*range(5), 1, 5]  # `dropped` is made anew behind the point
    assert set(spines(program, again, {5: ()})[5]) == {other, cotangent, kept}


def test_recomputed_layer_is_fenced_with_its_inputs():
    # v1 (1) is made again by step 0 from x (0): x is fenced though it is an input.
    order = [0, 1, 2, 3, 4, 0, 5, 6]
    assert fences(chain(3), order, small=0) == (
        Fence(4, (4, 2)),
        Fence(5, (5, 0)),
    )


@pytest.mark.parametrize("nbytes, waits", [(40, True), (4, False)])
def test_a_recomputation_waits_where_an_early_start_would_raise_the_peak(nbytes, waits):
    b = Builder()
    kept = b.step([b.input(8)], 8)
    middle = b.step([b.step([kept], nbytes)], 8)
    other = b.step([kept], 40)
    loss = b.step([other, middle], 8)
    program = b.program([b.step([loss, other, middle], 8, BACKWARD)])
    # `other` could be made again as soon as `kept` may be read, beside what `middle` is made from
    found = fences(program, [0, 1, 2, 3, 4, 1, 2, 3, 5], small=4)
    assert (Fence(7, (middle, kept)) in found) is waits


def joins(hangs: bool = False, size: int = 100):
    """Two residual joins, the second of the first and a branch that `hangs` on it, or on what is
    kept; a cotangent that reads the second one again. Returns the program, and its (second branch,
    first join, what is kept for the branch)."""
    b = Builder()
    x = b.input(8)
    kept, other = b.step([x], 8), b.step([x], 8)
    first = b.step([b.step([kept], size), b.step([kept], size)], size, fusible=True)
    branch = len(b.steps)
    second = b.step([first, b.step([first if hangs else other], size)], size, fusible=True)
    loss = b.step([second], 8)
    return b.program([b.step([loss, second], 8, BACKWARD)]), branch, first, other


@pytest.mark.parametrize("hangs, size, waits", [(False, 100, True), (True, 100, False)])
def test_a_recomputed_join_is_made_before_the_next_branch(hangs, size, waits):
    """XLA would make one kernel of two joins, and keep both branches of the first one until then."""
    program, branch, first, other = joins(hangs, size)
    order = [*range(8), *range(2, 7), 8]
    again = order.index(branch, 8)
    found = [fence for fence in fences(program, order, small=4) if fence.position == again]
    assert found == ([Fence(again, (first, other))] if waits else [])
    assert not [f for f in fences(program, range(9), small=4) if first in f.buffers]


def test_a_join_far_below_the_peak_may_be_merged():
    program, _, first, _ = joins()
    steps = dataclasses.replace(program.steps[0], workspace=1000), *program.steps[1:]
    program = dataclasses.replace(program, steps=steps)
    assert not [
        f for f in fences(program, [*range(8), *range(2, 7), 8], small=4) if first in f.buffers
    ]


@pytest.mark.parametrize("depth", [30, 3000])
def test_the_layers_of_a_very_deep_network_are_worth_a_fence(depth):
    """Each is far below a 2,000th of all, and they are all that there is."""
    found = fences(chain(depth, size=64), range(2 * depth + 1))
    assert len(found) == depth - 1


def test_weight_gradient_is_tied_to_the_run_that_frees_its_inputs():
    b = Builder()
    p, x = b.input(8), b.input(8)
    h = b.step([x, p], 64)
    y = b.step([h], 64)
    loss = b.step([y], 64)
    cotangent = b.step([loss, y], 64, BACKWARD)
    gradient = b.step([cotangent, h], 8, BACKWARD, fusible=True)
    other = b.step([cotangent], 64, BACKWARD)
    last = b.step([other], 64, BACKWARD)
    new = b.step([p, gradient], 8, UPDATE, fusible=True)
    program = b.program([new, last], [(p, new)])
    found = fences(program, range(len(program.steps)), small=4)
    assert found == (
        Fence(3, (loss, y)),
        Fence(4, (cotangent, h)),
        Fence(6, (other, gradient)),
    )


@pytest.mark.parametrize("freed_by", ["the spine", "a weight gradient"])
def test_a_weight_gradient_is_tied_to_the_later_run_that_frees_its_inputs(freed_by):
    """XLA would take it at the end, and keep the cotangent that it reads until then."""
    b = Builder()
    p, x = b.input(8), b.input(8)
    y = b.step([b.step([x, p], 64)], 64)
    cotangent = b.step([b.step([y], 64), y], 64, BACKWARD)
    gradient = b.step([cotangent, x], 8, BACKWARD)
    other = b.step([cotangent], 64, BACKWARD)
    reads = [other, cotangent] if freed_by == "the spine" else [other]
    second = b.step(reads, 64, BACKWARD)
    late = b.step([cotangent, x], 8, BACKWARD) if freed_by != "the spine" else gradient
    last = b.step([b.step([second], 64, BACKWARD)], 64, BACKWARD)
    new = [b.step([p, g], 8, UPDATE, fusible=True) for g in {gradient, late}]
    program = b.program([*new, last])
    found = fences(program, range(len(program.steps)), small=8)
    [fence] = [fence for fence in found if gradient in fence.buffers]
    assert late in fence.buffers
    assert max(program.readers[cotangent]) < fence.position <= program.producer[last]


@pytest.mark.parametrize("op, ties", [("reduce_sum", True), ("mul", False)])
@pytest.mark.parametrize("onward", [False, True])
@pytest.mark.parametrize("split", [True, False])
def test_the_total_of_a_bias_is_tied_to_the_run_that_frees_what_is_summed(op, ties, onward, split):
    """The sum itself is read in that run alone. Where a product of the backward pass waits for it, as
    for the sums of a norm, it is made in time anyway. Updates of small parameters are one kernel."""
    b = Builder()
    h, total = given = [b.input(64), b.input(1)]
    if split:
        h, total = b.step(given, (64, 1), op=BEGIN)
    y = b.step([h], 64)
    cotangent = b.step([y], 64, BACKWARD)
    added = b.step([cotangent], 1, BACKWARD, op=op, fusible=True)
    new = b.step([total, added], 1, BACKWARD, fusible=True)
    other = b.step([cotangent, *([added] if onward else [])], 64, BACKWARD)
    last = b.step([b.step([other], 64, BACKWARD)], 64, BACKWARD)
    ends = b.step([last, new], (64, 1), BACKWARD, op=END) if split else (last, new)
    program = b.program(list(ends))
    found = [f.position for f in fences(program, range(len(program.steps)), 4) if new in f.buffers]
    assert found == ([program.producer[other] + 1] if ties and split and not onward else [])


@pytest.mark.parametrize("devices", [1, 4])
def test_a_sum_of_several_devices_is_tied_to_the_run_that_frees_what_is_summed(devices):
    """Of one device it is in the kernel of what else is made there, the cotangent of a norm. What
    devices add up is one collective at the end, and XLA would take the sum in front of that."""
    b = Builder()
    w, x = b.input(64), b.input(64)
    y = b.step([x, w], 64)
    cotangent = b.step([y], 64, BACKWARD)
    onward, parts = b.step([cotangent], (64, 2), BACKWARD, op="reduce_sum", fusible=True)
    gradient = b.step([parts], 1, BACKWARD, op="reduce_sum", fusible=True)
    other = b.step([onward, w], 64, BACKWARD)
    last = b.step([b.step([other], 64, BACKWARD)], 64, BACKWARD)
    program = b.program([last, b.step([gradient], 1, UPDATE, fusible=True)])
    steps = [dataclasses.replace(s, sent=devices - 1) for s in program.steps]
    program = dataclasses.replace(program, steps=tuple(steps))
    found = fences(program, range(len(steps)), small=4)
    at = [fence.position for fence in found if gradient in fence.buffers]
    assert at == ([program.producer[other] + 1] if devices > 1 else [])


def test_what_reads_a_cotangent_of_long_before_alone_waits_for_its_layer():
    """As in a network whose layers are added up at its end: each reads the sum's cotangent, and all
    could do so at once."""
    b = Builder()
    layers = [x := b.step([b.input(64)], 64)]
    layers += [x := b.step([x], 64) for _ in range(3)]
    shared = back = b.step([x], 64, BACKWARD)
    owns = []
    for kept in reversed(layers):
        owns.append(b.step([shared], 64, BACKWARD))
        back = b.step([back, owns[-1], kept], 64, BACKWARD)
    program = b.program([back])
    found = {fence.position: fence.buffers for fence in fences(program, range(len(program.steps)))}
    first, *rest = (program.producer[own] for own in owns)
    assert first not in found  # the cotangent has just been made
    assert all(found[s][0] != shared and shared in found[s] for s in rest)


def test_what_reads_what_its_own_run_makes_needs_no_fence_for_a_cotangent():
    b = Builder()
    x = b.step([b.input(64)], 64)
    shared = back = b.step([x], 64, BACKWARD)
    for _ in range(3):
        back = b.step([back], 64, BACKWARD)
    own = b.step([back], 64, BACKWARD, fusible=True)
    program = b.program([b.step([shared, own], 64, BACKWARD)])
    assert all(shared not in f.buffers for f in fences(program, range(len(program.steps))))


@pytest.mark.parametrize("is_loop", [True, False])
def test_a_weight_gradient_is_made_before_the_loop_behind_it(is_loop):
    """What it is made of, the gradient of the logits, is not there throughout the loop. And no stack
    of the loop is made before it: XLA makes those behind what the loop reads first, its zeros."""
    b = Builder()
    x, head, layers = b.input(50), b.input(50), b.input(50)
    y = b.step([x, layers], 100)
    logits = b.step([y, head], 1000)
    gradient = b.step([logits], 1000, BACKWARD, fusible=True)
    cotangent = b.step([gradient, head], 100, BACKWARD)
    of_head = b.step([gradient, y], 50, BACKWARD)
    zeros = b.step([], 3, BACKWARD, fusible=True)
    of_layers = b.step([cotangent, layers, zeros], 50, BACKWARD)
    outs = [b.step([g], 50, UPDATE) for g in (of_head, of_layers)]
    program = b.program(outs)
    loop = next(i for i, step in enumerate(program.steps) if of_layers in step.writes)
    steps = [*program.steps]
    if is_loop:
        once = dataclasses.replace(steps[loop], body=(), length=1)
        steps[loop] = dataclasses.replace(steps[loop], body=(once,), length=8)
    program = dataclasses.replace(program, steps=tuple(steps))
    before = [f.buffers for f in fences(program, range(len(steps)), small=5) if f.position == loop]
    assert before == ([(cotangent, of_head, zeros)] if is_loop else [])


@pytest.mark.parametrize("workspace, waits", [(100, True), (10, False)])
def test_a_large_workspace_that_hangs_on_small_values_waits_for_the_step_before(workspace, waits):
    """As the bits of several dropouts, each of a key: XLA would hold all workspaces at once."""
    b = Builder()
    key, x = b.input(1), b.input(100)
    h = b.step([x], 100)
    bits = b.step([key], 100, workspace=workspace)
    y = b.step([h, bits], 100)
    program = b.program([b.step([y], 100, BACKWARD)])
    assert (Fence(1, (h, key)) in fences(program, range(4), small=10)) is waits


def test_casts_and_zeros_wait_for_the_layer_before_where_xla_would_make_them_at_once():
    b = Builder()
    x, *weights = (b.input(64) for _ in range(4))
    y, made = x, []
    for w in weights:
        cast = b.step([w], 32, fusible=True)
        y = b.step([y, cast], 64)
        made.append((cast, y))
    back = b.step([y], 64, BACKWARD)
    zeros = b.step([], 128, BACKWARD, fusible=True)
    program = b.program([b.step([back, zeros], 8, BACKWARD)])
    found = lambda **how: {f.position: f.buffers for f in fences(program, range(9), small=0, **how)}
    others, ours = found(), found(early=True)
    assert not {2, 4, 7} & others.keys()
    assert ours[2] == (made[0][1], weights[1]) and ours[4] == (made[1][1], weights[2])
    assert ours[7] == (back,) and 0 not in ours
    assert {p: held for p, held in ours.items() if p not in (2, 4, 7)} == others
    assert 2 not in found(early=True, body=True)


@pytest.mark.parametrize("layers, waits", [(3, False), (12, True)])
def test_small_casts_wait_where_all_together_are_large(layers, waits):
    """XLA would make them at once, and keep those of the last layers longest."""
    b = Builder()
    x, *weights = (b.input(64) for _ in range(1 + layers))
    y, casts = x, []
    for w in weights:
        cast = b.step([w], 8, fusible=True)
        y = b.step([y, cast], 64)
        casts.append(cast)
    program = b.program([b.step([y], 8, BACKWARD)])
    order = range(len(program.steps))
    held = {f.position for f in fences(program, order, small=10, early=True)}
    second, *_, last = (program.producer[cast] for cast in casts[1:])
    assert (second in held, last in held) == (waits, waits)


def test_masks_that_are_drawn_from_keys_of_one_key_wait_for_the_layer_before():
    """XLA would draw those of all layers at the start, in one kernel."""
    b = Builder()
    key, x = b.input(1), b.input(64)
    keys = [b.step([key], 1), b.step([key], 1)]
    y, made = x, []
    for each in keys:
        mask = b.step([b.step([each], 1)], 32, fusible=True)
        y = b.step([y, mask], 64)
        made.append((mask, y))
    of_a_value = b.step([b.step([y], 1)], 32, fusible=True)
    program = b.program([b.step([y, of_a_value], 64, BACKWARD)])
    second = next(i for i, step in enumerate(program.steps) if made[1][0] in step.writes)
    last = next(i for i, step in enumerate(program.steps) if of_a_value in step.writes)
    order = range(len(program.steps))
    ours = {f.position: f.buffers for f in fences(program, order, small=4, early=True)}
    assert ours[second] == (made[0][1], *program.steps[second].reads)
    assert last not in ours and second not in {f.position for f in fences(program, order, small=4)}


def test_masks_of_sub_batches_wait_for_the_layer_before():
    """What a sub-batch is handed is there when it begins: the masks of all its layers."""
    b = Builder()
    x, *keys = b.input(64), b.input(1), b.input(1)
    large = b.step([x], 64)
    y, *keys = b.step([large, *keys], (64, 1, 1), op=BEGIN)
    made = []
    for key in keys:
        mask = b.step([key], 32, fusible=True)
        y = b.step([y, mask], 64)
        made.append((mask, y))
    done = b.step([b.step([y], 64, BACKWARD)], 64, op=END)
    program = b.program([b.step([done], 8, BACKWARD)])
    order = range(len(program.steps))
    ours = {f.position: f.buffers for f in fences(program, order, small=4, early=True)}
    first, second = (program.producer[mask] for mask, _ in made)
    assert ours[second] == (made[0][1], keys[1]) and first not in ours


def test_what_waits_for_the_step_before_is_one_fence_with_what_is_tied_there():
    b = Builder()
    key, x = b.input(1), b.input(100)
    h = b.step([x], 100)
    mask = b.step([h], 100, fusible=True)
    small = b.step([key], 1)
    bits = b.step([small], 100, workspace=100)
    loss = b.step([bits], 100)
    program = b.program([b.step([loss, mask], 100, BACKWARD)])
    assert [f for f in fences(program, range(6), small=10) if f.position == 3] == [
        Fence(3, (mask, small))
    ]


def test_a_small_number_of_the_backward_pass_at_the_start_does_not_end_the_forward_pass():
    b = Builder()
    x, count = b.input(100), b.input(1)
    h = b.step([x], 100)
    share = b.step([count], 1, BACKWARD, fusible=True)
    z = b.step([x], 100)
    mask = b.step([h], 100, fusible=True)
    loss = b.step([z], 100)
    program = b.program([b.step([loss, mask, share], 100, BACKWARD)])
    assert Fence(4, (z, mask)) in fences(program, range(6), small=10)


@pytest.mark.parametrize("adds", [True, False])
def test_a_sum_that_the_backward_pass_reads_again_is_taken_in_the_forward_pass(adds):
    """XLA may leave the sum of two products out of the second one's kernel."""
    b = Builder()
    x, w = b.input(100), b.input(50)
    first = b.step([x, w], 100)
    total = b.step([first, w], 100)
    if adds:
        b.steps[-1] = dataclasses.replace(b.steps[-1], equations=(1, 2))
    y = b.step([total], 100, fusible=True)
    loss = b.step([y], 100)
    grad = b.step([loss, total], 100, BACKWARD)
    program = b.program([b.step([grad], 100, BACKWARD)])
    assert (Fence(3, (y, total)) in fences(program, range(6), small=10)) is adds


def test_small_values_are_not_worth_a_fence():
    b = Builder()
    x = b.input(100)
    tiny = b.step([x], 2)
    big = b.step([x], 100)
    loss = b.step([big, tiny], 100)
    grad = b.step([loss, tiny, big], 100, BACKWARD)
    out = b.step([grad], 100, BACKWARD)
    program = b.program([out])
    assert fences(program, range(5), small=10) == (Fence(3, (loss, big)),)
    assert fences(program, range(5), small=0) == (Fence(3, (loss, tiny, big)),)


def test_forward_only_program_has_no_fence():
    b = Builder()
    x = b.input(4)
    for _ in range(5):
        x = b.step([x], 4)
    assert fences(b.program([x]), range(5), small=0) == ()


def check_laws(program, order):
    """Positions ascend; a fence names several made values, once each; its spine is read later."""
    found = fences(program, order, small=0)
    positions = [f.position for f in found]
    assert positions == sorted(set(positions))
    by_position = {f.position: f.buffers for f in found}
    made = set(program.inputs)
    for position, s in enumerate(order):
        buffers = by_position.get(position, ())
        assert len(set(buffers)) == len(buffers)
        assert made.issuperset(buffers)
        if buffers:
            assert any(buffers[0] in program.steps[s].reads for s in order[position:])
        made.update(program.steps[s].writes)
    return found


def check_live(program, order, found):
    """No fence holds a value that the order has dropped by then."""
    dying = last_reads(program, order)
    by_position = {f.position: f.buffers for f in found}
    live = set(program.inputs)
    for position, s in enumerate(order):
        for b in by_position.get(position, ()):
            assert b in live or program.is_resident[b], (position, b)
        live.update(program.steps[s].writes)
        live.difference_update(dying[position])


def check_recomputation(program, order, found):
    """Every input of a step that runs again was fenced, or made, in its run or the one before."""
    starts = _runs(program, order)
    run_of = [sum(1 for s in starts if s <= p) - 1 for p in range(len(order))]
    known = {b: -10 for b in program.inputs}
    by_position = {f.position: f.buffers for f in found}
    ran = set()
    for position, s in enumerate(order):
        for b in by_position.get(position, ()):
            known[b] = run_of[position]
        if s in ran:
            for b in program.steps[s].reads:
                assert known[b] >= run_of[position] - 1, (position, s, b)
        ran.add(s)
        known.update(dict.fromkeys(program.steps[s].writes, run_of[position]))


def _runs(program, order):
    from vmem_jax.core.fences import _Fencer

    return _Fencer(program, order, 0, False, False)._runs()


def squeezed(program, extra):
    """The order under a limit of `extra` bytes over what is held throughout."""
    base = range(len(program.steps))
    limit = program.resident_nbytes + extra
    return Execution(program, unit_costs(program), base, limit=limit).order


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("extra", [4, 16, 64])
def test_laws_on_every_shape(name, extra):
    order = squeezed(SHAPES[name], extra)
    check_recomputation(SHAPES[name], order, check_laws(SHAPES[name], order))


@pytest.mark.parametrize("name", SHAPES)
def test_no_fence_holds_what_was_dropped(name):
    for extra in (4, 8, 16, 32, 64):
        order = squeezed(SHAPES[name], extra)
        check_live(SHAPES[name], order, fences(SHAPES[name], order, small=0))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_laws_on_random_orders(data):
    program = data.draw(programs())
    order = data.draw(orders(program))
    check_laws(program, order)


@settings(max_examples=200, deadline=None)
@given(programs(), st.integers(1, 40))
def test_inputs_of_recomputation_are_fenced(program, extra):
    order = squeezed(program, extra)
    check_recomputation(program, order, check_laws(program, order))


def test_what_is_written_over_is_not_read_through_a_barrier():
    """The gradient of a loss lies where the logits were, which XLA does with no barrier between."""
    b = Builder()
    w = b.input(64)
    logits = b.step([b.input(64), w], 512)
    total = b.step([logits], 8, fusible=True)
    cotangent = b.step([logits, total], 512, BACKWARD, fusible=True, in_place=True)
    gradient = b.step([cotangent, w], 64, BACKWARD)
    program = b.program([gradient])
    held = {x for fence in fences(program, range(4), small=0) for x in fence.buffers}
    assert logits not in held
    # where it is read later it stays there anyway
    program = b.program([gradient, b.step([logits, gradient], 8, BACKWARD)])
    held = {x for fence in fences(program, range(5), small=0) for x in fence.buffers}
    assert logits in held


def test_the_body_of_a_loop():
    """A layer of two parts, backwards: of each a product is made again."""
    b = Builder()
    w, x, q, g = b.input(8), b.input(64), b.input(64), b.input(64)
    h = b.step([x, w], 256)
    d = b.step([g, w], 256, BACKWARD)
    e = b.step([d, h], 256, BACKWARD, fusible=True, in_place=True)
    of_w = b.step([e, x], 8, BACKWARD)
    onward = b.step([e, w], 64, BACKWARD)
    scores = b.step([q], 256)
    last = b.step([onward, scores], 64, BACKWARD)
    program = b.program([of_w, b.step([last, w], 64, BACKWARD)])
    found = fences(program, range(8), small=0, body=True)
    held = {x for fence in found for x in fence.buffers}
    assert d not in held, "`e` lies where it was"
    [at] = {fence.position for fence in found if q in fence.buffers}
    # the scores wait for what leads on, and what leads on for the weight's gradient
    assert at == 5 and any({onward, of_w} <= {*fence.buffers} for fence in found)
    assert q not in {x for fence in fences(program, range(8), small=0) for x in fence.buffers}
