"""A max-pool with overlapping windows behind a batch norm and a ReLU: kernels beside XLA's passes.

    python benchmarks/pools.py --out=rows.jsonl
    python benchmarks/pools.py --layers=112x64 --tilings

A row is of one layer and one half of the work: "pool" is the pooled value and its index of what is
normalised, "spread" the gradient of what is normalised. It has microseconds of XLA's passes and of
the kernel, the bytes that a kernel reads and writes, and whether the results are the same. With
--tilings also those of other tilings.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import records
from absl import app, flags
from jax import lax

from vmem_jax.capture import overlap
from vmem_jax.conv.pooled import (
    Spread,
    Tiling,
    Windows,
    pooled_in_tiles,
    spread_in_tiles,
    tiling_of,
)

FLAGS = flags.FLAGS

LAYERS = "112x64 56x192 55x96 27x256"
"""Height and width, and channels: of ResNet-50, GoogLeNet and AlexNet."""

_CALLS = 20
_ROUNDS = 7


def normalised(x: jax.Array, mean: jax.Array, factor: jax.Array) -> list[jax.Array]:
    y = ((x.astype(jnp.float32) - mean) * factor).astype(x.dtype)
    return [jnp.where(y <= 0, jnp.zeros_like(y), y)]


def microseconds(run: Callable[..., Any], *given: jax.Array) -> tuple[float, Any]:
    """The median of a call, and what it returns."""
    result = jax.block_until_ready(run(*given))
    times = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        for _ in range(_CALLS):
            result = run(*given)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begun) / _CALLS)
    return 1e6 * statistics.median(times), result


def rows(side: int, channels: int, dtype: Any) -> Iterator[dict[str, Any]]:
    """Those of one layer, by XLA and by each tiling."""
    batch, padding = FLAGS.batch, ((0, 1), (0, 1)) if side % 2 == 0 else ((0, 0), (0, 0))
    windows = Windows(side, side, (3, 3), (2, 2), padding)
    draw = lambda n, shape: jax.random.normal(jax.random.key(n), shape, jnp.float32)
    x = draw(0, (batch, side, side, channels)).astype(dtype)
    mean, factor = 0.1 * draw(1, (channels,)), 1 + 0.1 * draw(2, (channels,))
    grad = draw(3, (batch, *windows.pooled, channels)).astype(dtype)
    flat = lambda a: a.reshape(-1, channels)

    def passes(x: jax.Array, mean: jax.Array, factor: jax.Array) -> Any:
        [y] = normalised(x, mean, factor)
        size, strides, around = windows.whole
        index = overlap.window_index(size, strides, around, lax.optimization_barrier(y))
        return lax.reduce_window(y, -jnp.inf, lax.max, size, strides, around), index

    spreads = lambda g, i: overlap.scatter(*windows.whole, x.shape, g, i)
    # apart, as a step has them: the index is of the backward pass
    pools, indices = (jax.jit(lambda *a, n=n: passes(*a)[n]) for n in (0, 1))
    by_xla, pooled = microseconds(pools, x, mean, factor)
    of_index, index = microseconds(indices, x, mean, factor)
    back, spread = microseconds(jax.jit(spreads), grad, index)
    pixels, made = batch * side * side, grad.size // channels
    each = {
        "pool": (by_xla + of_index, (pooled, index), tiling_of(made, channels, pixels)),
        "spread": (back, spread, Spread(windows, x.shape).tiling),
    }
    for name, (xla, expected, usual) in each.items():
        assert usual is not None
        others = [usual]
        if FLAGS.tilings:
            sizes = [(n, w) for n in (512, 1024, 2048, 4096) for w in (2, 4, 8)]
            others += [Tiling(n // usual.columns, usual.columns, w) for n, w in sizes]
        for tiling in others:
            if name == "pool":
                call = lambda *a, t=tiling: pooled_in_tiles(
                    normalised, windows, [flat(a[0])], a[1:], t
                )
                us, got = microseconds(jax.jit(call), x, mean, factor)
            else:
                call = lambda g, i, t=tiling: spread_in_tiles(windows, flat(g), flat(i), t)
                us, got = microseconds(jax.jit(call), grad, index)
            pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
            same = all(np.array_equal(np.asarray(a), np.asarray(flat(b))) for a, b in pairs)
            moved = 2 * x.size + 3 * grad.size
            yield {
                "layer": f"{side}x{channels}",
                "batch": batch,
                "dtype": jnp.dtype(dtype).name,
                "half": name,
                "xla_us": xla,
                "us": us,
                "nbytes": moved,
                "tiling": [tiling.rows, tiling.columns, tiling.warps],
                "usual": tiling == usual,
                "same": same,
            }


def main(_: Any) -> None:
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    about["commit"] = records.commit()
    for layer in FLAGS.layers:
        side, channels = map(int, layer.split("x"))
        for row in rows(side, channels, jnp.dtype(FLAGS.dtype)):
            records.append(Path(FLAGS.out), [row | about])


if __name__ == "__main__":
    flags.DEFINE_string("out", "pools.jsonl", "file that rows are appended to")
    flags.DEFINE_list("layers", LAYERS.split(), "HEIGHTxCHANNELS of each layer")
    flags.DEFINE_integer("batch", 256, "images")
    flags.DEFINE_string("dtype", "float16", "of the images")
    flags.DEFINE_bool("tilings", False, "other tilings, too")
    app.run(main)
