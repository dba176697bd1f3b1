"""Sums of a batch norm's backward pass behind a ReLU: one kernel beside passes of XLA's.

    python benchmarks/sums.py --out=rows.jsonl
    python benchmarks/sums.py --layers=14x1024 --tilings

A row is one kind of norm of one layer: microseconds of XLA's passes and of the kernel, alone and with
the gradient to what is normalised behind it, the bytes that the kernel reads and writes, and the
largest relative difference of the sums. With --tilings also those of other tilings, without that.

join: the ReLU's mask is of its result, which is there; the masked gradient is written, since the
block's input gets it, too. own: the mask is made again of what is normalised, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import chained
import jax
import jax.numpy as jnp
import numpy as np
import records
from absl import app, flags

from vmem_jax.conv.summed import Tiling, by_passes, in_tiles, tiling_of

FLAGS = flags.FLAGS

Arrays = Sequence[jax.Array]

LAYERS = "14x1024 14x256 28x512 28x128 56x256 56x64 7x2048 7x512"
"""Height and width, and channels, of ResNet-152's norms."""


def masked(dy: jax.Array, x: jax.Array, mean: jax.Array, factor: jax.Array) -> Arrays:
    """The gradient and what is summed of it: to bias, scale and mean."""
    wide = dy.astype(jnp.float32)
    return dy, wide, (x.astype(jnp.float32) - mean) * wide, -(wide * factor)


def join(g: jax.Array, y: jax.Array, x: jax.Array, mean: jax.Array, factor: jax.Array) -> Arrays:
    return masked(jnp.where(y > 0, g, jnp.zeros_like(g)), x, mean, factor)


def own(g: jax.Array, x: jax.Array, mean: jax.Array, factor: jax.Array) -> Arrays:
    y = ((x.astype(jnp.float32) - mean) * factor).astype(x.dtype)
    return masked(jnp.where(y > 0, g, jnp.zeros_like(g)), x, mean, factor)


KINDS: dict[str, tuple[Callable[..., Arrays], int, int]] = {
    "join": (join, 3, 1),
    "own": (own, 2, 0),
}
"""(what is computed of each row, arrays that are read, and written)."""


def gradient(dy: jax.Array, x: jax.Array, sums: Arrays, factor: jax.Array) -> jax.Array:
    """The gradient to what is normalised."""
    a, b, c = sums
    own = (dy.astype(jnp.float32) * factor).astype(dy.dtype)
    return own + ((a + c) / len(x) + b / len(x) * x.astype(jnp.float32)).astype(dy.dtype)


def summing(kind: str, tiling: Tiling | None, goes_on: bool) -> Callable[[Arrays, Arrays], Arrays]:
    """rows, vectors -> what is written and the sums: by the kernel, or by XLA without a tiling.

    Args:
      goes_on: whether the gradient to what is normalised is computed, too.
    """
    make, _, stored = KINDS[kind]

    def call(rows: Arrays, vectors: Arrays) -> Arrays:
        if tiling is None:
            kept, sums = by_passes(make, 1, rows, vectors)
        else:
            values = lambda *given: make(*given)[1 - stored :]
            kept, sums = in_tiles(values, stored, rows, vectors, tiling)
        if not goes_on:
            return (*kept, *sums)
        dy = kept[0] if kept else make(*rows, *(v[None, :] for v in vectors))[0]
        return (*kept[:stored], gradient(dy, rows[-1], sums, vectors[1]), *sums)

    return call


def timed(call: Callable[[Arrays, Arrays], Arrays], given: Any) -> tuple[float, list[np.ndarray]]:
    """Microseconds of a call, and the first's sums."""
    return chained.timed(call, given, FLAGS.rounds, lambda made: made[-3:])


def arrays(kind: str, rows: int, channels: int) -> Any:
    """Random ones for each call."""
    given = []
    for i in range(FLAGS.calls):
        *keys, key = jax.random.split(jax.random.key(i), 1 + KINDS[kind][1])
        draw = lambda key: jax.random.normal(key, (rows, channels), FLAGS.dtype)
        mean, factor = 0.1 * jax.random.normal(key, (2, channels))
        given.append(([*map(draw, keys)], [mean, 1 + factor]))
    return given


def tilings(rows: int, channels: int) -> Iterator[Tiling]:
    """Others than the one that is taken."""
    for columns in (64, 128, 256):
        for elements, warps in ((2048, 4), (4096, 4), (4096, 8)):
            for programs in (528, 1056, 2112):
                height = elements // columns
                if channels % columns or rows % height:
                    continue
                count = max(1, min(programs * columns // channels, rows // height))
                each = Tiling(height, columns, count, warps)
                if each != tiling_of(rows, channels):
                    yield each


def compared(kind: str, images: int, side: int, channels: int) -> dict[str, Any]:
    rows = images * side**2
    tiling, given = tiling_of(rows, channels), arrays(kind, rows, channels)
    _, read, stored = KINDS[kind]
    row: dict[str, Any] = {"kind": kind, "images": images, "side": side, "channels": channels}
    row |= {"dtype": FLAGS.dtype, "tiling": str(tiling)}
    theirs, expected = timed(summing(kind, None, False), given)
    row["xla_us"], row["xla_with_gradient_us"] = theirs, timed(summing(kind, None, True), given)[0]
    if tiling is None:
        return row
    ours, sums = timed(summing(kind, tiling, False), given)
    row["us"], row["with_gradient_us"] = ours, timed(summing(kind, tiling, True), given)[0]
    row["nbytes"] = (read + stored) * given[0][0][0].nbytes
    differences = (abs(a - b).max() / abs(b).max() for a, b in zip(sums, expected, strict=True))
    row["difference"] = float(max(differences))
    if FLAGS.tilings:
        each = {str(t): summing(kind, t, False) for t in tilings(rows, channels)}
        row["tilings_us"] = {name: timed(call, given)[0] for name, call in each.items()}
    return row


def main(argv: list[str]) -> None:
    del argv
    for layer in FLAGS.layers:
        side, channels = map(int, layer.split("x"))
        for kind in KINDS:
            row = compared(kind, FLAGS.images, side, channels)
            print(row, flush=True)
            if FLAGS.out:
                records.append(Path(FLAGS.out), [{**row, **records.origin(FLAGS.commit)}])


if __name__ == "__main__":
    flags.DEFINE_list("layers", LAYERS.split(), "Height and width, and channels: 14x1024.")
    flags.DEFINE_integer("images", 128, "Of a batch.")
    flags.DEFINE_string("dtype", "bfloat16", "Of activations.")
    flags.DEFINE_integer("calls", 10, "In a program, each on arrays of its own.")
    flags.DEFINE_integer("rounds", 20, "Runs of it; the median counts.")
    flags.DEFINE_bool("tilings", False, "Also time others than the one that is taken.")
    flags.DEFINE_string("out", "", "File that rows are added to; none by default.")
    flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")
    app.run(main)
