"""The profiler: what it times, in which order, what it hands out, and what it says it left."""

import dataclasses
import math

import pytest
from convolutions import MIB, convolution, measured
from hypothesis import given
from hypothesis import strategies as st

from vmem_jax.conv.database import Database, identity_of
from vmem_jax.conv.profiler import profile
from vmem_jax.core.convolution import Micro
from vmem_jax.policy.workspace_division import desirable, front
from vmem_jax.policy.workspace_reuse import BatchSizes, reuse

ALL, POWERS, UNDIVIDED = BatchSizes.ALL, BatchSizes.POWER_OF_TWO, BatchSizes.UNDIVIDED


@dataclasses.dataclass(frozen=True)
class Way:
    """A plan of `Fake`; `takes` is what it will be found to take, or the error that it gives."""

    engine: int
    workspace: int
    takes: float | str
    knobs: tuple[tuple[int, int], ...] = ()
    channels: int = 0


class Fake:
    """A library: a slow way with no workspace, and a fast one with much; and a clock of its own."""

    def __init__(self, ways=None):
        self.ways = ways or (
            lambda c: [
                Way(1, c.batch * MIB, c.batch * 1.0, ((2, 1), (1, 0))),
                Way(0, 0, c.batch * 3.0),
            ]
        )
        self.enumerated, self.timed, self.rivals, self.now = [], [], [], 0.0

    def monotonic(self):
        return self.now

    def plans(self, convolution):
        self.enumerated.append(convolution)
        return self.ways(convolution)

    def seconds(self, convolution, plan, rival):
        self.timed.append((convolution, plan.engine))
        self.rivals.append(rival)
        if isinstance(plan.takes, str):
            raise RuntimeError(plan.takes)
        self.now += plan.takes
        return plan.takes


@pytest.fixture
def database(tmp_path):
    return Database(identity_of("fake", "1"), tmp_path)


@pytest.fixture
def library(monkeypatch):
    fake = Fake()
    monkeypatch.setattr("vmem_jax.conv.profiler.time", fake)
    return fake


def test_micros_of_all_sizes(library, database):
    c = convolution(4)
    found = profile([c], POWERS, library, database, deadline=math.inf)
    assert found.micros == {
        c: tuple(
            m
            for b in (4, 2, 1)
            for m in (Micro(b, 0, (), 0, b * 3.0), Micro(b, 1, ((1, 0), (2, 1)), b * MIB, b * 1.0))
        )
    }
    assert (found.timed, found.reused, found.untimed) == (6, 0, ())
    assert found.seconds == 4 * (4 + 2 + 1)
    assert reuse(c, found.micros[c], MIB).seconds == 4.0


def test_the_second_time_all_is_known(library, database):
    c = convolution(4)
    first = profile([c], POWERS, library, database)
    calls = len(library.enumerated), len(library.timed)
    again = profile([c], POWERS, library, database)
    assert again.micros == first.micros
    assert (again.timed, again.reused, again.untimed) == (0, 6, ())
    assert (len(library.enumerated), len(library.timed)) == calls
    fresh = profile([c], POWERS, library, database, refresh=True)
    assert (fresh.timed, fresh.reused) == (6, 0)


def test_layers_share_what_differs_in_the_batch_alone(library, database):
    profile([convolution(4), convolution(4)], POWERS, library, database)
    assert len(library.timed) == 6
    more = profile([convolution(8)], POWERS, library, database)
    assert (more.timed, more.reused) == (2, 6)


def test_a_small_batch_then_the_whole_then_the_most_work(library, database):
    small = dataclasses.replace(convolution(16), features_out=8)
    large = convolution(16)
    profile([small, large], POWERS, library, database, deadline=math.inf)
    assert library.enumerated[:2] == [large.with_batch(2), large]
    assert library.enumerated[2:4] == [small.with_batch(2), small]
    rest = library.enumerated[4:]
    assert [c.flops for c in rest] == sorted((c.flops for c in rest), reverse=True)
    assert len(library.enumerated) == len(set(library.enumerated)) == 10


def test_the_time_is_bounded_and_what_is_left_is_said(library, database):
    c = convolution(8)
    found = profile([c], POWERS, library, database, deadline=12.5)
    # 1 and 3 s for one sample, 8 and 24 s for the whole batch; nothing begins after that
    assert len(library.timed) == 4 and len(found.micros[c]) == 4
    assert len(found.untimed) == 2 and all("time was up" in text for text in found.untimed)
    assert any("batch 4" in text for text in found.untimed)
    assert [m.batch for m in found.micros[c]] == [8, 8, 1, 1]
    # in the middle of a convolution, too
    found = profile([c], POWERS, library, database, deadline=3.0)
    assert found.timed == 1 and found.reused == 4
    assert "batch 4" in found.untimed[0] and "1 of 2: the time was up" in found.untimed[0]
    # in the end all is there, and nothing was timed twice
    found = profile([c], POWERS, library, database, deadline=math.inf)
    assert found.untimed == () and len(library.timed) == len(set(library.timed)) == 8


