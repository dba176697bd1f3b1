"""Program: one training step in execution order, without JAX."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
from collections.abc import Iterator

from vmem_jax.core.convolution import Convolution
from vmem_jax.core.touched import Touched

LoopSegments = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] | None
"""How pairs of loops are divided into segments: `Program.segments`."""


class Kind(enum.StrEnum):
    """The role of a buffer's value."""

    PARAMETER = "parameter"
    OPTIMISER = "optimiser state"
    BATCH = "batch"
    CONSTANT = "constant"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    OUTPUT = "output"


class Phase(enum.StrEnum):
    """The part of the training step, from the name stacks that automatic differentiation leaves."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


BEGIN, END = "sub_batches_begin", "sub_batches_end"
"""The boundary steps: between them one sub-batch stands for all. A plan moves no step across them."""

COMPRESS, DECOMPRESS = "compress", "decompress"
"""The steps that compress a value for the backward pass, and decompress it there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """One value that exists in device memory.

    Attributes:
      nbytes: size in bytes, before any allocator's rounding.
      kind: the role of its value.
      label: for people, `"params['conv1']['kernel'] f32[3,3,64,64]"`.
      movable: whether a transfer can carry it: plain bytes and, on several devices, equal shards
        whose split is known before compiling.
      slices: of a stack, the number of equal slices that one loop makes and another reads in reverse;
        else 1.
    """

    nbytes: int
    kind: Kind
    label: str
    movable: bool = True
    slices: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One kernel, as predicted before compiling: a heavy equation or a fused chain.

    Attributes:
      reads: buffers read, indices into `Program.buffers`, each once.
      writes: buffers written, likewise.
      equations: its equations in the flat jaxpr, in order. A cheap equation may belong to several
        steps; each computes it for itself, as XLA's fusions do.
      op: the primitive of its main equation ("conv_general_dilated", "max").
      phase: forward, backward or update.
      fusible: whether it is an elementwise chain (with or without a reduction at its end), not a
        library kernel.
      flops: floating-point operations.
      dtype: the dtype of the products in `flops`, "bfloat16"; "" for no products, and for float32
        without tensor cores.
      nbytes: memory traffic in bytes, reads and writes.
      written: of a pass on a GPU, the elements of the largest array that it writes; 0 of others, and
        of those that reduce.
      workspace: bytes that are live only while the step runs.
      pure: whether it may run again with the same result and no effect.
      in_place: pairs (read, write) of buffers: the write may reuse the memory of the read, which
        dies here.
      layer: the user's layer, "VGG/stage1_conv2".
      source: the user's source line, "model.py:41".
      aligned: whether tensor cores take its shapes without padding, and passes its rows in vectors.
      efficiency: the share of the rate of products that its kernel reaches, where its shapes tell.
      convolution: the convolution, if micro-batches can run it; else None.
      epilogue_nbytes: memory traffic in bytes that the library kernel saves by a fused epilogue, a
        bias or a ReLU for instance. Another kernel in its place has to do that work too.
      times: how often it runs: once for each sub-batch.
      body: of a loop, the steps of one iteration.
      length: of a loop, the number of iterations.
      batched: whether it is a matrix product with batch dimensions.
      fetched, returned: bytes that it copies from host memory itself, and back there: of a loop, the
        slices of stacks of state.
      sent: bytes that the device sends to others to gather operands and to add up partial results.
      compared: buffers that a library kernel's epilogue writes and a comparison reads, as for the
        mask of a clamp. A barrier separates the two.
      behind: bytes that passes of their own move behind it, to transpose what it makes or add to it.
      behind_aligned: whether their rows are whole vectors.
      copied: buffers that it reads in copies of another layout, which are made in front of it and in
        its workspace (`capture.merged`).
      recopied: whether what it makes is copied so behind it; its workspace has what is copied then.
      tied: buffers that it reads, and compares with what it computes from them. A barrier over them
        stands in front of it, so that both operands come from one version.
      row_major: whether it makes the gradient to a kernel of a convolution that is stated to be
        row-major, and not cast (`core.stated_layouts`).
      normalises: whether XLA:GPU makes one Triton kernel of it and of the sum or maximum of rows that
        it reads, and so writes its result into no stack.
      stacked: of a loop, the stacks that it writes slice by slice.
      copies: of a loop, the kernels of an iteration that copy what it makes or reads; none on a CPU.
      fetches: of a loop, the kernels of an iteration that read slices of stacks; none on a CPU.
      launched: whether it is a kernel of its own, not merged with another one (`capture.siblings`).
      updates: of how many small parameters it is the update (`capture.small_updates`).
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    equations: tuple[int, ...]
    op: str
    phase: Phase
    fusible: bool
    flops: int
    dtype: str
    nbytes: int
    workspace: int
    pure: bool
    in_place: tuple[tuple[int, int], ...]
    layer: str
    source: str
    aligned: bool = True
    written: int = 0
    efficiency: float = 1.0
    convolution: Convolution | None = None
    epilogue_nbytes: int = 0
    times: int = 1
    body: tuple[Step, ...] = ()
    length: int = 1
    compared: tuple[int, ...] = ()
    batched: bool = False
    sent: int = 0
    tied: tuple[int, ...] = ()
    fetched: int = 0
    returned: int = 0
    behind: int = 0
    behind_aligned: bool = True
    copied: tuple[int, ...] = ()
    recopied: bool = False
    row_major: bool = False
    normalises: bool = False
    updates: int = 1
    stacked: tuple[int, ...] = ()
    copies: int = 0
    fetches: int = 0
    launched: bool = True

    @property
    def is_boundary(self) -> bool:
        """Whether sub-batches begin or end at this step."""
        return self.op in (BEGIN, END)

    @property
    def is_heavy(self) -> bool:
        """Whether it is a kernel of its own, other than compression and decompression."""
        return not self.fusible and self.op not in (COMPRESS, DECOMPRESS)

    @property
    def is_reduction(self) -> bool:
        """Whether it is an elementwise chain with a reduction at its end."""
        return self.fusible and self.op.startswith(("reduce_", "arg"))

    @property
    def iterations(self) -> int:
        """Of a loop, how often its body runs in the whole training step."""
        return self.times * self.length

    @property
    def where(self) -> str:
        """The step for people: "VGG/conv2: conv_general_dilated (backward) at model.py:41"."""
        at = f" at {self.source}" if self.source else ""
        return f"{self.layer or '(no layer)'}: {self.op} ({self.phase.value}){at}"


