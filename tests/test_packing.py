"""Packing: nothing overlaps, nothing is below the bound, and what nests reaches it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmem_jax.core.packing import ALIGNMENT, Interval, pack, round_up

intervals = st.lists(
    st.builds(
        lambda nbytes, first, span: Interval(nbytes, first, first + span),
        st.integers(0, 5 * ALIGNMENT),
        st.integers(0, 30),
        st.integers(0, 15),
    ),
    max_size=16,
)


@st.composite
def nested(draw):
    """Intervals as brackets are: each opens, holds others, closes."""
    found, time = [], itertools.count()

    def level(depth):
        for _ in range(draw(st.integers(0, 3 if depth < 4 else 0))):
            first = next(time)
            level(depth + 1)
            found.append(Interval(draw(st.integers(0, 5 * ALIGNMENT)), first, next(time)))

    level(0)
    return draw(st.permutations(found))


def assert_valid(parked, packing, alignment=ALIGNMENT):
    placed = list(zip(parked, packing.offsets, strict=True))
    for interval, offset in placed:
        assert offset >= 0 and offset % alignment == 0
        assert offset + interval.nbytes <= packing.nbytes
    for (one, low), (other, high) in itertools.combinations(placed, 2):
        if one.meets(other):
            assert low + one.nbytes <= high or high + other.nbytes <= low
    times = {time for interval in parked for time in (interval.first, interval.last)}
    at_once = [
        sum(round_up(i.nbytes, alignment) for i in parked if i.first <= time <= i.last)
        for time in times
    ]
    assert packing.lower_bound == max(at_once, default=0)
    assert packing.nbytes >= packing.lower_bound


@given(intervals)
def test_nothing_overlaps_and_the_bound_is_one(parked):
    assert_valid(parked, pack(parked))


@given(nested())
def test_what_nests_is_packed_without_waste(parked):
    packing = pack(parked)
    assert_valid(parked, packing)
    assert packing.nbytes == packing.lower_bound


@given(intervals.map(lambda found: found[:5]))
def test_few_are_packed_as_well_as_any_order_does(parked):
    packing = pack(parked, alignment=1)
    best = min(
        (_stacked(order) for order in itertools.permutations(parked)), default=0
    )  # some best packing comes from laying them on each other in some order
    assert packing.nbytes == best


def _stacked(order):
    tops = []
    for interval in order:
        floor = max((top for other, top in tops if other.meets(interval)), default=0)
        tops.append((interval, floor + interval.nbytes))
    return max((top for _, top in tops), default=0)


def test_exact_search_beats_first_fit():
    """Each order of first fit leaves a hole here that the search closes."""
    spans = [(2, 2, 4), (2, 2, 5), (3, 0, 3), (2, 4, 6), (4, 0, 1), (3, 0, 1), (4, 4, 4)]
    parked = [Interval(*span) for span in spans]
    packing = pack(parked, alignment=1)
    assert_valid(parked, packing, alignment=1)
    assert packing.nbytes == packing.lower_bound == 10


def test_training_step_of_a_thousand_tensors():
    parked = [Interval(1000 + 7 * i, i, 3000 - i) for i in range(1000)]
    packing = pack(parked)
    assert packing.nbytes == sum(round_up(p.nbytes) for p in parked)
    later = [Interval(1000, 4000 + i, 5000 + 2 * i) for i in range(500)]  # first out, first back
    assert pack([*parked, *later]).nbytes == packing.nbytes


def test_nothing_to_pack():
    assert pack([]).nbytes == 0


@pytest.mark.parametrize("bad", [(-1, 0, 0), (1, 2, 1)])
def test_bad_intervals(bad):
    with pytest.raises(ValueError, match="negative bytes, or ends before"):
        Interval(*bad)


def test_bad_alignment():
    with pytest.raises(ValueError, match="alignment"):
        pack([], alignment=0)
