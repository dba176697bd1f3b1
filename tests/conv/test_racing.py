"""Racing: how often ways are run, on a simulated device; what it saves, and that it costs nothing."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import statistics

import pytest
from convolutions import Kernel, measured

from vmem_jax.conv import profiler
from vmem_jax.conv.database import Database, identity_of
from vmem_jax.conv.profiler import profile
from vmem_jax.conv.racing import race
from vmem_jax.core.convolution import Convolution, Micro
from vmem_jax.policy.workspace_division import desirable, front
from vmem_jax.policy.workspace_reuse import BatchSizes, batch_sizes

MS = 1e-3
LOADING = 3 * MS
SIZES = (256, 64, 16)


class Lane:
    """What runs a way of so many seconds; the first run loads kernels."""

    def __init__(self, takes, loads=LOADING):
        self.takes, self.loads, self.runs = takes, loads, 0

    def __call__(self, times):
        self.runs += times
        loads, self.loads = self.loads, 0.0
        return [self.takes + loads * (i == 0) for i in range(times)]


@pytest.mark.parametrize(
    ("takes", "rival", "loaded", "runs", "found"),
    [
        (0.02, math.inf, False, 11, 0.02),  # short ones ten times, but for the first
        (2, math.inf, False, 4, 2),
        (2, math.inf, True, 4, 2),
        (20, math.inf, False, 2, 20),
        (20, math.inf, True, 1, 20),
        (60, math.inf, False, 1, 63),
        (2, 2, False, 4, 2),
        (2, 1.5, False, 2, 2),  # slower, and known without what it loads
        (0.2, 0.18, False, 11, 0.2),
        (0.1, 0.07, True, 11, 0.1),  # by so little that it may be the launch
        (0.2, 0.1, False, 2, 0.2),  # what it loads does not condemn it alone
        (12, 2, False, 1, 15),  # so much slower does
        (5, 3, False, 2, 5),
        (5, 3, True, 1, 5),  # where it loads nothing, a first run is like others
        (0.9, 0.3, True, 2, 0.9),  # or next to nothing
    ],
)
def test_how_often_a_way_is_run(takes, rival, loaded, runs, found):
    lane = Lane(takes * MS, 0.0 if loaded else LOADING)
    assert statistics.median(race(lane, rival * MS, loaded)) == pytest.approx(found * MS)
    assert lane.runs == runs


def test_what_is_worth_having_is_far_from_hopeless():
    """No measured way of a front was much slower than a rival of it with more or fewer samples."""
    worst = 0.0
    for kernel, there, here in itertools.product(measured(), SIZES, SIZES):
        seen = {m.engine: m.seconds for m in kernel.micros if m.batch == there}
        ways = [m for m in kernel.micros if m.batch == here]
        for way in desirable(ways):
            rivals = [seen[m.engine] for m in ways if m.workspace <= way.workspace]
            worst = max(worst, seen[way.engine] / min(rivals))
    assert 1.7 < worst < 0.8 * profiler._HOPELESS


def sizes_of(kernel: Kernel, engine: int) -> dict[int, Micro]:
    """The way of that engine with 256, 64, … samples; between what was measured a power of them."""
    known = {m.batch: m for m in kernel.micros if m.engine == engine}
    found = {}
    for batch in batch_sizes(256, BatchSizes.POWER_OF_TWO):
        low, high = (64, 256) if batch > 64 else (16, 64)
        a, b = known[low], known[high]
        part = math.log(batch / low) / math.log(high / low)
        seconds = max(a.seconds * (b.seconds / a.seconds) ** part, 5e-6)
        workspace = b.workspace * batch // high
        found[batch] = Micro(batch, engine, (), workspace, seconds)
    return found


@functools.cache
def true_ways() -> dict[Convolution, tuple[Micro, ...]]:
    """Of each kernel that was measured, with every size."""
    found: dict[Convolution, tuple[Micro, ...]] = {}
    for kernel in measured():
        engines = sorted({m.engine for m in kernel.micros})
        of_engines = [sizes_of(kernel, engine) for engine in engines]
        for batch in of_engines[0]:
            convolution = kernel.convolution.with_batch(batch)
            found[convolution] = tuple(sizes[batch] for sizes in of_engines)
    return found


@dataclasses.dataclass(frozen=True)
class Way:
    engine: int
    workspace: int
    knobs: tuple[tuple[int, int], ...] = ()
    channels: int = 0


class Simulated:
    """A library on a device whose runs differ by 2 %, with the kernels of `measured`."""

    def __init__(self, race):
        self.race, self.spent, self.loaded, self.random = race, 0.0, set(), random.Random(0)

    def plans(self, convolution):
        return [Way(m.engine, m.workspace) for m in true_ways()[convolution]]

    def seconds(self, convolution, plan, rival):
        [way] = [m for m in true_ways()[convolution] if m.engine == plan.engine]

        def run(times):
            taken = [way.seconds * self.random.uniform(0.99, 1.01) for _ in range(times)]
            taken[0] += 0.0 if key in self.loaded else LOADING
            self.loaded.add(key)
            self.spent += sum(taken)
            return taken

        key = convolution.with_batch(0), plan.engine
        return statistics.median(self.race(run, rival, key in self.loaded))


def without_racing(run, rival, loaded):
    """As it was before: ten runs, of 25 ms together, or of three times the rival's time."""
    enough = min(3 * rival, 0.025)
    [first] = run(1)
    return [first] if first >= enough else run(max(1, int(min(10, enough / first))))


def profiled(library, tmp_path):
    wholes = [kernel.convolution for kernel in measured()]
    database = Database(identity_of("simulated", "1"), tmp_path)
    sizes = BatchSizes.POWER_OF_TWO
    return profile(wholes, sizes, library, database, deadline=math.inf)


def test_it_takes_less_time_and_finds_the_same_fronts(tmp_path, monkeypatch):
    library = Simulated(race)
    found = profiled(library, tmp_path / "racing")
    for whole, micros in found.micros.items():
        every = [m for c, ways in true_ways().items() for m in ways if c.with_batch(256) == whole]
        seconds = {(m.batch, m.engine): m.seconds for m in every}
        chosen = front(micros, 256)
        for best in front(every, 256):
            ours = [c for c in chosen if c.workspace <= best.workspace]
            takes = [sum(seconds[m.batch, m.engine] for m in c.micros) for c in ours]
            assert takes and min(takes) <= 1.02 * best.seconds, (whole, best)
    before = Simulated(without_racing)
    monkeypatch.setattr(profiler, "_HOPELESS", 8.0)
    profiled(before, tmp_path / "before")
    assert library.spent <= before.spent * 2 / 3
