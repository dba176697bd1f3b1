"""A decoder of 7 billion weights, trained whole on one card: its state takes more than 80 GB.

    python benchmarks/seven_billion.py                              # on a card of 80 GB
    python benchmarks/seven_billion.py --way=checkpoint             # on a card that holds it all
    python benchmarks/seven_billion.py --target=h100 --save_plan=7b.json    # runs nothing
    python benchmarks/seven_billion.py --plan=7b.json               # runs what was planned

The shape is that of LLaMA-7B (Touvron et al., 2023, table 2): 32 layers, 4,096 wide, a hidden layer
of 11,008, 32 heads, 32,000 tokens. Weights and AdamW's moments are float32, the computation is
bfloat16. Two ways train the same network on the same random tokens from the same weights:

- "checkpoint": plain `jax.jit` with `jax.checkpoint` around each layer, all state on the card;
- "budget": `vmem_jax.jit` within `--budget`; moments wait in pinned host memory, come for their
  update, and leave after it. `--hosted` says which: those of the layers, all, or the whole state with
  the weights. With `--scanned` the layers are one `lax.scan`: each kind of weight is one stack, which
  comes and goes by slices.

The state is made one array at a time, so that the card never holds more of it than the step does. The
row has the loss of each step, the median, least and most milliseconds of a step after the warm-up,
tokens per second, the peak by the compiler and by the card's allocator, the bytes of state in pinned
host memory, and the bytes that a step moves each way.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import records
import traces
from absl import app, flags
from jax.sharding import SingleDeviceSharding
from locks import held

import vmem_jax
from vmem_jax.core.need import need_nbytes
from vmem_jax.devices.targets import target
from vmem_jax.models.decoder import Decoder, train_step, unstacked

FLAGS = flags.FLAGS
GIB = 2**30
OPTIMISER = optax.adamw(1e-4)
HOST_POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # XLA's variable, in GiB


def main(_: Any) -> None:
    model = _model()
    shapes = _shapes(model)
    # XLA reads it when it first sees a device. Its pool of pinned memory grows by doubling up to the
    # limit, and pinning takes half a second a GiB.
    os.environ.setdefault(HOST_POOL, str(_pinned_nbytes(shapes) // GIB + 4))
    device = None if FLAGS.target else jax.devices()[0]
    row: dict[str, Any] = {"way": FLAGS.way, "budget": FLAGS.budget, "hosted": FLAGS.hosted}
    row |= {name: FLAGS[name].value for name in ("layers", "width", "batch", "tokens", "scanned")}
    row |= {"device": FLAGS.target or device.device_kind, "jax": jax.__version__}
    row |= {
        "commit": records.commit(),
        "parameters": sum(x.size for x in jax.tree.leaves(shapes[0])),
    }
    if FLAGS.way == "checkpoint":
        row |= {"budget": None, "hosted": "nothing"}
    row["state_gib"] = sum(map(_nbytes, jax.tree.leaves(shapes))) / GIB
    row["pinned_gib"] = _pinned_nbytes(shapes) / GIB
    begun = time.perf_counter()
    with held(FLAGS.lock, alone=False):
        step, found = _compiled(model, _placed(shapes))
    row |= {**found, "seconds_to_compile": time.perf_counter() - begun}
    print(json.dumps(row), flush=True)
    if not FLAGS.target:
        begun = time.perf_counter()
        state = jax.block_until_ready(_state(shapes))
        row["seconds_to_start"] = time.perf_counter() - begun
        with held(FLAGS.lock, alone=True):
            state, ran = _run(step, state)
        row |= ran
        if memory := device.memory_stats():
            row["allocator_gib"] = memory["peak_bytes_in_use"] / GIB
    with open(FLAGS.out, "a") as out:
        out.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def _model() -> Decoder:
    return Decoder(
        layers=FLAGS.layers,
        width=FLAGS.width,
        hidden=FLAGS.hidden,
        heads=FLAGS.heads,
        kv_heads=FLAGS.heads,
        vocabulary=FLAGS.vocabulary,
        attention=FLAGS.attention,
        scanned=FLAGS.scanned,
        wrap=jax.checkpoint if FLAGS.way == "checkpoint" else lambda layer: layer,
    )


def _shapes(model: Decoder) -> Any:
    """The shapes of the weights, those of unrolled layers apart, and of the optimiser's state."""

    def start() -> Any:
        params = model.init(jax.random.key(0))
        if not FLAGS.scanned:
            params["layers"] = unstacked(params["layers"])
        return params, OPTIMISER.init(params)

    return jax.eval_shape(start)


