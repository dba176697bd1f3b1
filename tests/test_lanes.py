"""lanes: two copy engines, first in, first out, over one link."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmem_jax.core.costs import Link
from vmem_jax.core.lanes import Copy, Lanes

LINK = Link(out=10.0, into=10.0, both=16.0)


def test_copies_of_a_lane_run_one_after_another():
    lanes = Lanes(LINK)
    lanes.submit("out", 0, 20, at=1.0)
    lanes.submit("out", 1, 10, at=1.5)
    assert lanes.wait("out", 1, at=2.0) == pytest.approx(4.0)
    assert lanes.copies["out", 0] == Copy(1.0, pytest.approx(3.0))
    assert lanes.copies["out", 1] == Copy(pytest.approx(3.0), pytest.approx(4.0))


def test_waiting_for_what_is_there_takes_no_time():
    lanes = Lanes(LINK)
    lanes.submit("into", 7, 10, at=0.0)
    assert lanes.wait("into", 7, at=5.0) == 5.0


def test_both_directions_share_the_link():
    """Alone each moves 10 bytes a second, together 16: 8 each while both are busy."""
    lanes = Lanes(LINK)
    lanes.submit("out", 0, 8, at=0.0)
    lanes.submit("into", 1, 18, at=0.0)
    assert lanes.wait("out", 0, at=0.0) == pytest.approx(1.0)
    assert lanes.wait("into", 1, at=1.0) == pytest.approx(2.0)  # 8 by then, 10 more alone


def test_nothing_on_a_lane_begins_before_it_is_submitted():
    lanes = Lanes(LINK)
    lanes.submit("out", 0, 10, at=0.0)
    lanes.submit("out", 1, 10, at=9.0)
    lanes.finish()
    assert lanes.copies["out", 1] == Copy(9.0, pytest.approx(10.0))


@given(
    st.lists(
        st.tuples(st.sampled_from(["out", "into"]), st.integers(1, 10**12), st.floats(0, 1)),
        max_size=20,
    ),
    st.sampled_from([1.0, 5e10, 1e18]),
)
def test_every_copy_ends_and_no_faster_than_the_link(copies, rate):
    lanes = Lanes(Link(rate, rate, 1.5 * rate))
    copies = sorted(copies, key=lambda copy: copy[2])
    for key, (lane, nbytes, at) in enumerate(copies):
        lanes.submit(lane, key, nbytes, at)
    lanes.finish()
    for lane in ("out", "into"):
        free = 0.0
        for key, (where, nbytes, at) in enumerate(copies):
            if where != lane:
                continue
            copy = lanes.copies[lane, key]
            assert copy.begin >= max(at, free) - 1e-9 * max(at, free, 1)
            took = copy.end - copy.begin
            assert took >= nbytes / rate * (1 - 1e-6) - 1e-12
            assert took <= nbytes / (0.75 * rate) * (1 + 1e-6) + 1e-9 * max(copy.end, 1)
            free = copy.end
    assert all(map(math.isfinite, (copy.end for copy in lanes.copies.values())))
