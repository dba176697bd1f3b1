"""The conformance table of compression on CUDA, and what only a device has. `pytest -m gpu`.

The tensors that overflow here are small: managed memory is taken for the worst case.
"""

import compression_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transfer_cases

import vmem_jax
from vmem_jax.core.compression import compressed_nbytes
from vmem_jax.transfer.compression import Site, Store, unusable

pytestmark = pytest.mark.gpu


@pytest.fixture
def devices(devices):
    assert unusable("gpu") == "", "there is a GPU, but the extension has no kernels for it"
    return devices


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_on_cuda(case, devices):
    case(devices[0])


@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_large_tensors(dtype, density, devices):
    """256 MiB and a bit: more blocks than the device runs at once, all over the same cursor."""
    count = 2**28 // jnp.dtype(dtype).itemsize + 13
    keys = jax.random.split(jax.random.key(1))
    bits = jax.random.bits(keys[0], (count,), f"uint{8 * jnp.dtype(dtype).itemsize}")
    kept = jax.random.bernoulli(keys[1], density, (count,)) & (bits != 0)
    x = jax.lax.bitcast_convert_type(jnp.where(kept, bits, 0), dtype)
    capacity = compressed_nbytes(x.nbytes, 1, 1.0)  # nothing overflows, so no managed memory
    with cases.opened(devices[0], (x.nbytes, capacity)) as store:
        step = jax.jit(cases.there_and_back(store, capacity))
        for _ in range(3):
            y = jax.lax.bitcast_convert_type(step(x), bits.dtype)
            assert bool((y == jnp.where(kept, bits, 0)).all())
        [counters] = store.counters(devices[0])
    assert counters.values == 3 * int(kept.sum()) and counters.overflow_nbytes == 0


def test_compresses_on_every_device_at_once(devices):
    if len(devices) < 2:
        pytest.skip("one GPU")
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    shards = [cases.sparse("float32", cases.COUNT, 0.6, seed) for seed in range(len(devices))]
    x = np.concatenate(shards)
    capacity = cases.capacity_of(shards[0], 0.4)
    with Store([Site(shards[0].nbytes, capacity)]) as store:
        for device in devices:
            store.open(device)
        step = jax.shard_map(
            cases.there_and_back(store, capacity),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        for _ in range(3):
            assert jax.jit(step)(placed).tobytes() == x.tobytes()
        counters = [store.counters(device)[0] for device in devices]
    assert [c.values for c in counters] == [3 * cases.values_of(shard) for shard in shards]
    assert all(c.overflow_nbytes > 0 for c in counters)


def test_steps_that_overflow_in_flight_behind_each_other(devices):
    """The host is ahead of the device by many steps, which all use the same overflow memory."""
    x = [cases.sparse("float32", 20 * cases.COUNT, 0.9, seed) for seed in range(4)]
    placed = [jax.device_put(each, devices[0]) for each in x]
    capacity = cases.capacity_of(x[0], 0.2)
    with cases.opened(devices[0], (x[0].nbytes, capacity)) as store:
        step = jax.jit(cases.there_and_back(store, capacity))
        results = [step(each) for _ in range(25) for each in placed]
        for i, result in enumerate(results):
            assert result.tobytes() == x[i % 4].tobytes()


def test_compression_is_never_recorded_into_a_cuda_graph(devices):
    """With everything that XLA can record recorded, the calls still run, each time."""
    x = cases.sparse("uint16", 100_003, 0.5)
    capacity = cases.capacity_of(x, 0.3)
    options = {"xla_gpu_graph_min_graph_size": 1}
    with cases.opened(devices[0], (x.nbytes, capacity)) as store:
        step = jax.jit(
            lambda x: cases.there_and_back(store, capacity)(x) + 1, compiler_options=options
        )
        for _ in range(4):  # XLA records at the second run or later
            assert transfer_cases.same(step(jax.device_put(x, devices[0])), x + 1)
        assert store.counters(devices[0])[0].runs == 4


def test_more_overflow_than_the_device_has_free_is_refused(devices):
    with Store([Site(1 << 50, 1 << 49)]) as store:
        with pytest.raises(MemoryError, match=f"{1 << 50} bytes at the worst.* free"):
            store.open(devices[0])


@pytest.mark.parametrize("sparse", [True, False], ids=["half zeros", "no zeros"])
def test_stacks_of_a_loop(sparse, devices):
    """24 layers stack slices of 32 MiB without their zeros: the same bits, in less memory."""
    layers, rows, width, hidden = 24, 16_384, 256, 1024

    def step(w, x):
        def loss(w):
            layer = lambda y, w: (y + jax.nn.relu(y @ w[0]) @ w[1], None)
            return jnp.square(jax.lax.scan(layer, x, w)[0]).mean()

        return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (layers, width, hidden), (layers, hidden, width), (rows, width)
    a, b, x = (jax.random.normal(k, s, "bfloat16") / 16 for k, s in zip(keys, shapes, strict=True))
    args = ((a, b), x) if sparse else jax.tree.map(jnp.abs, ((a, b), x))
    exact = vmem_jax.jit(step, budget="device", policy="exact").lower(*args).compile()
    ours = vmem_jax.jit(step, budget=0.85, allow=("order", "compress"), density=0.6)
    compiled = ours.lower(*args).compile()
    [(_, held)] = compiled.plan.compressed
    saved = layers * rows * hidden * 2 - held
    assert exact.need_nbytes - compiled.need_nbytes == pytest.approx(saved, rel=0.1)
    expected = exact(*args)
    for _ in range(3):
        for mine, theirs in zip(*map(jax.tree.leaves, (compiled(*args), expected)), strict=True):
            assert mine.tobytes() == theirs.tobytes()
    [site] = compiled.compression.counters(devices[0])
    assert site.runs == 3 * layers
    assert (site.overflow_nbytes > 0) == (not sparse)
