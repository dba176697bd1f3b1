"""Convolutions by cuDNN, undivided and in micro-batches, within limits of workspace.

    python benchmarks/convolutions.py --layers=alexnet --limits=64MiB,512MiB --out=rows.jsonl

Every plan that cuDNN has is timed by itself, for micro-batches of the sizes asked for. What WR then
chooses, with micro-batches and without, what XLA does by itself, and what it does of as many samples
at a time in a loop ("map"), is run as a whole, by turns, on random data; forward passes also with a
bias and a ReLU after them. Rows hold both the sum that was expected and what it took.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import records
from absl import app, flags
from jax import lax

from vmem_jax.conv.fused import fused_convolution
from vmem_jax.conv.primitive import micro_convolution
from vmem_jax.conv.slices import layouts, roles, whole
from vmem_jax.conv.timings import profile_on
from vmem_jax.core.convolution import Configuration, Convolution, Epilogue, Pass
from vmem_jax.errors import WorkspaceError, parse_size, show_nbytes
from vmem_jax.policy.workspace_reuse import BatchSizes, reuse

# channels of x, extent, channels of y, kernel, stride, padding
ALEXNET = {
    "conv1": (3, (224, 224), 64, (11, 11), 4, 2),
    "conv2": (64, (27, 27), 192, (5, 5), 1, 2),
    "conv3": (192, (13, 13), 384, (3, 3), 1, 1),
    "conv4": (384, (13, 13), 256, (3, 3), 1, 1),
    "conv5": (256, (13, 13), 256, (3, 3), 1, 1),
}
LAYERS: dict[str, dict[str, tuple]] = {
    "alexnet": ALEXNET,
    "seven": {  # those of tests/data/cudnn_legacy_h200.txt
        "alex2": ALEXNET["conv2"],
        "alex1": ALEXNET["conv1"],
        "vgg1_2": (64, (224, 224), 64, (3, 3), 1, 1),
        "vgg3_2": (256, (56, 56), 256, (3, 3), 1, 1),
        "vgg4_2": (512, (28, 28), 512, (3, 3), 1, 1),
        "vgg5_2": (512, (14, 14), 512, (3, 3), 1, 1),
        "incep5x5": (96, (35, 35), 96, (5, 5), 1, 2),
    },
    "stem": {"resnet_stem": (3, (224, 224), 64, (7, 7), 2, 3)},
    "3d": {"unet3d": (64, (16, 56, 56), 64, (3, 3, 3), 1, 1)},
}

FLAGS = flags.FLAGS


def of_layers(name: str, batch: int, dtype: str, strict: bool) -> dict[str, Convolution]:
    """Every pass of every layer, but for the gradient to the images; the first also with a bias."""
    found = {}
    for layer, (c, size, k, kernel, stride, padding) in LAYERS[name].items():
        n = len(size)
        for which in Pass:
            if c == 3 and which == Pass.BACKWARD_DATA:
                continue
            found[f"{layer} {which}"] = Convolution(
                which=which,
                dtype=dtype,
                strict=strict,
                batch=batch,
                features_in=c,
                features_out=k,
                size=size,
                kernel=kernel,
                strides=(stride,) * n,
                padding=((padding, padding),) * n,
                dilation=(1,) * n,
            )
        forward = found[f"{layer} {Pass.FORWARD}"]
        found[f"{layer} with bias and ReLU"] = forward.with_epilogue(Epilogue.BIAS_RELU)
    return found


def time_by_turns(calls: dict[Any, Any], operands: tuple, rounds: int) -> dict[Any, float]:
    """The median seconds of a run of each call; they take turns, of at most some 0.1 s each."""
    seconds: dict[Any, list[float]] = {name: [] for name in calls}

    def run(call: Any, times: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready([call(*operands) for _ in range(times)])
        return (time.perf_counter() - began) / times

    for call in calls.values():
        run(call, 1)  # compiles
    times = {name: max(1, min(5, int(0.1 / run(call, 1)))) for name, call in calls.items()}
    for _ in range(rounds):
        for name, call in calls.items():
            if len(seconds[name]) < 2 or sum(seconds[name]) < 1:
                seconds[name].append(run(call, times[name]))
    return {name: statistics.median(each) for name, each in seconds.items()}


def by_map(convolution: Convolution, samples: int, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """XLA's own, so many samples at a time, by `lax.map`; for gradients to w by `lax.scan`."""
    part = convolution.with_batch(samples)
    cut = lambda x: x.reshape(-1, samples, *x.shape[1:])
    if convolution.which != Pass.BACKWARD_FILTER:
        y = lax.map(lambda some: whole(part, some, rhs), cut(lhs))
        return y.reshape(-1, *y.shape[2:])
    add = lambda total, both: (total + whole(part, *both), None)
    zeros = jnp.zeros(layouts(convolution)["w"], lhs.dtype)
    return lax.scan(add, zeros, (cut(lhs), cut(rhs)))[0]


