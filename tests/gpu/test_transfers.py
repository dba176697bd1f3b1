"""The conformance table of the four calls on CUDA, and what only a device has. `pytest -m gpu`."""

import jax
import numpy as np
import pytest
import transfer_cases as cases
from jax import lax
from test_arena_order import moving_runs_right

from vmem_jax.transfer import ffi
from vmem_jax.transfer.arena import Arena
from vmem_jax.transfer.layout import Layout, Slot

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_on_cuda(case, devices):
    case(devices[0])


@pytest.mark.parametrize("seed", range(5))
def test_streams_force_the_order_that_a_layout_relies_on(seed, devices):
    moving_runs_right(devices[0], seed)


def test_every_device_at_once(devices):
    if len(devices) < 2:
        pytest.skip("one GPU")
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    with Arena(cases.layout()) as arena:
        for device in devices:
            arena.pin(device)
        step = cases.parking_step(arena)
        shards = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        expected = cases.jit(cases.plain_step, devices[0])(cases.data(devices[0]))
        x = np.tile(np.asarray(cases.data(devices[0])), len(devices))
        with cases.injected(delay_seconds=1e-3, poison=True):
            assert cases.same(jax.jit(shards)(x), np.tile(expected, len(devices)))
            results = [cases.jit(step, d)(cases.data(d)) for d in devices]
        assert all(cases.same(r, expected) for r in results)
        assert [arena.counters(d).misses for d in devices] == [2 * cases.LAYERS] * len(devices)


def test_handlers_do_not_wait_for_the_device(devices):
    """A step whose copies take a second in all comes back to its caller long before that."""
    import time

    device = devices[0]
    x = cases.data(device)
    with cases.pinned(device) as arena:
        step = cases.jit(cases.parking_step(arena), device)
        expected = jax.block_until_ready(step(x))
        with cases.injected(delay_seconds=0.1):
            began = time.monotonic()
            result = step(x)
            dispatched = time.monotonic() - began
            result.block_until_ready()
            took = time.monotonic() - began
        assert cases.same(result, expected)
    assert took > 1.0
    assert dispatched < 0.5


def test_steps_in_flight_behind_each_other(devices):
    """The host is ahead of the device by several steps of one arena."""
    device = devices[0]
    x = cases.data(device)
    with cases.pinned(device) as arena, cases.injected(delay_seconds=2e-3, poison=True):
        step = cases.jit(cases.parking_step(arena), device)
        y = expected = x
        for _ in range(5):
            y = step(y)
            expected = cases.jit(cases.plain_step, device)(expected)
        assert cases.same(y, expected)
        assert arena.counters(device).resets == 0


def test_never_recorded_into_a_cuda_graph(devices):
    """With everything that XLA can record recorded, the calls still run, each time."""
    device = devices[0]
    x = cases.data(device)
    options = {"xla_gpu_graph_min_graph_size": 1}
    with cases.pinned(device) as arena:
        step = jax.jit(cases.parking_step(arena), compiler_options=options)
        for _ in range(4):  # XLA records at the second run or later
            assert cases.same(step(x), cases.jit(cases.plain_step, device)(x))
        assert arena.counters(device).misses == 4 * cases.LAYERS


def test_large_tensors_overlap_with_compute(devices):
    """256 MiB out and back beside matrix products; the values, not the time, are checked."""
    device = devices[0]
    count = 1 << 26
    x = cases.data(device, "float32", count)
    w = jax.device_put(np.full((2048, 2048), 1e-4, "float32"), device)
    with cases.pinned(device, Layout((Slot(0, 4 * count),), 4 * count)) as arena:

        def step(x, w):
            residual, w = cases.fence(x * 3, w)
            token = ffi.offload_start(residual, ffi.first_token(), arena=arena.id, slot=0)
            token, w = cases.fence(token, w)
            w = lax.fori_loop(0, 20, lambda _, w: w @ w, w)
            token, w = cases.fence(token, w)
            token = ffi.offload_done(residual, token, arena=arena.id, slot=0)
            token, w = cases.fence(token, w)
            buffer = ffi.fetch_start(token, residual, arena=arena.id, slot=0)
            buffer, w = cases.fence(buffer, w)
            w = lax.fori_loop(0, 20, lambda _, w: w @ w, w)
            buffer, w = cases.fence(buffer, w)
            return ffi.fetch_done(buffer, arena=arena.id, slot=0), w

        run = jax.jit(step)
        for _ in range(3):
            assert cases.same(run(x, w)[0], np.asarray(x * 3))
        counters = arena.counters(device)
    assert counters.link_nbytes_in == counters.link_nbytes_out == 3 * 4 * count


def test_more_than_the_device_has_is_no_cache(devices):
    with cases.pinned(devices[0]) as arena:
        with pytest.raises(MemoryError, match="cudaMalloc"):
            arena.set_cache_capacity(devices[0], 1 << 50)
        cases_step = cases.jit(cases.parking_step(arena), devices[0])
        assert cases_step(cases.data(devices[0])).shape == (cases.COUNT,)
