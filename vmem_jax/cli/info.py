"""info: `vmem-jax info`, versions, devices, and what can be compiled for."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

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
from vmem_jax.transfer.extension import describe


def add_info(commands: Subparsers) -> None:
    add_command(commands, "info", _info, "show versions, devices, and what can be compiled for")


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
    print(f"transfers: {describe()}")
    return 0


def _on(device: jax.Device) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(device)
