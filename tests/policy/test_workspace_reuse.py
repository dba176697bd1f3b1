"""WR: the fastest micro-batches within a limit, by trying everything, by the paper, on an H200."""

import math

import pytest
from convolutions import MIB, all_configurations, convolution, measured, micro, micros
from hypothesis import given, settings
from hypothesis import strategies as st

from vmem_jax.core.convolution import Configuration, Micro
from vmem_jax.errors import VmemError, WorkspaceError
from vmem_jax.policy.workspace_reuse import BatchSizes, batch_sizes, reuse

ALL, POWERS, UNDIVIDED = BatchSizes.ALL, BatchSizes.POWER_OF_TWO, BatchSizes.UNDIVIDED
some = settings(max_examples=300, deadline=None)


def total_ms(limit, sizes):
    """Of the 21 measured kernels, with micro-batches of `sizes`."""
    kernels = [(k.convolution, [m for m in k.micros if m.batch in sizes]) for k in measured()]
    return sum(reuse(c, found, limit).seconds for c, found in kernels) * 1e3


# -- against brute force


@some
@given(st.data(), st.integers(1, 7), st.integers(0, 5))
def test_it_is_the_fastest_within_the_limit(data, batch, limit):
    found = data.draw(micros(batch))
    ways = [Configuration(c) for c in all_configurations(found, batch)]
    fitting = [c.seconds for c in ways if c.workspace <= limit]
    if fitting:
        best = reuse(convolution(batch), found, limit)
        assert best.seconds == min(fitting)
        assert best.batch == batch and best.workspace <= limit
        assert set(best.micros) <= set(found)
    else:
        with pytest.raises(WorkspaceError) as error:
            reuse(convolution(batch), found, limit)
        assert error.value.least == min((c.workspace for c in ways), default=None)


@some
@given(st.data(), st.integers(1, 12))
def test_it_obeys_the_recursion(data, batch):
    """T of section III-B, computed as it is written there."""
    found = [*data.draw(micros(batch)), micro(1, 0, 20.0)]
    fastest = lambda b: min((m.seconds for m in found if m.batch == b), default=math.inf)
    total = [0.0]
    for b in range(1, batch + 1):
        total.append(min(fastest(m) + total[b - m] for m in range(1, b + 1)))
        assert reuse(convolution(b), found).seconds == total[b]


# -- the paper


def test_figure_5():
    """Algorithm 4 is fast but slow to start, and its workspace allows 60 samples; 0 needs none.

    The figure says which configurations are the best, not of what: these times give the same.
    """
    quick = [micro(b, 2 * b * MIB, 0.5 + b / 100, 4) for b in range(1, 257)]
    plain = [micro(b, 0, 0.02 + b / 50, 0) for b in range(1, 257)]
    names = lambda found: [(m.engine, m.batch) for m in found.micros]
    limit = 120 * MIB
    whole = names(reuse(convolution(256), [*quick, *plain], limit))
    assert whole == [(4, 60)] * 4 + [(0, 16)]
    # what is left behind each of the first micro-batches is the best of a smaller batch
    for n in range(1, 4):
        rest = reuse(convolution(256 - 60 * n), [*quick, *plain], limit)
        assert names(rest) == whole[n:]


def test_undivided_is_the_choice_of_cudnn():
    for kernel in measured():
        whole = [m for m in kernel.micros if m.batch == 256]
        for limit in (0, 64 * MIB, 512 * MIB, None):
            best = reuse(kernel.convolution, whole, limit)
            fits = [m for m in whole if limit is None or m.workspace <= limit]
            assert len(best.micros) == 1
            assert best.seconds == min(m.seconds for m in fits)


@some
@given(st.data(), st.integers(1, 9), st.integers(0, 5))
def test_more_sizes_are_never_slower(data, batch, limit):
    found = [*data.draw(micros(batch)), micro(batch, 0, 13.0)]
    seconds = [
        reuse(convolution(batch), [m for m in found if m.batch in sizes], limit).seconds
        for sizes in (batch_sizes(batch, policy) for policy in (ALL, POWERS, UNDIVIDED))
    ]
    assert seconds == sorted(seconds)


