"""Policies check their options where they are made."""

from __future__ import annotations

import pytest

import vmem_jax
from vmem_jax import VDNN, SuperNeurons
from vmem_jax.policy import Auto, MoDNN, UCuDNN
from vmem_jax.policy.vdnnpp import VDNNpp


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: UCuDNN(limit=1.5), "`limit` must be bytes as an int, or a size .* Got 1.5"),
        (lambda: UCuDNN(limit=True), "`limit` must be bytes"),
        (lambda: MoDNN("x"), "`sub_batches` must be True or False. Got 'x' .str."),
        (lambda: VDNN(sub_batches=7), "`sub_batches` must be True or False. Got 7 .int."),
        (lambda: VDNNpp(sub_batches=None), "`sub_batches` must be True or False"),
        (lambda: SuperNeurons(cache="no"), "`cache` must be True or False. Got 'no'"),
        (lambda: Auto(allow="order"), "`allow` must be a tuple of names"),
        (lambda: Auto(allow=("order", 1)), "`allow` must be a tuple of names"),
        (lambda: Auto(shares=0.5), "`shares` must be a tuple of numbers"),
        (lambda: Auto(offers=0.5), "`offers` must be a whole number from 0. Got 0.5 .float."),
        (lambda: Auto(gain="2%"), "`gain` must be a number from 0.0. Got '2%'"),
        (lambda: Auto(cache=1), "`cache` must be True or False. Got 1"),
    ],
)  # fmt: skip
def test_a_type_that_it_is_not(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: UCuDNN(limit=-5), "`limit` must be more than 0 bytes. Got -5"),
        (lambda: UCuDNN(limit="1MaB"), "`limit`='1MaB' is no size|unit"),
        (lambda: UCuDNN(optimisation=3), "`optimisation`=3; there is wr, wd"),
        (lambda: UCuDNN(batch_sizes="some"), "`batch_sizes`='some'; there is "),
        (lambda: VDNN(5), "`offload`=5; there is all, conv, none, dyn"),
        (lambda: VDNN("conv", "x"), "`algorithms`='x'; there is m, p"),
        (lambda: SuperNeurons(recompute=None), "`recompute`=None; there is cost-aware"),
        (lambda: Auto(offers=-1), "`offers` must be a whole number from 0. Got -1"),
        (lambda: Auto(most=0), "`most` must be a whole number from 1"),
        (lambda: Auto(parts=(0.5, 2.0)), "`parts` must be a number from 0.0 to 1.0. Got 2.0"),
        (lambda: Auto(close=-0.1), "`close` must be a number from 0.0"),
        (lambda: Auto(gain=float("nan")), "`gain` must be a number"),
    ],
)
def test_a_value_that_it_may_not_have(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sizes_are_understood():
    assert UCuDNN(limit="1MiB") == UCuDNN(limit=2**20)
    assert UCuDNN().limit is None
    assert {Auto(shares=(1, 0.5)), Auto()}  # whole numbers are numbers


def test_vdnns_smallest_workspaces_need_the_means():
    """XLA's own convolutions do not change, so `m` would be the same plan as `p`."""
    assert VDNN("conv", "m").needs == ("offload", "workspace")
    assert VDNN("conv").needs == VDNN("dyn", "m").needs == VDNN.needs == ("offload",)
    assert VDNNpp("conv", "m").needs == ("offload", "workspace")
    step = lambda policy: vmem_jax.jit(
        lambda x: x, budget=0.5, policy=policy, allow=("order", "offload")
    )
    step(VDNN("conv"))
    with pytest.raises(ValueError, match="policy `vdnn` needs workspace, which `allow`"):
        step(VDNN("conv", "m"))
