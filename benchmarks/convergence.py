"""Whether steps with other kernels and orders of sums learn as plain jit's do, on real data.

    python benchmarks/convergence.py --out=rows.jsonl
    python benchmarks/convergence.py --model=resnet50 --image=64 --batch=256 --out=rows.jsonl

Each way trains on scikit-learn's handwritten digits for `--steps` steps from `--seeds` seeds, which
draw parameters and batches; the same seeds for every way. A row is one way and seed: the mean loss of
each `--window` steps, and accuracy on the test images. The last row is the comparison: how far the
mean curve of each way is from plain's, and how far plain's own seeds are from their mean, both as the
largest over the windows.

A way is "plain", or words between "+": a budget as a fraction ("0.5") or "exact", then techniques
that `allow` names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import records
from absl import app, flags

import vmem_jax
from vmem_jax.models import Job, batches, digits, job

FLAGS = flags.FLAGS
Curve = list[float]


def main(_: Any) -> None:
    work = job(
        FLAGS.model,
        batch=FLAGS.batch,
        image=FLAGS.image,
        classes=10,
        dtype=FLAGS.dtype,
        optimizer=FLAGS.optimizer,
    )
    curves: dict[str, list[Curve]] = {}
    for way in FLAGS.ways:
        step, plan = step_of(way, work)
        for seed in range(FLAGS.seeds):
            losses, accuracy = trained(work, step, seed, FLAGS.steps)
            curve = windows(losses, FLAGS.window)
            curves.setdefault(way, []).append(curve)
            _write(work, {"way": way, "seed": seed, "losses": curve, "accuracy": accuracy, **plan})
    _write(work, {"way": "comparison", "spread": spread(curves["plain"]), **apart(curves)})


def step_of(way: str, work: Job) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The step of `way`, and what its row says of the plan."""
    if way == "plain":
        return jax.jit(work.step, donate_argnums=0), {}
    asked, *allow = way.split("+")
    options: dict[str, Any] = {"allow": tuple(allow)} if allow else {}
    exact = {"policy": "exact", "budget": 1.0}
    options |= exact if asked == "exact" else {"budget": float(asked)}
    step = vmem_jax.jit(work.step, donate_argnums=0, **options)
    found = step.explain(work.state_shapes(), work.batch)
    return step, {"plan": str(found.plan), "carried": len(found.plan.carried)}


def trained(
    work: Job, step: Callable[..., Any], seed: int, steps: int
) -> tuple[list[float], float]:
    """(the loss of every step, the share of test images that is right at the end)."""
    data = digits(FLAGS.image)
    state = jax.jit(work.init)(jax.random.key(seed))
    feed = batches(data.train_images, data.train_labels, FLAGS.batch, seed)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, next(feed))
        losses.append(metrics["loss"])
    test = data.test_images[: FLAGS.batch], data.test_labels[: FLAGS.batch]
    accuracy = jax.jit(work.evaluate)(state, test)["accuracy"]
    return [float(loss) for loss in losses], float(accuracy)


def windows(losses: Sequence[float], window: int) -> Curve:
    """The means of `window` losses each, from the first on."""
    return [float(np.mean(losses[i : i + window])) for i in range(0, len(losses), window)]


def spread(curves: Sequence[Curve]) -> float:
    """How far one of the curves is from their mean, at the most."""
    return float(np.abs(np.asarray(curves) - np.mean(curves, axis=0)).max())


def apart(curves: Mapping[str, Sequence[Curve]]) -> dict[str, float]:
    """Way -> how far its mean curve is from plain's, at the most."""
    plain = np.mean(curves["plain"], axis=0)
    others = (way for way in curves if way != "plain")
    return {way: float(np.abs(np.mean(curves[way], axis=0) - plain).max()) for way in others}


def _write(work: Job, row: dict[str, Any]) -> None:
    row |= {"model": work.name, "dtype": FLAGS.dtype, "optimizer": FLAGS.optimizer}
    row |= {"image": FLAGS.image, "steps": FLAGS.steps, "window": FLAGS.window}
    row |= {"machine": records.machine(), "versions": records.versions()}
    row["commit"] = FLAGS.commit or records.commit()
    print({name: value for name, value in row.items() if name != "losses"}, flush=True)
    with open(FLAGS.out, "a") as out:
        out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    flags.DEFINE_string("model", "resnet11", "a network of vmem_jax.models")
    flags.DEFINE_integer("batch", 64, "images in a batch")
    flags.DEFINE_integer("image", 16, "pixels of an image's side")
    flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float16", "float32"], "of the network")
    flags.DEFINE_string("optimizer", "momentum", "sgd, momentum or adamw")
    flags.DEFINE_list(
        "ways", ["plain", "0.5", "exact+order+carry"], "what is compared; plain first"
    )
    flags.DEFINE_integer("steps", 500, "of each run")
    flags.DEFINE_integer("seeds", 3, "of each way")
    flags.DEFINE_integer("window", 25, "steps whose mean loss is one point")
    flags.DEFINE_string("commit", "", "where the checkout has no history")
    flags.DEFINE_string("out", "convergence.jsonl", "where rows are added")
    app.run(main)
