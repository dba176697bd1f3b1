"""The tensor cache (SuperNeurons, Table 3): one compiled plan that moves everything, and more memory.

    python benchmarks/cache.py --model=vgg116 --batch=32 --budget=0.2 --out=rows.jsonl

The plan is made once, for the smallest budget, and not compiled again. Each capacity is a share of
the bytes that it moves; the plan that keeps everything takes its turns with it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import records
from absl import app, flags
from variants import initial_states

import vmem_jax
from vmem_jax.core.need import need_nbytes
from vmem_jax.models import job

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "vgg116", "Model of vmem_jax.models.")
flags.DEFINE_integer("batch", 32, "Images in a batch.")
flags.DEFINE_integer("image", 224, "Pixels in height and width.")
flags.DEFINE_string("dtype", "bfloat16", "Type of computation and parameters.")
flags.DEFINE_float("budget", 0.2, "Share of plain jit's need that the plan is made for.")
flags.DEFINE_list("shares", ["0", "0.25", "0.5", "0.75", "1.05"], "Capacities, of what moves.")
flags.DEFINE_integer("rounds", 5, "Blocks of steps of each capacity.")
flags.DEFINE_integer("steps", 4, "Steps in a block.")
flags.DEFINE_string("out", "", "File for the rows; none by default.")
flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")


def block(step: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, float]:
    """The state after some steps, and the seconds of one."""
    began = time.perf_counter()
    for _ in range(FLAGS.steps):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    return state, (time.perf_counter() - began) / FLAGS.steps


def main(argv: list[str]) -> None:
    del argv
    work = job(
        FLAGS.model, batch=FLAGS.batch, image=FLAGS.image, dtype=FLAGS.dtype, optimizer="sgd",
        learning_rate=1e-5,
    )  # fmt: skip
    device = jax.devices()[0]
    shapes = work.state_shapes(), work.batch
    need = need_nbytes(jax.jit(work.step, donate_argnums=0).lower(*shapes).compile())
    options: Any = dict(budget=int(FLAGS.budget * need), donate_argnums=0)
    moving = vmem_jax.jit(work.step, allow=("order", "offload"), transport="ffi", **options)
    compiled = moving.lower(*shapes).compile()
    arena, moved = compiled.arena, compiled.moved_nbytes
    keeping = vmem_jax.jit(work.step, policy="exact", budget=need, donate_argnums=0)
    batch = jax.block_until_ready(jax.jit(work.random_batch)(jax.random.key(1)))
    draw = initial_states(work)
    states = [draw(), draw()]
    for share in map(float, FLAGS.shares):
        states[0], _ = block(moving, states[0], batch)  # pinned and warmed up
        arena.set_cache_capacity(device, int(share * moved))
        taken: list[list[float]] = [[], []]
        for turn in range(FLAGS.rounds + 1):
            before = arena.counters(device)
            for i, step in enumerate((moving, keeping)):
                states[i], seconds = block(step, states[i], batch)
                if turn:
                    taken[i].append(seconds)
            after = arena.counters(device)
        change = lambda name, a=after, b=before: (getattr(a, name) - getattr(b, name)) / FLAGS.steps
        row = {
            "model": FLAGS.model,
            "batch": FLAGS.batch,
            "dtype": FLAGS.dtype,
            "budget": FLAGS.budget,
            "need": compiled.need_nbytes,
            "moved_nbytes": moved,
            "cache_nbytes": after.cache_nbytes,
            "step_seconds": statistics.median(taken[0]),
            "keeping_seconds": statistics.median(taken[1]),
            "hits": change("hits"),
            "misses": change("misses"),
            "evictions": change("evictions"),
            "link_nbytes": change("link_nbytes_out") + change("link_nbytes_in"),
        }
        row |= records.origin(FLAGS.commit)
        print(
            f"cache {share:5.2f} of {moved / 2**30:.2f} GiB: {1e3 * row['step_seconds']:.2f} ms, "
            f"{row['step_seconds'] / row['keeping_seconds']:.3f} of keeping, a step: "
            f"{row['hits']:.0f} hits, {row['misses']:.0f} misses, {row['evictions']:.0f} evictions,"
            f" {row['link_nbytes'] / 2**30:.2f} GiB over the link",
            flush=True,
        )
        if FLAGS.out:
            records.append(Path(FLAGS.out), [row])


if __name__ == "__main__":
    app.run(main)
