"""What a loop takes that adds products to a total in float32, as sub-batches add up gradients.

    python benchmarks/totals.py --out=rows.jsonl

A row is one product of bfloat16, [tokens, rows] transposed times [tokens, columns], and microseconds
of an iteration: where the product is rounded to bfloat16 and then added ("rounded"), and where it is
asked for float32 ("wide"), which cuBLAS adds to the total as it writes.
"""

from __future__ import annotations

import functools
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import records
from absl import app, flags
from jax import lax

from vmem_jax.profile.timing import seconds_a_call

FLAGS = flags.FLAGS

SHAPES = (
    "1024x4096x6304 4096x1024x6304 1024x1024x6304 2048x5632x4096 2048x5632x8192 5632x2048x8192 "
    "2048x2048x8192 768x3072x25088 4096x11008x8192 1024x4096x1576"
)
"""Rows, columns and tokens of layers of transformers."""


def loop(dtype: Any) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """(total, operands of all iterations) -> the total with their products, made in `dtype`."""

    def add(total: jax.Array, i: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, None]:
        a, b = (lax.dynamic_index_in_dim(each, i, keepdims=False) for each in (x, y))
        numbers = ((0,), (0,)), ((), ())
        made = lax.dot_general(a, b, numbers, preferred_element_type=dtype)
        return total + made.astype(total.dtype), None

    def summed(total: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.scan(functools.partial(add, x=x, y=y), total, jnp.arange(len(x)))[0]

    return summed


def microseconds(rows: int, columns: int, tokens: int) -> dict[str, float]:
    """Of an iteration by each way, in turns."""
    count, key = FLAGS.iterations, jax.random.key(0)
    draw = lambda n: jax.random.normal(key, (count, tokens, n), jnp.bfloat16)
    x, y, total = draw(rows), draw(columns), jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    runs, times = {}, {"rounded": list[float](), "wide": list[float]()}
    totals = {way: jnp.zeros((rows, columns)) for way in times}

    def run(way: str) -> jax.Array:
        totals[way] = runs[way](totals[way], x, y)
        return totals[way]

    for way, dtype in (("rounded", jnp.bfloat16), ("wide", jnp.float32)):
        runs[way] = jax.jit(loop(dtype), donate_argnums=0).lower(total, x, y).compile()
    for _ in range(FLAGS.rounds):
        for way, found in times.items():
            found.append(seconds_a_call(functools.partial(run, way), FLAGS.calls))
    return {f"{way}_us": 1e6 * statistics.median(found) / count for way, found in times.items()}


def main(_: Any) -> None:
    for shape in FLAGS.shapes.split():
        rows, columns, tokens = map(int, shape.split("x"))
        row: dict[str, Any] = {"kind": "totals", "rows": rows, "columns": columns, "tokens": tokens}
        row |= microseconds(rows, columns, tokens)
        row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        row["commit"] = records.commit()
        print(json.dumps(row), flush=True)
        records.append(pathlib.Path(FLAGS.out), [row])


if __name__ == "__main__":
    flags.DEFINE_string("shapes", SHAPES, "of products: rows, columns and tokens")
    flags.DEFINE_integer("iterations", 12, "of a loop, on as many operands")
    flags.DEFINE_integer("calls", 10, "in a block that is timed")
    flags.DEFINE_integer("rounds", 5, "blocks of each way; the median is taken")
    flags.DEFINE_string("out", "totals.jsonl", "where rows are added")
    app.run(main)
