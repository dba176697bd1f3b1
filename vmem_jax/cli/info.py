"""info: `vmem-jax info`, versions, devices, what is active, and what would make steps faster."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
from collections.abc import Sequence
from pathlib import Path

import jax

import vmem_jax
from vmem_jax.cli.options import (
    Subparsers,
    add_command,
)
from vmem_jax.core.cards import TARGETS
from vmem_jax.devices.device import total_nbytes
from vmem_jax.devices.targets import target
from vmem_jax.errors import show_nbytes
from vmem_jax.profile.store import Store, identity
from vmem_jax.transfer.extension import describe


def add_info(commands: Subparsers) -> None:
    add_command(commands, "info", _info, "show versions, devices, and what would make steps faster")


def _info(arguments: argparse.Namespace) -> int:
    print(f"vmem_jax {vmem_jax.__version__}, Python {platform.python_version()}")
    for package in ("jax", "jaxlib", "flax", "optax", "equinox", "scikit-learn"):
        try:
            print(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} is not installed")
    try:  # first, so that JAX misses no driver when it looks for devices
        target(TARGETS[0]).device()
        deviceless = ", ".join(TARGETS)
    except ImportError:
        deviceless = 'none, pip install "vmem_jax[gpu-compile]"'
    for device in jax.devices():
        here = jax.ShapeDtypeStruct((), "float32", sharding=_on(device))
        print(f"device {device}: {device.device_kind}, {show_nbytes(total_nbytes([here]))}")
    print(f"policies: {', '.join(sorted(vmem_jax.POLICIES))}")
    print(f"device-less compiler: {deviceless}")
    transfers = describe()
    print(f"transfers: {transfers}")
    device = jax.devices()[0]
    timed = len(Store(identity(device)).load().steps)
    print(
        f"times: {f'{timed} steps were measured' if timed else 'a roofline, nothing was measured'}"
    )
    drawn = importlib.util.find_spec("plotly") is not None
    print("report:", "drawn by Plotly" if drawn else 'none, pip install "vmem_jax[report]"')
    better = advice(device.platform, transfers, timed, DRIVER.exists())
    print("\n".join(f"faster: {line}" for line in better) or "faster: nothing is missing")
    return 0


DRIVER = Path("/proc/driver/nvidia/version")


def advice(device: str, transfers: str, timed: int, driver: bool) -> Sequence[str]:
    """What would make steps faster here, the most effective first.

    Args:
      device: the platform that JAX runs on, "cpu" or "gpu".
      transfers: what the native extension can do, as `describe` says it.
      timed: steps that were measured on the device.
      driver: whether there is an NVIDIA driver.
    """
    found = []
    if device == "cpu" and driver:
        found.append('JAX does not use the GPU that is here: pip install "jax[cuda13]"')
    if transfers.startswith("none"):
        found.append("the native extension is missing: install vmem_jax by pip")
    elif device == "gpu" and "CUDA" not in transfers.replace("without CUDA", ""):
        found.append(
            "XLA's copies move values: pip install vmem_jax_cuda13 brings our own, as does "
            "VMEM_JAX_CUDA=ON pip install . in the sources"
        )
    elif device == "gpu" and ("no convolutions" in transfers or "no compression" in transfers):
        found.append("the extension lacks parts: pip install vmem_jax_cuda13 has all")
    if device == "gpu" and not timed:
        found.append("plans know no measured times: vmem-jax profile, or profile=True (20 s)")
    return found


def _on(device: jax.Device) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(device)