def with_relu(call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`call`, then a bias and a ReLU, which XLA fuses into its own convolutions."""
    return lambda lhs, rhs, bias: jax.nn.relu(call(lhs, rhs) + bias)


Arm = tuple[str, int | None, Configuration | None, Callable[..., Any]]
"""How, the limit, what was chosen, and a call of the operands, which may stand in several arms."""


def arms_of(
    name: str, convolution: Convolution, micros: Any, limits: list[int | None]
) -> list[Arm]:
    """XLA's own, our call undivided and in micro-batches, and XLA's in a loop."""
    behind = with_relu if convolution.epilogue else lambda call: call
    ours = fused_convolution if convolution.epilogue else micro_convolution
    arms: list[Arm] = [("xla", None, None, behind(functools.partial(whole, convolution)))]
    calls: dict[Configuration, Callable[..., Any]] = {}
    undivided = [m for m in micros if m.batch == convolution.batch]
    for limit in limits:
        samples = convolution.batch
        for how, some in (("undivided", undivided), ("divided", micros)):
            try:
                configuration = reuse(convolution, some, limit)
            except WorkspaceError as error:
                print(f"{name}: {how}: {error}")
                continue
            call = calls.setdefault(
                configuration, functools.partial(ours, convolution, configuration)
            )
            arms.append((how, limit, configuration, call))
            samples = max(m.batch for m in configuration.micros)
        if samples < convolution.batch and convolution.batch % samples == 0:
            loop = functools.partial(by_map, convolution, samples)
            arms.append(("map", limit, None, behind(loop)))
    return arms


def rows_of(name: str, convolution: Convolution, micros: Any, limits: list[int | None]) -> list:
    """A row for each arm."""
    first, second, _ = roles(convolution.which)
    shapes = layouts(convolution)
    draw = lambda key, shape: jax.random.normal(jax.random.key(key), shape, convolution.dtype)
    operands = [draw(0, shapes[first]), draw(1, shapes[second])]
    if convolution.epilogue:
        operands.append(draw(2, (convolution.features_out,)))
    arms = arms_of(name, convolution, micros, limits)
    jitted = {call: jax.jit(call) for *_, call in arms}
    took = time_by_turns(jitted, tuple(operands), FLAGS.rounds)
    rows: list[dict[str, Any]] = []
    for how, limit, configuration, call in arms:
        compiled = jitted[call].lower(*operands).compile()
        row = {
            "kernel": name,
            "convolution": str(convolution),
            "how": how,
            "relu": bool(convolution.epilogue),
            "limit": limit,
            "seconds": took[call],
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        }
        if configuration is not None:
            row |= {"expected": configuration.seconds, "workspace": configuration.workspace}
            runs = itertools.groupby(configuration.micros)
            row |= {"micros": [[len(list(g)), m.batch, m.engine, m.channels] for m, g in runs]}
        rows.append(row)
    return rows


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    strict = FLAGS.strict and FLAGS.dtype == "float32"
    kernels = of_layers(FLAGS.layers, FLAGS.batch, FLAGS.dtype, strict)
    limits = [None if limit == "none" else parse_size(limit, "--limits") for limit in FLAGS.limits]
    sizes = BatchSizes(FLAGS.sizes)
    found = profile_on(jax.devices()[0], kernels.values(), sizes, FLAGS.seconds)
    print(
        f"{found.timed} algorithms timed, {found.reused} known, {found.hopeless} hopeless, "
        f"in {found.seconds:.1f} s",
        flush=True,
    )
    for reason in found.untimed:
        print(f"not timed: {reason}")
    about = records.origin(FLAGS.commit) | {"layers": FLAGS.layers}
    rows = []
    for name, convolution in kernels.items():
        for row in rows_of(name, convolution, found.micros[convolution], limits):
            rows.append(row | about)
    totals: dict[tuple, float] = {}
    for row in rows:
        key = row["how"], row["relu"], row["limit"]
        totals[key] = totals.get(key, 0.0) + row["seconds"]
        runs = [
            f"{n} × {batch} ({engine}{f', {channels} channels' if channels else ''})"
            for n, batch, engine, channels in row.get("micros", [])
        ]
        print(
            f"{row['kernel']:28s} {row['how']:10s}{'+relu ' if row['relu'] else '      '}"
            f"{row['limit'] or '':>12} {row['seconds'] * 1e3:8.3f} ms, "
            f"expected {row.get('expected', math.nan) * 1e3:8.3f}, "
            f"{show_nbytes(row['temporaries'])}, {', '.join(runs)}"
        )
    for (how, relu, limit), seconds in totals.items():
        what = "forward kernels with bias and ReLU" if relu else "all kernels without"
        print(f"{what}, {how}, limit {limit}: {seconds * 1e3:.2f} ms")
    if FLAGS.out:
        records.append(Path(FLAGS.out), rows)


if __name__ == "__main__":
    flags.DEFINE_enum("layers", "alexnet", sorted(LAYERS), "Which layers.")
    flags.DEFINE_integer("batch", 256, "Samples.")
    flags.DEFINE_string("dtype", "float32", "Of everything.")
    flags.DEFINE_bool("strict", True, "No TF32 in float32.")
    flags.DEFINE_list("limits", ["64MiB", "512MiB", "none"], "Bytes of workspace for each kernel.")
    flags.DEFINE_enum("sizes", "powerOfTwo", [s.value for s in BatchSizes], "Of micro-batches.")
    flags.DEFINE_float("seconds", 240.0, "Begin no further timing after so long.")
    flags.DEFINE_integer("rounds", 7, "Blocks of runs of each configuration.")
    flags.DEFINE_string("out", "", "File that rows are added to; none by default.")
    flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")
    app.run(main)
