"""What compression must do, once for every platform: tensors without their zeros, and back.

A case is a function of a device that asserts; `CASES` is the table. tests/transfer runs it on the
CPU twin, tests/gpu on CUDA.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transfer_cases
from jax import lax
from threads import in_threads

from vmem_jax.core.compression import (
    BLOCK_NBYTES,
    UNIT_NBYTES,
    compressed_nbytes,
    min_capacity,
)
from vmem_jax.transfer.compression import Site, Store, compress, decompress
from vmem_jax.transfer.layout import Layout, Parked

COUNT = 3 * BLOCK_NBYTES // 4 + 5  # float32: three blocks and a bit
DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "int8",
    "float8_e4m3fn",
    "bool",
)


def sparse(dtype, count, density, seed=0):
    """A numpy array of bits as good as random, about `density` of its elements not all zero.

    NaN of all payloads, both infinities, denormals and -0.0 are among them.
    """
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(count) < density
    size = min(dtype.itemsize, 8)
    parts = dtype.itemsize // size
    bits = rng.integers(1, 1 << 8 * size, count * parts, np.uint64, endpoint=False)
    bits[rng.random(bits.size) < 0.1] = 1 << 8 * size - 1  # -0.0, or the least integer
    bits[rng.random(bits.size) >= density] = 0
    return bits.astype(f"uint{8 * size}").view(dtype)


def values_of(x) -> int:
    """How many elements of a numpy array are not all zero bits."""
    return np.count_nonzero(x.view(f"uint{8 * min(x.dtype.itemsize, 8)}"))


def capacity_of(x, density=None) -> int:
    size = min(x.dtype.itemsize, 8)
    count = x.nbytes // size
    density = values_of(x) / max(count, 1) if density is None else density
    return compressed_nbytes(count, size, density)


@contextlib.contextmanager
def opened(device, *sites) -> Iterator[Store]:
    with Store([Site(*site) for site in sites]) as store:
        store.open(device)
        yield store


def there_and_back(store, capacity, site=0):
    def step(x):
        c = compress(x, store=store.id, site=site, capacity=capacity)
        return decompress(c, x, store=store.id, site=site)

    return step


def comes_back(device, x, capacity, runs=1):
    """Checks a numpy array against itself, and returns what was counted."""
    with opened(device, (x.nbytes, capacity)) as store:
        step = jax.jit(there_and_back(store, capacity))
        for _ in range(runs):
            assert step(jax.device_put(x, device)).tobytes() == x.tobytes()
        [counters] = store.counters(device)
    return counters


# ---- the table


def any_dtype_and_size_comes_back(device):
    with jax.enable_x64(True):
        for dtype in DTYPES:
            a_block = BLOCK_NBYTES // jnp.dtype(dtype).itemsize
            for count, density in ((1, 1), (77, 0.3), (2 * a_block + 7, 0.5)):
                x = sparse(dtype, count, density)
                counters = comes_back(device, x, capacity_of(x))
                assert counters.values == values_of(x)
                assert counters.overflow_nbytes == 0


def any_number_of_elements_comes_back(device):
    block = BLOCK_NBYTES // 2
    for count in (2, 7, 8, 9, 63, 129, 1023, block - 1, block, block + 1, 5 * block - 3):
        x = sparse("bfloat16", count, 0.5)
        assert comes_back(device, x, capacity_of(x)).elements == count


def nothing_and_shapes_come_back(device):
    for shape in ((0,), (3, 0), (), (4, 5, 6)):
        x = np.arange(np.prod(shape), dtype="float32").reshape(shape)
        with opened(device, (x.nbytes, 4096)) as store:
            y = jax.jit(there_and_back(store, 4096))(jax.device_put(x, device))
        assert (y.shape, y.dtype) == (x.shape, x.dtype) and y.tobytes() == x.tobytes()


def any_density_comes_back(device):
    for density in (0, 0.001, 0.5, 0.9, 1):
        for bunched in (False, True):
            x = sparse("float32", COUNT, density)
            if bunched:
                x = np.sort(x.view("uint32")).view("float32")
            counters = comes_back(device, x, capacity_of(x))
            assert counters.values == values_of(x) and counters.overflow_nbytes == 0
            assert counters.density == values_of(x) / COUNT


def special_values_come_back(device):
    bits = [0x7FC00001, 0xFF800001, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000, 0, 0x3F800000]
    x = np.array(bits * 40, "uint32").view("float32")
    assert comes_back(device, x, capacity_of(x)).values == 7 * 40


def denser_than_planned_overflows(device):
    """By a little, by much, and with room for no value at all; the counter says how much."""
    for dtype in ("bfloat16", "float32", "int8"):
        x = sparse(dtype, 150_001, 0.7)
        values, blocks = values_of(x) * x.itemsize, -(-x.nbytes // BLOCK_NBYTES)
        exact, least = capacity_of(x), min_capacity(x.size, x.itemsize)
        a_little, half = exact - UNIT_NBYTES * (blocks + 1), (exact + least) // 2
        for capacity, low, high in (
            (exact, 0, 0),
            (a_little, 1, 2 * BLOCK_NBYTES),
            (half, values // 2 - UNIT_NBYTES * blocks, values // 2 + 2 * BLOCK_NBYTES),
            (least, values, values + UNIT_NBYTES * blocks),
        ):
            counters = comes_back(device, x, capacity, runs=3)
            assert (counters.runs, counters.values) == (3, 3 * values_of(x))
            assert low <= counters.overflow_nbytes / 3 <= high


def a_tensor_turns_dense_between_runs(device):
    x = [sparse("float32", COUNT, density, seed) for seed, density in enumerate((0.4, 1, 0, 0.4))]
    capacity = capacity_of(x[0], 0.45)
    with opened(device, (x[0].nbytes, capacity)) as store:
        step = jax.jit(there_and_back(store, capacity))
        overflowed = []
        for each in x:
            assert step(jax.device_put(each, device)).tobytes() == each.tobytes()
            overflowed.append(store.counters(device)[0].overflow_nbytes)
        [counters] = store.counters(device)
    assert overflowed[0] == 0 < overflowed[1] == overflowed[2] == overflowed[3]
    assert counters.runs == 4 and counters.elements == 4 * COUNT
    assert counters.values == sum(map(values_of, x))


def sites_of_a_step_are_apart(device):
    """Nested and after each other, some overflowing; each is counted for itself."""
    x = [sparse("bfloat16", 30_000 + i, 0.5, i) for i in range(4)]
    capacities = [
        capacity_of(each, density) for each, density in zip(x, (0.6, 0.1, 0.6, 0), strict=True)
    ]

    def step(*x):
        c = []
        for site, each in enumerate(x):
            c.append(compress(each, store=store.id, site=site, capacity=capacities[site]))
            c = list(lax.optimization_barrier(c))
        order = (3, 1, 2, 0)
        back = {site: decompress(c[site], x[site], store=store.id, site=site) for site in order}
        return [back[site] for site in range(4)]

    with opened(device, *[(a.nbytes, n) for a, n in zip(x, capacities, strict=True)]) as store:
        run = transfer_cases.jit(step, device)
        for _ in range(2):
            back = run(*[jax.device_put(each, device) for each in x])
            assert [b.tobytes() for b in back] == [a.tobytes() for a in x]
        counters = store.counters(device)
    assert [c.values for c in counters] == [2 * values_of(each) for each in x]
    assert [c.overflow_nbytes > 0 for c in counters] == [False, True, False, True]


def byte_array_moves_through_an_arena(device):
    """The compressed tensor is parked while the step goes on, with and without overflow."""
    x = sparse("bfloat16", 100_003, 0.5)
    for density in (0.55, 0.2):
        capacity = capacity_of(x, density)
        layout = Layout.of([Parked(capacity, 0, 1)])
        faults = dict(delay_seconds=1e-3, poison=True, poison_source=True)

        def step(x, w, capacity=capacity):
            c = compress(x, store=store.id, site=0, capacity=capacity)
            token, w = transfer_cases.park(arena, 0, c, w)
            c, w = transfer_cases.back(arena, 0, token, c, w)
            return decompress(c, x, store=store.id, site=0), w

        with (
            opened(device, (x.nbytes, capacity)) as store,
            transfer_cases.pinned(device, layout) as arena,
            transfer_cases.injected(**faults),
        ):
            w = jax.device_put(np.zeros(capacity, "uint8"), device)
            run = transfer_cases.jit(step, device)
            for _ in range(3):
                assert run(jax.device_put(x, device), w)[0].tobytes() == x.tobytes()
            assert arena.counters(device).link_nbytes_out == 3 * capacity
            assert (store.counters(device)[0].overflow_nbytes > 0) == (density < 0.5)


def loops_compress_and_decompress_in_each_iteration(device):
    x = sparse("float32", 7 * COUNT, 0.5).reshape(7, COUNT)
    capacity = capacity_of(x[0], 0.1)
    with opened(device, (x[0].nbytes, capacity)) as store:
        body = there_and_back(store, capacity)
        back = jax.jit(lambda x: lax.map(body, x))(jax.device_put(x, device))
        assert back.tobytes() == x.tobytes()
        assert store.counters(device)[0].runs == 7


def threads_run_one_step(device):
    """Their runs interleave, and tensors of both overflow."""
    x = [sparse("float32", 20 * COUNT, 0.9, seed) for seed in range(3)]
    capacity = capacity_of(x[0], 0.2)
    wrong = []
    with opened(device, (x[0].nbytes, capacity)) as store:
        step = jax.jit(there_and_back(store, capacity))

        def work(x):
            for _ in range(8):
                if step(jax.device_put(x, device)).tobytes() != x.tobytes():
                    wrong.append(True)

        in_threads(*(functools.partial(work, each) for each in x))
        assert not wrong
        assert store.counters(device)[0].runs == 24


def misuse_is_an_error(device):
    """What the program and the store do not agree on; the next run is right again."""
    x = jax.device_put(sparse("float32", 1000, 0.5), device)
    n = 4096

    def again(c, like=x, site=0):
        return decompress(c, like, store=store.id, site=site)

    one = lambda x, site=0, capacity=n: compress(x, store=store.id, site=site, capacity=capacity)
    halves = jax.ShapeDtypeStruct((2000,), "bfloat16")
    misuses = {
        "site 2 of a store with 2 sites": lambda x: one(x, site=2),
        "site -1 is negative": lambda x: one(x, site=-1),
        "tensor of 4000 bytes in 4096, not for one of 4000 bytes in 4000": lambda x: one(
            x, capacity=4000
        ),
        "not for one of 2000 bytes in 4096": lambda x: one(x[:500]),
        "site 0 holds nothing": lambda x: again(jnp.zeros(n, "uint8")),
        "site 1 holds nothing": lambda x: again(one(x), site=1),
        "elements of 4 bytes, and is decompressed as elements of 2": lambda x: again(
            one(x), halves
        ),
    }
    for message, step in misuses.items():
        with opened(device, (x.nbytes, n), (x.nbytes, n)) as store:
            with pytest.raises(jax.errors.JaxRuntimeError, match=message):
                jax.block_until_ready(jax.jit(step)(x))
            assert transfer_cases.same(jax.jit(there_and_back(store, n))(x), x)


def unknown_or_unopened_store_is_an_error(device):
    x = jax.device_put(sparse("float32", 1000, 0.5), device)
    store = Store([Site(x.nbytes, 4096)])
    step = jax.jit(there_and_back(store, 4096))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"not open on .* open it before"):
        jax.block_until_ready(step(x))
    store.open(device)
    store.open(device)  # again
    assert transfer_cases.same(step(x), x)
    store.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{store.id}: it was freed"):
        jax.block_until_ready(step(x))


CASES = (
    any_dtype_and_size_comes_back,
    any_number_of_elements_comes_back,
    nothing_and_shapes_come_back,
    any_density_comes_back,
    special_values_come_back,
    denser_than_planned_overflows,
    a_tensor_turns_dense_between_runs,
    sites_of_a_step_are_apart,
    byte_array_moves_through_an_arena,
    loops_compress_and_decompress_in_each_iteration,
    threads_run_one_step,
    misuse_is_an_error,
    unknown_or_unopened_store_is_an_error,
)
