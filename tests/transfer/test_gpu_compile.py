"""What XLA:GPU makes of the four calls, compiled for an H200 that need not be there."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
import transfer_cases as cases
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.capture import capture
from vmem_jax.core.cards import CARDS
from vmem_jax.core.compression import compressed_nbytes
from vmem_jax.core.plan import Plan, Transfer
from vmem_jax.core.program import Phase
from vmem_jax.core.validate import violations
from vmem_jax.devices.targets import target
from vmem_jax.policy.order import canonical_order
from vmem_jax.rewrite.rewrite import rewrite
from vmem_jax.rewrite.transfers import layout_of
from vmem_jax.transfer import compression, extension
from vmem_jax.transfer.arena import Arena
from vmem_jax.transfer.compression import Site, Store, compress, decompress
from vmem_jax.transfer.ffi import Ffi

pytestmark = pytest.mark.gpu_compile


@pytest.fixture
def compiled():
    """Compiles a step for the card; skips where the CUDA handlers were not built."""
    card = target("h200")  # first, so that JAX misses no driver when it looks for devices
    if "CUDA" not in extension.load().targets():
        pytest.skip("the extension was built without CUDA")
    x = jax.ShapeDtypeStruct((cases.COUNT,), "float32")
    here = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=card.sharding())
    return lambda step, avals=(x,): jax.jit(step).lower(*map(here, avals)).compile()


def calls(text):
    return re.findall(r'custom_call_target="vmem_jax_(\w+)"', text)


def temporaries(executable):
    return executable.memory_analysis().temp_size_in_bytes / cases.NBYTES


def test_temporaries_fall_and_the_order_stays(compiled):
    with Arena(cases.layout()) as arena:
        parked = compiled(cases.parking_step(arena))
    assert temporaries(compiled(cases.plain_step)) > cases.LAYERS
    assert temporaries(parked) < 3
    there, back = ["offload_start", "offload_done"], ["fetch_start", "fetch_done"]
    assert calls(parked.as_text()) == there * cases.LAYERS + back * cases.LAYERS


def test_compressed_tensors_take_their_capacity(compiled):
    """Between two products, where the tensors themselves would be live."""
    if compression.unusable("gpu"):
        pytest.skip(compression.unusable("gpu"))
    side, count = 128, 8
    capacity = compressed_nbytes(side * side, 4, 0.25)
    with Store([Site(4 * side * side, capacity)] * count) as store:

        def step(x, compressing):
            kept = []
            for site in range(count):
                x = jnp.maximum(x @ x, 0)
                kept.append(x)
                if compressing:
                    kept[-1] = compress(x, store=store.id, site=site, capacity=capacity)
                kept[-1], x = cases.fence(kept[-1], x)
            for site in reversed(range(count)):
                back, x = cases.fence(kept[site], x)
                if compressing:
                    back = decompress(back, x, store=store.id, site=site)
                x = x @ back
            return x

        x = jax.ShapeDtypeStruct((side, side), "float32")
        with_calls = compiled(lambda x: step(x, True), (x,))
        without = compiled(lambda x: step(x, False), (x,))
    assert calls(with_calls.as_text()) == ["compress"] * count + ["decompress"] * count
    saved = temporaries(without) - temporaries(with_calls)
    assert saved > (count - 3) * (1 - capacity / cases.NBYTES)


def test_loops_keep_their_calls_and_move_no_buffer(compiled):
    with Arena(cases.STACK) as arena:
        parked = compiled(cases.looping_step(arena))
    text = parked.as_text()
    assert sorted(calls(text)) == ["fetch_done", "fetch_start", "offload_done", "offload_start"]
    [start] = re.findall(r"%(\S+) = f32\S* custom-call.*vmem_jax_fetch_start", text)
    [operand] = re.findall(r"custom-call\(%(\S+)\), custom_call_target=.vmem_jax_fetch_done", text)
    assert "copy" not in operand, (start, operand)
    assert temporaries(parked) < temporaries(compiled(cases.looping_step(None))) - cases.LAYERS / 2


def test_every_call_stands_where_the_plan_has_it(compiled):
    """Between the same products: what is issued late waits, what is waited for early does too."""
    layers = 8

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x.astype(jnp.float32))

    def step(params, x):
        return [p - 0.1 * g for p, g in zip(params, jax.grad(loss)(params, x), strict=True)]

    params = [jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)] * layers
    x = jax.ShapeDtypeStruct((8192, 512), jnp.bfloat16)
    captured = capture(jax.jit(step).trace(params, x).jaxpr)
    program, order = captured.program, canonical_order(captured.program)
    products = [p for p, s in enumerate(order) if program.steps[s].op == "dot_general"]
    last_forward = max(p for p in products if program.steps[order[p]].phase is Phase.FORWARD)
    transfers = []
    for b, readers in enumerate(program.readers):
        uses = [p for p, s in enumerate(order) if s in readers]
        if program.producer[b] < 0 or not uses or program.is_resident[b]:
            continue
        made = order.index(program.producer[b])
        gaps = [(i, j) for i, j in itertools.pairwise([made, *uses]) if i < last_forward < j]
        for first, last in gaps:
            inside = [p for p in products if first < p < last]
            if len(inside) >= 4:
                transfers.append(Transfer(b, inside[0], inside[1], inside[-2], inside[-1]))
    plan = Plan(program.fingerprint, "test", order, True, None, 0, 0.0, tuple(transfers))
    assert len(transfers) >= layers // 2 and not violations(program, plan)
    fun = jaxpr_as_fun(rewrite(captured, plan, Ffi(layout_of(program, plan))))
    avals = [v.aval for v in compat.open_jaxpr(captured.flat).invars]
    text = compiled(lambda *args: fun(*args), avals).as_text()
    found, before = {}, 0
    for line in text[text.index("ENTRY") :].splitlines():
        if call := re.search(r'custom_call_target="vmem_jax_(\w+)"', line):
            [slot] = re.findall(r"slot = (\d+)", line)
            found[call[1], int(slot)] = before
        else:
            before += bool(re.search(r"__cublas|gemm_fusion\S* = .*fusion\(", line))
    assert before == len(products)
    names = ("offload_start", "offload_done", "fetch_start", "fetch_done")
    for i, t in enumerate(transfers):
        for name, point in zip(names, (t.start, t.gone, t.fetch, t.back), strict=True):
            assert found[name, i] == sum(p < point for p in products), (name, t)


# ---- XLA's own copies


LAYERS, WIDTH, ROWS = 10, 512, 8192


def mlp(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.square(y).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def mlp_shapes():
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")
    return [w] * LAYERS, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")


def copies(text):
    """(start, done, leaves) of every copy between device and host, as indices of the schedule."""
    schedule = text[text.index("ENTRY") :].splitlines()
    starts, found = {}, []
    for i, line in enumerate(schedule):
        if " copy-start(" in line:
            name = re.match(r"\s*%(\S+) =", line).group(1)
            starts[name] = i, "S(5)" in line.split("}, ")[0]
        elif done := re.search(r" copy-done\(%(\S+?)\)", line):
            start, leaves = starts.pop(done.group(1))
            found.append((start, i, leaves))
    return found, schedule


def test_xlas_copies_free_memory_and_stay_beside_the_work():
    target("h200")  # first, so that JAX misses no driver when it looks for devices
    link = dict.fromkeys(("link_out", "link_in", "link_both"), 1e12)  # all that is moved hides
    machine = dataclasses.replace(CARDS["h200"].machine, **link)
    options = {"allow": ("order", "offload"), "donate_argnums": 0, "machine": machine}
    kept = vmem_jax.jit(mlp, budget="1GiB", policy="exact", donate_argnums=0)
    kept_need = kept._entry_for(mlp_shapes(), {}, "h200").best.need
    budgeted = vmem_jax.jit(mlp, budget=int(0.6 * kept_need), transport="memory_kinds", **options)
    entry = budgeted._entry_for(mlp_shapes(), {}, "h200")
    assert entry.best.need <= 0.6 * kept_need
    plan, compiled = entry.best.plan, entry.best.compiled
    parked = sum(entry.traced.captured.program.buffers[t.buffer].nbytes for t in plan.transfers)
    assert 0 < compiled.memory_analysis().host_temp_size_in_bytes <= parked
    found, schedule = copies(compiled.as_text())
    assert len(found) == 2 * len(plan.transfers)
    assert sum(leaves for _, _, leaves in found) == len(plan.transfers)
    beside = [
        any("fusion(" in s or "custom-call(" in s for s in schedule[a:b]) for a, b, _ in found
    ]
    assert sum(beside) >= len(found) / 2
    # with the counterpart, to see that these tests see anything
    assert copies(kept._entry_for(mlp_shapes(), {}, "h200").best.compiled.as_text())[0] == []


def test_hosted_moments_are_no_device_memory():
    """A step within less than its parameters and moments take, by XLA:GPU's own figures."""
    target("h200")
    tx = optax.adam(1e-2)

    def step(state, x):
        weights, moments = state

        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return jnp.square(y).mean()

        updates, moments = tx.update(jax.grad(loss)(weights), moments, weights)
        return optax.apply_updates(weights, updates), moments

    host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host")
    w = jax.ShapeDtypeStruct((2048, 2048), "float32")
    adam, *rest = jax.eval_shape(tx.init, [w] * 6)
    hosted = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=host), adam)
    adam = adam._replace(mu=hosted.mu, nu=hosted.nu)
    x = jax.ShapeDtypeStruct((1024, 2048), "float32")
    one = 4 * 2048 * 2048
    for donate in ((), (0,)):
        budget = 18 * one if donate else 24 * one
        budgeted = vmem_jax.jit(step, budget=budget, donate_argnums=donate)
        entry = budgeted._entry_for((([w] * 6, (adam, *rest)), x), {}, "h200")
        memory = entry.best.compiled.memory_analysis()
        assert entry.best.need <= budget
        assert memory.argument_size_in_bytes < 7 * one  # the parameters and the batch
        assert memory.host_argument_size_in_bytes == 12 * one
        assert memory.host_alias_size_in_bytes == (12 * one if donate else 0)
        found, _ = copies(entry.best.compiled.as_text())
        assert sum(leaves for _, _, leaves in found) == 12 and len(found) == 24


