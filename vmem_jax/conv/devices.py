"""devices: GPUs as cuDNN has them described, so that it lists its plans for one that is not here.

cuDNN reads what `cudaGetDeviceProperties` and `cudaDeviceGetAttribute` say, under names of its own.
"""

from __future__ import annotations

import json

from vmem_jax.core.cards import CARDS

DEVICES: tuple[str, ...] = tuple(
    name for name, card in CARDS.items() if card.hardware and card.hardware.memory_bus_bits
)
"""The names that `description` knows."""


def description(name: str) -> str:
    """The JSON text that cuDNN takes for a device.

    Raises:
      ValueError: the name is unknown, or too little is known of that card.
    """
    card = CARDS[name].hardware if name in DEVICES else None
    if card is None:
        raise ValueError(
            f"cuDNN's plans for {name!r} cannot be listed without the device; those of "
            f"{', '.join(DEVICES)} can."
        )
    major, minor = card.compute_capability
    return json.dumps(
        {
            "deviceName": card.title,
            "deviceVer": 100 * major + 10 * minor,
            "driverVer": 13000,
            "cudaDeviceId": 0,
            "pciDeviceId": 0,
            "isTccDriver": 0,
            "supportCoopLaunch": 1,
            "multiProcessorCount": card.core_count,
            "smCountOrigin": 0,
            "smClockRateKHz": round(card.clock_ghz * 1e6),
            "memClockRateKHz": card.memory_clock_khz,
            "memoryBusWidth": card.memory_bus_bits,
            "totalGlobalMem": card.memory_nbytes,
            "l2CacheSize": card.l2_cache_nbytes,
            "maxSharedMemoryPerBlock": 49_152,
            "maxSharedMemoryPerBlockOptin": card.shared_memory_per_block,
            "oversizedSharedMemoryPerBlock": 0,
            "reservedSharedMemoryPerBlock": 1024,
            "regsPerBlock": 65_536,
            "maxRegistersPerSM": 65_536,
            "maxCtasPerSM": 32,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": card.threads_per_core,
            "maxBlockSize": [1024, 1024, 64],
            "maxGridSize": [2_147_483_647, 65_535, 65_535],
            "warpSize": 32,
        }
    )
