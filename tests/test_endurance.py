"""Steps that are dropped, called by two threads, or end in the middle leave nothing behind.

How long runs fare is measured by benchmarks/endurance.py.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FAST
from jax.experimental import io_callback
from processes import run_script
from threads import in_threads

import vmem_jax
from vmem_jax import Auto
from vmem_jax.errors import HostMemoryError
from vmem_jax.transfer import host_memory
from vmem_jax.transfer.arena import live_arenas
from vmem_jax.transfer.compression import live_stores
from vmem_jax.transfer.extension import describe

pytestmark = pytest.mark.skipif(
    describe().startswith("none"), reason=f"native extension: {describe()}"
)

WIDTH, LAYERS, ROWS = 16, 5, 128

MOVES = ("order", "offload")
PLANS = {
    "moving": {"budget": 0.5, "policy": Auto(allow=MOVES, cache=False), "allow": MOVES},
    "compressing": {"budget": 0.5, "allow": ("order", "compress")},
    "in parts": {"budget": "1GiB", "allow": ("order", "sub_batches"), "sub_batches": 4},
    "streaming": {"budget": "1GiB", "allow": ("order", "stream")},
}
"""Options of `vmem_jax.jit` for each kind of plan."""


def arguments(kind="moving"):
    """Weights, their momentum (in host memory for plans that stream), and a batch."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / 3 for key in keys]
    momentum = [jnp.zeros((WIDTH, WIDTH)) for _ in keys]
    if kind == "streaming":
        place = lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
        momentum = [place(x) for x in momentum]
    return weights, momentum, jax.random.normal(jax.random.key(9), (ROWS, WIDTH))


def made(kind, inside=lambda x: x):
    """A new training step within a plan of that `kind`; `inside` gets a value of the middle."""

    def step(weights, momentum, x):
        def loss(weights):
            y = x
            for n, w in enumerate(weights):
                y = jax.nn.relu(y @ w)
                y = inside(y) if n == LAYERS // 2 else y
            return jnp.square(y).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        momentum = [0.9 * m + g for m, g in zip(momentum, gradients, strict=True)]
        return [w - 0.1 * m for w, m in zip(weights, momentum, strict=True)], momentum, value

    options = {"machine": FAST, "sub_batches": 1, "batch_argnums": 2, **PLANS[kind]}
    budgeted = vmem_jax.jit(step, **options)
    try:
        plan = budgeted.plan(*arguments(kind))
    except vmem_jax.BudgetError as error:
        plan = dataclasses.replace(error.lowest_plan, budget=None)
        budgeted = vmem_jax.jit(step, **{**options, "budget": None, "plan": plan})
    compiled = budgeted.lower(*arguments(kind)).compile()
    does = {
        "moving": compiled.arena is not None,
        "compressing": compiled.compression is not None,
        "in parts": plan.sub_batches == 4,
        "streaming": compiled.arena is None and bool(plan.transfers),
    }
    assert does[kind]
    return budgeted


def held():
    """Everything that a step which is gone may have left."""
    gc.collect()
    return {
        "arenas": live_arenas(),
        "stores": live_stores(),
        "arrays": sum(x.nbytes for x in jax.live_arrays()),
        "executables": len(jax.devices()[0].client.live_executables()),
        "steps": sum(isinstance(x, vmem_jax.api.jit.BudgetedStep) for x in gc.get_objects()),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("kind", PLANS)
def test_steps_that_are_dropped_leave_nothing(kind):
    jax.block_until_ready(made(kind)(*arguments(kind)))  # starts the threads that copy
    before = held()
    for _ in range(4):
        jax.block_until_ready(made(kind)(*arguments(kind)))
    assert held() == before


def test_two_threads_plan_and_run_their_own_steps_and_a_shared_one():
    kinds = ("moving", "compressing")
    expected = {kind: bits(made(kind)(*arguments(kind))) for kind in kinds}
    shared, meet, wrong = made("moving"), threading.Barrier(2), []

    def work(kind):
        try:
            own, given = made(kind), arguments(kind)
            meet.wait()
            for _ in range(5):
                wrong.extend([kind] * (bits(own(*given)) != expected[kind]))
                wrong.extend(["shared"] * (bits(shared(*given)) != expected["moving"]))
        except BaseException as error:
            meet.abort()
            wrong.append(error)

    in_threads(*(functools.partial(work, kind) for kind in kinds))
    assert wrong == [] and gc.isenabled()


FAILS: list[bool] = []


def fails(x):
    if FAILS:
        raise ValueError("mine")
    return np.float32(0)


CALLBACKS = {
    "debug": lambda y: (jax.debug.callback(fails, y[0, 0]), y)[1],
    "ordered": lambda y: (jax.debug.callback(fails, y[0, 0], ordered=True), y)[1],
    "io": lambda y: (
        y + io_callback(fails, jax.ShapeDtypeStruct((), "float32"), jax.lax.stop_gradient(y[0, 0]))
    ),
}


@pytest.mark.parametrize("callback", CALLBACKS)
@pytest.mark.parametrize("kind", ["moving", "compressing"])
def test_after_a_callback_that_raises_the_next_step_is_right(kind, callback, monkeypatch):
    # pytest keeps what JAX logs of an error, which holds the arguments of the callback
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    step, given = made(kind, CALLBACKS[callback]), arguments(kind)
    FAILS.clear()
    expected = bits(step(*given))
    before = held()
    for _ in range(3):
        FAILS.append(True)
        with pytest.raises(jax.errors.JaxRuntimeError, match="mine"):
            jax.block_until_ready(step(*given))
        FAILS.clear()
        assert bits(step(*given)) == expected
    jax.effects_barrier()
    assert held() == before


def test_two_processes_profile_at_once_into_one_store(tmp_path):
    """Each finds its own measurements afterwards, and those of the other."""
    script = """
        import jax, jax.numpy as jnp, vmem_jax
        from vmem_jax.profile.store import Store, identity
        from vmem_jax.profile.kept import cache_directory

        def step(w, x):
            return w - jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w)

        for width in {widths}:
            vmem_jax.jit(step, budget="1GiB", profile=True)(jnp.eye(width), jnp.ones((64, width)))
        print(len(Store(identity(jax.devices()[0]), cache_directory()).load().steps))
    """
    environment = {**os.environ, "VMEM_JAX_CACHE": str(tmp_path)}
    both = ["range(32, 36)", "range(36, 40)"]
    command = lambda widths: [sys.executable, "-c", textwrap.dedent(script.format(widths=widths))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command(w), env=environment, **pipes) for w in both]
    ends = [(process.communicate(timeout=300), process.returncode) for process in running]
    assert all(code == 0 for _, code in ends), ends
    assert not any("profile" in errors for (_, errors), _ in ends), ends
    alone = subprocess.run(command("()"), env=environment, check=True, **pipes)
    steps = [int(out) for (out, _), _ in ends]
    assert min(steps) > 0 and int(alone.stdout) >= max(steps)
    assert not list(tmp_path.rglob("*.tmp"))


