"""Compiling for cards that are not there."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import vmem_jax
from vmem_jax.core.cards import CARDS, TARGETS
from vmem_jax.devices import targets
from vmem_jax.devices.targets import Target, target

MiB = 2**20
has_compiler = targets._plugin_name() is not None


@pytest.fixture
def compiler():
    if not has_compiler:
        pytest.skip('no XLA:GPU compiler here: pip install "vmem_jax[gpu-compile]"')


def shaped(card: Target, tree):
    """The arrays' shapes, placed on the card."""
    sharding = card.sharding()
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        jax.eval_shape(lambda: tree),
    )


def conv_step(params, batch):
    """One SGD step of two convolutions and a dense layer."""
    images, labels = batch

    def loss(params):
        x = images
        for kernel in params["convs"]:
            x = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        logits = x.mean((1, 2)) @ params["dense"]
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(log_p, labels[:, None], 1).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def conv_args(dtype=jnp.bfloat16):
    params = {
        "convs": [jnp.zeros((3, 3, 64, 64), dtype), jnp.zeros((3, 3, 64, 64), dtype)],
        "dense": jnp.zeros((64, 16), dtype),
    }
    return params, (jnp.zeros((32, 56, 56, 64), dtype), jnp.zeros((32,), jnp.int32))


def nbytes(tree) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def test_unknown_target_lists_the_names():
    with pytest.raises(ValueError, match=r"'v9000'.*a100.*h200.*rtx6000pro"):
        target("v9000")


def test_missing_plugin_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets, "_PLUGINS", ("jax_plugins.no_such_plugin", "no_such_package.x"))
    with pytest.raises(ImportError, match=r'pip install "vmem_jax\[gpu-compile\]"'):
        target("h200")


@pytest.mark.parametrize("name", TARGETS)
def test_description_states_the_memory(name):
    card = CARDS[name].hardware
    assert f"device_memory_size: {card.memory_nbytes}\n" in targets.text_proto(card)


