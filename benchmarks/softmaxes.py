"""Softmaxes of an attention's scores, and their gradients: one kernel beside those of XLA's.

    python benchmarks/softmaxes.py --out=rows.jsonl
    python benchmarks/softmaxes.py --scores=128x16x197 --tilings

A row is one softmax: microseconds of what XLA makes of it alone, and of the kernel, the bytes that it
reads and writes, and the largest difference. In a step XLA takes longer: it reads the rows once for
each reduction. With --tilings also those of other tilings. weights: those of the scores, with dropout
by bits; gradient: that to the scores, by the gradient to the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import records
from absl import app, flags
from chained import timed

from vmem_jax import jax_compat as compat
from vmem_jax.capture.bits import unpack_p
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.padded_rows import padded_length
from vmem_jax.conv.reduced_rows import ReducedRows, Tiling, by_passes, in_tiles

FLAGS = flags.FLAGS

SCORES = "128x16x197 64x16x577 512x12x49 8x12x1500 32x16x257"
"""Samples, heads, and tokens, of ViT-L/16 with 224 and 384 pixels, a Swin's windows, Whisper's audio,
and ViT-L/14."""

_KEPT = 0.9


def weights(tokens: int, scores: jax.Array, bits: jax.Array) -> jax.Array:
    made = _softmax(tokens, scores).astype(scores.dtype)
    return jnp.where(_mask(bits), made / _KEPT, 0).astype(scores.dtype)


def gradient(tokens: int, scores: jax.Array, bits: jax.Array, dy: jax.Array) -> jax.Array:
    made = _softmax(tokens, scores)
    dy = jnp.where(_mask(bits), dy / _KEPT, 0).astype(jnp.float32)
    return (made * (dy - (dy * made).sum(-1, keepdims=True)) / 8).astype(scores.dtype)


def _softmax(tokens: int, scores: jax.Array) -> jax.Array:
    inside = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1) < tokens
    return jax.nn.softmax(jnp.where(inside, scores.astype(jnp.float32) / 8, -jnp.inf))


def _mask(bits: jax.Array) -> jax.Array:
    return unpack_p.bind(bits, axis=0)


KINDS: dict[str, tuple[Callable[..., jax.Array], int]] = {
    "weights": (weights, 1),
    "gradient": (gradient, 2),
}
"""(what is made of scores, bits and other arrays, arrays that have an element a score)."""


def described(kind: str, samples: int, heads: int, tokens: int) -> ReducedRows:
    """What a kernel computes of so many rows, padded as in a step."""
    make, count = KINDS[kind]
    shape = (samples, heads, tokens, padded_length(tokens) or tokens)
    scores = jax.ShapeDtypeStruct(shape, FLAGS.dtype)
    bits = jax.ShapeDtypeStruct((samples // 8, *shape[1:]), jnp.uint8)
    call = functools.partial(make, tokens)
    flat = flatten(jax.jit(call).trace(scores, bits, *[scores] * (count - 1)).jaxpr)
    opened = compat.open_jaxpr(flat)
    return ReducedRows(tuple(opened.eqns), tuple(opened.invars), opened.outvars[0])


def arrays(reduced: ReducedRows) -> list[list[jax.Array]]:
    """Random ones for each call."""

    def draw(key: jax.Array, aval: Any) -> jax.Array:
        if aval.dtype == jnp.uint8:
            return jax.random.bits(key, aval.shape, jnp.uint8)
        return jax.random.normal(key, aval.shape, aval.dtype)

    avals = [v.aval for v in reduced.operands]
    keys = [jax.random.split(jax.random.key(i), len(avals)) for i in range(FLAGS.calls)]
    return [[draw(key, aval) for key, aval in zip(each, avals, strict=True)] for each in keys]


def tilings(taken: Tiling) -> Iterator[Tiling]:
    """Others than the one that is taken, for rows of that length."""
    for elements in (512, 1024, 2048, 4096, 8192):
        for warps in (1, 2, 4, 8):
            each = Tiling(max(1, elements // taken.columns), taken.columns, warps)
            if each != taken and elements >= taken.columns and elements // warps >= 256:
                yield each


def compared(kind: str, scores: Sequence[int]) -> dict[str, Any]:
    reduced = described(kind, *scores)
    tiling, given = reduced.tiling, arrays(reduced)
    assert tiling is not None, "rows are short"
    row: dict[str, Any] = {"kind": kind, "scores": [*scores], "dtype": FLAGS.dtype}
    row |= {"rows": reduced.size[0], "length": reduced.size[1], "tiling": str(tiling)}
    by_xla = lambda *x: by_passes(*x, reduced=reduced)[0]
    row["xla_us"], expected = timed(by_xla, given, FLAGS.rounds)
    by = lambda tiling: functools.partial(in_tiles, reduced, tiling)
    row["us"], found = timed(by(tiling), given, FLAGS.rounds)
    row["nbytes"] = sum(x.nbytes for x in given[0]) + found.nbytes
    found, expected = (x.astype(np.float32) for x in (found, expected))
    row["difference"] = float(np.abs(found - expected).max() / np.abs(expected).max())
    if FLAGS.tilings:
        others = [t for t in tilings(tiling) if reduced.size[0] % t.rows == 0]
        row["tilings_us"] = {str(t): timed(by(t), given, FLAGS.rounds)[0] for t in others}
    return row


def main(argv: list[str]) -> None:
    del argv
    for scores in FLAGS.scores:
        for kind in KINDS:
            row = compared(kind, [*map(int, scores.split("x"))])
            print(row, flush=True)
            if FLAGS.out:
                records.append(Path(FLAGS.out), [{**row, **records.origin(FLAGS.commit)}])


if __name__ == "__main__":
    flags.DEFINE_list("scores", SCORES.split(), "Samples, heads and tokens: 128x16x197.")
    flags.DEFINE_string("dtype", "bfloat16", "Of scores and weights.")
    flags.DEFINE_integer("calls", 6, "In a program, each on arrays of its own.")
    flags.DEFINE_integer("rounds", 15, "Runs of it; the median counts.")
    flags.DEFINE_bool("tilings", False, "Also time others than the one that is taken.")
    flags.DEFINE_string("out", "", "File that rows are added to; none by default.")
    flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")
    app.run(main)