# -- the end of a process with steps in flight

LOOP = """
    import itertools, signal, sys
    from test_endurance import *

    def run(count):
        for _ in count:
            for step, given in steps:
                step(*given)  # comes back before it has ended

    steps = [(made(kind), arguments(kind)) for kind in PLANS]
    run(range(20))
    print("ready", flush=True)
"""
ENDS = {
    "the script ends": ("run(range(20))", None, 0),
    "it exits": ("run(range(20)); sys.exit(3)", None, 3),
    "SIGTERM": ("run(itertools.count())", signal.SIGTERM, -signal.SIGTERM),
    "a handler of SIGTERM exits": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); print('handler', flush=True)\n"
        "run(itertools.count())",
        signal.SIGTERM,
        5,
    ),
}
"""How it goes on, the signal that is sent, and the code at the end."""


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_with_steps_in_flight(end):
    """Of every kind; no hang, no core dump, no message of either."""
    rest, sent, code = ENDS[end]
    command = [sys.executable, "-c", textwrap.dedent(LOOP) + rest]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=Path(__file__).parent, **pipes) as process:
        try:
            lines = [process.stdout.readline() for _ in range(2 if "handler" in rest else 1)]
            if sent is not None:
                process.send_signal(sent)
            _, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert lines[0] == "ready\n", errors[-4000:]
    assert process.returncode == code, errors[-4000:]
    assert "Fatal" not in errors and "terminate called" not in errors, errors[-4000:]


# -- memory that is gone when the planned step runs


def test_host_memory_that_is_gone_is_said_and_the_next_step_runs(monkeypatch, tmp_path):
    step, given = made("moving"), arguments()
    step.plan(*given)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 1 kB\n")
    before = held()
    with monkeypatch.context() as taken:
        taken.setattr(host_memory, "_MEMINFO", meminfo)
        for _ in range(2):
            with pytest.raises(HostMemoryError, match=r"KiB of host memory .* at most 1\.00 KiB"):
                step(*given)
    assert bits(step(*given)) == bits(made("moving")(*given))
    del step
    assert held()["arenas"] == before["arenas"] - 1


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_device_memory_that_is_gone_is_said_and_the_next_step_runs(donated):
    """On a CPU, where it is the process's own: a limit stands for the memory that others took."""
    run_script(f"""
        import resource
        import jax, jax.numpy as jnp
        import vmem_jax
        from memory_gone import notes_without_memory, train

        w, x, unlimited = jnp.eye(64), jnp.ones((1 << 18, 64)), (resource.RLIM_INFINITY,) * 2
        given, expected = w + 0, jax.jit(train)(jnp.eye(64), x[:1])
        budgeted = vmem_jax.jit(train, budget="4GiB", policy="exact", donate_argnums={donated})
        need = budgeted.lower(w, x).compile().need_nbytes
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), unlimited[1]))
        says = notes_without_memory(budgeted, given, x)
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        assert f"planned to need {{need / 2**20:.2f}} MiB" in says, says
        assert "MiB are left by RLIMIT_AS" in says, says
        assert given.is_deleted() == {bool(donated)}, says
        assert jnp.allclose(budgeted(w, x), expected, atol=1e-5)
    """)
