"""What every test gets: shared helpers on the path, reproducible hypothesis, visible GPU skips."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile

import hypothesis
import pytest
from slow import is_drawn, slow_tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-share", type=int, default=1, metavar="N", help="one in N slow tests")
    parser.addoption("--slow-seed", default="", metavar="TEXT", help="which of them")


def pytest_configure(config: pytest.Config) -> None:
    # A test must not depend on what this machine has: no accelerator unless it asks for one.
    if config.option.markexpr != "gpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Nor on what was measured on it: a fresh, empty directory for profiles.
    os.environ["VMEM_JAX_CACHE"] = own = tempfile.mkdtemp(prefix="vmem_jax_test_")
    if config.option.markexpr == "gpu_compile":
        # Plans of one step have most kernels in common. The file is this process's: XLA locks none.
        # Only where nothing runs: on a GPU kernels of such a file ended in illegal instructions.
        flag = f"--xla_gpu_kernel_cache_file={own}/kernels"
        os.environ["XLA_FLAGS"] = " ".join(filter(None, [os.environ.get("XLA_FLAGS"), flag]))


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ.pop("VMEM_JAX_CACHE", ""), ignore_errors=True)


hypothesis.settings.register_profile("vmem_jax", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("search", deadline=None, max_examples=5000)
hypothesis.settings.load_profile(os.environ.get("VMEM_JAX_HYPOTHESIS", "vmem_jax"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = slow_tests()
    share, seed = config.option.slow_share, config.option.slow_seed
    taken: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        rank = slow.get(item.nodeid)
        always = rank is None or item.get_closest_marker("always")
        stays = always or is_drawn(rank, share, seed)
        (taken if stays else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    # The longest first, so that no process is left alone with one at the end.
    items[:] = sorted(taken, key=lambda item: slow.get(item.nodeid, len(slow)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Nor on what searches of other tests found: which came before differs from run to run.
    if "vmem_jax.api.records" in sys.modules:
        sys.modules["vmem_jax.api.records"].forget()
    if item.get_closest_marker("gpu_compile"):
        from vmem_jax.devices import targets

        if targets._plugin_name() is None:
            pytest.skip('no XLA:GPU compiler here: pip install "vmem_jax[gpu-compile]"')
