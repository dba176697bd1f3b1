"""How far the gradients of a first step are from those in float32, by plain jit and by vmem_jax.

    python benchmarks/gradients.py --dtype=float16 --ways=plain,1.0,1.0+order+recompute,0.5

ResNet-50 on scikit-learn's handwritten digits at 64 pixels, as in `convergence.py`, whose ways these
are. Float32 has the same parameters and no TF32. A row is one way: the relative distance |g - g32| /
|g32| of the gradients to a parameter, its median and largest over the parameters, and of the running
statistics; the median and least cosine of the angle between both gradients; and the loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import records
from absl import app, flags
from convergence import step_of

from vmem_jax.models import batches, digits, job

FLAGS = flags.FLAGS


def main(_: Any) -> None:
    make = lambda dtype: job(
        FLAGS.model,
        batch=FLAGS.batch,
        image=FLAGS.image,
        classes=10,
        dtype=dtype,
        optimizer="momentum",
    )
    work, exact, data = make(FLAGS.dtype), make("float32"), digits(FLAGS.image)
    batch = next(batches(data.train_images, data.train_labels, FLAGS.batch, FLAGS.seed))
    state = lambda: jax.jit(work.init)(jax.random.key(FLAGS.seed))
    wide = jax.tree.map(lambda like, a: jnp.asarray(a, like.dtype), exact.state_shapes(), state())
    with jax.default_matmul_precision("highest"):
        right = first_step(jax.jit(exact.step), wide, batch)
    for way in FLAGS.ways:
        step, plan = step_of(way, work)
        row = {"way": way, "dtype": FLAGS.dtype, **apart(first_step(step, state(), batch), right)}
        row |= {"float32_loss": right[2], **plan, "model": FLAGS.model, "batch": FLAGS.batch}
        row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        row["commit"] = records.commit()
        print(json.dumps(row), flush=True)
        records.append(Path(FLAGS.out), [row])


Leaves = list[np.ndarray]


def first_step(step: Callable[..., Any], state: Any, batch: Any) -> tuple[Leaves, Leaves, float]:
    """The gradients, which are the momentum after one step; the running statistics; the loss."""
    after, metrics = step(state, batch)
    wide = lambda tree: [np.asarray(a, np.float64) for a in jax.tree.leaves(jax.device_get(tree))]
    return wide(after.opt_state[0].trace), wide(after.batch_stats), float(metrics["loss"])


def apart(
    found: tuple[Leaves, Leaves, float], right: tuple[Leaves, Leaves, float]
) -> dict[str, float]:
    norm = np.linalg.norm
    distances = lambda at: [
        float(norm(a - b) / norm(b)) for a, b in zip(found[at], right[at], strict=True)
    ]
    gradients, statistics = distances(0), distances(1)
    cosines = [
        float((a * b).sum() / norm(a) / norm(b)) for a, b in zip(found[0], right[0], strict=True)
    ]
    return {
        "median": float(np.median(gradients)),
        "most": max(gradients),
        "cosine": float(np.median(cosines)),
        "least_cosine": min(cosines),
        "statistics": float(np.median(statistics)),
        "statistics_most": max(statistics),
        "loss": found[2],
    }


if __name__ == "__main__":
    flags.DEFINE_integer("seed", 0, "of the parameters and the batch")
    flags.DEFINE_string("model", "resnet50", "a network of vmem_jax.models")
    flags.DEFINE_integer("batch", 256, "images in a batch")
    flags.DEFINE_integer("image", 64, "pixels of an image's side")
    flags.DEFINE_enum("dtype", "float16", ["bfloat16", "float16"], "of the network")
    flags.DEFINE_list("ways", ["plain", "1.0", "1.0+order+recompute"], "what is compared")
    flags.DEFINE_string("out", "gradients.jsonl", "where rows are added")
    app.run(main)
