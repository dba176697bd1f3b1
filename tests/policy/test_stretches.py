"""The bytes that come back together, against a walk from the value through all that is dropped."""

from __future__ import annotations

from helpers import Builder, chain, programs
from hypothesis import given, settings
from hypothesis import strategies as st

from vmem_jax.core.program import BEGIN
from vmem_jax.policy.recompute_chains import Stretches


def walked_nbytes(program, crosses, dropped, b):
    """Bytes that come back with `b`, value after value."""
    phase = lambda v: program.steps[program.producer[v]].phase
    total, seen, stack = 0, {b}, [b]
    while stack:
        v = stack.pop()
        if v in dropped or v == b:
            total += program.buffers[v].nbytes
        elif crosses[v]:
            continue
        s = program.producer[v]
        near = [*program.steps[s].reads] if s >= 0 else []
        for r in program.readers[v]:
            near += program.steps[r].writes if program.steps[r].phase is phase(v) else []
        more = {w for w in near if not program.is_resident[w]} - seen
        seen |= more
        stack += more
    return total


@settings(max_examples=60, deadline=None)
@given(st.data(), programs(layers=12, pure=True))
def test_as_many_bytes_as_a_walk_finds(data, program):
    temporary = [b for b, held in enumerate(program.is_resident) if not held]
    flags = st.lists(st.booleans(), min_size=len(program.buffers), max_size=len(program.buffers))
    crosses = data.draw(flags)
    stretches, dropped = Stretches(program, crosses), set()
    for b in data.draw(st.permutations(temporary)):
        nbytes = walked_nbytes(program, crosses, dropped, b)
        assert stretches.exceeds(b, nbytes - 1) and not stretches.exceeds(b, nbytes)
        if data.draw(st.booleans()):
            stretches.drop(b)
            dropped.add(b)


def test_a_kept_residual_ends_a_stretch():
    program = chain(9)
    values = [program.steps[i].writes[0] for i in range(9)]
    stretches = Stretches(program, [True] * len(program.buffers))
    for b in (*values[:3], *values[4:7]):
        stretches.drop(b)
    assert stretches.exceeds(values[1], 2) and not stretches.exceeds(values[1], 3)
    assert stretches.exceeds(values[3], 6) and not stretches.exceeds(values[3], 7)  # it joins both
    stretches.drop(values[3])
    assert stretches.exceeds(values[0], 6) and not stretches.exceeds(values[0], 7)


def test_a_mark_of_sub_batches_ends_a_stretch():
    for op, nbytes in (("op", 20), (BEGIN, 10)):
        b = Builder()
        x = b.input(1)
        before = b.step([x], 10)
        begun = b.step([before], 10, op=op)
        program = b.program([b.step([begun], 1)])
        stretches = Stretches(program, [True] * len(program.buffers))
        stretches.drop(before)
        assert stretches.exceeds(begun, nbytes - 1) and not stretches.exceeds(begun, nbytes)
