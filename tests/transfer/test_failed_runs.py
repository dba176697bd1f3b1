"""After a run that failed half-way everything is as before it: the next run is right, on any thread,
and the interpreter ends."""

from __future__ import annotations

import contextlib
import functools
import os

import jax
import jax.numpy as jnp
import pytest
import transfer_cases
from processes import run_script

from vmem_jax.transfer.arena import live_arenas
from vmem_jax.transfer.compression import Site, Store, compress
from vmem_jax.transfer.executable import Moving
from vmem_jax.transfer.ffi import Ffi

CPU = jax.devices("cpu")[0]


def parking(fails):
    """A step that moves buffers and fails half-way while `fails` is not empty."""
    transport = Ffi(transfer_cases.layout())
    arena = transport.arena

    def callback(x):
        if fails:
            raise ValueError("mine")
        return x

    def step(x):
        residual, x = transfer_cases.fence(x * 3, x)
        token, x = transfer_cases.park(arena, 0, residual, x)
        x = jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        residual, x = transfer_cases.back(arena, 0, token, residual, x)
        return x - residual, x.sum()

    compiled = transfer_cases.jit(step, CPU).lower(transfer_cases.data(CPU)).compile()
    return Moving(compiled, transport, None, [CPU])


def test_the_users_callback_fails_and_the_next_run_is_right():
    """At once: an arena that waits for a run that shows no life waits 30 seconds."""
    fails, x = [], transfer_cases.data(CPU)
    moving = parking(fails)
    expected = jax.block_until_ready(moving(x))
    for count in range(1, 4):
        fails.append(True)
        with pytest.raises(jax.errors.JaxRuntimeError, match="mine"):
            jax.block_until_ready(moving(x))
        fails.clear()
        results = [moving(x) for _ in range(3)]
        assert all(transfer_cases.same(a[0], expected[0]) for a in results)
        counters = moving.arena.counters(CPU)
        assert (counters.parked, counters.resets) == (0, count)


def test_threads_and_memory_are_those_of_before():
    """After runs that fail one after the other, and as the arena of the last one is freed."""
    threads = lambda: len(os.listdir("/proc/self/task"))
    arenas, fails, x = live_arenas(), [], transfer_cases.data(CPU)
    moving = parking(fails)

    def run(fail):
        fails[:] = [True] * fail
        with pytest.raises(jax.errors.JaxRuntimeError) if fail else contextlib.nullcontext():
            jax.block_until_ready(moving(x))

    run(True)
    run(False)
    before, pinned = threads(), moving.arena.counters(CPU).arena_nbytes
    for _ in range(10):
        run(True)
    run(False)
    assert threads() == before
    assert moving.arena.counters(CPU).arena_nbytes == pinned > 0
    assert live_arenas() == arenas + 1
    run(True)
    moving.arena.close()
    assert live_arenas() == arenas and threads() <= before


def test_reset_drops_what_is_parked():
    def parks(x):
        return transfer_cases.park(arena, 0, x * 3, x)[1]

    x = transfer_cases.data(CPU)
    with transfer_cases.pinned(CPU) as arena:
        arena.reset(CPU)
        assert arena.counters(CPU).resets == 0
        transfer_cases.jit(parks, CPU)(x).block_until_ready()
        assert arena.counters(CPU).parked == 1
        arena.reset(CPU)
        assert (arena.counters(CPU).parked, arena.counters(CPU).resets) == (0, 1)
        step = transfer_cases.jit(transfer_cases.parking_step(arena), CPU)
        assert transfer_cases.same(step(x), transfer_cases.jit(transfer_cases.plain_step, CPU)(x))


class Recorded:
    """Stands for an arena or a store; notes when it is reset."""

    def __init__(self, events):
        self.events = events

    def reset(self, device):
        self.events.append("reset")

    def prepare(self, compiled, devices):
        self.events.append("prepare")

    def open(self, device):
        self.events.append("open")

    @property
    def arena(self):
        return self


def test_a_run_begins_once_what_the_last_one_left_is_dropped():
    events, given, outs = [], jnp.ones(3), []

    def compiled(x):
        events.append("run")
        if not outs:
            raise jax.errors.JaxRuntimeError("INTERNAL: at once")
        return outs[0]

    moving = Moving(compiled, Recorded(events), Recorded(events), [CPU])
    with pytest.raises(jax.errors.JaxRuntimeError):
        moving(given)
    assert events == ["prepare", "open", "reset", "reset", "run"]
    events.clear()
    outs[:] = [(given, jnp.zeros(2))]
    moving(given)
    moving(given)
    assert events == ["reset", "reset", "run"] * 2
    events.clear()
    outs[0][1].delete()  # so nothing says that the last run has ended
    moving(given)
    outs[:] = [(given,)]
    moving(given)
    moving(given)
    assert events[:1] == ["run"] and events.count("reset") == 0


def test_a_store_gives_back_what_failed_runs_hold():
    """Runs that compress and never decompress: each has addresses of its own for overflow."""

    def address_space():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * 4096

    x = jnp.zeros(1 << 22, "uint8")
    with Store([Site(x.nbytes, x.nbytes // 4)]) as store:
        store.open(CPU)
        call = functools.partial(compress, store=store.id, site=0, capacity=x.nbytes // 4)
        run = transfer_cases.jit(call, CPU)
        run(x).block_until_ready()
        before = address_space()
        for _ in range(32):
            store.reset(CPU)
            run(x).block_until_ready()
        assert address_space() - before < 16 * x.nbytes


def test_the_interpreter_ends_after_a_failed_run():
    """With an error of the user's, and with one of a copy that nobody asked about."""
    run_script("""
        from transfer_cases import *
        from transfer.test_failed_runs import parking

        device = jax.devices()[0]
        x, fails = data(device), []
        moving = parking(fails)
        jax.block_until_ready(moving(x))
        fails.append(True)
        try:
            jax.block_until_ready(moving(x))
        except jax.errors.JaxRuntimeError as error:
            assert "mine" in str(error)
        fails.clear()
        ffi.inject(fail_slot=0, fail_fetch=True)
        try:
            lost = moving(x)
        except jax.errors.JaxRuntimeError:
            pass
        print("end")
    """)
