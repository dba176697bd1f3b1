"""Machine: the rates that a device achieves, and the roofline that they make."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vmem_jax.core.convolution import Convolution, Pass
from vmem_jax.core.cuda_cores import share_of_strict_rate, transform_nbytes
from vmem_jax.core.hosted_slices import iteration_seconds
from vmem_jax.core.program import Step
from vmem_jax.core.tensor_cores import more_seconds, share_of_rate

_UNALIGNED = 10
"""How much slower unaligned convolutions are. An H200 runs ResNet-50's 3-channel stem (bf16, batch
256, 60 GFLOP) in 1.78 ms: 34 TFLOP/s, where aligned convolutions reach about 390."""

_SUM = 1.25
"""How much longer a convolution takes for what it reads and makes if it adds another value of its
result's size. Of 16 with one tap (bf16) an H200 takes 1.0 to 2.0 times as long by themselves, half of
them 1.1 to 1.4 (`benchmarks/rates.py`); in a WaveNet 1.5."""

_UNALIGNED_PRODUCT = 2.2
"""How much slower unaligned products are. An H200 takes 1.32, 3.43 and 2.78 ms for the three of
GPT-2's head (bf16, 8,192 tokens, 50,257 words, 843 GFLOP each), where aligned ones take 1.14."""

_DEPTHWISE = 3.25
"""How much slower than the strict rate depthwise convolutions are, which tensor cores do not compute.
They do not move while they compute: those of ConvNeXt-B (7 x 7, bf16) reach 9 to 18 TFLOP/s on an
H100, most 11 to 14, and those of a MobileNetV2(128) (3 x 3) 5.8 and 1.95 TB/s on an H200."""

_DEPTHWISE_START = 8e-6
"""Seconds that a depthwise convolution takes on tensor-core cards beside what its size takes: those
of ConvNeXt-B, in sub-batches of 32 images on an H200, take 42 us in the mean forwards and to inputs,
and 38 to kernels; by rate and bytes 32 (JAX 0.11.2, cuDNN 9.19)."""

_UNALIGNED_BYTE = 25
"""Operations a byte that unaligned products read or write. Those of an attention of 197 tokens (bf16,
1,024 heads of 64) touch 2.0 TB a second on an H200 and on an H100; of 512 tokens 3.6 and 2.8."""

_UNALIGNED_PASS = 1.35
"""How much longer passes over unaligned rows take. In a ViT of 197 tokens and in the loss of GPT-2's
50,257 words they run at 2.4 to 3.5 TB/s on an H200, where others reach 3.9 to 4.3 (bf16)."""

WRITTEN = 62
"""Operations that take as long as an element that a pass writes, beside its bytes: XLA:GPU (0.11.2)
computes a place for each. What reads one array of bfloat16 and writes one, as a transpose or a cast
does, runs at 3.1 TB/s in the steps of a ViT-L and a decoder on an H200, where float32 reaches 4.0.
What only writes runs at 3.4 (float32), 1.7 (bfloat16) and 0.85 TB/s (booleans)."""

_CACHED = 2**24
"""Bytes up to which what a product touches stays in a GPU's cache, of 40 MB and more. Products of up
to 8.8 MB in recurrent layers take as long on an H100 as on an H200, whose memory is 1.4 times as
fast."""

_CONVOLUTIONS = (
    "conv_general_dilated",
    "micro_convolution",
    "carried_product",
    "normalising_convolution",
)

_SLOWER = ("normalising_convolution", "pooled_windows", "spread_windows", "summed_rows")
"""Operations that take longer by their efficiency whatever bounds them."""

_PART_OF_PRODUCT = 0.5
"""What each further part of a product adds to `Machine.product`: XLA splits the summed dimension less
where there are more columns. Of a GRU's 64 rows and 512 columns an H200 takes 2.2 us (float32, 512
summed), of two such products in one 3.3, of three 3.9."""

_ADDED_UP = 1 / 3
"""What a product's reader takes longer to add up the parts of its sum, as a share of
`Machine.latency`. An H200 takes 0.55 us longer for a product and a tanh in a row with others than for
both apart (`benchmarks/iterations.py`), but an LSTM no more than 0.2, in whose iterations the kernels
that write stacks overlap."""

