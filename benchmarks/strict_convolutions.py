"""How far predictions of steps in strict float32 are from what an H200 measured, without a card.

    python benchmarks/strict_convolutions.py

Takes the newest timed row of plain jit of each network in `results/papers_h200_*.jsonl` whose
precision is "highest", traces that step for the card, and adds up the predicted seconds. Prints a
line a network, the constants of `vmem_jax/core/cuda_cores.py` that least squares finds over all, and
how far those that it finds without a step are from that step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import records
from absl import app
from scipy.optimize import nnls

import vmem_jax
from vmem_jax.core.convolution import Convolution
from vmem_jax.core.cuda_cores import flops_of_3x3, is_transformed
from vmem_jax.models.jobs import job

RESULTS = Path(__file__).parent / "results"

LEFT_OUT = ("resnet6-32-596-6-scan",)
"""Networks that `job` does not have by that name."""

SMALLEST = 250
"""Images of the smallest batch of which both are taken, where a network has several: the largest, and
the smallest from here on or, if none is as large, the largest."""


def main(_: Any) -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    rows, ratios = [], []
    for (network, batch), seconds in measured():
        step = _context(network, batch)
        predicted = sum(step.costs.seconds)
        ratios.append(predicted / seconds)
        rows.append(_terms(step, seconds))
        print(f"{network}({batch}): {1e3 * seconds:.1f} ms, predicted {ratios[-1]:.2f} of it")
    print(f"{min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}")
    terms, rests = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    found, _ = nnls(terms, rests)
    others = [[j for j in range(len(rows)) if j != i] for i in range(len(rows))]
    apart = [1 + terms[i] @ nnls(terms[o], rests[o])[0] - rests[i] for i, o in enumerate(others)]
    print(f"each by the constants of the others: {min(apart):.2f} to {max(apart):.2f}")
    machine = step.machine
    rate = machine.flops[""]
    direct, transformed, passes = 1 / found[0], 1 / found[1], found[2] * machine.bandwidth
    print(f"direct {direct / rate:.2f}, transformed {transformed / rate:.1f}, passes {passes:.1f}")


def measured() -> Iterator[tuple[tuple[str, int], float]]:
    """Networks and batches, and the measured seconds of a step."""
    found: dict[tuple[str, int], float] = {}
    for path in sorted(RESULTS.glob("papers_h200_?.jsonl")):
        for row in records.lines(path):
            strict = row["dtype"] == "float32" and row.get("precision") == "highest"
            if strict and row["variant"] == "plain" and row.get("step_seconds"):
                found[row["model"], row["batch"]] = statistics.median(row["step_seconds"])
    for network in sorted({network for network, _ in found} - {*LEFT_OUT}):
        batches = sorted(batch for name, batch in found if name == network)
        large = [batch for batch in batches if batch >= SMALLEST] or batches[-1:]
        for batch in sorted({large[0], batches[-1]}):
            yield (network, batch), found[network, batch]


def _context(network: str, batch: int) -> Any:
    work = job(network, batch=batch, dtype=jax.numpy.float32)
    step = vmem_jax.jit(work.step, donate_argnums=0, budget=2**50)
    return step.context((work.state_shapes(), work.batch), {}, "h200")


def _terms(step: Any, seconds: float) -> tuple[list[float], float]:
    """Of a step the operations of direct and of transformed convolutions, those of the latter as if
    their kernels were 3 × 3, and the bytes of a pass over what the latter read and write; and the
    seconds that are left for all three. All in parts of the step's seconds."""
    direct, transformed, nbytes, rest = 0.0, 0.0, 0.0, seconds
    for each, predicted in zip(step.traced.captured.program.steps, step.costs.seconds, strict=True):
        c: Convolution | None = each.convolution
        if c is None:
            rest -= predicted
        elif is_transformed(c):
            transformed += flops_of_3x3(c)
            nbytes += c.x_nbytes + c.y_nbytes
        else:
            direct += c.flops
    return [x / seconds for x in (direct, transformed, nbytes)], rest / seconds


if __name__ == "__main__":
    app.run(main)
