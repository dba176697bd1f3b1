"""Finds the largest batch that trains within a budget: by a bisection of batches that are compiled.

    python benchmarks/largest.py --networks=alexnet,vgg16 --device=h200 --out=rows.jsonl

Each batch is proved in its own process, by the compiler's figures, with a time limit; a batch that
passes it counts as one that does not fit, and its row says so. Every probe is a row, so the same
command goes on where it was stopped. The bisection starts from twice the batch that the paper has
(SuperNeurons, Table 5) and ends when what fits and what does not are within --close of each other.
"""

from __future__ import annotations

from pathlib import Path

import jax
import manifest
import papers
import records
from absl import app, flags
from manifest import Case
from records import Record

from vmem_jax.errors import parse_size, show_nbytes

FLAGS = flags.FLAGS


def published() -> dict[str, int]:
    """The batch that the paper reaches with each network."""
    figures = manifest.load("superneurons_table5").published
    return {f.of: int(f.value) for f in figures if f.how == "superneurons"}


def next_batch(fits: int, fails: int | None, start: int, grain: int, close: float) -> int | None:
    """The batch to try next, a multiple of `grain`; None where the largest is known.

    Args:
      fits: the largest that is known to fit, 0 if none is.
      fails: the smallest that is known not to, None if none is.
      start: the batch to begin with.
      close: the share of `fits` up to which nothing nearer is asked for.
    """
    if fails is None:
        return max(2 * fits, start)
    if fits and fails - fits <= max(close * fits, grain):
        return None
    middle = (fits + fails) // 2 // grain * grain
    return middle if middle > fits else None


def known(rows: dict[Case, Record], like: Case, budget: int) -> tuple[int, int | None]:
    """(The largest batch that fits, the smallest that does not) of the rows of `like`."""
    same = [
        (case.batch, row)
        for case, row in rows.items()
        if (case.model, case.dtype, case.how) == (like.model, like.dtype, like.how)
    ]
    fits = max((b for b, row in same if is_within(row, budget)), default=0)
    fails = [b for b, row in same if not is_within(row, budget) and b > fits]
    return fits, min(fails, default=None)


def is_within(row: Record, budget: int) -> bool:
    return row.outcome == "ok" and row.need is not None and row.need <= budget


def find(like: Case, start: int, budget: int, rows: dict[Case, Record], out: Path) -> int:
    """The largest batch of `like` within `budget` bytes, as near as it is asked for."""
    while True:
        fits, fails = known(rows, like, budget)
        batch = next_batch(fits, fails, start, FLAGS.grain, FLAGS.close)
        if batch is None:
            return fits
        case = Case(like.model, batch, like.dtype, like.variant, like.asked)
        row = rows[case] = papers.run(case, None)
        records.write(out, rows.values())
        need = show_nbytes(row.need) if row.need is not None else ""
        print(f"{case.network} {case.dtype} {case.how}: {need} {row.outcome[:160]}", flush=True)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    jax.config.update("jax_platforms", "cpu")  # of this process: the card is for those that run
    out, papers_batch = Path(FLAGS.out), published()
    rows = papers.read(out)
    budget = parse_size(FLAGS.budget, "--budget")
    for model in FLAGS.networks or papers_batch:
        for way in FLAGS.ways:
            asked = "" if way == "plain" else FLAGS.budget
            like = Case(model, 0, FLAGS.dtype, way, asked)
            start = 2 * papers_batch.get(model, FLAGS.grain)
            found, theirs = find(like, start, budget, rows, out), papers_batch.get(model)
            print(f"{model} {like.how}: {found} images, the paper's {theirs}", flush=True)


if __name__ == "__main__":
    papers.define_flags()
    FLAGS["networks"].help = "Models, as vgg16; by default those of the paper."
    FLAGS["ways"].help = "Policies with their options, or plain."
    FLAGS.set_default("ways", ["auto:recompute+offload", "superneurons", "plain"])
    flags.DEFINE_string("budget", "12GiB", "What is to hold the step.")
    flags.DEFINE_string("dtype", "float32", "Type of computation and parameters.")
    flags.DEFINE_integer("grain", 16, "Batches are multiples of this.")
    flags.DEFINE_float("close", 0.1, "Share of a batch up to which no larger one is looked for.")
    app.run(main)
