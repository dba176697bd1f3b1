"""Layers in a scan: a decoder by plain jit, by what is picked by hand, and within budgets.

    python benchmarks/loops.py --ways=plain,checkpoint,dots,29.4GiB,19.1GiB,15.5GiB --out=rows.jsonl

All ways run in one process and take turns, block by block, on one donated state, so only one state is
on the device. A row has the median, the least and the most milliseconds a step of a way over its
blocks, what the compiler says it needs, and what was predicted; a way that cannot be made has its
error. The loss after each way's first step from the same state is in its row, too.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

import vmem_jax
from vmem_jax.models.decoder import Decoder, train_step

FLAGS = flags.FLAGS

_POLICIES = jax.checkpoint_policies
_WRAPS: dict[str, Callable[[Callable], Callable]] = {
    "plain": lambda layer: layer,
    "checkpoint": jax.checkpoint,
    "dots": lambda layer: jax.checkpoint(layer, policy=_POLICIES.dots_with_no_batch_dims_saveable),
    "every_dot": lambda layer: jax.checkpoint(layer, policy=_POLICIES.dots_saveable),
    "attention": lambda layer: jax.checkpoint(
        layer, policy=_POLICIES.save_only_these_names("attention")
    ),
}


def main(_: Any) -> None:
    wide = {"width": FLAGS.width, "hidden": 4 * FLAGS.width, "heads": FLAGS.width // 64}
    shape = {"layers": FLAGS.layers, **wide, "kv_heads": FLAGS.width // 256}
    optimiser = optax.adamw(1e-4)

    def model(wrap: Callable[[Callable], Callable]) -> Decoder:
        how = {"attention": FLAGS.attention, "scanned": FLAGS.scanned, "wrap": wrap}
        return Decoder(**shape, vocabulary=FLAGS.vocabulary, **how)

    @jax.jit
    def start(key: jax.Array) -> Any:
        params = model(lambda layer: layer).init(key)
        return params, optimiser.init(params)

    size = (FLAGS.batch, FLAGS.tokens + 1)
    tokens = jax.random.randint(jax.random.key(1), size, 0, FLAGS.vocabulary, jnp.int32)
    state = jax.eval_shape(start, jax.random.key(0))
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable] = {}
    for way in FLAGS.ways:
        begun = time.perf_counter()
        row = rows[way] = {"way": way, **shape, **how_of_run()}
        step = train_step(model(_WRAPS.get(way, _WRAPS["plain"])), optimiser)
        try:
            if way in _WRAPS:
                compiled = jax.jit(step, donate_argnums=0).lower(state, tokens).compile()
                stats = compiled.memory_analysis()
                need = stats.argument_size_in_bytes + stats.output_size_in_bytes
                need += stats.temp_size_in_bytes - stats.alias_size_in_bytes
                steps[way] = compiled
            else:
                budgeted = vmem_jax.jit(step, budget=way, donate_argnums=0, profile=FLAGS.profile)
                made = budgeted.lower(state, tokens).compile()
                need, plan = made.need_nbytes, made.plan
                row |= {
                    "predicted_ms": 1e3 * plan.predicted_seconds,
                    "predicted_gib": made.attempts[-1].predicted_need / 2**30,
                    "compiles": len(made.attempts),
                    "plan": str(plan),
                }
                steps[way] = budgeted
            row |= {"gib": need / 2**30, "seconds_to_compile": time.perf_counter() - begun}
        except Exception as error:  # a row says so, and the other ways go on
            row["error"] = f"{type(error).__name__}: {error}"[:600]
        print(json.dumps(row), flush=True)
    if FLAGS.rounds:
        _time(start, tokens, steps, rows)
    with open(FLAGS.out, "a") as out:
        for row in rows.values():
            out.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def how_of_run() -> dict[str, Any]:
    return {
        "batch": FLAGS.batch,
        "tokens": FLAGS.tokens,
        "attention": FLAGS.attention,
        "scanned": FLAGS.scanned,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def _time(
    start: Callable, tokens: jax.Array, steps: dict[str, Callable], rows: dict[str, dict[str, Any]]
) -> None:
    """Adds to each row what its way takes."""
    state = None
    for way, step in [*steps.items()]:
        del state
        state = start(jax.random.key(0))
        try:
            state, loss = step(state, tokens)  # the first loads kernels
            state, after = step(state, tokens)
            rows[way] |= {"loss": float(loss), "loss_after": float(after)}
        except Exception as error:
            rows[way]["error"] = f"{type(error).__name__}: {error}"[:600]
            del steps[way]
            state = None
    state = start(jax.random.key(0)) if state is None else state
    blocks: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(FLAGS.rounds):
        for way, step in steps.items():
            state, loss = step(state, tokens)
            jax.block_until_ready(loss)
            begun = time.perf_counter()
            for _ in range(FLAGS.steps):
                state, loss = step(state, tokens)
            jax.block_until_ready((state, loss))
            blocks[way].append(1e3 * (time.perf_counter() - begun) / FLAGS.steps)
    for way, ms in blocks.items():
        rows[way] |= {"ms": statistics.median(ms), "ms_least": min(ms), "ms_most": max(ms)}
        if "plain" in blocks:
            rows[way]["of_plain"] = rows[way]["ms"] / statistics.median(blocks["plain"])


if __name__ == "__main__":
    flags.DEFINE_list(
        "ways", "plain,checkpoint,dots,29.4GiB,19.1GiB,15.5GiB", "by hand, or a budget"
    )
    flags.DEFINE_string("out", "loops.jsonl", "where rows are added")
    flags.DEFINE_enum("attention", "cudnn", ["xla", "cudnn"], "as jax.nn has it")
    flags.DEFINE_bool("scanned", True, "layers in one scan, or unrolled")
    flags.DEFINE_bool("profile", None, "measure steps first (`jit`'s argument)")
    flags.DEFINE_integer("layers", 16, "layers")
    flags.DEFINE_integer("width", 2048, "of the residual stream")
    flags.DEFINE_integer("vocabulary", 32_000, "tokens")
    flags.DEFINE_integer("batch", 8, "sequences")
    flags.DEFINE_integer("tokens", 2048, "in a sequence")
    flags.DEFINE_integer("rounds", 5, "blocks of each way; 0 to compile alone")
    flags.DEFINE_integer("steps", 8, "in a block")
    app.run(main)
