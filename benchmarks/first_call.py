"""What a person waits for: a first call beside plain jit's, a clone's first result, a report.

    python benchmarks/first_call.py --out=rows.jsonl
    python benchmarks/first_call.py --network=decoder --budget=0.25 --out=rows.jsonl
    python benchmarks/first_call.py --what=clone --out=rows.jsonl
    python benchmarks/first_call.py --what=report --model=resnet152 --batch=128 --out=rows.jsonl

A first call is timed in a process of its own, with empty caches, plain jit and `vmem_jax` in turns;
of a model, or of a network of `step_models.py` whose layers are scanned.
The clone is one of this checkout, which then runs the README's first command. The report is of a step
that is planned for an H200, without one; planning is not part of its seconds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import records
from absl import app, flags
from step_models import BATCHES, MODELS, Training

import vmem_jax
from vmem_jax.models import Job, job

ROOT = Path(__file__).parent.parent
FLAGS = flags.FLAGS
SAME = ("model", "network", "batch", "dtype")
"""Flags that a process of one call is given."""
CACHES = ("JAX_COMPILATION_CACHE_DIR", "VMEM_JAX_CACHE")


def work() -> Job:
    """The step that is timed."""
    return job(FLAGS.model, batch=FLAGS.batch, dtype=FLAGS.dtype, optimizer="momentum")


def network() -> Training:
    """The network whose first step is timed."""
    return MODELS[FLAGS.network]("plain", BATCHES[FLAGS.network], scanned=True)


def first_call(way: str) -> float:
    """Seconds from the call to its results, in this process, which has called nothing before."""
    if FLAGS.network:
        train = network()
        state, batch = train.init(jax.random.key(0)), train.batch(jax.random.key(1))
        state = jax.tree.map(jnp.copy, state)  # some leaves are one array
    else:
        train = work()
        state, batch = train.init(jax.random.key(0)), train.random_batch(jax.random.key(1))
    jit = jax.jit if way == "plain" else vmem_jax.jit
    options = {} if way == "plain" else {"budget": float(way)}
    step = jit(train.step, donate_argnums=0, **options)
    jax.block_until_ready((state, batch))
    began = time.perf_counter()
    jax.block_until_ready(step(state, batch))
    return time.perf_counter() - began


def in_a_process(way: str) -> float:
    """The seconds that a new process prints."""
    with tempfile.TemporaryDirectory() as cache:
        given = {name: value for name, value in os.environ.items() if name not in CACHES}
        given["VMEM_JAX_CACHE"] = cache
        same = [f"--{name}={FLAGS[name].value}" for name in SAME]
        command = [sys.executable, __file__, f"--only={way}", *same]
        done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def clone() -> float:
    """Seconds from `git clone` to the end of the README's first command."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
        subprocess.run(["sh", "scripts/run.sh"], cwd=folder, check=True)
        return time.perf_counter() - began


def report() -> dict[str, float]:
    """Seconds of the report of a step that is planned, and its bytes."""
    train = work()
    step = vmem_jax.jit(train.step, donate_argnums=0, budget=float(FLAGS.budget))
    shapes = train.state_shapes(), train.batch
    step.explain(*shapes, target="h200")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        page = step.report(*shapes, path=Path(folder) / "memory.html", target="h200")
        return {"seconds": round(time.perf_counter() - began, 2), "nbytes": page.stat().st_size}


def main(argv: list[str]) -> None:
    del argv
    if FLAGS.only:
        print(first_call(FLAGS.only))
        return
    about = ("network",) if FLAGS.network else ("model", "batch", "dtype")
    case = {name: FLAGS[name].value for name in (*about, "budget")}
    if FLAGS.what == "clone":
        row = {"what": "clone", "seconds": round(clone(), 1)}
    elif FLAGS.what == "report":
        row = {"what": "report", **case, **report()}
    else:
        ways = ("plain", FLAGS.budget)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(FLAGS.rounds):
            for way in ways:
                seconds[way].append(round(in_a_process(way), 2))
        plain, ours = (statistics.median(seconds[way]) for way in ways)
        row = {"what": "call", **case, "seconds": seconds, "of_plain": round(ours / plain, 3)}
    print(row)
    if FLAGS.out:
        cores = {"cores": os.cpu_count(), "load": os.getloadavg()}
        records.append(Path(FLAGS.out), [{**row, **cores, **records.origin(FLAGS.commit)}])


if __name__ == "__main__":
    flags.DEFINE_enum("what", "call", ["call", "clone", "report"], "What is timed.")
    flags.DEFINE_string("model", "resnet50", "Model of vmem_jax.models.")
    flags.DEFINE_enum(
        "network", "", ["", *MODELS], "Network of step_models.py, in place of a model."
    )
    flags.DEFINE_integer("batch", 8, "Images in a batch.")
    flags.DEFINE_string("dtype", "bfloat16", "Type of computation and parameters.")
    flags.DEFINE_string("budget", "0.5", "Share of plain jit's need.")
    flags.DEFINE_integer("rounds", 3, "First calls of each.")
    flags.DEFINE_string("only", "", "Time this alone, here: plain, or a budget.")
    flags.DEFINE_string("out", "", "File for the row; none by default.")
    flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")
    app.run(main)
