"""What `tune=True` times for a step, and what it keeps.

    python benchmarks/tuned.py --model=vit --budgets=0.5,0.25 --out=rows.jsonl

The networks are those of `step_models`. A row has the predicted and the measured milliseconds of the
plan that the search chose and of each that was timed beside it, which was kept, and the seconds of
all calls until then, the compiles of the other plans among them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import records
from absl import app, flags
from step_models import BATCHES, MODELS

import vmem_jax
from vmem_jax.api.tune import MOST_RIVALS, TIMED, WARM_UP
from vmem_jax.core.tuning import Timed

FLAGS = flags.FLAGS


def said(timed: Timed) -> dict[str, Any]:
    ms = None if timed.measured is None else 1e3 * timed.measured
    return {"what": timed.what, "predicted_ms": 1e3 * timed.predicted, "ms": ms, "note": timed.note}


def main(_: Any) -> None:
    options = {"scanned": FLAGS.scanned} if FLAGS["scanned"].present else {}
    batch = FLAGS.batch or BATCHES[FLAGS.model]
    train = MODELS[FLAGS.model]("plain", batch, **options)
    data = train.batch(jax.random.key(1))
    for budget in FLAGS.budgets:
        row = {"model": FLAGS.model, "batch": batch, **options, "budget": budget}
        row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        row["commit"] = records.commit()
        try:
            state = jax.tree.map(jnp.copy, train.init(jax.random.key(0)))
            share = budget if budget.endswith("iB") else float(budget)
            step = vmem_jax.jit(train.step, budget=share, donate_argnums=0, tune=True)
            calls, begun = 1, time.perf_counter()
            state, loss = step(state, data)
            row["seconds_of_first_call"] = time.perf_counter() - begun
            while calls < (1 + MOST_RIVALS) * (WARM_UP + TIMED) + 1:
                state, loss = step(state, data)
                calls += 1
            jax.block_until_ready(loss)
            row["seconds"], row["calls"] = time.perf_counter() - begun, calls
            tuning = step.explain(state, data).tuning
            row["plans"] = [*map(said, (tuning.first, *tuning.others))]
            row |= {"kept": tuning.kept.what, "note": tuning.note, "loss": float(loss)}
        except Exception as error:  # a row says so, and the other budgets go on
            row["error"] = f"{type(error).__name__}: {error}"[:600]
        print(json.dumps(row), flush=True)
        records.append(Path(FLAGS.out), [row])


if __name__ == "__main__":
    flags.DEFINE_enum("model", "vit", [*MODELS], "the network")
    flags.DEFINE_list("budgets", "0.5,0.25", "shares of plain's need, or sizes")
    flags.DEFINE_bool("scanned", True, "layers in one scan, or unrolled")
    flags.DEFINE_integer("batch", None, "samples")
    flags.DEFINE_string("out", "tuned.jsonl", "where rows are added")
    app.run(main)
