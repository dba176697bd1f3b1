"""Convolutions as values, and their configurations in micro-batches, without JAX.

The terms are those of µ-cuDNN (Oyama et al., CLUSTER 2018, section III): a *micro-configuration* is
one call of the library on a part of the batch, a *configuration* is a list of them that covers the
batch.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from typing import Any


class Pass(enum.StrEnum):
    """Which of the three kernels of a convolutional layer."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward data"
    BACKWARD_FILTER = "backward filter"


class Epilogue(enum.StrEnum):
    """The operation on the result of a forward pass before it is written.

    BIAS: adds one value for each channel.
    BIAS_RELU: adds it, and takes the maximum with zero. (cuDNN has nothing for that alone.)
    SUMS: leaves it, and adds up for each channel y, as it is stored, and its squares, in float32.
    """

    NONE = ""
    BIAS = "bias"
    BIAS_RELU = "bias and relu"
    SUMS = "sums"


@dataclasses.dataclass(frozen=True, slots=True)
class Convolution:
    """One convolution y = w * x (cross-correlation), or its gradient to x or w.

    The sizes are those of the layer; its three passes differ only in `which`. A Convolution is also
    the key of measurements.

    Attributes:
      which: the result: y (forward), the gradient to x (backward data) or to w (backward filter).
      dtype: of x, w and y: "float32", "bfloat16", "float16" or "float64".
      strict: no tensor cores for float32 (XLA's precision HIGHEST); false where the dtype is another.
      batch: samples, N.
      features_in: channels of x, C.
      features_out: channels of y, K.
      size: spatial extents of x, one to three.
      kernel: spatial extents of w.
      strides: one for each spatial dimension, like `padding` and `dilation`.
      padding: (before, after) of x.
      dilation: of w.
      groups: of channels; C for a depthwise convolution.
      channels_last: the layout in memory, NHWC (w: KHWC) where true, NCHW (w: KCHW) where false.
      epilogue: the fused epilogue of a forward pass.
      prologue: whether what is convolved is ReLU(x · scale + bias), with one value of each a channel:
        computed in float32, rounded to `dtype`, then padded. Of a forward pass, or a gradient to w.

    Raises:
      ValueError: `strict` with another dtype than float32, or a gradient to x with a prologue.
    """

    which: Pass
    dtype: str
    strict: bool
    batch: int
    features_in: int
    features_out: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    channels_last: bool = True
    epilogue: Epilogue = Epilogue.NONE
    prologue: bool = False

    def __post_init__(self) -> None:
        if self.prologue and self.which == Pass.BACKWARD_DATA:
            raise ValueError("a gradient to x does not read x, so it has no prologue.")
        if self.strict and self.dtype != "float32":
            raise ValueError(
                f"`strict` is said of float32 alone. Got a convolution in {self.dtype}."
            )

    @property
    def out(self) -> tuple[int, ...]:
        """Spatial extents of y."""
        return tuple(
            (size + low + high - (dilation * (kernel - 1) + 1)) // stride + 1
            for size, (low, high), dilation, kernel, stride in zip(
                self.size, self.padding, self.dilation, self.kernel, self.strides, strict=True
            )
        )

    @property
    def x_shape(self) -> tuple[int, ...]:
        """N, C, then space, whatever the layout."""
        return (self.batch, self.features_in, *self.size)

    @property
    def w_shape(self) -> tuple[int, ...]:
        """K, C of one group, then space."""
        return (self.features_out, self.features_in // self.groups, *self.kernel)

    @property
    def y_shape(self) -> tuple[int, ...]:
        """N, K, then space."""
        return (self.batch, self.features_out, *self.out)

    @property
    def flops(self) -> int:
        """Multiplications and additions, the same for all three passes."""
        return 2 * math.prod(self.y_shape) * math.prod(self.w_shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of both operands and the result, whichever of x, w and y they are."""
        elements = sum(map(math.prod, (self.x_shape, self.w_shape, self.y_shape)))
        return elements * self._itemsize

    @property
    def x_nbytes(self) -> int:
        """Bytes of x."""
        return math.prod(self.x_shape) * self._itemsize

    @property
    def y_nbytes(self) -> int:
        """Bytes of y."""
        return math.prod(self.y_shape) * self._itemsize

    @property
    def padded_nbytes(self) -> int:
        """Bytes of the copy of x, or of its gradient, that XLA makes around its own call; 0 for none.

        That call pads both sides alike. What one side has more is written around a copy before, or
        cut off behind.
        """
        more = [abs(high - low) for low, high in self.padding]
        if not any(more):
            return 0
        padded = (size + extra for size, extra in zip(self.size, more, strict=True))
        return self.batch * self.features_in * math.prod(padded) * self._itemsize

    @property
    def is_ambiguous(self) -> bool:
        """Whether w is as large in space as y, so that x by y, the gradient to w, might be a layer.

        XLA takes it for one: it calls a forward convolution for it.
        """
        extents = zip(self.out, self.kernel, strict=True)
        return self.is_spatial and any(out <= kernel for out, kernel in extents)

    @property
    def is_spatial(self) -> bool:
        """Whether w has more than one element in space."""
        return set(self.kernel) != {1}

    @property
    def _itemsize(self) -> int:
        return {"float64": 8, "float32": 4}.get(self.dtype, 2)

    def __str__(self) -> str:
        """For people: "forward 3×3, 64 → 128 channels of 56×56, batch 32, bfloat16"."""
        times = lambda sizes: "×".join(map(str, sizes))
        text = f"{self.which.value} {times(self.kernel)}, {self.features_in} → {self.features_out} "
        text += f"channels of {times(self.size)}, batch {self.batch}, "
        text += f"{'strict ' if self.strict else ''}{self.dtype}"
        if set(self.strides) != {1}:
            text += f", strides {times(self.strides)}"
        if set(self.dilation) != {1}:
            text += f", dilation {times(self.dilation)}"
        if self.groups != 1:
            text += f", {self.groups} groups"
        text += "" if self.channels_last else ", channels first"
        text += ", behind scale, bias and relu" if self.prologue else ""
        return f"{text}, then {self.epilogue}" if self.epilogue else text

    @property
    def paddings(self) -> tuple[int, ...]:
        """To how many channels of x a kernel may pad it, for tensor cores: they want multiples of 8.

        Where each value has 16 bits, channels are last, and there is one group. With 4 channels there
        is less to read and to write than with 8, and cuDNN has kernels for that, too.
        """
        narrow = self.dtype in ("bfloat16", "float16")
        if not (narrow and self.channels_last and self.groups == 1 and self.features_in % 8):
            return ()
        if self.prologue:
            return ()
        multiples = {-(-self.features_in // unit) * unit for unit in (4, 8)}
        return tuple(sorted(multiples - {self.features_in}))

    @property
    def variants(self) -> tuple[Convolution, ...]:
        """What may do it: a kernel of the convolution alone, and one that does its epilogue, too."""
        alone = self.with_epilogue(Epilogue.NONE)
        return (alone, self) if self.epilogue else (alone,)

    def with_batch(self, batch: int) -> Convolution:
        """The same convolution of another number of samples."""
        return dataclasses.replace(self, batch=batch)

    def with_epilogue(self, epilogue: Epilogue) -> Convolution:
        """The same convolution, and `epilogue` after it."""
        return dataclasses.replace(self, epilogue=epilogue)


@dataclasses.dataclass(frozen=True, slots=True)
class Micro:
    """A micro-configuration: one call of the library on a part of the batch.

    Attributes:
      batch: samples.
      engine: the global index of cuDNN's engine for this pass; −1 for XLA.
      knobs: settings of that engine, pairs (type, value), sorted.
      workspace: bytes that it needs while it runs, padded copies included.
      seconds: seconds of one call; nan if it was not timed.
      channels: the number of channels to which x and w are padded with zeros, in copies in the
        workspace; 0 without padding.
      bare: whether its kernel does the convolution alone where others of its configuration do the
        epilogue, too. A pass of its own then adds that to its samples.
    """

    batch: int
    engine: int
    knobs: tuple[tuple[int, int], ...]
    workspace: int
    seconds: float
    channels: int = 0
    bare: bool = False

    @property
    def algorithm(self) -> tuple[int, tuple[tuple[int, int], ...], int]:
        """What does it, whatever it does it to: engine, knobs and channels."""
        return self.engine, self.knobs, self.channels


XLA = -1
"""The engine of a `Micro` that XLA's own convolution does."""


@dataclasses.dataclass(frozen=True, slots=True)
class Configuration:
    """One execution of a whole convolution: micro-configurations, one after the other.

    They share one workspace, which is as large as the largest of theirs (µ-cuDNN, section III-A).

    Attributes:
      micros: the micro-configurations in order; together they cover the batch.
      epilogue: the fused epilogue of each that is not bare.
    """

    micros: tuple[Micro, ...]
    epilogue: Epilogue = Epilogue.NONE

    @property
    def batch(self) -> int:
        """Samples of all together."""
        return sum(m.batch for m in self.micros)

    @property
    def calls(self) -> tuple[Any, ...]:
        """What is called: samples and algorithm of each, whatever they were seen to take."""
        return self.epilogue, *((m.batch, m.algorithm, m.bare) for m in self.micros)

    @property
    def is_xlas(self) -> bool:
        """Whether it is XLA's own convolution, as it stands in the step."""
        return [m.engine for m in self.micros] == [XLA]

    @property
    def bare_samples(self) -> tuple[tuple[int, int], ...]:
        """From where to where the samples go of the micro-batches that are bare."""
        ends = [*itertools.accumulate(m.batch for m in self.micros)]
        return tuple(
            (end - m.batch, end) for m, end in zip(self.micros, ends, strict=True) if m.bare
        )

    @property
    def workspace(self) -> int:
        """Bytes."""
        return max((m.workspace for m in self.micros), default=0)

    @property
    def seconds(self) -> float:
        """Of all one after the other."""
        return sum(m.seconds for m in self.micros)

    def longer(self, seconds: float) -> Configuration:
        """The same, taking so much longer."""
        *others, last = self.micros
        longer = dataclasses.replace(last, seconds=last.seconds + seconds)
        return dataclasses.replace(self, micros=(*others, longer))

    def scaled(self, factor: float) -> Configuration:
        """The same, taking `factor` times as long."""
        each = (dataclasses.replace(m, seconds=m.seconds * factor) for m in self.micros)
        return dataclasses.replace(self, micros=tuple(each))
