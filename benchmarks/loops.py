"""Layers in a scan: a network by plain jit, by what is picked by hand, and within budgets.

    python benchmarks/loops.py --model=vit --ways=plain,checkpoint,dots,@dots,20GiB --out=rows.jsonl

The models and what is picked by hand are in `loop_models`. A way is one of those, a budget, or "@"
and a way by hand, which is within what that one compiled to. All ways run in one process and take
turns, block by block, on one donated state, so only one state is on the device. A row has the median,
the least and the most milliseconds a step of a way over its blocks, what the compiler says it needs,
and what was predicted; a way that cannot be made has its error. The loss after each way's first step
from the same state is in its row, too. With `--target=h200` all is compiled for that card, and
nothing runs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from absl import app, flags
from loop_models import MODELS, POLICIES, SIZES

import vmem_jax
from vmem_jax.devices.targets import target

FLAGS = flags.FLAGS


def main(_: Any) -> None:
    batch, layers = SIZES[FLAGS.model]
    batch, layers = FLAGS.batch or batch, FLAGS.layers or layers
    options: dict[str, Any] = {"width": FLAGS.width} if FLAGS.width else {}
    if FLAGS.model == "decoder":
        options |= {"attention": FLAGS.attention, "scanned": FLAGS.scanned}
        if FLAGS.width:
            sizes = {"hidden": 4, "heads": 1 / 64, "kv_heads": 1 / 256}
            options |= {name: int(share * FLAGS.width) for name, share in sizes.items()}
    make = lambda hand: MODELS[FLAGS.model](hand, batch, layers, **options)
    given = make("plain")
    state = jax.eval_shape(given.init, jax.random.key(0))
    data = jax.eval_shape(given.batch, jax.random.key(1))
    shape = {"model": FLAGS.model, "batch": batch, "layers": layers, **options}
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable] = {}
    for way in FLAGS.ways:
        row = rows[way] = {"way": way, **shape, **_run()}
        begun = time.perf_counter()
        try:
            if way in POLICIES or way == "plain":
                step, found = _by_hand(make(way).step, state, data)
            else:
                budget = int(rows[way[1:]]["gib"] * 2**30) if way[0] == "@" else way
                step, found = _budgeted(given.step, budget, state, data)
            row |= {**found, "seconds_to_compile": time.perf_counter() - begun}
            steps[way] = step
        except Exception as error:  # a row says so, and the other ways go on
            row["error"] = f"{type(error).__name__}: {error}"[:600]
        print(json.dumps(row), flush=True)
    if FLAGS.rounds and not FLAGS.target:
        _time(jax.jit(given.init), jax.jit(given.batch)(jax.random.key(1)), steps, rows)
    with open(FLAGS.out, "a") as out:
        for row in rows.values():
            out.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def _by_hand(step: Callable, *args: Any) -> tuple[Callable, dict[str, Any]]:
    """The step by plain jit, with what is picked by hand in it; and what its row says."""
    if FLAGS.target:
        on_card = jax.sharding.SingleDeviceSharding(target(FLAGS.target).device())
        there = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on_card)
        args = jax.tree.map(there, args)
    compiled = jax.jit(step, donate_argnums=0).lower(*args).compile()
    stats = compiled.memory_analysis()
    need = stats.argument_size_in_bytes + stats.output_size_in_bytes
    need += stats.temp_size_in_bytes - stats.alias_size_in_bytes
    return compiled, {"gib": need / 2**30}


def _budgeted(step: Callable, budget: Any, *args: Any) -> tuple[Callable, dict[str, Any]]:
    """The step within a budget; and what its row says."""
    budgeted = vmem_jax.jit(step, budget=budget, donate_argnums=0, profile=FLAGS.profile)
    if FLAGS.target:
        made = budgeted._entry_for(args, {}, FLAGS.target)
        best, attempts = made.best, made.attempts
        plan, need = best.plan, best.need
    else:
        entry = budgeted.lower(*args).compile()
        plan, need, attempts = entry.plan, entry.need_nbytes, entry.attempts
    return budgeted, {
        "gib": need / 2**30,
        "predicted_ms": 1e3 * plan.predicted_seconds,
        "predicted_gib": attempts[-1].predicted_need / 2**30,
        "compiles": len(attempts),
        "plan": str(plan),
    }


def _run() -> dict[str, Any]:
    """Where it runs."""
    return {"device": FLAGS.target or jax.devices()[0].device_kind, "jax": jax.__version__}


def _time(
    start: Callable, data: Any, steps: dict[str, Callable], rows: dict[str, dict[str, Any]]
) -> None:
    """Adds to each row what its way takes."""
    state = None
    for way, step in [*steps.items()]:
        del state
        state = start(jax.random.key(0))
        try:
            state, loss = step(state, data)  # the first loads kernels
            state, after = step(state, data)
            rows[way] |= {"loss": float(loss), "loss_after": float(after)}
        except Exception as error:
            rows[way]["error"] = f"{type(error).__name__}: {error}"[:600]
            del steps[way]
            state = None
    state = start(jax.random.key(0)) if state is None else state
    blocks: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(FLAGS.rounds):
        for way, step in steps.items():
            state, loss = step(state, data)
            jax.block_until_ready(loss)
            begun = time.perf_counter()
            for _ in range(FLAGS.steps):
                state, loss = step(state, data)
            jax.block_until_ready((state, loss))
            blocks[way].append(1e3 * (time.perf_counter() - begun) / FLAGS.steps)
    for way, ms in blocks.items():
        rows[way] |= {"ms": statistics.median(ms), "ms_least": min(ms), "ms_most": max(ms)}
        if "plain" in blocks:
            rows[way]["of_plain"] = rows[way]["ms"] / statistics.median(blocks["plain"])


if __name__ == "__main__":
    flags.DEFINE_enum("model", "decoder", [*MODELS], "the network")
    flags.DEFINE_list(
        "ways", "plain,checkpoint,dots,29.4GiB,19.1GiB,15.5GiB", "by hand, or a budget"
    )
    flags.DEFINE_string("out", "loops.jsonl", "where rows are added")
    flags.DEFINE_string("target", None, "a card to compile for that is not there")
    flags.DEFINE_enum("attention", "cudnn", ["xla", "cudnn"], "of the decoder, as jax.nn has it")
    flags.DEFINE_bool("scanned", True, "the decoder's layers in one scan, or unrolled")
    flags.DEFINE_bool("profile", None, "measure steps first (`jit`'s argument)")
    flags.DEFINE_integer("layers", None, "layers, where other than the model's own")
    flags.DEFINE_integer("width", None, "of the residual stream, or of a first stage")
    flags.DEFINE_integer("batch", None, "samples")
    flags.DEFINE_integer("rounds", 5, "blocks of each way; 0 to compile alone")
    flags.DEFINE_integer("steps", 8, "in a block")
    app.run(main)
