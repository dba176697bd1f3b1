"""Convolutions for tests: real measurements, and small random ones."""

import dataclasses
from pathlib import Path

from hypothesis import strategies as st

from vmem_jax.core.convolution import Convolution, Epilogue, Micro, Pass

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One pass of one layer, with every algorithm that was measured."""

    convolution: Convolution
    micros: tuple[Micro, ...]


_LAYERS = {  # channels in, size, channels out, kernel, stride, padding
    "alex2": (64, 27, 192, 5, 1, 2),
    "alex1": (3, 224, 64, 11, 4, 2),
    "vgg1_2": (64, 224, 64, 3, 1, 1),
    "vgg3_2": (256, 56, 256, 3, 1, 1),
    "vgg4_2": (512, 28, 512, 3, 1, 1),
    "vgg5_2": (512, 14, 512, 3, 1, 1),
    "incep5x5": (96, 35, 96, 5, 1, 2),
}


def convolution(batch=256, which=Pass.FORWARD, layer="alex2") -> Convolution:
    c, size, k, kernel, stride, padding = _LAYERS[layer]
    return Convolution(
        which=which,
        dtype="float32",
        strict=True,
        batch=batch,
        features_in=c,
        features_out=k,
        size=(size, size),
        kernel=(kernel, kernel),
        strides=(stride, stride),
        padding=((padding, padding),) * 2,
        dilation=(1, 1),
        channels_last=False,
    )


def of_a_residual_network(
    features: tuple[int, int],
    kernel: int,
    stride: int,
    size: tuple[int, int],
    batch: int,
    which: Pass,
    dtype: str = "float16",
    prologue: bool = True,
) -> Convolution:
    """One that normalises its operand where there is a prologue, and forwards adds up its result."""
    return Convolution(
        which=which,
        dtype=dtype,
        strict=False,
        batch=batch,
        features_in=features[0],
        features_out=features[1],
        size=size,
        kernel=(kernel, kernel),
        strides=(stride, stride),
        padding=((kernel // 2, kernel // 2),) * 2,
        dilation=(1, 1),
        epilogue=Epilogue.SUMS if which == Pass.FORWARD else Epilogue.NONE,
        prologue=prologue,
    )


def measured() -> list[Kernel]:
    """The kernels of data/cudnn_legacy_h200.txt, a batch of 256 each."""
    micros: dict[tuple[str, Pass], list[Micro]] = {}
    for line in (Path(__file__).parent / "data/cudnn_legacy_h200.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        layer, which, batch, *algorithms = line.split()
        found = micros.setdefault((layer, Pass(which.replace("_", " "))), [])
        for text in algorithms:
            algorithm, ms, mib = text.split(":")
            workspace, seconds = round(float(mib) * MIB), float(ms) / 1e3
            found.append(Micro(int(batch), int(algorithm), (), workspace, seconds))
    return [
        Kernel(convolution(256, which, layer), tuple(found))
        for (layer, which), found in micros.items()
    ]


def micro(batch, workspace, seconds, engine=0) -> Micro:
    return Micro(batch, engine, (), workspace, seconds)


@st.composite
def micros(draw, batch) -> list[Micro]:
    """A few micro-configurations, often of equal sizes, times and workspaces; seconds add exactly."""
    one = st.builds(
        micro, st.integers(1, batch + 1), st.integers(0, 5), st.integers(1, 12).map(float)
    )
    return draw(st.lists(one, max_size=9))


def all_configurations(micros, batch):
    """Every way to make up `batch`, as tuples of micro-configurations, by trying everything."""
    micros = sorted(set(micros), key=repr)

    def parts(rest, at):
        if rest == 0:
            yield ()
        for i in range(at, len(micros)):
            if micros[i].batch <= rest:
                for more in parts(rest - micros[i].batch, i):
                    yield (micros[i], *more)

    return parts(batch, 0)
