"""Tests that need a GPU are skipped, visibly, where there is none."""

from __future__ import annotations

import os

import jax
import pytest

from vmem_jax.transfer import extension

# some tests start processes of their own, which need memory beside this one
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.get_closest_marker("gpu")]
    if not mine or any(d.platform == "gpu" for d in _devices()):
        return
    for item in mine:
        item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here (JAX_PLATFORMS=cuda,cpu)"))


def _devices() -> list[jax.Device]:
    try:
        return jax.devices()
    except RuntimeError:
        return []


@pytest.fixture
def devices() -> list[jax.Device]:
    try:
        found = jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    if "CUDA" not in extension.load().targets():
        pytest.fail("there is a GPU, but the extension was built without CUDA")
    return found


@pytest.fixture
def device():
    """A GPU, for whose convolutions the extension has cuDNN."""
    try:
        [found, *_] = jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    if extension.load().CUDNN_BUILT is None:
        pytest.fail("there is a GPU, but the extension was built without cuDNN")
    return found
