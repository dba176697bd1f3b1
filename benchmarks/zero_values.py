"""Both kernels of compression by dtype and density, beside one that copies with the sign changed.

    python benchmarks/zero_values.py --out=rows.jsonl

A rate is the bytes that are read and written, over the seconds: of the tensor and of what is used of
the byte array. All calls of a run are in one executable, so that starting them takes no part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import records
from absl import app, flags
from jax import lax

from vmem_jax.core.compression import compressed_nbytes
from vmem_jax.transfer.compression import Site, Store, compress, decompress

FLAGS = flags.FLAGS
flags.DEFINE_list("dtypes", ["int8", "bfloat16", "float32", "float64"], "Of the tensor.")
flags.DEFINE_list("densities", ["0", "0.25", "0.5", "0.75", "1"], "Shares that are not zero.")
flags.DEFINE_integer("mebibytes", 256, "Of the tensor.")
flags.DEFINE_integer("calls", 8, "Calls in one executable, each with a byte array of its own.")
flags.DEFINE_integer("rounds", 9, "Runs of each executable; they take turns.")
flags.DEFINE_string("out", "", "File that rows are added to; none by default.")
flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")


def drawn(dtype: str, count: int, density: float) -> jax.Array:
    """A tensor of about that density, at random places."""
    values, places = jax.random.split(jax.random.key(0))
    kept = jax.random.bernoulli(places, density, (count,))
    if jnp.issubdtype(dtype, jnp.integer):
        drawn = jax.random.randint(values, (count,), 1, jnp.iinfo(dtype).max, dtype)
    else:
        drawn = 1 + jax.random.uniform(values, (count,), dtype)
    return jax.block_until_ready(jnp.where(kept, drawn, jnp.zeros((), dtype)))


def seconds_by_turns(steps: dict[str, Callable[..., Any]], x: jax.Array) -> dict[str, float]:
    """The median seconds of one call of each step's."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(FLAGS.rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            jax.block_until_ready(step(x))
            if turn:  # the first compiles
                seconds[name].append((time.perf_counter() - began) / FLAGS.calls)
    return {name: statistics.median(each) for name, each in seconds.items()}


def measured(dtype: str, density: float) -> dict[str, Any]:
    """A row: seconds and rates of both calls and of a copy, for one tensor."""
    itemsize = jnp.dtype(dtype).itemsize
    count = FLAGS.mebibytes * 2**20 // itemsize
    x = drawn(dtype, count, density)
    capacity = compressed_nbytes(x.nbytes, 1, 1.0)  # room for everything: nothing overflows

    def compressing(x: jax.Array, back: bool) -> list[jax.Array]:
        seen = []
        for site in range(FLAGS.calls):
            c = compress(x, store=store.id, site=site, capacity=capacity)
            if back:
                c = decompress(c, x, store=store.id, site=site)
            one, x = lax.optimization_barrier((c[:1], x))
            seen.append(one)
        return seen

    def copying(x: jax.Array) -> jax.Array:
        for _ in range(FLAGS.calls):
            x = lax.optimization_barrier(-x)  # XLA would leave out a mere copy
        return x

    with Store([Site(x.nbytes, capacity)] * FLAGS.calls) as store:
        store.open(jax.devices()[0])
        took = seconds_by_turns(
            {
                "compress": jax.jit(lambda x: compressing(x, False)),
                "both": jax.jit(lambda x: compressing(x, True)),
                "copy": jax.jit(copying),
            },
            x,
        )
        counted = store.counters(jax.devices()[0])[0]
    values = counted.values / counted.runs / count
    compressed = compressed_nbytes(count, itemsize, values)
    seconds = {
        "compress": took["compress"],
        "decompress": took["both"] - took["compress"],
        "copy": took["copy"],
    }
    moved = x.nbytes + compressed
    return {
        "dtype": dtype,
        "density": values,
        "nbytes": x.nbytes,
        "compressed_nbytes": compressed,
        "seconds": seconds,
        "bytes_per_second": {
            "compress": moved / seconds["compress"],
            "decompress": moved / seconds["decompress"],
            "copy": 2 * x.nbytes / seconds["copy"],
        },
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    jax.config.update("jax_enable_x64", True)
    about = records.origin(FLAGS.commit)
    for dtype in FLAGS.dtypes:
        for density in map(float, FLAGS.densities):
            row = measured(dtype, density) | about
            rates = {name: f"{rate / 1e9:7.1f}" for name, rate in row["bytes_per_second"].items()}
            print(
                f"{dtype:9s} {row['density']:5.3f} {row['compressed_nbytes'] / row['nbytes']:6.1%}  "
                f"GB/s: compress {rates['compress']}, decompress {rates['decompress']}, "
                f"copy {rates['copy']}",
                flush=True,
            )
            if FLAGS.out:
                records.append(Path(FLAGS.out), [row])


if __name__ == "__main__":
    app.run(main)
