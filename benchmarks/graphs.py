"""Convolutions in CUDA graphs beside convolutions that are launched one by one.

    python benchmarks/graphs.py --models=vgg16:64,alexnet:128:float32 --out=rows.jsonl

A row is one network by one policy: milliseconds a step with and without, in turns, block by block, on
one donated state each; the losses of both after as many steps; and the same of plain `jax.jit`, which
records in its first call. A way that cannot run has its error. With JAX_COMPILATION_CACHE_DIR set, a
second run takes the executables from there, so that no kernel was made ready by timing it.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import records
from absl import app, flags
from locks import held

import vmem_jax
from vmem_jax.jax_compat import GRAPH_OPTIONS, GRAPHS
from vmem_jax.models import job

FLAGS = flags.FLAGS

MODELS = (
    "vgg16:128 vgg116:32 alexnet:256 overfeat:128 googlenet:128 densenet40k12:256 inception4:32 "
    "resnet50:64:float32 vgg16:64:float32 vgg16:64:float16"
)


def held_by(convolutions: bool) -> str:
    """What graphs hold, with or without convolutions."""
    return GRAPH_OPTIONS["gpu"][GRAPHS].removesuffix("" if convolutions else ",CONVOLUTION")


def compared(name: str, batch: int, dtype: str, way: str) -> dict[str, Any]:
    task = job(name, batch=batch, dtype=dtype, learning_rate=1e-5)
    init, draw = jax.jit(task.init), jax.jit(task.random_batch)
    data = draw(jax.random.key(1))
    row: dict[str, Any] = {"model": name, "batch": batch, "dtype": dtype, "way": way}
    row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    row["cached"] = bool(jax.config.jax_compilation_cache_dir)
    row["commit"] = records.commit()
    steps: dict[str, Any] = {}
    with held(FLAGS.lock, alone=False):
        for what in FLAGS.programs:
            options = {GRAPHS: held_by(what == "graphs")}
            begun = time.perf_counter()
            if way == "plain":
                state = jax.eval_shape(init, jax.random.key(0))
                lowered = jax.jit(task.step, donate_argnums=0).lower(state, data)
                steps[what] = lowered.compile(options)
            else:
                budget = 1.0 if way == "exact" else float(way)
                policy = "exact" if way == "exact" else "auto"
                steps[what] = vmem_jax.jit(
                    task.step,
                    budget=budget,
                    policy=policy,
                    donate_argnums=0,
                    compiler_options={} if what == "graphs" else options,
                )
                state = init(jax.random.key(0))
                steps[what].lower(state, data).compile()
            row[f"seconds_to_compile_{what}"] = time.perf_counter() - begun
    states, losses = {}, {}
    blocks: dict[str, list[float]] = {what: [] for what in steps}
    with held(FLAGS.lock, alone=True):
        for what, step in steps.items():
            try:
                states[what], _ = step(init(jax.random.key(0)), data)
                states[what], metrics = step(states[what], data)
                jax.block_until_ready(metrics)
            except Exception as error:
                row["error"] = f"{what}: {type(error).__name__}: {error}"[:600]
                return row
        for _ in range(FLAGS.rounds):
            for what, step in steps.items():
                begun = time.perf_counter()
                for _ in range(FLAGS.steps):
                    states[what], metrics = step(states[what], data)
                losses[what] = float(metrics["loss"])
                blocks[what].append(1e3 * (time.perf_counter() - begun) / FLAGS.steps)
    for what, ms in blocks.items():
        row |= {f"ms_{what}": statistics.median(ms), f"loss_{what}": losses[what]}
    return row


def main(_: Any) -> None:
    for each in FLAGS.models:
        name, batch, *dtype = each.split(":")
        for way in FLAGS.ways:
            try:
                row = compared(name, int(batch), *dtype or ["bfloat16"], way)
            except Exception as error:  # a row says so, and the others go on
                row = {"model": each, "way": way, "commit": records.commit()}
                row["error"] = f"{type(error).__name__}: {error}"[:600]
            print(json.dumps(row), flush=True)
            records.append(Path(FLAGS.out), [row])


if __name__ == "__main__":
    flags.DEFINE_list("models", MODELS.replace(" ", ","), "NAME:BATCH or NAME:BATCH:DTYPE")
    flags.DEFINE_list("ways", "plain,exact,0.5", "plain, exact, or budgets of `auto`")
    flags.DEFINE_multi_enum(
        "programs", ["graphs", "launches"], ["graphs", "launches"], "what is timed"
    )
    flags.DEFINE_string("out", "graphs.jsonl", "where rows are added")
    flags.DEFINE_string("lock", "", "file by which several of these take turns (`locks`)")
    flags.DEFINE_integer("rounds", 4, "blocks of each")
    flags.DEFINE_integer("steps", 12, "in a block")
    app.run(main)
