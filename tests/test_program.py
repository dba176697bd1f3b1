"""Program: derived facts, the fingerprint, idle intervals."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import BACKWARD, SHAPES, Builder, chain, programs
from hypothesis import given

from vmem_jax.core.program import Interval, idle_intervals


def test_producers_and_readers():
    program = chain(2)
    assert program.producer == (-1, 0, 1, 2, 3, 4)
    assert program.readers == ((0, 4), (1, 3), (2,), (3,), (4,), ())
    assert program.is_resident == (True, False, False, False, False, True)


def test_overwritten_by_names_the_step_that_writes_the_alias():
    program = chain(2, size=4, parameters=1)
    assert program.overwritten_by == {1: 3, 0: 4}
    b = Builder()
    p = b.input(4)
    b.step([p], 4)
    assert b.program([p, 1], [(p, p)]).overwritten_by == {}


def test_idle_intervals_of_a_chain_are_its_residuals():
    program = chain(3)
    found = list(idle_intervals(program, tuple(range(7))))
    assert found == [Interval(2, 2, 4), Interval(1, 1, 5)]


def test_idle_intervals_close_where_a_value_is_made_again():
    found = list(idle_intervals(chain(3), (0, 1, 2, 3, 4, 0, 5, 6)))
    # v1 is never idle now; the cotangent (5) waits one step for it
    assert found == [Interval(2, 2, 4), Interval(5, 4, 6)]


def test_where_names_layer_operation_phase_and_line():
    assert chain(1).steps[2].where == "layer2: op (backward) at model.py:3"


@pytest.mark.parametrize("name", SHAPES)
def test_fingerprint_is_stable_and_ignores_labels(name):
    program = SHAPES[name]
    steps = [dataclasses.replace(s, layer="other", source="other.py:1") for s in program.steps]
    buffers = [dataclasses.replace(b, label="other") for b in program.buffers]
    same = dataclasses.replace(program, steps=tuple(steps), buffers=tuple(buffers))
    assert program.fingerprint == same.fingerprint == dataclasses.replace(program).fingerprint


def changed(program, part):
    match part:
        case "size":
            first = dataclasses.replace(program.buffers[0], nbytes=99)
            return dataclasses.replace(program, buffers=(first, *program.buffers[1:]))
        case "outputs":
            return dataclasses.replace(program, outputs=program.outputs[:-1])
        case "aliases":
            return dataclasses.replace(program, aliases=program.aliases[1:])
        case "inputs":
            return dataclasses.replace(program, inputs=program.inputs[1:])
    changes = {
        "op": {"op": "other"},
        "phase": {"phase": BACKWARD},
        "pure": {"pure": False},
        "reads": {"reads": ()},
        "in_place": {"in_place": ((0, 3),)},
        "workspace": {"workspace": 5},
    }[part]
    first = dataclasses.replace(program.steps[0], **changes)
    return dataclasses.replace(program, steps=(first, *program.steps[1:]))


@pytest.mark.parametrize(
    "part", ["size", "outputs", "aliases", "inputs", "op", "phase", "pure", "reads"]
)
def test_fingerprint_changes_with(part):
    program = chain(3, 4, parameters=2)
    assert changed(program, part).fingerprint != program.fingerprint


@given(programs())
def test_intervals_lie_between_uses(program):
    order = tuple(range(len(program.steps)))
    for interval in idle_intervals(program, order):
        assert interval.end - interval.start > 1
        assert not program.is_resident[interval.buffer]
        step = program.steps[order[interval.end]]
        assert interval.buffer in step.reads
        between = order[interval.start + 1 : interval.end]
        assert not any(interval.buffer in program.steps[s].reads for s in between)