def _is_hosted(path: tuple, shape: Any) -> bool:
    """Whether a leaf of the state waits in pinned host memory; numbers and norms do not."""
    if FLAGS.way == "checkpoint" or shape.ndim < 2 or _is_norm(path):
        return False
    if FLAGS.hosted == "layers" and not any(getattr(key, "key", "") == "layers" for key in path):
        return False
    return FLAGS.hosted == "state" or path[0].idx > 0


def _is_norm(path: tuple) -> bool:
    return any(str(getattr(key, "key", "")).startswith("norm") for key in path)


def _pinned_nbytes(shapes: Any) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return sum(_nbytes(x) for path, x in leaves if _is_hosted(path, x))


def _nbytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


def _sharding(path: tuple, shape: Any) -> SingleDeviceSharding:
    kind = "pinned_host" if _is_hosted(path, shape) else "device"
    return SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


def _placed(shapes: Any) -> Any:
    """The shapes of the state where it lies between steps."""
    if FLAGS.way == "checkpoint":
        return _on_card(shapes)

    def place(path: tuple, x: Any) -> Any:
        if not _is_hosted(path, x):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(path, x))

    return jax.tree_util.tree_map_with_path(place, shapes)


def _on_card(shapes: Any) -> Any:
    """The same shapes, on the card that is compiled for where that is not there."""
    if not FLAGS.target:
        return shapes
    on_card = target(FLAGS.target).sharding()
    there = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_card)
    return jax.tree.map(there, shapes)


def _compiled(model: Decoder, state: Any) -> tuple[Any, dict[str, Any]]:
    """The step of the way, compiled, and what its row says about it."""
    step = train_step(model, OPTIMISER)
    tokens = jax.ShapeDtypeStruct((FLAGS.batch, FLAGS.tokens + 1), jnp.int32)
    if FLAGS.way == "checkpoint":
        compiled = jax.jit(step, donate_argnums=0).lower(state, _on_card(tokens)).compile()
        return compiled, {"gib": need_nbytes(compiled) / GIB, "moved_gib": 0.0}
    budgeted = vmem_jax.jit(
        step,
        budget=FLAGS.budget,
        plan=vmem_jax.Plan.load(FLAGS.plan) if FLAGS.plan else None,
        donate_argnums=0,
        allow=FLAGS.allow,
        profile=FLAGS.profile,
    )
    made = budgeted.lower(state, tokens).compile(target=FLAGS.target)
    if FLAGS.save_plan:
        made.plan.save(FLAGS.save_plan)
    last = made.attempts[-1]
    return made, {
        "gib": made.need_nbytes / GIB,
        "moved_gib": made.moved_nbytes / GIB,
        "predicted_ms": 1e3 * made.plan.predicted_seconds,
        "predicted_stall_ms": 1e3 * sum(made.timeline.stalls),
        "predicted_gib": last.predicted_need / GIB,
        "compiles": len(made.attempts),
        "plan": str(made.plan),
    }


def _state(shapes: Any) -> Any:
    """The state, made on the card one array at a time. Scanned layers have the weights of unrolled
    ones."""
    key = jax.random.key(FLAGS.seed)
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    numbers = _numbers(shapes[0])
    made = []
    for path, x in leaves:
        if path[0].idx > 0:
            value = _zeros(x.shape, x.dtype)
        elif _is_norm(path):
            value = jnp.ones(x.shape, x.dtype)
        else:
            value = _drawn(key, jnp.asarray(numbers[jax.tree_util.keystr(path[1:])]), x.shape)
        value = jax.device_put(value, _sharding(path, x))
        made.append(jax.block_until_ready(value))  # at most one array is on its way
    return tree.unflatten(made)


