"""Transformers whose layers are unrolled: plain jit, what is picked by hand, and budgets, in turns.

    python benchmarks/transformers.py --model=decoder16 --budgets=@dots,@checkpoint,20GiB
    python benchmarks/transformers.py --model=vit24w1024 --batch=256 --budgets=@dots,0.5,0.25
    python benchmarks/transformers.py --model=gpt24w1024 --batch=8 --tokens=1024 --budgets=@dots,0.25

The budget `@dots` is what the wrapping `dots` compiles to. All variants run in one process and take
turns, block by block, on one donated state. A row (--out) has the median, the least and the most
milliseconds of a step over the blocks of a variant, what the compiler says it needs, and what was
predicted. With --traces=DIRECTORY two steps of each variant run under JAX's profiler: DIRECTORY gets
the microseconds of each kernel by its instruction, and the instructions, of each variant. With
--device=h200 nothing runs: the variants are compiled for a card that need not be there.
"""

from __future__ import annotations

import json
import pathlib
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

import vmem_jax
from vmem_jax.core.cards import TARGETS
from vmem_jax.devices.targets import target
from vmem_jax.models import job
from vmem_jax.models.decoder import Decoder, train_step
from vmem_jax.search.search import need_nbytes

FLAGS = flags.FLAGS

_TRACED = 2
"""Steps under the profiler."""

_POLICIES = jax.checkpoint_policies
_WRAPS: dict[str, Callable[[Callable], Callable]] = {
    "plain": lambda layer: layer,
    "checkpoint": jax.checkpoint,
    "dots": lambda layer: jax.checkpoint(layer, policy=_POLICIES.dots_with_no_batch_dims_saveable),
    "every_dot": lambda layer: jax.checkpoint(layer, policy=_POLICIES.dots_saveable),
}


def work(variant: str) -> tuple[Callable, Callable, Callable]:
    """(step, key -> state, key -> batch) of the model, its layers wrapped as `variant` says."""
    name, batch, tokens = FLAGS.model, FLAGS.batch, FLAGS.tokens
    if decoder := re.fullmatch(r"decoder(\d+)", name):
        model = Decoder(
            layers=int(decoder[1]),
            attention=FLAGS.attention,
            scanned=False,
            wrap=_WRAPS.get(variant, _WRAPS["plain"]),
        )
        optimiser = optax.adamw(1e-4)

        def start(key: jax.Array) -> Any:
            params = model.init(key)
            return params, optimiser.init(params)

        def inputs(key: jax.Array) -> jax.Array:
            return jax.random.randint(key, (batch, tokens + 1), 0, model.vocabulary, jnp.int32)

        return train_step(model, optimiser), start, inputs
    wrap: Any = variant if variant in _WRAPS and variant != "plain" else None
    types = {"dtype": "bfloat16", "param_dtype": "float32"}
    made = job(
        name, batch=batch, tokens=tokens, optimizer="adamw", learning_rate=1e-4, wrap=wrap, **types
    )
    return made.step, made.init, made.random_batch


def main(_: Any) -> None:
    card = None if FLAGS.device == "here" else FLAGS.device
    _, start, inputs = work("plain")
    state = jax.eval_shape(start, jax.random.key(0))
    batch = jax.eval_shape(inputs, jax.random.key(1))
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Any] = {}
    for variant in (*FLAGS.hand, *FLAGS.budgets):
        begun = time.perf_counter()
        row = rows[variant] = {"variant": variant, **how_of_run()}
        try:
            steps[variant], facts = compiled(variant, rows, state, batch, card)
            row |= facts
        except Exception as error:  # a row says so, and the other variants go on
            row["error"] = f"{type(error).__name__}: {error}"[:600]
        row["seconds_to_compile"] = time.perf_counter() - begun
        print(json.dumps(row), flush=True)
    if card is None:
        in_turns(rows, steps, jax.jit(start), inputs(jax.random.key(1)))
    with open(FLAGS.out, "a") as out:
        for row in rows.values():
            out.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def compiled(
    variant: str, rows: dict[str, dict[str, Any]], state: Any, batch: Any, card: str | None
) -> tuple[Any, dict[str, Any]]:
    """(the compiled step of `variant`, what its row says of it)."""
    step, _, _ = work(variant)
    if variant in _WRAPS:
        if card is not None:
            on = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=target(card).sharding())
            state, batch = jax.tree.map(on, (state, batch))
        made = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
        return made, {"gib": need_nbytes(made) / 2**30}
    budget: Any = variant
    if variant.startswith("@"):
        budget = round(rows[variant[1:]]["gib"] * 2**30)
    elif re.fullmatch(r"[\d.]+", variant):
        budget = float(variant)
    made = vmem_jax.jit(step, budget=budget, donate_argnums=0, profile=FLAGS.profile)
    made = made.lower(state, batch).compile(target=card)
    last = made.attempts[-1]
    return made, {
        "gib": made.need_nbytes / 2**30,
        "predicted_ms": 1e3 * made.plan.predicted_seconds,
        "predicted_plain_ms": 1e3 * sum(last.costs.seconds),
        "predicted_gib": last.predicted_need / 2**30,
        "compiles": len(made.attempts),
        "plan": str(made.plan),
    }


