"""Times a model's train step: plain jit, jax.checkpoint, and budgets, interleaved in one process.

    python benchmarks/run.py --model=resnet50 --batch=256 --budgets=0.5,0.4 --out=rows.jsonl

Random data, state donated, warmed up, every block of steps waited for. The variants take turns, so
that a drifting clock meets them all; compare the medians. Peaks are the compiler's figures. With
--device=h200 nothing runs: the variants are compiled for a card that need not be there.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import records
import variants
from absl import app, flags, logging
from locks import held
from records import LEAST_OF, Record
from turns import Pace, Turns
from variants import Place, Variant

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.conv.layers import kernels_of
from vmem_jax.conv.timings import profile_on
from vmem_jax.core.cards import TARGETS
from vmem_jax.errors import show_nbytes
from vmem_jax.models import Job, job
from vmem_jax.policy.workspace_reuse import BatchSizes
from vmem_jax.profile.measured import measured_costs

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "vgg16", "Model of vmem_jax.models.")
flags.DEFINE_integer("batch", 256, "Images in a batch.")
flags.DEFINE_integer("image", None, "Pixels in height and width; by default as published.")
flags.DEFINE_integer("tokens", 1024, "Tokens in a sequence, for a model that takes them.")
flags.DEFINE_string("dtype", "bfloat16", "Type of computation and parameters.")
flags.DEFINE_string("optimizer", "sgd", "sgd, momentum or adamw.")
flags.DEFINE_float("learning_rate", 1e-5, "Small, so that random data leaves the loss finite.")
flags.DEFINE_string("precision", "", "JAX's default precision of products; highest for no TF32.")
flags.DEFINE_enum("device", "here", ["here", *TARGETS], "Compile for this card alone, run nothing.")
flags.DEFINE_list(
    "budgets",
    ["0.5"],
    "Fractions of plain jit's need, or sizes such as 12GiB; none for all memory of the device, least "
    "for the lowest that the policy reaches.",
)
flags.DEFINE_list(
    "policies",
    ["auto"],
    "Policies to run under each budget; vdnn?offload=all&algorithms=m with options; "
    "auto:recompute and auto:offload with that technique alone, "
    "auto:recompute+workspace with both, "
    "auto:offload:memory_kinds and auto:offload:ffi by that transport, auto::memory_kinds with all; "
    "auto:offload+compress::0.5 with that --density.",
)
flags.DEFINE_bool(
    "still", False, "Also time each plan of auto that moves something without what it moves."
)
flags.DEFINE_float("profile", 0.0, "Seconds to time the model's steps in first; 0: as is known.")
flags.DEFINE_float(
    "conv", 0.0, "Seconds to time cuDNN's plans for the model's convolutions in first."
)
flags.DEFINE_enum(
    "conv_sizes",
    "powerOfTwo",
    [*BatchSizes],
    'Of their micro-batches; "undivided": none.',
)
flags.DEFINE_float(
    "density", None, "For auto:offload+compress: of what ReLUs leave; else zeros are counted."
)
flags.DEFINE_bool("plain", True, "Also time plain jit.")
flags.DEFINE_integer("plain_need", None, "Bytes that plain jit needs, where it is not run.")
flags.DEFINE_bool("offload", False, "Also time JAX's own offloading of layers' inputs.")
flags.DEFINE_bool("checkpoint", True, "Also time jax.checkpoint per layer or block.")
flags.DEFINE_bool("exact", True, "Also time the exact policy, without a budget below plain's.")
flags.DEFINE_list(
    "ways",
    [],
    "What is timed, in this order, in place of the flags above: plain, checkpoint, offload, or a "
    "policy and its budget, as auto@0.35; auto@least:modnn is in what modnn needs at the least.",
)
flags.DEFINE_list("below_plain", [], "Of --ways: not run where plain jit needs no more.")
flags.DEFINE_list(
    "known",
    [],
    "Files of rows that say what a policy needs at the least, so as not to look for it, and for "
    "auto@least:modnn.",
)
flags.DEFINE_integer("rounds", 7, "Blocks of steps of each variant.")
flags.DEFINE_integer("steps", 4, "Steps in a block.")
flags.DEFINE_integer("together", 0, "Variants that take turns with plain at a time; 0: all.")
flags.DEFINE_float("seconds", 0.0, "End by then with what is timed; 0: when all is.")
flags.DEFINE_float("limit", 0.0, "Seconds for a variant to be planned and compiled; 0: no limit.")
flags.DEFINE_string("lock", "", "File by which several of these compile together and time alone.")
flags.DEFINE_string("out", "", "File for the rows; none by default.")
flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")


def ways_asked() -> list[str]:
    """What is timed, as `--ways` has it."""
    if FLAGS.ways:
        return FLAGS.ways
    found = [name for name in ("plain", *variants.WRAPPED) if FLAGS[name].value]
    found += ["exact@none"] * FLAGS.exact
    return found + [f"{policy}@{asked}" for asked in FLAGS.budgets for policy in FLAGS.policies]


class Steps:
    """The variants of one train step, made when they are asked for."""

    def __init__(self) -> None:
        self.place = Place(None if FLAGS.device == "here" else FLAGS.device, FLAGS.density)
        self.work = self._job(None)
        self.shapes = self.place.shapes(self.work)  # before anything else looks for devices
        self.plain_need: int | None = FLAGS.plain_need
        self.min_peaks: dict[str, int] = {}  # what policies came to here

    def _job(self, wrap: Any) -> Job:
        return job(
            FLAGS.model,
            batch=FLAGS.batch,
            image=FLAGS.image,
            tokens=FLAGS.tokens,
            dtype=FLAGS.dtype,
            optimizer=FLAGS.optimizer,
            learning_rate=FLAGS.learning_rate,
            wrap=wrap,
        )

    def profile(self) -> None:
        """Times what plans are estimated with."""
        jaxpr = jax.jit(self.work.step).trace(*self.shapes).jaxpr
        if FLAGS.profile:
            measured_costs(capture(jaxpr), jax.devices()[0], seconds=FLAGS.profile)
        if FLAGS.conv:
            carrying = any("carry" in way for way in (*FLAGS.policies, *FLAGS.ways))
            kernels = kernels_of(jaxpr, carrying)
            sizes = BatchSizes(FLAGS.conv_sizes)
            found = profile_on(jax.devices()[0], kernels, sizes, FLAGS.conv)
            logging.info(
                "%d algorithms timed in %.1f s, %d known, %d hopeless, %d convolutions not all timed",
                *(found.timed, found.seconds, found.reused, found.hopeless, len(found.untimed)),
            )

    def plain(self) -> Variant:
        made = Variant("plain", None, "", variants.plain(self.work, self.place))
        self.plain_need = made.facts.get("need", self.plain_need)
        return made

    def of(self, way: str) -> list[Variant]:
        """The variant of `way`, and what else is timed of it; none where it says nothing."""
        name, _, asked = way.partition("@")
        if name in variants.WRAPPED:
            return [Variant(name, None, "", variants.plain(self._job(name), self.place))]
        if why := self._unneeded(way, asked):
            logging.info("%s is not run: %s", way, why)
            return []
        need = self.plain_need
        if asked.startswith(LEAST_OF):
            nbytes = self._min_peak_of(asked)
        else:
            nbytes = self.place.budget_nbytes(asked, need, self.shapes)
        known = need and nbytes and asked != "none"
        fraction = round(nbytes / need, 6) if known else None
        build = variants.budgeted(self.work, self.place, name, nbytes, *self._known(name))
        found = [Variant(name, fraction, asked, build)]
        facts: Any = found[0].facts
        if asked == "least" and found[0].outcome == "ok":
            self.min_peaks[name] = facts["need"]
        if FLAGS.still and name.startswith("auto") and facts.get("transfers"):
            made: Any = found[0].run
            build = variants.without_transfers(self.work, made.plan(*self.shapes))
            found.append(Variant(f"{name} without its transfers", fraction, asked, build))
        return found

    @functools.cached_property
    def _rows(self) -> list[Record]:
        """The rows of `--known` that are of this step."""
        about = FLAGS.model, FLAGS.batch, FLAGS.dtype
        rows = itertools.chain.from_iterable(records.read(Path(path)) for path in FLAGS.known)
        return [r for r in rows if (r.model, r.batch, r.dtype) == about]

    def _known(self, policy: str) -> tuple[tuple[int, ...], bool]:
        """(The fewest bytes that rows of `--known` have, whether one looked for them).

        Its own, and those of what it asks where its own plans do not fit; in rising order.
        """
        made = variants.policy_of(policy.partition(":")[0])  # without techniques
        policy_of_it = vmem_jax.POLICIES[made]() if isinstance(made, str) else made
        # one that took too long has none
        rows = [(size, r) for r in self._rows if (size := records.size_of(r))]
        searched = any(r.variant == policy and r.asked == "least" for _, r in rows)
        groups = {policy}, {other.name for other in policy_of_it.instead}
        sizes = [[size for size, r in rows if r.variant in names] for names in groups]
        return tuple(sorted(map(min, filter(None, sizes)))), searched

    def _min_peak_of(self, asked: str) -> int | None:
        """Bytes that the policy of `asked` came to at the least, here or by the rows of `--known`."""
        policy = asked.removeprefix(LEAST_OF)
        return self.min_peaks.get(policy) or records.min_peak_of(self._rows, policy)

    def _unneeded(self, way: str, asked: str) -> str:
        """Why `way` says nothing, beside plain jit; "" where it does."""
        need = self.plain_need
        if asked.startswith(LEAST_OF) and self._min_peak_of(asked) is None:
            return "no row says how much that is"
        is_share = asked[:1].isdigit() and not variants.is_size(asked)
        if need is None and "plain" in ways_asked() and is_share:
            return "it is a share of what plain jit needs, which failed"
        if need is not None and way in FLAGS.below_plain:
            return variants.why_plain_does(asked, need)
        return ""


def measure(began: float) -> Iterator[list[Record]]:
    """The rows of one model, by the flags: all that there are so far, whenever there are more."""
    steps = Steps()
    with held(FLAGS.lock, alone=True):
        steps.profile()
    ways = ways_asked()
    with held(FLAGS.lock, alone=False):
        plain = steps.plain() if "plain" in ways else None
    ways = [way for way in ways if way != "plain"]
    reference, done = [plain] if plain else [], []
    if steps.place.target is not None:
        yield records_of(steps.work, reference + [v for way in ways for v in steps.of(way)])
        return
    paces = FLAGS.rounds, FLAGS.steps, FLAGS.together, FLAGS.seconds, FLAGS.limit, FLAGS.lock
    for some in Turns(steps.work, Pace(*paces), began).heats(plain, ways, steps.of):
        done += records_of(steps.work, some)
        yield records_of(steps.work, reference) + done


def records_of(work: Job, chosen: list[Variant]) -> list[Record]:
    origin = records.origin(FLAGS.commit)
    return [
        Record(
            model=FLAGS.model,
            batch=FLAGS.batch,
            image=work.batch[0].shape[1],
            dtype=FLAGS.dtype,
            optimizer=FLAGS.optimizer,
            precision=FLAGS.precision,
            variant=v.name,
            budget=v.budget,
            asked=v.asked,
            device="" if FLAGS.device == "here" else FLAGS.device,
            outcome=v.outcome,
            step_seconds=tuple(v.seconds),
            plain_seconds=v.plain_seconds,
            compile_seconds=v.compile_seconds,
            loss=v.loss,
            plain_loss=v.plain_loss,
            **origin,
            **v.facts,
        )
        for v in chosen
    ]


def show(rows: list[Record], plain_need: int | None) -> None:
    """A short table: time and peak against plain."""
    for r in rows:
        name = f"{r.model}({r.batch}) {r.variant} {r.asked}"
        if not r.step_seconds:
            need = "" if r.need is None else show_nbytes(r.need)
            print(f"{name:38s} {need:>11s} {r.outcome[:150]}", flush=True)
            continue
        seconds = statistics.median(r.step_seconds)
        ratio = seconds / r.plain_seconds if r.plain_seconds else math.nan
        text = f"{name:38s} {seconds * 1e3:8.2f} ms {ratio:6.3f}  {show_nbytes(r.need or 0):>11s} "
        text += f"{(r.need or 0) / (plain_need or 1):6.3f}  loss {r.loss:.4f}"
        if r.first_need:
            text += (
                f"  predicted/compiled {r.predicted_need / r.first_need:.3f}, {r.compiles} compiles,"
                f" plan {r.plan_seconds:.1f} s, {r.predicted_seconds * 1e3:.1f} ms predicted,"
                f" {r.recomputed} again, {r.transfers} moved ({show_nbytes(r.moved_nbytes or 0)}),"
                f" {r.divided} divided, {r.compressed} compressed"
            )
        print(text, flush=True)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    began = time.monotonic()
    if FLAGS.precision:
        jax.config.update("jax_default_matmul_precision", FLAGS.precision)
    path = Path(FLAGS.out) if FLAGS.out else None
    before = records.read(path) if path and path.exists() else []
    shown = 0
    for rows in measure(began):
        if path:
            records.write(path, [*before, *rows])
            logging.info("%d rows in %s", len(rows), path)
        show(rows[shown:], rows[0].need if rows else None)
        shown = len(rows)


if __name__ == "__main__":
    app.run(main)
