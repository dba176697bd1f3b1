"""What an iteration of a loop of small kernels takes: in a row, beside each other, and with slices.

    python benchmarks/iterations.py --out=rows.jsonl
    python benchmarks/iterations.py --target=h200       # predictions only

A row is one `lax.scan`, microseconds an iteration by prediction and, where a card is there, as
measured. Its body has `products` in a row, [rows, width] times [width, width], each followed by a
tanh; `written` stacks, each of another function of a product's result; `read` stacks whose slices
are added before the first product; `totals` of products' results that the carry adds up, as
gradients to weights are; and `sums` of rows that it adds up, as gradients to biases are.
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

import vmem_jax
from vmem_jax.profile.timing import seconds_a_call

FLAGS = flags.FLAGS

NUMBERS = ("products", "written", "read", "totals", "sums")
BODIES = (
    *((products, 0, 0, 0, 0) for products in (1, 2, 3, 4, 6, 8)),
    *((products, written, 0, 0, 0) for products in (1, 4) for written in (1, 2, 4, 8)),
    *((products, 0, read, 0, 0) for products in (1, 4) for read in (1, 2, 4)),
    *((products, 0, 0, totals, 0) for products in (1, 4) for totals in (1, 2, 4)),
    *((products, 0, 0, 0, sums) for products in (2, 4) for sums in (1, 2, 4)),
    (1, 2, 1, 0, 0),
    (4, 4, 4, 0, 0),
    (4, 0, 4, 4, 4),
)


def loop(
    products: int, written: int, read: int, totals: int, sums: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The loop of a row and the shapes of its arguments."""
    rows, width, length = FLAGS.rows, FLAGS.width, FLAGS.iterations

    def step(weights: list[jax.Array], ys: jax.Array, xs: list[jax.Array]) -> Any:
        def body(carry: Any, x: list[jax.Array]) -> Any:
            y, added, summed = carry
            made = []
            for i in range(read):
                y = y + x[i] if i else y * x[i]
            for i in range(products):
                y = jnp.tanh(y @ weights[i])
                made.append(y)
            added = [
                total + jnp.dot(made[i % products].T, made[-1]) for i, total in enumerate(added)
            ]
            summed = [total + made[i % products].sum(0) for i, total in enumerate(summed)]
            kept = [jnp.sin((i + 2) * made[i % products]) for i in range(written)]
            return (y, added, summed), kept

        start = ys, [jnp.zeros((width, width))] * totals, [jnp.zeros(width)] * sums
        return jax.lax.scan(body, start, xs, length)

    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    stacks = [array(length, rows, width)] * read
    return step, ([array(width, width)] * products, array(rows, width), stacks)


def drawn(shapes: Any) -> Any:
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    draw = lambda key, x: jax.random.normal(key, x.shape) / FLAGS.width**0.5
    return tree.unflatten(map(draw, keys, leaves))


def predicted(step: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Seconds of the step without a profile."""
    planned = vmem_jax.jit(step, budget=1.0, profile=False)
    return sum(planned.context(args, {}, FLAGS.target).plain_costs.seconds)


def main(_: Any) -> None:
    for numbers in BODIES:
        row: dict[str, Any] = dict(zip(NUMBERS, numbers, strict=True))
        row |= {"kind": "iterations", "iterations": FLAGS.iterations}
        row |= {"rows": FLAGS.rows, "width": FLAGS.width}
        step, args = loop(*numbers)
        row["predicted_us"] = 1e6 * predicted(step, args) / FLAGS.iterations
        if not FLAGS.target:
            run = functools.partial(jax.jit(step).lower(*args).compile(), *drawn(args))
            jax.block_until_ready(run())
            times = [seconds_a_call(run, FLAGS.calls) for _ in range(FLAGS.rounds)]
            row["us"] = 1e6 * statistics.median(times) / FLAGS.iterations
        row["device"] = FLAGS.target or jax.devices()[0].device_kind
        row |= {"jax": jax.__version__, "commit": records.commit()}
        print(json.dumps(row), flush=True)
        records.append(pathlib.Path(FLAGS.out), [row])


if __name__ == "__main__":
    flags.DEFINE_string("target", None, "a card to predict for that is not there")
    flags.DEFINE_integer("rows", 64, "of the carry")
    flags.DEFINE_integer("width", 512, "of the carry and of weights")
    flags.DEFINE_integer("iterations", 256, "of a loop")
    flags.DEFINE_integer("calls", 10, "in a block that is timed")
    flags.DEFINE_integer("rounds", 5, "blocks; the median is taken")
    flags.DEFINE_string("out", "iterations.jsonl", "where rows are added")
    app.run(main)