@pytest.mark.parametrize(
    ("clipped", "count"),
    [(False, 1), (True, 1), (False, 2)],
    ids=["in the backward loop", "behind it", "in sub-batches"],
)
def test_hosted_stacks_are_no_device_memory(clipped, count, tmp_path):
    """A scanned step within less than one stack of its weights, or with that of its gradients. Slices
    are copied beside the computation, not by kernels, which would fill the device."""
    target("h200")
    layers, width = 16, 512
    adam = optax.adamw(1e-3)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adam) if clipped else adam

    def step(state, x):
        w, s = state
        layer = lambda y, w: (y + jnp.tanh(y @ w), None)
        grads = jax.grad(lambda w: jnp.square(jax.lax.scan(layer, x, w)[0]).mean())(w)
        updates, s = tx.update(grads, s, w)
        return optax.apply_updates(w, updates), s

    host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host")
    w = jax.ShapeDtypeStruct((layers, width, width), "float32")
    place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=host) if a.ndim == 3 else a
    state = jax.tree.map(place, (w, jax.eval_shape(tx.init, w)))
    x = jax.ShapeDtypeStruct((64, width), "float32")
    one = 4 * layers * width * width
    written = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    options = {"sub_batches": count, "compiler_options": written}
    budgeted = vmem_jax.jit(step, budget="1GiB", donate_argnums=0, **options)
    entry = budgeted._entry_for((state, x), {}, "h200")
    memory, text = entry.best.compiled.memory_analysis(), entry.best.compiled.as_text()
    apart = clipped or count > 1  # updates wait for all gradients
    assert entry.best.need < (1.5 if apart else 0.75) * one
    assert entry.best.predicted_need == pytest.approx(entry.best.need, rel=0.15)
    assert memory.argument_size_in_bytes < 0.1 * one and memory.host_temp_size_in_bytes == 0
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == 3 * one
    started = lambda what: len(re.findall(rf"%{what}-start[.\d]* =", text))
    # each stack once in the loop of updates, the weights in the forward loop, and in the backward
    # loop, too, where that is another
    assert started("dynamic-slice") == (5 if apart else 4)
    assert started("dynamic-update-slice") == 3 and "host_compute" not in text
    launched = max(tmp_path.glob("*thunk_sequence.txt")).read_text()
    asynchronous = launched.count("kAsyncStart")
    assert asynchronous >= (8 if apart else 7) and "wrapped_dynamic" not in launched
