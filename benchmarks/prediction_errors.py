"""How far today's predictions of plain steps are from what was measured on cards, without a card.

    python benchmarks/prediction_errors.py --out=benchmarks/results/prediction_errors.jsonl

Takes the newest timed row of plain jit of each step in `results/training_steps_*.jsonl`, traces that
step for its card, and adds up the predicted seconds, without a profile. Nothing is compiled. A row
has both in milliseconds and their ratio; the last line printed has the median and the largest error.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import records
from absl import app, flags
from step_models import MODELS, UNROLLED

import vmem_jax
from vmem_jax.core.cards import CARDS

FLAGS = flags.FLAGS
RESULTS = Path(__file__).parent / "results"

SHAPE = ("layers", "width", "tokens", "attention", "stacked")
"""Of a network, where a row has other than the model's own."""

PARTS = "accumulate"
"""Of a step that accumulates gradients, how often."""


def newest() -> Iterator[dict[str, Any]]:
    """The last timed row of plain jit of each step on each card, on one device, without a note."""
    found: dict[tuple, dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("training_steps_*.jsonl")):
        for row in records.lines(path):
            noted = "note" in row or row.get("mesh", 1) > 1
            if row["way"] == "plain" and "ms" in row and not noted:
                names = "model", "batch", "scanned", PARTS, *SHAPE
                about = tuple(row.get(name) for name in names)
                found[(row["device"], *about)] = row
    yield from found.values()


def predicted(row: dict[str, Any]) -> float:
    """Milliseconds of the step of `row` by plain jit, as today's code predicts them for its card."""
    options = {name: row[name] for name in SHAPE if row.get(name) is not None}
    if row["model"] not in UNROLLED and not row["scanned"]:
        options["scanned"] = False
    train = MODELS[row["model"]]("plain", row["batch"], **options)
    if PARTS in row:
        assert train.accumulated is not None, "a row has it only where there is such a form"
        train = train.accumulated(row[PARTS])
    args = (
        jax.eval_shape(train.init, jax.random.key(0)),
        jax.eval_shape(train.batch, jax.random.key(1)),
    )
    titles = {card.hardware.title: name for name, card in CARDS.items() if card.hardware}
    step = vmem_jax.jit(train.step, budget=1.0, donate_argnums=0)
    return 1e3 * sum(step.context(args, {}, titles[row["device"]]).plain_costs.seconds)


def main(_: Any) -> None:
    rows = []
    for measured in newest():
        row = {name: measured[name] for name in ("model", "batch", "scanned", "device")}
        shape = (name for name in (PARTS, *SHAPE) if measured.get(name) is not None)
        row |= {name: measured[name] for name in shape}
        row |= {"ms": measured["ms"], "predicted_ms": predicted(measured)}
        row |= {"ratio": row["predicted_ms"] / row["ms"], "measured_at": measured["commit"]}
        row["commit"] = records.commit()
        rows.append(row)
        print(json.dumps(row), flush=True)
    Path(FLAGS.out).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for device in dict.fromkeys(row["device"] for row in rows):
        errors = [abs(row["ratio"] - 1) for row in rows if row["device"] == device]
        print(f"{device}: median {statistics.median(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    flags.DEFINE_string("out", "prediction_errors.jsonl", "file that is written")
    app.run(main)
