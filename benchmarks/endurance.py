"""Whether long runs stay as they began: memory, threads and file descriptors over many steps.

    python benchmarks/endurance.py --steps=100000 --out=rows.jsonl
    python benchmarks/endurance.py --only=moving --steps=2000

Plain jit and five plans train one small network, each in a process of its own: one moves residuals to
pinned host memory, one moves them through a tensor cache, one compresses them, one runs the batch in
parts, one streams the momentum. A run whose plan does not do so ends with an error. "dropped" makes
`--made` steps, of all kinds in turns, runs each once and drops it.

A row has each quantity behind the warm-up (`first`), at the end (`last`), the `most` and the growth
between first and last in percent, and the loss of the last step beside plain jit's. Where a plan's
bits differ from plain jit's, XLA has fused the rewritten program otherwise; the loss of so many steps
then differs by percents.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import records
from absl import app, flags

import vmem_jax
from vmem_jax.core.cards import CARDS
from vmem_jax.transfer.arena import live_arenas
from vmem_jax.transfer.compression import live_stores

FLAGS = flags.FLAGS

BATCHES = 16
"""Different batches, which take turns; their targets are noise, so the loss never comes to zero."""

AHEAD = 64
"""Steps that are launched before one is waited for."""

FAST = dataclasses.replace(CARDS["cpu"].machine, link_out=1e12, link_in=1e12, link_both=2e12)
"""Rates by which plans move rather than refuse to: the run is about endurance, not about speed."""


# -- the network


def loss_of(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    for w in weights:
        x = jax.nn.relu(x @ w) + 0.1 * x
    return jnp.square(x - y).mean()


def train(state: Any, x: jax.Array, y: jax.Array) -> Any:
    """A step of momentum; a batch of any size."""
    weights, momentum = state
    loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    weights = jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum)
    return (weights, momentum), loss


def initial(hosted: bool) -> Any:
    """Weights and momentum, the latter in pinned host memory where `hosted`."""
    keys = jax.random.split(jax.random.key(0), FLAGS.layers)
    shape = FLAGS.width, FLAGS.width
    weights = [jax.random.normal(key, shape) * FLAGS.width**-0.5 for key in keys]
    momentum = [jnp.zeros(shape) for _ in keys]
    if hosted:
        place = lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
        momentum = [place(x) for x in momentum]
    return weights, momentum


def batches() -> list[tuple[jax.Array, jax.Array]]:
    draw = lambda n: jax.random.normal(jax.random.key(n), (FLAGS.rows, FLAGS.width))
    return [(draw(2 * n + 1), draw(2 * n + 2)) for n in range(BATCHES)]


# -- the plans


def budgeted(args: Any, **options: Any) -> Any:
    """`train` within `options["budget"]`, or where that is not met by the lowest plan there is."""
    how = {"donate_argnums": 0, "batch_argnums": (1, 2), "machine": FAST, **options}
    try:
        step = vmem_jax.jit(train, **how)
        step.plan(*args)
    except vmem_jax.BudgetError as error:
        step = vmem_jax.jit(train, **{**how, "budget": None, "plan": error.lowest_plan})
    return step


def moving(args: Any) -> Any:
    allowed = ("order", "offload")
    policy = vmem_jax.Auto(allow=allowed, cache=False)
    return budgeted(args, budget=0.5, policy=policy, allow=allowed, transport="ffi", sub_batches=1)


def cached(args: Any) -> Any:
    """The plan that moves, with a cache of half of what is parked, as SuperNeurons has one."""
    compiled = moving(args).lower(*args).compile()
    budget = compiled.need_nbytes + compiled.arena.layout.nbytes // 2
    allowed = ("order", "recompute", "offload")
    how = {"policy": "superneurons", "allow": allowed, "plan": compiled.plan, "transport": "ffi"}
    return budgeted(args, budget=budget, **how)


def compressing(args: Any) -> Any:
    return budgeted(args, budget=0.5, allow=("order", "compress"), sub_batches=1)


def parts(args: Any) -> Any:
    return budgeted(args, budget="device", allow=("order", "sub_batches"), sub_batches=4)


def streamed(args: Any) -> Any:
    return budgeted(args, budget="device", allow=("order", "stream"))


def exact(args: Any) -> Any:
    return budgeted(args, budget="device", policy="exact")


def plain(args: Any) -> Any:
    del args
    return jax.jit(train, donate_argnums=0)


WAYS: dict[str, Callable[[Any], Any]] = {
    way.__name__: way for way in (plain, exact, moving, cached, compressing, parts, streamed)
}


def done(compiled: Any, device: jax.Device) -> dict[str, int]:
    """What the steps so far have done of what their plan is for."""
    found = {"parts": compiled.plan.sub_batches, "moved_nbytes": 0, "hits": 0, "misses": 0}
    if compiled.arena is not None:
        counters = compiled.arena.counters(device)
        found |= {"moved_nbytes": counters.link_nbytes_out + counters.link_nbytes_in}
        found |= {"hits": counters.hits, "misses": counters.misses}
    elif compiled.plan.transfers:  # those of arguments in host memory, which XLA copies
        found |= {"streamed_nbytes_a_step": compiled.moved_nbytes}
    if compiled.compression is not None:
        sites = compiled.compression.counters(device)
        found |= {"sites": len(sites), "compressed": sum(site.runs for site in sites)}
        found |= {"overflow_nbytes": sum(site.overflow_nbytes for site in sites)}
    return found


PROOF: dict[str, Callable[[dict[str, int], int], bool]] = {
    "moving": lambda d, steps: d["moved_nbytes"] >= steps and d["hits"] == 0,
    "cached": lambda d, steps: d["hits"] >= steps and d["misses"] >= steps,
    "compressing": lambda d, steps: d.get("compressed", 0) >= steps,
    "parts": lambda d, steps: d["parts"] > 1,
    "streamed": lambda d, steps: d.get("streamed_nbytes_a_step", 0) > 0,
}
"""Whether so many steps of a way did what it is for."""


def proved(way: str, compiled: Any, device: jax.Device, steps: int) -> dict[str, int]:
    """What `done` says; ends the process unless `steps` steps did what the way is for."""
    found = done(compiled, device)
    if way in PROOF and not PROOF[way](found, steps):
        raise SystemExit(f"{way}: {steps} steps did not do what the plan is for: {found}")
    return found


# -- what is watched


def watched(compiled: Any, device: jax.Device) -> dict[str, int]:
    """Every quantity now; nothing runs. Sizes are in bytes.

    `device_nbytes` is what XLA's allocator has given out on a GPU, with the tensor cache, which lies
    outside; on a CPU the bytes of live arrays. `pinned_nbytes` is the arena and the arrays in pinned
    host memory. `card_nbytes` is what the driver says of the whole card.
    """
    gc.collect()
    kinds: dict[str, int] = {}
    for array in jax.live_arrays():
        kind = array.sharding.memory_kind or ""
        kinds[kind] = kinds.get(kind, 0) + array.nbytes
    hosted = kinds.pop("pinned_host", 0)
    arena = getattr(compiled, "arena", None)
    counters = None if arena is None else arena.counters(device)
    in_use = (device.memory_stats() or {}).get("bytes_in_use", sum(kinds.values()))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {
        "rss_nbytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "pinned_nbytes": hosted + (counters.arena_nbytes if counters else 0),
        "device_nbytes": in_use + (counters.cache_nbytes if counters else 0),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # that of this listing
        "arenas": live_arenas(),
        "stores": live_stores(),
        "objects": len(gc.get_objects()),
    }
    if device.platform != "cpu" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        if lines.strip():
            found["card_nbytes"] = int(lines.split()[0]) << 20
    return found


def summary(samples: list[dict[str, int]]) -> dict[str, dict[str, float]]:
    """Of every quantity the first, last and most, and the growth in percent of the first."""
    found = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        growth = 100 * (values[-1] - first) / first if first else float(values[-1] > 0) * 100
        most = max(values)
        found[name] = {"first": first, "last": values[-1], "most": most, "growth": round(growth, 3)}
    return found


def endure(way: str) -> dict[str, Any]:
    """The row of one way, in this process."""
    device = jax.devices()[0]
    state, given = initial(way == "streamed"), batches()
    step = WAYS[way]((state, *given[0]))
    compiled = None if way == "plain" else step.lower(state, *given[0]).compile()
    warm, samples, seconds = FLAGS.warm_up, [], 0.0
    every = max(1, (FLAGS.steps - warm) // FLAGS.samples)
    for n in range(FLAGS.steps):
        began = time.perf_counter()
        state, loss = step(state, *given[n % BATCHES])
        if n % AHEAD == 0:
            jax.block_until_ready(loss)
        seconds += time.perf_counter() - began
        if n + 1 == FLAGS.steps or (n + 1 >= warm and (n + 1 - warm) % every == 0):
            jax.block_until_ready((state, loss))
            if compiled is not None:
                proved(way, compiled, device, n + 1)
            samples.append(watched(compiled, device))
    row = {
        "what": "endurance",
        "way": way,
        "steps": FLAGS.steps,
        "warm_up": warm,
        "step_seconds": seconds / FLAGS.steps,
        "loss": float(loss),
        "loss_bits": jax.device_get(loss).tobytes().hex(),
        **summary(samples),
    }
    if compiled is not None:
        row |= {"did": proved(way, compiled, device, FLAGS.steps), "need": compiled.need_nbytes}
    return row


def drop() -> dict[str, Any]:
    """The row of steps that are made, called and dropped, of all kinds in turns."""
    device, kinds = jax.devices()[0], [way for way in WAYS if way not in ("plain", "exact")]
    samples, given = [], batches()[0]
    for n in range(FLAGS.made):
        way = kinds[n % len(kinds)]
        state = initial(way == "streamed")
        step = WAYS[way]((state, *given))
        jax.block_until_ready(step(state, *given))
        del state, step
        made = n + 1  # JAX's caches fill during the first half
        if 2 * made >= FLAGS.made and made % max(1, FLAGS.made // 10) == 0:
            samples.append(watched(None, device))
    return {"what": "endurance", "way": "dropped", "made": FLAGS.made, **summary(samples)}


def in_a_process(way: str) -> dict[str, Any]:
    """The row that a new process prints."""
    same = [f"--{name}={FLAGS[name].value}" for name in SAME]
    command = [sys.executable, __file__, f"--only={way}", *same]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


SAME = ("steps", "warm_up", "samples", "made", "width", "layers", "rows")
"""Flags that the process of one way is given; the last three are of the network."""


def main(argv: list[str]) -> None:
    del argv
    if FLAGS.steps <= FLAGS.warm_up:
        raise app.UsageError("--steps must be more than --warm_up")
    if FLAGS.only:
        print(json.dumps(drop() if FLAGS.only == "dropped" else endure(FLAGS.only)))
        return
    rows: dict[str, dict[str, Any]] = {}
    for way in FLAGS.ways:
        row = rows[way] = in_a_process(way)
        for other in ("plain", "exact"):
            if other in rows and way not in (other, "dropped"):
                row[f"bits_of_{other}"] = row["loss_bits"] == rows[other]["loss_bits"]
        if "plain" in rows:
            row["plain_loss"] = rows["plain"]["loss"]
        row["network"] = {name: FLAGS[name].value for name in SAME[-3:]}
        print(json.dumps(row), flush=True)
        if FLAGS.out:
            records.append(Path(FLAGS.out), [{**row, **records.origin(FLAGS.commit)}])


if __name__ == "__main__":
    flags.DEFINE_integer("steps", 20_000, "Steps of each way.")
    flags.DEFINE_integer("warm_up", 1000, "Steps before the first sample.")
    flags.DEFINE_integer("samples", 20, "Samples behind it.")
    flags.DEFINE_integer("made", 200, "Steps that are made and dropped.")
    flags.DEFINE_list("ways", [*WAYS, "dropped"], "Ways that run, one after the other.")
    flags.DEFINE_integer("width", 32, "Of the layers.")
    flags.DEFINE_integer("layers", 8, "Of the network.")
    flags.DEFINE_integer("rows", 256, "Of a batch.")
    flags.DEFINE_enum(
        "only", "", ["", *WAYS, "dropped"], "Run this way alone, here, and print its row."
    )
    flags.DEFINE_string("out", "", "File to which rows are added; none by default.")
    flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")
    app.run(main)
