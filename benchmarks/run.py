"""Times a model's train step: plain jit, jax.checkpoint, and budgets, interleaved in one process.

    python benchmarks/run.py --model=resnet50 --batch=256 --budgets=0.5,0.4 --out=rows.jsonl

Random data, state donated, warmed up, every block of steps waited for. The variants take turns, so
that a drifting clock meets them all; compare the medians. Peaks are the compiler's figures. With
--device=h200 nothing runs: the variants are compiled for a card that need not be there.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import jax
import records
import variants
from absl import app, flags, logging
from records import Record
from variants import Place, Variant

from vmem_jax.capture import capture
from vmem_jax.conv.known import profile_on
from vmem_jax.conv.layers import kernels_of
from vmem_jax.errors import show_nbytes
from vmem_jax.models import Job, job
from vmem_jax.profile.measured import measured_costs
from vmem_jax.prove.targets import TARGETS

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
    "auto:recompute and auto:offload with that means alone, "
    "auto:recompute+workspace with both, "
    "auto:offload:memory_kinds and auto:offload:ffi by that transport, auto::memory_kinds with all.",
)
flags.DEFINE_bool(
    "still", False, "Also time each plan of auto that moves something without what it moves."
)
flags.DEFINE_float("profile", 0.0, "Seconds to time the model's steps in first; 0: as is known.")
flags.DEFINE_float(
    "conv", 0.0, "Seconds to time cuDNN's plans for the model's convolutions in first."
)
flags.DEFINE_float(
    "density", None, "For auto:offload+compress: of what ReLUs leave; else zeros are counted."
)
flags.DEFINE_bool("plain", True, "Also time plain jit.")
flags.DEFINE_integer("plain_need", None, "Bytes that plain jit needs, where it is not run.")
flags.DEFINE_bool("offload", False, "Also time JAX's own offloading of layers' inputs.")
flags.DEFINE_bool("checkpoint", True, "Also time jax.checkpoint per layer or block.")
flags.DEFINE_bool("exact", True, "Also time the exact policy, without a budget below plain's.")
flags.DEFINE_integer("rounds", 7, "Blocks of steps of each variant.")
flags.DEFINE_integer("steps", 4, "Steps in a block.")
flags.DEFINE_string("out", "", "File for the rows; none by default.")
flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")


def measure() -> list[Record]:
    """The rows of one model, by the flags."""
    make = lambda wrap: job(
        FLAGS.model,
        batch=FLAGS.batch,
        image=FLAGS.image,
        tokens=FLAGS.tokens,
        dtype=FLAGS.dtype,
        optimizer=FLAGS.optimizer,
        learning_rate=FLAGS.learning_rate,
        wrap=wrap,
    )
    place = Place(None if FLAGS.device == "here" else FLAGS.device, FLAGS.density)
    work = make(None)
    shapes = place.shapes(work)  # before anything else looks for devices
    jaxpr = jax.jit(work.step).trace(*shapes).jaxpr
    if FLAGS.profile:
        measured_costs(capture(jaxpr), jax.devices()[0], seconds=FLAGS.profile)
    if FLAGS.conv:
        found = profile_on(jax.devices()[0], kernels_of(jaxpr), deadline=FLAGS.conv)
        logging.info(
            "%d ways timed in %.1f s, %d known, %d hopeless, %d convolutions not timed in full",
            *(found.timed, found.seconds, found.reused, found.hopeless, len(found.untimed)),
        )
    chosen: list[Variant] = []
    add = lambda name, budget, asked, build: chosen.append(Variant(name, budget, asked, build))
    plain_need = FLAGS.plain_need
    if FLAGS.plain:
        add("plain", None, "", variants.plain(work, place))
        plain_need = chosen[0].facts.get("need", plain_need)
    for wrap in variants.WRAPPED:
        if FLAGS[wrap].value:
            add(wrap, None, "", variants.plain(make(wrap), place))
    if FLAGS.exact:
        build = variants.budgeted(work, place, "exact", place.all_nbytes(shapes))
        add("exact", None, "none", build)
    for asked in FLAGS.budgets:
        nbytes = place.budget_nbytes(asked, plain_need, shapes)
        known = plain_need and nbytes and asked != "none"
        fraction = round(nbytes / plain_need, 6) if known else None
        for policy in FLAGS.policies:
            add(policy, fraction, asked, variants.budgeted(work, place, policy, nbytes))
            facts: Any = chosen[-1].facts
            made: Any = chosen[-1].run
            if FLAGS.still and policy.startswith("auto") and facts.get("transfers"):
                build = variants.without_transfers(work, made.plan(*shapes))
                add(f"{policy} without its transfers", fraction, asked, build)
    if place.target is None:
        take_turns(work, chosen)
    return records_of(work, chosen)


def take_turns(work: Job, chosen: list[Variant]) -> None:
    """Runs the blocks of all variants, each on its own state."""
    batch = jax.block_until_ready(jax.jit(work.random_batch)(jax.random.key(1)))
    init = jax.jit(work.init)
    for variant in chosen:
        if variant.run is not None:
            variant.state = jax.block_until_ready(init(jax.random.key(0)))
            variant.time(batch, 2, keep=False)
    for _ in range(FLAGS.rounds):
        for variant in chosen:
            variant.time(batch, FLAGS.steps, keep=True)


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
            compile_seconds=v.compile_seconds,
            loss=v.loss,
            **origin,
            **v.facts,
        )
        for v in chosen
    ]


def show(rows: list[Record]) -> None:
    """A short table: time and peak against plain."""
    plain = rows[0]
    for r in rows:
        name = f"{r.model}({r.batch}) {r.variant} {r.asked}"
        if not r.step_seconds or not plain.step_seconds:
            need = "" if r.need is None else show_nbytes(r.need)
            print(f"{name:38s} {need:>11s} {r.outcome[:150]}")
            continue
        seconds = statistics.median(r.step_seconds)
        ratio = seconds / statistics.median(plain.step_seconds)
        text = f"{name:38s} {seconds * 1e3:8.2f} ms {ratio:6.3f}  {show_nbytes(r.need or 0):>11s} "
        text += f"{(r.need or 0) / (plain.need or 1):6.3f}  loss {r.loss:.4f}"
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
    if FLAGS.precision:
        jax.config.update("jax_default_matmul_precision", FLAGS.precision)
    rows = measure()
    show(rows)
    if FLAGS.out:
        path = Path(FLAGS.out)
        before = records.read(path) if path.exists() else []
        records.write(path, [*before, *rows])
        logging.info("%d rows in %s", len(rows), path)


if __name__ == "__main__":
    app.run(main)
