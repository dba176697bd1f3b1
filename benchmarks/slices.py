"""What a loop takes whose stacks leave the device and return slice by slice.

    python benchmarks/slices.py --out=rows.jsonl

A row is one loop of tanh layers and its gradient: bytes of a slice, stacks that move, and
milliseconds a step by the plan and by policy "exact", in turns. Small slices show what a copy takes
to start: the loop waits for that where its own kernels are as short.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import records
from absl import app, flags

import vmem_jax
from vmem_jax.profile.timing import seconds_a_call

FLAGS = flags.FLAGS
WIDTH = 512


def loop(depth: int, iterations: int, rows: int) -> tuple[Any, tuple[jax.Array, jax.Array]]:
    """A training step of `iterations` times `depth` layers, and its arguments."""
    weights = jax.random.normal(jax.random.key(0), (depth, WIDTH, WIDTH)) / WIDTH**0.5
    xs = jax.random.normal(jax.random.key(1), (iterations, WIDTH))

    def loss(weights: jax.Array, xs: jax.Array) -> jax.Array:
        def body(y: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            y = y + x
            for w in weights:
                y = jnp.tanh(y @ w)
            return y, None

        return jnp.square(jax.lax.scan(body, jnp.ones((rows, WIDTH)), xs)[0]).mean()

    def step(weights: jax.Array, xs: jax.Array) -> jax.Array:
        return weights - jax.grad(loss)(weights, xs)

    return step, (weights, xs)


def compared(depth: int, iterations: int, nbytes: int) -> dict[str, Any]:
    step, args = loop(depth, iterations, nbytes // (4 * WIDTH))
    allow = ("order", "offload")
    least = vmem_jax.lowest(step, *args, allow=allow).nbytes
    moved = vmem_jax.jit(step, budget=least, allow=allow, profile=False)
    kept = vmem_jax.jit(step, budget=1.0, policy="exact", profile=False)
    plan = moved.plan(*args)
    row = {"slice_nbytes": nbytes, "iterations": iterations, "stacks": len(plan.looped)}
    row["predicted_ms"] = 1e3 * plan.predicted_seconds
    row["predicted_exact_ms"] = 1e3 * kept.plan(*args).predicted_seconds
    ways = {"ms": moved, "exact_ms": kept}
    for each in ways.values():
        jax.block_until_ready(each(*args))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(FLAGS.rounds):
        for name, each in ways.items():
            found[name].append(seconds_a_call(lambda each=each: each(*args), FLAGS.calls))
    row |= {name: 1e3 * statistics.median(times) for name, times in found.items()}
    return row


def main(_: Any) -> None:
    for depth in (1, 2, 4):
        for kib in FLAGS.kib:
            row = {"kind": "slices", "depth": depth}
            row |= compared(depth, FLAGS.iterations, int(kib) * 1024)
            row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
            row["commit"] = FLAGS.commit or records.commit()
            print(json.dumps(row), flush=True)
            with open(FLAGS.out, "a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    flags.DEFINE_list("kib", ["128", "1024", "8192"], "Bytes of a slice, in KiB.")
    flags.DEFINE_integer("iterations", 256, "How often the loop's body runs.")
    flags.DEFINE_integer("rounds", 5, "Turns of both ways.")
    flags.DEFINE_integer("calls", 5, "Steps of a turn.")
    flags.DEFINE_string("out", None, "File to add rows to.", required=True)
    flags.DEFINE_string("commit", "", "The commit, where the directory is no checkout.")
    app.run(main)