def test_sizes_of_micro_batches():
    assert batch_sizes(6, ALL) == (6, 5, 4, 3, 2, 1)
    assert batch_sizes(256, POWERS) == (256, 128, 64, 32, 16, 8, 4, 2, 1)
    assert batch_sizes(6, POWERS) == (6, 4, 2, 1)  # with the whole, whatever it is
    assert batch_sizes(6, UNDIVIDED) == (6,)
    assert batch_sizes(1, ALL) == batch_sizes(1, POWERS) == batch_sizes(1, UNDIVIDED) == (1,)
    assert BatchSizes("powerOfTwo") is POWERS


# -- what was measured on an H200


def test_micro_batches_halve_the_time_on_an_h200():
    """Seven layers, three passes, strict float32, 512 MiB for each kernel."""
    limit = 512 * MIB
    assert total_ms(limit, {256, 64, 16}) == pytest.approx(147.5, abs=0.1)
    assert total_ms(limit, {256, 64}) == pytest.approx(213.8, abs=0.1)
    assert total_ms(limit, {256}) == pytest.approx(301.6, abs=0.1)


def test_without_a_limit_nothing_is_divided_on_an_h200():
    assert total_ms(None, {256}) == pytest.approx(107.3, abs=0.1)
    assert total_ms(None, {256, 64, 16}) == total_ms(None, {256})


def test_some_kernels_are_fastest_in_parts_that_a_smaller_limit_allows():
    """vgg3_2's weight gradient: 16 parts of 230 MiB each take 9 ms, the whole in 3.5 GiB takes 8."""
    kernel = next(k for k in measured() if "filter 3×3, 256" in str(k.convolution))
    best = reuse(kernel.convolution, kernel.micros, 512 * MIB)
    assert {m.batch for m in best.micros} == {16} and len(best.micros) == 16
    assert best.workspace < 230 * MIB
    assert best.seconds == pytest.approx(16 * 0.574e-3)
    assert reuse(kernel.convolution, kernel.micros).seconds == 7.950e-3


# -- details


def test_what_was_not_timed_does_not_count():
    nan = micro(8, 0, math.nan)
    assert reuse(convolution(8), [nan, micro(4, 1, 3.0)]).seconds == 6.0
    assert reuse(convolution(8), [nan, micro(8, 0, 7.0), nan]).seconds == 7.0
    with pytest.raises(WorkspaceError, match="no micro-batches that were timed"):
        reuse(convolution(8), [nan])


def test_of_equals_the_least_workspace_then_the_fewest_parts():
    found = [micro(8, 2, 4.0), micro(4, 1, 2.0), micro(2, 1, 1.0), micro(1, 3, 0.5)]
    assert reuse(convolution(8), found).micros == (found[1],) * 2
    assert reuse(convolution(8), reversed(found)).micros == (found[1],) * 2


def test_the_error_says_convolution_limit_and_least():
    found = [micro(256, 600 * MIB, 1.0), micro(64, 200 * MIB, 1.0), micro(100, 0, 1.0)]
    with pytest.raises(WorkspaceError) as error:
        reuse(convolution(256), found, 100 * MIB)
    text = str(error.value)
    assert "forward 5×5, 64 → 192" in text and "batch 256" in text
    assert "100.00 MiB" in text and "200.00 MiB" in text
    assert error.value.limit == 100 * MIB and error.value.least == 200 * MIB
    assert isinstance(error.value, VmemError) and isinstance(error.value, ValueError)


def test_no_micro_batches_make_up_the_batch():
    with pytest.raises(WorkspaceError, match="Profile") as error:
        reuse(convolution(7), [micro(2, 0, 1.0), micro(8, 0, 1.0)])
    assert error.value.least is None and error.value.limit is None


def test_many_sizes_are_quick():
    """O(B · sizes): 1024 sizes, two algorithms."""
    found = [micro(b, b, 1.0 + b, 0) for b in range(1, 1025)]
    found += [Micro(b, 1, (), 2 * b, 0.9 + b) for b in range(1, 1025)]
    assert reuse(convolution(1024), found, 512).micros[0].batch == 512
