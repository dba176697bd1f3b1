"""Plans of cuDNN are held against the convolution before they are used; a trial is faked here."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from types import SimpleNamespace

import pytest

from vmem_jax import PlanError
from vmem_jax.conv import cudnn, verify
from vmem_jax.conv.database import Database, identity_of
from vmem_jax.conv.profiler import profile
from vmem_jax.core.convolution import XLA, Configuration, Convolution, Micro, Pass
from vmem_jax.policy.workspace_reuse import BatchSizes

EQUAL = Convolution(
    which=Pass.BACKWARD_FILTER,
    dtype="float32",
    strict=True,
    batch=8,
    features_in=4,
    features_out=4,
    size=(8, 8),
    kernel=(3, 3),
    strides=(2, 2),
    padding=((1, 1), (1, 1)),
    dilation=(1, 1),
)
UNEQUAL = dataclasses.replace(EQUAL, padding=((0, 1), (0, 1)))


class Device:
    platform, local_hardware_id, device_kind = "gpu", 0, "a card"


class Memory:
    def sets(self, convolution, workspace, most):
        return []


def plan_of(engine: int, workspace: int = 0) -> cudnn.Plan:
    return cudnn.Plan(engine, (), workspace, frozenset(), False, "A")


@pytest.fixture
def trial(monkeypatch):
    """What engines take, and how far they are off, by engine; which were held against sums."""

    class Trial:
        takes, off, held = {0: 1.0}, {0: 1e-6}, []

        def __init__(self, *arguments, engine, **options):
            self.engine = engine

        def run(self, times):
            return [self.takes[self.engine]] * times

        def deviation(self):
            self.held.append(self.engine)
            return self.off[self.engine]

    class Module:
        ConvTrial = Trial

    Trial.held = []
    monkeypatch.setattr(cudnn, "_open", lambda: Module)
    return Trial


def seconds(convolution, plan, rival=math.inf):
    return cudnn.seconds(convolution, plan, Device(), rival, scratch=Memory())


def test_what_is_right_is_timed(trial):
    assert seconds(UNEQUAL, plan_of(0)) == (1.0,)
    assert trial.held == [0]


@pytest.mark.parametrize("off", [1.4, math.inf])
def test_what_computes_something_else_is_refused(trial, off):
    trial.off = {0: off}
    with pytest.raises(RuntimeError, match=f"engine 0 computes something else: off by {off:.2g} "):
        seconds(EQUAL, plan_of(0))


def test_what_no_one_would_use_is_not_held_against_anything(trial):
    seconds(EQUAL, plan_of(0), rival=0.5)
    assert not trial.held


def test_without_the_kernel_unequal_padding_is_refused(trial):
    trial.off = {0: math.nan}
    assert seconds(EQUAL, plan_of(0)) == (1.0,)
    with pytest.raises(RuntimeError, match="unequal padding, and nothing to check the result by"):
        seconds(UNEQUAL, plan_of(0))


def test_a_wrong_way_is_no_rival_and_not_handed_out(trial, monkeypatch, tmp_path):
    """The fastest is wrong: the other is timed, as if there were no faster one, and taken."""
    trial.takes, trial.off = {0: 0.1, 1: 0.4}, {0: 1.4, 1: 1e-6}
    library = cudnn.Cudnn(Device())
    library._scratch = Memory()
    monkeypatch.setattr(library, "plans", lambda convolution: (plan_of(0), plan_of(1)))
    database = Database(identity_of("a card", "1"), tmp_path)
    found = profile([UNEQUAL], BatchSizes.UNDIVIDED, library, database)
    assert [m.engine for m in found.micros[UNEQUAL]] == [1]
    assert [m.engine for m in database.load()[UNEQUAL].timed] == [1]
    assert "engine 0 computes something else" in found.untimed[0]
    assert trial.held == [0, 1]


def given(*micros: Micro):
    """A program of one convolution, and a plan that does it by these."""
    step = SimpleNamespace(convolution=UNEQUAL)
    return SimpleNamespace(steps=[step]), SimpleNamespace(divided=((0, Configuration(micros)),))


def test_each_way_of_a_given_plan_is_tried_once(trial, monkeypatch):
    monkeypatch.setattr(verify, "Scratch", lambda device: Memory())
    trial.off = {1: 1e-6, 2: 1e-3}
    ways = [Micro(b, e, (), 0, 1.0) for b, e in ((2, 1), (2, 2), (2, 1), (1, 1), (1, XLA))]
    verify.try_configurations(*given(*ways), Device())
    assert trial.held == [1, 2, 1]


@pytest.mark.parametrize("platform, refused", [("gpu", True), ("cpu", False)])
def test_a_given_plan_that_computes_something_else_is_refused(
    trial, monkeypatch, platform, refused
):
    """As one made with another version of cuDNN may be. A CPU runs XLA's own in its place."""
    monkeypatch.setattr(verify, "Scratch", lambda device: Memory())
    monkeypatch.setattr(Device, "platform", platform)
    trial.off = {1: 1.4}
    expected = pytest.raises(PlanError, match=r"engine 1 computes something else.*Plan again")
    with expected if refused else contextlib.nullcontext():
        verify.try_configurations(*given(Micro(8, 1, (), 0, 1.0)), Device())
