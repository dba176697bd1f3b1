"""profile: what was measured, for people, as tables."""

from __future__ import annotations

from rich.table import Table

from vmem_jax.core.costs import Costs, Source
from vmem_jax.core.machine import Machine
from vmem_jax.core.program import Program
from vmem_jax.errors import show_nbytes


def machine_table(machine: Machine) -> Table:
    """The rates of `machine`."""
    table = Table("what", "rate", title=f"{machine.name}, {show_nbytes(machine.memory)}")
    table.columns[1].justify = "right"
    for what, rates in (("products", machine.flops), ("convolutions", machine.convolutions)):
        for dtype, rate in sorted(rates.items()):
            name = dtype or "others, strict float32"
            table.add_row(f"{what}, {name}", f"{rate / 1e12:.3g} TFLOP/s")
    table.add_row("device memory, read and written", _rate(machine.bandwidth))
    table.add_row("device to host", _rate(machine.link_out))
    table.add_row("host to device", _rate(machine.link_in))
    table.add_row("both at once, in total", _rate(machine.link_both))
    table.add_row("a step beside a copy, later", f"{machine.link_delay * 1e6:.3g} µs")
    table.add_row("starting a copy of a slice", f"{machine.slice_start * 1e6:.3g} µs")
    table.add_row("pinning host memory", f"{machine.pinning * 2**30:.3g} s/GiB")
    table.add_row("a launch", f"{machine.launch * 1e6:.3g} µs")
    return table


def costs_table(name: str, program: Program, costs: Costs) -> Table:
    """The predicted seconds of a training step, by operation and by where they come from."""
    table = Table("operation", "steps", "ms", *(s.value for s in Source), title=name)
    for column in table.columns[1:]:
        column.justify = "right"
    sources = costs.sources or (Source.ROOFLINE,) * len(costs.seconds)
    rows: dict[str, list[int]] = {}
    for s, step in enumerate(program.steps):
        rows.setdefault(step.op, []).append(s)
    total = lambda steps: sum(costs.seconds[s] for s in steps)
    for op, steps in sorted(rows.items(), key=lambda row: -total(row[1])):
        counts = [sum(sources[s] is source for s in steps) for source in Source]
        table.add_row(
            op, str(len(steps)), f"{total(steps) * 1e3:.3f}", *(str(c or "") for c in counts)
        )
    return table


def _rate(nbytes: float) -> str:
    return f"{nbytes / 1e9:.4g} GB/s"
