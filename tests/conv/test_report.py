"""Micro-batches for people: tables and the picture."""

import builtins
import dataclasses

import pytest
from convolutions import MIB, convolution, measured, micro
from rich.console import Console

from vmem_jax.core.convolution import XLA, Configuration, Pass
from vmem_jax.policy.workspace_division import divide, front
from vmem_jax.report.convolutions import configurations_table, plot, totals_table

BOTH = (
    Configuration((micro(200, 0, 5e-3, XLA), micro(56, 0, 2e-3, 4))),
    Configuration((*[micro(60, 90 * MIB, 1e-3, 4)] * 4, micro(16, 0, 0.5e-3, 0))),
)


def shown(table):
    console = Console(width=180)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_table():
    text = shown(configurations_table(convolution(), BOTH, BOTH[1]))
    assert "forward 5×5, 64 → 192 channels" in text
    first, second = (line for line in text.splitlines() if "+" in line)
    assert "200 + 56" in first and "XLA, 4" in first and "0 B" in first and "7.000" in first
    assert "4 × 60 + 16" in second and "4, 0" in second
    assert "90.00 MiB" in second and "4.500" in second


def test_totals():
    kernels = measured()
    chosen = divide([front(k.micros, 256) for k in kernels], 21 * 512 * MIB)
    found = dict(zip((k.convolution for k in kernels), chosen, strict=True))
    lines = shown(totals_table(found)).splitlines()
    rows = [line for line in lines if "channels of" in line]
    assert len(rows) == 21 and "backward filter 3×3, 64 → 64" in rows[0]
    last = next(line for line in lines if "largest and sum" in line)
    assert " 21 " in last and "121.689" in last and "10.42 GiB" in last


def test_totals_of_repeated_layers():
    text = shown(totals_table({convolution(): BOTH[1]}, {convolution(): 3}))
    assert "13.500" in text and "90.00 MiB, 270.00 MiB" in text


@pytest.mark.parametrize("ending, begins", [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_picture(tmp_path, ending, begins):
    pytest.importorskip("matplotlib")
    kernel = measured()[0]
    path = tmp_path / f"front.{ending}"
    plot(kernel.convolution, front(kernel.micros, 256), path)
    assert path.read_bytes().startswith(begins)


def test_picture_of_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    plot(convolution(), (), tmp_path / "nothing.svg")
    assert (tmp_path / "nothing.svg").stat().st_size


def test_without_matplotlib_the_error_says_so(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="needs matplotlib"):
        plot(convolution(), BOTH, tmp_path / "front.svg")


@pytest.mark.parametrize(
    "change, says",
    [
        ({}, "forward 5×5, 64 → 192 channels of 27×27, batch 256, strict float32"),
        ({"which": Pass.BACKWARD_FILTER}, "backward filter"),
        ({"strides": (2, 1)}, "strides 2×1"),
        ({"dilation": (2, 2)}, "dilation 2×2"),
        ({"groups": 64}, "64 groups"),
        ({"dtype": "bfloat16", "strict": False}, "256, bfloat16"),
        ({"channels_last": False}, "channels first"),
    ],
)
def test_a_convolution_in_words(change, says):
    assert says in str(dataclasses.replace(convolution(), **change))