def _numbers(params: Any) -> dict[str, tuple[int, ...]]:
    """By each array's path its number among the arrays of unrolled layers, of a stack that of each of
    its layers."""
    unrolled = jax.eval_shape(lambda p: {**p, "layers": unstacked(p["layers"])}, params)
    found: dict[str, tuple[int, ...]] = {}
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(unrolled)):
        if FLAGS.scanned and path[0].key == "layers":
            path = (path[0], *path[2:])
        name = jax.tree_util.keystr(path)
        found[name] = (*found.get(name, ()), i)
    return found


@functools.partial(jax.jit, static_argnums=2)
def _drawn(key: jax.Array, numbers: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Random weights by their numbers; those of several are a stack."""
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(numbers)
    draw = lambda key: 0.02 * jax.random.normal(key, shape[-2:])
    return jax.lax.map(draw, keys).reshape(shape)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.zeros(shape, dtype)


def _run(step: Any, state: Any) -> tuple[Any, dict[str, Any]]:
    """Steps on other random tokens each: the state after them, and what the row says."""
    key = jax.random.key(FLAGS.seed + 1)
    size = FLAGS.batch, FLAGS.tokens + 1
    draw = jax.jit(
        lambda i: jax.random.randint(jax.random.fold_in(key, i), size, 0, FLAGS.vocabulary)
    )
    losses, ms = list[float](), list[float]()
    for i in range(FLAGS.steps):
        tokens = jax.block_until_ready(draw(i))
        begun = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, tokens))
        ms.append(1e3 * (time.perf_counter() - begun))
        losses.append(float(loss))
        print(f"step {i}: loss {losses[-1]:.6f}, {ms[-1]:,.0f} ms", flush=True)
    timed = ms[FLAGS.warm_up :] or ms
    median = statistics.median(timed)
    if FLAGS.trace:
        run = lambda state: step(state, tokens)
        state = traces.traced(pathlib.Path(FLAGS.trace), step, run, state)
    return state, {
        "losses": losses,
        "ms": median,
        "ms_least": min(timed),
        "ms_most": max(timed),
        "tokens_per_second": 1e3 * FLAGS.batch * FLAGS.tokens / median,
    }


if __name__ == "__main__":
    flags.DEFINE_enum("way", "budget", ["budget", "checkpoint"], "see above")
    flags.DEFINE_string("budget", "73GiB", "of the way 'budget', as `jit` takes it")
    flags.DEFINE_enum("hosted", "layers", ["layers", "moments", "state"], "what waits, see above")
    flags.DEFINE_list("allow", "order,recompute,logits,stream", "techniques that plans may use")
    flags.DEFINE_string("plan", None, "a plan of the way 'budget' to take, by its path")
    flags.DEFINE_string("save_plan", None, "where the plan is saved")
    flags.DEFINE_bool("profile", None, "measure steps first (`jit`'s argument)")
    flags.DEFINE_string("lock", "", "file by which benchmarks on one card take turns (`locks`)")
    flags.DEFINE_string("target", None, "a card to compile for that is not there")
    flags.DEFINE_string("out", "seven_billion.jsonl", "where the row is added")
    flags.DEFINE_bool("scanned", False, "layers in one loop; else unrolled")
    flags.DEFINE_integer("layers", 32, "of the decoder")
    flags.DEFINE_integer("width", 4096, "of the residual stream")
    flags.DEFINE_integer("hidden", 11_008, "of the feed-forward part")
    flags.DEFINE_integer("heads", 32, "of queries, and of keys and values")
    flags.DEFINE_integer("vocabulary", 32_000, "tokens that there are")
    flags.DEFINE_enum("attention", "cudnn", ["xla", "cudnn"], "as jax.nn has it")
    flags.DEFINE_integer("batch", 16, "sequences in a step")
    flags.DEFINE_integer("tokens", 2048, "in a sequence")
    flags.DEFINE_integer("steps", 20, "that are run")
    flags.DEFINE_string(
        "trace", None, "a path; where its kernels are written to, as traces.py says"
    )
    flags.DEFINE_integer("warm_up", 3, "steps that are not timed")
    flags.DEFINE_integer("seed", 0, "of weights and tokens")
    app.run(main)
