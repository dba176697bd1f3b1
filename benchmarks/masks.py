"""Dropout masks in bits: what XLA makes of them, and one kernel.

    python benchmarks/masks.py --out=rows.jsonl

A row is one mask, padded as in a step: microseconds of XLA's kernel and of ours, and whether both
draw the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import records
from absl import app, flags
from chained import timed
from jax.extend.core import jaxpr_as_fun

from vmem_jax.capture.bits import pack_p
from vmem_jax.capture.flatten import flatten
from vmem_jax.rewrite.drawn_masks import with_drawn_masks

FLAGS = flags.FLAGS

MASKS = {
    "scores of a ViT-L": ((64, 16, 197, 197), 1, 200),
    "hidden layer of a ViT-L": ((64, 197, 4096), 2, 4096),
    "scores of a GPT-2 medium": ((8, 16, 1024, 1024), 2, 1024),
    "output of a GPT-2 medium's layer": ((8, 1024, 1024), 1, 1024),
}
"""(shape, the axis along which it is packed, the length to which rows are padded)."""

_KEPT = 0.9


def drawn(shape: tuple[int, ...], axis: int, length: int) -> Callable[[jax.Array], jax.Array]:
    """What makes the bytes of the words of a key."""

    def call(words: jax.Array) -> jax.Array:
        mask = jax.random.bernoulli(jax.random.wrap_key_data(words), _KEPT, shape)
        behind = [(0, 0)] * (len(shape) - 1) + [(0, length - shape[-1])]
        made: jax.Array = pack_p.bind(jnp.pad(mask, behind), axis=axis)
        return made

    return call


def compared(name: str) -> dict[str, Any]:
    by_xla = drawn(*MASKS[name])
    given = [[jax.random.key_data(jax.random.key(n))] for n in range(FLAGS.calls)]
    kernel = jaxpr_as_fun(with_drawn_masks(flatten(jax.jit(by_xla).trace(*given[0]).jaxpr)))
    xla_us, expected = timed(by_xla, given, FLAGS.rounds)
    us, found = timed(lambda words: kernel(words)[0], given, FLAGS.rounds)
    same = bool(np.array_equal(found, expected))
    words = math.prod(MASKS[name][0])
    return {"mask": name, "words": words, "xla_us": xla_us, "us": us, "same": same}


def main(argv: list[str]) -> None:
    del argv
    for name in MASKS:
        row = compared(name)
        print(row, flush=True)
        if FLAGS.out:
            records.append(Path(FLAGS.out), [{**row, **records.origin(FLAGS.commit)}])


if __name__ == "__main__":
    flags.DEFINE_integer("calls", 20, "In a program, each of a key of its own.")
    flags.DEFINE_integer("rounds", 15, "Runs of it; the median counts.")
    flags.DEFINE_string("out", "", "File that rows are added to; none by default.")
    flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")
    app.run(main)
