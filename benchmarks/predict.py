"""Compares predicted with measured seconds of a step: the roofline's, and after profiling.

    python benchmarks/predict.py --models=resnet50:256,vgg116:32 --out=predicted.jsonl

For each model: how long profiling took, then plain jit and each budget: what the roofline with
shipped rates predicts, what the profile predicts, what was measured. The last line is the median
relative error over all rows.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import records
from absl import app, flags, logging
from variants import initial_states

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.models import job
from vmem_jax.profile.measured import measured_costs, measured_machine

FLAGS = flags.FLAGS
flags.DEFINE_list("models", ["resnet50:256", "vgg116:32"], "model:batch.")
flags.DEFINE_integer("image", 224, "Pixels in height and width.")
flags.DEFINE_string("dtype", "bfloat16", "Type of computation and parameters.")
flags.DEFINE_string("optimizer", "sgd", "sgd, momentum or adamw.")
flags.DEFINE_list("budgets", ["0.5"], "Fractions of plain jit's need.")
flags.DEFINE_float("seconds", 90.0, "Time for a model's steps.")
flags.DEFINE_bool("refresh", False, "Measure what was measured before, too.")
flags.DEFINE_integer("rounds", 7, "Blocks of steps.")
flags.DEFINE_integer("steps", 4, "Steps in a block.")
flags.DEFINE_string("out", "", "File for the rows; none by default.")


def measured_seconds(step: Callable[..., Any], work: Any) -> float:
    """Seconds of a training step, the median of some blocks, on random data."""
    state = initial_states(work)()
    batch = work.random_batch(jax.random.key(1))
    blocks = []
    for block in range(FLAGS.rounds + 1):
        began = time.perf_counter()
        for _ in range(FLAGS.steps):
            state, _ = step(state, batch)
        jax.block_until_ready(state)
        if block:  # the first one compiles
            blocks.append((time.perf_counter() - began) / FLAGS.steps)
    return statistics.median(blocks)


def rows_of(name: str, batch: int) -> list[dict[str, Any]]:
    work = job(
        name, batch=batch, image=FLAGS.image, dtype=FLAGS.dtype, optimizer=FLAGS.optimizer,
        learning_rate=1e-5,
    )  # fmt: skip
    device = jax.devices()[0]
    shapes = work.state_shapes(), work.batch
    began = time.perf_counter()
    machine = measured_machine(device, refresh=FLAGS.refresh)
    machine_seconds = time.perf_counter() - began
    captured = capture(jax.jit(work.step).trace(*shapes).jaxpr)
    found = measured_costs(
        captured, device, machine=machine, seconds=FLAGS.seconds, refresh=FLAGS.refresh
    )
    about = {
        "model": name,
        "batch": batch,
        "dtype": FLAGS.dtype,
        "device": device.device_kind,
        "machine_seconds": machine_seconds,
        "steps_seconds": found.seconds,
        "distinct": found.distinct,
        "measured": found.measured,
        "scaled": found.scaled,
        "calibrated": found.calibrated,
        "calibration_error": found.costs.error,
    }
    plain = measured_seconds(jax.jit(work.step, donate_argnums=0), work)
    rows = []
    for budget in map(float, FLAGS.budgets):
        options: Any = dict(budget=budget, donate_argnums=0)
        step = vmem_jax.jit(work.step, **options)
        profiled = step.explain(*shapes)
        # the same plan by the shipped roofline
        shipped = vmem_jax.jit(
            work.step, plan=step.plan(*shapes), donate_argnums=0, profile=False
        ).explain(*shapes)
        if not rows:
            rows.append(_row(about, None, shipped.plain_seconds, profiled.plain_seconds, plain))
        taken = measured_seconds(step, work)
        rows.append(_row(about, budget, shipped.seconds, profiled.seconds, taken))
    return rows


def _row(
    about: dict[str, Any], budget: float | None, roofline: float, predicted: float, measured: float
) -> dict[str, Any]:
    row = {
        **about,
        "budget": budget,
        "roofline_ms": 1e3 * roofline,
        "predicted_ms": 1e3 * predicted,
        "measured_ms": 1e3 * measured,
        "error": predicted / measured - 1,
    }
    print(json.dumps(row), flush=True)
    return row


def main(argv: list[str]) -> None:
    del argv
    rows = []
    for model in FLAGS.models:
        name, _, batch = model.partition(":")
        try:
            rows += rows_of(name, int(batch))
        except (vmem_jax.BudgetError, jax.errors.JaxRuntimeError) as error:
            logging.error("%s: %s", model, str(error)[:300])
    if FLAGS.out:
        records.append(Path(FLAGS.out), rows)
    if rows:
        print(f"median error {statistics.median(abs(row['error']) for row in rows):.1%}")


if __name__ == "__main__":
    app.run(main)
