"""Classes of kernels: what a traced step's milliseconds and bytes are counted with."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from vmem_jax.compiler import hlo

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import kernel_classes as classes
import kernel_table

MIB = 2**20
TEXT = (Path(__file__).parent / "data" / "small_step.hlo").read_text()
FPROP = "void xmma::kernel<implicit_gemm::fprop::warp_specialized>"


def row(op, kernel, us, times=1.0):
    return {"op": op, "kernel": kernel, "times": times, "us": us}


KERNELS = [
    row("cudnn-conv.1", "cutlass_fprop", 90.0),
    row("cudnn-conv.1", "Memset 3", 10.0),
    row("cudnn-conv.2", "cutlass_fprop", 70.0),
    row("input_reduce_fusion.1", "input_reduce_fusion", 8.0),
    row("command_buffer_7", "loop_tanh_fusion_2", 6.0),
    row("command_buffer_7", FPROP, 40.0),
    row("command_buffer_7", "Memset 3", 2.0, 3.0),
    row("command_buffer_7", "kernel", 11.0),
    row("command_buffer_9", "kernel__1", 12.0),
    row("command_buffer_9", "kernel__2", 5.0),
    row("copy.3", "MemcpyD2D", 4.0),
    row("loop_subtract_fusion", "loop_subtract_fusion", 3.0),
    row("loop_stack_fusion", "loop_stack_fusion", 16.0, 8.0),
    row("ffi_call.9", "MemcpyD2H", 20.0),
    row("command_buffer_9", "nobody_knows_it", 1.0),
]
BUSY = {"span": 300.0, "busy": 280.0, "sum": 298.0}
FOUND = {r.name: r for r in kernel_table.rows(TEXT, KERNELS, BUSY, 1e12)}


@pytest.mark.parametrize(
    "name, us, launches, nbytes",
    [
        (classes.FORWARDS, 100, 2, 3 * MIB),  # its workspace does not count
        (classes.TO_INPUTS, 70, 1, 3 * MIB),  # a forward convolution of the backward pass
        (classes.CARRYING, 40, 1, 3 * MIB + 8192),  # in a command buffer, by its kernel's name
        (classes.PALLAS, 23, 2, 5 * MIB),
        (classes.REDUCING, 8, 1, MIB + 4096),
        (classes.ELEMENTWISE, 6, 1, 3 * MIB),  # of 4 MiB a slice
        (classes.COPIES, 20, 9, 2 * MIB + 8 * (2 * MIB + 4)),  # of stacks their slices
        (classes.UPDATES, 3, 1, 3 * MIB),
        (classes.HOST, 20, 1, 0),
        (kernel_table.ZEROS, 2, 3, 0),
        (kernel_table.NOT_ASSIGNED, 6, 2, 0),  # a third Pallas kernel is not in the text
    ],
)
def test_a_class_has_its_time_and_bytes(name, us, launches, nbytes):
    row = FOUND[name]
    assert (row.ms, row.launches, row.nbytes) == (pytest.approx(us / 1e3), launches, nbytes)
    assert row.share == (pytest.approx(nbytes / (us / 1e6) / 1e12) if nbytes else None)


def test_no_kernel_is_dropped_and_all_rows_are_the_step():
    apart = {kernel_table.OVERLAP, kernel_table.IDLE}
    kernels = sum(row.ms for row in FOUND.values() if row.name not in apart)
    assert kernels == pytest.approx(BUSY["sum"] / 1e3)
    assert FOUND[kernel_table.OVERLAP].ms == pytest.approx(-0.018)
    assert FOUND[kernel_table.IDLE].ms == pytest.approx(0.020)
    assert sum(row.ms for row in FOUND.values()) == pytest.approx(BUSY["span"] / 1e3)


def test_equal_pallas_calls_share_a_kernel():
    text = TEXT.replace('ir = "two"', 'ir = "one"')
    shared = kernel_table.pallas_kernels(classes.launched(text))
    assert shared == {"kernel": ["pallas_call.1", "pallas_call.2"]}


def test_a_table_has_what_a_step_takes_over_the_first():
    first = [kernel_table.Row(classes.REDUCING, 1.0, 1, MIB, 0.5)]
    table = kernel_table.table("half", [*FOUND.values()], first)
    more = dict(zip(table.columns[0]._cells, table.columns[3]._cells, strict=True))
    assert more[classes.REDUCING] == "-0.99"
    assert more[classes.PALLAS] == "+0.02"
    assert more["the step"] == "-0.70"


def test_the_command_writes_rows(tmp_path, monkeypatch, capsys):
    for name in ("net_plain", "net_0.5"):
        (tmp_path / f"{name}.hlo").write_text(TEXT)
        (tmp_path / f"{name}.kernels.json").write_text(json.dumps(KERNELS))
        (tmp_path / f"{name}.busy.json").write_text(json.dumps(BUSY))
    out = tmp_path / "rows.jsonl"
    flags = types.SimpleNamespace(card="h100", out=str(out), commit="abc", jax="1.2")
    monkeypatch.setattr(kernel_table, "FLAGS", flags)
    kernel_table.main(["", str(tmp_path / "net_plain"), str(tmp_path / "net_0.5")])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["step"] for row in rows] == ["net_plain"] * 13 + ["net_0.5"] * 13
    assert rows[0]["class"] == classes.FORWARDS and rows[0]["nbytes"] == 3 * MIB
    assert rows[0]["share"] == pytest.approx(3 * MIB / 100e-6 / 2.95e12, abs=1e-4)
    assert rows[0]["card"] == "NVIDIA H100 80GB HBM3" and rows[0]["commit"] == "abc"
    assert "more ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    "shape, nbytes",
    [
        ("bf16[2,3]{1,0}", 12),
        ("(f32[4]{0}, pred[3]{0}, s4[3]{0})", 21),
        ("f8e4m3fn[5]{0}", 5),
        ("c64[]", 8),
        ("token[]", 0),
        ("(f32[2]{0}, /*index=5*/u8[0]{0})", 8),
    ],
)
def test_bytes_of_shapes(shape, nbytes):
    assert hlo.nbytes(shape) == nbytes
