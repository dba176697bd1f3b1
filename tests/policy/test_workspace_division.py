"""WD: desirable sets and the division of one workspace, by trying everything, by the paper."""

import itertools
import math
from random import Random

import pytest
from convolutions import MIB, all_configurations, convolution, measured, micro, micros
from hypothesis import given, settings
from hypothesis import strategies as st

from vmem_jax.core.convolution import Configuration
from vmem_jax.errors import WorkspaceError
from vmem_jax.policy.params import PolicyParams
from vmem_jax.policy.workspace_division import divide, front
from vmem_jax.policy.workspace_reuse import reuse

some = settings(max_examples=300, deadline=None)
few = settings(max_examples=60, deadline=None)

SHARES = (0, 1, 64, 512, 2048)
"""Limits for a kernel, MiB."""


def points(configurations):
    return [(c.workspace, c.seconds) for c in configurations]


def pareto(found):
    """What nothing else equals or beats in both, once each, by (workspace, seconds)."""
    found = sorted(set(found))
    return [p for n, p in enumerate(found) if all(p[1] < q[1] for q in found[:n])]


def exhaustive(fronts, limit):
    """The fewest seconds of one of each within the limit, by trying everything."""
    fitting = [c for c in itertools.product(*fronts) if sum(x.workspace for x in c) <= limit]
    return min(sum(x.seconds for x in c) for c in fitting) if fitting else None


def merged(fronts):
    """(workspace, seconds) of all choices that nothing beats: one kernel joins after the other."""
    best = [(0, 0.0)]
    for f in fronts:
        best = pareto([(w + c.workspace, s + c.seconds) for w, s in best for c in f])
    return best


# -- desirable sets


@some
@given(st.data(), st.integers(1, 7))
def test_front_is_all_that_nothing_beats(data, batch):
    found = data.draw(micros(batch))
    ways = [Configuration(c) for c in all_configurations(found, batch)]
    assert points(front(found, batch)) == pareto(points(ways))


@some
@given(st.data(), st.integers(1, 8))
def test_front_is_that_of_the_papers_recursion(data, batch):
    """C(b) = D(∪ {cμ} + c) of section III-C, as it is written there, in points."""
    found = data.draw(micros(batch))
    sets = [[(0, 0.0)]]
    for b in range(1, batch + 1):
        sets.append(
            pareto(
                (max(m.workspace, w), m.seconds + s)
                for m in found
                if m.batch <= b
                for w, s in sets[b - m.batch]
            )
        )
    assert points(front(found, batch)) == sets[batch]


@some
@given(st.data(), st.integers(1, 8))
def test_front_has_the_optimum_of_every_limit(data, batch):
    found = data.draw(micros(batch))
    desirable = front(found, batch)
    for limit in range(7):
        within = [c for c in desirable if c.workspace <= limit]
        if within:
            assert within[-1].seconds == reuse(convolution(batch), found, limit).seconds
        else:
            with pytest.raises(WorkspaceError):
                reuse(convolution(batch), found, limit)


def test_fronts_of_real_kernels():
    for kernel in measured():
        desirable = front(kernel.micros, 256)
        assert points(desirable) == pareto(points(desirable))
        assert all(c.batch == 256 for c in desirable)
        for c in desirable:
            assert c.seconds == reuse(kernel.convolution, kernel.micros, c.workspace).seconds
        assert len(desirable) <= 6


def test_front_of_what_makes_no_batch_is_empty():
    assert front([], 4) == front([micro(3, 0, 1.0)], 4) == front([micro(4, 0, math.nan)], 4) == ()


# -- the division


@few
@given(st.data(), st.integers(0, 16))
def test_division_is_the_best_of_all(data, limit):
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=4))
    fronts = [front([*data.draw(micros(b)), micro(b, 5, 13.0)], b) for b in sizes]
    best = exhaustive(fronts, limit)
    if best is None:
        with pytest.raises(WorkspaceError) as error:
            divide(fronts, limit)
        assert error.value.least == sum(f[0].workspace for f in fronts)
    else:
        chosen = divide(fronts, limit)
        assert sum(c.seconds for c in chosen) == best
        assert sum(c.workspace for c in chosen) <= limit
        assert len(chosen) == len(fronts)
        assert all(c in f for c, f in zip(chosen, fronts, strict=True))


def test_division_of_real_kernels_is_the_best_of_all():
    fronts = [front(k.micros, 256) for k in measured()][:12]
    for workspace, seconds in merged(fronts)[::200]:
        chosen = divide(fronts, workspace)
        assert sum(c.workspace for c in chosen) <= workspace
        assert sum(c.seconds for c in chosen) == pytest.approx(seconds, rel=1e-9)