# workspace and seconds of ways for one sample, and which are timed for 8 samples, then for 4
HOPELESS = {
    "useless": (((0, 1.0), (0, 3.0)), [0], [0]),
    "slow but useful": (((0, 1.0), (0, 2.0)), [0, 1], [0, 1]),
    "needs less": (((9, 1.0), (0, 29.0)), [0, 1], [0, 1]),
    "needs less, but far too long": (((9, 1.0), (0, 31.0)), [0], [0]),
    "the fastest is never lost, in whatever order": (((0, 3.0), (0, 1.0)), [1], [1]),
    "those expected to be fast come first": (((0, 2.0), (0, 1.0)), [1, 0], [1, 0]),
}


@pytest.mark.parametrize("case", HOPELESS)
def test_what_is_hopeless_with_few_samples_is_not_tried_with_many(case, library, database):
    points, of_whole, of_half = HOPELESS[case]
    library.ways = lambda c: [Way(n, w, t * c.batch) for n, (w, t) in enumerate(points)]
    found = profile([convolution(8)], POWERS, library, database, deadline=math.inf)
    timed = lambda batch: [engine for c, engine in library.timed if c.batch == batch]
    assert (timed(1), timed(8), timed(4)) == ([0, 1], of_whole, of_half)
    if case == "needs less, but far too long":  # known by its samples, for a whole batch alone
        assert found.micros[convolution(8)][0] == Micro(8, 1, (), 0, 8 * 31.0)
        assert found.hopeless == 2
    else:
        assert found.hopeless == 6 - sum(len(timed(batch)) for batch in (8, 4, 2))
    assert found.untimed == ()
    again = len(library.timed)
    profile([convolution(8)], POWERS, library, database)
    assert len(library.timed) == again  # it is known that there is nothing more to time


@pytest.mark.parametrize("rival", [True, False])
def test_what_was_second_with_few_samples_is_not_taken_by_its_samples(rival, library, database):
    """With few another was better in all, so nobody looked whether it is right."""

    def ways(c):
        few = [Way(2, 0, 30.5)] if rival and c.batch == 1 else []
        return [Way(0, 9, 1.0 * c.batch), *few, Way(1, 0, 31.0 * c.batch)]

    library.ways = ways
    found = profile([convolution(8)], POWERS, library, database, deadline=math.inf)
    assert ((convolution(8), 1) in library.timed) == rival
    assert Micro(8, 1, (), 0, 8 * 31.0) in found.micros[convolution(8)]


def test_rivals_are_those_of_no_more_workspace(library, database):
    points = [(5, 2.0), (3, 4.0), (5, 4.0), (0, 9.0)]
    library.ways = lambda c: [Way(n, w, t) for n, (w, t) in enumerate(points)]
    profile([convolution(4)], UNDIVIDED, library, database)
    assert library.rivals == [math.inf, math.inf, 2.0, math.inf]


def test_the_nearest_size_tells_what_is_hopeless(library, database):
    """A way that only few samples slow down is timed with many, and where it is near again not."""
    slow = {32: 9.0, 16: 2.0, 8: 2.0, 4: 9.0, 2: 9.0, 1: 9.0}
    library.ways = lambda c: [Way(0, 0, 1.0 * c.batch), Way(1, 0, slow[c.batch] * c.batch)]
    found = profile([convolution(32)], POWERS, library, database, deadline=math.inf)
    # 4 samples are the scout, and condemn it for 32; the nearest to 16 that has it is 4, too
    assert [c.batch for c, engine in library.timed if engine == 1] == [4]
    assert found.hopeless == 5
    slow[4] = 2.0
    library.timed.clear()
    profile([convolution(32)], POWERS, library, database, deadline=math.inf, refresh=True)
    # seen with 4 and 32; then 16, by 32: it is lost there; 8, 2 by 4, 1 by 2
    assert [c.batch for c, engine in library.timed if engine == 1] == [4, 32, 8, 2]


def test_channels_tell_ways_apart(library, database):
    library.ways = lambda c: [
        Way(1, 0, 3.0),
        Way(1, 5, 2.0, channels=4),
        Way(1, 9, 1.0, channels=8),
    ]
    found = profile([convolution(4)], UNDIVIDED, library, database)
    assert [m.channels for m in found.micros[convolution(4)]] == [0, 4, 8]


def test_no_time_is_no_timing(library, database):
    found = profile([convolution(4)], ALL, library, database, deadline=0.0)
    assert library.timed == library.enumerated == []
    assert found.micros == {convolution(4): ()} and len(found.untimed) == 4


