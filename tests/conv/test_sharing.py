"""Several devices time convolutions at once: each works, alone, and what comes out is the same."""

from __future__ import annotations

import dataclasses
import math
import threading
import time

import jax
import pytest
from convolutions import convolution
from processes import in_subprocess

from vmem_jax.conv import cudnn, timings
from vmem_jax.conv.database import Database, identity_of
from vmem_jax.conv.profiler import profile
from vmem_jax.conv.sharing import share
from vmem_jax.policy.workspace_reuse import BatchSizes

LAYERS = [dataclasses.replace(convolution(8), features_out=n) for n in (8, 16, 32, 64)]


class Card:
    """A library on one device. The first that each of `cards` times waits for that of the others."""

    def __init__(self, meeting: threading.Barrier | None = None, fails: bool = False):
        self.meeting, self.fails = meeting, fails
        self.busy, self.timed = threading.Lock(), []

    def plans(self, convolution):
        plan = lambda engine, each, channels: cudnn.Plan(
            engine, (), each * convolution.batch, frozenset(), False, "A", channels
        )
        return plan(1, 3 << 20, 0), plan(2, 1 << 20, 0), plan(3, 0, 0), plan(4, 0, 0)

    def seconds(self, convolution, plan, incumbent):
        assert self.busy.acquire(blocking=False), "two timings at a time on one device"
        try:
            if self.meeting is not None and not self.timed:
                self.meeting.wait(30)  # breaks, and raises, where only one device is used
            self.timed.append(convolution)
            if self.fails:
                raise KeyboardInterrupt
            return 1e-6 * plan.engine * convolution.features_out * convolution.batch
        finally:
            self.busy.release()


def database(path):
    return Database(identity_of("a card", "1"), path)


@pytest.mark.parametrize("count", [2, 3])
def test_all_cards_work_at_once_and_find_what_one_does(count, tmp_path):
    meeting = threading.Barrier(count)
    cards = [Card(meeting) for _ in range(count)]
    run = lambda first, more, name: profile(
        LAYERS, BatchSizes.POWER_OF_TWO, first, database(tmp_path / name), more=more
    )
    found = run(cards[0], cards[1:], "many")
    alone = Card()
    expected = run(alone, (), "one")
    assert dataclasses.replace(found, seconds=0) == dataclasses.replace(expected, seconds=0)
    assert database(tmp_path / "many").load() == database(tmp_path / "one").load()
    assert all(card.timed for card in cards)
    timed = [c for card in cards for c in card.timed]
    assert sorted(map(str, timed)) == sorted(map(str, alone.timed))


def test_what_differs_in_the_batch_alone_is_timed_in_order_and_by_one_at_a_time():
    work = [c.with_batch(b) for c in LAYERS[:2] for b in (1, 8)] + [LAYERS[0].with_batch(4)]
    running, began, lock = set(), [], threading.Lock()

    def do(convolution, card):
        of_any = convolution.with_batch(0)
        with lock:
            assert of_any not in running
            running.add(of_any)
            began.append(convolution)
        time.sleep(0.01)
        with lock:
            running.remove(of_any)

    share(work, [0, 1, 2], do)
    for layer in LAYERS[:2]:
        batches = [c.batch for c in began if c.with_batch(0) == layer.with_batch(0)]
        assert batches == [c.batch for c in work if c.with_batch(0) == layer.with_batch(0)]


@pytest.mark.parametrize("which", [0, 1])
def test_an_interruption_of_one_ends_all_and_keeps_what_is_known(which, tmp_path):
    meeting = threading.Barrier(2)
    cards = [Card(meeting), Card(meeting)]
    cards[which].fails = True
    kept = database(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        profile(LAYERS, BatchSizes.POWER_OF_TWO, cards[0], kept, more=cards[1:], deadline=math.inf)
    assert len(cards[which].timed) == 1
    assert len({*cards[1 - which].timed}) == len(kept.load()) < 4 * len(LAYERS)


def test_cards_of_another_kind_are_left_alone(monkeypatch):
    """Its times are others, and are kept in a file of their own."""
    device = lambda id, kind: type("Device", (), {"id": id, "device_kind": kind, "platform": "gpu"})
    here = [device(0, "NVIDIA H200"), device(1, "NVIDIA H100"), device(2, "NVIDIA H200")]
    monkeypatch.setattr(jax, "local_devices", lambda backend: here)
    monkeypatch.setattr(timings, "cores", lambda: 8)
    monkeypatch.setattr(cudnn, "version", lambda: 91900)
    assert timings.like(here[0]) == [here[0], here[2]]
    assert timings.like(here[2]) == [here[2], here[0]]
    assert timings.like(here[1]) == [here[1]]
    assert cudnn.database(here[0]).path == cudnn.database(here[2]).path
    assert cudnn.database(here[0]).path != cudnn.database(here[1]).path
    monkeypatch.setattr(timings, "cores", lambda: 1)  # a core for each, lest launches come late
    assert timings.like(here[0]) == [here[0]]


TWO_DEVICES = """
import sys, threading
sys.path.insert(0, "conv")
import jax
from vmem_jax.conv import cudnn, timings
from test_sharing import LAYERS, Card
meeting, seen = threading.Barrier(2), []
class Library(Card):
    def __init__(self, device):
        super().__init__(meeting)
        seen.append(device)
cudnn.Cudnn, cudnn.version, timings.cores = Library, lambda: 1, lambda: 2
found = timings.profile_on(jax.devices()[1], LAYERS)
assert seen == jax.devices()[::-1], seen
assert not found.untimed and set(found.micros) == set(LAYERS)
print("done")
"""


def test_profiling_takes_all_devices_that_are_there():
    assert "done" in in_subprocess(TWO_DEVICES, 2)
