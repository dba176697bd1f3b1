"""1×1 convolutions of ResNet-50 with what stands around them: one kernel beside passes of XLA's.

    python benchmarks/products.py --out=rows.jsonl

A row is one product of one pass: milliseconds of XLA's passes and of the kernel by each tiling, the
bytes that the kernel reads and writes, and the largest difference of the two. With --target kernels
are compiled for a card that is not there, and nothing is timed.

scale: scale, bias and ReLU of the operand, and the result's sum and sum of squares: the last
convolution of a block, behind a batch norm. sums: the latter alone, of an operand that is there.
join: scale, bias and the block's input added before the ReLU, which is stored for the next block.
Backward: the gradient to the result, of its batch norm's sums; both products; the ReLU's mask and
the sums of the batch norm before.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import records
from absl import app, flags

from vmem_jax.conv.products import Around, Made, Operands, Tiling, by_passes, in_tiles
from vmem_jax.devices.targets import target
from vmem_jax.jax_compat import on_described_gpu

FLAGS = flags.FLAGS
flags.DEFINE_integer("batch", 256, "Images.")
flags.DEFINE_string("dtype", "bfloat16", "Of activations.")
flags.DEFINE_list("sizes", ["56", "28", "14"], "Height and width of the layers, of 56, 28, 14, 7.")
flags.DEFINE_list("kinds", [], "Of products; all by default.")
flags.DEFINE_integer("calls", 20, "Calls that are timed together.")
flags.DEFINE_integer("rounds", 5, "Of them; the median counts.")
flags.DEFINE_string("target", "", "Card to compile for, without running.")
flags.DEFINE_string("out", "", "File that rows are added to; none by default.")
flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")

f32 = jnp.float32


def relu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0)


def with_sums(product: jax.Array, *_: jax.Array) -> tuple[jax.Array, ...]:
    y = product.astype(FLAGS.dtype)
    y32 = y.astype(f32)
    return y, y32, y32 * y32


def scaled(y: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
    return (relu(y.astype(f32) * scale + bias).astype(FLAGS.dtype),)


def joined(y: jax.Array, skip: jax.Array, scale: jax.Array, bias: jax.Array) -> Any:
    out = relu((y.astype(f32) * scale + bias).astype(FLAGS.dtype) + skip)
    return out, out


def normalised(g: jax.Array, y: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
    """The gradient through a batch norm, from its sums."""
    return ((g.astype(f32) * a + y.astype(f32) * b + c).astype(FLAGS.dtype),)


def masked(product: jax.Array, y: jax.Array, scale: jax.Array, bias: jax.Array) -> Any:
    h = (y.astype(f32) * scale + bias).astype(FLAGS.dtype)
    g = jnp.where(h > 0, product, 0).astype(FLAGS.dtype)
    return relu(h), g, g.astype(f32), g.astype(f32) * y.astype(f32)


def masked_join(product: jax.Array, x: jax.Array, skip: jax.Array, y: jax.Array) -> Any:
    g = product.astype(FLAGS.dtype) + skip
    g = jnp.where(x > 0, g, jnp.zeros_like(g))
    return x, g, g.astype(f32), g.astype(f32) * y.astype(f32)


def as_it_is(x: jax.Array, *_: jax.Array) -> tuple[jax.Array, ...]:
    return (x,)


KINDS: dict[str, tuple[Around, tuple[int, int, int, int], bool]] = {
    # how it is computed; numbers of rows, vectors, result_rows and result_vectors; to more channels
    "scale": (Around(scaled, with_sums), (1, 2, 0, 0), True),
    "sums": (Around(as_it_is, with_sums), (1, 0, 0, 0), False),
    "join": (Around(joined, with_sums, stored=1), (2, 2, 0, 0), False),
    "backward scale": (Around(normalised, masked, has_gradient=True), (2, 3, 1, 2), False),
    "backward join": (Around(normalised, masked_join, has_gradient=True), (2, 3, 3, 0), True),
}
CHANNELS = {56: (64, 256), 28: (128, 512), 14: (256, 1024), 7: (512, 2048)}


def tilings(kind: str, a: int, b: int) -> list[Tiling]:
    """Those that may be fast: what is in flight fits into shared memory, sums into registers."""
    around, (wide, _, result_wide, _), _ = KINDS[kind]
    found = []
    for rows, columns, warps in itertools.product((32, 64, 128), (64, 128, 256), (4, 8, 16)):
        held = rows * columns + rows * a // 2 + (a * columns if around.has_gradient else 0)
        tile = 2 * rows * (a * wide + columns * result_wide)
        weights = 2 * a * columns
        stages = min(3, int((220e3 - weights) // tile))
        if b % columns or stages < 1 or not 24 <= held / (32 * warps) <= 150:
            continue
        for count in {1, stages}:
            at_once = max(1, min(int(227e3 // (tile * count + weights)), 16 // warps, 3))
            programs = max(1, 132 * at_once // (b // columns))
            found.append(Tiling(rows, columns, programs, warps, count))
    # the most columns first, for each block of them reads the operand; then the smallest programs
    found.sort(key=lambda t: (-t.columns, t.warps, -t.stages, abs(t.rows - 64)))
    return found[: FLAGS.most]


flags.DEFINE_integer("most", 9, "Tilings of a product.")


def arrays(kind: str, rows: int, a: int, b: int, make: Callable[..., Any]) -> Operands:
    wide, vectors, result_wide, result_vectors = KINDS[kind][1]
    x = lambda n, count: [make((rows, n), FLAGS.dtype) for _ in range(count)]
    v = lambda n, count: [make((n,), "float32") for _ in range(count)]
    return Operands(
        make((a, b), FLAGS.dtype),
        x(a, wide),
        v(a, vectors),
        x(b, result_wide),
        v(b, result_vectors),
    )


def seconds(step: Callable[..., Any], given: Operands) -> float:
    """The median seconds of a call."""
    times = []
    for turn in range(FLAGS.rounds + 1):
        began = time.perf_counter()
        for _ in range(FLAGS.calls):
            made = step(given)
        jax.block_until_ready(made)
        if turn:
            times.append((time.perf_counter() - began) / FLAGS.calls)
    return statistics.median(times)


def error(ours: Made, theirs: Made) -> float:
    """The largest difference, relative to the largest value of its array."""
    off = lambda x, y: jnp.abs(x.astype(f32) - y.astype(f32)).max() / jnp.abs(y.astype(f32)).max()
    return max(
        float(jax.jit(off)(x, y))
        for x, y in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True)
    )


def compiled(step: Callable[..., Made], given: Operands) -> Any:
    """The executable, or why there is none."""
    try:
        with on_described_gpu("NVIDIA H200") if FLAGS.target else contextlib.nullcontext():
            return jax.jit(step).lower(given).compile()
    except Exception as problem:  # of any kind: another tiling may do
        return f"{type(problem).__name__}: {str(problem)[:200]}"


def measured(kind: str, size: int) -> dict[str, Any]:
    """A row: one product by passes and by each tiling."""
    around, _, widens = KINDS[kind]
    a, b = CHANNELS[size] if widens else CHANNELS[size][::-1]
    rows = FLAGS.batch * size * size
    keys = iter(jax.random.split(jax.random.key(0), 32))
    if FLAGS.target:
        sharding = target(FLAGS.target).sharding()
        make = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    else:
        draw = jax.jit(
            lambda key, shape, dtype: jax.random.normal(key, shape, f32).astype(dtype),
            static_argnums=(1, 2),
        )
        make = lambda shape, dtype: draw(next(keys), shape, dtype)
    given = arrays(kind, rows, a, b, make)
    steps = {"passes": lambda given: by_passes(around, given)}
    for tiling in tilings(kind, a, b):
        steps[str(tuple(vars(tiling).values()))] = lambda given, t=tiling: in_tiles(
            around, given, t
        )
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ready = dict(
            zip(steps, pool.map(lambda step: compiled(step, given), steps.values()), strict=True)
        )
    row: dict[str, Any] = {"kind": kind, "rows": rows, "a": a, "b": b, "dtype": FLAGS.dtype}
    made = jax.eval_shape(steps["passes"], given)
    row["nbytes"] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((given, made)))
    if FLAGS.target:
        return {
            **row,
            "tilings": {n: s if isinstance(s, str) else "compiled" for n, s in ready.items()},
        }
    expected = ready["passes"](given)
    row["passes_ms"] = round(seconds(ready["passes"], given) * 1e3, 4)
    row["tilings"] = {}
    for name, step in ready.items():
        if name == "passes" or isinstance(step, str):
            row["tilings"].update({name: step} if isinstance(step, str) else {})
            continue
        try:
            off = error(step(given), expected)
            row["tilings"][name] = [round(seconds(step, given) * 1e3, 4), round(off, 5)]
        except Exception as problem:
            row["tilings"][name] = f"{type(problem).__name__}: {str(problem)[:200]}"
    timed = {n: t[0] for n, t in row["tilings"].items() if isinstance(t, list)}
    if timed:
        best = min(timed, key=timed.__getitem__)
        row |= {"kernel_ms": timed[best], "tiling": best, "error": row["tilings"][best][1]}
        row["terabytes_per_second"] = round(row["nbytes"] / timed[best] / 1e9, 2)
    return row


def main(argv: list[str]) -> None:
    del argv
    origin = records.origin(FLAGS.commit)
    for size in map(int, FLAGS.sizes):
        for kind in FLAGS.kinds or KINDS:
            row = measured(kind, size)
            print({k: v for k, v in row.items() if k != "tilings"}, flush=True)
            for name, found in row["tilings"].items():
                print("   ", name, found, flush=True)
            if FLAGS.out:
                records.append(Path(FLAGS.out), [{**row, **origin}])


if __name__ == "__main__":
    app.run(main)
