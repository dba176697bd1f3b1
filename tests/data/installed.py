"""Run by scripts/package.sh in a clean environment: what `pip install vmem_jax` has to bring.

python installed.py         the wheel alone
python installed.py cuda    with that of vmem_jax_cuda13, where no GPU has to be
"""

import fnmatch
import importlib.metadata
import shutil
import subprocess
import sys
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
cuda = sys.argv[1:] == ["cuda"]
expected = "CPU alone, *"
if cuda:
    expected = "CPU and CUDA 13.*, convolutions by cuDNN (*), from vmem_jax_cuda13"
assert fnmatch.fnmatch(extension.describe(), expected), extension.describe()
if cuda:  # every call for the GPU is there, and JAX has taken it; no library is missing
    targets = extension.load().targets()
    assert {*targets["CUDA"]} == {*targets["cpu"], "micro_conv"}, targets
    (build,) = importlib.metadata.entry_points(group=extension.PLUGINS)
    assert Path(build.load().__file__).with_name("_driver_stub.so").is_file()
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
assert f"transfers: {extension.describe()}" in ended.stdout, ended.stdout
