"""`vmem-jax profile --conv`: what it lists, times, shows and keeps, and what it says is wrong."""

from __future__ import annotations

import dataclasses

import pytest

from vmem_jax import cli
from vmem_jax.conv import cudnn
from vmem_jax.conv.database import Database, identity_of
from vmem_jax.core.convolution import Pass
from vmem_jax.transfer import extension

pytest.importorskip("flax")
TINY = ("profile", "resnet11", "--batch", "4", "--image", "16", "--classes", "10")


def run(capsys, *argv):
    status = cli.main([*map(str, argv)])
    out, err = capsys.readouterr()
    return status, out, err


@dataclasses.dataclass(frozen=True)
class Library:
    """Three plans: the more workspace the faster, and in halves not quite half the time."""

    target: object

    def plans(self, convolution):
        plan = lambda engine, each: cudnn.Plan(
            engine, ((1, engine),), each * convolution.batch, frozenset(), False, "A"
        )
        return plan(1, 3 << 20), plan(2, 1 << 20), plan(3, 0)

    def seconds(self, convolution, plan, patience):
        return 1e-6 * (plan.engine * convolution.batch + 0.25)


@pytest.fixture
def library(monkeypatch, tmp_path):
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(cudnn, "Cudnn", Library)
    monkeypatch.setattr(cudnn, "version", lambda: 91900)


def test_times_are_shown_and_kept(capsys, library):
    status, out, _ = run(capsys, *TINY, "--conv", "powerOfTwo", "--workspace", "4MiB")
    assert status == 0
    assert "forward 3×3, 3 → 16 channels of 16×16, batch 4, float32" in out
    lines = [line for line in out.splitlines() if "4 × 1" in line and "3.00 MiB" in line]
    assert lines  # four times the fastest engine, within 4 MiB
    assert "35 distinct convolutions" in out and "kept in " in out
    import jax

    kept = Database(identity_of(jax.devices()[0].device_kind, "91900")).load()
    assert {c.batch for c in kept} == {1, 2, 4} and {c.which for c in kept} == set(Pass)
    assert all(entry.timed and entry.complete for entry in kept.values())
    status, out, _ = run(capsys, *TINY, "--conv", "powerOfTwo")
    assert status == 0 and " 0 algorithms timed now" in out


def test_pictures_are_drawn(capsys, library, tmp_path):
    pytest.importorskip("matplotlib")
    status, _, _ = run(capsys, *TINY, "--conv", "undivided", "--plot", tmp_path / "fronts")
    assert status == 0 and len(list((tmp_path / "fronts").glob("*.svg"))) == 35


@pytest.mark.parametrize(
    "options, says",
    [
        (("profile", "--conv", "all"), "--conv needs a model"),
        ((*TINY, "--workspace", "1MiB"), "are for --conv"),
        ((*TINY, "--conv", "all", "--target", "h200", "--workspace", "1MiB"), "times nothing"),
        ((*TINY, "--conv", "all", "--workspace", "much"), "`--workspace`='much' is no size"),
    ],
)
def test_options_that_do_not_go_together(capsys, options, says):
    status, _, err = run(capsys, *options)
    assert status == 2 and says in err


@pytest.mark.gpu_compile
def test_plans_for_a_card_that_is_not_there(capsys, monkeypatch, tmp_path):
    if extension.load().CUDNN_BUILT is None:
        pytest.skip("the extension was built without cuDNN's headers")
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    status, out, err = run(capsys, *TINY, "--conv", "undivided", "--target", "h200")
    assert status == 0, err
    rows = [line.split("│")[1:-1] for line in out.splitlines() if "batch 4" in line]
    assert len(rows) == 35
    assert all(int(plans) > 5 for _, _, plans, _, _ in rows)
    kept = Database(identity_of("h200", str(cudnn.version()))).load()
    assert len(kept) == 35 and not any(entry.timed for entry in kept.values())
