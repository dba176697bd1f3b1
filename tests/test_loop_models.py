"""The scanned networks of benchmarks/loops.py, and what is picked by hand for their layers."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import pytest

pytest.importorskip("flax")

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from loop_models import MODELS

from vmem_jax import jax_compat as compat
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.loop_pairs import find_pairs

WIDTHS = {"decoder": 256, "vit": 128, "gpt": 128, "resnet": 8}
SMALLER = {
    "decoder": {"hidden": 512, "heads": 4, "kv_heads": 1, "vocabulary": 64, "tokens": 64},
    "gpt": {"vocabulary": 64, "tokens": 64},
}


def residual_nbytes(name: str, hand: str) -> int:
    """What the loops of a step stack between them as they are traced."""
    options = {"width": WIDTHS[name], **SMALLER.get(name, {})}
    training = MODELS[name](hand, 2, 3, **options)
    state = jax.eval_shape(training.init, jax.random.key(0))
    batch = jax.eval_shape(training.batch, jax.random.key(1))
    closed = jax.make_jaxpr(training.step)(state, batch)
    same = [(a.shape, a.dtype) for a in jax.tree.leaves(state)]
    assert [(a.shape, a.dtype) for a in closed.out_avals[:-1]] == same
    eqns = [e for e in compat.open_jaxpr(flatten(closed)).eqns if e.primitive.name == "scan"]
    assert len(eqns) >= 2
    return sum(pair.residual_nbytes for pair in find_pairs(flatten(closed)))


@pytest.mark.parametrize("name", [*MODELS])
def test_what_is_picked_by_hand_keeps_less(name):
    kept = {hand: residual_nbytes(name, hand) for hand in ("plain", "checkpoint", "every_dot")}
    assert 0 < kept["checkpoint"] < kept["plain"]
    assert kept["checkpoint"] < kept["every_dot"] <= kept["plain"]
