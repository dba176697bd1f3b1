"""Times a model's train step: plain jit, jax.checkpoint, and budgets, interleaved in one process.

    python benchmarks/run.py --model=resnet50 --batch=256 --budgets=0.5,0.4 --out=rows.jsonl

Random data, state donated, warmed up, every block of steps waited for. The variants take turns, so
that a drifting clock meets them all; compare the medians. Peaks are the compiler's figures.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import records
from absl import app, flags, logging
from records import Record

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.conv.known import profile_on
from vmem_jax.conv.layers import kernels_of
from vmem_jax.errors import parse_size, show_nbytes
from vmem_jax.models import job
from vmem_jax.profile.measured import measured_costs
from vmem_jax.prove.prove import need_nbytes

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "vgg16", "Model of vmem_jax.models.")
flags.DEFINE_integer("batch", 256, "Images in a batch.")
flags.DEFINE_integer("image", None, "Pixels in height and width; by default as published.")
flags.DEFINE_integer("tokens", 1024, "Tokens in a sequence, for a model that takes them.")
flags.DEFINE_string("dtype", "bfloat16", "Type of computation and parameters.")
flags.DEFINE_string("optimizer", "sgd", "sgd, momentum or adamw.")
flags.DEFINE_float("learning_rate", 1e-5, "Small, so that random data leaves the loss finite.")
flags.DEFINE_string("precision", "", "JAX's default precision of products; highest for no TF32.")
flags.DEFINE_list("budgets", ["0.5"], "Fractions of plain jit's need, or sizes such as 12GiB.")
flags.DEFINE_list(
    "policies",
    ["auto"],
    "Policies to run under each budget; auto:recompute and auto:offload with that means alone, "
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
flags.DEFINE_bool("checkpoint", True, "Also time jax.checkpoint per layer or block.")
flags.DEFINE_bool("exact", True, "Also time the exact policy, without a budget below plain's.")
flags.DEFINE_integer("rounds", 7, "Blocks of steps of each variant.")
flags.DEFINE_integer("steps", 4, "Steps in a block.")
flags.DEFINE_string("out", "", "File for the rows; none by default.")
flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")


class Variant:
    """One way to run the step: compiled, with its own state."""

    def __init__(self, name: str, budget: float | None, build: Callable[[], Any]) -> None:
        self.name, self.budget = name, budget
        self.facts: dict[str, Any] = {}
        self.seconds: list[float] = []
        self.outcome = "ok"
        self.run: Callable | None = None
        start = time.perf_counter()
        try:
            self.run, self.facts = build()
        except vmem_jax.BudgetError as error:
            self.outcome = f"BudgetError: {error}"
        except jax.errors.JaxRuntimeError as error:
            self.outcome = f"{type(error).__name__}: {str(error)[:300]}"
        self.compile_seconds = time.perf_counter() - start
        self.state: Any = None
        self.loss: float | None = None

    def time(self, batch: Any, steps: int, keep: bool) -> None:
        """Runs one block of steps; a device that runs out of memory ends the variant."""
        if self.run is None:
            return
        try:
            start = time.perf_counter()
            for _ in range(steps):
                self.state, metrics = self.run(self.state, batch)
            jax.block_until_ready((self.state, metrics))
        except jax.errors.JaxRuntimeError as error:
            self.outcome = f"{type(error).__name__}: {str(error)[:300]}"
            self.run = self.state = None
            return
        if keep:
            self.seconds.append((time.perf_counter() - start) / steps)
        self.loss = float(metrics["loss"])


def _plain(step: Callable, shapes: tuple) -> Callable[[], Any]:
    def build() -> tuple[Callable, dict]:
        compiled = jax.jit(step, donate_argnums=0).lower(*shapes).compile()
        return compiled, {"need": need_nbytes(compiled), "compiles": 1}

    return build


def _budgeted(step: Callable, shapes: tuple, policy: str, nbytes: int) -> Callable[[], Any]:
    def build() -> tuple[Callable, dict]:
        name, means, transport, *_ = [*policy.split(":"), "", ""]
        budgeted = vmem_jax.jit(
            step,
            budget=nbytes,
            policy=name,
            allow=("order", *means.split("+")) if means else None,
            transport=transport or "auto",
            donate_argnums=0,
        )
        compiled = budgeted.lower(*shapes).compile()
        attempts = sorted(compiled.attempts, key=lambda a: -(a.plan.budget or 0))
        return budgeted, {
            "need": compiled.need_nbytes,
            "predicted_need": attempts[0].plan.predicted_peak,
            "first_need": attempts[0].need,
            "compiles": len(attempts),
            "recomputed": len(compiled.plan.recomputed),
            "divided": len(compiled.plan.divided),
            "transfers": len(compiled.plan.transfers),
            "moved_nbytes": compiled.moved_nbytes,
            "predicted_seconds": compiled.plan.predicted_seconds,
            "plan_seconds": sum(a.plan_seconds for a in attempts),
        }

    return build


def _without_transfers(step: Callable, plan: vmem_jax.Plan) -> Callable[[], Any]:
    """The same plan with everything left on the device: what its transfers cost."""
    still = dataclasses.replace(plan, transfers=(), budget=None)
    return lambda: (vmem_jax.jit(step, plan=still, donate_argnums=0), {})


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
    work = make(None)
    shapes = (work.state_shapes(), work.batch)
    jaxpr = jax.jit(work.step).trace(*shapes).jaxpr
    if FLAGS.profile:
        measured_costs(capture(jaxpr), jax.devices()[0], seconds=FLAGS.profile)
    if FLAGS.conv:
        found = profile_on(jax.devices()[0], kernels_of(jaxpr), deadline=FLAGS.conv)
        logging.info(
            "%d ways timed in %.1f s, %d known, %d hopeless, %d convolutions not timed in full",
            *(found.timed, found.seconds, found.reused, found.hopeless, len(found.untimed)),
        )
    variants = [Variant("plain", None, _plain(work.step, shapes))]
    plain_need = variants[0].facts["need"]
    if FLAGS.checkpoint:
        variants.append(Variant("checkpoint", None, _plain(make("checkpoint").step, shapes)))
    if FLAGS.exact:
        variants.append(
            Variant("exact", None, _budgeted(work.step, shapes, "exact", 2 * plain_need))
        )
    for budget in FLAGS.budgets:
        try:
            fraction = float(budget)
        except ValueError:
            fraction = parse_size(budget, "--budgets") / plain_need
        nbytes = int(fraction * plain_need)
        for policy in FLAGS.policies:
            build = _budgeted(work.step, shapes, policy, nbytes)
            variants.append(Variant(policy, fraction, build))
            facts: Any = variants[-1].facts
            made: Any = variants[-1].run
            if FLAGS.still and policy.startswith("auto") and facts.get("transfers"):
                build = _without_transfers(work.step, made.plan(*shapes))
                variants.append(Variant(f"{policy} without its transfers", fraction, build))

    batch = jax.block_until_ready(jax.jit(work.random_batch)(jax.random.key(1)))
    init = jax.jit(work.init)
    for variant in variants:
        if variant.run is not None:
            variant.state = jax.block_until_ready(init(jax.random.key(0)))
            variant.time(batch, 2, keep=False)
    for _ in range(FLAGS.rounds):
        for variant in variants:
            variant.time(batch, FLAGS.steps, keep=True)
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
            outcome=v.outcome,
            step_seconds=tuple(v.seconds),
            compile_seconds=v.compile_seconds,
            loss=v.loss,
            machine=records.machine(),
            versions=records.versions(),
            commit=FLAGS.commit or records.commit(),
            **v.facts,
        )
        for v in variants
    ]


def show(rows: list[Record]) -> None:
    """A short table: time and peak against plain."""
    plain = rows[0]
    for r in rows:
        name = f"{r.model}({r.batch}) {r.variant} {r.budget if r.budget is not None else ''}"
        if not r.step_seconds or not plain.step_seconds:
            print(f"{name:38s} {r.outcome[:150]}")
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
                f" {r.divided} divided"
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
