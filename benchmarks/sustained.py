"""What a card's rates fall to under load: a card at its limit of power lowers its clock.

    python benchmarks/sustained.py --out=rows.jsonl

A row is a few kernels that run again and again for `--seconds`, after the card was idle: the
microseconds of a run at once and at the end, random normal data, and the card's clock and power at
the end, as nvidia-smi says. "mixed" rows have products and passes in one program, as a training step
has. `core/cards.py` has what is derived from these rows.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import records
from absl import app, flags
from jax import lax

FLAGS = flags.FLAGS

_BURST = 0.1
"""Seconds of load that count as none: a card answers a load within some tenths of a second."""


def main(_: Any) -> None:
    for name, call, shapes in cases():
        keys = jax.random.split(jax.random.key(0), len(shapes))
        operands = [
            jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)
        ]
        program = jax.jit(call).lower(*operands).compile()
        row = {"kind": "sustained", "name": name, **_timed(program, operands)}
        row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        row["commit"] = records.commit()
        print(json.dumps(row), flush=True)
        with open(FLAGS.out, "a") as out:
            out.write(json.dumps(row) + "\n")


def cases() -> Iterator[tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...]]]:
    """(name, function of arrays of bfloat16, their shapes); a run takes about a millisecond."""
    product, passed = lambda x, w: x @ w, lambda y: jax.nn.gelu(y + 1)
    tokens, wide = (16384, 2048), (2048, 8192)
    yield "product 8192", product, ((8192, 8192), (8192, 8192))
    yield "product 16384 x 2048 x 8192", product, (tokens, wide)
    yield "gradient 2048 x 16384 x 8192", lambda x, y: x.T @ y, (tokens, (16384, 8192))
    yield "pass", passed, ((65536, 8192),)
    convolved = lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    yield "convolution 3 x 3", convolved, ((256, 28, 28, 256), (3, 3, 256, 256))
    attend = lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation="cudnn"
    )
    yield "attention", attend, ((8, 2048, 16, 128),) * 3

    def mixed(passes: int) -> Callable[..., Any]:
        def call(x: jax.Array, w: jax.Array, y: jax.Array) -> Any:
            for _ in range(passes):
                y = lax.optimization_barrier(passed(y))
            return x @ w, y

        return call

    for passes in (1, 4):  # of 0.26 ms beside a product of 0.75
        shapes = (tokens, wide, (32768, 8192))
        yield f"mixed, {passes} passes", mixed(passes), shapes


def _timed(program: Any, operands: list[jax.Array]) -> dict[str, Any]:
    """What a run takes at once and at the end, and the card's state at the end."""
    jax.block_until_ready(program(*operands))
    time.sleep(FLAGS.idle)
    begun = time.perf_counter()
    blocks: list[tuple[float, float]] = []  # when a block of runs ended, and seconds of a run
    state: list[str] = []
    watch = threading.Timer(FLAGS.seconds - 1, lambda: state.append(_state()))
    watch.start()
    while (at := time.perf_counter()) - begun < FLAGS.seconds:
        for _ in range(FLAGS.runs):
            made = program(*operands)
        jax.block_until_ready(made)
        now = time.perf_counter()
        blocks.append((now - begun, (now - at) / FLAGS.runs))
    watch.join()
    first = [each for end, each in blocks if end < _BURST] or [blocks[0][1]]
    last = [each for end, each in blocks if end > FLAGS.seconds - 1]
    at_once, at_the_end = statistics.median(first), statistics.median(last)
    return {
        "us_at_once": 1e6 * at_once,
        "us_at_the_end": 1e6 * at_the_end,
        "slower": at_the_end / at_once,
        "clock_and_power": state[0] if state else None,
    }


def _state() -> str:
    query = [
        "nvidia-smi",
        "--query-gpu=clocks.sm,power.draw,temperature.gpu",
        "--format=csv,noheader",
    ]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    flags.DEFINE_float("seconds", 4.0, "of load")
    flags.DEFINE_float("idle", 3.0, "seconds without load before")
    flags.DEFINE_integer("runs", 20, "in a block, which is timed as a whole")
    flags.DEFINE_string("out", "sustained.jsonl", "where rows are added")
    app.run(main)