@dataclasses.dataclass(frozen=True)
class Program:
    """One training step, in execution order.

    Invariants, checked by `core.validate.check_program`:

    - at most one step writes a buffer, before every read of it;
    - no step writes an input;
    - every output is an input or is written by a step;
    - an alias pairs an input with an output of the same size, each at most once;
    - a hosted buffer is an input or an output, and in no alias.

    Attributes:
      buffers: all values.
      steps: the steps in traced order.
      inputs: buffers that exist before the first step.
      outputs: buffers that the caller receives.
      aliases: pairs (input, output): the output takes over the memory of the donated input.
      hosted: inputs and outputs that lie in host memory. The device has a copy of such an input from
        its fetch to its last read, and of such an output from its write until it is gone.
      compressed: pairs (buffer, capacity in bytes) of the program that this one was made from: the
        buffers that are compressed here.
      kept: of every pair of loops the values of one iteration that the first stacks for the second,
        by their buffers in that iteration (`core.paired`); None where they stack what they were
        traced to.
      segments: of every pair of loops the lengths of its segments (`core.paired.Division`) and those
        of `kept` that are stacked for one innermost segment at a time, both () of one that is not
        divided; None where none is.
      sub_batch_size: samples of each sub-batch but the last, where they are more than an even
        division has; else None.
      smaller_nbytes: bytes of every buffer in a smaller sub-batch; empty if there is none.
      logit_chunks: in how many chunks of tokens its largest product runs, with what follows it.
      carried: of the convolutions that can carry what stands around them, in their order, the indices
        of those that do.
      summed: how many passes compute several sums each.
      pooled: how many max-pools compute their index, too.
      row_kernels: how many kernels make something of the rows of softmaxes.
      bits: whether masks wait for the backward pass in bits.
      opened: whether what runs several times are the iterations of a loop of the user's
        (`capture.opened_loops`), not sub-batches.
      on_gpu: whether it is compiled for a GPU.
    """

    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    aliases: tuple[tuple[int, int], ...] = ()
    hosted: tuple[int, ...] = ()
    compressed: tuple[tuple[int, int], ...] = ()
    kept: tuple[tuple[int, ...], ...] | None = None
    segments: LoopSegments = None
    logit_chunks: int = 1
    carried: tuple[int, ...] = ()
    summed: int = 0
    pooled: int = 0
    row_kernels: int = 0
    bits: bool = False
    sub_batch_size: int | None = None
    smaller_nbytes: tuple[int, ...] = ()
    opened: bool = False
    on_gpu: bool = False

    @functools.cached_property
    def resident_nbytes(self) -> int:
        """Bytes held throughout: inputs + outputs − aliased, as the compiler counts them."""
        hosted = set(self.hosted)
        size = lambda ids: sum(self.buffers[b].nbytes for b in ids if b not in hosted)
        own = set(self.outputs) - set(self.inputs)
        # an input that is handed back without donation is copied into a buffer of its own
        returned = [b for b in set(self.outputs) & set(self.inputs) if (b, b) not in self.aliases]
        aliased = [o for i, o in self.aliases if i != o]
        return size(set(self.inputs)) + size(own) + size(returned) - size(aliased)

    @functools.cached_property
    def arguments_nbytes(self) -> int:
        """`resident_nbytes` without the step's constants: XLA may keep these with the code, which it
        does not count."""
        constants = (b for b in self.inputs if self.buffers[b].kind is Kind.CONSTANT)
        return self.resident_nbytes - sum(self.buffers[b].nbytes for b in constants)

    @functools.cached_property
    def is_resident(self) -> tuple[bool, ...]:
        """For every buffer, whether it is an input or output, which no plan can drop or park."""
        held = set(self.inputs) | set(self.outputs)
        return tuple(b in held for b in range(len(self.buffers)))

    @functools.cached_property
    def touched(self) -> Touched:
        """The reads and writes of the steps, as arrays."""
        steps = ((s.reads, s.writes, s.in_place, s.workspace) for s in self.steps)
        return Touched.of(steps, [b.nbytes for b in self.buffers], self.is_resident)

    @functools.cached_property
    def uncompressed_nbytes(self) -> tuple[int, ...]:
        """Bytes of every buffer; of a compressed one the bytes of its value before compression."""
        found = [b.nbytes for b in self.buffers]
        for step in self.steps:
            if step.op == COMPRESS:
                [value], [held] = step.reads, step.writes
                found[held] = self.buffers[value].nbytes
        return tuple(found)

    @functools.cached_property
    def sub_batches(self) -> int:
        """The number of sub-batches: how often the steps on samples run."""
        return max((step.times for step in self.steps), default=1)

    @functools.cached_property
    def streamed_in(self) -> frozenset[int]:
        """Hosted inputs that a step reads: each is fetched once a step."""
        return frozenset(b for b in self.hosted if b in self.inputs and self.readers[b])

    @functools.cached_property
    def streamed_out(self) -> frozenset[int]:
        """Hosted outputs that a step makes: each is offloaded once a step."""
        return frozenset(b for b in self.hosted if self.producer[b] >= 0)

    @functools.cached_property
    def is_streamed(self) -> bool:
        """Whether any state comes from host memory, or goes there, as a whole or by slices."""
        return bool(self.hosted) or any(step.fetched or step.returned for step in self.steps)

    @functools.cached_property
    def producer(self) -> tuple[int, ...]:
        """For every buffer, the step that writes it; −1 for inputs."""
        made = [-1] * len(self.buffers)
        for s, step in enumerate(self.steps):
            for b in step.writes:
                made[b] = s
        return tuple(made)

    @functools.cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For every buffer, the steps that read it, in traced order."""
        found: list[list[int]] = [[] for _ in self.buffers]
        for s, step in enumerate(self.steps):
            for b in step.reads:
                found[b].append(s)
        return tuple(map(tuple, found))

    @functools.cached_property
    def overwritten_by(self) -> dict[int, int]:
        """Donated input -> the step that writes the output which takes over its memory.

        An input that the traced program reads after that step is omitted: the compiler copies it.
        """
        found = {}
        for i, o in self.aliases:
            by = self.producer[o]
            if i != o and by >= 0 and all(r <= by for r in self.readers[i]):
                found[i] = by
        return found

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of everything that a plan depends on; source lines and labels are omitted."""
        sliced = [(s, step.fetched, step.returned) for s, step in enumerate(self.steps)]
        sliced = [each for each in sliced if any(each[1:])]
        facts = [
            [(b.nbytes, b.kind.value) for b in self.buffers],
            [(s.reads, s.writes, s.op, s.phase.value, s.pure) for s in self.steps],
            self.inputs,
            self.outputs,
            self.aliases,
            *([self.hosted] if self.hosted else []),
            *([sliced] if sliced else []),
            *([self.sub_batches, self.opened] if self.sub_batches > 1 else []),
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """An idle interval: the gap between two consecutive uses of a buffer (vDNN's reuse distance).

    Attributes:
      buffer: the buffer.
      start, end: positions of the two uses in the order; nothing uses the buffer in between.
    """

    buffer: int
    start: int
    end: int


def idle_intervals(program: Program, order: tuple[int, ...]) -> Iterator[Interval]:
    """Yields every idle interval of the buffers that a plan may free, in order of their end."""
    last_use: dict[int, int] = {}
    for position, s in enumerate(order):
        step = program.steps[s]
        for b in step.reads:
            if not program.is_resident[b]:
                if position - last_use[b] > 1:
                    yield Interval(b, last_use[b], position)
                last_use[b] = position
        for b in step.writes:
            last_use[b] = position
