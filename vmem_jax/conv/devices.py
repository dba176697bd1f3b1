"""devices: GPUs as cuDNN has them described, so that it tells its plans for one that is not here.

cuDNN reads what `cudaGetDeviceProperties` and `cudaDeviceGetAttribute` say, under names of its own.
The figures are those of `compiler/targets.py`, of NVIDIA's data sheets, and of the table of compute
capabilities in the CUDA programming guide.
"""

from __future__ import annotations

import json

_HOPPER = {
    "deviceName": "NVIDIA H200",
    "deviceVer": 900,
    "driverVer": 13000,
    "cudaDeviceId": 0,
    "pciDeviceId": 0,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "multiProcessorCount": 132,
    "smCountOrigin": 0,
    "smClockRateKHz": 1_980_000,
    "memClockRateKHz": 3_201_000,
    "memoryBusWidth": 6016,  # bits
    "totalGlobalMem": 150_109_880_320,
    "l2CacheSize": 62_914_560,
    "maxSharedMemoryPerBlock": 49_152,
    "maxSharedMemoryPerBlockOptin": 232_448,
    "oversizedSharedMemoryPerBlock": 0,
    "reservedSharedMemoryPerBlock": 1024,
    "regsPerBlock": 65_536,
    "maxRegistersPerSM": 65_536,
    "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "maxBlockSize": [1024, 1024, 64],
    "maxGridSize": [2_147_483_647, 65_535, 65_535],
    "warpSize": 32,
}
_DEVICES = {
    "h200": _HOPPER,
    "h100": _HOPPER
    | {
        "deviceName": "NVIDIA H100 80GB HBM3",
        "memClockRateKHz": 2_619_000,
        "memoryBusWidth": 5120,
        "totalGlobalMem": 84_942_979_072,
        "l2CacheSize": 52_428_800,
    },
    "a100": _HOPPER
    | {
        "deviceName": "NVIDIA A100-SXM4-80GB",
        "deviceVer": 800,
        "multiProcessorCount": 108,
        "smClockRateKHz": 1_410_000,
        "memClockRateKHz": 1_593_000,
        "memoryBusWidth": 5120,
        "totalGlobalMem": 85_100_068_864,
        "l2CacheSize": 41_943_040,
        "maxSharedMemoryPerBlockOptin": 166_912,
    },
}

DEVICES: tuple[str, ...] = tuple(_DEVICES)
"""The names that `description` knows."""


def description(name: str) -> str:
    """The JSON text that cuDNN takes for a device.

    Raises:
      ValueError: the name is unknown.
    """
    if name not in _DEVICES:
        raise ValueError(
            f"cuDNN's plans for {name!r} cannot be listed without the device; those of "
            f"{', '.join(DEVICES)} can."
        )
    return json.dumps(_DEVICES[name])
