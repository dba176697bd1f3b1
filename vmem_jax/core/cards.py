"""cards: one table of the devices.

A card's `hardware` describes it to XLA and cuDNN when it is not present. The H200's figures were read
from a live card (JAX 0.11.2, driver 580.159). The others are those of openxla/xla,
xla/backends/gpu/target_config/specs (a100_sxm_40, a100_sxm_80, h100_sxm, b200, rtx6000pro), of
NVIDIA's data sheets, and of the table of compute capabilities in the CUDA programming guide. XLA
gives the RTX PRO 6000 its nominal 96 GiB; a live card reports somewhat less.

A card's `machine` has the rates that it achieves: for the H200 products and the link as `vmem-jax
profile` measured them (JAX 0.11.2, cuDNN 9.19), and memory as the kernels of whole steps reach it,
4.1 of 4.8 TB/s (`benchmarks/rates.py`: 3.9 to 4.5 in passes of 100 MB and more that compute little).
An H100 reaches 2.95 of 3.35 there. Other cards have the H200's shares of their data sheets.
"""

from __future__ import annotations

import dataclasses

from vmem_jax.core.machine import Machine


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The facts about one GPU on which a compiler's decisions depend.

    XLA knows more fields (unit rates, PCIe bandwidth, versions). Without them an H200 compiles to
    the same text, and older XLA releases refuse the fields they do not know.

    Attributes:
      accelerated: whether it has architecture-specific instructions (sm_90a, sm_100a).
      memory_bandwidth: bytes a second.
      core_count: streaming multiprocessors.
      shared_memory_per_core: bytes.
      shared_memory_per_block: bytes, the most that a kernel can opt in to.
      memory_clock_khz, memory_bus_bits: for cuDNN's lists; 0 where they are not known.
    """

    title: str
    compute_capability: tuple[int, int]
    accelerated: bool
    memory_nbytes: int
    memory_bandwidth: int
    l2_cache_nbytes: int
    clock_ghz: float
    core_count: int
    fpus_per_core: int
    threads_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    memory_clock_khz: int = 0
    memory_bus_bits: int = 0


@dataclasses.dataclass(frozen=True)
class Card:
    """One device.

    Attributes:
      name: short, "h200".
      machine: the rates that it achieves.
      hardware: its description for compilers; None for a CPU.
    """

    name: str
    machine: Machine
    hardware: Hardware | None = None


_A100 = Hardware(
    title="NVIDIA A100-SXM4-80GB",
    compute_capability=(8, 0),
    accelerated=False,
    memory_nbytes=85_100_068_864,
    memory_bandwidth=2_039_040_000_000,
    l2_cache_nbytes=41_943_040,
    clock_ghz=1.41,
    core_count=108,
    fpus_per_core=64,
    threads_per_core=2048,
    shared_memory_per_core=167_936,
    shared_memory_per_block=166_912,
    memory_clock_khz=1_593_000,
    memory_bus_bits=5120,
)
_A100_40 = dataclasses.replace(
    _A100,
    title="NVIDIA A100-SXM4-40GB",
    memory_nbytes=42_331_013_120,
    memory_bandwidth=1_555_200_000_000,
    memory_clock_khz=1_215_000,
)
_H100 = Hardware(
    title="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    accelerated=True,
    memory_nbytes=84_942_979_072,
    memory_bandwidth=3_352_320_000_000,
    l2_cache_nbytes=52_428_800,
    clock_ghz=1.98,
    core_count=132,
    fpus_per_core=128,
    threads_per_core=2048,
    shared_memory_per_core=233_472,
    shared_memory_per_block=232_448,
    memory_clock_khz=2_619_000,
    memory_bus_bits=5120,
)
_H200 = dataclasses.replace(
    _H100,
    title="NVIDIA H200",
    memory_nbytes=150_109_880_320,
    memory_bandwidth=4_814_304_000_000,
    l2_cache_nbytes=62_914_560,
    memory_clock_khz=3_201_000,
    memory_bus_bits=6016,
)
_B200 = dataclasses.replace(
    _H100,
    title="NVIDIA B200",
    compute_capability=(10, 0),
    memory_nbytes=191_514_411_008,
    memory_bandwidth=7_672_320_000_000,
    l2_cache_nbytes=132_644_864,
    clock_ghz=1.965,
    core_count=148,
    memory_clock_khz=0,
    memory_bus_bits=0,
)
_RTX6000PRO = Hardware(
    title="NVIDIA RTX PRO 6000 Blackwell",
    compute_capability=(12, 0),
    accelerated=False,
    memory_nbytes=103_079_215_104,
    memory_bandwidth=1_792_000_000_000,
    l2_cache_nbytes=134_217_728,
    clock_ghz=2.6,
    core_count=188,
    fpus_per_core=128,
    threads_per_core=1536,
    shared_memory_per_core=131_072,
    shared_memory_per_block=101_376,
)

# Its products run at 748 TFLOP/s in bfloat16 and 727 in float16 where they are large, square and
# alone. In a training step the card is at its 700 W and lowers its clock from 1.98 to some 1.45 GHz:
# products take 5 % longer, attention 4, passes 2 (kernels of a decoder's step, at once and after
# 1.5 s of steps; products alone for seconds 12 to 16, `benchmarks/sustained.py`).
# Its convolutions run at 710 TFLOP/s where they are large and square, and at some 650 in whole
# training steps: so VGG-16, VGG-116, ResNet-50 and ResNet-152 are predicted 2 % too slow to 7 % too
# fast without recomputation. Its steps start later beside copies, by 1 µs (VGG-116) to 3 µs
# (ResNet-152): by so much plans with transfers take longer than was predicted without it
# (docs/benchmarks.md, Transfers).
_MEASURED = Machine(
    "h200",
    flops={
        "bfloat16": 712e12,
        "float16": 692e12,
        "float32": 377e12,  # TF32, which JAX's default precision uses on these cards
        "float64": 33.5e12,
        "": 49.3e12,
    },
    bandwidth=4.1e12,
    launch=1e-6,
    memory=_H200.memory_nbytes,
    link_out=55.3e9,
    link_in=55.3e9,
    link_both=97.7e9,
    link_delay=2e-6,
    # loops of an H200 that move 2 to 8 slices an iteration, `benchmarks/slices.py`: 50 to 91 µs an
    # iteration where a slice has 128 KiB and the kernels take 9 to 32
    slice_start=10e-6,
    # 3 x 3 with 256 and 512 channels in ResNet-50(256), ResNet-152(128): 700 to 780 TFLOP/s
    convolutions={"bfloat16": 740e12, "float16": 740e12, "float32": 280e12},
    pinning=2.8e-10,
    # of 64 rows in recurrent layers on an H200: 2.3 us for 1.3 MB of operands and result (float32),
    # 3.1 for 4.6 MB and 3.9 to 4.3 for 8.8 MB (bfloat16)
    product=0.9e-6,
    # kernels and copies that read 64 to 131 KB from stacks take 1.6 to 2.3 us in the backward loops
    # of recurrent layers, others 1.1 to 1.5
    latency=0.6e-6,
    # ViT-L's step in 4 and 8 sub-batches, of 7,300 and 14,300 kernels: 3.8 and 9.0 ms
    gap=0.5e-6,
    cached=4.1e12,  # of those products, on an H100, too
    between=300e9,  # two thirds of NVLink's data sheet, each way: not measured
)


def _like_h200(
    name: str,
    hardware: Hardware,
    tensor: float,
    fp32: float,
    link: float = 1.0,
    between: float = 900e9,
    bandwidth: float | None = None,
) -> Card:
    """A card that was not measured, or but for its memory.

    Args:
      tensor, fp32: bfloat16 and strict float32 by its data sheet, operations a second.
      link: as a share of PCIe 5 x16.
      between: from a card to others and back, by its data sheet, bytes a second.
      bandwidth: of device memory, as measured, bytes a second.
    """
    tensor, fp32 = tensor / 990e12, fp32 / 67e12
    strict = ("float64", "")
    share = {dtype: fp32 if dtype in strict else tensor for dtype in _MEASURED.flops}
    machine = dataclasses.replace(
        _MEASURED,
        name=name,
        flops={dtype: rate * share[dtype] for dtype, rate in _MEASURED.flops.items()},
        bandwidth=bandwidth
        or _MEASURED.bandwidth * hardware.memory_bandwidth / _H200.memory_bandwidth,
        memory=hardware.memory_nbytes,
        link_out=_MEASURED.link_out * link,
        link_in=_MEASURED.link_in * link,
        link_both=_MEASURED.link_both * link,
        between=_MEASURED.between * between / 900e9,
        convolutions={dtype: rate * tensor for dtype, rate in _MEASURED.convolutions.items()},
    )
    return Card(name, machine, hardware)


CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        _like_h200("a100", _A100, 312e12, 19.5e12, 0.5, 600e9),
        _like_h200("a100-40gb", _A100_40, 312e12, 19.5e12, 0.5, 600e9),
        _like_h200("h100", _H100, 990e12, 67e12, bandwidth=2.95e12),
        Card("h200", _MEASURED, _H200),
        _like_h200("b200", _B200, 2250e12, 80e12, between=1800e9),
        _like_h200("rtx6000pro", _RTX6000PRO, 500e12, 125e12, between=128e9),
        Card("cpu", Machine("cpu", {"": 5e10}, 1e10, 1e-6, 16 * 2**30, 5e9, 5e9, 5e9, between=5e9)),
    )
}
"""By name. "a100" is the 80 GB card; "h100" and "a100" are SXM modules."""

TARGETS: tuple[str, ...] = tuple(name for name, card in CARDS.items() if card.hardware)
"""The cards that a step can be planned and compiled for without having one."""


def hardware_of(name: str) -> Hardware | None:
    """The description of a card for compilers; None for a CPU, or a name that is not in `CARDS`."""
    return CARDS[name].hardware if name in CARDS else None


def machine_for(name: str) -> Machine:
    """The machine of a card's name, or of a JAX `device_kind` ("NVIDIA H200"), or the nearest: h200
    for GPUs, cpu."""
    if name in CARDS:
        return CARDS[name].machine
    kind = name.lower().replace(" ", "")
    titles = {card.hardware.title: card for card in CARDS.values() if card.hardware}
    if name in titles:
        return titles[name].machine
    for known, card in CARDS.items():
        if known in kind:
            return card.machine
    return CARDS["h200" if "nvidia" in kind else "cpu"].machine
