"""Run by scripts/package.sh in a clean environment: what `pip install vmem_jax` has to bring."""

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp

import vmem_jax
from vmem_jax.transfer import extension

assert not any(map(shutil.which, ("cc", "c++", "g++", "gcc"))), (
    "this is to show that none is needed"
)
assert "site-packages" in vmem_jax.__file__, vmem_jax.__file__
assert vmem_jax.__version__ == importlib.metadata.version("vmem_jax")
assert extension.describe().startswith("CPU alone"), extension.describe()
folder = Path(vmem_jax.__file__).parent
assert (folder / "py.typed").is_file() and (folder / "report/pages/memory.js").is_file()


def train_step(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


weights, x = [jnp.eye(32) for _ in range(6)], jnp.ones((2048, 32))
moving = vmem_jax.jit(train_step, budget=0.6, allow=("order", "offload"), sub_batches=1)
plan = moving.plan(weights, x)
assert plan.transfers, "the extension moves values"
for ours, plain in zip(moving(weights, x), jax.jit(train_step)(weights, x), strict=True):
    assert jnp.allclose(ours, plain, rtol=1e-5, atol=1e-6)
ended = subprocess.run(["vmem-jax", "info"], capture_output=True, text=True, check=True)
assert f"vmem_jax {vmem_jax.__version__}" in ended.stdout, ended.stdout