def test_names_cover_the_current_cards():
    assert {"a100", "h100", "h200", "b200", "rtx6000pro"} <= set(TARGETS)
    assert CARDS["h200"].hardware.memory_nbytes == 150_109_880_320  # a live card's own figure


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("compiler")
class TestCompile:
    @pytest.mark.parametrize("name", TARGETS)
    def test_step_compiles_for_every_target(self, name):
        card = target(name)
        args = conv_args()
        memory = jax.jit(conv_step).lower(*shaped(card, args)).compile().memory_analysis()
        assert memory.argument_size_in_bytes == nbytes(args)
        assert nbytes(args[0]) <= memory.output_size_in_bytes < nbytes(args[0]) + 4096
        assert memory.alias_size_in_bytes == 0
        activation = nbytes(args[1][0])
        assert activation < memory.temp_size_in_bytes < 10 * activation

    def test_fp32_convolutions(self):
        args = shaped(target("h200"), conv_args(jnp.float32))
        memory = jax.jit(conv_step).lower(*args).compile().memory_analysis()
        assert memory.temp_size_in_bytes > 0

    def test_donated_arguments_are_aliased(self):
        args = conv_args()
        lowered = jax.jit(conv_step, donate_argnums=0).lower(*shaped(target("h200"), args))
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes == nbytes(args[0])

    def test_known_peak(self):
        """x @ w1 must be held whole while the second product reads it: 64 MiB, nothing else."""
        card = target("h200")
        sharding = card.sharding()
        x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=sharding)
        memory = jax.jit(lambda x, w1, w2: (x @ w1) @ w2).lower(x, x, x).compile().memory_analysis()
        assert memory.argument_size_in_bytes == 3 * 64 * MiB
        assert memory.output_size_in_bytes == 64 * MiB
        # cuBLAS may ask for a workspace of up to 32 MiB on Hopper
        assert 64 * MiB <= memory.temp_size_in_bytes <= (64 + 32) * MiB

    def test_a_chain_of_saved_activations(self):
        """Eight tanh outputs saved for the backward pass: eight activations and little more."""
        x = jnp.zeros((8192, 2048), jnp.float32)  # 64 MiB
        ws = [jnp.zeros((2048, 2048), jnp.float32)] * 8

        def step(ws, x):
            for w in ws:
                x = jnp.tanh(x @ w)
            return (x**2).sum()

        args = shaped(target("h200"), (ws, x))
        memory = jax.jit(jax.grad(step)).lower(*args).compile().memory_analysis()
        assert 8 * 64 * MiB <= memory.temp_size_in_bytes <= 12 * 64 * MiB

    def test_keys_as_arguments(self):
        """New-style PRNG keys are arguments like any other."""

        def noisy(key, x):
            key, now = jax.random.split(key)
            return key, jnp.where(jax.random.bernoulli(now, 0.5, x.shape), x, 0)

        sharding = target("h200").sharding()
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=sharding)
        x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=sharding)
        memory = jax.jit(noisy, donate_argnums=0).lower(key, x).compile().memory_analysis()
        assert memory.argument_size_in_bytes == 8 + 256 * 256 * 4
        assert memory.alias_size_in_bytes == 8

    def test_offload_to_the_host(self):
        """A copy kept in host memory until a later value exists counts as the host's memory."""

        def offload(x):
            y = jnp.tanh(x @ x)
            kept = jax.device_put(y, jax.memory.Space.Host)
            z = jnp.sin(x @ y) @ x
            kept, z = jax.lax.optimization_barrier((kept, z))  # else XLA drops both copies
            return (z @ x) @ jax.device_put(kept, jax.memory.Space.Device)

        x = jax.ShapeDtypeStruct((2048, 2048), jnp.float32, sharding=target("h200").sharding())
        memory = jax.jit(offload).lower(x).compile().memory_analysis()
        assert memory.host_temp_size_in_bytes == 16 * MiB

    def test_the_process_still_computes_on_its_own_device(self):
        before = jnp.arange(4) + 1
        device = target("h100").device()
        assert device not in jax.devices()
        assert (before + jnp.arange(4)).tolist() == [1, 3, 5, 7]

    def test_device_and_sharding_are_the_same_every_time(self):
        assert target("b200").device() is target("b200").device()
        assert target("b200").sharding() == target("b200").sharding()
        assert target("b200").sharding() != target("h200").sharding()
        assert target("h200") == target("h200")

    @pytest.mark.parametrize("platforms", ["cpu", ""])
    @pytest.mark.parametrize("used_before", [False, True])
    def test_in_a_fresh_process(self, platforms, used_before):
        """JAX may have looked for its plugins before, or not; and say "cpu", or nothing."""
        program = f"""
import jax, sys
if {used_before}:
    assert (jax.numpy.ones(3) + 1).sum() == 6
print("== ours", file=sys.stderr)
from vmem_jax.devices.targets import target
x = jax.ShapeDtypeStruct((512, 512), "float32", sharding=target("h200").sharding())
memory = jax.jit(lambda x: jax.numpy.tanh(x @ x)).lower(x).compile().memory_analysis()
assert memory.argument_size_in_bytes == 2**20
assert (jax.numpy.ones(3) + 1).sum() == 6
"""
        env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        if platforms:
            env["JAX_PLATFORMS"] = platforms
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr.split("== ours")[1], done.stderr


@pytest.mark.gpu_compile
def test_large_products_are_cublas_for_a_card_that_is_not_there(compiler):
    """From 2 GiB of arguments on, as a card chooses; the sum of products is not written over one."""

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).astype("float32").sum())(w)

    w = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    text = {}
    for rows in (4096, 2**18):
        x = jax.ShapeDtypeStruct((rows, 4096), "bfloat16")
        budgeted = vmem_jax.jit(step, budget="100GiB", policy="exact", donate_argnums=0)
        text[rows] = budgeted.lower(w, x).compile(target="h200").as_text()
    assert "__cublas" not in text[4096] and "__cublas" in text[2**18]


def test_state_in_host_memory_that_is_only_read_is_compiled_for_a_card(compiler):
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    frozen = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=host)
    own, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 8), (32, 256)))

    def step(frozen, own, x):
        loss = lambda own: jnp.mean(jnp.tanh(x @ frozen + x @ own @ own.T) ** 2)
        return own - 0.1 * jax.grad(loss)(own)

    allow = ("order", "recompute", "stream")
    jitted = vmem_jax.jit(step, budget="64MiB", allow=allow, donate_argnums=1)
    found = jitted.lower(frozen, own, x).compile(target="h200")
    assert found.memory_analysis().host_argument_size_in_bytes == 256 * 256 * 4
    assert [t.buffer for t in found.plan.transfers] == [0]
