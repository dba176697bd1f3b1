"""The order in which XLA:GPU runs kernels: list scheduling, and what it compiles."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from helpers import BACKWARD, UPDATE, Builder, needed_layers, programs, with_barriers
from hypothesis import given, settings
from hypothesis import strategies as st

import vmem_jax
from vmem_jax.core.convolution import Convolution, Pass
from vmem_jax.core.heap import heap_nbytes
from vmem_jax.core.planned import predicted_need
from vmem_jax.core.program import BEGIN, END
from vmem_jax.core.run_order import as_run, is_known
from vmem_jax.core.schedule import Do, Event, actions
from vmem_jax.core.validate import check_program
from vmem_jax.models import job


def layers_of(program):
    return [step.layer for step in program.steps]


def test_what_frees_most_runs_first():
    """First the branch that makes less, then what reads the other value last, whatever the plan."""
    b = Builder()
    x = b.step([b.input(1)], 64)
    first = b.step([x], 32)  # layer 1 frees 32 behind layer 2
    second = b.step([x], 4)  # layer 2
    third = b.step([second], 1)  # layer 3 frees 3
    program = b.program([b.step([first, third], 1)])
    found, events = as_run(program, actions(program, range(5)))
    assert layers_of(found) == ["layer0", "layer2", "layer1", "layer3", "layer4"]
    assert [e.index for e in events if e.do is Do.RUN] == [0, 1, 2, 3, 4]


def test_a_barrier_holds_back_what_reads_its_results():
    b = Builder()
    x = b.step([b.input(1)], 64)
    first, second = b.step([x], 32), b.step([x], 4)
    program = b.program([b.step([first, second], 1)])
    run = [*actions(program, range(4))]
    at = next(i for i, e in enumerate(run) if e.position == 2)
    held = [*run[:at], Event(Do.BARRIER, 2, buffers=(x, first)), *run[at:]]
    assert layers_of(as_run(program, run)[0]) == ["layer0", "layer2", "layer1", "layer3"]
    found, events = as_run(program, held)
    assert layers_of(found) == ["layer0", "layer1", "layer2", "layer3"]
    [barrier] = [e for e in events if e.do is Do.BARRIER]
    assert barrier.position == 2 and len(barrier.buffers) == 2


def test_what_nothing_reads_does_not_run_and_holds_nothing():
    b = Builder()
    x = b.step([b.input(1)], 64)
    again = b.step([x], 64)  # layer 1, as a plan recomputes it and drops it right away
    program = b.program([b.step([b.step([x], 8)], 1)])
    events = [e for e in actions(program, range(4)) if again not in e.buffers or e.do is Do.RUN]
    assert layers_of(as_run(program, events)[0]) == ["layer0", "layer2", "layer3"]


def test_each_version_of_a_value_is_a_buffer():
    """Nothing keeps the copy apart from the original, so both are there."""
    b = Builder()
    x = b.step([b.input(1)], 8)
    y = b.step([b.step([x], 8)], 8)
    program = b.program([b.step([x, y], 1)])
    order = (0, 1, 2, 0, 3)
    found, events = as_run(program, actions(program, order))
    check_program(found)
    assert len(found.steps) == 5 and len(found.buffers) == len(program.buffers) + 1
    assert found.resident_nbytes == program.resident_nbytes
    heap_nbytes(found, range(5), events=events)


@pytest.mark.parametrize("which", Pass)
def test_xla_pads_in_a_kernel_of_its_own(which):
    convolution = Convolution(which, "float32", False, 1, 1, 1, (4,), (2,), (2,), ((0, 1),), (1,))
    b = Builder()
    x, y, w = b.step([b.input(1)], 16), b.step([b.input(1)], 8), b.step([b.input(1)], 4)
    reads = {Pass.FORWARD: [x, w], Pass.BACKWARD_DATA: [y, w], Pass.BACKWARD_FILTER: [x, y]}
    out = b.step(reads[which], 12, workspace=20, op="conv_general_dilated")
    b.steps[3] = dataclasses.replace(b.steps[3], convolution=convolution)
    program = b.program([b.step([out], 1)])
    assert convolution.padded_nbytes == 20
    run = [*actions(program, range(5))]
    found, _ = as_run(program, run)
    check_program(found)
    first, second = (step for step in found.steps if step.layer == "layer3")
    assert not first.workspace and not second.workspace
    assert found.buffers[first.writes[0]].nbytes == 20 and first.writes[0] in second.reads
    ours, _ = as_run(program, run, own=[3])  # a call of ours asks for its workspace
    assert [s.workspace for s in ours.steps if s.layer == "layer3"] == [20]


@pytest.mark.parametrize("waits", [False, True])
def test_two_that_read_the_same_are_one_kernel_unless_one_waits_for_the_other(waits):
    b = Builder()
    x, y = b.step([b.input(1)], 64), b.step([b.input(1)], 64)
    first = b.step([x, y], 64, BACKWARD, fusible=True)
    between = b.step([first if waits else y], 8, BACKWARD)
    second = b.step([x, between], 64, BACKWARD, fusible=True)
    program = b.program([b.step([first, second], 1, BACKWARD)])
    steps = list(program.steps)
    steps[2] = dataclasses.replace(steps[2], equations=(2, 2))  # of several operations
    program = dataclasses.replace(program, steps=tuple(steps))
    found, _ = as_run(program, actions(program, range(6)))
    assert sorted(len(step.writes) for step in found.steps)[-1] == (1 if waits else 2)


def test_an_update_reads_the_transposed_filter():
    """So it frees nothing before what else reads that has run, and the other way around."""
    b = Builder()
    w, g = b.input(16), b.step([b.input(1)], 12)
    turned = b.step([w], 16, BACKWARD, op="rev")  # layer 1
    new = b.step([w], 16, UPDATE, fusible=True)  # layer 2
    back = b.step([g, turned], 20, BACKWARD)  # layer 3: frees 28 behind the update, else 12
    other = b.step([g], 24, BACKWARD)  # layer 4
    program = b.program([new, b.step([back, other], 1, BACKWARD)], [(w, new)])
    found = layers_of(as_run(program, actions(program, range(6)))[0])
    assert found.index("layer2") < found.index("layer3") < found.index("layer4")


@settings(max_examples=50, deadline=None)
@given(programs(), st.randoms())
def test_every_step_that_is_needed_runs_once_and_behind_what_it_reads(program, random):
    events = with_barriers(program, random)
    found, scheduled = as_run(program, events)
    check_program(found)
    layers = layers_of(found)
    assert needed_layers(program) <= {*layers} <= {*layers_of(program)}
    assert len({*layers}) == len(layers)
    assert found.resident_nbytes == program.resident_nbytes
    assert heap_nbytes(found, range(len(found.steps)), events=scheduled) >= found.resident_nbytes


def test_is_known_of_whole_steps_on_a_gpu():
    b = Builder()
    x = b.input(1)
    whole = dataclasses.replace(b.program([b.step([x], 1)]), on_gpu=True)
    assert is_known(whole) and not is_known(dataclasses.replace(whole, on_gpu=False))
    assert not is_known(dataclasses.replace(whole, hosted=(x,)))
    b = Builder()
    split = b.program([b.step([b.step([b.input(1)], 1, op=BEGIN)], 1, op=END)])
    assert not is_known(dataclasses.replace(split, on_gpu=True))


@pytest.mark.gpu_compile
def test_xla_needs_what_its_order_is_predicted_to_need():
    """Of a residual network with recomputation. In the order of the plan it would need less."""
    made = job("resnet50", batch=256, dtype="bfloat16", optimizer="momentum")
    state = jax.eval_shape(made.init, jax.random.key(0))
    step = vmem_jax.jit(made.step, budget=2_514 * 2**20, donate_argnums=0)
    entry = step._entry_for((state, made.batch), {}, "h200")
    program, plan = entry.best.variant.program, entry.best.plan
    assert plan.recomputed and not plan.transfers
    # with its kernels' gradients stated to be row-major it needs 4 % less, which is not predicted
    assert 0.95 <= entry.best.need / predicted_need(program, plan) <= 1.01
