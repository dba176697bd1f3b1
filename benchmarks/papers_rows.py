"""Runs the rows of the papers' tables that no card has run yet, or not since `auto` changed.

    python benchmarks/papers_rows.py --out=benchmarks/results/papers_h200_l.jsonl --seconds=570
    python benchmarks/papers_rows.py --out=benchmarks/results/papers_h200_l.jsonl --list

All networks run in one process, the most telling first; rows that --out has are not run again, so a
second call goes on where the first ended. Each variant has --limit seconds to be planned, compiled
and warmed up, each network twice the seconds that are expected of it. --list says what is left, and
these seconds. A process that dies loses the network that it was at: call it again with --skip.

Several of these may run at once, each with its own --networks and --out and one --lock=FILE: they
compile together, and each times alone. The memory of all must then be enough for all at once. Where
cuDNN's plans are timed, a network runs alone: others would disturb that.

What a table asks for in general is run by papers.py, and compiled without a card.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from pathlib import Path

import jax
import manifest
import records
import run
from absl import app, flags, logging
from manifest import Case

HERE = Path(__file__).parent
FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is run of a network and dtype, beside plain jit.

    Attributes:
      seconds: expected of all of it on an H200: planning, compiling and timing.
      conv: seconds of these in which cuDNN's plans are timed, where a policy asks for them.
    """

    network: str
    dtype: str
    ways: tuple[str, ...]
    seconds: int
    conv: int = 0

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(manifest.cases_of([self.network], [self.dtype], self.ways))


TABLE_3 = (
    "superneurons?recompute=none@12GiB",
    "superneurons?recompute=none&cache=false@least",
)

ROWS: tuple[Asked, ...] = (
    # AlexNet's largest batch, and steps that fail or failed at another system's lowest peak
    Asked("alexnet:3584", "float32", ("auto@12GiB", "superneurons@12GiB"), 200),
    Asked("vgg16:448", "float32", ("auto@12GiB",), 145, 20),
    Asked("fcn:128", "float32", ("modnn@least", "auto@least:modnn"), 120, 25),
    Asked(
        "vgg16:256", "bfloat16", ("auto@12GiB", "auto@0.35", "auto@least", "ucudnn@12GiB"), 95, 20
    ),
    Asked("vgg16:256", "float32", ("auto@12GiB", "auto@0.35"), 140, 60),
    Asked("inception4:480", "float32", ("auto@12GiB",), 165),
    Asked("resnet152:352", "float32", ("auto@12GiB",), 160),
    # µ-cuDNN where its workspaces decide; at its other missing budgets its step is predicted to need
    # more than the budget without any
    Asked("vgg116:32", "bfloat16", ("ucudnn@12GiB",), 60, 20),
    Asked(
        "densenet40k40:256",
        "float32",
        (
            "ucudnn?optimisation=wr&limit=64MiB@none",
            "ucudnn?optimisation=wr&limit=64MiB&batch_sizes=undivided@none",
            "auto@0.5",
        ),
        250,
        40,
    ),
    Asked("resnet50:768", "float32", ("auto@12GiB",), 115),
    Asked("resnet101:512", "float32", ("auto@12GiB",), 155),
    Asked("vgg116:32", "bfloat16", ("superneurons@least", "auto@least:superneurons"), 130),
    Asked("resnet152:128", "bfloat16", ("auto@0.35", "auto@least"), 270),
    Asked("alexnet:384", "float32", TABLE_3, 57),
    Asked("alexnet:512", "float32", TABLE_3, 59),
    Asked("alexnet:640", "float32", TABLE_3, 60),
    Asked("alexnet:896", "float32", TABLE_3, 149),
    Asked("inception4:240", "float32", ("auto@12GiB",), 152),
    Asked("resnet152:176", "float32", ("auto@12GiB",), 107),
    Asked("resnet101:256", "float32", ("auto@12GiB",), 95),
    Asked("vgg101:128", "float32", ("modnn@least", "auto@least:modnn"), 310),
)
"""In the order in which they tell the most for their seconds."""


def left(out: Path, networks: list[str], skip: list[str]) -> list[Asked]:
    """What of ROWS has no row in `out`.

    Args:
      networks: as vgg16:256, or vgg16:256:float32; all where none is named.
    """
    rows = records.read(out) if out.exists() else []
    there = {(r.model, r.batch, r.dtype, r.variant, r.asked) for r in rows}
    found = []
    names = lambda each: (each.network, f"{each.network}:{each.dtype}")
    wanted = lambda each: not networks or any(name in networks for name in names(each))
    for each in filter(wanted, ROWS):
        lacks = [c.how for c in each.cases if dataclasses.astuple(c) not in there]
        if lacks and each.network not in skip:
            found.append(dataclasses.replace(each, ways=tuple(lacks)))
    return found


def run_one(asked: Asked, out: Path, seconds: float) -> None:
    """Runs `asked` with plain jit for at most so long, and writes its rows behind those of `out`."""
    case = asked.cases[0]
    FLAGS.model, FLAGS.batch, FLAGS.dtype = case.model, case.batch, case.dtype
    FLAGS.precision, FLAGS.learning_rate = case.precision, manifest.LEARNING_RATE
    FLAGS.ways, FLAGS.conv, FLAGS.seconds = ["plain", *asked.ways], float(asked.conv), seconds
    before = records.read(out) if out.exists() else []
    shown = 0
    with jax.default_matmul_precision(case.precision or None):
        for rows in run.measure(time.monotonic()):
            records.write(out, [*before, *rows])
            run.show(rows[shown:], rows[0].need if rows else None)
            shown = len(rows)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    out, began = Path(FLAGS.out), time.monotonic()
    if not FLAGS.known:
        FLAGS.known = [str(path) for path in sorted((HERE / "results").glob("papers_h200_*.jsonl"))]
    end, expected = began + (FLAGS.seconds or 1e9), 0
    for asked in left(out, FLAGS.networks, FLAGS.skip):
        expected += asked.seconds
        print(
            f"{asked.network} {asked.dtype}: {', '.join(asked.ways)}: {asked.seconds} s, "
            f"{expected} s with those before",
            flush=True,
        )
        remaining = end - time.monotonic()
        if FLAGS.list or remaining < asked.seconds / 2:
            continue
        start = time.monotonic()
        try:
            # with others it waits for their turns
            run_one(asked, out, remaining if FLAGS.lock else min(2.0 * asked.seconds, remaining))
        except Exception:  # the others go on
            logging.exception("%s %s", asked.network, asked.dtype)
        gc.collect()
        jax.clear_caches()
        print(f"{asked.network} {asked.dtype}: took {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    flags.DEFINE_bool("list", False, "Say what would be run, and run nothing.")
    flags.DEFINE_list("networks", [], "Only these, as vgg16:256 or vgg16:256:float32.")
    flags.DEFINE_list("skip", [], "Not these networks, as vgg16:256.")
    FLAGS.set_default("rounds", 3)
    FLAGS.set_default("steps", 2)
    FLAGS.set_default("together", 3)
    FLAGS.set_default("limit", 300.0)
    app.run(main)