def how_of_run() -> dict[str, Any]:
    return {
        "model": FLAGS.model,
        "batch": FLAGS.batch,
        "tokens": FLAGS.tokens,
        "attention": FLAGS.attention,
        "profile": FLAGS.profile,
        "device": jax.devices()[0].device_kind if FLAGS.device == "here" else FLAGS.device,
        "jax": jax.__version__,
    }


def in_turns(
    rows: dict[str, dict[str, Any]], steps: dict[str, Any], start: Callable, batch: Any
) -> None:
    """Adds to the row of each variant what its step takes, and the loss of the second step."""
    state = None
    for variant in [*steps]:
        del state
        state = start(jax.random.key(0))
        try:
            for _ in range(2):  # the first loads kernels
                state, metrics = steps[variant](state, batch)
            rows[variant]["loss"] = float(jax.tree.leaves(metrics)[-1])
            if FLAGS.traces:
                state = traced(variant, steps[variant], state, batch)
        except Exception as error:
            rows[variant]["error"] = f"{type(error).__name__}: {error}"[:600]
            del steps[variant]
            state = None
    state = start(jax.random.key(0)) if state is None else state
    blocks: dict[str, list[float]] = {variant: [] for variant in steps}
    for _ in range(FLAGS.rounds):
        for variant, step in steps.items():
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            begun = time.perf_counter()
            for _ in range(FLAGS.steps):
                state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            blocks[variant].append(1e3 * (time.perf_counter() - begun) / FLAGS.steps)
    for variant, ms in blocks.items():
        if ms:
            rows[variant] |= {"ms": statistics.median(ms), "ms_range": [min(ms), max(ms)]}
            if "plain" in blocks:
                rows[variant]["of_plain"] = rows[variant]["ms"] / statistics.median(blocks["plain"])


def traced(variant: str, step: Any, state: Any, batch: Any) -> Any:
    """Writes the instructions of a variant, and the seconds of each kernel in two steps; returns the
    state after them."""
    path = pathlib.Path(FLAGS.traces) / f"{FLAGS.model}_{variant.replace('@', 'auto_')}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".hlo").write_text(step.as_text())
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            for _ in range(_TRACED):
                state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
        [file] = sorted(pathlib.Path(directory).rglob("*.xplane.pb"))
        profile = jax.profiler.ProfileData.from_serialized_xspace(file.read_bytes())
    path.with_suffix(".kernels.json").write_text(json.dumps(kernels(profile), indent=0))
    return state


def kernels(profile: Any) -> list[dict[str, Any]]:
    """Of each instruction and kernel: how often it ran in a step, and its microseconds in a step."""
    counts: Counter[tuple[str, str]] = Counter()
    micros: Counter[tuple[str, str]] = Counter()
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                key = str(stats.get("hlo_op", "")), event.name
                counts[key] += 1
                micros[key] += event.duration_ns / 1e3
    return [
        {
            "op": op,
            "kernel": name,
            "times": counts[op, name] / _TRACED,
            "us": micros[op, name] / _TRACED,
        }
        for op, name in sorted(micros, key=lambda key: -micros[key])
    ]


if __name__ == "__main__":
    flags.DEFINE_string("model", "decoder16", "decoder and its layers, or of vmem_jax.models")
    flags.DEFINE_list("hand", "plain,dots,checkpoint", "wrappings of each layer")
    flags.DEFINE_list("budgets", "@dots,@checkpoint", "shares of plain, sizes, or @ a wrapping")
    flags.DEFINE_string("out", "transformers.jsonl", "where rows are added")
    flags.DEFINE_string("traces", "", "directory for instructions and seconds of kernels")
    flags.DEFINE_enum("attention", "cudnn", ["xla", "cudnn"], "of the decoder")
    flags.DEFINE_bool("profile", None, "measure steps first (`jit`'s argument)")
    flags.DEFINE_enum("device", "here", ["here", *TARGETS], "compile for this card, run nothing")
    flags.DEFINE_integer("batch", 8, "sequences, or images")
    flags.DEFINE_integer("tokens", 2048, "in a sequence")
    flags.DEFINE_integer("rounds", 5, "blocks of each variant")
    flags.DEFINE_integer("steps", 8, "in a block")
    app.run(main)