def uneven_fronts(seed):
    """A few kernels, of microseconds to seconds and of bytes to gigabytes."""
    random = Random(seed)
    fronts = []
    for _ in range(random.randint(2, 9)):
        seconds, nbytes = 10 ** random.uniform(-5, 0), 10 ** random.uniform(3, 10)
        found = [micro(4, 0, 20 * seconds)] if random.random() < 0.5 else []
        for _ in range(random.randint(1, 6)):
            spread = 1 + random.random() * 10 ** random.uniform(-3, 1)
            found.append(micro(4, int(nbytes * random.random()), seconds * spread))
        fronts.append(front(found, 4))
    return random, fronts


@pytest.mark.parametrize("seed", range(40))
def test_division_is_exact_where_a_solver_is_not(seed):
    """HiGHS alone, within its tolerances, fails some of these."""
    random, fronts = uneven_fronts(seed)
    best = merged(fronts)
    for limit in {limit for w, _ in random.sample(best, min(4, len(best))) for limit in (w, w - 1)}:
        if limit >= best[0][0]:
            chosen = divide(fronts, limit)
            assert sum(c.workspace for c in chosen) <= limit
            least = min(s for w, s in best if w <= limit)
            assert sum(c.seconds for c in chosen) == pytest.approx(least, rel=1e-12)


def test_meta_a_solver_alone_is_not_exact(monkeypatch):
    monkeypatch.setattr("vmem_jax.policy.workspace_division._finish", lambda *args: None)
    failed = 0
    for seed in range(40):
        try:
            test_division_is_exact_where_a_solver_is_not(seed)
        except AssertionError:
            failed += 1
    assert failed


def test_without_the_solver_the_division_is_the_same(monkeypatch):
    """HiGHS gives a start only: from a bad one the rest still finds the best."""
    smallest = lambda fronts, free: tuple(f[0] for f in fronts)
    monkeypatch.setattr("vmem_jax.policy.workspace_division._solve", smallest)
    for seed in range(20):
        test_division_is_exact_where_a_solver_is_not(seed)
    test_division_on_an_h200()


def test_too_many_choices_leave_the_solvers(monkeypatch):
    none = PolicyParams(partial_divisions=0)
    monkeypatch.setattr("vmem_jax.policy.workspace_division.PARAMS", none)
    test_division_on_an_h200()


def test_division_is_never_slower_than_equal_shares():
    """WD with n times the limit that WR has for each of n kernels."""
    kernels = measured()
    fronts = [front(k.micros, 256) for k in kernels]
    for share in SHARES:
        alone = sum(reuse(k.convolution, k.micros, share * MIB).seconds for k in kernels)
        together = divide(fronts, share * MIB * len(kernels))
        assert sum(c.seconds for c in together) <= alone * (1 + 1e-12)


def test_division_on_an_h200():
    """10.5 GiB for 21 kernels: 122 ms where 512 MiB for each take 148."""
    fronts = [front(k.micros, 256) for k in measured()]
    ms = lambda mib: sum(c.seconds for c in divide(fronts, mib * MIB)) * 1e3
    assert ms(21 * 512) == pytest.approx(121.7, abs=0.1)
    assert ms(4096) == pytest.approx(132.8, abs=0.1)
    assert ms(2048) == pytest.approx(161.9, abs=0.1)
    assert ms(0) == pytest.approx(355.0, abs=0.1)


def test_a_byte_too_little_is_too_little():
    """HiGHS holds constraints to 1e-6 of the limit; a byte is far below that."""
    large = 10 * 2**30
    one = front([micro(4, 0, 2.0), micro(4, large, 1.0)], 4)
    assert sum(c.seconds for c in divide([one] * 3, 3 * large)) == 3.0
    assert sum(c.seconds for c in divide([one] * 3, 3 * large - 1)) == 4.0
    assert sum(c.seconds for c in divide([one] * 3, large - 1)) == 6.0
    other = front([micro(4, 0, 2.0), micro(4, large - 1, 1.5), micro(4, large, 1.0)], 4)
    assert sum(c.seconds for c in divide([other] * 3, 3 * large - 1)) == 3.5


def test_small_differences_of_time_count():
    """A nanosecond of a second."""
    slow = front([micro(4, 0, 1.0), micro(4, 8, 0.5)], 4)
    near = front([micro(4, 0, 1e-3), micro(4, 2, 1e-3 - 1e-9), micro(4, 3, 1e-3 - 2e-9)], 4)
    chosen = divide([slow, near, near], 8 + 5)
    assert sorted(c.workspace for c in chosen[1:]) == [2, 3] and chosen[0].workspace == 8


def test_the_error_says_limit_and_least():
    one = front([micro(4, 100 * MIB, 1.0)], 4)
    with pytest.raises(WorkspaceError) as error:
        divide([one, one], 150 * MIB)
    text = str(error.value)
    assert "2 convolutions" in text and "150.00 MiB" in text and "200.00 MiB" in text
    assert (error.value.limit, error.value.least) == (150 * MIB, 200 * MIB)


def test_nothing_to_divide():
    assert divide([], 0) == ()