def test_over_the_limit_is_left_and_said(library, database):
    c = convolution(4)
    found = profile([c], UNDIVIDED, library, database, limit=3 * MIB)
    assert [m.engine for m in found.micros[c]] == [0]
    assert len(found.untimed) == 1 and "over the limit" in found.untimed[0]
    more = profile([c], UNDIVIDED, library, database)  # with no limit, the rest is timed
    assert more.timed == 1 and [m.engine for m in more.micros[c]] == [0, 1]


def test_failures_are_said_and_tried_again(library, database):
    c = convolution(4)
    library.ways = lambda c: [Way(0, 0, "CUDNN_STATUS_EXECUTION_FAILED\nmore"), Way(1, 1, 1.0)]
    found = profile([c], UNDIVIDED, library, database)
    assert [m.engine for m in found.micros[c]] == [1]
    assert found.untimed == (f"{c}: 1 of 2: CUDNN_STATUS_EXECUTION_FAILED",)
    library.ways = lambda c: [Way(0, 0, 5.0), Way(1, 1, 1.0)]
    found = profile([c], UNDIVIDED, library, database)
    assert found.timed == 1 and found.untimed == ()


def test_a_library_that_cannot_enumerate(library, database):
    def ways(convolution):
        raise RuntimeError("not supported")

    library.ways = ways
    found = profile([convolution(4)], UNDIVIDED, library, database)
    assert found.micros == {convolution(4): ()}
    assert "all: not supported" in found.untimed[0]
    library.ways = lambda c: []
    found = profile([convolution(4)], UNDIVIDED, library, database)
    assert "no algorithm for it" in found.untimed[0]


def test_without_a_device_ways_are_kept_but_not_used(library, database):
    c = convolution(4)
    library.ways = lambda c: [Way(0, 0, math.nan), Way(1, 7, math.nan)]
    found = profile([c], UNDIVIDED, library, database)
    assert found.micros == {c: ()} and found.timed == 0
    assert "2 of 2: there is no device" in found.untimed[0]
    kept = database.load()[c]
    assert [m.workspace for m in kept.micros] == [0, 7] and not kept.timed and not kept.complete
    # the device itself has one more, and times all
    library.ways = lambda c: [Way(0, 0, 3.0), Way(1, 7, 2.0), Way(2, 9, 1.0)]
    found = profile([c], UNDIVIDED, library, database)
    assert found.timed == 3 and len(found.micros[c]) == 3
    assert database.load()[c].complete


def test_only_what_can_matter_is_handed_out_but_all_is_kept(library, database):
    library.ways = lambda c: [Way(n, w, t) for n, (w, t) in enumerate(_POINTS)]
    found = profile([convolution(4)], UNDIVIDED, library, database)
    assert [(m.workspace, m.seconds) for m in found.micros[convolution(4)]] == [(1, 5.0), (3, 2.0)]
    assert len(database.load()[convolution(4)].timed) == len(_POINTS)


_POINTS = [(3, 2.0), (3, 2.5), (4, 2.0), (1, 5.0), (2, 6.0), (2, 5.0)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5).map(float))))
def test_desirable_is_pareto(points):
    found = desirable([Micro(4, 0, (), w, t) for w, t in points])
    best = sorted(
        {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    )
    assert [(m.workspace, m.seconds) for m in found] == best


def test_pruning_costs_nothing_on_real_kernels():
    for kernel in measured():
        pruned = [
            m for b in (256, 64, 16) for m in desirable(m for m in kernel.micros if m.batch == b)
        ]
        assert len(pruned) < len(kernel.micros)
        points = lambda found: [(c.workspace, c.seconds) for c in found]
        assert points(front(pruned, 256)) == points(front(kernel.micros, 256))


def test_progress_is_told(library, database):
    said = []
    profile([convolution(2)], ALL, library, database, on_progress=lambda *args: said.append(args))
    assert [s[:2] for s in said] == [(0, 2), (1, 2), (2, 2)]
    assert "batch 1" in said[0][2] and "batch 2" in said[1][2] and said[2][2] == ""


def test_an_interruption_loses_little(library, database):
    class Stop(BaseException):
        pass

    def ways(c):
        if c.batch == 2:
            raise Stop
        return [Way(0, 0, 1.0)]

    library.ways = ways
    with pytest.raises(Stop):
        profile([convolution(4)], POWERS, library, database)
    assert set(database.load()) == {convolution(1), convolution(4)}


def test_a_directory_that_cannot_be_written_stops_nothing(library, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    nowhere = Database(identity_of("fake", "1"), tmp_path / "file")
    found = profile([convolution(4)], UNDIVIDED, library, nowhere)
    assert found.timed == 2 and "nothing is kept" in caplog.text
