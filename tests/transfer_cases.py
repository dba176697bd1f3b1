"""What transfers must do, once for every platform: programs that park what they need later.

A case is a function of a device that asserts; `CASES` is the table. tests/transfer runs it on the
CPU twins, tests/gpu on CUDA.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from threads import in_threads

from vmem_jax.jax_compat import FENCE_OPTIONS
from vmem_jax.transfer import ffi
from vmem_jax.transfer.arena import Arena
from vmem_jax.transfer.layout import Layout, Parked

LAYERS = 6
COUNT = 1 << 14  # elements of a parked tensor
NBYTES = 4 * COUNT

fence = lambda *values: lax.optimization_barrier(values)


def layout(layers: int = LAYERS, nbytes: int = NBYTES) -> Layout:
    """One slot a layer, parked as a training step does: last out, first back."""
    return Layout.of([Parked(nbytes, i, 2 * layers - i) for i in range(layers)])


@contextlib.contextmanager
def pinned(device: jax.Device, what: Layout | None = None) -> Iterator[Arena]:
    with Arena(what or layout()) as arena:
        arena.pin(device)
        yield arena


@contextlib.contextmanager
def injected(**faults) -> Iterator[None]:
    ffi.inject(**faults)
    try:
        yield
    finally:
        ffi.inject()


def forward(x, keep, layers=LAYERS):
    """Layers with one residual each, which `keep` sees to while it runs the rest of the layer."""
    for i in range(layers):
        residual, x = fence(x * 3 + i, x)
        x = keep(i, residual, x)
    return x


def rest(x, residual):
    return (x * residual + 1).astype(x.dtype)


def park(arena, i, residual, x, slot=None):
    """Offloads with something to compute meanwhile; returns the token and x."""
    slot = i if slot is None else slot
    token = ffi.offload_start(residual, ffi.first_token(), arena=arena.id, slot=slot)
    token, x = fence(token, x)
    x = rest(x, residual)
    token, x = fence(token, x)
    token = ffi.offload_done(residual, token, arena=arena.id, slot=slot)
    return fence(token, x)


def back(arena, i, token, like, g, slot=None):
    """Fetches with something to compute meanwhile; returns the residual and g."""
    slot = i if slot is None else slot
    token, g = fence(token, g)
    buffer = ffi.fetch_start(token, like, arena=arena.id, slot=slot)
    buffer, g = fence(buffer, g)
    g = (g + 1).astype(g.dtype)
    buffer, g = fence(buffer, g)
    return fence(ffi.fetch_done(buffer, arena=arena.id, slot=slot), g)


def parking_step(arena, layers=LAYERS):
    """A step whose residuals are parked in `arena`."""

    def step(x):
        tokens, likes = [], []

        def keep(i, residual, x):
            token, x = park(arena, i, residual, x)
            tokens.append(token)
            likes.append(residual)
            return x

        g = forward(x, keep, layers)
        for i in reversed(range(layers)):
            residual, g = back(arena, i, tokens[i], likes[i], g)
            g = g - residual
        return g

    return step


def only_parking_step(arena):
    """A step that fetches nothing back, as one that fails elsewhere."""

    def step(x):
        residual, x = fence(x * 3, x)
        return park(arena, 0, residual, x)[1]

    return step


def plain_step(x, layers=LAYERS):
    """The same step, with its residuals kept."""
    kept = []

    def keep(i, residual, x):
        kept.append(residual)
        return fence(rest(x, residual))[0]  # where XLA may simplify, the other step's rounding is

    g = forward(x, keep, layers)
    for i in reversed(range(layers)):
        residual, g = fence(kept[i], g + 1)
        g = g - residual
    return g


STACK = Layout.of([Parked(NBYTES, 0, 1, depth=LAYERS)])
"""One slot, as deep as a loop is long."""


def looping_step(arena):
    """A forward loop and a backward loop; residuals parked in slot 0, or kept without `arena`."""

    def step(x):
        def push(carry, _):
            x, token = carry
            residual, x = fence(x * 3, x)
            if arena is None:
                return (rest(x, residual) / 3, token), residual
            token, x = fence(token, x)
            token, x = park(arena, 0, residual, x)
            return (x / 3, token), None

        def pop(carry, kept):
            g, token = carry
            if arena is None:
                residual, g = kept, g + 1
            else:
                residual, g = back(arena, 0, token, x, g)
            return (g * 2 - residual, token), None

        (y, token), kept = lax.scan(push, (x, ffi.first_token()), None, length=LAYERS)
        (g, _), _ = lax.scan(pop, (y, token), kept, length=LAYERS, reverse=True)
        return g

    return step


def jit(step, device):
    return jax.jit(step, compiler_options=FENCE_OPTIONS.get(device.platform, {}))


def data(device, dtype="float32", count=COUNT):
    return jax.device_put(np.linspace(0, 1, count).astype(dtype), device)


def same(left, right) -> bool:
    """Bit for bit."""
    return np.asarray(left).tobytes() == np.asarray(right).tobytes()


def temporaries(step, x, device) -> int:
    return jit(step, device).lower(x).compile().memory_analysis().temp_size_in_bytes


# ---- the table


def values_come_back(device):
    x = data(device)
    with pinned(device) as arena:
        step, expected = jit(parking_step(arena), device), jit(plain_step, device)(x)
        assert not np.isnan(expected).any()
        for _ in range(3):
            assert same(step(x), expected)
        counters = arena.counters(device)
    assert counters.link_nbytes_in == counters.link_nbytes_out == 3 * LAYERS * NBYTES
    assert counters.misses == 3 * LAYERS and counters.parked == 0


def any_dtype_and_size_comes_back(device):
    def step(x):
        residual, x = fence(jnp.flip(x), x)
        token, x = park(arena, 0, residual, x)
        return back(arena, 0, token, residual, x)[0]

    for dtype, count in (("bfloat16", 7), ("float16", 333), ("int8", 1), ("bool", 5)):
        x = data(device, jnp.dtype(dtype), count)
        with pinned(device, layout(1, x.nbytes)) as arena:
            result = jit(step, device)(x)
        assert result.dtype == x.dtype
        assert same(result, jnp.flip(x))


def compiled_temporaries_fall(device):
    x = data(device)
    with pinned(device) as arena:
        parked = temporaries(parking_step(arena), x, device)
    kept = temporaries(plain_step, x, device)
    assert kept > (LAYERS - 1) * NBYTES
    assert parked < kept - (LAYERS - 2) * NBYTES


def delays_and_poison_change_nothing(device):
    x = data(device)
    with pinned(device) as arena, injected(delay_seconds=2e-3, poison=True, poison_source=True):
        step = jit(parking_step(arena), device)
        for _ in range(3):
            assert same(step(x), jit(plain_step, device)(x))


def poison_shows_a_missing_wait(device):
    x = data(device)
    with pinned(device) as arena, injected(delay_seconds=2e-2, poison=True, skip_waits=True):
        assert not same(jit(parking_step(arena), device)(x), jit(plain_step, device)(x))


def loops_push_and_pop(device):
    x = data(device)
    expected = jit(looping_step(None), device)(x)
    for cached in (0, 2, LAYERS):
        with pinned(device, STACK) as arena, injected(delay_seconds=1e-3, poison=True):
            arena.set_cache_capacity(device, cached * NBYTES)
            run = jit(looping_step(arena), device)
            for _ in range(2):
                assert same(run(x), expected)
            counters = arena.counters(device)
            assert counters.hits == 2 * cached and counters.misses == 2 * (LAYERS - cached)


def slots_are_used_again_in_a_step(device):
    """Two residuals one after the other in one slot, and in two slots that share their place."""

    def step(x, arena, slots):
        for slot in slots:
            residual, x = fence(x * 3, x)
            token, x = park(arena, 0, residual, x, slot)
            residual, x = back(arena, 0, token, residual, x, slot)
            x = x + residual
        return x

    def kept(x):
        for _ in range(2):
            residual, x = fence(x * 3, x)
            residual, x = fence(residual, rest(x, residual))
            residual, x = fence(residual, x + 1)
            x = x + residual
        return x

    x = data(device)
    expected = jit(kept, device)(x)
    shared = Layout.of([Parked(NBYTES, 0, 1), Parked(NBYTES, 2, 3)])
    assert shared.nbytes == NBYTES
    for slots in ((0, 0), (0, 1)):
        with pinned(device, shared) as arena, injected(delay_seconds=1e-3, poison=True):
            got = jit(lambda x, a=arena, s=slots: step(x, a, s), device)(x)
            assert same(got, expected)


def full_cache_keeps_the_link_idle(device):
    x = data(device)
    with pinned(device) as arena, injected(delay_seconds=1e-3, poison=True, poison_source=True):
        arena.set_cache_capacity(device, arena.layout.nbytes)
        step, expected = jit(parking_step(arena), device), jit(plain_step, device)(x)
        for _ in range(2):
            assert same(step(x), expected)
        counters = arena.counters(device)
    assert counters.link_nbytes_in == counters.link_nbytes_out == 0
    assert (counters.hits, counters.misses, counters.evictions) == (2 * LAYERS, 0, 0)


def half_a_cache_halves_the_traffic(device):
    x = data(device)
    with pinned(device) as arena, injected(delay_seconds=1e-3, poison=True, poison_source=True):
        arena.set_cache_capacity(device, arena.layout.nbytes // 2)
        assert same(jit(parking_step(arena), device)(x), jit(plain_step, device)(x))
        counters = arena.counters(device)
        assert counters.link_nbytes_in == counters.link_nbytes_out == LAYERS // 2 * NBYTES
        assert (counters.hits, counters.evictions) == (LAYERS // 2, LAYERS // 2)
        arena.set_cache_capacity(device, 0)
        assert same(jit(parking_step(arena), device)(x), jit(plain_step, device)(x))
        assert arena.counters(device).hits == LAYERS // 2


def failed_copy_is_an_error_and_the_next_step_is_right(device):
    """In any slot, on the way out and on the way back."""
    x = data(device)
    expected = jit(plain_step, device)(x)
    with pinned(device) as arena:
        step = jit(parking_step(arena), device)
        faults = [(slot, fetch) for slot in range(LAYERS) for fetch in (False, True)]
        for resets, (slot, fetch) in enumerate(faults, 1):
            with injected(fail_slot=slot, fail_fetch=fetch):
                with pytest.raises(jax.errors.JaxRuntimeError, match="failed on purpose"):
                    jax.block_until_ready(step(x))
            assert same(step(x), expected)
            assert arena.counters(device).resets == resets


def step_that_raises_in_flight_leaves_the_next_one_right(device):
    """The user's own callback fails between a start and its done, out or back.

    The copy has ended by then. XLA frees the buffers of a failed run at once, and on a CPU, where
    nobody is told, a copy that is still going on would read or write freed memory.
    """
    fails = []

    def callback(x, where):
        if where in fails:
            time.sleep(0.05)
            raise ValueError(f"mine, on the way {where}")
        return x

    def maybe(x, where):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: callback(x, where), shape, x)

    def step(x):
        residual, x = fence(x * 3, x)
        token = ffi.offload_start(residual, ffi.first_token(), arena=arena.id, slot=0)
        token, x = fence(token, x)
        x = maybe(x, "out")
        token, x = fence(token, x)
        token = ffi.offload_done(residual, token, arena=arena.id, slot=0)
        token, x = fence(token, x)
        buffer = ffi.fetch_start(token, residual, arena=arena.id, slot=0)
        buffer, x = fence(buffer, x)
        x = maybe(x, "back")
        buffer, x = fence(buffer, x)
        return ffi.fetch_done(buffer, arena=arena.id, slot=0) - x

    x = data(device)
    with pinned(device) as arena, injected(poison=True, stale_seconds=0.1):
        run = jit(step, device)
        expected = jax.block_until_ready(run(x))
        for where in ("out", "back"):
            fails[:] = [where]
            with pytest.raises(jax.errors.JaxRuntimeError, match=f"mine, on the way {where}"):
                jax.block_until_ready(run(x))
            fails.clear()
            assert same(run(x), expected) and same(run(x), expected)
        counters = arena.counters(device)
    assert (counters.resets, counters.parked) == (2, 0)


def left_behind_is_dropped(device):
    """A run that parks and never fetches: a step that failed elsewhere leaves that behind."""
    x = data(device)
    with pinned(device) as arena, injected(stale_seconds=0.1):
        jit(only_parking_step(arena), device)(x).block_until_ready()
        assert arena.counters(device).parked == 1
        assert same(jit(parking_step(arena), device)(x), jit(plain_step, device)(x))
        assert (arena.counters(device).parked, arena.counters(device).resets) == (0, 1)


def left_behind_is_dropped_on_request(device):
    """Then the next run waits for nobody."""
    x = data(device)
    with pinned(device) as arena, injected(poison=True, stale_seconds=3600):
        jit(only_parking_step(arena), device)(x).block_until_ready()
        arena.reset(device)
        assert (arena.counters(device).parked, arena.counters(device).resets) == (0, 1)
        assert same(jit(parking_step(arena), device)(x), jit(plain_step, device)(x))
        arena.reset(device)
        assert arena.counters(device).resets == 1  # there was nothing to drop


def fetch_without_offload_is_an_error(device):
    with pinned(device) as arena:

        def step(x):
            buffer = ffi.fetch_start(ffi.first_token(), x, arena=arena.id, slot=0)
            return ffi.fetch_done(buffer, arena=arena.id, slot=0)

        with pytest.raises(jax.errors.JaxRuntimeError, match=r"slot 0.*nothing parked"):
            jax.block_until_ready(jit(step, device)(data(device)))


def wrong_slots_are_errors(device):
    x = data(device)
    for slot, count, message in ((7, COUNT, "7.*6 slots"), (0, 8, "32 bytes.*65536")):
        with pinned(device) as arena:
            step = jit(
                lambda x, a=arena, s=slot: ffi.offload_start(
                    x, ffi.first_token(), arena=a.id, slot=s
                ),
                device,
            )
            with pytest.raises(jax.errors.JaxRuntimeError, match=message):
                jax.block_until_ready(step(x[:count]))


def moved_buffer_is_an_error(device):
    """A second use has XLA copy the buffer while the transfer is writing it."""

    def step(x):
        residual, x = fence(x * 3, x)
        token, x = park(arena, 0, residual, x)
        buffer = ffi.fetch_start(token, residual, arena=arena.id, slot=0)
        return ffi.fetch_done(buffer, arena=arena.id, slot=0), buffer

    x = data(device)
    with pinned(device) as arena:
        with pytest.raises(jax.errors.JaxRuntimeError, match="XLA moved the buffer"):
            jax.block_until_ready(jit(step, device)(x))
        assert same(jit(parking_step(arena), device)(x), jit(plain_step, device)(x))


def unknown_or_unpinned_arena_is_an_error(device):
    arena = Arena(layout())
    step, x = jit(parking_step(arena), device), data(device)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"not pinned.*pin it before"):
        jax.block_until_ready(step(x))
    arena.pin(device)
    assert same(step(x), jit(plain_step, device)(x))
    arena.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"no arena {arena.id}.*freed"):
        jax.block_until_ready(step(x))


def two_arenas_at_once(device):
    x = data(device)
    with pinned(device) as first, pinned(device) as second:
        inner, outer = parking_step(first), parking_step(second)
        got = jit(lambda x: outer(inner(x)), device)(x)
        assert same(got, jit(lambda x: plain_step(plain_step(x)), device)(x))
        steps = [jit(inner, device), jit(outer, device)]
        results = [step(x) for step in steps * 3]
        assert all(same(r, jit(plain_step, device)(x)) for r in results)


def two_threads_run_one_step(device):
    x = data(device)
    wrong = []
    with pinned(device) as arena, injected(delay_seconds=2e-4, poison=True):
        step, expected = jit(parking_step(arena), device), jit(plain_step, device)(x)
        step(x).block_until_ready()

        def work():
            try:
                wrong.extend(i for i in range(10) if not same(step(x), expected))
            except jax.errors.JaxRuntimeError as error:
                wrong.append(error)

        in_threads(work, work)
        assert wrong == []
        assert arena.counters(device).resets == 0


def copies_and_waits_are_recorded(device):
    """By the streams themselves: each copy after its delay, each wait until the end of its copy."""
    x, delay, slack = data(device), 2e-3, 1e-4  # a GPU's clock is tied to the host's to so much
    with pinned(device) as arena:
        step = jit(parking_step(arena), device)
        expected = jax.block_until_ready(step(x))
        with injected(delay_seconds=delay), arena.record(device) as moved:
            began = time.monotonic()
            assert same(step(x), expected)
            ended = time.monotonic()
        assert same(step(x), expected) and len(moved) == 4 * LAYERS  # no more is recorded
        with arena.record(device) as nothing:
            pass
        assert nothing == []
    copies = {(m.out, m.slot): m for m in moved if not m.waits}
    waits = {(m.out, m.slot): m for m in moved if m.waits}
    assert copies.keys() == waits.keys() == {(o, s) for o in (True, False) for s in range(LAYERS)}
    assert len({m.run for m in moved}) == 1
    assert all(m.link and m.nbytes == NBYTES and m.begin <= m.end for m in moved)
    assert all(began - slack <= m.begin and m.end <= ended + slack for m in moved)
    assert all(copy.end - copy.begin >= delay for copy in copies.values())
    assert all(waits[key].end >= copy.end - slack for key, copy in copies.items())
    for out, slots in ((True, range(LAYERS)), (False, reversed(range(LAYERS)))):
        lane = [copies[out, slot] for slot in slots]
        assert all(a.end <= b.begin for a, b in itertools.pairwise(lane))


CASES: tuple[Callable[[jax.Device], None], ...] = (
    values_come_back,
    any_dtype_and_size_comes_back,
    compiled_temporaries_fall,
    delays_and_poison_change_nothing,
    poison_shows_a_missing_wait,
    loops_push_and_pop,
    slots_are_used_again_in_a_step,
    full_cache_keeps_the_link_idle,
    half_a_cache_halves_the_traffic,
    failed_copy_is_an_error_and_the_next_step_is_right,
    step_that_raises_in_flight_leaves_the_next_one_right,
    left_behind_is_dropped,
    left_behind_is_dropped_on_request,
    fetch_without_offload_is_an_error,
    wrong_slots_are_errors,
    moved_buffer_is_an_error,
    unknown_or_unpinned_arena_is_an_error,
    two_arenas_at_once,
    two_threads_run_one_step,
    copies_and_waits_are_recorded,
)