_ROWS, _NO_ROWS = 40, 0.35
"""Rows from which on a product takes all of `Machine.product`, and what it takes of that however few
its rows. Of 64, 32, 22 and 8 rows, 512 columns and 512 summed an H200 takes 2.4, 2.2, 2.1 and 1.85 us
(float32): what the parts of the sum write has these rows, and is read again."""

_HALVES = ("bfloat16", "float16")

LEAST_BUSY = 1.0
"""The least time of a part of a batch, without launches, in units of `Machine.launch`: of a sub-batch
all its kernels together, of a convolution's micro-batch its one kernel. A smaller part takes longer
to start than to run, so no plan has one unless `sub_batches` asks for their number. A part of one
sample is thereby left to large samples."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The rates that a device achieves.

    Attributes:
      name: the name of the device.
      flops: floating-point operations a second by dtype, "" for all others.
      bandwidth: device memory, bytes a second.
      launch: seconds that starting a kernel adds to it.
      memory: device memory, bytes.
      link_out: device to pinned host memory, bytes a second.
      link_in: pinned host memory to device, bytes a second.
      link_both: the total while both directions are busy, bytes a second.
      link_delay: seconds by which a step starts later during a copy.
      slice_start: seconds that the host takes to start a copy of a slice in a loop.
      between: from one device to others of its host, bytes a second.
      convolutions: operations a second of those of 256 channels and one tap on tensor cores, by
        dtype; `flops` for other dtypes. Strict float32 has the rate of `core.cuda_cores` where there
        are any.
      pinning: seconds to pin a byte of host memory. 2 GiB took 1.2 s beside an H200.
      product: seconds that a matrix product takes beside moving what it touches: each of its
        programs goes along the summed dimension step by step, however few there are. Less for few
        rows.
      latency: seconds that a kernel takes longer which reads more than what the one before it left in
        the cache: of an iteration a slice of a stack, and behind a product the parts of its sum.
      gap: seconds in which nothing runs behind a kernel of a sub-batch.
      cached: the rate of a product that touches no more than stays in the cache from one iteration
        to the next, bytes a second, where it is more than `bandwidth`.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    memory: int
    link_out: float = 25e9
    link_in: float = 25e9
    link_both: float = 45e9
    link_delay: float = 0.0
    slice_start: float = 0.0
    convolutions: Mapping[str, float] = dataclasses.field(default_factory=dict)
    pinning: float = 1.2 / 2**31
    between: float = 300e9
    product: float = 0.0
    latency: float = 0.0
    gap: float = 0.0
    cached: float = 0.0

    def most_parts(self, busy: float) -> float:
        """The most parts that are worth it of what takes `busy` seconds without launches."""
        return max(1.0, busy / (LEAST_BUSY * self.launch)) if self.launch else math.inf

    def seconds(self, step: Step) -> float:
        """Roofline (Williams et al., CACM 2009): max(flops / rate, bytes / bandwidth) + launch, for
        each run of the step, and what it sends, under which nothing else runs.

        What is merged with another kernel is not launched, and a barrier is none. A loop takes the
        seconds of its body's steps in all iterations, of a kernel an iteration that counts them, and
        of its own traffic, copies to stacks and from them, each a kernel, and of waiting for slices,
        those from host memory as well (`core.hosted_slices`).
        """
        if step.body:
            once = self._iteration(step)
            once += (1 + step.copies) * self.launch + step.fetches * self.latency
            return step.times * (step.length * once + step.nbytes / self.bandwidth)
        rate = self.flops.get(step.dtype, self.flops[""]) * step.efficiency
        if step.convolution is not None:
            rate = self._convolution_rate(step.convolution)
        elif step.op in _CONVOLUTIONS:
            whole = self.flops.get(step.dtype, self.flops[""])
            rate = self.convolutions.get(step.dtype, whole) * step.efficiency
        moving = step.nbytes / self._bandwidth(step)
        if step.op in _SLOWER:
            moving /= step.efficiency
        elif self._adds(step):
            moving *= _SUM
        if not step.aligned and step.fusible:
            moving *= _UNALIGNED_PASS
        elif not step.aligned and step.op == "dot_general":
            rate /= _UNALIGNED_PRODUCT
            by_byte = self.flops[""] * step.efficiency / _UNALIGNED_BYTE
            moving = max(moving, step.nbytes / by_byte)
        elif not step.aligned:
            rate /= _UNALIGNED
        is_kernel = step.launched and step.op != "optimization_barrier"
        if step.op == "dot_general":
            along = self._along(step) + _ADDED_UP * self.latency
            moving += along * (1.0 if step.launched else _PART_OF_PRODUCT)
        operations = max(step.flops, WRITTEN * step.written)
        once = _together(operations / rate, moving, step.convolution)
        once += self.launch + (self.gap if step.times > 1 else 0.0) if is_kernel else 0.0
        if step.convolution is not None:
            once += self._more(step.convolution)
        behind = step.behind / self.bandwidth
        behind *= 1.0 if step.behind_aligned else _UNALIGNED_PASS
        written = step.behind / (2 * _itemsize(step))
        behind = max(behind, written * WRITTEN / self.flops[""])
        return step.times * (once + behind + step.sent / self.between)

    def _bandwidth(self, step: Step) -> float:
        """Bytes a second at which `step` reads and writes."""
        is_cached = step.op == "dot_general" and step.nbytes <= _CACHED
        return max(self.bandwidth, self.cached) if is_cached else self.bandwidth

    def _adds(self, step: Step) -> bool:
        """Whether `step` is a convolution on tensor cores that adds another value to its result."""
        c = step.convolution
        if c is None or c.dtype not in self.convolutions or _is_depthwise(c):
            return False
        made = {Pass.FORWARD: c.y_nbytes, Pass.BACKWARD_DATA: c.x_nbytes}.get(c.which)
        return made is not None and step.nbytes - c.nbytes >= made

    def _along(self, step: Step) -> float:
        """Seconds of a product beside moving what it touches.

        Of sides M, N and K and elements of b bytes it has 2 M N K operations and touches at least
        b (MN + NK + KM) bytes: `rows` is 1 / (1/M + 1/N + 1/K), nearly the least of the three.
        """
        rows = step.flops * _itemsize(step) / (2 * step.nbytes) if step.nbytes else _ROWS
        return self.product * (_NO_ROWS + (1.0 - _NO_ROWS) * min(1.0, rows / _ROWS))

    def _iteration(self, loop: Step) -> float:
        """Seconds of the body of `loop`, with its copies from host memory and to it."""
        if not loop.fetched + loop.returned:
            return sum(map(self.seconds, loop.body))
        most = self.link_both / 2 if loop.fetched and loop.returned else math.inf
        rates = min(self.link_in, most), min(self.link_out, most)
        return iteration_seconds(loop.body, self.seconds, *rates)

    def convolution_seconds(self, convolution: Convolution) -> float:
        """The same roofline for one convolution."""
        by_flops = convolution.flops / self._convolution_rate(convolution)
        once = _together(by_flops, convolution.nbytes / self.bandwidth, convolution)
        return once + self.launch + self._more(convolution)

    def _more(self, c: Convolution) -> float:
        """Seconds of the kernels beside that of a convolution."""
        if _is_depthwise(c):
            return _DEPTHWISE_START if self.convolutions else 0.0
        if c.strict and self.convolutions:
            return transform_nbytes(c) / self.bandwidth
        return more_seconds(c) if c.dtype in self.convolutions else 0.0

    def _convolution_rate(self, c: Convolution) -> float:
        """Operations a second."""
        if _is_depthwise(c):
            return self.flops[""] / _DEPTHWISE
        if c.strict:
            return self.flops[""] * (share_of_strict_rate(c) if self.convolutions else 1.0)
        if c.dtype not in self.convolutions:
            return self.flops.get(c.dtype, self.flops[""])
        return self.convolutions[c.dtype] * share_of_rate(c)


def _itemsize(step: Step) -> int:
    """Bytes of an element of what `step` makes."""
    return 2 if step.dtype in _HALVES else 4


def _together(computing: float, moving: float, c: Convolution | None) -> float:
    """Seconds of what computes and moves for so long: only a depthwise convolution does one behind
    the other."""
    return computing + moving if _is_depthwise(c) else max(computing, moving)


def _is_depthwise(c: Convolution | None) -> bool:
    return c is not None and c.groups == c.features_in > 1
