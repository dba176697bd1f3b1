"""Small networks as the papers draw them: layers with X, Y, dX and dY, as Programs without JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from helpers import BACKWARD, FORWARD, Builder

from vmem_jax.core.convolution import XLA, Configuration, Convolution, Micro, Pass
from vmem_jax.core.costs import Costs, Link
from vmem_jax.core.program import Kind, Program

OPS = {
    "conv": "conv_general_dilated",
    "pool": "reduce_window_max",
    "act": "max",
    "fc": "dot_general",
    "join": "add",
    "other": "op",
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """One layer: what it is, how large its Y is, and what its backward pass reads beside dY.

    Attributes:
      kind: a key of OPS.
      nbytes: of Y; of dY, too.
      sources: the layers whose Y it reads; −1 is the batch. By default the layer before.
      reads: "x", "y", "xy" or "".
      workspace: bytes, of its forward and its backward step.
    """

    kind: str
    nbytes: int
    sources: tuple[int, ...] | None = None
    reads: str = "x"
    workspace: int = 0


@dataclasses.dataclass(frozen=True)
class Network:
    """A Program and where everything is in it: for each layer its steps and its Y.

    Each backward step writes dX for every source but the batch, and the first layer's an output; a
    fork's are added up by a step of their own.
    """

    program: Program
    batch: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    y: tuple[int, ...]

    def costs(
        self, seconds: Mapping[int, tuple[float, float]], rate: float = 1.0, other: float = 1.0
    ) -> Costs:
        """For each layer its seconds forwards and backwards; `rate` of the link in bytes a second."""
        each = [other] * len(self.program.steps)
        for n, (ahead, back) in seconds.items():
            each[self.forward[n]], each[self.backward[n]] = ahead, back
        return Costs("drawn", tuple(each), Link(rate, rate, 2 * rate))


def network(specs: Sequence[Spec], batch: int = 4, visits: Sequence[int] | None = None) -> Network:
    """The network of `specs`, whose layers go backwards in the order of `visits`, by default the
    reverse of the order forwards."""
    b = Builder()
    x0 = b.input(batch, Kind.BATCH)
    sources = [(n - 1,) if s.sources is None else s.sources for n, s in enumerate(specs)]
    y: list[int] = []
    at = lambda m: y[m] if m >= 0 else x0
    forward, backward, owned = [], [0] * len(specs), []
    for n, spec in enumerate(specs):
        weights = [b.input(1)] if spec.kind in ("conv", "fc") else []
        owned.append(weights)
        forward.append(len(b.steps))
        reads = [*map(at, sources[n]), *weights]
        options = {"op": OPS[spec.kind], "fusible": spec.kind in ("act", "join")}
        y.append(b.step(reads, spec.nbytes, workspace=spec.workspace, **options))
    gradient = {len(specs) - 1: b.step([y[-1]], specs[-1].nbytes, BACKWARD)}
    outputs = []
    for n in reversed(range(len(specs))) if visits is None else visits:
        spec = specs[n]
        saved = [*map(at, sources[n])] if "x" in spec.reads else []
        saved += [y[n]] if "y" in spec.reads else []
        saved += owned[n]
        inner = [m for m in sources[n] if m >= 0]
        sizes = [specs[m].nbytes for m in inner] or [1]
        backward[n] = len(b.steps)
        fusible = spec.kind in ("act", "join")
        made = b.step([gradient.pop(n), *saved], sizes, BACKWARD, op=OPS[spec.kind],
                      fusible=fusible, workspace=spec.workspace)  # fmt: skip
        if not inner:
            outputs += made
        for m, own in zip(inner, made, strict=False):
            if m in gradient:
                reads = [gradient[m], own]
                own = b.step(reads, specs[m].nbytes, BACKWARD, fusible=True, in_place=True)
            gradient[m] = own
    return Network(b.program(outputs), x0, tuple(forward), tuple(backward), tuple(y))


def alexnet() -> Network:
    """AlexNet at a batch of 200 in float32, the 23 layers of SuperNeurons' footnote 3.

    A layer's backward pass reads its X and dY; a pool's also its Y, as cuDNN has it. Weights and the
    batch take nothing, as that paper counts tensors of layers only.
    """
    size = lambda channels, side: 4 * 200 * channels * side * side
    a, b, c, d = size(96, 55), size(256, 27), size(384, 13), size(256, 13)
    act, norm = lambda n: Spec("act", n), lambda n: Spec("pool", n)
    pool = lambda n: Spec("pool", n, reads="xy")
    conv, fc = lambda n: Spec("conv", n), lambda n: Spec("fc", 4 * 200 * n)
    specs = [conv(a), act(a), norm(a), pool(size(96, 27))]
    specs += [conv(b), act(b), norm(b), pool(d)]
    specs += [conv(c), act(c), conv(c), act(c), conv(d), act(d), pool(size(256, 6))]
    for _ in range(2):
        specs += [fc(4096), act(4 * 200 * 4096), act(4 * 200 * 4096)]
    specs += [fc(1000), Spec("other", 4 * 200 * 1000, reads="y")]
    return network(specs, batch=0)


def resnet(blocks: Sequence[int], batch: int = 32) -> list[Spec]:
    """A ResNet of bottlenecks at 224 x 224 in float32, with the layers that SuperNeurons counts.

    A block is three times a convolution, its batch norm and an activation, the last of which stands
    behind the join. Weights and the batch take nothing, as in `alexnet`.
    """
    size = lambda channels, side: 4 * batch * channels * side * side
    specs: list[Spec] = []

    def layer(kind: str, nbytes: int, *sources: int, reads: str = "x") -> int:
        specs.append(Spec(kind, nbytes, sources or None, reads))
        return len(specs) - 1

    stem = size(64, 112)
    layer("conv", stem)
    layer("pool", stem)  # a batch norm reads what a pool without its Y does
    layer("act", stem)
    x = layer("pool", size(64, 56), reads="xy")
    for stage, count in enumerate(blocks):
        for block in range(count):
            shrinks = stage > 0 and block == 0
            side = 56 // 2**stage
            narrow, wide = 64 * 2**stage, 256 * 2**stage
            before = x
            for n, channels in enumerate((narrow, narrow, wide)):
                here = size(channels, side * 2 if shrinks and n == 0 else side)
                x = layer("conv", here, x)
                x = layer("pool", here)
                if n < 2:
                    x = layer("act", here)
            if block == 0:
                layer("conv", size(wide, side), before)
                before = layer("pool", size(wide, side))
            x = layer("join", size(wide, side), x, before, reads="")
            x = layer("act", size(wide, side))
    layer("pool", 4 * batch * 2048)
    layer("fc", 4 * batch * 1000)
    layer("other", 4 * batch * 1000, reads="y")
    return specs


ALGORITHMS = tuple(
    Configuration((Micro(8, engine, (), workspace, seconds),))
    for engine, workspace, seconds in ((XLA, 30, 1.0), (1, 10, 2.0), (2, 0, 4.0))
)
"""The fastest, which is XLA's own, one in between, and one without a workspace."""


def with_algorithms(program: Program, costs: Costs) -> tuple[Program, Costs]:
    """The forward convolutions of `program` with the choice of ALGORITHMS, each the same one."""
    convolution = Convolution(
        Pass.FORWARD, "float32", False, 8, 4, 4, (5, 5), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)
    )
    steps = list(program.steps)
    choices = {}
    for s, step in enumerate(steps):
        if step.op == OPS["conv"] and step.phase is FORWARD:
            steps[s] = dataclasses.replace(step, convolution=convolution)
            choices[s] = ALGORITHMS
    program = dataclasses.replace(program, steps=tuple(steps))
    return program, dataclasses.replace(costs, convolutions=choices)


CONV, POOL, ACT, FC = Spec("conv", 8), Spec("pool", 4), Spec("act", 8), Spec("fc", 2)

FORK = network(
    [Spec("conv", 8), *(Spec("conv", 8, (s,)) for s in (0, 0, 2)), Spec("other", 8, (1, 3))]
)
"""vDNN's Figure 3: layer 1 forks into 2 and 3; 4 follows 3; 2 and 4 are joined into 5."""
