"""Compression on the CPU twin: the table, its format, and who owns a store."""

import gc

import compression_cases as cases
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmem_jax.core.compression import (
    BLOCK_NBYTES,
    UNIT_NBYTES,
    compressed_nbytes,
    min_capacity,
    most_values,
)
from vmem_jax.transfer.compression import Site, Store, compress, decompress, live_stores

CPU = jax.devices("cpu")[0]


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_on_the_cpu(case):
    case(CPU)


COUNT = 2 * BLOCK_NBYTES + 333  # of 2 bytes: four blocks and a bit
ROOMY = compressed_nbytes(COUNT, 2, 1.0)
TIGHT = compressed_nbytes(COUNT, 2, 0.3)


@pytest.fixture(scope="module")
def compiled():
    """A store of a roomy and a tight site, and what compresses and decompresses by each."""
    with cases.opened(CPU, (2 * COUNT, ROOMY), (2 * COUNT, TIGHT)) as store:

        def run(x):
            results = []
            for site, capacity in enumerate((ROOMY, TIGHT)):
                c = compress(x, store=store.id, site=site, capacity=capacity)
                results += [c, decompress(c, x, store=store.id, site=site)]
            return results

        yield jax.jit(run)


def of_parts(densities, seed):
    parts = np.array_split(np.arange(COUNT), len(densities))
    drawn = [
        cases.sparse("float16", len(part), density, seed + i)
        for i, (part, density) in enumerate(zip(parts, densities, strict=True))
    ]
    return np.concatenate(drawn)


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.integers(0, 1000))
def test_random_densities_come_back_in_the_bytes_that_were_told(compiled, densities, seed):
    x = of_parts(densities, seed)
    roomy, back, _, back_from_tight = map(np.asarray, compiled(x))
    assert back.tobytes() == back_from_tight.tobytes() == x.tobytes()

    least = min_capacity(COUNT, 2)
    taken = least + UNIT_NBYTES * int(roomy[:8].view("uint64")[0])
    values = cases.values_of(x)
    predicted = compressed_nbytes(COUNT, 2, values / COUNT)
    blocks = -(-x.nbytes // BLOCK_NBYTES)
    assert least + 2 * values <= taken <= predicted < least + 2 * values + UNIT_NBYTES * blocks
    assert values <= most_values(COUNT, 2, predicted)

    mask = np.packbits(x.view("uint16") != 0, bitorder="little")
    begin = 16 * -(-8 * (1 + blocks) // 16)
    assert roomy[begin : begin + mask.size].tobytes() == mask.tobytes()


def test_what_is_told_is_needed():
    """Where each block wastes the most, a unit less would overflow."""
    x = np.zeros(COUNT, "float16")
    x[:: BLOCK_NBYTES // 2] = 1
    predicted = cases.capacity_of(x)
    assert cases.comes_back(CPU, x, predicted).overflow_nbytes == 0
    assert cases.comes_back(CPU, x, predicted - UNIT_NBYTES).overflow_nbytes == UNIT_NBYTES


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("elements", [0, 1, 100, 20_000, 123_457])
def test_most_values_is_the_inverse(elements, itemsize):
    least, full = min_capacity(elements, itemsize), compressed_nbytes(elements, itemsize, 1)
    count = elements * max(1, itemsize // 8)
    size = min(itemsize, 8)
    assert most_values(elements, itemsize, least - 1) == -1
    assert most_values(elements, itemsize, full) == count
    for capacity in range(least, full, max(1, (full - least) // 50)):
        values = most_values(elements, itemsize, capacity)
        assert compressed_nbytes(count, size, values / count) <= capacity
        assert compressed_nbytes(count, size, (values + 1) / count) > capacity


def test_half_of_a_16_bit_tensor_takes_56_percent():
    assert compressed_nbytes(1 << 24, 2, 0.5) / (2 << 24) == pytest.approx(0.5625, abs=2e-3)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: compressed_nbytes(1, 4, 1.5), r"`density`.*0 to 1.*1\.5"),
        (lambda: compressed_nbytes(1, 3, 0.5), r"`itemsize` 3"),
        (lambda: min_capacity(-1, 4), r"negative.*-1"),
        (lambda: Site(-1, 0), "no negative"),
        (
            lambda: compress(np.ones(1000, "float32"), store=1, site=3, capacity=100),
            r"float32 \(1000,\).*into 100 bytes.*takes 144.*site 3",
        ),
        (
            lambda: compress(jax.numpy.ones(8, "int4"), store=1, site=0, capacity=100),
            r"int4 \(8,\).*smaller than a byte",
        ),
    ],
)
def test_what_cannot_be_compressed_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_calls_survive_where_nothing_reads_them():
    with Store([Site(4000, 4096)]) as store:

        def step(x):
            for _ in range(2):
                compress(x, store=store.id, site=0, capacity=4096)
            return x

        text = jax.jit(step).lower(jax.ShapeDtypeStruct((1000,), "float32")).compile().as_text()
    assert text.count('custom_call_target="vmem_jax_compress"') == 2


def test_compiler_counts_the_byte_array():
    """What lives between the two calls is the capacity, not the tensor."""
    x = jax.ShapeDtypeStruct((1 << 20,), "float32")
    capacity = compressed_nbytes(1 << 20, 4, 0.25)
    with Store([Site(4 << 20, capacity)]) as store:
        step = lambda x: cases.there_and_back(store, capacity)(x * 2) + 1
        need = jax.jit(step).lower(x).compile().memory_analysis().temp_size_in_bytes
    assert capacity <= need < capacity + 4096


def test_store_is_freed_with_its_owner():
    gc.collect()  # stores of other tests
    before = live_stores()
    store = Store([Site(16, 64)])
    store.open(CPU)
    assert live_stores() == before + 1
    del store
    gc.collect()
    assert live_stores() == before


def test_bytes_that_were_changed_are_an_error():
    x = cases.sparse("float32", 1000, 0.5)

    def step(x):
        c = compress(x, store=store.id, site=0, capacity=4096)
        return decompress(c.at[20].set(~c[20]), x, store=store.id, site=0)

    with cases.opened(CPU, (x.nbytes, 4096)) as store:
        with pytest.raises(jax.errors.JaxRuntimeError, match="block 0 is not what compress wrote"):
            jax.block_until_ready(jax.jit(step)(x))


def test_overflow_memory_is_given_back():
    """A run that overflows leaves nothing behind but addresses."""

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    x = jax.numpy.ones(1 << 24, "float32")
    capacity = min_capacity(x.size, 4)
    with cases.opened(CPU, (x.nbytes, capacity)) as store:
        step = jax.jit(lambda x: cases.there_and_back(store, capacity)(x)[0])
        before = resident()
        assert step(x) == 1
        assert store.counters(CPU)[0].overflow_nbytes == x.nbytes
        assert resident() < before + x.nbytes // 2
